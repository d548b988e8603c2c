//! Patterns that have gone wrong on GPUs: computed without an error, and wrong.

use std::collections::HashSet;

use crate::{
    onnx::{DType, Graph, Links, Node, NodeId, ValueId},
    shapes::{Elements, Shapes},
};

/// A part of a graph that deserves suspicion.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Hazard {
    /// The rule's name.
    pub kind: &'static str,
    pub node: String,
    pub op_type: String,
    /// What stands there.
    pub what: String,
    /// Why it matters.
    pub why: &'static str,
    /// What to do about it.
    pub remedy: &'static str,
    /// The public report.
    pub source: &'static str,
}

/// One pattern.
struct Rule {
    kind: &'static str,
    why: &'static str,
    remedy: &'static str,
    source: &'static str,
    /// Nodes where the pattern ends, and what stands there.
    find: fn(&Looked<'_>) -> Vec<(NodeId, String)>,
}

const RULES: &[Rule] = &[
    Rule {
        kind: "float_scalar_chain",
        why: "shaders compute such chains on one element and have got them wrong: a scale or a length is off, and with it everything after",
        remedy: "write it as a constant: `viaduct rewrite --passes lean`, with --dim for sizes that never change",
        source: "https://github.com/microsoft/onnxruntime/issues/27661",
        find: scalar_chains,
    },
    Rule {
        kind: "f16_squares_summed",
        why: "squares pass 65504 where |x| passes 256; the sum becomes infinite and the norm's output zero or its bias, without a NaN",
        remedy: "use LayerNormalization or RMSNormalization, or cast to f32 before the square",
        source: "https://github.com/microsoft/onnxruntime/issues/31626",
        find: f16_squares,
    },
    Rule {
        kind: "f16_conv3d",
        why: "the shader of a convolution over three dimensions in f16 has been invalid on WebGPU",
        remedy: "export it as a convolution over two dimensions where the third is 1, or keep it in f32",
        source: "https://github.com/microsoft/onnxruntime/issues/22974",
        find: f16_conv3d,
    },
];

/// Everything in the graph that matches a rule, rule by rule, in execution order.
pub fn hazards(graph: &Graph, shapes: &Shapes) -> Vec<Hazard> {
    let looked = Looked { graph, shapes, links: graph.links() };
    let found = RULES.iter().flat_map(|rule| {
        let graph = looked.graph;
        (rule.find)(&looked).into_iter().map(move |(id, what)| {
            let Rule { kind, why, remedy, source, .. } = *rule;
            let (node, op_type) = (graph[id].name.clone(), graph[id].op_type.clone());
            Hazard { kind, node, op_type, what, why, remedy, source }
        })
    });
    found.collect()
}

/// A graph and what is known about it.
struct Looked<'a> {
    graph: &'a Graph,
    shapes: &'a Shapes,
    links: Links,
}

impl Looked<'_> {
    fn dtype(&self, id: ValueId) -> Option<DType> {
        let constant = self.graph[id].constant.as_ref().map(|tensor| tensor.dtype);
        self.shapes.fact(id).dtype.or(constant)
    }

    fn is_f16(&self, id: Option<ValueId>) -> bool {
        id.is_some_and(|id| self.dtype(id) == Some(DType::F16))
    }

    fn is_float_scalar(&self, id: ValueId) -> bool {
        let float = matches!(self.dtype(id), Some(DType::F16 | DType::BF16 | DType::F32 | DType::F64));
        float && self.shapes.shape(id).is_some_and(|shape| shape.iter().all(|size| *size == 1))
    }

    /// Whether the value is the number 2, one element.
    fn is_two(&self, id: ValueId) -> bool {
        match &self.shapes.fact(id).elements {
            Some(Elements::Floats(values)) => values[..] == [Some(2.0)],
            Some(Elements::Ints(values)) => values[..] == [Some(2)],
            None => {
                let tensor = self.graph[id].constant.as_ref().filter(|tensor| tensor.bytes.len() <= 8);
                tensor.and_then(|tensor| tensor.to_f32().ok()?).is_some_and(|values| values == [2.0])
            }
        }
    }

    /// Values that hold the same numbers in every run: constants, and what is computed of constants alone.
    fn constants(&self) -> HashSet<ValueId> {
        let graph = self.graph;
        let given = graph.values().filter(|(id, v)| v.constant.is_some() && !graph.inputs.contains(id));
        let mut constants: HashSet<ValueId> = given.map(|(id, _)| id).collect();
        for (_, node) in graph.nodes() {
            let random = node.op_type.starts_with("Random") || node.op_type == "Multinomial";
            if !random && node.inputs.iter().flatten().all(|id| constants.contains(id)) {
                constants.extend(node.outputs.iter().flatten());
            }
        }
        constants
    }
}

