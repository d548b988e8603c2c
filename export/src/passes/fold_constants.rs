//! What can be computed before the model runs.
//!
//! Before: `Constant` nodes; shape arithmetic and chains over scalars (`Sqrt(Div(1, Sqrt(64)))`) whose result is the same
//! for all sizes of open dimensions; `Transpose(weight)`, `Cast(weight)`, `Unsqueeze(weight)`, `Slice(table)`.
//! After: initializers. Results are bit for bit those of ONNX Runtime's CPU provider. Small ones are computed here, large
//! ones when the model is written.
//!
//! The file does not grow: a result is stored if it is not larger than the constants that go with its nodes, or has at
//! most 8 KiB.
//!
//! Refused: results that are larger than that; operators whose last bit differs between implementations (Sin, Cos, Exp,
//! Pow); graph outputs, which have to be made by a node; constants of text and sparse constants.

use std::collections::HashSet;

use super::{Outcome, Pass, PassError, Settings, View, constant_nodes::ConstantNodes};
use crate::onnx::{Attribute, Model, Node, NodeId, Tensor, ValueId};

pub const PASS: Pass = Pass {
    name: "fold_constants",
    what: "nodes whose result never changes -> initializers, where that does not make the file larger",
    why: "what is computed again at every step costs launches, and integers are computed on the CPU",
    run,
};

const LARGER: &str = "the result is larger than the constants that go";
const OUTPUT: &str = "a graph output that is constant";
const OTHER_FORM: &str = "a constant of text, or a sparse one";
const LAST_BIT: &str = "not computed here, because the last bit could differ from the runtime's";

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let (folded, outcome) = find(&View::of(model))?;
    let graph = &mut model.graph;
    let mut gone = HashSet::new();
    for (node, constants) in folded {
        gone.insert(node);
        for (value, tensor) in constants {
            graph[value].constant = Some(tensor);
        }
    }
    graph.remove_nodes(&gone);
    Ok(outcome)
}

/// A node's outputs.
type Constants = Vec<(ValueId, Tensor)>;

type Folded = Vec<(NodeId, Constants)>;

fn find(view: &View<'_>) -> Result<(Folded, Outcome), PassError> {
    let mut outcome = Outcome::default();
    let mut folded = Folded::new();
    let outputs: HashSet<ValueId> = view.graph.outputs.iter().copied().collect();
    let mut constants = ConstantNodes::of(view);
    for (id, node) in view.graph.nodes() {
        let Some(found) = fold(view, &mut constants, id, node)? else { continue };
        match found {
            _ if node.outputs.iter().flatten().any(|output| outputs.contains(output)) => {
                outcome.refuse(view.graph.place(id), OUTPUT);
            }
            Ok(constants) => folded.push((id, constants)),
            Err(why) => outcome.refuse(view.graph.place(id), why),
        }
    }
    outcome.applied = folded.len();
    Ok((folded, outcome))
}

/// What a node's outputs are, or why they are not to become constants.
type Becomes = Result<Constants, &'static str>;

/// What becomes of the node's outputs; `None` if they are no constants.
fn fold(
    view: &View<'_>,
    constants: &mut ConstantNodes<'_>,
    id: NodeId,
    node: &Node,
) -> Result<Option<Becomes>, PassError> {
    let Some(first) = node.outputs.iter().flatten().next() else { return Ok(None) };
    if node.is("Constant") {
        return Ok(Some(constant(node).map(|tensor| vec![(*first, tensor)]).ok_or(OTHER_FORM)));
    }
    let known = |output: &ValueId| Some((*output, view.facts().constant(*output)?));
    if let Some(known) = node.outputs.iter().flatten().map(known).collect() {
        return Ok(Some(Ok(known)));
    }
    if constants.has(id) {
        if constants.is_operand(*first) {
            return Ok(None);
        }
        let tensor = constants.tensor(id).transpose();
        let tensor = tensor.map_err(|source| PassError::Constant { tensor: view.graph.place(id), source })?;
        return Ok(Some(tensor.map(|tensor| vec![(*first, tensor)]).ok_or(LARGER)));
    }
    let constant = |input: &ValueId| view.constant(*input).is_some();
    let all = node.inputs.iter().flatten().count() > 0 && node.inputs.iter().flatten().all(constant);
    Ok(all.then_some(Err(LAST_BIT)))
}

/// The tensor of a Constant node.
fn constant(node: &Node) -> Option<Tensor> {
    node.attributes.iter().find_map(|(name, value)| match (name.as_str(), value) {
        ("value", Attribute::Tensor(tensor)) => Some(tensor.clone()),
        ("value_int", Attribute::Int(value)) => Some(Tensor::from_i64(&[], &[*value])),
        ("value_ints", Attribute::Ints(values)) => Some(Tensor::from_i64(&[values.len()], values)),
        ("value_float", Attribute::Float(value)) => Some(Tensor::from_f32(&[], &[*value])),
        ("value_floats", Attribute::Floats(values)) => Some(Tensor::from_f32(&[values.len()], values)),
        _ => None,
    })
}
