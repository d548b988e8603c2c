use std::collections::{BTreeMap, BTreeSet};

use viaduct_export::{
    onnx::{Attribute, DType, Dim, Graph, Model},
    passes::{Settings, pass},
};

use crate::{
    runtime_support::{Feeds, Net, float, int, ints, noise, string, tensor},
    same::{Bar, Rewritten, one, passes, rewrite},
};

fn f16(model: &Model, feeds: &Feeds) -> Rewritten {
    one(model, "to_f16", feeds, Bar::Relative(4e-3))
}

fn feed(name: &str, shape: &[usize], seed: u64) -> Feeds {
    vec![(name.to_owned(), tensor(DType::F32, shape, &noise(seed, shape.iter().product())))]
}

fn types(after: &Rewritten) -> BTreeMap<String, DType> {
    let facts = viaduct_export::passes::Facts::of(&after.model);
    let values = after.model.graph.values();
    values.filter_map(|(id, value)| Some((value.name.clone(), facts.dtype(id)?))).collect()
}

#[test]
fn products_are_halved_and_norms_are_not() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[3, 16]).float("w", &[16, 16], &noise(1, 256)).float("s", &[16], &noise(2, 16));
    net.node("LayerNormalization", &["x", "s"], "n", &[("axis", int(-1))]).node(
        "MatMul",
        &["n", "w"],
        "m",
        &[],
    );
    net.node("Sigmoid", &["m"], "g", &[]).node("Mul", &["m", "g"], "silu", &[]).node(
        "Add",
        &["silu", "x"],
        "y",
        &[],
    );
    let after = f16(&net.model(&["y"]), &feed("x", &[3, 16], 3));
    assert_eq!(after.applied(), 4);
    let types = types(&after);
    let expected =
        [("x", DType::F32), ("n", DType::F32), ("m", DType::F16), ("silu", DType::F16), ("y", DType::F32)];
    expected.into_iter().for_each(|(name, dtype)| assert_eq!(types[name], dtype, "{name}"));
    assert_eq!(types["w.f16"], DType::F16);
    assert!(
        !types.contains_key("w")
            || after.model.graph.find("w").is_some_and(|w| after.model.graph[w].constant.is_none())
    );
}

#[test]
fn an_unfused_norm_and_the_rotary_angles_stay_whole() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[3, 16]).x("angle", &[3, 16]).float("two", &[], &[2.0]).float("eps", &[], &[1e-6]);
    net.constant("axes", viaduct_export::onnx::Tensor::from_i64(&[1], &[-1]));
    net.node("Pow", &["x", "two"], "p", &[]).node("ReduceMean", &["p", "axes"], "m", &[]);
    net.node("Add", &["m", "eps"], "e", &[]).node("Sqrt", &["e"], "r", &[]).node(
        "Div",
        &["x", "r"],
        "n",
        &[],
    );
    net.node("Mul", &["angle", "two"], "a", &[]).node("Cos", &["a"], "c", &[]).node(
        "Mul",
        &["n", "c"],
        "y",
        &[],
    );
    let mut feeds = feed("x", &[3, 16], 4);
    feeds.extend(feed("angle", &[3, 16], 5));
    let after = f16(&net.model(&["y"]), &feeds);
    let types = types(&after);
    for name in ["p", "m", "e", "r", "a", "c"] {
        assert_eq!(types[name], DType::F32, "{name}");
    }
    assert_eq!(after.applied(), 1, "the last product");
}

#[test]
fn scales_of_resize_and_casts_of_integers() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[1, 2, 3, 3]).float("scales", &[4], &[1.0, 1.0, 2.0, 2.0]).input("i", DType::I64, &[]);
    let nearest = [
        ("mode", string("nearest")),
        ("coordinate_transformation_mode", string("asymmetric")),
        ("nearest_mode", string("floor")),
    ];
    net.node("Resize", &["x", "", "scales"], "r", &nearest);
    net.node("Cast", &["i"], "f", &[("to", int(1))]).node("Mul", &["r", "f"], "y", &[]);
    let mut feeds = feed("x", &[1, 2, 3, 3], 6);
    feeds.push(("i".to_owned(), viaduct::tensor::HostTensor::i64(&[], vec![3])));
    let after = f16(&net.model(&["y"]), &feeds);
    let types = types(&after);
    assert_eq!((types["scales"], types["r"], types["f"]), (DType::F32, DType::F16, DType::F16));
}

