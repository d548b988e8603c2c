//! Attention masks without infinities.
//!
//! Before: scores + Where(seen, 0, -inf), or -inf, f32's or f16's lowest number in a constant.
//! After: -1e30 in f32, -32768 in f16. The softmax of a row that sees a key is the same: what is hidden has weight 0.
//!
//! With -inf, a row that sees no key has no softmax (NaN); where torch's guard follows, which makes such rows 0, they are
//! made 0 by the mask itself: Where(ReduceMax(mask) > lowest / 2, attention, 0). Without the guard they now get some
//! average of the values instead of NaN. The lowest numbers become equal: such rows had and have the plain average. In f16,
//! sums with -65504 overflow to -inf; sums with -32768 do not.
//! Refused: masks that hide with several numbers where a row may see no key (it sees what is least hidden, and would now
//! see all alike), masks or sums with them that are used for more than attention, masks shared with one that is refused,
//! constants beyond 16 MiB or unreadable, a softmax over another axis than the keys; before a guard, more than one mask, and
//! weights that are used for more than one product. Masks that come from outside are not looked at.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::{
    Outcome, Pass, PassError, Replacement, Settings, View,
    attention::{Attention, Mask, attentions},
    heads::Output,
};
use crate::onnx::{Attribute, DType, Graph, Model, NodeId, Tensor, ValueId};

pub const PASS: Pass = Pass {
    name: "finite_masks",
    what: "-inf in attention masks -> a large finite number",
    why: "a row of nothing but -inf has no softmax, and sums with f16's lowest number overflow to -inf",
    run,
};

const ELSEWHERE: &str = "the mask is used for more than attention";
const SHARED: &str = "the mask is shared with an attention that is left alone";
const LARGE: &str = "the mask is a constant that cannot be looked at";
const UNEQUAL: &str = "the mask hides with different numbers, which rows that see no key tell apart";
const AXIS: &str = "the softmax is not over the last axis";
const WEIGHTS: &str = "the weights behind a guard against NaN are used for more than the values";
const SEVERAL: &str = "there is more than one mask before a guard against NaN";

/// The largest constant mask, in bytes; one of 2048 keys and queries in f32.
const MAX_CONSTANT: usize = 16 << 20;
/// Nodes between a mask's numbers and its sum with the scores.
const MAX_STEPS: usize = 16;

/// What takes the place of everything lower, by type.
fn lowest(dtype: DType) -> Option<f32> {
    match dtype {
        DType::F32 => Some(-1e30),
        DType::F16 => Some(-32768.0),
        _ => None,
    }
}

fn is_too_low(dtype: DType, number: f32) -> bool {
    match dtype {
        DType::F16 => number < -40000.0,
        _ => lowest(dtype).is_some_and(|lowest| number < lowest),
    }
}

/// A number that is too low, as a node takes it.
#[derive(Clone, Copy, Debug)]
struct Edge {
    node: NodeId,
    index: usize,
    dtype: DType,
    infinite: bool,
}

/// What a mask is made of.
#[derive(Debug, Default)]
pub(super) struct Origin {
    edges: Vec<Edge>,
    /// The nodes between the numbers and the scores.
    path: HashSet<NodeId>,
    /// Whether some of it comes from outside or is not followed.
    pub unknown: bool,
    unreadable: bool,
    /// The numbers, as bits, that are too low or become equal to those that are.
    low: BTreeSet<u32>,
    /// Whether the whole mask is a constant with a key to see in every row.
    all_rows_see: bool,
}

impl Origin {
    pub fn of(view: &View<'_>, mask: &Mask) -> Origin {
        let mut origin = Origin::default();
        origin.trace(view, mask.add, mask.index, MAX_STEPS);
        if let Some(tensor) = view.constant(mask.value) {
            origin.all_rows_see = every_row_sees(tensor);
        }
        origin
    }

    /// Whether all scores of a row may be -inf. In f16, sums with the lowest number are, too.
    pub fn may_hide_rows(&self) -> bool {
        self.edges.iter().any(|edge| edge.infinite || edge.dtype == DType::F16)
    }

