use std::{ops::Range, sync::Arc};

use rayon::prelude::*;

use super::QuantError;
use crate::onnx::{
    Bytes, DType, Tensor,
    tensor::{Compute, ComputeError},
};

/// Side of the square that is transposed at a time, in elements; small enough for the first-level cache.
const TILE: usize = 32;

/// `[N, K]` as `[K, N]` when it is written; elements of 1, 2, 4 or 8 bytes.
pub fn transpose(tensor: Tensor) -> Result<Tensor, QuantError> {
    let [n, k] = tensor.shape[..] else {
        return Err(QuantError::Shape { found: tensor.shape, expected: "a matrix" });
    };
    let (dtype, size) = (tensor.dtype, element_size(tensor.dtype)?);
    let source = Arc::new(Transpose { tensor, n, k, size });
    Ok(Tensor { dtype, shape: vec![k, n], bytes: Bytes::Computed { source, part: 0, len: n * k * size } })
}

/// Index `index` along axis `axis`, which goes, when it is written.
pub fn select(tensor: Tensor, axis: usize, index: usize) -> Result<Tensor, QuantError> {
    let mut selected = slice(tensor, axis, index..index.saturating_add(1))?;
    selected.shape.remove(axis);
    Ok(selected)
}

/// The indices of a range along axis `axis`, when it is written.
pub fn slice(tensor: Tensor, axis: usize, range: Range<usize>) -> Result<Tensor, QuantError> {
    let within = |size: &usize| range.start <= range.end && range.end <= *size;
    if !tensor.shape.get(axis).is_some_and(within) {
        return Err(QuantError::Shape { found: tensor.shape, expected: "an axis that has the indices" });
    }
    let (dtype, size) = (tensor.dtype, element_size(tensor.dtype)?);
    let inner = tensor.shape[axis + 1..].iter().product::<usize>() * size;
    let step = inner * tensor.shape[axis];
    let mut shape = tensor.shape.clone();
    shape[axis] = range.len();
    let len = shape.iter().product::<usize>() * size;
    let source =
        Arc::new(Select { tensor, len, run: inner * range.len(), step, offset: inner * range.start });
    Ok(Tensor { dtype, shape, bytes: Bytes::Computed { source, part: 0, len } })
}

/// A run of bytes out of every step.
struct Select {
    tensor: Tensor,
    len: usize,
    run: usize,
    step: usize,
    offset: usize,
}

impl Compute for Select {
    fn operands(&self) -> Vec<&Tensor> {
        vec![&self.tensor]
    }

    fn reads(&self) -> Option<usize> {
        self.tensor.bytes.reads()
    }

    fn underflows(&self) -> u64 {
        self.tensor.bytes.underflows()
    }

    fn compute(&self) -> Result<Vec<Vec<u8>>, ComputeError> {
        let bytes = self.tensor.bytes.read()?;
        let mut out = Vec::with_capacity(self.len);
        if self.len > 0 {
            let runs = bytes.chunks_exact(self.step).map(|step| &step[self.offset..][..self.run]);
            runs.for_each(|run| out.extend_from_slice(run));
        }
        if out.len() != self.len {
            return Err(QuantError::Length { expected: self.len, found: out.len() }.into());
        }
        Ok(vec![out])
    }
}

fn element_size(dtype: DType) -> Result<usize, QuantError> {
    dtype.size().ok_or(QuantError::SourceType(dtype))
}

struct Transpose {
    tensor: Tensor,
    n: usize,
    k: usize,
    size: usize,
}

impl Compute for Transpose {
    fn operands(&self) -> Vec<&Tensor> {
        vec![&self.tensor]
    }

    fn reads(&self) -> Option<usize> {
        self.tensor.bytes.reads()
    }

    fn underflows(&self) -> u64 {
        self.tensor.bytes.underflows()
    }

    fn compute(&self) -> Result<Vec<Vec<u8>>, ComputeError> {
        let bytes = self.tensor.bytes.read()?;
        let expected = self.n * self.k * self.size;
        if bytes.len() != expected {
            return Err(QuantError::Length { expected, found: bytes.len() }.into());
        }
        Ok(vec![match self.size {
            1 => transposed::<1>(&bytes, self.n, self.k),
            2 => transposed::<2>(&bytes, self.n, self.k),
            4 => transposed::<4>(&bytes, self.n, self.k),
            _ => transposed::<8>(&bytes, self.n, self.k),
        }])
    }
}

/// Transposes elements of `SIZE` bytes, a band of output rows per task. A square at a time goes through a buffer, so
/// that the matrix is read and written in whole cache lines whatever its width.
fn transposed<const SIZE: usize>(bytes: &[u8], n: usize, k: usize) -> Vec<u8> {
    let (elements, _) = bytes.as_chunks::<SIZE>();
    let mut out = vec![0; bytes.len()];
    if out.is_empty() {
        return out;
    }
    let (cells, _) = out.as_chunks_mut::<SIZE>();
    cells.par_chunks_mut(TILE * n).enumerate().for_each(|(band, cells)| {
        let columns = band * TILE..k.min((band + 1) * TILE);
        let mut tile = [[[0; SIZE]; TILE]; TILE];
        for top in (0..n).step_by(TILE) {
            let rows = top..n.min(top + TILE);
            for (j, row) in rows.clone().enumerate() {
                for (line, element) in tile.iter_mut().zip(&elements[row * k..][columns.clone()]) {
                    line[j] = *element;
                }
            }
            for (line, out_row) in tile.iter().zip(cells.chunks_exact_mut(n)) {
                out_row[rows.clone()].copy_from_slice(&line[..rows.len()]);
            }
        }
    });
    out
}
