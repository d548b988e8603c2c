//! The residual stream of a transformer, carried in f32 or as f16 with f32 islands.

use crate::{
    arch::author::Author,
    onnx::{DType, ValueId},
    recipe::Residual,
};

/// Adds a branch to the stream: `x + gate * branch` (gate [width], f32). A branch that left f16's range saturates.
pub fn add_branch(a: &mut Author<'_>, x: ValueId, branch: ValueId, gate: Option<ValueId>) -> ValueId {
    let finite = if a.graph.dtype(branch) == DType::F16 { a.clamp(branch) } else { branch };
    let branch = a.to_f32(finite);
    let branch = gate.map_or(branch, |gate| a.graph.mul(branch, gate));
    let x = a.to_f32(x);
    let sum = a.graph.add(x, branch);
    carry(a, sum)
}

/// The stream in the type in which it is carried between blocks.
pub fn carry(a: &mut Author<'_>, x: ValueId) -> ValueId {
    match a.precision.residual {
        Residual::F32 => a.to_f32(x),
        Residual::Islands => a.to_compute(x),
    }
}
