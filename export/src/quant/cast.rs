use std::sync::Arc;

use rayon::prelude::*;

use super::{
    QuantError,
    convert::{float_size, narrow_to_f16, widen_into},
};
use crate::onnx::{
    Bytes, DType, Tensor,
    tensor::{Compute, ComputeError},
};

/// Elements that one task casts.
const TASK: usize = 1 << 16;

/// The tensor as F32 or F16, rounded to nearest even, when it is written. F32, F16 and BF16 can be cast; a value that
/// f16 cannot hold, or that is not finite, fails the write and is named.
pub fn cast(tensor: Tensor, to: DType) -> Result<Tensor, QuantError> {
    float_size(tensor.dtype)?;
    if !matches!(to, DType::F32 | DType::F16) {
        return Err(QuantError::TargetType(to));
    }
    if tensor.dtype == to {
        return Ok(tensor);
    }
    let len = tensor.elements() * float_size(to)?;
    let shape = tensor.shape.clone();
    let source = Arc::new(Cast { tensor, to });
    Ok(Tensor { dtype: to, shape, bytes: Bytes::Computed { source, part: 0, len } })
}

struct Cast {
    tensor: Tensor,
    to: DType,
}

impl Compute for Cast {
    fn release(&self) {
        self.tensor.bytes.release();
    }

    fn reads(&self) -> Option<usize> {
        self.tensor.bytes.reads()
    }

    fn compute(&self) -> Result<Vec<Vec<u8>>, ComputeError> {
        let from = self.tensor.dtype;
        let (from_size, to_size) = (float_size(from)?, float_size(self.to)?);
        let bytes = self.tensor.bytes.read()?;
        let expected = self.tensor.elements() * from_size;
        if bytes.len() != expected {
            return Err(QuantError::Length { expected, found: bytes.len() }.into());
        }
        let mut out = vec![0; self.tensor.elements() * to_size];
        let tasks = out.par_chunks_mut(TASK * to_size).zip(bytes.par_chunks(TASK * from_size)).enumerate();
        tasks.try_for_each_init(
            || vec![0.0; TASK],
            |values, (task, (out, bytes))| {
                let values = &mut values[..bytes.len() / from_size];
                widen_into(from, bytes, values);
                if self.to == DType::F16 {
                    narrow_to_f16(values, out)
                        .map_err(|i| QuantError::CastOverflow { index: task * TASK + i, value: values[i] })
                } else {
                    for (value, out) in values.iter().zip(out.as_chunks_mut::<4>().0) {
                        *out = value.to_le_bytes();
                    }
                    Ok(())
                }
            },
        )?;
        Ok(vec![out])
    }
}
