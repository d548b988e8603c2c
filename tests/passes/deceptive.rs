//! Graphs that look as if they could be rewritten, and whose results would change if they were.

use viaduct::tensor::HostTensor;
use viaduct_export::{
    onnx::{DType, Dim, Tensor},
    passes::{Settings, sequence},
};

use crate::{
    runtime_support::{Feeds, Net, int, ints, noise, tensor},
    same::{Bar, Rewritten, passes},
};

fn same(net: &Net, name: &str, feeds: &Feeds, bar: f32) -> Rewritten {
    passes(&net.model(&["y"]), &sequence(name).unwrap(), &Settings::default(), feeds, Bar::Relative(bar))
}

fn feed(shape: &[usize], values: &[f32]) -> Feeds {
    vec![("x".to_owned(), tensor(DType::F32, shape, values))]
}

/// A decision about an open size falls another way for sizes that are no sample of it.
#[test]
fn decisions_about_open_sizes_stay_open() {
    let cases: [(&str, i64, usize); 7] = [
        ("Greater", 131_072, 131_073),
        ("Less", 20, 14),
        ("LessOrEqual", 0, 0),
        ("GreaterOrEqual", 200_000, 200_000),
        ("Mod", 7, 14),
        ("Min", 100_000_000, 5),
        ("Div", 200_000, 200_000),
    ];
    for (op, number, rows) in cases {
        let mut net = Net::new(DType::F32);
        net.input("x", DType::F32, &[Dim::Symbol("rows".to_owned()), Dim::Fixed(1)]);
        net.node("Shape", &["x"], "shape", &[]).ints("first", &[0]).ints("number", &[number]);
        net.node("Gather", &["shape", "first"], "size", &[]).node(op, &["size", "number"], "decided", &[]);
        net.node("Cast", &["decided"], "factor", &[("to", int(1))]).float("one", &[1], &[1.0]);
        net.node("Add", &["factor", "one"], "by", &[]).node("Mul", &["x", "by"], "y", &[]);
        same(&net, "lean", &feed(&[rows, 1], &noise(1, rows)), 0.0);
    }
}

#[test]
fn an_attention_that_rounds_its_scores_is_none() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[1, 1, 6, 8]).node("Transpose", &["x"], "kt", &[("perm", ints(&[0, 1, 3, 2]))]);
    net.node("MatMul", &["x", "kt"], "s", &[]).node("Cast", &["s"], "i", &[("to", int(6))]);
    net.node("Cast", &["i"], "f", &[("to", int(1))]).node("Softmax", &["f"], "w", &[("axis", int(-1))]);
    net.node("MatMul", &["w", "x"], "y", &[]);
    let values: Vec<f32> = noise(2, 48).into_iter().map(|v| 2.0 * v).collect();
    same(&net, "webgpu", &feed(&[1, 1, 6, 8], &values), 1e-5);
}

#[test]
fn a_norm_whose_epsilon_adds_axes_keeps_them() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[4, 8]).float("two", &[], &[2.0]).float("eps", &[1, 1, 1, 1], &[1e-5]);
    net.constant("axes", Tensor::from_i64(&[1], &[-1]));
    net.node("Pow", &["x", "two"], "p", &[]).node("ReduceMean", &["p", "axes"], "m", &[]);
    net.node("Add", &["m", "eps"], "e", &[]).node("Sqrt", &["e"], "r", &[]).node(
        "Div",
        &["x", "r"],
        "y",
        &[],
    );
    same(&net, "webgpu", &feed(&[4, 8], &noise(3, 32)), 1e-5);
}

/// 1e-12 is 0 in f16, and a row of zeros would be divided by it.
#[test]
fn what_keeps_a_divisor_from_zero_stays_in_f32() {
    for guard in ["Max", "Add"] {
        let mut net = Net::new(DType::F32);
        net.x("x", &[2, 4]).constant("axes", Tensor::from_i64(&[1], &[-1])).float("least", &[], &[1e-12]);
        net.node("ReduceL2", &["x", "axes"], "r", &[]).node(guard, &["r", "least"], "g", &[]);
        net.node("Div", &["x", "g"], "y", &[]);
        same(&net, "f16", &feed(&[2, 4], &[0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0]), 2e-3);
    }
}

#[test]
fn indices_that_are_computed_in_f64_stay_exact() {
    let mut net = Net::new(DType::F32);
    net.input("i", DType::I64, &[Dim::Fixed(2)])
        .constant("one", Tensor::inline(DType::F64, &[], 1f64.to_le_bytes().into()));
    net.node("Cast", &["i"], "d", &[("to", int(11))]).node("Mul", &["d", "one"], "m", &[]);
    net.node("Floor", &["m"], "f", &[]).node("Cast", &["f"], "y", &[("to", int(7))]);
    let feeds = vec![("i".to_owned(), HostTensor::i64(&[2], vec![16_777_217, 1 << 40 | 1]))];
    let model = net.model_typed(&[("y", DType::I64)]);
    passes(&model, &sequence("webgpu").unwrap(), &Settings::default(), &feeds, Bar::Exact);
}
