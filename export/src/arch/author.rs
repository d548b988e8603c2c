//! What every architecture authors with: a builder, the checkpoint's weights and the precision to store them in.

use std::ops::Range;

use crate::{
    onnx::{Attribute, Builder, DType, Model, Tensor, ValueId},
    quant::{self, BlockFormat, F16_MAX, Fit, Fitting, QuantError},
    recipe::{Precision, WeightFormat},
    weights::{CalibrationError, Checkpoint, WeightsError},
};

/// Why a weight could not be put into a graph.
#[derive(Debug, thiserror::Error)]
pub enum AuthorError {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("{tensor}: {source}")]
    Quant { tensor: String, source: QuantError },
    #[error(transparent)]
    Calibration(#[from] CalibrationError),
    #[error(
        "{weight}: fit = \"feedback\" needs statistics of its inputs; make them with `viaduct calibrate F32_BUNDLE -o FILE` and pass --calibration FILE"
    )]
    NoStatistics { weight: String },
}

/// A linear layer of the checkpoint: `weight` is [outputs, inputs], `bias` [outputs].
pub struct Linear<'a> {
    pub weight: &'a str,
    pub bias: Option<&'a str>,
    pub inputs: usize,
    pub outputs: usize,
}

/// A weight [outputs, inputs] that a value is to be multiplied with.
struct Matrix {
    name: String,
    tensor: Tensor,
    format: WeightFormat,
}

/// One graph under construction over one component's checkpoint.
pub struct Author<'a> {
    pub graph: Builder,
    weights: &'a Checkpoint,
    pub precision: &'a Precision,
    lender: Option<&'a Model>,
    /// A value of every run, where weights are widened when the graph runs.
    run_value: Option<ValueId>,
    /// An f16 1 that depends on it.
    run_one: Option<ValueId>,
}

