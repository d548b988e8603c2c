use viaduct::{
    runtime::{Runtime, lower},
    tensor::HostTensor,
};
use viaduct_export::{
    device::DeviceProfile,
    onnx::{DType, Dim, Model, ValueType},
    passes::{AttentionForm, Pass, Settings, pass},
    shapes::Sizes,
    tuning::Tuning,
};

use crate::{
    foreign::foreign,
    runtime_support::{Feeds, Net, cpu, int, ints, noise, relative_error, run, tensor, webgpu},
    same::{Bar, one, passes, rewrite},
    written::{self, HEADS, ROWS},
};

fn all() -> Vec<&'static Pass> {
    ["fix_attention_scale", "finite_masks", "remove_nan_guard", "fuse_attention"]
        .map(|name| pass(name).unwrap())
        .to_vec()
}

/// Every form that torch exports: scores scaled before, after or on both sides; masks; repeated keys; f32 within f16.
#[test]
fn what_torch_exports_becomes_one_operator() {
    for pattern in
        ["attention", "attention_manual", "attention_grouped", "attention_masked", "attention_bias"]
    {
        for (export, bar) in [("legacy", 1e-5), ("dynamo", 1e-5), ("legacy_f16", 3e-3), ("dynamo_f16", 3e-3)]
        {
            let (model, feeds) = foreign(&format!("patterns/{pattern}"), export);
            let after = passes(&model, &all(), &Settings::default(), &feeds, Bar::Relative(bar));
            assert!(after.refusals().is_empty(), "{pattern} {export}: {:?}", after.refusals());
            let operators = after.operators();
            assert_eq!(operators.get("MultiHeadAttention"), Some(&1), "{pattern} {export}: {operators:?}");
            assert!(["Softmax", "IsNaN"].iter().all(|op| !operators.contains_key(op)), "{operators:?}");
            let sizes = Sizes::from([("seq".to_owned(), feeds[0].1.shape[feeds[0].1.shape.len() - 2])]);
            let written = lowered(&after.model, &sizes);
            same_outputs(&mut cpu(), &model, &written, &feeds, bar, &format!("{pattern} {export}"));
        }
    }
}

/// Whole modules; heads are split off behind their projections, so nothing but the operator is left of the layouts.
#[test]
fn modules_that_torch_exports_are_fused() {
    let modules = [
        ("transformer", "legacy", 2, 1e-5),
        ("transformer", "dynamo", 2, 1e-5),
        ("transformer", "legacy_unfolded_f16", 2, 2e-2),
        ("text_encoder", "legacy_unfolded", 2, 1e-5),
        ("text_encoder", "dynamo", 2, 1e-5),
        ("vae", "legacy", 1, 1e-5),
        ("vae", "dynamo_f16", 1, 1e-2),
    ];
    for (module, export, count, bar) in modules {
        let (model, feeds) = foreign(module, export);
        // The exporter has traced the sum of both for good.
        let sizes = match module {
            "transformer" if export != "dynamo" => {
                Sizes::from([("image_seq".into(), 12), ("text_seq".into(), 16)])
            }
            _ => Sizes::new(),
        };
        let settings = Settings { sizes, ..Settings::default() };
        let mut list = vec![pass("bind_sizes").unwrap()];
        list.extend(all());
        let after = passes(&model, &list, &settings, &feeds, Bar::Relative(bar));
        assert!(after.refusals().is_empty(), "{module} {export}: {:?}", after.refusals());
        let operators = after.operators();
        assert_eq!(operators.get("MultiHeadAttention"), Some(&count), "{module} {export}");
        assert_eq!((operators.get("Softmax"), operators.get("IsNaN")), (None, None), "{module} {export}");
    }
}

fn lowered(model: &Model, sizes: &Sizes) -> Model {
    let device = DeviceProfile { tuning: Tuning::default(), ..cpu().device().profile() };
    let mut written = model.clone();
    lower(&mut written, &device, sizes, &[], &Default::default()).unwrap();
    written
}

fn same_outputs(runtime: &mut Runtime, before: &Model, after: &Model, feeds: &Feeds, bar: f32, what: &str) {
    let names: Vec<&str> = before.graph.outputs.iter().map(|id| before.graph[*id].name.as_str()).collect();
    let expected = run(&mut cpu(), before, feeds, &names).unwrap();
    let found = run(runtime, after, feeds, &names).unwrap();
    for (expected, found) in expected.iter().zip(&found) {
        let error = relative_error(&HostTensor::to_f32(found), &expected.to_f32());
        assert!(error <= bar, "{what}: {error:e}");
    }
}

