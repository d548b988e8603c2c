use viaduct_export::onnx::DType;

use crate::{
    foreign::foreign,
    runtime_support::{Feeds, Net, int, tensor},
    same::{Bar, one, rewrite},
    written,
};

/// What torch exports: computed at run time or not, half of it on q and half on k, or all of it on the scores.
#[test]
fn scales_become_one_constant_on_the_queries() {
    for pattern in ["patterns/attention", "patterns/attention_manual"] {
        for (export, bar) in [("legacy", 1e-6), ("dynamo", 1e-6), ("legacy_f16", 2e-3), ("dynamo_f16", 2e-3)]
        {
            let (model, feeds) = foreign(pattern, export);
            let after = one(&model, "fix_attention_scale", &feeds, Bar::Relative(bar));
            assert_eq!((after.applied(), after.refusals().len()), (1, 0), "{pattern} {export}");
            let operators = after.operators();
            assert!(["Sqrt", "Cast"].iter().all(|op| !operators.contains_key(op)), "{operators:?}");
            let product = after.model.graph.nodes().find(|(_, node)| node.is("MatMul")).unwrap().1;
            let q = after.model.graph.producer(product.input(0).unwrap()).unwrap();
            assert!(after.model.graph[q].is("Mul"), "{pattern} {export}");
        }
    }
}

fn scaled_scores(dtype: DType, scale: f32, op: &str) -> (Net, Feeds) {
    let (mut net, feeds) = written::heads(dtype);
    net.float("scale", &[], &[scale]).node("MatMul", &["q4", "kt"], "product", &[]);
    net.node(op, &["product", "scale"], "scores", &[]);
    written::attend(&mut net, "scores");
    (net, feeds)
}

#[test]
fn a_constant_on_the_queries_stays() {
    let (mut net, feeds) = written::heads(DType::F32);
    net.float("scale", &[], &[0.3]).node("Mul", &["q4", "scale"], "qs", &[]);
    net.node("MatMul", &["qs", "kt"], "scores", &[]);
    written::attend(&mut net, "scores");
    assert_eq!(one(&net.model(&["y"]), "fix_attention_scale", &feeds, Bar::Exact).applied(), 0);
}

#[test]
fn a_division_of_scores_is_a_scale() {
    let (net, feeds) = scaled_scores(DType::F32, 2.8, "Div");
    let after = one(&net.model(&["y"]), "fix_attention_scale", &feeds, Bar::Relative(1e-6));
    assert_eq!(after.applied(), 1);
    assert!(!after.operators().contains_key("Div"));
}

#[test]
fn scores_that_two_attentions_share_are_scaled_once() {
    let (mut net, feeds) = scaled_scores(DType::F32, 2.8, "Div");
    net.node("Softmax", &["scores"], "weights2", &[("axis", int(-1))]);
    net.node("MatMul", &["weights2", "v4"], "z", &[]);
    let after = one(&net.model(&["y", "z"]), "fix_attention_scale", &feeds, Bar::Relative(1e-6));
    assert_eq!(after.applied(), 1);
}

#[test]
fn f16_is_left_alone_where_the_scale_would_grow_something() {
    let (net, _) = scaled_scores(DType::F16, 4.0, "Mul");
    refused(&net, "f16 cannot hold the scale as one factor");
    let (net, _) = scaled_scores(DType::F16, 1e-5, "Mul");
    refused(&net, "f16 cannot hold the scale as one factor");
}

#[test]
fn other_types_are_left_alone() {
    let (mut net, _) = written::heads(DType::F64);
    net.constant(
        "half",
        viaduct_export::onnx::Tensor::inline(DType::F64, &[], 0.5f64.to_le_bytes().to_vec()),
    );
    net.node("MatMul", &["q4", "kt"], "product", &[]).node("Mul", &["product", "half"], "scores", &[]);
    written::attend(&mut net, "scores");
    refused(&net, "attention is of another type than f32 and f16");
}

#[test]
fn a_scale_that_comes_from_outside_is_left_alone() {
    let (mut net, mut feeds) = written::heads(DType::F32);
    net.x("scale", &[1]).node("Mul", &["q4", "scale"], "qs", &[]);
    feeds.push(("scale".to_owned(), tensor(DType::F32, &[1], &[0.5])));
    net.node("MatMul", &["qs", "kt"], "scores", &[]);
    written::attend(&mut net, "scores");
    refused(&net, "the scale is not known before the run");
}

fn refused(net: &Net, why: &str) {
    let after = rewrite(
        &net.model(&["y"]),
        &[viaduct_export::passes::pass("fix_attention_scale").unwrap()],
        &Default::default(),
    );
    assert_eq!((after.applied(), after.refusals()), (0, [(why.to_owned(), 1)].into()));
}
