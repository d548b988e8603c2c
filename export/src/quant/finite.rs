use rayon::prelude::*;

use super::convert::{float_size, widen_into};
use crate::onnx::Tensor;

/// Elements that one task looks at.
const TASK: usize = 1 << 16;
/// The largest magnitude of which a block's range is finite, whatever its signs.
const LARGEST: f32 = f32::MAX / 2.0;

/// Whether a matrix of floats holds nothing that a block has no scale for: infinities, what is not a number, and
/// magnitudes at the very end of f32. Reads the bytes where they lie, and gives their pages back. Bytes that are still to be
/// computed are not looked at: whoever computes them names what is wrong.
pub fn fits_blocks(tensor: &Tensor) -> bool {
    let (Ok(size), Some(bytes)) = (float_size(tensor.dtype), tensor.bytes.in_memory()) else { return true };
    let fits = bytes.par_chunks(TASK * size).map_init(
        || vec![0.0; TASK],
        |values, bytes| {
            let values = &mut values[..bytes.len() / size];
            widen_into(tensor.dtype, bytes, values);
            values.iter().fold(true, |fits, value| fits & (value.abs() <= LARGEST))
        },
    );
    let fits = fits.all(|fits| fits);
    tensor.bytes.release();
    fits
}
