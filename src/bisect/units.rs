//! The values of a graph that can be looked at on both sides, numbered in the order in which they are computed.

use std::collections::{BTreeSet, HashMap, HashSet};

use viaduct_export::{
    onnx::{DType, Graph, Links, Model, NodeId, ValueId, ValueType},
    shapes::Shapes,
};

use super::{search::Unit, tensors::carried};

/// Bytes of a value whose size is not known before it is there, where no other is known either.
const UNKNOWN_BYTES: u64 = 1 << 20;

/// A value of the graph that has a counterpart on the other side.
#[derive(Clone, Debug)]
pub struct Seen {
    pub value: ValueId,
    /// Its name on the other side.
    pub other: String,
    /// Whether less than f32 was computed in on the way to it.
    pub coarse: bool,
}

/// All of them.
pub struct Units {
    pub seen: Vec<Seen>,
    pub units: Vec<Unit>,
    of_value: HashMap<ValueId, usize>,
    links: Links,
}

impl Units {
    /// `other` names a value on the other side, and says whether it is coarse there.
    pub fn of(model: &Model, shapes: &Shapes, other: &dyn Fn(ValueId) -> Option<(String, bool)>) -> Units {
        let graph = &model.graph;
        let coarse = coarse(graph, shapes);
        let outputs: HashSet<ValueId> = graph.outputs.iter().copied().collect();
        let largest = graph.nodes().flat_map(|(_, node)| node.outputs.iter().flatten());
        let largest = largest.filter_map(|id| shapes.bytes(*id)).max().unwrap_or(UNKNOWN_BYTES);
        let mut units =
            Units { seen: Vec::new(), units: Vec::new(), of_value: HashMap::new(), links: graph.links() };
        // What a value that cannot be looked at stands for.
        let mut behind: HashMap<ValueId, BTreeSet<usize>> = HashMap::new();
        for (_, node) in graph.nodes() {
            let mut sources = BTreeSet::new();
            for value in graph.used_by(node) {
                match units.of_value.get(&value) {
                    Some(unit) => drop(sources.insert(*unit)),
                    None => sources.extend(behind.get(&value).into_iter().flatten()),
                }
            }
            for value in node.outputs.iter().flatten().copied() {
                let readable = is_readable(shapes, value);
                let Some((other, coarse_there)) = other(value).filter(|_| readable) else {
                    behind.insert(value, sources.clone());
                    continue;
                };
                units.of_value.insert(value, units.units.len());
                units.units.push(Unit {
                    sources: sources.iter().copied().collect(),
                    bytes: shapes.bytes(value).unwrap_or(largest),
                    is_output: outputs.contains(&value),
                });
                let coarse = coarse_there || coarse.contains(&value);
                units.seen.push(Seen { value, other, coarse });
            }
        }
        units
    }

    /// The number of a value that can be looked at.
    pub fn unit(&self, value: ValueId) -> Option<usize> {
        self.of_value.get(&value).copied()
    }

    /// Nodes between a value and what can be looked at before it, in order; the last makes the value.
    pub fn between(&self, graph: &Graph, value: ValueId) -> Vec<NodeId> {
        let mut found = BTreeSet::new();
        let mut open = vec![value];
        while let Some(next) = open.pop() {
            if next != value && self.of_value.contains_key(&next) {
                continue;
            }
            let Some(id) = self.links.producer(next) else { continue };
            if found.insert(id) {
                open.extend(graph.used_by(&graph[id]));
            }
        }
        graph.nodes().map(|(id, _)| id).filter(|id| found.contains(id)).collect()
    }
}

/// Whether a value is known to be a tensor of a type that the host can hold.
pub fn is_readable(shapes: &Shapes, value: ValueId) -> bool {
    let fact = shapes.fact(value);
    fact.items.is_none() && fact.dtype.and_then(carried).is_some()
}

/// Values on whose way something was computed in less than f32.
pub fn coarse(graph: &Graph, shapes: &Shapes) -> HashSet<ValueId> {
    let narrow = |value: ValueId| {
        let recorded = match &graph[value].ty {
            Some(ValueType::Tensor { dtype, .. }) => Some(*dtype),
            _ => None,
        };
        let dtype = shapes.known(value).and_then(|fact| fact.dtype).or(recorded);
        matches!(dtype, Some(DType::F16 | DType::BF16))
    };
    let mut coarse: HashSet<ValueId> = graph.inputs.iter().copied().filter(|id| narrow(*id)).collect();
    for (_, node) in graph.nodes() {
        let quantised = ["NBits", "Bnb4", "Quantize", "Integer", "QLinear"];
        let by_itself = quantised.iter().any(|part| node.op_type.contains(part));
        let made_coarse = by_itself || graph.used_by(node).any(|value| coarse.contains(&value));
        for output in node.outputs.iter().flatten() {
            if made_coarse || narrow(*output) {
                coarse.insert(*output);
            }
        }
    }
    coarse
}
