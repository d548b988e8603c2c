//! Layer norm, written out or followed by an adaptive scale and shift, as one operator.
//!
//! Before: ReduceMean -> Sub -> Pow 2 -> ReduceMean -> Add epsilon -> Sqrt -> Div [-> Mul weight -> Add bias]; or
//! LayerNormalization without a weight -> Mul (1 + scale) [-> Add shift], where scale and shift are one row for all rows.
//! After: LayerNormalization with those operands. ONNX Runtime has it in the standard domain for every opset, and its
//! statistics are f32 whatever the type: the written-out variance overflows in f16 and leaves the bias alone, silently.
//!
//! Refused, besides what `fuse_rms_norm` refuses: an adaptive scale that differs from row to row, or that follows a layer
//! norm with a weight of its own.

use std::collections::HashSet;

use super::{
    Outcome, Pass, PassError, Replacement, Settings, View,
    fuse_rms_norm::row_of,
    normalised::{self, is_row},
};
use crate::onnx::{Attribute, DType, Model, Node, NodeId, ValueId};

pub const PASS: Pass = Pass {
    name: "fuse_layer_norm",
    what: "a written-out layer norm, or one followed by an adaptive scale and shift -> LayerNormalization",
    why: "up to nine kernels instead of one, and in f16 the variance overflows without a NaN to show for it",
    run,
};

/// The longest weight that is read to see whether it is all ones.
const MAX_WIDTH: usize = 1 << 16;

/// A layer norm to be: a missing weight is ones.
struct LayerNorm {
    root: NodeId,
    x: ValueId,
    weight: Option<ValueId>,
    bias: Option<ValueId>,
    epsilon: f32,
    output: ValueId,
    width: usize,
    dtype: DType,
}

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    let view = View::of(model);
    let mut found = written_out(&view, &mut outcome);
    found.extend(adaptive(&view, &mut outcome));
    let mut roots = HashSet::new();
    found.retain(|norm| roots.insert(norm.root));
    for norm in found {
        let mut new = Replacement::of(&mut model.graph, norm.root);
        let weight = norm.weight.unwrap_or_else(|| new.constant(row_of(norm.dtype, norm.width, 1.0)));
        let inputs: Vec<ValueId> = [norm.x, weight].into_iter().chain(norm.bias).collect();
        let attributes = [("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(norm.epsilon))];
        new.op_into("LayerNormalization", &inputs, &attributes, norm.output);
        new.finish();
        outcome.applied += 1;
    }
    Ok(outcome)
}

fn written_out(view: &View<'_>, outcome: &mut Outcome) -> Vec<LayerNorm> {
    let mut refused = Outcome::default();
    let norms = normalised::find(view, &mut refused);
    let found = norms.into_iter().filter_map(|norm| {
        let centred = norm.centred(view)?;
        let weighted = norm.weighted(view, centred);
        let dtype = view.facts().dtype(weighted.x)?;
        let layer_norm = LayerNorm {
            root: weighted.root,
            x: weighted.x,
            weight: weighted.weight,
            bias: None,
            epsilon: norm.epsilon,
            output: weighted.output,
            width: norm.width,
            dtype,
        };
        Some(if layer_norm.weight.is_some() { layer_norm.with_bias(view) } else { layer_norm })
    });
    let found = found.collect();
    // What is no layer norm is refused by `fuse_rms_norm`.
    let layer_norm =
        |place: &str| view.graph.nodes().any(|(_, node)| node.name == place && divides_centred(view, node));
    outcome.refused.extend(refused.refused.into_iter().filter(|refusal| layer_norm(&refusal.place)));
    found
}

fn divides_centred(view: &View<'_>, node: &Node) -> bool {
    node.inputs.iter().flatten().any(|input| view.made_by(*input, "Sub").is_some())
}

fn adaptive(view: &View<'_>, outcome: &mut Outcome) -> Vec<LayerNorm> {
    let mut found = Vec::new();
    for (id, node) in view.nodes("LayerNormalization") {
        let Some((root, mul, normed, scale)) = scaled(view, node) else { continue };
        let (Some(x), Some(width)) = (node.input(0), view.facts().fixed_dim(normed, -1)) else { continue };
        let (Some(output), Some(dtype)) = (mul.output(0), view.facts().dtype(x)) else { continue };
        if !is_row(view, scale, x) {
            if is_one_plus(view, scale) {
                outcome.refuse(view.graph.place(id), "its scale differs from row to row");
            }
        } else if !is_plain(view, node, x) {
            outcome.refuse(view.graph.place(id), "it has a weight of its own and a scale after it");
        } else {
            let epsilon = node.float("epsilon").unwrap_or(1e-5);
            let norm = LayerNorm { root, x, weight: Some(scale), bias: None, epsilon, output, width, dtype };
            found.push(norm.with_bias(view));
        }
    }
    found
}

/// The Mul that alone uses a layer norm over the last axis, the normed value, and the other factor.
fn scaled<'a>(view: &View<'a>, node: &Node) -> Option<(NodeId, &'a Node, ValueId, ValueId)> {
    let [Some(normed)] = node.outputs[..] else { return None };
    let rank = i64::try_from(view.facts().rank(normed)?).ok()?;
    let axis = node.int("axis").unwrap_or(-1);
    let (root, mul) = view.sole_use(normed).filter(|(_, user)| user.is("Mul"))?;
    let (_, scale) = view.operands(mul).into_iter().find(|(a, b)| *a == normed && *b != normed)?;
    (axis == -1 || axis == rank - 1).then_some((root, mul, normed, scale))
}

fn is_one_plus(view: &View<'_>, scale: ValueId) -> bool {
    view.made_by(scale, "Add").and_then(|(_, add)| view.with_scalar(add)).is_some_and(|(_, one)| one == 1.0)
}

/// Whether the weight is all ones and the bias, if there is one, all zeros.
fn is_plain(view: &View<'_>, node: &Node, x: ValueId) -> bool {
    let all = |value: Option<ValueId>, wanted: f32| {
        let tensor = view.constant(value?).filter(|tensor| tensor.bytes.len() <= 4 * MAX_WIDTH)?;
        Some(tensor.to_f32().ok()??.iter().all(|v| *v == wanted))
    };
    let weight = node.input(1).is_some_and(|weight| view.facts().dtype(weight) == view.facts().dtype(x));
    weight
        && all(node.input(1), 1.0) == Some(true)
        && (node.input(2).is_none() || all(node.input(2), 0.0) == Some(true))
}

impl LayerNorm {
    /// With the row that is added to it afterwards, if one is.
    fn with_bias(self, view: &View<'_>) -> LayerNorm {
        let found = || {
            let (root, add) = view.sole_use(self.output).filter(|(_, user)| user.is("Add"))?;
            let (_, bias) = view.operands(add).into_iter().find(|(a, _)| *a == self.output)?;
            is_row(view, bias, self.x).then_some((root, bias, add.output(0)?))
        };
        match found() {
            Some((root, bias, output)) => LayerNorm { root, bias: Some(bias), output, ..self },
            None => self,
        }
    }
}
