//! Weight quantisation, and the lazy casts and relayouts that go with it.
//!
//! Nothing here runs when a graph is built: every function returns tensors whose bytes are computed when the writer
//! reaches them, from ranges of the mapped checkpoint.

/// Largest finite f16.
pub const F16_MAX: f32 = 65504.0;

mod cast;
mod convert;
mod error;
mod finite;
mod fit;
mod gram;
mod layout;
mod nbits;
mod pack;

pub use cast::cast;
pub use error::QuantError;
pub use finite::fits_blocks;
pub use fit::{Fit, Fitting, Misfit, misfit};
pub use gram::{DAMPING, Gram, WINDOW};
pub use layout::{select, slice, transpose};
pub use nbits::{
    BlockFormat, QuantizeCompute, Quantized, dequantize, quantize, quantize_tensor, quantized_initializers,
};
pub use pack::{pack, unpack};
