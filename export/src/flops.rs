//! Floating-point operations of a graph under given sizes: what the time of its run is held against.

use std::collections::BTreeMap;

use crate::{
    onnx::{Graph, Model, Node, ValueId},
    shapes::Shapes,
};

/// Operations of one run. A multiplication with its addition counts as two.
///
/// Matrix products, convolutions and attention count, whatever type they compute in. Everything else (elementwise
/// operators, norms, Softmax, moving and dequantizing data) counts as nothing, and scores that a mask hides count like
/// others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flops {
    /// Of all nodes whose sizes are known.
    pub total: u64,
    /// Operators that multiply, but whose sizes or rules are not known, with how many there are. They are not in the
    /// total.
    pub unknown: BTreeMap<String, usize>,
}

impl Flops {
    /// Whether the total holds every node that counts.
    pub fn is_complete(&self) -> bool {
        self.unknown.is_empty()
    }
}

/// Counts a graph's operations. `shapes` are those of this graph, from [`infer`](crate::shapes::infer).
pub fn flops(model: &Model, shapes: &Shapes) -> Flops {
    of_graph(&model.graph, shapes)
}

fn of_graph(graph: &Graph, shapes: &Shapes) -> Flops {
    let mut flops = Flops::default();
    for (id, node) in graph.nodes() {
        // How often a body runs is not known.
        let mut bodies = node.subgraphs().enumerate();
        let multiplies_inside = bodies.any(|(place, body)| {
            shapes.body(id, place).is_some_and(|shapes| of_graph(body, shapes) != Flops::default())
        });
        let count = match rule(node) {
            Some(rule) => rule(&Call { node, shapes }),
            None => (!multiplies_inside && !is_unfollowed(node)).then_some(0),
        };
        match count {
            Some(count) => flops.total = flops.total.saturating_add(count),
            None => *flops.unknown.entry(node.op_type.clone()).or_default() += 1,
        }
    }
    flops
}

/// Operations of a node; `None` where a size is not known, or the node's form is not followed.
type Rule = fn(&Call<'_>) -> Option<u64>;

/// Domain (empty for the standard operators), operator, rule.
const RULES: &[(&str, &str, Rule)] = &[
    ("", "MatMul", product),
    ("", "MatMulInteger", product),
    ("", "QLinearMatMul", product),
    ("", "Gemm", gemm),
    ("", "Einsum", einsum),
    ("", "Conv", |call| convolution(call, 1)),
    ("", "ConvInteger", |call| convolution(call, 1)),
    ("", "QLinearConv", |call| convolution(call, 3)),
    ("", "ConvTranspose", transposed_convolution),
    ("", "Attention", |call| attention(call, 4)),
    ("com.microsoft", "MatMulNBits", product),
    ("com.microsoft", "MatMulBnb4", product),
    ("com.microsoft", "DynamicQuantizeMatMul", product),
    ("com.microsoft", "MatMulIntegerToFloat", product),
    ("com.microsoft", "FusedConv", |call| convolution(call, 1)),
    ("com.microsoft", "NhwcConv", |call| convolution(call, 1)),
    ("com.microsoft", "NhwcFusedConv", |call| convolution(call, 1)),
    ("com.microsoft", "MultiHeadAttention", |call| attention(call, 6)),
    ("com.microsoft", "GroupQueryAttention", grouped_attention),
];

/// Operators that multiply by rules that are not followed here.
const UNFOLLOWED: &[(&str, &str)] = &[
    ("", "DeformConv"),
    ("", "GRU"),
    ("", "LSTM"),
    ("", "LinearAttention"),
    ("", "RNN"),
    ("com.microsoft", "Attention"),
    ("com.microsoft", "FusedMatMul"),
    ("com.microsoft", "LinearAttention"),
    ("com.microsoft", "MatMulBlockQuantizedFp4Weight"),
    ("com.microsoft", "MatMulBlockQuantizedFp8Weight"),
    ("com.microsoft", "MatMulInteger16"),
    ("com.microsoft", "MatMulNBitsMlp"),
    ("com.microsoft", "MatMulNBitsQkv"),
    ("com.microsoft", "MoE"),
    ("com.microsoft", "PackedAttention"),
    ("com.microsoft", "PackedMultiHeadAttention"),
    ("com.microsoft", "PagedAttention"),
    ("com.microsoft", "QAttention"),
    ("com.microsoft", "QLinearConv"),
    ("com.microsoft", "QMoE"),
    ("com.microsoft", "SparseAttention"),
];

fn rule(node: &Node) -> Option<Rule> {
    RULES.iter().find(|row| row.0 == domain(node) && row.1 == node.op_type).map(|row| row.2)
}

fn is_unfollowed(node: &Node) -> bool {
    UNFOLLOWED.contains(&(domain(node), node.op_type.as_str()))
}

/// The standard operators' domain has two names.
fn domain(node: &Node) -> &str {
    if node.domain == "ai.onnx" { "" } else { &node.domain }
}

/// A node and the shapes of what it reads and makes.
struct Call<'a> {
    node: &'a Node,
    shapes: &'a Shapes,
}

