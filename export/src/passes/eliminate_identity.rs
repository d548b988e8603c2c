//! Nodes that give back what they get, and pairs that cancel.
//!
//! Before: Identity; Cast to the same type; Reshape, Expand, Squeeze, Slice, Tile and the like whose result has the shape
//! of their input, alone or in a row; Transposes that cancel; Concat, Sum, Max of one; x + -0.0, x - 0.0, x * 1, x / 1;
//! Dropout in inference. After: nothing. Transposes in a row, or reshapes, become one.
//!
//! Refused: adding +0.0 (it makes -0.0 to 0.0), a graph output that repeats another or an input (it needs a node to make
//! it), and results that a body uses by name.

use std::collections::{HashMap, HashSet};

use super::{Outcome, Pass, PassError, Replacement, Settings, View, substitution::Substitution};
use crate::onnx::{Attribute, DType, Model, Node, NodeId, ValueId};

pub const PASS: Pass = Pass {
    name: "eliminate_identity",
    what: "nodes that change nothing, and pairs that cancel -> nothing",
    why: "each is a launch and a copy",
    run,
};

/// Operators that only give their input another shape.
const RESHAPES: &[&str] = &["Reshape", "Flatten", "Squeeze", "Unsqueeze"];

/// Reshapes in a row that are looked through at once.
const MAX_ROW: usize = 8;

const SIGN_OF_ZERO: &str = "adding +0.0 turns -0.0 into +0.0";
const REPEATED_OUTPUT: &str = "a graph output that repeats another value";
const CAPTURED: &str = "a body uses the result by name";

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let (found, mut outcome) = find(&View::of(model));
    let graph = &mut model.graph;
    outcome.applied = found.dropped.len() + found.merged.len();
    for (maker, old, new) in found.renamed {
        let made = graph[maker].outputs.iter_mut().flatten().filter(|output| **output == old);
        made.for_each(|output| *output = new);
    }
    for (id, output, merged) in found.merged {
        let output = found.substitution.of(output);
        let mut new = Replacement::of(graph, id);
        match merged {
            Merged::Transpose { input, perm } => {
                new.op_into("Transpose", &[input], &[("perm", Attribute::Ints(perm))], output);
            }
            Merged::Reshape { input, target } => {
                let target = new.ints(&target);
                new.op_into("Reshape", &[input, target], &[], output);
            }
        }
        new.finish();
    }
    graph.remove_nodes(&found.dropped);
    found.substitution.apply(graph);
    Ok(outcome)
}

#[derive(Default)]
struct Found {
    substitution: Substitution,
    dropped: HashSet<NodeId>,
    /// Makers that now define a graph output themselves: the value before and after.
    renamed: Vec<(NodeId, ValueId, ValueId)>,
    merged: Vec<(NodeId, ValueId, Merged)>,
    rows: Rows,
}

/// Nodes in a row, each to be merged with all before it at once: what the first of them gets, by the last one's result.
#[derive(Default)]
struct Rows {
    /// With the permutation that they do together.
    transposed: HashMap<ValueId, (ValueId, Vec<usize>)>,
    reshaped: HashMap<ValueId, ValueId>,
}

/// One node for several in a row.
enum Merged {
    Transpose { input: ValueId, perm: Vec<i64> },
    Reshape { input: ValueId, target: Vec<i64> },
}

fn find(view: &View<'_>) -> (Found, Outcome) {
    let mut found = Found::default();
    let mut outcome = Outcome::default();
    let captured = view.graph.captured();
    for (id, node) in view.graph.nodes() {
        let [Some(output), ref others @ ..] = node.outputs[..] else { continue };
        if others
            .iter()
            .flatten()
            .any(|other| !view.uses(*other).is_empty() || view.graph.outputs.contains(other))
        {
            continue;
        }
        let transposed = found.rows.transposed(view, node, output);
        let same = match &transposed {
            Some((first, perm)) => is_sorted(perm).then_some(Ok(*first)),
            None => unchanged(view, node, output),
        };
        let Some(same) = same else {
            let merged = match transposed {
                Some((first, perm)) => found.transpose(node, first, &perm),
                None => found.rows.reshape(view, node, output),
            };
            found.merged.extend(merged.map(|merged| (id, output, merged)));
            continue;
        };
        let dropped = match same {
            Err(why) => Err(why),
            Ok(_) if captured.contains(&output) => Err(CAPTURED),
            Ok(input) if view.graph.outputs.contains(&output) => {
                found.give_out(view, &captured, input, output)
            }
            Ok(input) => {
                found.substitution.put(output, input);
                Ok(())
            }
        };
        match dropped {
            Ok(()) => {
                found.dropped.insert(id);
            }
            Err(why) => outcome.refuse(view.graph.label(id), why),
        }
    }
    (found, outcome)
}