fn plain(dtype: DType) -> (Net, Feeds) {
    let (mut net, feeds) = written::heads(dtype);
    net.float("scale", &[], &[0.35]).node("MatMul", &["q4", "kt"], "product", &[]);
    net.node("Mul", &["product", "scale"], "scores", &[]);
    written::attend(&mut net, "scores");
    (net, feeds)
}

#[test]
fn heads_are_taken_from_before_they_were_split_off() {
    let (net, feeds) = plain(DType::F32);
    let after = one(&net.model(&["y"]), "fuse_attention", &feeds, Bar::Relative(1e-5));
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("MultiHeadAttention", 1)]);
    let (_, node) = after.model.graph.nodes().next().unwrap();
    assert_eq!((node.int("num_heads"), node.float("scale")), (Some(HEADS as i64), Some(0.35)));
}

/// The shapes that the runner needs are recorded, with the names of open sizes.
#[test]
fn shapes_are_recorded() {
    let (model, _) = foreign("patterns/attention", "legacy");
    let after = rewrite(&model, &[pass("fuse_attention").unwrap()], &Settings::default());
    let (_, node) = after.model.graph.nodes().find(|(_, n)| n.is_contrib("MultiHeadAttention")).unwrap();
    let expected = ValueType::Tensor {
        dtype: DType::F32,
        shape: Some(vec![Dim::Fixed(1), Dim::Symbol("seq".to_owned()), Dim::Fixed(48)]),
    };
    for i in 0..3 {
        assert_eq!(after.model.graph[node.input(i).unwrap()].ty.as_ref(), Some(&expected));
    }
}

/// Masks of other ranks, for all heads, for one head each, and with one row for all queries.
#[test]
fn masks_are_given_the_operators_form() {
    for (shape, count) in [
        (&[ROWS, ROWS][..], ROWS * ROWS),
        (&[HEADS, ROWS, ROWS], HEADS * ROWS * ROWS),
        (&[1, 1, 1, ROWS], ROWS),
        (&[1, HEADS, 1, ROWS], HEADS * ROWS),
    ] {
        let (mut net, mut feeds) = written::heads(DType::F32);
        net.x("mask", shape);
        feeds.push(("mask".to_owned(), tensor(DType::F32, shape, &noise(5, count))));
        net.node("MatMul", &["q4", "kt"], "product", &[]).node("Add", &["mask", "product"], "scores", &[]);
        written::attend(&mut net, "scores");
        let model = net.model(&["y"]);
        let after = one(&model, "fuse_attention", &feeds, Bar::Relative(1e-5));
        assert_eq!(after.applied(), 1, "{shape:?}");
        same_outputs(&mut cpu(), &model, &lowered(&after.model, &Sizes::new()), &feeds, 1e-5, "lowered");
    }
}

/// One head without an axis of its own, as in image decoders of rank three.
#[test]
fn one_head_of_rank_three() {
    let mut net = Net::new(DType::F32);
    let mut feeds = Feeds::new();
    for (seed, name) in ["q", "k", "v"].into_iter().enumerate() {
        net.x(name, &[1, 5, 6]);
        feeds.push((name.to_owned(), tensor(DType::F32, &[1, 5, 6], &noise(seed as u64 + 1, 30))));
    }
    net.node("Transpose", &["k"], "kt", &[("perm", ints(&[0, 2, 1]))]).node("MatMul", &["q", "kt"], "s", &[]);
    net.node("Softmax", &["s"], "w", &[("axis", int(2))]).node("MatMul", &["w", "v"], "y", &[]);
    let after = one(&net.model(&["y"]), "fuse_attention", &feeds, Bar::Relative(1e-5));
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("MultiHeadAttention", 1)]);
}

#[test]
fn nothing_is_done_where_the_written_form_is_asked_for() {
    let (net, feeds) = plain(DType::F32);
    let settings = Settings { attention: AttentionForm::Written { slices: 1 }, ..Settings::default() };
    let fuse = [pass("fuse_attention").unwrap()];
    let after = passes(&net.model(&["y"]), &fuse, &settings, &feeds, Bar::Exact);
    assert_eq!((after.applied(), after.refusals().len()), (0, 0));
}

#[track_caller]
fn refused(model: &Model, why: &str) {
    let after = rewrite(model, &[pass("fuse_attention").unwrap()], &Settings::default());
    assert_eq!((after.applied(), after.refusals()), (0, [(why.to_owned(), 1)].into()));
}

