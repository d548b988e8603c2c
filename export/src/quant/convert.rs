//! Rows of floats between bytes and f32, without a branch per element.

use half::{
    f16,
    slice::{HalfBitsSliceExt, HalfFloatSliceExt},
};

use super::QuantError;
use crate::onnx::{DType, Tensor};

/// Elements that are converted at a time on the stack.
const CHUNK: usize = 256;

/// Bytes per element of a floating-point weight.
pub fn float_size(dtype: DType) -> Result<usize, QuantError> {
    match dtype {
        DType::F32 => Ok(4),
        DType::F16 | DType::BF16 => Ok(2),
        other => Err(QuantError::SourceType(other)),
    }
}

/// Checks that a tensor is a matrix of floats; rows and columns.
pub fn float_matrix(tensor: &Tensor) -> Result<(usize, usize), QuantError> {
    float_size(tensor.dtype)?;
    match tensor.shape[..] {
        [n, k] => Ok((n, k)),
        _ => Err(QuantError::Shape { found: tensor.shape.clone(), expected: "a matrix [out, in]" }),
    }
}

/// Widens little-endian f32, f16 or bf16 bytes to `out`, which has as many elements as the bytes.
pub fn widen_into(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (value, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*b);
            }
        }
        DType::F16 => {
            let mut bits = [0u16; CHUNK];
            for (values, b) in out.chunks_mut(CHUNK).zip(bytes.chunks(2 * CHUNK)) {
                let bits = &mut bits[..values.len()];
                for (bits, b) in bits.iter_mut().zip(b.as_chunks::<2>().0) {
                    *bits = u16::from_le_bytes(*b);
                }
                bits.reinterpret_cast::<f16>().convert_to_f32_slice(values);
            }
        }
        _ => {
            for (value, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
    }
}

/// Rounds f32 values to little-endian f16 bytes; the index of the first that f16 cannot hold is the error.
pub fn narrow_to_f16(values: &[f32], out: &mut [u8]) -> Result<(), usize> {
    let mut halves = [f16::ZERO; CHUNK];
    for (chunk, (values, out)) in values.chunks(CHUNK).zip(out.chunks_mut(2 * CHUNK)).enumerate() {
        let halves = &mut halves[..values.len()];
        halves.convert_from_f32_slice(values);
        let mut largest = 0;
        for (half, b) in halves.iter().zip(out.as_chunks_mut::<2>().0) {
            *b = half.to_le_bytes();
            largest = largest.max(half.to_bits() & 0x7fff);
        }
        if largest >= f16::INFINITY.to_bits() {
            let first = halves.iter().position(|half| !half.is_finite()).unwrap_or(0);
            return Err(chunk * CHUNK + first);
        }
    }
    Ok(())
}
