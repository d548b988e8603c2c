//! Sizes that are computed at run time and need not be.
//!
//! Before: `Reshape(x, Concat(Gather(Shape(x)), ...))`, `Expand` to a shape that was read, `Slice` to the end of an axis,
//! `Resize` to twice the size. After: constants. Reshape copies sizes (0) and takes the rest (-1), see [`super::reshape_plan`];
//! Expand says 1 where the size stays; Slice ends at the largest number or counts from the end; Resize gets its scales. A
//! group norm (Reshape, InstanceNormalization, and Reshape back to the shape that was read) keeps the axes behind the
//! third in both shapes, so that the way back needs no size.
//!
//! Refused: what does depend on an open size, with its name; what depends on data.

use std::borrow::Cow;

use super::{
    Facts, Outcome, Pass, PassError, Replacement, Settings, View,
    reshape_plan::{Plan, Sizes, plan},
};
use crate::onnx::{Attribute, Model, Node, NodeId, Tensor, ValueId};

pub const PASS: Pass = Pass {
    name: "fold_shapes",
    what: "sizes that are read at run time -> constants that hold for all sizes",
    why: "Shape and what follows runs on the CPU, between launches on the GPU",
    run,
};

const DATA: &str = "depends on data at run time";
const UNKNOWN: &str = "the shapes around it are not known";

/// Operators that take sizes as an input, and which.
const SIZED: &[(&str, &[usize])] = &[
    ("Reshape", &[1]),
    ("Expand", &[1]),
    ("Slice", &[1, 2]),
    ("Resize", &[2, 3]),
    ("ConstantOfShape", &[0]),
    ("Tile", &[1]),
    ("Range", &[0, 1, 2]),
    ("Split", &[1]),
    ("Pad", &[1]),
    ("TopK", &[1]),
];

/// What a node becomes.
enum Edit {
    Reshape {
        x: ValueId,
        plan: Plan,
    },
    GroupNorm {
        x: ValueId,
        norm: NodeId,
        groups: usize,
        channels: usize,
        rank: usize,
    },
    Same {
        x: ValueId,
    },
    /// A Slice along the axis for each part of a Split.
    Slices {
        x: ValueId,
        axis: i64,
        parts: Vec<(ValueId, i64, i64)>,
    },
    /// The same operator with other inputs.
    Inputs {
        node: Node,
        constants: Vec<(usize, Tensor)>,
    },
}

type Why = Cow<'static, str>;

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let (edits, outcome) = find(&View::of(model));
    let attribute_axes = model.opset("").unwrap_or(0) < 13;
    for (id, output, edit) in edits {
        let norm = match &edit {
            Edit::GroupNorm { norm, .. } => Some(model.graph[*norm].clone()),
            _ => None,
        };
        let mut new = Replacement::of(&mut model.graph, id);
        match edit {
            Edit::Reshape { x, plan } => reshape(&mut new, x, plan, output, attribute_axes),
            Edit::GroupNorm { x, groups, channels, rank, .. } => {
                let Some(norm) = norm else { continue };
                group_norm(&mut new, x, norm, [groups, channels, rank], output);
            }
            Edit::Same { x } => new.op_into("Identity", &[x], &[], output),
            Edit::Slices { x, axis, parts } => {
                let axis = new.ints(&[axis]);
                for (part, start, end) in parts {
                    let (start, end) = (new.ints(&[start]), new.ints(&[end]));
                    new.op_into("Slice", &[x, start, end, axis], &[], part);
                }
            }
            Edit::Inputs { mut node, constants } => {
                for (index, tensor) in constants {
                    let value = new.constant(tensor);
                    if index >= node.inputs.len() {
                        node.inputs.resize(index + 1, None);
                    }
                    node.inputs[index] = Some(value);
                }
                new.push(node);
            }
        }
        new.finish();
    }
    Ok(outcome)
}

