//! Attention as exporters write it: a product of queries and keys, scales, masks, a softmax, a guard against rows without
//! a number, and the product with the values.

use super::View;
use crate::onnx::{DType, Node, NodeId, ValueId};

/// Nodes between the product and the softmax. Exporters write three or four.
const MAX_STEPS: usize = 8;

/// One written attention. Everything between its nodes is a cast.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    pub scores: Scores,
    pub softmax: NodeId,
    /// Whether the softmax is over the last axis, the keys.
    pub over_keys: bool,
    pub guard: Option<Guard>,
    /// Whether more than the product with the values uses the weights.
    pub weights_shared: bool,
    /// MatMul(weights, v).
    pub apply: NodeId,
    pub v: ValueId,
}

/// What goes into a softmax.
#[derive(Clone, Debug)]
pub(super) struct Scores {
    /// MatMul(q, k).
    pub product: NodeId,
    pub q: ValueId,
    pub k: ValueId,
    /// What the product is multiplied by before masks are added.
    pub scale: f64,
    /// The node that scales, if it alone uses the product.
    pub scaled: Option<(NodeId, f64)>,
    /// What is added, innermost first.
    pub masks: Vec<Mask>,
    /// The nodes from the first of these Adds up to the softmax, in execution order.
    pub masked: Vec<NodeId>,
    /// Whether the sum of scores and masks is scaled.
    pub masks_scaled: bool,
}

/// An Add of a mask to scores.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mask {
    pub add: NodeId,
    /// Which operand of the Add it is.
    pub index: usize,
    pub value: ValueId,
}

/// Where(IsNaN(weights), 0, weights).
#[derive(Clone, Copy, Debug)]
pub(super) struct Guard {
    pub choose: NodeId,
    pub weights: ValueId,
    pub output: ValueId,
}

/// Every attention of the main graph, in execution order.
pub(super) fn attentions(view: &View<'_>) -> Vec<Attention> {
    view.nodes("Softmax").filter_map(|(id, node)| attention(view, id, node)).collect()
}

fn attention(view: &View<'_>, softmax: NodeId, node: &Node) -> Option<Attention> {
    let scores = scores(view, node.input(0)?, MAX_STEPS)?;
    let mut weights = uncast(view, node.output(0)?);
    let guard = guard(view, weights);
    if let Some(guard) = guard {
        weights = uncast(view, guard.output);
    }
    let applies = |id: &&NodeId| view.graph[**id].is("MatMul") && view.graph[**id].input(0) == Some(weights);
    let apply = *view.uses(weights).iter().find(applies)?;
    Some(Attention {
        scores,
        softmax,
        over_keys: over_last(view, node),
        guard,
        weights_shared: view.sole_use(weights).is_none(),
        apply,
        v: view.graph[apply].input(1)?,
    })
}

/// Follows casts that alone use what they cast.
fn uncast(view: &View<'_>, mut value: ValueId) -> ValueId {
    while let Some(cast) = view.sole_use(value).filter(|(_, node)| is_float_cast(view, node)) {
        let Some(output) = cast.1.output(0) else { break };
        value = output;
    }
    value
}

/// Before version 13 the default was axis 1, and everything from the axis on was one.
fn over_last(view: &View<'_>, softmax: &Node) -> bool {
    let axis = softmax.int("axis").unwrap_or(if view.opset() < 13 { 1 } else { -1 });
    let rank = softmax.input(0).and_then(|scores| view.facts().rank(scores));
    axis == -1 || rank.is_some_and(|rank| axis == rank as i64 - 1)
}

/// Whether a Cast goes from floats to floats; one to integers rounds.
fn is_float_cast(view: &View<'_>, node: &Node) -> bool {
    let is_float = |value: Option<ValueId>| {
        value.and_then(|value| view.facts().dtype(value)).is_some_and(DType::is_float)
    };
    node.is("Cast") && is_float(node.input(0)) && is_float(node.output(0))
}

fn scores(view: &View<'_>, value: ValueId, steps: usize) -> Option<Scores> {
    let steps = steps.checked_sub(1)?;
    let (id, node) = view.producer(value)?;
    if node.is("MatMul") {
        let (q, k) = (node.input(0)?, node.input(1)?);
        let linear = view.constant(q).is_some() || view.constant(k).is_some();
        let scores = Scores {
            product: id,
            q,
            k,
            scale: 1.0,
            scaled: None,
            masks: Vec::new(),
            masked: Vec::new(),
            masks_scaled: false,
        };
        return (!linear).then_some(scores);
    }
    if is_float_cast(view, node) || node.is("Identity") {
        let mut scores = scores(view, node.input(0)?, steps)?;
        scores.masked.extend((!scores.masks.is_empty()).then_some(id));
        return Some(scores);
    }
    if node.is("Add") {
        let operands = view.operands(node).into_iter().enumerate();
        return operands.into_iter().find_map(|(i, (inner, mask))| {
            let mut scores = scores(view, inner, steps)?;
            scores.masks.push(Mask { add: id, index: 1 - i, value: mask });
            scores.masked.push(id);
            Some(scores)
        });
    }
    let (inner, scale) = scaled(view, node)?;
    let mut scores = scores(view, inner, steps)?;
    if scores.masks.is_empty() {
        scores.scale *= scale;
        let direct = view.sole_use(inner).is_some() && view.graph[scores.product].output(0) == Some(inner);
        scores.scaled = direct.then_some((id, scale)).or(scores.scaled);
    } else {
        scores.masks_scaled = true;
        scores.masked.push(id);
    }
    Some(scores)
}

/// What a Mul or Div by one known number scales, and by how much.
pub(super) fn scaled(view: &View<'_>, node: &Node) -> Option<(ValueId, f64)> {
    let (inner, scale) = if node.is("Mul") {
        view.with_scalar(node)?
    } else if node.is("Div") {
        (node.input(0)?, view.scalar(node.input(1)?)?.recip())
    } else {
        return None;
    };
    let rank = |value| view.facts().rank(value);
    let shaped = rank(inner).is_some() && rank(inner) == rank(node.output(0)?);
    (shaped && scale.is_finite() && scale != 0.0).then_some((inner, scale))
}

fn guard(view: &View<'_>, weights: ValueId) -> Option<Guard> {
    if view.graph.outputs.contains(&weights) {
        return None;
    }
    let &[a, b] = view.uses(weights) else { return None };
    [(a, b), (b, a)].into_iter().find_map(|(test, choose)| {
        let [test, node] = [test, choose].map(|id| &view.graph[id]);
        let guards = test.is("IsNaN")
            && node.is("Where")
            && node.input(0) == test.output(0)
            && node.input(2) == Some(weights)
            && view.scalar(node.input(1)?) == Some(0.0);
        let output = node.output(0)?;
        guards.then_some(Guard { choose, weights, output })
    })
}