/// Operators of scales and lengths.
const SCALAR_OPS: &[&str] = &[
    "Add",
    "Cast",
    "Ceil",
    "Div",
    "Exp",
    "Floor",
    "Identity",
    "Log",
    "Mul",
    "Neg",
    "Pow",
    "Reciprocal",
    "Round",
    "Sqrt",
    "Squeeze",
    "Sub",
    "Unsqueeze",
];
/// Those of them without which a chain is harmless.
const DELICATE_OPS: &[&str] = &["Ceil", "Div", "Floor", "Pow", "Reciprocal", "Round", "Sqrt"];
/// Those that compute nothing.
const MOVES: &[&str] = &["Cast", "Identity", "Squeeze", "Unsqueeze"];
/// Operations of a chain that are told; the last ones.
const LONGEST_CHAIN: usize = 16;

/// Two or more float operations on one element, one after the other, that depend on an input or on a shape.
fn scalar_chains(looked: &Looked<'_>) -> Vec<(NodeId, String)> {
    let constants = looked.constants();
    let on_scalars = |node: &Node| {
        let touched = node.inputs.iter().chain(&node.outputs).flatten().any(|id| looked.is_float_scalar(*id));
        let outputs_scalar = node.outputs.iter().flatten().all(|id| {
            looked.shapes.shape(*id).is_some_and(|shape| shape.iter().all(|size| *size == 1))
                && !constants.contains(id)
        });
        SCALAR_OPS.contains(&node.op_type.as_str()) && touched && outputs_scalar
    };
    let links: Vec<NodeId> =
        looked.graph.nodes().filter(|(_, node)| on_scalars(node)).map(|(id, _)| id).collect();
    let members: HashSet<NodeId> = links.iter().copied().collect();
    let mut told = HashSet::new();
    let mut chains = Vec::new();
    // From their ends, so that a chain is told once and whole.
    for end in links.iter().rev() {
        let goes_on = looked.graph[*end].outputs.iter().flatten().any(|id| {
            let uses = looked.links.uses(*id);
            uses.iter().any(|user| members.contains(user))
        });
        if goes_on {
            continue;
        }
        let chain = chain_to(looked, *end, &members);
        let ops: Vec<&str> = chain.iter().map(|id| looked.graph[*id].op_type.as_str()).collect();
        let computes = ops.iter().filter(|op| !MOVES.contains(op)).count();
        let moves = ops.len() - computes;
        let delicate = ops.iter().any(|op| DELICATE_OPS.contains(op));
        // A cast of a length counts as a step: Cast, Div, Ceil is how the public report reads.
        if delicate && computes + moves.min(1) >= 2 && told.insert(chain[0]) {
            chains.push((*end, format!("{} on one element", ops.join(" -> "))));
        }
    }
    chains.reverse();
    chains
}

/// A way back from a node over members, first node first.
fn chain_to(looked: &Looked<'_>, end: NodeId, members: &HashSet<NodeId>) -> Vec<NodeId> {
    let before = |node: &NodeId| {
        let inputs = looked.graph[*node].inputs.iter().flatten();
        inputs.filter_map(|id| looked.links.producer(*id)).find(|id| members.contains(id))
    };
    let mut chain: Vec<NodeId> = std::iter::successors(Some(end), before).take(LONGEST_CHAIN).collect();
    chain.reverse();
    chain
}

/// Reductions that add up what they are given.
const SUMS: &[&str] = &["ReduceMean", "ReduceSum"];
/// Reductions that square by themselves.
const SQUARE_SUMS: &[&str] = &["ReduceL2", "ReduceSumSquare"];

/// Squares in f16 that are added up: norms that an exporter wrote out.
fn f16_squares(looked: &Looked<'_>) -> Vec<(NodeId, String)> {
    let graph = looked.graph;
    let square = |id: ValueId| -> Option<&str> {
        let node = &graph[looked.links.producer(id)?];
        let [Some(a), Some(b)] = node.inputs[..] else { return None };
        match node.op_type.as_str() {
            "Pow" if looked.is_two(b) => Some("Pow 2"),
            "Mul" if a == b => Some("Mul(x, x)"),
            _ => None,
        }
    };
    let found = graph.nodes().filter_map(|(id, node)| {
        let op = node.op_type.as_str();
        let operand = node.inputs.first().copied().flatten().filter(|x| looked.is_f16(Some(*x)))?;
        if SQUARE_SUMS.contains(&op) {
            return Some((id, format!("{op} of f16")));
        }
        let square = SUMS.contains(&op).then(|| square(operand)).flatten()?;
        Some((id, format!("{square} -> {op} in f16")))
    });
    found.collect()
}

