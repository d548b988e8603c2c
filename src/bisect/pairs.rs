//! Which values of two graphs are the same one.
//!
//! Names alone do not tell: an exporter that counts operators calls another value `Mul_3` as soon as one operator more
//! comes before it. So values are paired if they are computed by the same operator from paired values, if they are
//! products with a weight of the same name, or if both graphs call them by a name that is no operator's count. Graphs
//! that have nearly all names in common are copies of each other, whose names all count.

use std::collections::{HashMap, HashSet};

use viaduct_export::{
    onnx::{DType, Graph, Node, NodeId, ValueId},
    shapes::Shapes,
};

/// Share of equal nodes above which graphs are copies of each other.
const COPY: f64 = 0.9;
/// Operators that multiply with a weight, however it is stored.
const PRODUCTS: [&str; 2] = ["MatMul", "MatMulNBits"];
/// What the name of a quantised weight has behind that of the weight.
const CODES: &str = ".codes";

/// A graph and what is known of it.
#[derive(Clone, Copy)]
pub struct Known<'a> {
    pub graph: &'a Graph,
    pub shapes: &'a Shapes,
}

/// The value of `b` for each value of `a` that has one.
pub fn pairs(a: Known<'_>, b: Known<'_>) -> HashMap<ValueId, ValueId> {
    let mut pairing = Pairing { a, b, pairs: HashMap::new() };
    for input in &a.graph.inputs {
        pairing.pair_named(*input, |id| b.graph.inputs.contains(&id));
    }
    let copies = share_of_equal_nodes(a.graph, b.graph).min(share_of_equal_nodes(b.graph, a.graph)) >= COPY;
    for (_, node) in a.graph.nodes() {
        for output in node.outputs.iter().flatten() {
            if copies || !is_count(&a.graph[*output].name, &node.op_type) {
                pairing.pair_named(*output, |_| true);
            }
        }
    }
    pairing.pair_products();
    if !copies {
        pairing.pair_by_structure();
    }
    let made = |graph: &Graph| -> Vec<ValueId> {
        graph.nodes().flat_map(|(_, node)| node.outputs.iter().flatten().copied()).collect()
    };
    let (made_a, made_b) = (made(a.graph), made(b.graph));
    let (in_a, in_b) = (to_set(made_a), to_set(made_b));
    pairing.pairs.retain(|a, b| in_a.contains(a) && in_b.contains(b));
    pairing.pairs
}

fn to_set(values: Vec<ValueId>) -> HashSet<ValueId> {
    values.into_iter().collect()
}

/// The share of a graph's nodes that the other has, too: the same operator with a result of the same name.
fn share_of_equal_nodes(graph: &Graph, other: &Graph) -> f64 {
    let name = |graph: &Graph, node: &Node| {
        node.outputs.iter().flatten().next().map(|output| graph[*output].name.clone())
    };
    let known: HashMap<String, &str> =
        other.nodes().filter_map(|(_, node)| Some((name(other, node)?, node.op_type.as_str()))).collect();
    let equal = graph.nodes().filter(|(_, node)| {
        name(graph, node).is_some_and(|name| known.get(&name).is_some_and(|op| *op == node.op_type))
    });
    equal.count() as f64 / graph.nodes().count().max(1) as f64
}

/// Whether a value's name is that of its operator and a number: `Mul_3`, `Split_2.0`, `linear_5`.
fn is_count(name: &str, op_type: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let stem = match name.rsplit_once('.') {
        Some((stem, tail)) if digits(tail) => stem,
        _ => name,
    };
    match stem.rsplit_once('_') {
        Some((head, tail)) if digits(tail) => {
            head.eq_ignore_ascii_case(op_type) || head.bytes().all(|b| b.is_ascii_alphabetic())
        }
        _ => digits(stem),
    }
}

struct Pairing<'a> {
    a: Known<'a>,
    b: Known<'a>,
    pairs: HashMap<ValueId, ValueId>,
}

