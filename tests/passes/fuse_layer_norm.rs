use viaduct_export::{
    onnx::DType,
    passes::{Settings, pass},
};

use crate::{
    runtime_support::{Feeds, Net, float, int, noise, tensor},
    same::{Bar, one, rewrite},
};

fn written_out(dtype: DType, axis: i64) -> Net {
    let mut net = Net::new(dtype);
    net.x("x", &[2, 5, 16])
        .ints("axes", &[axis])
        .float("two", &[], &[2.0])
        .float("eps", &[], &[1e-3])
        .float("weight", &[16], &noise(2, 16))
        .float("bias", &[16], &noise(3, 16))
        .node("ReduceMean", &["x", "axes"], "mean", &[])
        .node("Sub", &["x", "mean"], "centred", &[])
        .node("Pow", &["centred", "two"], "square", &[])
        .node("ReduceMean", &["square", "axes"], "variance", &[])
        .node("Add", &["variance", "eps"], "sum", &[])
        .node("Sqrt", &["sum"], "root", &[])
        .node("Div", &["centred", "root"], "normed", &[])
        .node("Mul", &["normed", "weight"], "scaled", &[])
        .node("Add", &["scaled", "bias"], "y", &[]);
    net
}

fn x(dtype: DType) -> Feeds {
    vec![("x".to_owned(), tensor(dtype, &[2, 5, 16], &noise(1, 160)))]
}

/// LayerNormalization, scaled by one plus `scale` and shifted.
fn adaptive(scale: &[usize], weight: f32) -> Net {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2, 5, 16])
        .x("scale", scale)
        .x("shift", &[1, 1, 16])
        .float("one", &[], &[1.0])
        .float("ones", &[16], &[weight; 16])
        .float("zeros", &[16], &[0.0; 16])
        .node(
            "LayerNormalization",
            &["x", "ones", "zeros"],
            "normed",
            &[("axis", int(-1)), ("epsilon", float(1e-6))],
        )
        .node("Add", &["scale", "one"], "factor", &[])
        .node("Mul", &["factor", "normed"], "scaled", &[])
        .node("Add", &["scaled", "shift"], "y", &[]);
    net
}

#[test]
fn a_written_out_layer_norm_becomes_one_operator() {
    let after = one(
        &written_out(DType::F32, -1).model(&["y"]),
        "fuse_layer_norm",
        &x(DType::F32),
        Bar::Relative(1e-6),
    );
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("LayerNormalization", 1)]);
    let after = one(
        &written_out(DType::F16, 2).model(&["y"]),
        "fuse_layer_norm",
        &x(DType::F16),
        Bar::Relative(5e-3),
    );
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("LayerNormalization", 1)]);
}

#[test]
fn an_adaptive_scale_and_shift_become_operands() {
    let mut feeds = x(DType::F32);
    feeds.push(("scale".to_owned(), tensor(DType::F32, &[1, 1, 16], &noise(4, 16))));
    feeds.push(("shift".to_owned(), tensor(DType::F32, &[1, 1, 16], &noise(5, 16))));
    let after =
        one(&adaptive(&[1, 1, 16], 1.0).model(&["y"]), "fuse_layer_norm", &feeds, Bar::Relative(1e-6));
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("Add", 1), ("LayerNormalization", 1)]);
}

#[test]
fn other_axes_scales_per_row_and_a_weight_before_the_scale_are_refused() {
    let refusal = |net: &Net| {
        let after = rewrite(&net.model(&["y"]), &[pass("fuse_layer_norm").unwrap()], &Settings::default());
        assert_eq!(after.applied(), 0);
        after.refusals().into_keys().collect::<Vec<_>>()
    };
    assert_eq!(refusal(&written_out(DType::F32, 1)), ["the mean is not over the last axis alone"]);
    assert_eq!(refusal(&adaptive(&[2, 1, 16], 1.0)), ["its scale differs from row to row"]);
    assert_eq!(refusal(&adaptive(&[1, 1, 16], 2.0)), ["it has a weight of its own and a scale after it"]);
}
