//! Tensors that are known by type and shape alone: what a checkpoint would hold, for plans that are made without one.

use std::sync::Arc;

use super::WeightsError;
use crate::onnx::{
    Bytes, DType, Tensor,
    tensor::{Compute, ComputeError},
};

/// No tensor is larger, so that sums over tensors cannot overflow.
const MAX_BYTES: usize = 1 << 48;

/// Bytes that are asked of a checkpoint that is not there.
#[derive(Debug, thiserror::Error)]
#[error(
    "`{tensor}` has no values: it was described without a checkpoint, so it can be planned with but not written"
)]
struct NoValues {
    tensor: String,
}

struct Described {
    tensor: String,
}

impl Compute for Described {
    fn compute(&self) -> Result<Vec<Vec<u8>>, ComputeError> {
        Err(NoValues { tensor: self.tensor.clone() }.into())
    }
}

/// A bf16 tensor that takes no memory and has no values: reading its bytes is an error.
pub fn tensor(name: &str, shape: &[usize]) -> Result<Tensor, WeightsError> {
    let dtype = DType::BF16;
    let len = dtype.byte_len(shape).filter(|len| *len <= MAX_BYTES);
    let len = len.ok_or_else(|| WeightsError::TooLarge { tensor: name.to_owned(), shape: shape.to_vec() })?;
    let source = Arc::new(Described { tensor: name.to_owned() });
    Ok(Tensor { dtype, shape: shape.to_vec(), bytes: Bytes::Computed { source, part: 0, len } })
}

#[cfg(test)]
mod tests {
    use crate::{
        onnx::DType,
        quant::{self, BlockFormat},
        weights::{Checkpoint, WeightsError},
    };

    #[test]
    fn whatever_is_asked_for_is_there_without_values() {
        let checkpoint = Checkpoint::described();
        let tensor = checkpoint.tensor("any.weight", &[27648, 3072]).unwrap();
        assert_eq!((tensor.dtype, tensor.bytes.len()), (DType::BF16, 27648 * 3072 * 2));
        let error = tensor.to_f32().unwrap_err().to_string();
        assert!(error.contains("any.weight") && error.contains("without a checkpoint"), "{error}");
    }

    #[test]
    fn what_is_made_of_it_has_lengths_and_no_values() {
        let matrix = || Checkpoint::described().tensor("any.weight", &[6, 80]).unwrap();
        let wide = quant::transpose(quant::cast(matrix(), DType::F32).unwrap()).unwrap();
        assert_eq!((&wide.shape[..], wide.bytes.len()), (&[80, 6][..], 6 * 80 * 4));
        let format = BlockFormat { bits: 4, block: 32, symmetric: false, scale: DType::F16 };
        let parts = quant::quantized_initializers(matrix(), &format, quant::Fitting::Nearest).unwrap();
        let lengths: Vec<usize> = parts.iter().map(|part| part.bytes.len()).collect();
        assert_eq!(lengths, [6 * 3 * 16, 6 * 3 * 2, 6 * 2]);
        for tensor in parts.iter().chain([&wide]) {
            let error = tensor.bytes.read().unwrap_err().to_string();
            assert!(error.contains("any.weight"), "{error}");
        }
    }

    #[test]
    fn a_tensor_beyond_all_measure_is_refused() {
        for shape in [&[usize::MAX, 2][..], &[1 << 30, 1 << 30], &[usize::MAX]] {
            let refused = Checkpoint::described().tensor("any.weight", shape);
            assert!(matches!(refused, Err(WeightsError::TooLarge { .. })), "{shape:?}");
        }
    }
}
