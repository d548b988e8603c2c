use viaduct_export::{
    device::DeviceProfile,
    memory::analyse,
    onnx::{DType, Dim, Model, Tensor, ValueType},
    passes::{PassError, Settings, Splitting, split, split_named},
};

use crate::{
    runtime_support::{Feeds, Net, cpu, int, noise, run, tensor},
    staged::{parts, ports, refused, run_parts},
};

fn at(names: &[&str]) -> Settings {
    let at = names.iter().map(|name| (*name).to_owned()).collect();
    Settings { split: Splitting { at, ..Splitting::default() }, ..Settings::default() }
}

fn within(max_bytes: u64, rows: usize) -> Settings {
    let sizes = [("rows".to_owned(), rows)].into();
    let split = Splitting { max_bytes: Some(max_bytes), sizes, ..Splitting::default() };
    Settings { split, ..Settings::default() }
}

/// Four linear layers over x [rows, 8] with a residual around the second and third; the third widens. One weight is
/// used twice, and a shape is read before the cuts and used behind them.
fn layers() -> Net {
    let mut net = Net::new(DType::F32);
    net.input("x", DType::F32, &[Dim::Symbol("rows".to_owned()), Dim::Fixed(8)]);
    net.float("w", &[8, 8], &noise(1, 64)).float("wide", &[8, 64], &noise(2, 512));
    net.float("narrow", &[64, 8], &noise(3, 512));
    net.ints("twice", &[2]);
    net.node("MatMul", &["x", "w"], "a", &[]).node("Shape", &["a"], "shape", &[]);
    net.node("Tanh", &["a"], "b", &[]).node("MatMul", &["b", "wide"], "c", &[]);
    net.node("Relu", &["c"], "d", &[]).node("MatMul", &["d", "narrow"], "e", &[]);
    net.node("Add", &["e", "a"], "f", &[]).node("MatMul", &["f", "w"], "g", &[]);
    net.node("Reshape", &["g", "shape"], "h", &[]).node("Concat", &["h", "x"], "y", &[("axis", int(1))]);
    net
}

fn feed(rows: usize) -> Feeds {
    vec![("x".to_owned(), tensor(DType::F32, &[rows, 8], &noise(9, rows * 8)))]
}

fn same(model: &Model, settings: &Settings, feeds: &Feeds) -> usize {
    let parts = parts(model, "split_at", settings);
    let whole = run(&mut cpu(), model, feeds, &["y"]).unwrap().remove(0);
    assert_eq!(run_parts(&parts, feeds)["y"], whole);
    parts.len()
}

fn dims(model: &Model, name: &str) -> Vec<Dim> {
    match &model.graph[model.graph.find(name).unwrap()].ty {
        Some(ValueType::Tensor { shape: Some(shape), .. }) => shape.clone(),
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn parts_compute_what_the_whole_does() {
    let model = layers().model(&["y"]);
    for names in [&["b"][..], &["d"], &["f"], &["b", "d", "f"], &["f", "b"], &["e", "f", "g", "a"]] {
        assert_eq!(same(&model, &at(names), &feed(5)), names.len() + 1, "{names:?}");
    }
}

#[test]
fn what_crosses_is_typed_and_integers_stay() {
    let split = parts(&layers().model(&["y"]), "split_at", &at(&["c", "f"]));
    assert_eq!(ports(&split[0]), (vec!["x"], vec!["a", "shape", "c"]));
    assert_eq!(ports(&split[1]), (vec!["a", "c"], vec!["f"]));
    // The shape of `a` crosses, since `a` itself does not go to the last part.
    assert_eq!(ports(&split[2]), (vec!["x", "shape", "f"], vec!["y"]));
    let rows = Dim::Symbol("rows".to_owned());
    assert_eq!(dims(&split[1].model, "c"), [rows, Dim::Fixed(64)]);
    let bytes: Vec<u64> = split.iter().map(|part| part.model.constant_bytes()).collect();
    assert_eq!(bytes, [4 * (64 + 512), 4 * 512, 4 * 64], "a shared weight is in both parts");
}

#[test]
fn a_shape_of_what_crosses_is_read_again() {
    let split = parts(&layers().model(&["y"]), "split_at", &at(&["b"]));
    assert_eq!(ports(&split[1]), (vec!["x", "a", "b"], vec!["y"]));
    assert!(split[1].model.graph.nodes().any(|(_, node)| node.is("Shape")));
}

#[test]
fn sizes_that_are_no_named_dimension_get_a_name() {
    let mut net = Net::new(DType::F32);
    net.input("x", DType::F32, &[Dim::Symbol("rows".to_owned()), Dim::Fixed(8)]);
    net.node("Concat", &["x", "x", "x"], "a", &[("axis", int(0))]).node("Tanh", &["a"], "b", &[]);
    net.ints("first", &[0]).ints("last", &[-1]).node("Slice", &["b", "first", "last"], "c", &[]);
    net.node("Sigmoid", &["c"], "y", &[]);
    let split = parts(&net.model(&["y"]), "split_at", &at(&["b", "c"]));
    assert_eq!(dims(&split[1].model, "b")[0], Dim::Symbol("3*rows".to_owned()));
    assert_eq!(dims(&split[2].model, "c")[0], Dim::Symbol("c_0".to_owned()));
    same(&net.model(&["y"]), &at(&["b", "c"]), &feed(3));
}

#[test]
fn a_part_is_not_cut_again_at_the_same_name() {
    let split = parts(&layers().model(&["y"]), "split_at", &at(&["f"]));
    let why = |part: usize| refused(&split[part].model, "split_at", &at(&["f"]));
    assert_eq!(why(0), [("f".to_owned(), "nothing is computed behind it".to_owned())]);
    assert_eq!(why(1), [("f".to_owned(), "nothing is computed before it".to_owned())]);
}

#[test]
fn cuts_that_leave_nothing_are_refused() {
    let model = layers().model(&["y"]);
    let why = |names: &[&str]| refused(&model, "split_at", &at(names));
    let reason = |name: &str, why: &str| (name.to_owned(), why.to_owned());
    for name in ["x", "w"] {
        assert_eq!(why(&[name]), [reason(name, "nothing is computed before it")]);
    }
    assert_eq!(why(&["y"]), [reason("y", "nothing is computed behind it")]);
    let (parts, outcome) = split(&model, split_named("split_at").unwrap(), &at(&["f", "f"])).unwrap();
    assert_eq!((parts.len(), outcome.applied), (2, 1));
    assert_eq!(outcome.refused[0].why, "nothing is computed between it and the cut before");
}

#[test]
fn what_is_not_known_does_not_cross() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[4]).node("NonZero", &["x"], "places", &[]);
    net.node("Cast", &["places"], "a", &[("to", int(1))]).node("Tanh", &["a"], "b", &[]);
    net.node("Exp", &["b"], "y", &[]);
    let why = refused(&net.model(&["y"]), "split_at", &at(&["b"]));
    assert_eq!(why, [("b".to_owned(), "it would cross, and its type or shape is not known".to_owned())]);
}

