//! Rotary position embedding. Angles are made on the host; the graph only rotates.

use crate::{
    arch::author::Author,
    onnx::{Attribute, ValueId},
};

/// Which dimensions of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// Dimensions 2m and 2m+1 (FLUX).
    Interleaved,
    /// Dimensions m and m + d/2 (Llama, Qwen).
    HalfSplit,
}

/// Rotates `x` [1, rows, heads*d] by tables [rows, d/2] of the same type.
pub fn rotate(
    a: &mut Author<'_>,
    x: ValueId,
    cos: ValueId,
    sin: ValueId,
    heads: usize,
    pairing: Pairing,
) -> ValueId {
    let offset = a.graph.ints(&[0]);
    let interleaved = i64::from(pairing == Pairing::Interleaved);
    a.graph.contrib(
        "RotaryEmbedding",
        &[x, offset, cos, sin],
        &[("interleaved", Attribute::Int(interleaved)), ("num_heads", Attribute::Int(heads as i64))],
    )
}
