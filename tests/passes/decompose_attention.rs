use viaduct_export::{
    onnx::{DType, Dim, Model},
    passes::{AttentionForm, Settings, pass},
};

use crate::{
    foreign::foreign,
    runtime_support::{Attributes, Feeds, Net, cases, float, int, noise, tensor},
    same::{Bar, Rewritten, passes, rewrite},
};

fn settings(slices: usize) -> Settings {
    Settings { attention: AttentionForm::Written { slices }, ..Settings::default() }
}

fn written(model: &Model, slices: usize, feeds: &Feeds, bar: f32) -> Rewritten {
    passes(model, &[pass("decompose_attention").unwrap()], &settings(slices), feeds, Bar::Relative(bar))
}

#[test]
fn whole_and_in_slices_it_is_the_same() {
    for (dtype, bar) in [(DType::F32, 1e-5), (DType::F16, 3e-3)] {
        // 20 rows in 3 slices are 7, 7 and 6; in 10, a tree of two levels joins them.
        for (slices, parts) in [(0, 1), (1, 1), (3, 3), (10, 10), (100, 20)] {
            let (net, feeds) = cases::attention(dtype, 20, 2, 8);
            let after = written(&net.model(&["y"]), slices, &feeds, bar);
            assert_eq!((after.applied(), after.operators()["Softmax"]), (1, parts));
            let widest = after.model.graph.nodes().map(|(_, n)| n.inputs.len()).max().unwrap();
            assert!(widest <= 8, "{widest} operands");
        }
    }
}

#[test]
fn a_mask_is_sliced_with_the_queries() {
    let mut net = Net::new(DType::F32);
    let mut feeds = Feeds::new();
    for (seed, (name, shape)) in
        [("q", &[1, 6, 16][..]), ("k", &[1, 9, 16]), ("v", &[1, 9, 16]), ("bias", &[1, 1, 6, 9])]
            .into_iter()
            .enumerate()
    {
        net.x(name, shape);
        let count = shape.iter().product();
        feeds.push((name.to_owned(), tensor(DType::F32, shape, &noise(seed as u64 + 1, count))));
    }
    let attributes: Attributes = &[("num_heads", int(2)), ("scale", float(0.2))];
    net.node("ms.MultiHeadAttention", &["q", "k", "v", "", "", "bias"], "y", attributes);
    for slices in [1, 2] {
        assert_eq!(written(&net.model(&["y"]), slices, &feeds, 1e-5).applied(), 1);
    }
}

#[test]
fn fused_and_written_out_again_it_is_what_it_was() {
    let (model, feeds) = foreign("patterns/attention_manual", "dynamo");
    let mut fused = model.clone();
    let fuse = [pass("fuse_attention").unwrap()];
    viaduct_export::passes::apply(&mut fused, &fuse, &Settings::default()).unwrap();
    let both = [pass("bind_sizes").unwrap(), pass("decompose_attention").unwrap()];
    let settings = Settings { sizes: [("seq".to_owned(), 6)].into(), ..settings(2) };
    let after = passes(&fused, &both, &settings, &feeds, Bar::Relative(1e-5));
    assert_eq!(after.operators()["Softmax"], 2);
}

#[test]
fn nothing_is_done_where_the_operator_is_asked_for() {
    let (net, feeds) = cases::attention(DType::F32, 20, 2, 8);
    let decompose = [pass("decompose_attention").unwrap()];
    assert_eq!(passes(&net.model(&["y"]), &decompose, &Settings::default(), &feeds, Bar::Exact).applied(), 0);
}

/// An operator over the inputs q, k, v of the given shape and type and whatever else is named.
fn operator(dtype: DType, shape: &[Dim], op: &str, more: &[&str], attributes: Attributes) -> Model {
    let mut net = Net::new(dtype);
    for name in ["q", "k", "v"].iter().chain(more).filter(|name| !name.is_empty()) {
        net.input(name, dtype, shape);
    }
    let inputs: Vec<&str> = ["q", "k", "v"].iter().chain(more).copied().collect();
    net.node(op, &inputs, "y", attributes).model(&["y"])
}

#[test]
fn what_cannot_be_written_out_is_left_alone() {
    use Dim::{Fixed, Unknown};
    let rows = [Fixed(1), Fixed(6), Fixed(16)];
    let heads = [Fixed(1), Fixed(2), Fixed(6), Fixed(8)];
    let open = [Fixed(1), Dim::Symbol("n".to_owned()), Fixed(16)];
    let two: Attributes = &[("num_heads", int(2))];
    let mha = "ms.MultiHeadAttention";
    let cases = [
        (
            operator(DType::F32, &rows, mha, &["", "padding"], two),
            "only q, k, v, attention_bias and one output are supported: no projection bias, padding mask or cache",
        ),
        (operator(DType::F32, &rows, mha, &[], &[]), "num_heads is missing"),
        (
            operator(DType::F32, &rows, mha, &[], &[("num_heads", int(2)), ("unidirectional", int(1))]),
            "it is causal",
        ),
        (operator(DType::F32, &heads, mha, &[], two), "q, k and v are not [batch, rows, columns]"),
        (operator(DType::F64, &rows, mha, &[], two), "the element type of q is not known to be f32 or f16"),
        (
            operator(DType::F32, &[Fixed(1), Fixed(6), Unknown], mha, &[], two),
            "the width of a head is not known",
        ),
        (operator(DType::F32, &open, mha, &[], two), "slices need a fixed number of rows"),
        (
            operator(DType::F32, &rows, "ms.GroupQueryAttention", &[], two),
            "GroupQueryAttention masks by lengths that only the run knows",
        ),
    ];
    let decompose = [pass("decompose_attention").unwrap()];
    for (model, why) in cases {
        let after = rewrite(&model, &decompose, &settings(2));
        assert_eq!((after.applied(), after.refusals()), (0, [(why.to_owned(), 1)].into()));
    }
    let absurd = rewrite(&operator(DType::F32, &rows, mha, &[], two), &decompose, &settings(usize::MAX));
    assert_eq!(
        absurd.refusals().keys().next().unwrap(),
        "its sizes are absurd: thousands of slices would be needed"
    );
}