impl Call<'_> {
    fn shape(&self, value: Option<ValueId>) -> Option<Vec<usize>> {
        self.shapes.known(value?)?.full_shape()
    }

    fn input(&self, index: usize) -> Option<Vec<usize>> {
        self.shape(self.node.input(index))
    }

    fn output(&self, index: usize) -> Option<Vec<usize>> {
        self.shape(self.node.output(index))
    }
}

/// A's last axis goes, whatever form B has.
fn product(call: &Call<'_>) -> Option<u64> {
    Some(multiplications([count(&call.output(0)?), *call.input(0)?.last()? as u64]))
}

fn gemm(call: &Call<'_>) -> Option<u64> {
    let a = call.input(0)?;
    let inner = if call.node.int("transA").unwrap_or(0) == 0 { a.get(1) } else { a.first() };
    Some(multiplications([count(&call.output(0)?), *inner? as u64]))
}

/// Two factors and a stated result, without `...`. Where no index goes, it is an elementwise product.
fn einsum(call: &Call<'_>) -> Option<u64> {
    let equation: String = call.node.text("equation")?.split_whitespace().collect();
    let (left, right) = equation.split_once("->")?;
    let terms: Vec<&str> = left.split(',').collect();
    if equation.contains("...") || terms.len() > 2 {
        return None;
    }
    let mut sizes = BTreeMap::new();
    for (index, term) in terms.iter().enumerate() {
        for (label, size) in term.chars().zip(call.input(index)?) {
            let known = sizes.entry(label).or_insert(size);
            *known = size.max(*known);
        }
    }
    let sums = sizes.keys().any(|label| !right.contains(*label));
    let all: Vec<usize> = sizes.into_values().collect();
    Some(if sums && terms.len() == 2 { multiplications([count(&all)]) } else { 0 })
}

/// Weights [M, C / group, kernel...], with which every element of the output is a sum.
fn convolution(call: &Call<'_>, weights: usize) -> Option<u64> {
    let weights = call.input(weights)?;
    Some(multiplications([count(&call.output(0)?), count(weights.get(1..)?)]))
}

/// Weights [C, M / group, kernel...], with which every element of the input is spread.
fn transposed_convolution(call: &Call<'_>) -> Option<u64> {
    let weights = call.input(1)?;
    Some(multiplications([count(&call.input(0)?), count(weights.get(1..)?)]))
}

/// Query times keys, and scores times values. `past` is the input with the keys [B, heads, length, size] before
/// these.
fn attention(call: &Call<'_>, past: usize) -> Option<u64> {
    let (query, result) = (call.input(0)?, call.output(0)?);
    // Query, key and value may be packed into one, [B, S, heads, 3, size], or the last two, [B, L, heads, 2, size].
    let (key, share) = if query.len() == 5 { (query.clone(), 3) } else { (call.input(1)?, 1) };
    let new = if key.len() == 4 { key[2] } else { *key.get(1)? };
    let before = match call.node.input(past) {
        Some(_) => *call.input(past)?.get(2)?,
        None => 0,
    };
    let keys = (new as u64).saturating_add(before as u64);
    let rows = (count(&query) / share).saturating_add(count(&result));
    Some(multiplications([keys, rows]))
}

/// Keys and values are those of the caches that come out, where they do.
fn grouped_attention(call: &Call<'_>) -> Option<u64> {
    let (query, result) = (call.input(0)?, call.output(0)?);
    let keys = match (call.node.output(1), call.node.input(1)) {
        (Some(_), _) => *call.output(1)?.get(2)?,
        (None, Some(_)) => *call.input(1)?.get(1)?,
        (None, None) => *query.get(1)?,
    };
    Some(multiplications([keys as u64, 2, count(&result)]))
}

fn count(shape: &[usize]) -> u64 {
    shape.iter().fold(1, |product, size| product.saturating_mul(*size as u64))
}

