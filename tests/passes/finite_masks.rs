use viaduct_export::{
    onnx::{DType, Tensor},
    passes::{Settings, pass},
};

use crate::{
    foreign::foreign,
    runtime_support::{Feeds, Net, cpu, int, noise, run, tensor},
    same::{Bar, Rewritten, one, rewrite},
    written::{self, ROWS},
};

#[test]
fn what_torch_exports_becomes_finite() {
    for pattern in ["patterns/attention_masked", "patterns/attention_bias"] {
        for (export, bar) in [("legacy", 1e-6), ("dynamo", 1e-6), ("legacy_f16", 2e-3), ("dynamo_f16", 2e-3)]
        {
            let (model, feeds) = foreign(pattern, export);
            let after = one(&model, "finite_masks", &feeds, Bar::Relative(bar));
            assert_eq!((after.applied(), after.refusals().len()), (1, 0), "{pattern} {export}");
            assert!(numbers(&after).iter().all(|number| number.is_finite() && *number >= -1e30));
        }
    }
}

/// All floating-point constants of a model.
fn numbers(after: &Rewritten) -> Vec<f32> {
    let constants = after.model.graph.values().filter_map(|(_, value)| value.constant.as_ref());
    constants.filter_map(|tensor| tensor.to_f32().unwrap()).flatten().collect()
}

/// A guard makes rows 0 that see nothing; they stay 0, whatever the layout behind.
#[test]
fn rows_that_see_nothing_stay_zero_behind_a_guard() {
    for dtype in [DType::F32, DType::F16] {
        let (mut net, mut feeds) = written::heads(dtype);
        written::seen(&mut net, &mut feeds, Some(3));
        written::masked_scores(&mut net, f32::NEG_INFINITY);
        written::attend_guarded(&mut net, "scores");
        let model = net.model(&["y"]);
        let bar = if dtype == DType::F16 { 2e-3 } else { 1e-6 };
        let after = one(&model, "finite_masks", &feeds, Bar::Relative(bar));
        assert_eq!(after.applied(), 1);
        assert_eq!(after.operators()["ReduceMax"], 1);
        let y = run(&mut cpu(), &after.model, &feeds, &["y"]).unwrap()[0].to_f32();
        let row = y.len() / ROWS;
        assert!(y[3 * row..4 * row].iter().all(|v| *v == 0.0));
    }
}

/// Attentions with one condition find their blind rows once; where heads have masks of their own, rows are made 0 by head.
#[test]
fn masks_of_heads_make_rows_zero_by_head() {
    let (mut net, mut feeds) = written::heads(DType::F32);
    net.x("mask", &[1, 2, ROWS, ROWS]).float("nothing", &[], &[0.0]);
    let values: Vec<f32> = (0..2 * ROWS * ROWS).map(|i| if i / ROWS == 9 { -1.0 } else { 1.0 }).collect();
    feeds.push(("mask".to_owned(), tensor(DType::F32, &[1, 2, ROWS, ROWS], &values)));
    net.node("Greater", &["mask", "nothing"], "seen", &[]);
    written::masked_scores(&mut net, f32::NEG_INFINITY);
    written::attend_guarded(&mut net, "scores");
    assert_eq!(one(&net.model(&["y"]), "finite_masks", &feeds, Bar::Relative(1e-6)).applied(), 1);
}

/// The lowest number hides all keys of a row alike: the plain average.
#[test]
fn rows_that_see_nothing_keep_their_average_under_the_lowest_number() {
    let (mut net, mut feeds) = written::heads(DType::F32);
    written::seen(&mut net, &mut feeds, Some(3));
    written::masked_scores(&mut net, f32::MIN);
    written::attend_guarded(&mut net, "scores");
    let after = one(&net.model(&["y"]), "finite_masks", &feeds, Bar::Exact);
    assert_eq!((after.applied(), after.operators().get("ReduceMax")), (1, None));
}

fn constant_mask(guarded: bool, blind: Option<usize>) -> (Net, Feeds) {
    let (mut net, feeds) = written::heads(DType::F32);
    let hides = |i: usize| i % ROWS > i / ROWS || blind == Some(i / ROWS);
    let mask: Vec<f32> = (0..ROWS * ROWS).map(|i| if hides(i) { f32::NEG_INFINITY } else { 0.0 }).collect();
    net.float("bias", &[ROWS, ROWS], &mask).node("MatMul", &["q4", "kt"], "product", &[]);
    net.node("Add", &["bias", "product"], "scores", &[]);
    if guarded {
        written::attend_guarded(&mut net, "scores")
    } else {
        written::attend(&mut net, "scores")
    }
    (net, feeds)
}

#[test]
fn constant_masks_are_rewritten_and_looked_through() {
    for (guarded, blind, blanks) in [(false, None, 0), (true, None, 0), (true, Some(0), 1)] {
        let (net, feeds) = constant_mask(guarded, blind);
        let after = one(&net.model(&["y"]), "finite_masks", &feeds, Bar::Relative(1e-6));
        assert_eq!(after.applied(), 1);
        assert_eq!(after.operators().get("ReduceMax").copied().unwrap_or(0), blanks);
    }
}

#[test]
fn finite_and_outer_masks_stay() {
    let (mut net, mut feeds) = written::heads(DType::F32);
    written::seen(&mut net, &mut feeds, None);
    written::masked_scores(&mut net, -1e4);
    written::attend(&mut net, "scores");
    assert_eq!(one(&net.model(&["y"]), "finite_masks", &feeds, Bar::Exact).applied(), 0);
}

