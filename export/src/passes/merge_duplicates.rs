//! Nodes that compute the same.
//!
//! Before: two nodes with the same operator, attributes and inputs (the Transpose of a tied weight, the cosines of every
//! block). After: the first. Refused: results that are graph outputs or that a body uses by name. Operators of chance and
//! nodes with bodies or tensors as attributes are not looked at.

use std::collections::{HashMap, HashSet};

use super::{Outcome, Pass, PassError, Settings, View, substitution::Substitution};
use crate::onnx::{Attribute, Model, Node, NodeId, ValueId};

pub const PASS: Pass = Pass {
    name: "merge_duplicates",
    what: "nodes that compute the same of the same -> one of them",
    why: "exporters write per block what all blocks share",
    run,
};

const BY_NAME: &str = "a graph output, or used by a body by name";

/// Operators whose result is another one each time.
pub const CHANCE: &[&str] = &[
    "Bernoulli",
    "Dropout",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
];

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let (substitution, gone, outcome) = find(&View::of(model));
    model.graph.remove_nodes(&gone);
    substitution.apply(&mut model.graph);
    Ok(outcome)
}

fn find(view: &View<'_>) -> (Substitution, HashSet<NodeId>, Outcome) {
    let mut outcome = Outcome::default();
    let mut substitution = Substitution::default();
    let mut gone = HashSet::new();
    let named: HashSet<ValueId> = view.graph.outputs.iter().copied().chain(view.graph.captured()).collect();
    let mut first: HashMap<Key<'_>, NodeId> = HashMap::new();
    for (id, node) in view.graph.nodes() {
        let Some(key) = key(node, &substitution) else { continue };
        let Some(same) = first.get(&key) else {
            first.insert(key, id);
            continue;
        };
        let outputs = view.graph[*same].outputs.iter().zip(&node.outputs);
        if node.outputs.iter().flatten().any(|output| named.contains(output)) {
            outcome.refuse(view.graph.label(id), BY_NAME);
            continue;
        }
        for (same, own) in outputs {
            if let (Some(same), Some(own)) = (same, own) {
                substitution.put(*own, *same);
            }
        }
        gone.insert(id);
        outcome.applied += 1;
    }
    (substitution, gone, outcome)
}

/// What nodes that compute the same have in common.
#[derive(PartialEq, Eq, Hash)]
struct Key<'a> {
    op_type: &'a str,
    domain: &'a str,
    inputs: Vec<Option<ValueId>>,
    attributes: Vec<(&'a str, Setting<'a>)>,
    /// Which outputs there are.
    outputs: Vec<bool>,
}

#[derive(PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Setting<'a> {
    Ints(&'a [i64]),
    Floats(Vec<u32>),
    Strings(Vec<&'a [u8]>),
}

fn key<'a>(node: &'a Node, substitution: &Substitution) -> Option<Key<'a>> {
    // What an operator of the model's own does is not known; it may draw numbers.
    let is_known = matches!(node.domain.as_str(), "" | "ai.onnx" | "com.microsoft");
    if !is_known
        || CHANCE.iter().any(|op| node.is(op))
        || node.extra.as_ref().is_some_and(|extra| extra.overload.is_some())
    {
        return None;
    }
    let mut attributes: Vec<(&str, Setting<'_>)> = node
        .attributes
        .iter()
        .map(|(name, value)| Some((name.as_str(), setting(value)?)))
        .collect::<Option<_>>()?;
    attributes.sort();
    Some(Key {
        op_type: &node.op_type,
        domain: &node.domain,
        inputs: node.inputs.iter().map(|input| input.map(|input| substitution.of(input))).collect(),
        attributes,
        outputs: node.outputs.iter().map(Option::is_some).collect(),
    })
}

fn setting(attribute: &Attribute) -> Option<Setting<'_>> {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
    Some(match attribute {
        Attribute::Int(value) => Setting::Ints(std::slice::from_ref(value)),
        Attribute::Ints(values) => Setting::Ints(values),
        Attribute::Float(value) => Setting::Floats(bits(&[*value])),
        Attribute::Floats(values) => Setting::Floats(bits(values)),
        Attribute::String(text) => Setting::Strings(vec![text]),
        Attribute::Strings(texts) => Setting::Strings(texts.iter().map(Vec::as_slice).collect()),
        _ => return None,
    })
}