#[test]
fn what_is_not_the_operator_is_left_alone() {
    let mut old = plain(DType::F32).0.model(&["y"]);
    old.opsets[0].1 = 12;
    refused(&old, "it is written for operators before version 13");

    refused(&plain(DType::F32).0.model(&["y", "weights"]), "the weights are used for more than the values");
    let (mut net, _) = written::heads(DType::F64);
    net.node("MatMul", &["q4", "kt"], "scores", &[]);
    written::attend(&mut net, "scores");
    refused(&net.model(&["y"]), "q, k or v is of another type than f32 and f16");

    let (mut net, _) = written::heads(DType::F32);
    net.node("MatMul", &["q4", "kt"], "scores", &[]);
    net.node("Softmax", &["scores"], "weights", &[("axis", int(2))]);
    written::apply(&mut net, "weights");
    refused(&net.model(&["y"]), "the softmax is not over the last axis");

    let (mut net, _) = written::heads(DType::F32);
    net.node("MatMul", &["q4", "kt"], "scores", &[]);
    written::attend_guarded(&mut net, "scores");
    refused(&net.model(&["y"]), "a guard against NaN is in the way (remove_nan_guard)");
}

#[test]
fn masks_that_the_operator_cannot_take_are_left_alone() {
    let masked = |shape: &[usize]| {
        let (mut net, _) = written::heads(DType::F32);
        net.x("mask", shape).float("scale", &[], &[0.5]).node("MatMul", &["q4", "kt"], "product", &[]);
        net.node("Add", &["product", "mask"], "masked", &[]);
        net
    };
    let mut net = masked(&[1, 1, 1, ROWS, ROWS]);
    written::attend(&mut net, "masked");
    refused(&net.model(&["y"]), "the mask's shape is not understood");

    let mut net = masked(&[ROWS, ROWS]);
    net.node("Mul", &["masked", "scale"], "scores", &[]);
    written::attend(&mut net, "scores");
    refused(&net.model(&["y"]), "the mask is scaled together with the scores");

    let mut net = masked(&[ROWS, ROWS]);
    net.node("Add", &["masked", "mask"], "scores", &[]);
    written::attend(&mut net, "scores");
    refused(&net.model(&["y"]), "there is more than one mask");
}

/// q, k^T and v as inputs of the given shapes.
fn bare(shapes: [&[Dim]; 3]) -> Model {
    let mut net = Net::new(DType::F32);
    for (name, shape) in ["q", "kt", "v"].into_iter().zip(shapes) {
        net.input(name, DType::F32, shape);
    }
    net.node("MatMul", &["q", "kt"], "s", &[]).node("Softmax", &["s"], "w", &[]);
    net.node("MatMul", &["w", "v"], "y", &[]);
    net.model(&["y"])
}

#[test]
fn shapes_that_are_not_known_are_left_alone() {
    use Dim::{Fixed, Unknown};
    let open = || Dim::Symbol("n".to_owned());
    let heads = |n: Dim| [Fixed(1), n, Fixed(5), Fixed(5)];
    refused(
        &bare([&heads(open()), &heads(open()), &heads(open())]),
        "the number of heads or their width is not known",
    );
    let batch = [Fixed(2), Fixed(3), Fixed(5), Fixed(5)];
    refused(&bare([&batch, &batch, &batch]), "the batch is not known to be one");
    let some = [Fixed(1), Fixed(3), Unknown, Fixed(5)];
    refused(
        &bare([&some, &heads(Fixed(3)), &heads(Fixed(3))]),
        "the shape of q, k or v does not follow from the graph; sizes may have to be bound",
    );
    refused(
        &bare([&heads(Fixed(3)), &heads(Fixed(1)), &heads(Fixed(3))]),
        "q, k and v do not fit each other",
    );
}

/// The written form of a masked attention runs there without a node on the CPU.
#[test]
fn webgpu_masked_attention_is_right_when_it_is_written_out() {
    let Some(mut gpu) = webgpu() else { return };
    for (dtype, bar) in [(DType::F32, 1e-5), (DType::F16, 3e-3)] {
        let (mut net, mut feeds) = written::heads(dtype);
        written::seen(&mut net, &mut feeds, Some(3));
        written::masked_scores(&mut net, f32::NEG_INFINITY);
        written::attend_guarded(&mut net, "scores");
        let model = net.model(&["y"]);
        let after = rewrite(&model, &all(), &Settings::default());
        assert_eq!(after.operators().get("MultiHeadAttention"), Some(&1));
        let written = lowered(&after.model, &Sizes::new());
        same_outputs(&mut gpu.runtime, &model, &written, &feeds, bar, &format!("{dtype:?}"));
    }
}

#[test]
fn scales_that_f32_cannot_hold_are_left_alone() {
    let (mut net, _) = written::heads(DType::F32);
    net.float("huge", &[], &[1e30]).node("Mul", &["q4", "huge"], "qs", &[]);
    net.node("Mul", &["kt", "huge"], "ks", &[]).node("MatMul", &["qs", "ks"], "scores", &[]);
    written::attend(&mut net, "scores");
    refused(&net.model(&["y"]), "the scale is zero or not finite");
}
