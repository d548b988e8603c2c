use viaduct_export::{
    onnx::{DType, Dim, ValueType},
    passes::{Settings, pass},
};

use crate::{
    runtime_support::{Feeds, Net, int, ints, noise, string, tensor},
    same::{Bar, Rewritten, one, passes, rewrite},
};

/// Gives `x` of shape [1, channels, h, w], and sizes of it as lists of one: `n`, `c`, `h` and `w`.
fn picture(channels: usize) -> Net {
    let mut net = Net::new(DType::F32);
    let open = |name: &str| Dim::Symbol(name.to_owned());
    net.input("x", DType::F32, &[Dim::Fixed(1), Dim::Fixed(channels), open("h"), open("w")]);
    net.node("Shape", &["x"], "shape", &[]).ints("0", &[0]).ints("1", &[1]).ints("2", &[2]).ints("3", &[3]);
    for (name, at) in [("n", "0"), ("c", "1"), ("h", "2"), ("w", "3")] {
        net.node("Gather", &["shape", at], name, &[]);
    }
    net
}

fn joined(net: &mut Net, parts: &[&str], name: &str) {
    net.node("Concat", parts, name, &[("axis", int(0))]);
}

fn feed(channels: usize, h: usize, w: usize) -> Feeds {
    vec![("x".to_owned(), tensor(DType::F32, &[1, channels, h, w], &noise(1, channels * h * w)))]
}

/// The same for several sizes, without a Shape in the end.
fn folds(net: &Net, channels: usize) -> Rewritten {
    let after = one(&net.model(&["y"]), "fold_shapes", &feed(channels, 3, 5), Bar::Exact);
    one(&net.model(&["y"]), "fold_shapes", &feed(channels, 1, 2), Bar::Exact);
    assert_eq!(after.operators().get("Shape"), None, "{:?}", after.operators());
    assert_eq!(after.refusals().len(), 0);
    after
}

fn refused(net: &Net) -> Vec<String> {
    let after = one(&net.model(&["y"]), "fold_shapes", &feed(8, 3, 5), Bar::Exact);
    assert_eq!(after.applied(), 0);
    after.refusals().into_keys().collect()
}

#[test]
fn a_reshape_copies_sizes_that_keep_their_place() {
    let mut net = picture(8);
    net.ints("4", &[4]).ints("-1", &[-1]);
    joined(&mut net, &["n", "4", "-1", "w"], "to");
    net.node("Reshape", &["x", "to"], "y", &[]);
    assert_eq!(folds(&net, 8).operators().into_iter().collect::<Vec<_>>(), [("Reshape", 1)]);
}

/// Unpatchify: [1, 8, h, w] -> [1, 2, 2, 2, h, w] -> [1, 2, h, 2, w, 2] -> [1, 2, 2h, 2w].
#[test]
fn sizes_change_their_place_and_two_products_are_made() {
    let mut net = picture(8);
    joined(&mut net, &["n", "2", "2", "2", "h", "w"], "parts");
    net.node("Reshape", &["x", "parts"], "p", &[]);
    net.node("Transpose", &["p"], "t", &[("perm", ints(&[0, 1, 4, 2, 5, 3]))]);
    net.node("Mul", &["h", "2"], "2h", &[]).node("Mul", &["w", "2"], "2w", &[]);
    joined(&mut net, &["n", "2", "2h", "2w"], "whole");
    net.node("Reshape", &["t", "whole"], "y", &[]);
    let after = folds(&net, 8);
    let expected = [("Reshape", 3), ("Squeeze", 1), ("Transpose", 1), ("Unsqueeze", 1)];
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), expected);
}

/// As torch writes GroupNorm: the way back goes to the shape that was read.
#[test]
fn a_group_norm_keeps_the_width() {
    let mut net = picture(8);
    net.ints("to", &[0, 4, -1]).float("ones", &[4], &[1.0; 4]).float("zeros", &[4], &[0.0; 4]);
    net.node("Reshape", &["x", "to"], "g", &[]).node(
        "InstanceNormalization",
        &["g", "ones", "zeros"],
        "i",
        &[],
    );
    net.node("Reshape", &["i", "shape"], "y", &[]);
    let after = folds(&net, 8);
    assert_eq!(
        after.operators().into_iter().collect::<Vec<_>>(),
        [("InstanceNormalization", 1), ("Reshape", 2)]
    );
}

#[test]
fn expand_says_one_where_the_size_stays() {
    let mut net = picture(1);
    joined(&mut net, &["3", "2", "h", "w"], "to");
    net.node("Expand", &["x", "to"], "y", &[]);
    folds(&net, 1);
    let mut net = picture(8);
    net.node("Expand", &["x", "shape"], "y", &[]);
    assert_eq!(folds(&net, 8).operators().into_iter().collect::<Vec<_>>(), [("Identity", 1)]);
}

#[test]
fn slices_end_with_the_axis_or_count_from_its_end() {
    let mut net = picture(8);
    net.node("Sub", &["h", "1"], "last", &[]);
    joined(&mut net, &["last", "0"], "starts");
    joined(&mut net, &["h", "w"], "ends");
    joined(&mut net, &["2", "3"], "axes");
    net.node("Slice", &["x", "starts", "ends", "axes"], "y", &[]);
    folds(&net, 8);
}

