//! f32 where f16 loses the picture: norms, residual additions and the gates before them.
//!
//! Before: a node in f16. After: its operands cast to f32, the node in f32, its result limited to f16's range and cast
//! back. Every island ends in f16 again before the next begins. Norms are `*LayerNormalization`, `RMSNormalization` and
//! `InstanceNormalization`; a residual addition is an Add of two computed values of one shape, one of which is used again;
//! a gate is a Mul whose only use is a residual addition.
//!
//! Refused: an addition of which it is not known whether its operands have one shape.

use super::{Outcome, Pass, PassError, Replacement, Settings, View};
use crate::{
    onnx::{DType, Model, Node, NodeId, ValueId},
    quant::{self, F16_MAX},
};

pub const PASS: Pass = Pass {
    name: "fp32_islands",
    what: "norms, residual Adds and gate Muls in f16 -> Cast, the same in f32, Clip, Cast",
    why: "residual streams pass f16's range and lose small changes, and f16 squares overflow: noise, without an error",
    run,
};

const NORMS: &[&str] =
    &["LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "InstanceNormalization"];

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    let islands = islands(&View::of(model), &mut outcome);
    for (id, clamped) in islands {
        let mut node = model.graph[id].clone();
        let Some(output) = node.output(0) else { continue };
        let mut new = Replacement::of(&mut model.graph, id);
        for input in &mut node.inputs {
            *input = input.map(|value| widened(&mut new, value)).transpose()?;
        }
        let mut y = new.value();
        new.retype(y, DType::F32);
        node.outputs[0] = Some(y);
        new.push(node);
        if clamped {
            let bounds = [-F16_MAX, F16_MAX].map(|bound| new.scalar(DType::F32, bound));
            y = new.op("Clip", &[y, bounds[0], bounds[1]], &[]);
            new.retype(y, DType::F32);
        }
        new.cast_into(y, DType::F16, output);
        new.finish();
        outcome.applied += 1;
    }
    Ok(outcome)
}

fn widened(new: &mut Replacement<'_>, value: ValueId) -> Result<ValueId, PassError> {
    let name = new.graph()[value].name.clone();
    let Some(tensor) = new.graph()[value].constant.clone().filter(|_| !new.graph().inputs.contains(&value))
    else {
        return Ok(new.cast(value, DType::F32));
    };
    let tensor = quant::cast(tensor, DType::F32)
        .map_err(|source| PassError::Constant { tensor: name.clone(), source: source.into() })?;
    Ok(new.named_constant(&format!("{name}.f32"), tensor))
}

/// Nodes that become islands, and whether what they give may leave f16's range.
fn islands(view: &View<'_>, outcome: &mut Outcome) -> Vec<(NodeId, bool)> {
    let mut islands = Vec::new();
    for (id, node) in view.graph.nodes() {
        let [Some(output)] = node.outputs[..] else { continue };
        if view.facts().dtype(output) != Some(DType::F16) {
            continue;
        }
        if NORMS.iter().any(|norm| node.is(norm)) {
            islands.push((id, false));
        } else if node.is("Add") && is_skip(view, node) {
            match same_shape(view, node) {
                Some(true) => islands.push((id, true)),
                Some(false) => {}
                None => outcome.refuse(view.graph.place(id), "the shapes of what it adds are not known"),
            }
        } else if node.is("Mul") && gates(view, output) {
            islands.push((id, true));
        }
    }
    islands
}

/// Whether an Add joins two computed values, one of which goes another way, too.
fn is_skip(view: &View<'_>, add: &Node) -> bool {
    let [Some(a), Some(b)] = add.inputs[..] else { return false };
    let computed = |value: ValueId| view.graph[value].constant.is_none();
    a != b && computed(a) && computed(b) && (view.uses(a).len() > 1 || view.uses(b).len() > 1)
}

fn same_shape(view: &View<'_>, node: &Node) -> Option<bool> {
    let [Some(a), Some(b)] = node.inputs[..] else { return Some(false) };
    let facts = view.facts();
    (facts.rank(a).is_some() && facts.rank(b).is_some()).then(|| facts.same_shape(a, b))
}

/// Whether a product is used for nothing but a residual addition.
fn gates(view: &View<'_>, product: ValueId) -> bool {
    let add = view.sole_use(product).filter(|(_, node)| node.is("Add"));
    add.is_some_and(|(_, node)| is_skip(view, node) && same_shape(view, node) == Some(true))
}
