//! Expressions of constants, computed when they are written: bit for bit what ONNX Runtime's CPU provider makes of them.
//!
//! Elements are moved, converted between floating-point types, and combined by the operations that IEEE 754 rounds in
//! one way only (+, -, *, /, square root). f16 is computed in f32 and rounded once, as the CPU provider does.

use std::sync::Arc;

use half::{bf16, f16};

use crate::onnx::{Bytes, Compute, ComputeError, DType, Tensor, tensor::widen};

/// What one operation does with its operands.
#[derive(Clone, Debug)]
pub enum Action {
    /// The same elements under another shape.
    Relabel,
    /// Element `at` of the result is the operand's at `offset + sum(at * strides)`, in elements.
    Rearrange {
        offset: usize,
        strides: Vec<isize>,
    },
    /// Joins the operands: each is `rows` runs of so many elements.
    Concat {
        rows: usize,
        runs: Vec<usize>,
    },
    /// Runs of `run` elements of each of `rows` rows of `len` runs, by number.
    Gather {
        rows: usize,
        len: usize,
        run: usize,
        places: Vec<usize>,
    },
    /// Another floating-point type.
    Cast,
    Map(fn(f32) -> f32),
    Zip(fn(f32, f32) -> f32),
}

/// An operand: a constant of the expression, or the result of an operation before.
#[derive(Clone, Copy, Debug)]
pub enum Operand {
    Leaf(usize),
    Result(usize),
}

#[derive(Clone, Debug)]
pub struct Operation {
    pub action: Action,
    pub operands: Vec<Operand>,
    pub dtype: DType,
    pub shape: Vec<usize>,
}

/// Operations in order; the last one's result is the expression's.
#[derive(Debug)]
pub struct Expression {
    pub leaves: Vec<Tensor>,
    pub operations: Vec<Operation>,
}

impl Expression {
    /// The result as a tensor that is computed when it is written; `None` for an expression without operations.
    pub fn tensor(self) -> Option<Tensor> {
        let last = self.operations.last()?;
        let (dtype, shape) = (last.dtype, last.shape.clone());
        let len = dtype.byte_len(&shape)?;
        Some(Tensor { dtype, shape, bytes: Bytes::Computed { source: Arc::new(self), part: 0, len } })
    }

    /// Whether only the shape changes.
    pub fn relabels(&self) -> bool {
        self.operations.iter().all(|operation| matches!(operation.action, Action::Relabel))
    }

    /// Bytes of all that is in memory while it is computed, at the most.
    pub fn bytes(&self) -> usize {
        let leaves = self.leaves.iter().map(|leaf| leaf.bytes.len());
        let results =
            self.operations.iter().filter_map(|operation| operation.dtype.byte_len(&operation.shape));
        leaves.chain(results).fold(0, usize::saturating_add)
    }

    fn operand(&self, results: &mut [Vec<u8>], operand: Operand) -> Result<Contents, ComputeError> {
        let (dtype, shape, bytes) = match operand {
            Operand::Leaf(at) => {
                let leaf = self.leaves.get(at).ok_or("an operand is missing")?;
                (leaf.dtype, &leaf.shape, leaf.bytes.read()?.into_owned())
            }
            Operand::Result(at) => {
                let operation = self.operations.get(at).ok_or("an operand is missing")?;
                let bytes = std::mem::take(results.get_mut(at).ok_or("an operand is missing")?);
                (operation.dtype, &operation.shape, bytes)
            }
        };
        if dtype.byte_len(shape) != Some(bytes.len()) {
            return Err(format!(
                "a constant of {} bytes has type {dtype:?} and shape {shape:?}",
                bytes.len()
            )
            .into());
        }
        Ok(Contents { dtype, shape: shape.clone(), bytes })
    }
}

impl Compute for Expression {
    /// Every result is used once, so that it goes with its use.
    fn compute(&self) -> Result<Vec<Vec<u8>>, ComputeError> {
        let mut results: Vec<Vec<u8>> = Vec::with_capacity(self.operations.len());
        for operation in &self.operations {
            let operands = operation.operands.iter().map(|operand| self.operand(&mut results, *operand));
            let operands: Vec<Contents> = operands.collect::<Result<_, _>>()?;
            results.push(operation.run(operands)?);
        }
        Ok(results.pop().into_iter().collect())
    }

    fn operands(&self) -> Vec<&Tensor> {
        self.leaves.iter().collect()
    }

    fn reads(&self) -> Option<usize> {
        self.leaves.iter().try_fold(0usize, |sum, leaf| sum.checked_add(leaf.bytes.reads()?))
    }
}