fn refused(net: &Net, outputs: &[&str], reasons: &[(&str, usize)]) {
    let after = rewrite(&net.model(outputs), &[pass("finite_masks").unwrap()], &Settings::default());
    let reasons = reasons.iter().map(|(why, count)| ((*why).to_owned(), *count)).collect();
    assert_eq!((after.applied(), after.refusals()), (0, reasons));
}

#[test]
fn masks_that_others_use_are_left_alone() {
    let (mut net, mut feeds) = written::heads(DType::F32);
    written::seen(&mut net, &mut feeds, None);
    written::masked_scores(&mut net, f32::NEG_INFINITY);
    written::attend(&mut net, "scores");
    for other in ["bias", "scores"] {
        refused(&net, &["y", other], &[("the mask is used for more than attention", 1)]);
    }
}

/// Rows that see nothing are made 0 in the attention alone, not in its weights.
#[test]
fn weights_behind_a_guard_that_others_use_are_left_alone() {
    let (mut net, mut feeds) = written::heads(DType::F32);
    written::seen(&mut net, &mut feeds, Some(3));
    written::masked_scores(&mut net, f32::NEG_INFINITY);
    written::attend_guarded(&mut net, "scores");
    net.node("MatMul", &["guarded", "q4"], "z", &[]);
    let why = "the weights behind a guard against NaN are used for more than the values";
    refused(&net, &["y", "z"], &[(why, 1)]);
}

#[test]
fn a_softmax_over_the_queries_is_left_alone() {
    let (mut net, mut feeds) = written::heads(DType::F32);
    written::seen(&mut net, &mut feeds, None);
    written::masked_scores(&mut net, f32::NEG_INFINITY);
    net.node("Softmax", &["scores"], "weights", &[("axis", int(2))]);
    written::apply(&mut net, "weights");
    refused(&net, &["y"], &[("the softmax is not over the last axis", 1)]);
}

#[test]
fn masks_of_attentions_that_are_left_alone_are_left_alone() {
    let (mut net, mut feeds) = written::heads(DType::F32);
    written::seen(&mut net, &mut feeds, None);
    written::masked_scores(&mut net, f32::NEG_INFINITY);
    written::attend(&mut net, "scores");
    net.node("Add", &["product", "bias"], "scores2", &[]).float("more", &[ROWS], &noise(4, ROWS));
    net.node("Add", &["scores2", "more"], "scores3", &[]);
    net.node("Softmax", &["scores3"], "w2", &[]).node("IsNaN", &["w2"], "bad2", &[]);
    net.node("Where", &["bad2", "nothing", "w2"], "g2", &[]).node("MatMul", &["g2", "v4"], "z", &[]);
    refused(
        &net,
        &["y", "z"],
        &[
            ("the mask is shared with an attention that is left alone", 1),
            ("there is more than one mask before a guard against NaN", 1),
        ],
    );
}

#[test]
fn constants_that_are_too_large_are_left_alone() {
    let (mut net, _) = written::heads(DType::F32);
    let side = 2100;
    let bytes = vec![0; 4 * side * side];
    net.constant("bias", Tensor::inline(DType::F32, &[side, side], bytes));
    net.node("MatMul", &["q4", "kt"], "product", &[]).node("Add", &["product", "bias"], "scores", &[]);
    written::attend(&mut net, "scores");
    refused(&net, &["y"], &[("the mask is a constant that cannot be looked at", 1)]);
}

/// The blind row sees what is hidden by f32's lowest number alone, and would see all alike.
#[test]
fn masks_that_hide_with_several_numbers_are_left_alone() {
    let (mut net, mut feeds) = written::heads(DType::F32);
    written::seen(&mut net, &mut feeds, Some(3));
    let infinite = |i: usize| i % ROWS > i / ROWS;
    let causal: Vec<f32> =
        (0..ROWS * ROWS).map(|i| if infinite(i) { f32::NEG_INFINITY } else { 0.0 }).collect();
    net.float("hidden", &[], &[f32::MIN]).node("Where", &["seen", "nothing", "hidden"], "bias", &[]);
    net.float("causal", &[ROWS, ROWS], &causal).node("MatMul", &["q4", "kt"], "product", &[]);
    net.node("Add", &["product", "bias"], "padded", &[]).node("Add", &["padded", "causal"], "scores", &[]);
    written::attend(&mut net, "scores");
    refused(
        &net,
        &["y"],
        &[("the mask hides with different numbers, which rows that see no key tell apart", 1)],
    );
}

/// Where every row sees a key, what is hidden has weight 0, however much it is hidden.
#[test]
fn several_numbers_are_one_where_every_row_sees_a_key() {
    let (mut net, feeds) = written::heads(DType::F32);
    let hidden = |i: usize| if i.is_multiple_of(2) { f32::NEG_INFINITY } else { -2e38 };
    let mask: Vec<f32> =
        (0..ROWS * ROWS).map(|i| if i % ROWS > i / ROWS { hidden(i) } else { 0.0 }).collect();
    net.float("bias", &[ROWS, ROWS], &mask).node("MatMul", &["q4", "kt"], "product", &[]);
    net.node("Add", &["bias", "product"], "scores", &[]);
    written::attend(&mut net, "scores");
    assert_eq!(one(&net.model(&["y"]), "finite_masks", &feeds, Bar::Relative(1e-6)).applied(), 1);
}
