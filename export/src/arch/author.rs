//! What every architecture authors with: a builder, the checkpoint's weights and the precision to store them in.

use crate::{
    onnx::{Attribute, Builder, DType, Model, Tensor, ValueId},
    quant::{self, BlockFormat, F16_MAX, QuantError},
    recipe::{Precision, WeightFormat},
    weights::{Checkpoint, WeightsError},
};

/// Why a weight could not be put into a graph.
#[derive(Debug, thiserror::Error)]
pub enum AuthorError {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("{tensor}: {source}")]
    Quant { tensor: String, source: QuantError },
}

/// A linear layer of the checkpoint: `weight` is [outputs, inputs], `bias` [outputs].
pub struct Linear<'a> {
    pub weight: &'a str,
    pub bias: Option<&'a str>,
    pub inputs: usize,
    pub outputs: usize,
}

/// One graph under construction over one component's checkpoint.
pub struct Author<'a> {
    pub graph: Builder,
    weights: &'a Checkpoint,
    pub precision: &'a Precision,
}

impl<'a> Author<'a> {
    pub fn new(name: &str, weights: &'a Checkpoint, precision: &'a Precision) -> Author<'a> {
        Author { graph: Builder::new(name), weights, precision }
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
        if let Some(id) = self.graph.find(name) {
            return Ok(id);
        }
        let tensor = self.tensor(name, shape, dtype)?;
        Ok(self.graph.constant(name, tensor))
    }

    /// A weight as a tensor of the given floating-point type, not yet in the graph.
    pub fn tensor(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor, AuthorError> {
        in_tensor(name, quant::cast(self.weights.tensor(name, shape)?, dtype))
    }

    /// `x W^T + b` with the weight stored in the format that the precision's rules give it. The result has the type
    /// of `x`.
    pub fn linear(&mut self, x: ValueId, layer: &Linear<'_>) -> Result<ValueId, AuthorError> {
        let y = match self.precision.format_of(layer.weight) {
            WeightFormat::Q8 => self.quantized_matmul(x, layer, 8)?,
            WeightFormat::Q4 => self.quantized_matmul(x, layer, 4)?,
            WeightFormat::F16 => self.plain_matmul(x, layer, DType::F16)?,
            WeightFormat::F32 => self.plain_matmul(x, layer, DType::F32)?,
        };
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

    /// MatMul with the weight transposed to [inputs, outputs] when it is written. Where the stored type differs from
    /// that of `x`, the product is computed in f32.
    fn plain_matmul(
        &mut self,
        x: ValueId,
        layer: &Linear<'_>,
        stored: DType,
    ) -> Result<ValueId, AuthorError> {
        let tensor = self.tensor(layer.weight, &[layer.outputs, layer.inputs], stored)?;
        let tensor = in_tensor(layer.weight, quant::transpose(tensor))?;
        let weight = self.graph.constant(layer.weight, tensor);
        let like = self.graph.dtype(x);
        let math = if stored == like { like } else { DType::F32 };
        let (x, weight) = (self.graph.cast(x, math), self.graph.cast(weight, math));
        let y = self.graph.matmul(x, weight);
        Ok(self.graph.cast(y, like))
    }

    fn quantized_matmul(&mut self, x: ValueId, layer: &Linear<'_>, bits: u8) -> Result<ValueId, AuthorError> {
        let tensor = self.weights.tensor(layer.weight, &[layer.outputs, layer.inputs])?;
        let format = BlockFormat {
            bits,
            block: self.precision.block,
            symmetric: self.precision.symmetric,
            scale: self.graph.dtype(x),
        };
        let names = ["codes", "scales", "zero_points"];
        let parts = in_tensor(layer.weight, quant::quantized_initializers(tensor, &format))?;
        let mut operands = vec![x];
        for (part, tensor) in names.iter().zip(parts) {
            operands.push(self.graph.constant(&format!("{}.{part}", layer.weight), tensor));
        }
        let attributes = [
            ("K", Attribute::Int(layer.inputs as i64)),
            ("N", Attribute::Int(layer.outputs as i64)),
            ("bits", Attribute::Int(i64::from(bits))),
            ("block_size", Attribute::Int(format.block as i64)),
            ("accuracy_level", Attribute::Int(self.precision.accuracy_level)),
        ];
        Ok(self.graph.contrib("MatMulNBits", &operands, &attributes))
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

fn in_tensor<T>(tensor: &str, result: Result<T, QuantError>) -> Result<T, AuthorError> {
    result.map_err(|source| AuthorError::Quant { tensor: tensor.to_owned(), source })
}
