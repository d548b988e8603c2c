//! Gated activations.

use crate::{arch::author::Author, onnx::ValueId};

pub fn silu(a: &mut Author<'_>, x: ValueId) -> ValueId {
    let gate = a.graph.op("Sigmoid", &[x], &[]);
    a.graph.mul(x, gate)
}

/// `silu(gate) * up`
pub fn swiglu(a: &mut Author<'_>, gate: ValueId, up: ValueId) -> ValueId {
    let gate = silu(a, gate);
    a.graph.mul(gate, up)
}