#[test]
fn mistakes_of_the_user_are_errors() {
    let split = |settings: &Settings| {
        split(&layers().model(&["y"]), split_named("split_at").unwrap(), settings).unwrap_err()
    };
    assert!(matches!(split(&at(&["nowhere"])), PassError::UnknownValue(name) if name == "nowhere"));
    assert!(matches!(split(&Settings::default()), PassError::NoCut));
    let mut open = within(1 << 20, 1);
    open.split.sizes.clear();
    assert!(matches!(split(&open), PassError::OpenSizes(names) if names == "rows"));
    assert!(matches!(split_named("nothing"), Err(PassError::UnknownSplit(_))));
}

/// Six layers with weights of 64 KiB, whose values are wide in between.
fn deep() -> Model {
    let mut net = Net::new(DType::F32);
    net.input("x", DType::F32, &[Dim::Symbol("rows".to_owned()), Dim::Fixed(32)]);
    let mut from = "x".to_owned();
    for layer in 0..6u64 {
        let [up, down, wide, act, out] = ["up", "down", "wide", "act", "out"].map(|n| format!("{n}{layer}"));
        net.float(&up, &[32, 256], &noise(layer, 8192)).float(&down, &[256, 32], &noise(layer + 9, 8192));
        net.node("MatMul", &[&from, &up], &wide, &[]).node("Tanh", &[&wide], &act, &[]);
        net.node("MatMul", &[&act, &down], &out, &[]);
        from = out;
    }
    net.node("Tanh", &[&from], "y", &[]);
    net.model(&["y"])
}

#[test]
fn a_budget_is_kept_with_few_cuts_where_little_crosses() {
    let (model, rows) = (deep(), 16);
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[rows, 32], &noise(9, rows * 32)))];
    let whole = predicted(&model, rows);
    for (budget, count) in [(400 << 10, 2), (200 << 10, 3), (110 << 10, 6)] {
        let settings = within(budget, rows);
        assert_eq!(same(&model, &settings, &feeds), count);
        for part in parts(&model, "split_at", &settings) {
            let narrow = ports(&part).1.iter().all(|name| name.starts_with("out") || *name == "y");
            assert!(narrow, "{:?}", ports(&part));
            assert!(predicted(&part.model, rows) < whole);
        }
    }
}

fn predicted(model: &Model, rows: usize) -> u64 {
    let sizes = [("rows".to_owned(), rows)].into();
    analyse(model, &sizes, &DeviceProfile::preset("bc250").unwrap(), 16).0.predicted.device
}

#[test]
fn budgets_that_no_cut_keeps_are_refused() {
    let model = deep();
    let why = |budget| refused(&model, "split_at", &within(budget, 16)).remove(0);
    assert_eq!(why(20 << 10).1, "the node alone takes more than the budget");
    assert_eq!(why(1 << 30).1, "the whole keeps to the budget");
}

#[test]
fn a_budget_over_unknown_sizes_is_refused() {
    let mut net = Net::new(DType::F32);
    net.input("x", DType::F32, &[Dim::Symbol("rows".to_owned())]).node("NonZero", &["x"], "places", &[]);
    net.node("Cast", &["places"], "a", &[("to", int(1))]).node("Tanh", &["a"], "y", &[]);
    let why = refused(&net.model(&["y"]), "split_at", &within(1 << 20, 4));
    assert_eq!(why[0].1, "its size is not known");
}

#[test]
fn weights_that_are_computed_go_where_they_are_used() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2, 8]).constant("w", Tensor::from_f32(&[8, 8], &noise(1, 64)));
    net.node("Transpose", &["w"], "wt", &[]).node("MatMul", &["x", "w"], "a", &[]);
    net.node("MatMul", &["a", "wt"], "y", &[]);
    let model = net.model(&["y"]);
    let split = parts(&model, "split_at", &at(&["a"]));
    assert_eq!(ports(&split[1]), (vec!["a"], vec!["y"]));
    same(&model, &at(&["a"]), &feed(2));
}