/// Convolutions over three spatial dimensions in f16.
fn f16_conv3d(looked: &Looked<'_>) -> Vec<(NodeId, String)> {
    let found = looked.graph.nodes().filter(|(_, node)| {
        let [Some(x), weight, ..] = node.inputs[..] else { return false };
        let rank = |id: ValueId| {
            let constant = looked.graph[id].constant.as_ref().map(|tensor| tensor.shape.len());
            looked.shapes.fact(id).rank().or(constant)
        };
        let five = rank(x) == Some(5) || weight.and_then(rank) == Some(5);
        matches!(node.op_type.as_str(), "Conv" | "ConvTranspose")
            && five
            && (looked.is_f16(Some(x)) || looked.is_f16(weight))
    });
    found.map(|(id, node)| (id, format!("{} over three dimensions in f16", node.op_type))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        onnx::{Attribute, Builder, Dim, Model, Tensor},
        shapes::infer,
    };

    fn kinds(model: &Model) -> Vec<(&'static str, String)> {
        let shapes = infer(model, &Default::default(), &Default::default());
        hazards(&model.graph, &shapes).into_iter().map(|hazard| (hazard.kind, hazard.what)).collect()
    }

    /// Applies unary operators one after the other to an input of so many elements; shapes are recorded.
    fn chain(ops: &[&str], elements: usize) -> Model {
        let mut b = Builder::new("chain");
        let dims = [Dim::Fixed(elements)];
        let mut x = b.input("x", DType::F32, &dims);
        let two = b.constant("two", Tensor::from_f32(&[1], &[2.0]));
        for op in ops {
            let operands = if *op == "Div" { vec![x, two] } else { vec![x] };
            x = b.op(op, &operands, &[]);
            b.record_shape(x, &dims);
        }
        b.output(x, "y", &dims);
        b.finish()
    }

    #[test]
    fn chains_on_one_element() {
        let found = kinds(&chain(&["Sqrt", "Div", "Sqrt"], 1));
        assert_eq!(found, [("float_scalar_chain", "Sqrt -> Div -> Sqrt on one element".to_owned())]);
        assert_eq!(kinds(&chain(&["Sqrt", "Div", "Sqrt"], 2)), []);
        assert_eq!(kinds(&chain(&["Sqrt"], 1)), []);
        assert_eq!(kinds(&chain(&["Neg", "Neg"], 1)), []);
    }

    #[test]
    fn chains_of_constants_are_folded_before_any_run() {
        let mut b = Builder::new("folded");
        let mut x = b.constant("c", Tensor::from_f32(&[1], &[128.0]));
        for op in ["Sqrt", "Reciprocal", "Sqrt"] {
            x = b.op(op, &[x], &[]);
            b.record_shape(x, &[Dim::Fixed(1)]);
        }
        b.output(x, "y", &[Dim::Fixed(1)]);
        assert_eq!(kinds(&b.finish()), []);
    }

    #[test]
    fn squares_in_f16() {
        let norm = |dtype, mul: bool, exponent: f32| {
            let mut b = Builder::new("norm");
            let dims = [Dim::Fixed(4), Dim::Fixed(8)];
            let x = b.input("x", dtype, &dims);
            let exponent = b.scalar(dtype, exponent);
            let square = if mul { b.mul(x, x) } else { b.op("Pow", &[x, exponent], &[]) };
            let mean = b.op("ReduceMean", &[square], &[("axes", Attribute::Ints(vec![1]))]);
            let y = b.op("Sqrt", &[mean], &[]);
            b.output(y, "y", &[Dim::Fixed(4), Dim::Fixed(1)]);
            kinds(&b.finish())
        };
        let expected = |what: &str| vec![("f16_squares_summed", what.to_owned())];
        assert_eq!(norm(DType::F16, false, 2.0), expected("Pow 2 -> ReduceMean in f16"));
        assert_eq!(norm(DType::F16, true, 2.0), expected("Mul(x, x) -> ReduceMean in f16"));
        assert_eq!(norm(DType::F16, false, 1.0), []);
        assert_eq!(norm(DType::F32, false, 2.0), []);
    }

    #[test]
    fn convolutions_over_three_dimensions() {
        let conv = |dtype, spatial: usize| {
            let mut b = Builder::new("conv");
            let dims = vec![Dim::Fixed(1); 2 + spatial];
            let x = b.input("x", dtype, &dims);
            let w = b.input("w", dtype, &dims);
            let y = b.op("Conv", &[x, w], &[]);
            b.output(y, "y", &dims);
            kinds(&b.finish()).len()
        };
        assert_eq!([conv(DType::F16, 3), conv(DType::F16, 2), conv(DType::F32, 3)], [1, 0, 0]);
    }
}