impl<'a> Author<'a> {
    pub fn new(name: &str, weights: &'a Checkpoint, precision: &'a Precision) -> Author<'a> {
        Author { graph: Builder::new(name), weights, precision, lender: None, run_value: None, run_one: None }
    }

    /// Takes weights that a graph has which was authored from the same weights with the same precision, so that
    /// they are stored once.
    pub fn sharing(self, lender: Option<&'a Model>) -> Author<'a> {
        Author { lender, ..self }
    }

    /// From here on, f16 weights of f32 products are widened one by one when the graph runs. A cast of a constant is
    /// computed when a session is made, which then holds all of them in f32. `value` is an f32 matrix of the graph that is
    /// finite in every run.
    pub fn widen_when_run(&mut self, value: ValueId) {
        self.run_value = Some(value);
    }

    pub fn finish(self) -> Model {
        self.graph.finish()
    }

    /// The type in which the graph computes outside its f32 islands.
    pub fn compute(&self) -> DType {
        self.precision.compute.dtype()
    }

    /// A small weight (norm, bias) as a constant of the given type.
    pub fn weight(&mut self, name: &str, shape: &[usize], dtype: DType) -> Result<ValueId, AuthorError> {
        if let Some(id) = self.existing(name) {
            return Ok(id);
        }
        let tensor = self.tensor(name, shape, dtype)?;
        Ok(self.graph.constant(name, tensor))
    }

    /// A constant that this graph has already, or that it takes from the one that lends.
    fn existing(&mut self, name: &str) -> Option<ValueId> {
        if let Some(id) = self.graph.find(name) {
            return Some(id);
        }
        let lender = &self.lender?.graph;
        let tensor = lender[lender.find(name)?].constant.clone()?;
        Some(self.graph.constant(name, tensor))
    }

    /// A weight as a tensor of the given floating-point type, not yet in the graph.
    pub fn tensor(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor, AuthorError> {
        in_tensor(name, quant::cast(self.weights.tensor(name, shape)?, dtype))
    }

    /// `x W^T + b` with the weight stored in the format that the precision's rules give it. The result has the type
    /// of `x`.
    pub fn linear(&mut self, x: ValueId, layer: &Linear<'_>) -> Result<ValueId, AuthorError> {
        let weight = self.matrix(layer.weight, layer.inputs, layer.outputs)?;
        let y = self.multiply(x, weight)?;
        let Some(bias) = layer.bias else { return Ok(y) };
        let bias = self.weight(bias, &[layer.outputs], self.graph.dtype(y))?;
        Ok(self.graph.add(y, bias))
    }

    /// [`Author::linear`] without a bias: the weight named `weight` is [outputs, inputs].
    pub fn project(
        &mut self,
        x: ValueId,
        weight: &str,
        inputs: usize,
        outputs: usize,
    ) -> Result<ValueId, AuthorError> {
        self.linear(x, &Linear { weight, bias: None, inputs, outputs })
    }

    /// [`Author::project`] of two values that lie beside each other in the columns of the input, which is never put
    /// together: the sum of their products with their columns of the weight. The first is kept finite, so that the sum
    /// cannot be infinity less infinity. Each comes with its width.
    pub fn project_both(
        &mut self,
        [(first, width), (second, rest)]: [(ValueId, usize); 2],
        weight: &str,
        outputs: usize,
    ) -> Result<ValueId, AuthorError> {
        let inputs = width + rest;
        let mut product = |x, columns: Range<usize>| {
            let mut part = self.matrix(weight, inputs, outputs)?;
            part.name = format!("{weight}{PART}{}:{}]", columns.start, columns.end);
            part.tensor = in_tensor(weight, quant::slice(part.tensor, 1, columns))?;
            self.multiply(x, part)
        };
        let first = product(first, 0..width)?;
        let second = product(second, width..inputs)?;
        let first = if self.graph.dtype(first) == DType::F16 { self.clamp(first) } else { first };
        Ok(self.graph.add(first, second))
    }

    /// A weight of the checkpoint in the format that the precision's rules give it.
    fn matrix(&self, weight: &str, inputs: usize, outputs: usize) -> Result<Matrix, AuthorError> {
        let tensor = self.weights.tensor(weight, &[outputs, inputs])?;
        Ok(Matrix { name: weight.to_owned(), tensor, format: self.precision.format_of(weight) })
    }

    fn multiply(&mut self, x: ValueId, weight: Matrix) -> Result<ValueId, AuthorError> {
        match weight.format {
            WeightFormat::Q8 => self.quantized_matmul(x, weight, 8),
            WeightFormat::Q4 => self.quantized_matmul(x, weight, 4),
            WeightFormat::F16 => self.plain_matmul(x, weight, DType::F16),
            WeightFormat::F32 => self.plain_matmul(x, weight, DType::F32),
        }
    }

    /// MatMul with the weight transposed to [inputs, outputs] when it is written. Where the stored type differs from
    /// that of `x`, the product is computed in f32.
    fn plain_matmul(&mut self, x: ValueId, weight: Matrix, stored: DType) -> Result<ValueId, AuthorError> {
        let weight = match self.existing(&weight.name) {
            Some(id) => id,
            None => {
                let tensor = in_tensor(&weight.name, quant::cast(weight.tensor, stored))?;
                let tensor = in_tensor(&weight.name, quant::transpose(tensor))?;
                self.graph.constant(&weight.name, tensor)
            }
        };
        let like = self.graph.dtype(x);
        let math = if stored == like { like } else { DType::F32 };
        let weight = if stored == math { weight } else { self.unfolded(weight) };
        let (x, weight) = (self.graph.cast(x, math), self.graph.cast(weight, math));
        let y = self.graph.matmul(x, weight);
        Ok(self.graph.cast(y, like))
    }

    /// An f16 weight times 1, if weights are to be widened when the graph runs: what depends on a run is not folded.
    fn unfolded(&mut self, weight: ValueId) -> ValueId {
        let Some(value) = self.run_value.filter(|_| self.graph.dtype(weight) == DType::F16) else {
            return weight;
        };
        let one = self.run_one.unwrap_or_else(|| {
            let corner = self.graph.slice(value, 0, 0, 1);
            let corner = self.graph.slice(corner, 1, 0, 1);
            let [nothing, one] = [0.0, 1.0].map(|number| self.graph.scalar(DType::F32, number));
            let zero = self.graph.mul(corner, nothing);
            let one = self.graph.add(zero, one);
            self.graph.cast(one, DType::F16)
        });
        self.run_one = Some(one);
        self.graph.mul(weight, one)
    }

    fn quantized_matmul(&mut self, x: ValueId, weight: Matrix, bits: u8) -> Result<ValueId, AuthorError> {
        let [outputs, inputs] = weight.tensor.shape[..] else {
            let (found, expected) = (weight.tensor.shape, "a matrix");
            return Err(AuthorError::Quant {
                tensor: weight.name,
                source: QuantError::Shape { found, expected },
            });
        };
        let format = BlockFormat {
            bits,
            block: self.precision.block,
            symmetric: self.precision.symmetric,
            scale: self.graph.dtype(x),
        };
        let names = ["codes", "scales", "zero_points"].map(|part| format!("{}.{part}", weight.name));
        let mut operands = vec![x];
        operands.extend(names.iter().map_while(|name| self.existing(name)));
        if operands.len() == 1 {
            let fitting = self.fitting(&weight.name, inputs)?;
            let parts = quant::quantized_initializers(weight.tensor, &format, fitting);
            let parts = in_tensor(&weight.name, parts)?;
            operands.extend(names.iter().zip(parts).map(|(name, part)| self.graph.constant(name, part)));
        }
        let attributes = [
            ("K", Attribute::Int(inputs as i64)),
            ("N", Attribute::Int(outputs as i64)),
            ("bits", Attribute::Int(i64::from(bits))),
            ("block_size", Attribute::Int(format.block as i64)),
            ("accuracy_level", Attribute::Int(self.precision.accuracy_level)),
        ];
        Ok(self.graph.contrib("MatMulNBits", &operands, &attributes))
    }

    /// How a weight is fitted, with the statistics of its inputs.
    fn fitting(&self, weight: &str, inputs: usize) -> Result<Fitting, AuthorError> {
        Ok(match self.precision.fit {
            Fit::Nearest => Fitting::Nearest,
            Fit::Search => Fitting::Search(self.weights.inputs_of(weight, inputs)?),
            Fit::Feedback => match self.weights.inputs_of(weight, inputs)? {
                Some(gram) => Fitting::Feedback(gram),
                // Plans are made without weights, too.
                None if self.weights.is_described() => Fitting::Nearest,
                None => return Err(AuthorError::NoStatistics { weight: weight.to_owned() }),
            },
        })
    }

    /// To the compute type. An f16 cast is clamped first: what passes 65504 must saturate, not become infinite.
    pub fn to_compute(&mut self, x: ValueId) -> ValueId {
        if self.compute() == DType::F16 && self.graph.dtype(x) == DType::F32 {
            let clamped = self.clamp(x);
            return self.graph.cast(clamped, DType::F16);
        }
        self.graph.cast(x, self.compute())
    }

    pub fn to_f32(&mut self, x: ValueId) -> ValueId {
        self.graph.cast(x, DType::F32)
    }

    /// Limits a value to the finite range of f16.
    pub fn clamp(&mut self, x: ValueId) -> ValueId {
        let dtype = self.graph.dtype(x);
        let (low, high) = (self.graph.scalar(dtype, -F16_MAX), self.graph.scalar(dtype, F16_MAX));
        self.graph.op("Clip", &[x, low, high], &[])
    }
}

/// Between a weight's name and the columns that a part of it has.
const PART: &str = "[:,";

/// The weight of the checkpoint that a part belongs to, by the part's name.
pub fn whole_weight(part: &str) -> &str {
    part.split_once(PART).map_or(part, |(weight, _)| weight)
}

/// Says which weight could not be converted.
pub fn in_tensor<T>(tensor: &str, result: Result<T, QuantError>) -> Result<T, AuthorError> {
    result.map_err(|source| AuthorError::Quant { tensor: tensor.to_owned(), source })
}