/// Operations of as many multiplications, each with its addition.
fn multiplications(factors: impl IntoIterator<Item = u64>) -> u64 {
    factors.into_iter().fold(2, u64::saturating_mul)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        onnx::{Attribute, Builder, DType, Dim},
        shapes::{Sizes, infer},
    };

    type Case<'a> = (&'a str, &'a str, &'a [&'a [usize]], &'a [(&'a str, Attribute)]);

    /// Counts one node over inputs of these shapes.
    fn counted((domain, op_type, inputs, attributes): Case<'_>) -> Flops {
        let mut b = Builder::new(op_type);
        let inputs = inputs.iter().enumerate().map(|(i, shape)| {
            let dims: Vec<Dim> = shape.iter().copied().map(Dim::Fixed).collect();
            b.input(&format!("x{i}"), DType::F32, &dims)
        });
        let inputs: Vec<_> = inputs.collect();
        b.ops(domain, op_type, &inputs, attributes, 1);
        let model = b.finish();
        flops(&model, &infer(&model, &Sizes::new(), &BTreeMap::new()))
    }

    #[track_caller]
    fn assert_counts(case: Case<'_>, total: u64) {
        assert_eq!(counted(case), Flops { total, ..Flops::default() }, "{case:?}");
    }

    const MS: &str = "com.microsoft";

    fn int(name: &str, value: i64) -> (&str, Attribute) {
        (name, Attribute::Int(value))
    }

    #[test]
    fn products() {
        assert_counts(("", "MatMul", &[&[5, 2, 3], &[3, 7]], &[]), 2 * 5 * 2 * 7 * 3);
        assert_counts(("", "MatMul", &[&[3], &[3]], &[]), 2 * 3);
        assert_counts(("", "Gemm", &[&[2, 3], &[3, 7]], &[]), 2 * 2 * 7 * 3);
        assert_counts(("", "Gemm", &[&[3, 2], &[3, 7]], &[int("transA", 1)]), 2 * 2 * 7 * 3);
        let sizes = [int("K", 64), int("N", 7), int("bits", 4), int("block_size", 32)];
        assert_counts((MS, "MatMulNBits", &[&[1, 2, 64], &[7, 2, 16], &[14]], &sizes), 2 * 2 * 7 * 64);
        assert_counts((MS, "MatMulBnb4", &[&[1, 2, 64], &[224], &[7]], &sizes), 2 * 2 * 7 * 64);
    }

    #[test]
    fn einsums() {
        let einsum = |equation: &str, shapes: &[&[usize]]| {
            let equation = ("equation", Attribute::String(equation.as_bytes().to_vec()));
            counted(("", "Einsum", shapes, &[equation]))
        };
        let known = |total| Flops { total, ..Flops::default() };
        let factors: [&[usize]; 2] = [&[2, 3, 5], &[2, 7, 5]];
        assert_eq!(einsum("bij, bkj -> bik", &factors), known(2 * 2 * 3 * 5 * 7));
        assert_eq!(einsum("i,j->ij", &[&[2], &[3]]), known(0));
        assert_eq!(einsum("ij->i", &[&[2, 3]]), known(0));
        assert!(!einsum("...ij,...kj->...ik", &factors).is_complete());
    }

    #[test]
    fn convolutions() {
        let pads = ("pads", Attribute::Ints(vec![1; 4]));
        let same = [pads.clone()];
        assert_counts(("", "Conv", &[&[1, 4, 8, 9], &[6, 4, 3, 3]], &same), 2 * 6 * 8 * 9 * 4 * 9);
        let grouped = [pads, int("group", 2)];
        assert_counts(("", "Conv", &[&[1, 4, 8, 9], &[6, 2, 3, 3]], &grouped), 2 * 6 * 8 * 9 * 2 * 9);
        assert_counts(("", "ConvTranspose", &[&[1, 4, 8, 9], &[4, 6, 2, 2]], &[]), 2 * 4 * 8 * 9 * 6 * 4);
    }

    #[test]
    fn attention_is_two_products() {
        let (heads, size, rows, keys) = (3, 4, 5, 6);
        let both = 2 * (2 * heads * rows * keys * size) as u64;
        let (query, key) = ([1, rows, heads * size], [1, keys, heads * size]);
        let lain: [&[usize]; 3] = [&query, &key, &key];
        assert_counts((MS, "MultiHeadAttention", &lain, &[int("num_heads", heads as i64)]), both);
        let counts = [int("q_num_heads", heads as i64), int("kv_num_heads", heads as i64)];
        assert_counts(("", "Attention", &lain, &counts), both);
        let (query, key) = ([1, heads, rows, size], [1, heads, keys, size]);
        assert_counts(("", "Attention", &[&query, &key, &key], &[]), both);

        // Four heads share two of keys.
        let grouped: [&[usize]; 3] = [&[1, 5, 16], &[1, 5, 8], &[1, 5, 8]];
        let counts = [int("num_heads", 4), int("kv_num_heads", 2)];
        assert_counts((MS, "GroupQueryAttention", &grouped, &counts), 2 * 2 * 4 * 5 * 5 * 4);
    }

    #[test]
    fn everything_else_counts_as_nothing() {
        assert_counts(("", "Softmax", &[&[64, 64]], &[]), 0);
        assert_counts(("", "Add", &[&[64, 64], &[64]], &[]), 0);
    }

    #[test]
    fn what_is_not_known_is_listed() {
        let unbound = {
            let mut b = Builder::new("unbound");
            let x = b.input("x", DType::F32, &[Dim::Symbol("rows".to_owned()), Dim::Fixed(3)]);
            let w = b.input("w", DType::F32, &[Dim::Fixed(3), Dim::Fixed(7)]);
            b.matmul(x, w);
            b.finish()
        };
        let at = |sizes: Sizes| flops(&unbound, &infer(&unbound, &sizes, &BTreeMap::new()));
        assert_eq!(at(Sizes::new()).unknown, BTreeMap::from([("MatMul".to_owned(), 1)]));
        assert_eq!(at(Sizes::from([("rows".to_owned(), 2)])).total, 2 * 2 * 7 * 3);
        assert_eq!(at(Sizes::from([("rows".to_owned(), usize::MAX)])).total, u64::MAX);
        let recurrent = counted((MS, "QMoE", &[&[1, 2, 3]], &[]));
        assert!(!recurrent.is_complete());
    }
}