    /// Whether there is -inf in a row that may have nothing else.
    fn blinds_rows(&self) -> bool {
        !self.all_rows_see && self.edges.iter().any(|edge| edge.infinite)
    }

    fn trace(&mut self, view: &View<'_>, node: NodeId, index: usize, steps: usize) {
        self.path.insert(node);
        let value = view.graph[node].input(index);
        let (Some(value), Some(steps)) = (value, steps.checked_sub(1)) else { return self.unknown = true };
        let Some(dtype) = view.facts().dtype(value) else { return self.unknown = true };
        if let Some(number) = view.scalar(value) {
            self.add(node, index, dtype, &[number as f32]);
        } else if let Some(tensor) = view.constant(value) {
            match numbers(tensor) {
                Some(numbers) => self.add(node, index, dtype, &numbers),
                None => (self.unknown, self.unreadable) = (true, true),
            }
        } else {
            self.trace_node(view, value, steps);
        }
    }

    fn add(&mut self, node: NodeId, index: usize, dtype: DType, numbers: &[f32]) {
        let is_low = |number: &&f32| lowest(dtype).is_some_and(|lowest| **number <= lowest);
        self.low.extend(numbers.iter().filter(is_low).map(|number| number.to_bits()));
        if numbers.iter().any(|number| is_too_low(dtype, *number)) {
            let infinite = numbers.contains(&f32::NEG_INFINITY);
            self.edges.push(Edge { node, index, dtype, infinite });
        }
    }

    fn trace_node(&mut self, view: &View<'_>, value: ValueId, steps: usize) {
        const LAYOUT: [&str; 9] =
            ["Expand", "Reshape", "Unsqueeze", "Squeeze", "Slice", "Transpose", "Identity", "Gather", "Cast"];
        let Some((id, node)) = view.producer(value) else { return self.unknown = true };
        let of = |index: usize| node.input(index).and_then(|input| view.facts().dtype(input));
        let inputs: &[usize] = match node.op_type.as_str() {
            "Where" => &[1, 2],
            "Add" | "Sub" | "Mul" | "Min" | "Max" if node.inputs.len() == 2 => &[0, 1],
            "Cast" if !matches!(of(0), Some(DType::F32 | DType::F16)) => {
                return self.unknown |= !matches!(of(0), Some(DType::Bool | DType::I64 | DType::I32));
            }
            "ConstantOfShape" => return self.unknown |= !filled_with_finite(view, id),
            op if LAYOUT.contains(&op) => &[0],
            _ => return self.unknown = true,
        };
        if !matches!(node.domain.as_str(), "" | "ai.onnx") {
            return self.unknown = true;
        }
        for index in inputs {
            self.trace(view, id, *index, steps);
        }
    }
}

/// Fills with 0 unless an attribute says otherwise.
fn filled_with_finite(view: &View<'_>, node: NodeId) -> bool {
    match view.graph[node].attribute("value") {
        None => true,
        Some(Attribute::Tensor(tensor)) => numbers(tensor)
            .is_some_and(|numbers| numbers.iter().all(|number| !is_too_low(tensor.dtype, *number))),
        Some(_) => false,
    }
}

fn numbers(tensor: &Tensor) -> Option<Vec<f32>> {
    if tensor.bytes.len() > MAX_CONSTANT {
        return None;
    }
    tensor.to_f32().ok()?
}

fn every_row_sees(tensor: &Tensor) -> bool {
    let keys = tensor.shape.last().copied().filter(|keys| *keys > 0);
    let seen = |number: &f32| !is_too_low(tensor.dtype, *number) && !number.is_nan();
    let rows = keys.zip(numbers(tensor));
    rows.is_some_and(|(keys, numbers)| numbers.chunks(keys).all(|row| row.iter().any(seen)))
}

/// One attention whose masks have numbers that are too low.
struct Plan {
    place: String,
    origins: Vec<Origin>,
    /// The nodes between the masks and the softmax.
    masked: Vec<NodeId>,
    /// What makes rows 0 that see no key, if a guard did.
    blank: Option<Blank>,
}