#[test]
fn masks_are_limited_to_the_range() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2, 2]).float("mask", &[2, 2], &[0.0, f32::MIN, 0.0, f32::NEG_INFINITY]);
    net.node("Add", &["x", "mask"], "a", &[]).node("Softmax", &["a"], "y", &[("axis", int(-1))]);
    let after = f16(&net.model(&["y"]), &feed("x", &[2, 2], 7));
    let mask =
        after.model.graph.find("mask.f16").and_then(|id| after.model.graph[id].constant.clone()).unwrap();
    assert_eq!(mask.to_f32().unwrap().unwrap(), [0.0, -65504.0, 0.0, f32::NEG_INFINITY]);
}

#[test]
fn refusals() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[4]).node("Celu", &["x"], "y", &[("alpha", float(1.0))]);
    let passes = [pass("to_f16").unwrap()];
    let after = rewrite(&net.model(&["y"]), &passes, &Settings::default());
    assert_eq!(
        after.refusals().into_iter().collect::<Vec<_>>(),
        [("no f16 kernel is known of Celu".to_owned(), 1)]
    );

    let mut body = Graph::new("body");
    let value = body.value("x");
    body.outputs.push(value);
    let mut net = Net::new(DType::F32);
    net.x("x", &[4]).input("c", DType::Bool, &[]);
    let branches = [
        ("then_branch", Attribute::Graph(Box::new(body.clone()))),
        ("else_branch", Attribute::Graph(Box::new(body))),
    ];
    net.node("If", &["c"], "y", &branches);
    let after = rewrite(&net.model(&["y"]), &passes, &Settings::default());
    let why = "nodes have bodies, whose types would have to follow".to_owned();
    assert_eq!(after.refusals().into_iter().collect::<Vec<_>>(), [(why, 1)]);
}

/// `other` has as many rows as `x` for some sizes only, so that nothing is known about their product.
#[test]
fn operands_of_unknown_type() {
    let mut net = Net::new(DType::F32);
    let rows = |name: &str| [Dim::Symbol(name.to_owned()), Dim::Fixed(4)];
    net.input("x", DType::F32, &rows("rows")).input("other", DType::F32, &rows("other rows"));
    net.node("Mul", &["x", "other"], "m", &[]).node("Add", &["m", "x"], "y", &[]);
    let feeds = ["x", "other"].map(|name| (name.to_owned(), tensor(DType::F32, &[3, 4], &noise(1, 12))));
    let after = one(&net.model(&["y"]), "to_f16", &feeds.to_vec(), Bar::Exact);
    assert_eq!(after.applied(), 0);
    assert_eq!(after.refusals(), [("the types of its operands are not known".to_owned(), 1)].into());
}

/// The second part of a Split and the Cast behind it would both be named `y`.
#[test]
fn nodes_have_names_of_their_own() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2, 12]);
    let parts: Vec<String> = (0..12).map(|at| format!("part{at}")).collect();
    net.node("Split", &["x"], &parts.join(" "), &[("axis", int(1)), ("num_outputs", int(12))]);
    let outputs: Vec<&str> = parts.iter().map(String::as_str).collect();
    let list = ["tree_concat", "to_f16"].map(|name| pass(name).unwrap());
    let feeds = feed("x", &[2, 12], 1);
    let after = passes(&net.model(&outputs), &list, &Settings::default(), &feeds, Bar::Relative(4e-3));
    let names: Vec<&str> = after.model.graph.nodes().map(|(_, node)| node.name.as_str()).collect();
    assert_eq!(BTreeSet::from_iter(&names).len(), names.len(), "{names:?}");
}

/// A kernel of which one slice is taken, as `flatten_conv3d` leaves it: the slice is computed when it is written.
#[test]
fn weights_beyond_the_range_stay_whole() {
    let mut net = Net::new(DType::F32);
    let mut kernel = noise(1, 2 * 3 * 3 * 9);
    kernel[22] = -1.5e16;
    net.x("x", &[1, 3, 1, 4, 4]).float("w", &[2, 3, 3, 3, 3], &kernel);
    let attributes = [("pads", ints(&[2, 1, 1, 0, 1, 1])), ("kernel_shape", ints(&[3, 3, 3]))];
    net.node("Conv", &["x", "w"], "c", &attributes);
    net.float("table", &[1, 2, 1, 4, 4], &[1e5; 32]).node("Add", &["c", "table"], "sum", &[]);
    net.node("Relu", &["sum"], "y", &[]);
    let list = ["flatten_conv3d", "to_f16"].map(|name| pass(name).unwrap());
    let after = passes(
        &net.model(&["y"]),
        &list,
        &Settings::default(),
        &feed("x", &[1, 3, 1, 4, 4], 1),
        Bar::Relative(4e-3),
    );
    let types = types(&after);
    assert_eq!((types["w.frame"], types["c"], types["sum"]), (DType::F32, DType::F32, DType::F32));
    assert_eq!(after.refusals(), [("a weight has numbers that f16 cannot hold".to_owned(), 1)].into());
}
