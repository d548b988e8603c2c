//! Shapes as ONNX Runtime's allocation planner knows them, before any size is bound.
//!
//! A kernel writes over its input only if both shapes are the same for certain: numbers, or the same symbols
//! (core/framework/allocation_planner.cc, SameSize). What a graph computes from symbols is unknown to the planner, for
//! example what a Reshape infers or a Slice leaves.

use crate::{
    onnx::{Dim, Graph, Node, ValueId, ValueType},
    shapes::Shapes,
};

/// By index of the value; `None` where a dimension is unknown.
pub(super) struct Planned {
    shapes: Vec<Option<Vec<Dim>>>,
}

const SAME_AS_FIRST: &[&str] = &[
    "Softmax",
    "Sigmoid",
    "Tanh",
    "Relu",
    "Clip",
    "Erf",
    "Gelu",
    "Exp",
    "Neg",
    "Abs",
    "Sqrt",
    "Cast",
    "Identity",
    "LayerNormalization",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    "InstanceNormalization",
    "RotaryEmbedding",
];
const BROADCAST: &[&str] = &["Add", "Sub", "Mul", "Div", "Pow"];

impl Planned {
    /// `unbound` is what is known about the graph while no size is bound; nothing of some bodies.
    pub fn of(graph: &Graph, unbound: Option<&Shapes>) -> Planned {
        let recorded = graph.values().map(|(id, _)| recorded(graph, id).or_else(|| fixed(unbound?, id)));
        let mut planned = Planned { shapes: recorded.collect() };
        for (_, node) in graph.nodes() {
            if let (Some(shape), [Some(output), ..]) = (planned.result(node), &node.outputs[..]) {
                planned.shapes[output.index()].get_or_insert(shape);
            }
        }
        planned
    }

    /// Whether the planner knows that both values have one shape.
    pub fn same(&self, a: ValueId, b: ValueId) -> bool {
        let shape = self.shape(Some(a));
        shape.is_some() && shape == self.shape(Some(b))
    }

    fn shape(&self, id: Option<ValueId>) -> Option<&Vec<Dim>> {
        self.shapes[id?.index()].as_ref()
    }

    /// The shape of a node's first output, for operators that pass symbols on.
    fn result(&self, node: &Node) -> Option<Vec<Dim>> {
        let op = node.op_type.as_str();
        let input = |index: usize| self.shape(node.inputs.get(index).copied().flatten());
        match op {
            _ if SAME_AS_FIRST.contains(&op) => input(0).cloned(),
            _ if BROADCAST.contains(&op) => broadcast(input(0)?, input(1)?),
            "MatMul" => product(input(0)?, input(1)?),
            _ => None,
        }
    }
}

fn recorded(graph: &Graph, id: ValueId) -> Option<Vec<Dim>> {
    match &graph[id].ty {
        Some(ValueType::Tensor { shape: Some(shape), .. }) if !shape.contains(&Dim::Unknown) => {
            Some(shape.clone())
        }
        _ => None,
    }
}

fn fixed(unbound: &Shapes, id: ValueId) -> Option<Vec<Dim>> {
    unbound.shape(id).map(|shape| shape.into_iter().map(Dim::Fixed).collect())
}

fn broadcast(a: &[Dim], b: &[Dim]) -> Option<Vec<Dim>> {
    let (long, short) = if a.len() >= b.len() { (a, b) } else { (b, a) };
    let (head, tail) = long.split_at(long.len() - short.len());
    let one = Dim::Fixed(1);
    let joined = tail.iter().zip(short).map(|(x, y)| match (x, y) {
        (x, y) if x == y || *y == one => Some(x.clone()),
        (x, y) if *x == one => Some(y.clone()),
        _ => None,
    });
    head.iter().cloned().map(Some).chain(joined).collect()
}

fn product(a: &[Dim], b: &[Dim]) -> Option<Vec<Dim>> {
    let ([a_outer @ .., rows, _], [b_outer @ .., _, columns]) = (a, b) else { return None };
    let mut shape = broadcast(a_outer, b_outer)?;
    shape.extend([rows.clone(), columns.clone()]);
    Some(shape)
}