/// What a node is computed by: its operator, its paired inputs, and its constants' shapes.
#[derive(PartialEq, Eq, Hash)]
struct Structure {
    domain: String,
    op_type: String,
    inputs: Vec<Operand>,
}

#[derive(PartialEq, Eq, Hash)]
enum Operand {
    Absent,
    /// A value of `b`.
    Value(ValueId),
    Constant(Vec<usize>),
}

impl Pairing<'_> {
    fn pair_named(&mut self, id: ValueId, suits: impl Fn(ValueId) -> bool) {
        let found = self.b.graph.find(&self.a.graph[id].name);
        if let Some(other) = found.filter(|other| suits(*other)) {
            self.pair(id, other);
        }
    }

    fn pair(&mut self, a: ValueId, b: ValueId) {
        if self.may_be_same(a, b) {
            self.pairs.entry(a).or_insert(b);
        }
    }

    /// Whether shapes do not differ, and both are of floats or neither is.
    fn may_be_same(&self, a: ValueId, b: ValueId) -> bool {
        let (a, b) = (self.a.shapes.fact(a), self.b.shapes.fact(b));
        let shapes = match (a.full_shape(), b.full_shape()) {
            (Some(a), Some(b)) => a == b,
            _ => a.rank().zip(b.rank()).is_none_or(|(a, b)| a == b),
        };
        shapes && a.dtype.is_some_and(DType::is_float) == b.dtype.is_some_and(DType::is_float)
    }

    /// Products with the same weight, where each graph has one.
    fn pair_products(&mut self) {
        let products = |graph: &Graph| {
            let mut products: HashMap<String, Vec<ValueId>> = HashMap::new();
            for (_, node) in graph.nodes().filter(|(_, node)| PRODUCTS.contains(&node.op_type.as_str())) {
                // A bias makes it another value.
                let weight = node.input(1).filter(|weight| graph[*weight].constant.is_some());
                if let (Some(weight), Some(output), None) = (weight, node.output(0), node.input(5)) {
                    let name = &graph[weight].name;
                    let name = name.strip_suffix(CODES).unwrap_or(name).to_owned();
                    products.entry(name).or_default().push(output);
                }
            }
            products
        };
        let theirs = products(self.b.graph);
        for (name, own) in products(self.a.graph) {
            if let ([a], Some([b])) = (&own[..], theirs.get(&name).map(Vec::as_slice)) {
                self.pair(*a, *b);
            }
        }
    }

    /// Nodes that compute the same of the same; several of a kind in their order.
    fn pair_by_structure(&mut self) {
        let mut theirs: HashMap<Structure, Vec<NodeId>> = HashMap::new();
        for (id, node) in self.b.graph.nodes() {
            let operand = |id: ValueId| match &self.b.graph[id].constant {
                Some(tensor) => Some(Operand::Constant(tensor.shape.clone())),
                None => Some(Operand::Value(id)),
            };
            if let Some(structure) = structure(node, operand) {
                theirs.entry(structure).or_default().push(id);
            }
        }
        let mut taken: HashSet<NodeId> = HashSet::new();
        for (_, node) in self.a.graph.nodes() {
            let operand = |id: ValueId| match &self.a.graph[id].constant {
                Some(tensor) => Some(Operand::Constant(tensor.shape.clone())),
                None => self.pairs.get(&id).map(|id| Operand::Value(*id)),
            };
            let found = structure(node, operand).and_then(|structure| theirs.get(&structure));
            let Some(id) = found.and_then(|ids| ids.iter().find(|id| !taken.contains(id))) else {
                continue;
            };
            taken.insert(*id);
            let other = &self.b.graph[*id];
            for (a, b) in node.outputs.iter().zip(&other.outputs) {
                if let (Some(a), Some(b)) = (a, b) {
                    self.pair(*a, *b);
                }
            }
        }
    }
}

