//! The gated projection SwiGLU: silu(one half) * the other half.
//!
//! Before: two Slices of one projection, SiLU of one, Mul with the other.
//! After: one Split, SiLU and Mul: a node and a kernel less. Two projections of the same input, the other way to write
//! SwiGLU, stay as they are. `merge_slices` would do the same and more; this pass is for those who want this alone.
//! Nothing is refused: halves that are no halves are no SwiGLU.

use super::{
    Outcome, Pass, PassError, Settings, View,
    merge_slices::{Cut, cuts, merge},
};
use crate::onnx::{Model, ValueId};

pub const PASS: Pass = Pass {
    name: "fuse_swiglu",
    what: "two Slices of a gated projection -> one Split",
    why: "each Slice is a kernel of its own",
    run,
};

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let view = View::of(model);
    let mut found = cuts(&view);
    found.retain(|cut| is_gated(&view, cut));
    for cut in &found {
        merge(model, cut);
    }
    Ok(Outcome::applied(found.len()))
}

fn is_gated(view: &View<'_>, cut: &Cut) -> bool {
    let [(.., a), (.., b)] = cut.pieces[..] else { return false };
    gates(view, a, b) || gates(view, b, a)
}

/// Whether `gate * Sigmoid(gate)` is multiplied with `up`.
fn gates(view: &View<'_>, gate: ValueId, up: ValueId) -> bool {
    let products = |of: ValueId, with: ValueId| {
        let users = view.uses(of).iter().map(|id| &view.graph[*id]);
        let products = users.filter(move |user| user.is("Mul") && user.inputs.contains(&Some(with)));
        products.filter_map(|product| product.output(0)).collect::<Vec<_>>()
    };
    let sigmoids = view.uses(gate).iter().map(|id| &view.graph[*id]).filter(|user| user.is("Sigmoid"));
    let gated = sigmoids.filter_map(|sigmoid| sigmoid.output(0)).flat_map(|sigmoid| products(gate, sigmoid));
    gated.into_iter().any(|gated| !products(gated, up).is_empty())
}
