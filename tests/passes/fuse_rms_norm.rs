use viaduct_export::{
    onnx::{DType, Tensor},
    passes::{Settings, pass},
};

use crate::{
    runtime_support::{Feeds, Net, int, noise, tensor},
    same::{Bar, one, rewrite},
};

const CAST_F32: i64 = 1;
const CAST_F16: i64 = 10;

/// x [2, 5, 16], the constants of the formula, and a weight.
fn net(dtype: DType, inner: DType) -> Net {
    let mut net = Net::new(dtype);
    net.x("x", &[2, 5, 16]).ints("axes", &[-1]).float("weight", &[16], &noise(2, 16));
    let scalar = |value: f32| match inner {
        DType::F16 => Tensor::from_f16(&[], &[value]),
        _ => Tensor::from_f32(&[], &[value]),
    };
    net.constant("two", scalar(2.0)).constant("one", scalar(1.0)).constant("eps", scalar(1e-3));
    net
}

/// The root of the mean square of `x`.
fn root<'n>(net: &'n mut Net, x: &str, square: &[&str]) -> &'n mut Net {
    net.node(square[0], &[x, square[1]], "square", &[])
        .node("ReduceMean", &["square", "axes"], "mean", &[])
        .node("Add", &["mean", "eps"], "sum", &[])
        .node("Sqrt", &["sum"], "root", &[])
}

fn feeds(dtype: DType, scale: f32) -> Feeds {
    let values: Vec<f32> = noise(1, 160).iter().map(|v| v * scale).collect();
    vec![("x".to_owned(), tensor(dtype, &[2, 5, 16], &values))]
}

#[test]
fn a_reciprocal_and_a_weight_become_one_operator() {
    let mut net = net(DType::F32, DType::F32);
    root(&mut net, "x", &["Pow", "two"]);
    net.node("Reciprocal", &["root"], "inverse", &[]).node("Mul", &["x", "inverse"], "normed", &[]).node(
        "Mul",
        &["weight", "normed"],
        "y",
        &[],
    );
    let after = one(&net.model(&["y"]), "fuse_rms_norm", &feeds(DType::F32, 1.0), Bar::Relative(1e-6));
    assert_eq!(after.applied(), 1);
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("SimplifiedLayerNormalization", 1)]);
}

#[test]
fn one_over_the_root_of_a_product_becomes_one_operator() {
    let mut net = net(DType::F32, DType::F32);
    root(&mut net, "x", &["Mul", "x"]);
    net.node("Div", &["one", "root"], "inverse", &[]).node("Mul", &["inverse", "x"], "normed", &[]).node(
        "Mul",
        &["normed", "weight"],
        "y",
        &[],
    );
    let after = one(&net.model(&["y"]), "fuse_rms_norm", &feeds(DType::F32, 1.0), Bar::Relative(1e-6));
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("SimplifiedLayerNormalization", 1)]);
}

#[test]
fn without_a_weight_it_gets_one_of_ones() {
    let mut net = net(DType::F32, DType::F32);
    root(&mut net, "x", &["Pow", "two"]).node("Div", &["x", "root"], "y", &[]);
    let after = one(&net.model(&["y"]), "fuse_rms_norm", &feeds(DType::F32, 1.0), Bar::Relative(1e-6));
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("SimplifiedLayerNormalization", 1)]);
}

#[test]
fn a_normed_value_that_is_used_elsewhere_stays() {
    let mut net = net(DType::F32, DType::F32);
    root(&mut net, "x", &["Pow", "two"]).node("Div", &["x", "root"], "normed", &[]).node(
        "Mul",
        &["normed", "weight"],
        "y",
        &[],
    );
    let after =
        one(&net.model(&["y", "normed"]), "fuse_rms_norm", &feeds(DType::F32, 1.0), Bar::Relative(1e-6));
    assert_eq!(
        after.operators().into_iter().collect::<Vec<_>>(),
        [("Mul", 1), ("SimplifiedLayerNormalization", 1)]
    );
}

/// Values of 800 have squares that f16 does not hold; between the Casts, and in the operator, they are f32.
#[test]
fn between_casts_the_operator_takes_f16_and_keeps_statistics_in_f32() {
    let mut net = net(DType::F16, DType::F32);
    net.node("Cast", &["x"], "wide", &[("to", int(CAST_F32))]);
    root(&mut net, "wide", &["Pow", "two"]);
    net.node("Div", &["wide", "root"], "normed", &[])
        .node("Cast", &["normed"], "narrow", &[("to", int(CAST_F16))])
        .node("Mul", &["narrow", "weight"], "y", &[]);
    let after = one(&net.model(&["y"]), "fuse_rms_norm", &feeds(DType::F16, 800.0), Bar::Relative(2e-3));
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("SimplifiedLayerNormalization", 1)]);
}

#[test]
fn other_axes_other_types_and_an_epsilon_of_the_caller_are_refused() {
    let refusal = |net: &Net| {
        let after = rewrite(&net.model(&["y"]), &[pass("fuse_rms_norm").unwrap()], &Settings::default());
        assert_eq!(after.applied(), 0);
        after.refusals().into_keys().collect::<Vec<_>>()
    };
    let formula = |net: &mut Net| {
        root(net, "x", &["Mul", "x"]).node("Div", &["x", "root"], "y", &[]);
    };
    let mut first_axis = Net::new(DType::F32);
    first_axis.x("x", &[2, 5, 16]).ints("axes", &[1]).float("eps", &[], &[1e-3]);
    formula(&mut first_axis);
    assert_eq!(refusal(&first_axis), ["the mean is not over the last axis alone"]);

    let mut of_the_caller = Net::new(DType::F32);
    of_the_caller.x("x", &[2, 5, 16]).ints("axes", &[-1]).x("eps", &[]);
    formula(&mut of_the_caller);
    assert_eq!(refusal(&of_the_caller), ["epsilon or the width is not a constant"]);

    let mut double = Net::new(DType::F64);
    double.x("x", &[2, 5, 16]).ints("axes", &[-1]);
    double.constant("eps", Tensor::inline(DType::F64, &[], 1e-3f64.to_le_bytes().to_vec()));
    formula(&mut double);
    assert_eq!(refusal(&double), ["it is neither f32 nor f16"]);
}
