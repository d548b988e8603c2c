use viaduct_export::onnx::{Attribute, DType, Dim};

use crate::{
    runtime_support::{Feeds, Net, int, ints, noise, tensor},
    same::{Bar, one},
};

const CHANNELS: usize = 8;

/// Attention over the pixels of x [1, 8, h, w], as diffusers' AutoencoderKL has it and torch exports it, up to the Reshape
/// back whose sizes are read.
fn attention(query: fn(&mut Net)) -> Net {
    let mut net = Net::new(DType::F32);
    let open = |name: &str| Dim::Symbol(name.to_owned());
    net.input("x", DType::F32, &[Dim::Fixed(1), Dim::Fixed(CHANNELS), open("h"), open("w")]);
    net.ints("flat", &[0, 4, -1])
        .ints("tokens", &[1, CHANNELS as i64, -1])
        .ints("heads", &[1, -1, 1, CHANNELS as i64]);
    net.ints("joined", &[1, -1, CHANNELS as i64]).float("scale", &[1], &[0.6]);
    net.float("ones", &[4], &[1.0; 4]).float("zeros", &[4], &[0.0; 4]);
    net.float("gain", &[CHANNELS, 1], &noise(3, CHANNELS));
    net.node("Reshape", &["x", "flat"], "g", &[]).node(
        "InstanceNormalization",
        &["g", "ones", "zeros"],
        "i",
        &[],
    );
    net.node("Reshape", &["i", "tokens"], "n", &[]).node("Mul", &["n", "gain"], "m", &[]);
    net.node("Transpose", &["m"], "t", &[("perm", ints(&[0, 2, 1]))]);
    for (seed, name) in ["q", "k", "v"].into_iter().enumerate() {
        let [weight, bias, linear, biased, heads] =
            ["w", "b", "l", "a", "h"].map(|part| format!("{name}_{part}"));
        net.float(&weight, &[CHANNELS, CHANNELS], &noise(seed as u64 + 4, CHANNELS * CHANNELS));
        net.float(&bias, &[CHANNELS], &noise(seed as u64 + 7, CHANNELS));
        net.node("MatMul", &["t", &weight], &linear, &[]).node("Add", &[&bias, &linear], &biased, &[]);
        net.node("Reshape", &[&biased, "heads"], &heads, &[]);
        let perm = if name == "k" { [0, 2, 3, 1] } else { [0, 2, 1, 3] };
        net.node("Transpose", &[&heads], name, &[("perm", ints(&perm))]);
    }
    query(&mut net);
    net.node("MatMul", &["qs", "k"], "s", &[]).node("Softmax", &["s"], "p", &[("axis", int(-1))]);
    net.node("MatMul", &["p", "v"], "o", &[]).node(
        "Transpose",
        &["o"],
        "ot",
        &[("perm", ints(&[0, 2, 1, 3]))],
    );
    net.node("Reshape", &["ot", "joined"], "oj", &[]).node(
        "Transpose",
        &["oj"],
        "z",
        &[("perm", ints(&[0, 2, 1]))],
    );
    net.node("Shape", &["x"], "shape", &[]).node("Reshape", &["z", "shape"], "y", &[]);
    net
}

fn scaled(net: &mut Net) {
    net.node("Mul", &["q", "scale"], "qs", &[]);
}

fn feed(h: usize, w: usize) -> Feeds {
    vec![("x".to_owned(), tensor(DType::F32, &[1, CHANNELS, h, w], &noise(1, CHANNELS * h * w)))]
}

#[test]
fn attention_over_pixels_reads_no_size() {
    let model = attention(scaled).model(&["y"]);
    for (h, w) in [(4, 6), (1, 3), (7, 1)] {
        let after = one(&model, "keep_rows", &feed(h, w), Bar::Relative(1e-6));
        assert_eq!(after.applied(), 1);
        assert_eq!(after.operators().get("Shape"), None);
        assert_eq!(
            after.operators()["InstanceNormalization"],
            1,
            "what queries share with keys is computed once"
        );
    }
}

#[test]
fn rows_through_other_operators_are_refused() {
    let cumulated = |net: &mut Net| {
        net.ints("along", &[2]).node("CumSum", &["q", "along"], "qs", &[]);
    };
    let after = one(&attention(cumulated).model(&["y"]), "keep_rows", &feed(4, 6), Bar::Exact);
    assert_eq!(after.refusals(), [("the rows go through CumSum".to_owned(), 1)].into());
}

#[test]
fn a_softmax_over_the_rows_is_refused() {
    let over_rows = |net: &mut Net| {
        net.node("Softmax", &["q"], "qs", &[("axis", Attribute::Int(2))]);
    };
    let after = one(&attention(over_rows).model(&["y"]), "keep_rows", &feed(4, 6), Bar::Exact);
    assert_eq!(after.refusals(), [("Softmax goes over the rows".to_owned(), 1)].into());
}

#[test]
fn pixels_that_were_flat_from_the_start_are_refused() {
    let mut net = Net::new(DType::F32);
    let open = |name: &str| Dim::Symbol(name.to_owned());
    net.input("x", DType::F32, &[Dim::Fixed(1), Dim::Fixed(2), open("h"), open("w")]);
    net.ints("flat", &[0, 0, -1]).node("Reshape", &["x", "flat"], "f", &[]).node("Gelu", &["f"], "s", &[]);
    net.node("Shape", &["x"], "shape", &[]).node("Reshape", &["s", "shape"], "y", &[]);
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[1, 2, 3, 4], &noise(1, 24)))];
    let after = one(&net.model(&["y"]), "keep_rows", &feeds, Bar::Exact);
    assert_eq!(after.refusals(), [("the rows go through Gelu".to_owned(), 1)].into());
}

/// The weights, which have one axis less where others use them: h and w become one again, and the keys stay.
#[test]
fn what_is_used_elsewhere_is_flattened_again() {
    let model = attention(scaled).model(&["y", "p"]);
    for (h, w) in [(4, 6), (1, 3)] {
        let after = one(&model, "keep_rows", &feed(h, w), Bar::Relative(1e-6));
        assert_eq!((after.applied(), after.operators().get("Shape")), (1, None));
    }
}

/// Attention of the rows to themselves, without weights: they are split as queries, and flat as keys and values.
#[test]
fn rows_that_are_values_too_stay_flat_there() {
    let mut net = Net::new(DType::F32);
    let open = |name: &str| Dim::Symbol(name.to_owned());
    net.input("x", DType::F32, &[Dim::Fixed(1), Dim::Fixed(3), open("h"), open("w")]);
    net.ints("flat", &[0, 0, -1]).node("Reshape", &["x", "flat"], "k", &[]);
    net.node("Transpose", &["k"], "q", &[("perm", ints(&[0, 2, 1]))]);
    net.node("MatMul", &["q", "k"], "s", &[]).node("Softmax", &["s"], "p", &[]);
    net.node("MatMul", &["p", "q"], "o", &[]).node("Transpose", &["o"], "z", &[("perm", ints(&[0, 2, 1]))]);
    net.node("Shape", &["x"], "shape", &[]).node("Reshape", &["z", "shape"], "y", &[]);
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[1, 3, 4, 6], &noise(1, 72)))];
    let after = one(&net.model(&["y"]), "keep_rows", &feeds, Bar::Relative(1e-6));
    assert_eq!((after.applied(), after.operators().get("Shape")), (1, None));
}