impl Found {
    /// Lets the maker of `input` define the graph output `output`.
    fn give_out(
        &mut self,
        view: &View<'_>,
        captured: &HashSet<ValueId>,
        input: ValueId,
        output: ValueId,
    ) -> Result<(), &'static str> {
        let made = self.substitution.of(input);
        let (maker, _) = view.producer(made).ok_or(REPEATED_OUTPUT)?;
        if view.graph.outputs.contains(&made) {
            return Err(REPEATED_OUTPUT);
        }
        if captured.contains(&made) {
            return Err(CAPTURED);
        }
        self.renamed.push((maker, made, output));
        self.substitution.put(made, output);
        Ok(())
    }

    /// A Transpose of what the first one of its row gets, if that is not what it gets itself.
    fn transpose(&self, node: &Node, first: ValueId, perm: &[usize]) -> Option<Merged> {
        let own = self.substitution.of(node.input(0)?);
        let perm = perm.iter().map(|axis| i64::try_from(*axis).ok()).collect::<Option<_>>()?;
        (self.substitution.of(first) != own).then_some(Merged::Transpose { input: first, perm })
    }
}

impl Rows {
    /// What the Transposes in a row up to this one get, and the permutation that they do together.
    fn transposed(&mut self, view: &View<'_>, node: &Node, output: ValueId) -> Option<(ValueId, Vec<usize>)> {
        let input = node.input(0).filter(|_| node.is("Transpose"))?;
        let own = perm(view, node)?;
        let row = match self.transposed.get(&input) {
            Some((first, before)) if before.len() == own.len() => {
                (*first, own.iter().map(|axis| before[*axis]).collect())
            }
            _ => (input, own),
        };
        self.transposed.insert(output, row.clone());
        Some(row)
    }

    /// A Reshape of what the first reshape of its row gets.
    fn reshape(&mut self, view: &View<'_>, node: &Node, output: ValueId) -> Option<Merged> {
        if !node.is("Reshape") || node.int("allowzero").is_some_and(|allow| allow != 0) {
            return None;
        }
        let middle = node.input(0)?;
        view.sole_use(middle)?;
        let (_, before) =
            view.producer(middle).filter(|(_, first)| RESHAPES.iter().any(|op| first.is(op)))?;
        let target = view.ints(node.input(1)?)?;
        // A size that is copied has to be the same before.
        let sizes = |value, axis: usize| view.facts().sizes(value, i64::try_from(axis).ok()?);
        let copied = |input, axis| sizes(input, axis).is_some_and(|size| Some(size) == sizes(middle, axis));
        let holds = |input: &ValueId| {
            *input != output
                && target.iter().enumerate().all(|(axis, size)| *size != 0 || copied(*input, axis))
        };
        let input =
            [self.reshaped.get(&middle).copied(), before.input(0)].into_iter().flatten().find(holds)?;
        self.reshaped.insert(output, input);
        Some(Merged::Reshape { input, target })
    }
}