/// Where rows are made 0.
struct Blank {
    mask: ValueId,
    dtype: DType,
    output: Output,
}

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    let view = View::of(model);
    let attentions = attentions(&view);
    let mut plans: Vec<Result<Plan, (Plan, &'static str)>> =
        attentions.iter().filter_map(|attention| plan(&view, attention)).collect();
    leave_used_elsewhere(&view, &attentions, &mut plans);
    leave_shared(&mut plans);
    let mut chosen = Vec::new();
    for plan in plans {
        match plan {
            Ok(plan) => chosen.push(plan),
            Err((plan, why)) => outcome.refuse(plan.place, why),
        }
    }
    let opset = view.opset();
    outcome.applied = chosen.len();
    let edges: BTreeMap<(NodeId, usize), Edge> = chosen
        .iter()
        .flat_map(|plan| &plan.origins)
        .flat_map(|origin| &origin.edges)
        .map(|edge| ((edge.node, edge.index), *edge))
        .collect();
    for edge in edges.values() {
        make_finite(&mut model.graph, edge);
    }
    for blank in chosen.iter().filter_map(|plan| plan.blank.as_ref()) {
        make_zero(&mut model.graph, blank, opset);
    }
    Ok(outcome)
}

/// What there is to do for an attention, or why it is left alone; `None` if its masks are fine.
fn plan(view: &View<'_>, attention: &Attention) -> Option<Result<Plan, (Plan, &'static str)>> {
    let masks = &attention.scores.masks;
    let origins: Vec<Origin> = masks.iter().map(|mask| Origin::of(view, mask)).collect();
    let unreadable = origins.iter().any(|origin| origin.unreadable);
    if origins.iter().all(|origin| origin.edges.is_empty()) && !unreadable {
        return None;
    }
    let masked = attention.scores.masked.clone();
    let mut plan = Plan { place: view.graph.place(attention.softmax), origins, masked, blank: None };
    if unreadable {
        return Some(Err((plan, LARGE)));
    }
    if !attention.over_keys {
        return Some(Err((plan, AXIS)));
    }
    let low: BTreeSet<u32> = plan.origins.iter().flat_map(|origin| &origin.low).copied().collect();
    if low.len() > 1 && !matches!(&plan.origins[..], [mask] if mask.all_rows_see) {
        return Some(Err((plan, UNEQUAL)));
    }
    if attention.guard.is_some() && plan.origins.iter().any(Origin::blinds_rows) {
        let [mask] = masks[..] else { return Some(Err((plan, SEVERAL))) };
        if attention.weights_shared {
            return Some(Err((plan, WEIGHTS)));
        }
        match blank(view, attention, mask.value) {
            Ok(blank) => plan.blank = Some(blank),
            Err(why) => return Some(Err((plan, why))),
        }
    }
    Some(Ok(plan))
}