/// Writes a plan's nodes; the last one defines the output.
pub fn reshape(new: &mut Replacement<'_>, x: ValueId, plan: Plan, output: ValueId, attribute_axes: bool) {
    let axes = |op: &'static str, axes: Vec<i64>| (!axes.is_empty()).then_some((op, axes));
    let steps = axes("Unsqueeze", plan.unsqueeze)
        .into_iter()
        .chain(plan.targets.into_iter().map(|target| ("Reshape", target)))
        .chain(axes("Squeeze", plan.squeeze));
    let mut steps = steps.peekable();
    if steps.peek().is_none() {
        return new.op_into("Identity", &[x], &[], output);
    }
    let mut x = x;
    while let Some((op, list)) = steps.next() {
        let as_attribute = attribute_axes && op != "Reshape";
        let attributes =
            if as_attribute { vec![("axes", Attribute::Ints(list.clone()))] } else { Vec::new() };
        let inputs = if as_attribute { vec![x] } else { vec![x, new.ints(&list)] };
        if steps.peek().is_some() {
            x = new.op(op, &inputs, &attributes);
        } else {
            new.op_into(op, &inputs, &attributes, output);
        }
    }
}

/// [N, C, D, ...] as [N, G, C/G*D, ...], normalised, and back.
pub fn group_norm(
    new: &mut Replacement<'_>,
    x: ValueId,
    norm: Node,
    [groups, channels, rank]: [usize; 3],
    output: ValueId,
) {
    let target = |axis: usize| {
        let mut target = vec![0, axis as i64, -1];
        target.resize(rank, 0);
        target
    };
    let (there, back) = (new.ints(&target(groups)), new.ints(&target(channels)));
    let grouped = new.op("Reshape", &[x, there], &[]);
    let attributes: Vec<(&str, Attribute)> =
        norm.attributes.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let inputs: Vec<ValueId> =
        std::iter::once(grouped).chain(norm.inputs.iter().skip(1).flatten().copied()).collect();
    let normed = new.op("InstanceNormalization", &inputs, &attributes);
    new.op_into("Reshape", &[normed, back], &[], output);
}

fn find(view: &View<'_>) -> (Vec<(NodeId, ValueId, Edit)>, Outcome) {
    let mut edits = Vec::new();
    let mut outcome = Outcome::default();
    for (id, node) in view.graph.nodes() {
        let Some((op, operands)) = SIZED.iter().find(|row| node.is(row.0)) else { continue };
        let Some(output) = node.output(0) else { continue };
        let computed = |index: &&usize| {
            node.input(**index)
                .is_some_and(|value| view.producer(value).is_some() && view.facts().constant(value).is_none())
        };
        let open: Vec<ValueId> =
            operands.iter().filter(computed).filter_map(|index| node.input(*index)).collect();
        if open.is_empty() {
            continue;
        }
        let edit = match *op {
            "Reshape" => reshaped(view, node, output),
            "Expand" => expanded(view, node, output),
            "Slice" => sliced(view, node),
            "Resize" => resized(view, node, output),
            "Split" => split(view, node),
            _ => Err(dependence(view, &open)),
        };
        match edit {
            Ok(edit) => edits.push((id, output, edit)),
            Err(why) if why == UNKNOWN || why == DATA => {
                outcome.refuse(view.graph.label(id), view.facts().contradiction().map_or(why, Cow::Owned));
            }
            Err(why) => outcome.refuse(view.graph.label(id), why),
        }
    }
    outcome.applied = edits.len();
    (edits, outcome)
}

/// Why integers that are not constant cannot be made so.
fn dependence(view: &View<'_>, values: &[ValueId]) -> Why {
    let facts = view.facts();
    let mut sizes = Vec::new();
    for value in values {
        let count = facts.fixed_shape(*value).map_or(1, |shape| shape.iter().product::<usize>().min(8));
        for index in 0..count {
            match facts.int_at(*value, index) {
                Some(ints) => sizes.push(ints),
                None => return DATA.into(),
            }
        }
    }
    on_sizes(facts, &sizes)
}

fn on_sizes(facts: &Facts, sizes: &[Vec<i64>]) -> Why {
    let mut names: Vec<String> = sizes.iter().flat_map(|sizes| facts.symbols_of(sizes)).collect();
    names.sort();
    names.dedup();
    if names.is_empty() {
        return UNKNOWN.into();
    }
    let options: Vec<String> = names.iter().map(|name| format!("--dim {name}=N")).collect();
    let it = if names.len() == 1 { "it" } else { "them" };
    format!("depends on {} at run time: bind {it} with {}", names.join(" and "), options.join(" ")).into()
}

fn signed(sizes: &[usize]) -> Vec<i64> {
    sizes.iter().map(|size| i64::try_from(*size).unwrap_or(i64::MAX)).collect()
}

/// Sizes along all axes.
pub fn sizes(view: &View<'_>, value: ValueId) -> Option<Vec<Sizes>> {
    let rank = view.facts().rank(value)?;
    (0..rank).map(|axis| view.facts().sizes(value, axis as i64)).collect()
}

