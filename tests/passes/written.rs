//! Attention written out node by node, for tests of passes that look for it.

use viaduct_export::onnx::DType;

use crate::runtime_support::{Feeds, Net, int, ints, noise, tensor};

pub const ROWS: usize = 7;
pub const HEADS: usize = 2;
pub const WIDTH: usize = 8;

/// Inputs q, k, v [1, rows, heads * width]; values `q4` and `v4` [1, heads, rows, width] and `kt` [1, heads, width, rows].
pub fn heads(dtype: DType) -> (Net, Feeds) {
    let mut net = Net::new(dtype);
    let mut feeds = Feeds::new();
    let shape = [1, ROWS, HEADS * WIDTH];
    net.ints("split", &[1, ROWS as i64, HEADS as i64, WIDTH as i64]);
    for (seed, (name, perm, out)) in
        [("q", [0, 2, 1, 3], "q4"), ("k", [0, 2, 3, 1], "kt"), ("v", [0, 2, 1, 3], "v4")]
            .into_iter()
            .enumerate()
    {
        net.x(name, &shape);
        feeds.push((name.to_owned(), tensor(dtype, &shape, &noise(seed as u64 + 1, ROWS * HEADS * WIDTH))));
        net.node("Reshape", &[name, "split"], &format!("{name}_split"), &[]);
        net.node("Transpose", &[&format!("{name}_split")], out, &[("perm", ints(&perm))]);
    }
    (net, feeds)
}

/// `scores` of the softmax to `y` [1, rows, heads * width].
pub fn attend(net: &mut Net, scores: &str) {
    net.node("Softmax", &[scores], "weights", &[("axis", int(-1))]);
    apply(net, "weights");
}

/// The same with the guard against NaN that torch writes.
pub fn attend_guarded(net: &mut Net, scores: &str) {
    net.node("Softmax", &[scores], "weights", &[("axis", int(-1))]).node("IsNaN", &["weights"], "bad", &[]);
    net.float("zero", &[], &[0.0]).node("Where", &["bad", "zero", "weights"], "guarded", &[]);
    apply(net, "guarded");
}

pub fn apply(net: &mut Net, weights: &str) {
    net.ints("join", &[1, ROWS as i64, (HEADS * WIDTH) as i64]);
    net.node("MatMul", &[weights, "v4"], "y4", &[]);
    net.node("Transpose", &["y4"], "y_rows", &[("perm", ints(&[0, 2, 1, 3]))]);
    net.node("Reshape", &["y_rows", "join"], "y", &[]);
}

/// A mask [1, 1, rows, rows] of a causal model, as an input `mask` of numbers: `seen` is true where it is above 0. Every
/// row sees itself, but for `blind`, which sees nothing.
pub fn seen(net: &mut Net, feeds: &mut Feeds, blind: Option<usize>) {
    net.x("mask", &[1, 1, ROWS, ROWS]).float("nothing", &[], &[0.0]);
    let sees = |query: usize, key: usize| key <= query && blind != Some(query);
    let values: Vec<f32> =
        (0..ROWS * ROWS).map(|i| if sees(i / ROWS, i % ROWS) { 1.0 } else { -1.0 }).collect();
    feeds.push(("mask".to_owned(), tensor(net.dtype, &[1, 1, ROWS, ROWS], &values)));
    net.node("Greater", &["mask", "nothing"], "seen", &[]);
}

/// `scores` = q k^T + Where(seen, 0, hidden).
pub fn masked_scores(net: &mut Net, hidden: f32) {
    net.float("hidden", &[], &[hidden]).node("Where", &["seen", "nothing", "hidden"], "bias", &[]);
    net.node("MatMul", &["q4", "kt"], "product", &[]).node("Add", &["product", "bias"], "scores", &[]);
}