/// An operand in memory.
struct Contents {
    dtype: DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Contents {
    /// The values as f32, stretched to the shape.
    fn floats(&self, shape: &[usize]) -> Result<Vec<f32>, ComputeError> {
        let bytes = if self.shape == shape {
            widen(self.dtype, &self.bytes)
        } else {
            let strides = stretch(&self.shape, shape).ok_or("operands do not broadcast")?;
            widen(self.dtype, &rearrange(&self.bytes, self.size()?, shape, 0, &strides)?)
        };
        Ok(bytes.ok_or("an operand that is not of a floating-point type")?)
    }

    fn size(&self) -> Result<usize, ComputeError> {
        Ok(self.dtype.size().ok_or("an operand whose elements are not whole bytes")?)
    }
}

impl Operation {
    fn run(&self, mut operands: Vec<Contents>) -> Result<Vec<u8>, ComputeError> {
        let second = if operands.len() == 2 { operands.pop() } else { None };
        if let Action::Concat { rows, runs } = &self.action {
            operands.extend(second);
            return concat(&operands, *rows, runs);
        }
        let first = operands.pop().ok_or("an operand is missing")?;
        match &self.action {
            Action::Relabel => Ok(first.bytes),
            Action::Rearrange { offset, strides } => {
                rearrange(&first.bytes, first.size()?, &self.shape, *offset, strides)
            }
            Action::Gather { rows, len, run, places } => gather(&first, *rows, *len, *run, places),
            Action::Cast => narrow(self.dtype, &first.floats(&first.shape)?),
            Action::Map(map) => {
                let values: Vec<f32> = first.floats(&self.shape)?.into_iter().map(map).collect();
                narrow(self.dtype, &values)
            }
            Action::Zip(zip) => {
                let second = second.ok_or("an operand is missing")?.floats(&self.shape)?;
                let pairs = first.floats(&self.shape)?.into_iter().zip(second);
                narrow(self.dtype, &pairs.map(|(a, b)| zip(a, b)).collect::<Vec<f32>>())
            }
            Action::Concat { .. } => Err("an operand is missing".into()),
        }
    }
}

/// Strides that stretch a tensor to a shape; `None` if it cannot be.
pub fn stretch(from: &[usize], to: &[usize]) -> Option<Vec<isize>> {
    let lead = to.len().checked_sub(from.len())?;
    let own = row_major(from)?;
    let mut strides = vec![0; lead];
    for ((size, stride), to) in from.iter().zip(own).zip(&to[lead..]) {
        match size {
            1 => strides.push(0),
            size if size == to => strides.push(stride),
            _ => return None,
        }
    }
    Some(strides)
}

/// Elements between neighbours along every axis; `None` if there are too many elements to count.
pub fn row_major(shape: &[usize]) -> Option<Vec<isize>> {
    let mut strides = vec![0; shape.len()];
    let mut step = 1usize;
    for (stride, size) in strides.iter_mut().zip(shape).rev() {
        *stride = isize::try_from(step).ok()?;
        step = step.checked_mul(*size)?;
    }
    Some(strides)
}

fn rearrange(
    bytes: &[u8],
    size: usize,
    shape: &[usize],
    offset: usize,
    strides: &[isize],
) -> Result<Vec<u8>, ComputeError> {
    let count: usize = shape.iter().product();
    let mut out = Vec::with_capacity(count * size);
    let mut at = vec![0usize; shape.len()];
    let mut place = isize::try_from(offset)?;
    for _ in 0..count {
        let start = usize::try_from(place)?.checked_mul(size).ok_or("a place outside of a constant")?;
        let element = start.checked_add(size).and_then(|end| bytes.get(start..end));
        out.extend_from_slice(element.ok_or("a place outside of a constant")?);
        for axis in (0..shape.len()).rev() {
            at[axis] += 1;
            // A step along an axis of size 1 may be as long as it likes: it is taken back.
            place = place.wrapping_add(strides[axis]);
            if at[axis] < shape[axis] {
                break;
            }
            place = place.wrapping_sub(strides[axis].wrapping_mul(isize::try_from(at[axis])?));
            at[axis] = 0;
        }
    }
    Ok(out)
}

fn concat(operands: &[Contents], rows: usize, runs: &[usize]) -> Result<Vec<u8>, ComputeError> {
    let mut out = Vec::with_capacity(operands.iter().map(|operand| operand.bytes.len()).sum());
    for row in 0..rows {
        for (operand, run) in operands.iter().zip(runs) {
            let len = run * operand.size()?;
            let part = operand.bytes.get(row * len..(row + 1) * len);
            out.extend_from_slice(part.ok_or("a place outside of a constant")?);
        }
    }
    Ok(out)
}

fn gather(
    data: &Contents,
    rows: usize,
    len: usize,
    run: usize,
    places: &[usize],
) -> Result<Vec<u8>, ComputeError> {
    let run = run * data.size()?;
    let mut out = Vec::with_capacity(rows * places.len() * run);
    for row in 0..rows {
        for place in places {
            let start = (row * len + place) * run;
            let part = data.bytes.get(start..start + run);
            out.extend_from_slice(part.ok_or("a place outside of a constant")?);
        }
    }
    Ok(out)
}

fn narrow(dtype: DType, values: &[f32]) -> Result<Vec<u8>, ComputeError> {
    Ok(match dtype {
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        other => return Err(format!("constants of type {other:?} are not computed").into()),
    })
}