/// The value that the node gives back unchanged; `Err` if it only looks like that.
fn unchanged(view: &View<'_>, node: &Node, output: ValueId) -> Option<Result<ValueId, &'static str>> {
    if !matches!(node.domain.as_str(), "" | "ai.onnx") {
        return None;
    }
    let input = node.input(0)?;
    let facts = view.facts();
    let same_shape = |input| facts.same_shape(input, output);
    let same_type = |input| facts.dtype(input).is_some_and(|dtype| Some(dtype) == facts.dtype(output));
    let when = |yes: bool| yes.then_some(Ok(input));
    match node.op_type.as_str() {
        "Identity" => when(true),
        "Cast" | "CastLike" => when(same_type(input)),
        "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze" => {
            relabelled(view, input).into_iter().rev().find(|ancestor| same_shape(*ancestor)).map(Ok)
        }
        "Expand" | "Tile" => when(same_shape(input)),
        "Slice" => when(same_shape(input) && steps_are_one(view, node)),
        "Concat" | "Sum" | "Max" | "Min" | "Mean" => when(node.inputs.len() == 1),
        "Dropout" => {
            when(view.opset() >= 7 && node.input(2).is_none_or(|training| view.scalar(training) == Some(0.0)))
        }
        "Add" => with_constant(view, node, same_shape, &[0, 1], |c| c == 0.0 && c.is_sign_negative())
            .map(Ok)
            .or_else(|| zero_added(view, node, same_shape, &[0, 1])),
        "Sub" => with_constant(view, node, same_shape, &[0], |c| c == 0.0 && c.is_sign_positive()).map(Ok),
        "Mul" => with_constant(view, node, same_shape, &[0, 1], |c| c == 1.0).map(Ok),
        "Div" => with_constant(view, node, same_shape, &[0], |c| c == 1.0).map(Ok),
        _ => None,
    }
}

/// The other operand, if it has the result's shape and the one at one of the `places` is a constant of such elements.
fn with_constant(
    view: &View<'_>,
    node: &Node,
    same_shape: impl Fn(ValueId) -> bool,
    kept: &[usize],
    is: impl Fn(f64) -> bool,
) -> Option<ValueId> {
    let [Some(a), Some(b)] = node.inputs[..] else { return None };
    let pairs = [(a, b), (b, a)];
    let mut pairs = kept.iter().filter_map(|place| pairs.get(*place).copied());
    pairs
        .find(|(x, c)| view.facts().floats(*c).is_some_and(|c| c.into_iter().all(&is)) && same_shape(*x))
        .map(|pair| pair.0)
}

/// Integers have one zero.
fn zero_added(
    view: &View<'_>,
    node: &Node,
    same_shape: impl Fn(ValueId) -> bool,
    kept: &[usize],
) -> Option<Result<ValueId, &'static str>> {
    let x = with_constant(view, node, same_shape, kept, |c| c == 0.0)?;
    let float = view.facts().dtype(x).is_none_or(|dtype| {
        matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::F64 | DType::Other(_))
    });
    Some(if float { Err(SIGN_OF_ZERO) } else { Ok(x) })
}

fn steps_are_one(view: &View<'_>, node: &Node) -> bool {
    node.input(4)
        .is_none_or(|steps| view.ints(steps).is_some_and(|steps| steps.iter().all(|step| *step == 1)))
}

/// The permutation that the node does, if it is one.
fn perm(view: &View<'_>, node: &Node) -> Option<Vec<usize>> {
    let perm: Vec<usize> = match node.ints("perm") {
        Some(perm) => perm.iter().map(|axis| usize::try_from(*axis).ok()).collect::<Option<_>>()?,
        None => (0..view.facts().rank(node.input(0)?)?).rev().collect(),
    };
    let mut sorted = perm.clone();
    sorted.sort_unstable();
    is_sorted(&sorted).then_some(perm)
}

fn is_sorted(perm: &[usize]) -> bool {
    perm.iter().copied().eq(0..perm.len())
}

/// The value and those that it is made of by reshaping alone, nearest first.
fn relabelled(view: &View<'_>, value: ValueId) -> Vec<ValueId> {
    let mut values = vec![value];
    while let Some((_, node)) = values.last().and_then(|value| view.producer(*value)) {
        let reshapes = RESHAPES.iter().any(|op| node.is(op));
        match node.input(0).filter(|_| reshapes && values.len() < MAX_ROW) {
            Some(input) => values.push(input),
            None => break,
        }
    }
    values
}