fn blank(view: &View<'_>, attention: &Attention, mask: ValueId) -> Result<Blank, &'static str> {
    let output = Output::of(view, attention.apply)?;
    let facts = view.facts();
    let dtype = facts.dtype(mask).filter(|dtype| lowest(*dtype).is_some()).ok_or(LARGE)?;
    let rank = facts.rank(mask).unwrap_or(0);
    let one_for_all_heads =
        rank >= 2 && (0..rank - 2).all(|axis| facts.fixed_dim(mask, axis as i64) == Some(1));
    let output = if one_for_all_heads { output } else { output.before_joining(attention.apply) };
    Ok(Blank { mask, dtype, output })
}

/// Leaves masks alone that are used for other things than attention, by themselves or in sums with scores.
fn leave_used_elsewhere(
    view: &View<'_>,
    attentions: &[Attention],
    plans: &mut Vec<Result<Plan, (Plan, &'static str)>>,
) {
    let mut within: HashSet<NodeId> = HashSet::new();
    for attention in attentions {
        let paths = attention.scores.masks.iter().flat_map(|mask| Origin::of(view, mask).path);
        within.extend(paths.chain(attention.scores.masked.iter().copied()).chain([attention.softmax]));
    }
    let only_masks = |id: &NodeId| {
        view.graph[*id].outputs.iter().flatten().all(|output| {
            !view.graph.outputs.contains(output)
                && view.uses(*output).iter().all(|user| within.contains(user))
        })
    };
    for slot in plans.iter_mut() {
        let fine = slot.as_ref().is_ok_and(|plan| {
            plan.origins.iter().flat_map(|origin| &origin.path).chain(&plan.masked).all(only_masks)
        });
        refuse_unless(slot, fine, ELSEWHERE);
    }
}

/// Leaves attentions alone whose masks are those of others that are left alone.
fn leave_shared(plans: &mut [Result<Plan, (Plan, &'static str)>]) {
    let edges = |plan: &Plan| -> Vec<(NodeId, usize)> {
        plan.origins.iter().flat_map(|origin| &origin.edges).map(|edge| (edge.node, edge.index)).collect()
    };
    loop {
        let left: HashSet<_> =
            plans.iter().filter_map(|plan| plan.as_ref().err()).flat_map(|(plan, _)| edges(plan)).collect();
        let mut changed = false;
        for slot in plans.iter_mut() {
            let Ok(plan) = slot else { continue };
            let fine = edges(plan).iter().all(|edge| !left.contains(edge));
            changed |= !fine;
            refuse_unless(slot, fine, SHARED);
        }
        if !changed {
            return;
        }
    }
}

fn refuse_unless(slot: &mut Result<Plan, (Plan, &'static str)>, fine: bool, why: &'static str) {
    if let (false, Ok(plan)) = (fine, &mut *slot) {
        let (origins, masked) = (std::mem::take(&mut plan.origins), std::mem::take(&mut plan.masked));
        *slot = Err((Plan { place: plan.place.clone(), origins, masked, blank: None }, why));
    }
}

/// Gives a node a finite number in the place of one that is too low.
fn make_finite(graph: &mut Graph, edge: &Edge) {
    let (Some(value), Some(lowest)) = (graph[edge.node].input(edge.index), lowest(edge.dtype)) else {
        return;
    };
    let raised = graph[value].constant.as_ref().filter(|tensor| tensor.elements() != 1).and_then(|tensor| {
        let raised: Vec<f32> = numbers(tensor)?.into_iter().map(|number| number.max(lowest)).collect();
        Some(match edge.dtype {
            DType::F16 => Tensor::from_f16(&tensor.shape, &raised),
            _ => Tensor::from_f32(&tensor.shape, &raised),
        })
    });
    let mut r = Replacement::of(graph, edge.node);
    let finite = match raised {
        Some(tensor) => r.constant(tensor),
        None => r.scalar(edge.dtype, lowest),
    };
    graph[edge.node].inputs[edge.index] = Some(finite);
}

/// Makes rows of an attention 0 that see no key.
fn make_zero(graph: &mut Graph, blank: &Blank, opset: i64) {
    let Output { root, value, joined, .. } = blank.output;
    let mut original = graph[root].clone();
    let mut r = Replacement::of(graph, root);
    let highest = if opset < 18 {
        r.op("ReduceMax", &[blank.mask], &[("axes", Attribute::Ints(vec![-1]))])
    } else {
        let axes = r.ints(&[-1]);
        r.op("ReduceMax", &[blank.mask, axes], &[])
    };
    let half = r.scalar(blank.dtype, lowest(blank.dtype).unwrap_or(f32::MIN) / 2.0);
    let mut sees = r.op("Greater", &[highest, half], &[]);
    if joined {
        let shape = r.ints(&[1, -1, 1]);
        sees = r.op("Reshape", &[sees, shape], &[]);
    }
    let kept = r.value();
    original.outputs = vec![Some(kept)];
    r.push(original);
    let zero = r.scalar(blank.output.dtype(), 0.0);
    r.op_into("Where", &[sees, kept, zero], &[], value);
    r.finish();
}