#[test]
fn a_split_of_an_open_axis_becomes_slices() {
    let mut net = picture(8);
    net.node("Concat", &["x", "x"], "xx", &[("axis", int(2))]).node("Sub", &["h", "1"], "most", &[]);
    net.node("Add", &["h", "1"], "rest", &[]);
    joined(&mut net, &["1", "rest"], "parts");
    joined(&mut net, &["1", "most"], "own");
    net.node("Split", &["x", "own"], "first", &[("axis", int(2))]);
    let id = net.model(&[]).graph.find("first").unwrap();
    let mut model = net.node("Neg", &["first"], "y", &[]).model(&["y"]);
    let rest = model.graph.value("others");
    let split = model.graph.producer(id).unwrap();
    model.graph[split].outputs.push(Some(rest));
    let after = one(&model, "fold_shapes", &feed(8, 3, 5), Bar::Exact);
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("Neg", 1), ("Slice", 1)]);
}

#[test]
fn resize_to_a_multiple_gets_scales() {
    let mut net = picture(8);
    net.node("Mul", &["h", "2"], "2h", &[]).node("Mul", &["w", "3"], "3w", &[]);
    joined(&mut net, &["n", "c", "2h", "3w"], "to");
    let mode = [("mode", string("nearest")), ("coordinate_transformation_mode", string("asymmetric"))];
    net.node("Resize", &["x", "", "", "to"], "y", &mode);
    folds(&net, 8);
}

#[test]
fn what_depends_on_an_open_size_is_refused_with_its_name() {
    let mut net = picture(8);
    joined(&mut net, &["h", "1", "1", "1", "1"], "to");
    net.node("Expand", &["x", "to"], "y", &[]);
    assert_eq!(refused(&net), ["depends on h at run time: bind it with --dim h=N"]);
    let mut net = picture(8);
    joined(&mut net, &["n", "c", "w", "h"], "to");
    net.node("Reshape", &["x", "to"], "y", &[]);
    assert_eq!(refused(&net), ["depends on h and w at run time: bind them with --dim h=N --dim w=N"]);
    let both = ["bind_sizes", "fold_shapes", "fold_constants"].map(|name| pass(name).unwrap());
    let settings =
        Settings { sizes: [("h".to_owned(), 3), ("w".to_owned(), 5)].into(), ..Settings::default() };
    let after = passes(&net.model(&["y"]), &both, &settings, &feed(8, 3, 5), Bar::Exact);
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("Reshape", 1)]);
}

#[test]
fn what_depends_on_data_is_refused() {
    let mut net = picture(8);
    net.node("ReduceMax", &["x"], "most", &[("keepdims", int(0))]).node(
        "Cast",
        &["most"],
        "most_int",
        &[("to", int(7))],
    );
    net.ints("axes", &[0]).node("Mul", &["most_int", "0"], "start", &[]);
    net.ints("ends", &[9]).node("Slice", &["x", "start", "ends", "axes"], "y", &[]);
    assert_eq!(refused(&net), ["depends on data at run time"]);
}

#[test]
fn graphs_with_a_size_written_into_them_say_so() {
    let mut net = picture(8);
    net.ints("fixed", &[1, 8, 15]).node("Reshape", &["x", "fixed"], "f", &[]);
    net.node("Shape", &["f"], "of_f", &[]).node("Expand", &["f", "of_f"], "e", &[]);
    net.node("ReduceMax", &["of_f"], "m", &[]).node("ConstantOfShape", &["m"], "z", &[]).node(
        "Add",
        &["e", "z"],
        "y",
        &[],
    );
    let reasons = refused(&net);
    assert!(
        reasons.iter().all(|why| why.contains("holds for some sizes only (see 'Reshape_f')")),
        "{reasons:?}"
    );
}

/// What the target asks for at run time is not known, but no target makes the recorded size of `y`.
#[test]
fn recorded_sizes_that_contradict_are_not_made_true() {
    let cases: [(&str, &[usize]); 2] = [("Split", &[2, 4]), ("Reshape", &[2, 5])];
    for (op, recorded) in cases {
        let mut net = Net::new(DType::F32);
        net.x("x", &[2, 6]).ints("1", &[1]).node("Cast", &["x"], "numbers", &[("to", int(7))]);
        net.node("ReduceMax", &["numbers"], "most", &[("keepdims", int(0))]);
        net.node("Reshape", &["most", "1"], "size", &[]);
        let (count, attributes) = if op == "Split" { (1, vec![("axis", int(1))]) } else { (2, Vec::new()) };
        joined(&mut net, &["size", "size"][..count], "to");
        net.node(op, &["x", "to"], "y", &attributes);
        let mut model = net.model(&["y"]);
        let y = model.graph.find("y").unwrap();
        let shape = Some(recorded.iter().map(|size| Dim::Fixed(*size)).collect());
        model.graph[y].ty = Some(ValueType::Tensor { dtype: DType::F32, shape });
        let after = rewrite(&model, &[pass("fold_shapes").unwrap()], &Settings::default());
        let why = "the shapes around it are not known".to_owned();
        assert_eq!((after.applied(), after.refusals()), (0, [(why, 1)].into()), "{op}");
    }
}
