use viaduct_export::{
    onnx::DType,
    passes::{Settings, pass},
};

use crate::{
    foreign::foreign,
    runtime_support::{Net, noise, tensor},
    same::{Bar, one, passes, rewrite},
    written::{self, ROWS},
};

#[test]
fn guards_behind_finite_masks_go() {
    for (export, bar) in [("legacy", 1e-6), ("dynamo", 1e-6), ("legacy_f16", 2e-3), ("dynamo_f16", 2e-3)] {
        let (model, feeds) = foreign("patterns/attention_masked", export);
        let both = [pass("finite_masks").unwrap(), pass("remove_nan_guard").unwrap()];
        let after = passes(&model, &both, &Settings::default(), &feeds, Bar::Relative(bar));
        assert_eq!((after.applied(), after.refusals().len()), (2, 0), "{export}");
        assert!(!after.operators().contains_key("IsNaN"), "{export}");
    }
}

#[test]
fn a_guard_without_a_mask_goes_and_outputs_keep_their_names() {
    let (mut net, feeds) = written::heads(DType::F32);
    net.node("MatMul", &["q4", "kt"], "scores", &[]);
    written::attend_guarded(&mut net, "scores");
    let after = one(&net.model(&["y", "guarded"]), "remove_nan_guard", &feeds, Bar::Exact);
    assert_eq!((after.applied(), after.operators().get("IsNaN")), (1, None));
}

fn refused(net: &Net, why: &str) {
    let after = rewrite(&net.model(&["y"]), &[pass("remove_nan_guard").unwrap()], &Settings::default());
    assert_eq!((after.applied(), after.refusals()), (0, [(why.to_owned(), 1)].into()));
}

#[test]
fn infinite_masks_keep_their_guard() {
    for (dtype, hidden) in [(DType::F32, f32::NEG_INFINITY), (DType::F16, -65504.0)] {
        let (mut net, mut feeds) = written::heads(dtype);
        written::seen(&mut net, &mut feeds, None);
        written::masked_scores(&mut net, hidden);
        written::attend_guarded(&mut net, "scores");
        refused(&net, "the mask may hide all keys of a row with -inf");
    }
}

#[test]
fn masks_from_outside_keep_their_guard() {
    let (mut net, mut feeds) = written::heads(DType::F32);
    net.x("bias", &[ROWS, ROWS]);
    feeds.push(("bias".to_owned(), tensor(DType::F32, &[ROWS, ROWS], &noise(8, ROWS * ROWS))));
    net.node("MatMul", &["q4", "kt"], "product", &[]).node("Add", &["product", "bias"], "scores", &[]);
    written::attend_guarded(&mut net, "scores");
    refused(&net, "it is not known whether the mask may hide all keys of a row");
}

#[test]
fn other_softmaxes_keep_their_guard() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2, 3]).node("Softmax", &["x"], "w", &[]).node("IsNaN", &["w"], "bad", &[]);
    net.float("zero", &[], &[0.0]).node("Where", &["bad", "zero", "w"], "y", &[]);
    refused(&net, "what goes into the softmax is not understood");
}
