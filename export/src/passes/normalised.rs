//! `x / sqrt(mean(x * x) + epsilon)` over the last axis, wherever a graph writes it out. RMS norm is this with a weight;
//! layer norm is this of `x - mean(x)`, with a weight and a bias.

use super::{Outcome, View};
use crate::onnx::{DType, Node, NodeId, ValueId};

/// A value that is divided by the root of its mean square.
pub struct Normalised {
    pub node: NodeId,
    pub x: ValueId,
    pub output: ValueId,
    pub epsilon: f32,
    /// Elements of a row.
    pub width: usize,
}

/// The same, times a weight if there is one.
pub struct Weighted {
    /// The last node of the pattern.
    pub root: NodeId,
    pub x: ValueId,
    pub weight: Option<ValueId>,
    pub output: ValueId,
}

/// The widest rows that are normalised by one operator: each may need a weight of ones.
const MAX_WIDTH: usize = 1 << 20;

/// All places of a graph. Those that cannot be one operator are refused.
pub fn find(view: &View<'_>, outcome: &mut Outcome) -> Vec<Normalised> {
    let mut found = Vec::new();
    for (id, node) in view.graph.nodes() {
        let Some((x, square_mean, epsilon)) = parts(view, node) else { continue };
        let Some(output) = node.output(0) else { continue };
        let facts = view.facts();
        if !over_last_axis(view, square_mean, x) {
            outcome.refuse(view.graph.place(id), "the mean is not over the last axis alone");
        } else if !matches!(facts.dtype(x), Some(DType::F32 | DType::F16)) {
            outcome.refuse(view.graph.place(id), "it is neither f32 nor f16");
        } else if facts.rank(output) != facts.rank(x) {
            outcome.refuse(view.graph.place(id), "a constant gives it more axes");
        } else if facts.fixed_dim(x, -1).is_some_and(|width| width > MAX_WIDTH) {
            outcome.refuse(view.graph.place(id), "its rows are too wide");
        } else if let (Some(epsilon), Some(width)) = (view.scalar(epsilon), facts.fixed_dim(x, -1)) {
            found.push(Normalised { node: id, x, output, epsilon: epsilon as f32, width });
        } else {
            outcome.refuse(view.graph.place(id), "epsilon or the width is not a constant");
        }
    }
    found
}

impl Normalised {
    /// The value whose mean was taken off before, if this is a layer norm.
    pub fn centred(&self, view: &View<'_>) -> Option<ValueId> {
        let (_, sub) = view.made_by(self.x, "Sub")?;
        let (x, mean) = (sub.input(0)?, sub.input(1)?);
        let (_, mean) = view.made_by(mean, "ReduceMean")?;
        (mean.input(0)? == x && over_last_axis(view, mean, x)).then_some(x)
    }

    /// With the weight that follows. Where the norm was computed in f32 between two Casts and the weight follows in the
    /// type of `outer`, the value before the first Cast, the operator takes that: its statistics are f32 in any type.
    pub fn weighted(&self, view: &View<'_>, inner: ValueId) -> Weighted {
        let plain = Weighted { root: self.node, x: inner, weight: None, output: self.output };
        let outer = view.made_by(inner, "Cast").and_then(|(_, cast)| cast.input(0)).unwrap_or(inner);
        let facts = view.facts();
        let cast = view.sole_use(self.output).filter(|(_, node)| node.is("Cast"));
        let normed = cast.and_then(|(_, cast)| cast.output(0)).unwrap_or(self.output);
        let fits = |x: &ValueId| facts.dtype(*x).is_some() && facts.dtype(*x) == facts.dtype(normed);
        let Some(x) = [inner, outer].into_iter().find(fits) else { return plain };
        let scaled = || {
            let (root, mul) = view.sole_use(normed).filter(|(_, node)| node.is("Mul"))?;
            let (_, weight) = view.operands(mul).into_iter().find(|(a, _)| *a == normed)?;
            let weighted = Weighted { root, x, weight: Some(weight), output: mul.output(0)? };
            is_row(view, weight, x).then_some(weighted)
        };
        scaled().unwrap_or(plain)
    }
}

/// Whether the value is one row that holds for all rows of `x`: every dimension but the last is 1.
pub fn is_row(view: &View<'_>, value: ValueId, x: ValueId) -> bool {
    let facts = view.facts();
    let (Some(shape), Some(rank)) = (facts.fixed_shape(value), facts.rank(x)) else { return false };
    let Some((width, rest)) = shape.split_last() else { return false };
    let same_type = facts.dtype(value).is_some() && facts.dtype(value) == facts.dtype(x);
    same_type && shape.len() <= rank && rest.iter().all(|n| *n == 1) && facts.fixed_dim(x, -1) == Some(*width)
}

/// `x`, the ReduceMean of its squares, and what is added to that.
fn parts<'a>(view: &View<'a>, node: &Node) -> Option<(ValueId, &'a Node, ValueId)> {
    let (x, sum) = divided_by_root(view, node)?;
    let (_, add) = view.made_by(sum, "Add")?;
    view.operands(add).into_iter().find_map(|(mean, epsilon)| {
        let (_, mean) = view.made_by(mean, "ReduceMean")?;
        is_square(view, mean.input(0)?, x).then_some((x, mean, epsilon))
    })
}

/// Of `x / sqrt(a)`, `x * (1 / sqrt(a))` and `x * a^-0.5`: `x` and `a`.
fn divided_by_root(view: &View<'_>, node: &Node) -> Option<(ValueId, ValueId)> {
    let root = |value| view.made_by(value, "Sqrt")?.1.input(0);
    if node.is("Div") {
        return Some((node.input(0)?, root(node.input(1)?)?));
    }
    let inverse_root = |value| {
        let (_, by) = view.producer(value)?;
        match (by.op_type.as_str(), by.input(1)) {
            ("Reciprocal", None) => root(by.input(0)?),
            ("Div", Some(divisor)) if view.scalar(by.input(0)?) == Some(1.0) => root(divisor),
            ("Pow", Some(power)) if view.scalar(power) == Some(-0.5) => by.input(0),
            _ => None,
        }
    };
    let operands = if node.is("Mul") { view.operands(node) } else { Vec::new() };
    operands.into_iter().find_map(|(x, factor)| Some((x, inverse_root(factor)?)))
}

fn is_square(view: &View<'_>, value: ValueId, of: ValueId) -> bool {
    let square = || {
        let (_, node) = view.producer(value)?;
        let (a, b) = (node.input(0)?, node.input(1)?);
        Some(a == of && ((node.is("Mul") && b == of) || (node.is("Pow") && view.scalar(b) == Some(2.0))))
    };
    square() == Some(true)
}

fn over_last_axis(view: &View<'_>, mean: &Node, x: ValueId) -> bool {
    let axes = match mean.input(1) {
        Some(axes) => view.ints(axes),
        None => mean.ints("axes").map(<[i64]>::to_vec),
    };
    let Some(rank) = view.facts().rank(x) else { return false };
    let last = |axis: i64| axis == -1 || axis.checked_add(1) == i64::try_from(rank).ok();
    mean.int("keepdims").unwrap_or(1) == 1
        && axes.is_some_and(|axes| matches!(axes[..], [axis] if last(axis)))
}