fn reshaped(view: &View<'_>, node: &Node, output: ValueId) -> Result<Edit, Why> {
    let x = node.input(0).ok_or(UNKNOWN)?;
    if let Some(edit) = normed(view, x, output) {
        return Ok(edit);
    }
    let (Some(from), Some(to)) = (sizes(view, x), sizes(view, output)) else {
        return Err(node.input(1).map_or(UNKNOWN.into(), |target| dependence(view, &[target])));
    };
    if elements(&from) != elements(&to) {
        return Err(UNKNOWN.into()); // recorded sizes that contradict
    }
    match plan(&from, &to) {
        Ok(plan) => Ok(Edit::Reshape { x, plan }),
        Err(places) => {
            let sizes: Vec<Vec<i64>> = places.iter().filter_map(|at| Some(signed(to.get(*at)?))).collect();
            Err(on_sizes(view.facts(), &sizes))
        }
    }
}

/// Elements of a shape in every sample; none has more than can be counted.
fn elements(shape: &[Sizes]) -> Sizes {
    let samples = shape.first().map_or(0, Vec::len);
    let sizes = |sample: usize| shape.iter().filter_map(move |sizes| sizes.get(sample));
    (0..samples).map(|sample| sizes(sample).fold(1, |n: usize, size| n.saturating_mul(*size))).collect()
}

/// Reshape(InstanceNormalization(Reshape(x, [N, G, -1]))) with the shape of x.
fn normed(view: &View<'_>, normed: ValueId, output: ValueId) -> Option<Edit> {
    let facts = view.facts();
    let (norm, node) = view.made_by(normed, "InstanceNormalization")?;
    let grouped = node.input(0)?;
    let x = view.made_by(grouped, "Reshape")?.1.input(0)?;
    let rank = facts.rank(x).filter(|rank| *rank >= 4)?;
    let same = facts.same_shape(x, output)
        && facts.rank(grouped) == Some(3)
        && facts.sizes(grouped, 0) == facts.sizes(x, 0);
    let (groups, channels) = (facts.fixed_dim(grouped, 1)?, facts.fixed_dim(x, 1)?);
    let whole = groups > 0 && channels > 0 && channels % groups == 0;
    (same && whole).then_some(Edit::GroupNorm { x, norm, groups, channels, rank })
}

fn expanded(view: &View<'_>, node: &Node, output: ValueId) -> Result<Edit, Why> {
    let x = node.input(0).ok_or(UNKNOWN)?;
    if view.facts().same_shape(x, output) {
        return Ok(Edit::Same { x });
    }
    let (from, to) = (sizes(view, x).ok_or(UNKNOWN)?, sizes(view, output).ok_or(UNKNOWN)?);
    let lead = to.len().checked_sub(from.len()).ok_or(UNKNOWN)?;
    let mut target = Vec::new();
    for (at, size) in to.iter().enumerate() {
        let own = at.checked_sub(lead).and_then(|at| from.get(at));
        let fixed = size.iter().all(|other| Some(other) == size.first());
        target.push(match (own, size.first()) {
            (Some(own), _) if own == size => 1,
            (_, Some(number)) if fixed => i64::try_from(*number).unwrap_or(i64::MAX),
            _ => return Err(on_sizes(view.facts(), &[signed(size)])),
        });
    }
    Ok(with_constants(node, vec![(1, Tensor::from_i64(&[target.len()], &target))]))
}

fn with_constants(node: &Node, constants: Vec<(usize, Tensor)>) -> Edit {
    Edit::Inputs { node: node.clone(), constants }
}

