//! Runs the rules over a graph in execution order.

use std::collections::BTreeMap;

use super::{Fact, rule};
use crate::onnx::{Dim, Graph, Model, Node, NodeId, ValueId, ValueType};

/// Sizes of a graph's named dimensions.
pub type Sizes = BTreeMap<String, usize>;

/// A node whose inputs contradict its operator's definition, or whose result contradicts what the graph records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    pub node: String,
    pub op_type: String,
    pub problem: String,
}

/// What is known about every value of a graph under given sizes.
#[derive(Clone, Debug, Default)]
pub struct Shapes {
    facts: Vec<Fact>,
    pub conflicts: Vec<Conflict>,
}

/// One use of an operator, as its rule sees it.
pub(super) struct Call<'a> {
    pub node: &'a Node,
    /// Facts about the inputs, in order; an absent optional input is `None`.
    pub inputs: Vec<Option<&'a Fact>>,
    /// Version of the operator set that the node's domain has in the model; 1 where it states none.
    pub opset: i64,
}

/// Infers every value's type and shape. `sizes` binds named dimensions; a name that is missing stays unknown.
/// Contents of integer inputs may be given by name in `contents`.
pub fn infer(model: &Model, sizes: &Sizes, contents: &BTreeMap<String, Fact>) -> Shapes {
    let graph = &model.graph;
    let mut shapes = Shapes { facts: vec![Fact::default(); graph.values().count()], conflicts: Vec::new() };
    for (id, value) in graph.values() {
        let given = contents.get(&value.name).cloned();
        shapes.facts[id.index()] = given.unwrap_or_else(|| recorded(graph, id, sizes));
    }
    for (id, node) in graph.nodes() {
        shapes.run(model, graph, id, node);
    }
    shapes
}

impl Shapes {
    pub fn fact(&self, id: ValueId) -> &Fact {
        &self.facts[id.index()]
    }

    /// The shape if every size of it is known.
    pub fn shape(&self, id: ValueId) -> Option<Vec<usize>> {
        self.fact(id).full_shape()
    }

    /// Bytes of a value's tensor; `None` if unknown.
    pub fn bytes(&self, id: ValueId) -> Option<u64> {
        self.fact(id).bytes()
    }

    /// Operators whose outputs' sizes are not known, with how many such outputs there are.
    pub fn unknown(&self, graph: &Graph) -> BTreeMap<String, usize> {
        let mut unknown = BTreeMap::new();
        for (_, node) in graph.nodes() {
            let outputs = node.outputs.iter().flatten();
            let count = outputs.filter(|id| self.bytes(**id).is_none()).count();
            if count > 0 {
                *unknown.entry(node.op_type.clone()).or_default() += count;
            }
        }
        unknown
    }

    fn run(&mut self, model: &Model, _graph: &Graph, _id: NodeId, node: &Node) {
        let Some(rule) = rule(&node.domain, &node.op_type) else { return };
        let opset = model.opsets.iter().find(|o| o.0 == node.domain).map_or(1, |o| o.1);
        let inputs = node.inputs.iter().map(|id| id.map(|id| &self.facts[id.index()])).collect();
        match rule(&Call { node, inputs, opset }) {
            Ok(facts) => {
                for (id, fact) in node.outputs.iter().zip(facts) {
                    if let Some(id) = id {
                        self.facts[id.index()] = fact;
                    }
                }
            }
            Err(problem) => self.conflicts.push(Conflict {
                node: node.name.clone(),
                op_type: node.op_type.clone(),
                problem,
            }),
        }
    }
}

/// What the graph itself says about a value: a constant, or a recorded type.
fn recorded(graph: &Graph, id: ValueId, sizes: &Sizes) -> Fact {
    let value = &graph[id];
    if let Some(tensor) = &value.constant {
        return Fact::of(Some(tensor.dtype), &tensor.shape);
    }
    let Some(ValueType::Tensor { dtype, shape }) = &value.ty else { return Fact::default() };
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => Some(*size),
        Dim::Symbol(name) => sizes.get(name).copied(),
        Dim::Unknown => None,
    };
    let shape = shape.as_ref().map(|dims| dims.iter().map(size).collect());
    Fact { dtype: Some(*dtype), shape, elements: None }
}
