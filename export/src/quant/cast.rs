use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use half::f16;
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
/// From this magnitude on f16 holds every bf16 up to its largest value; below, its steps of 2^-24 are too wide for some.
const EXACT_FROM: f32 = 1.0 / (1 << 17) as f32;

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
    let source = Arc::new(Cast { tensor, to, underflows: AtomicU64::new(0) });
    Ok(Tensor { dtype: to, shape, bytes: Bytes::Computed { source, part: 0, len } })
}

struct Cast {
    tensor: Tensor,
    to: DType,
    underflows: AtomicU64,
}

/// How many bf16 values f16 rounds because they are small.
fn underflows(values: &[f32]) -> u64 {
    let small = values.iter().filter(|value| value.abs() < EXACT_FROM);
    small.filter(|value| f16::from_f32(**value).to_f32() != **value).count() as u64
}

impl Compute for Cast {
    fn operands(&self) -> Vec<&Tensor> {
        vec![&self.tensor]
    }

    fn reads(&self) -> Option<usize> {
        self.tensor.bytes.reads()
    }

    fn underflows(&self) -> u64 {
        self.underflows.load(Ordering::Relaxed)
    }

    fn compute(&self) -> Result<Vec<Vec<u8>>, ComputeError> {
        let from = self.tensor.dtype;
        self.underflows.store(0, Ordering::Relaxed);
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
                if (from, self.to) == (DType::BF16, DType::F16) {
                    self.underflows.fetch_add(underflows(values), Ordering::Relaxed);
                }
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

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn small_values_that_f16_rounds_are_counted() {
        let cast_of = |values: &[f32]| {
            let bytes = values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
            let tensor = Tensor::inline(DType::BF16, &[values.len()], bytes);
            let cast = cast(tensor, DType::F16).unwrap();
            cast.bytes.read().unwrap();
            cast.bytes.underflows()
        };
        let step = 1.0 / (1 << 24) as f32;
        // 255/128 takes all bits of a bf16.
        let dense = 255.0 / 128.0;
        assert_eq!(cast_of(&[1.0, -65280.0, 0.0, EXACT_FROM * dense, -EXACT_FROM, 3.0 * step]), 0);
        assert_eq!(cast_of(&[EXACT_FROM * dense / 2.0, -EXACT_FROM * dense / 4.0, step / 4.0, 1.0]), 3);
    }
}