fn structure(node: &Node, operand: impl Fn(ValueId) -> Option<Operand>) -> Option<Structure> {
    if node.subgraphs().next().is_some() {
        return None;
    }
    let inputs = node.inputs.iter().map(|input| input.map_or(Some(Operand::Absent), &operand));
    Some(Structure {
        domain: node.domain.clone(),
        op_type: node.op_type.clone(),
        inputs: inputs.collect::<Option<_>>()?,
    })
}

#[cfg(test)]
mod tests {
    use viaduct_export::{
        onnx::{Attribute, Builder, Dim, Model, Tensor},
        shapes::infer,
    };

    use super::*;

    fn named_pairs(a: &Model, b: &Model) -> Vec<(String, String)> {
        let known = |model: &Model| infer(model, &Default::default(), &Default::default());
        let (shapes_a, shapes_b) = (known(a), known(b));
        let found =
            pairs(Known { graph: &a.graph, shapes: &shapes_a }, Known { graph: &b.graph, shapes: &shapes_b });
        let name = |(x, y): (ValueId, ValueId)| (a.graph[x].name.clone(), b.graph[y].name.clone());
        let mut names: Vec<_> = found.into_iter().map(name).collect();
        names.sort();
        names
    }

    /// `y = relu(x w) + x w`, with `before` operators that only count.
    fn graph(before: usize, stored: DType) -> Model {
        let mut graph = Builder::new("g");
        let x = graph.input("x", DType::F32, &[2, 4].map(Dim::Fixed));
        let mut given = x;
        for _ in 0..before {
            given = graph.op("Relu", &[given], &[]);
        }
        let product = match stored {
            DType::U8 => {
                let codes = graph.constant("w.codes", Tensor::inline(DType::U8, &[4, 1, 16], vec![7; 64]));
                let scales = graph.constant("w.scales", Tensor::from_f32(&[4], &[1.0; 4]));
                let sizes = [("K", 4), ("N", 4), ("bits", 8), ("block_size", 16)];
                let sizes = sizes.map(|(name, size)| (name, Attribute::Int(size)));
                graph.contrib("MatMulNBits", &[given, codes, scales], &sizes)
            }
            _ => {
                let w = graph.constant("w", Tensor::from_f32(&[4, 4], &[1.0; 16]));
                graph.matmul(given, w)
            }
        };
        let relu = graph.op("Relu", &[product], &[]);
        let y = graph.add(relu, product);
        graph.output(y, "y", &[2, 4].map(Dim::Fixed));
        graph.finish()
    }

    #[test]
    fn counts_are_no_names() {
        for (name, op) in [("Mul_3", "Mul"), ("Split_2.0", "Split"), ("linear_5", "MatMul"), ("12", "Mul")] {
            assert!(is_count(name, op), "{name}");
        }
        for name in ["dit_double0_img", "dit_single3", "vae_up1", "/up.0/Add_output_0", "y"] {
            assert!(!is_count(name, "Add"), "{name}");
        }
    }

    #[test]
    fn an_operator_more_shifts_counts_and_pairs_stay_right() {
        let found = named_pairs(&graph(0, DType::F32), &graph(2, DType::F32));
        let expected = [("MatMul_1", "MatMul_1"), ("Relu_1", "Relu_3"), ("y", "y")];
        assert_eq!(found, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    }

    #[test]
    fn a_weight_may_be_stored_otherwise() {
        let found = named_pairs(&graph(0, DType::F32), &graph(0, DType::U8));
        assert_eq!(found[0], ("MatMul_1".to_owned(), "MatMulNBits_1".to_owned()));
        assert_eq!(found.len(), 3);
    }

    #[test]
    fn copies_keep_their_names() {
        let (a, mut b) = (graph(12, DType::F32), graph(12, DType::F32));
        let sum = b.graph.producer(b.graph.find("y").unwrap()).unwrap();
        b.graph[sum].op_type = "Sub".to_owned();
        assert_eq!(named_pairs(&a, &b).len(), 15);
    }
}