/// Bounds as constants: as they are, to the end, or counted from the end.
fn sliced(view: &View<'_>, node: &Node) -> Result<Edit, Why> {
    let facts = view.facts();
    let (Some(x), Some(starts), Some(ends)) = (node.input(0), node.input(1), node.input(2)) else {
        return Err(UNKNOWN.into());
    };
    let count = facts.fixed_shape(starts).and_then(|shape| shape.first().copied()).ok_or(UNKNOWN)?;
    let rank = facts.rank(x).filter(|rank| count <= *rank).ok_or(UNKNOWN)?;
    let list = |index: usize| node.input(index).map(|value| view.ints(value).ok_or(DATA));
    let axes = list(3).unwrap_or_else(|| Ok((0..rank as i64).collect()))?;
    let steps = list(4).unwrap_or_else(|| Ok(vec![1; count]))?;
    let mut bounds = [Vec::new(), Vec::new()];
    for at in 0..count {
        let (axis, step) = (axes.get(at).copied().ok_or(UNKNOWN)?, steps.get(at).copied().ok_or(UNKNOWN)?);
        for (which, value) in [starts, ends].into_iter().enumerate() {
            let sizes = facts.sizes(x, axis).map(|sizes| signed(&sizes));
            let own = facts.int_at(value, at).ok_or(DATA)?;
            let constant = bound(sizes.as_deref(), &own, which == 1 && step > 0);
            bounds[which].push(constant.ok_or_else(|| on_sizes(facts, std::slice::from_ref(&own)))?);
        }
    }
    let [starts, ends] = bounds.map(|bounds| Tensor::from_i64(&[bounds.len()], &bounds));
    Ok(with_constants(node, vec![(1, starts), (2, ends)]))
}

fn bound(sizes: Option<&[i64]>, own: &[i64], is_end: bool) -> Option<i64> {
    let first = *own.first()?;
    if own.iter().all(|bound| *bound == first) {
        return Some(first);
    }
    let sizes = sizes?;
    if is_end && own.iter().zip(sizes).all(|(bound, size)| bound >= size) {
        return Some(i64::MAX);
    }
    let from_end = own.first()?.checked_sub(*sizes.first()?)?;
    let same = own.iter().zip(sizes).all(|(bound, size)| bound.checked_sub(*size) == Some(from_end));
    (same && from_end < 0).then_some(from_end)
}

/// Parts whose places are the same from the start or from the end.
fn split(view: &View<'_>, node: &Node) -> Result<Edit, Why> {
    let x = node.input(0).ok_or(UNKNOWN)?;
    let axis = node.int("axis").unwrap_or(0);
    let whole = signed(&view.facts().sizes(x, axis).ok_or(UNKNOWN)?);
    let mut at = vec![0i64; whole.len()];
    let mut parts = Vec::new();
    for output in &node.outputs {
        let output = output.ok_or(UNKNOWN)?;
        let sizes = signed(&view.facts().sizes(output, axis).ok_or(UNKNOWN)?);
        let ends: Vec<i64> = at.iter().zip(&sizes).map(|(at, size)| at.saturating_add(*size)).collect();
        let (start, end) = (bound(Some(&whole), &at, false), bound(Some(&whole), &ends, true));
        let (start, end) =
            start.zip(end).ok_or_else(|| on_sizes(view.facts(), std::slice::from_ref(&ends)))?;
        parts.push((output, start, end));
        at = ends;
    }
    if at != whole {
        return Err(UNKNOWN.into()); // recorded sizes that contradict
    }
    Ok(Edit::Slices { x, axis, parts })
}

/// Whole factors, and their inverses where they are exact.
fn resized(view: &View<'_>, node: &Node, output: ValueId) -> Result<Edit, Why> {
    let x = node.input(0).ok_or(UNKNOWN)?;
    let policy = node.text("keep_aspect_ratio_policy").unwrap_or("stretch");
    if node.attribute("axes").is_some() || policy != "stretch" || node.input(3).is_none() {
        return Err(UNKNOWN.into());
    }
    let (from, to) = (sizes(view, x).ok_or(UNKNOWN)?, sizes(view, output).ok_or(UNKNOWN)?);
    let mut scales = Vec::new();
    for (own, new) in from.iter().zip(&to) {
        let scale = factor(own, new).or_else(|| factor(new, own).filter(|factor| factor.is_power_of_two()));
        let down = own.first() > new.first();
        let scale =
            scale.filter(|scale| *scale < 1 << 20).ok_or_else(|| on_sizes(view.facts(), &[signed(new)]))?;
        scales.push(if down { 1.0 / scale as f32 } else { scale as f32 });
    }
    let mut node = node.clone();
    node.inputs.truncate(3);
    Ok(with_constants(&node, vec![(2, Tensor::from_f32(&[scales.len()], &scales))]))
}

/// The whole number that all sizes grow by.
fn factor(from: &[usize], to: &[usize]) -> Option<usize> {
    let factor = to.first()?.checked_div(*from.first()?)?;
    let same = from.iter().zip(to).all(|(from, to)| from.checked_mul(factor) == Some(*to));
    (same && factor > 0).then_some(factor)
}
