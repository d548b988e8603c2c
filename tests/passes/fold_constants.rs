use viaduct_export::{
    onnx::{Attribute, DType, Dim, Tensor},
    passes::{Settings, pass, sequence},
};

use crate::{
    runtime_support::{Net, int, ints, noise, tensor},
    same::{Bar, one, passes, rewrite},
};

/// `values` as a Constant node.
fn constant(net: &mut Net, name: &str, tensor: Tensor) {
    net.node("Constant", &[], name, &[("value", Attribute::Tensor(tensor))]);
}

#[test]
fn chains_over_sizes_and_scalars_become_one_constant() {
    let mut net = Net::new(DType::F32);
    net.input("x", DType::F32, &[Dim::Symbol("rows".to_owned()), Dim::Fixed(48)]);
    constant(&mut net, "last", Tensor::from_i64(&[], &[-1]));
    net.float("one", &[], &[1.0]);
    net.node("Shape", &["x"], "shape", &[]).node("Gather", &["shape", "last"], "width", &[]);
    net.node("Cast", &["width"], "wide", &[("to", int(1))]).node("Sqrt", &["wide"], "root", &[]);
    net.node("Div", &["one", "root"], "scale", &[]).node("Sqrt", &["scale"], "half", &[]);
    net.node("Mul", &["x", "half"], "y", &[]);
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[2, 48], &noise(1, 96)))];
    let after = one(&net.model(&["y"]), "fold_constants", &feeds, Bar::Exact);
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("Mul", 1)]);
    assert_eq!(after.refusals().len(), 0);
}

/// The CPU provider computes f16 in f32 and leaves out roundings in between, so that not every bit is the same.
#[test]
fn f16_and_f64_scalars_are_folded_in_their_type() {
    let mut net = Net::new(DType::F16);
    net.x("x", &[2, 3]).float("c", &[], &[128.0]);
    net.node("Sqrt", &["c"], "root", &[]).node("Cast", &["root"], "double", &[("to", int(11))]);
    net.node("Sqrt", &["double"], "fourth", &[]).node("Cast", &["fourth"], "scale", &[("to", int(10))]);
    net.node("Mul", &["x", "scale"], "y", &[]);
    let feeds = vec![("x".to_owned(), tensor(DType::F16, &[2, 3], &noise(1, 6)))];
    let after = one(&net.model(&["y"]), "fold_constants", &feeds, Bar::Relative(1e-3));
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("Mul", 1)]);
}

/// Every operation on a constant [64, 48] that is too large to be followed element by element.
#[test]
fn what_moves_and_combines_weights_is_done_once() {
    type Case = fn(&mut Net) -> &mut Net;
    let cases: [Case; 12] = [
        |net| net.node("Transpose", &["w"], "r", &[]),
        |net| {
            net.node("Unsqueeze", &["w", "axes"], "u", &[]).node(
                "Transpose",
                &["u"],
                "r",
                &[("perm", ints(&[2, 1, 0]))],
            )
        },
        |net| net.node("Slice", &["w", "starts", "ends", "both", "steps"], "r", &[]),
        |net| net.node("Gather", &["w", "rows"], "r", &[("axis", int(-1))]),
        |net| net.node("Reshape", &["w", "flat"], "r", &[]),
        |net| net.node("Flatten", &["w"], "f", &[]).node("Squeeze", &["f"], "r", &[]),
        |net| net.node("Cast", &["w"], "h", &[("to", int(10))]).node("Cast", &["h"], "r", &[("to", int(1))]),
        |net| net.node("Concat", &["w", "w2"], "r", &[("axis", int(1))]),
        |net| net.node("Add", &["w", "w2"], "a", &[]).node("Mul", &["a", "half"], "r", &[]),
        |net| {
            net.node("Sub", &["w", "w2"], "a", &[]).node("Div", &["a", "half"], "b", &[]).node(
                "Neg",
                &["b"],
                "r",
                &[],
            )
        },
        |net| {
            net.node("Mul", &["w", "w"], "a", &[]).node("Sqrt", &["a"], "b", &[]).node(
                "Reciprocal",
                &["b"],
                "r",
                &[],
            )
        },
        |net| net.node("Expand", &["w", "twice"], "e", &[]).node("Gather", &["e", "rows"], "r", &[]),
    ];
    for (number, case) in cases.into_iter().enumerate() {
        let mut net = Net::new(DType::F32);
        net.x("x", &[1]).float("half", &[48], &[0.3; 48]).ints("axes", &[1]).ints("flat", &[0, -1, 6]);
        net.float("w2", &[64, 48], &noise(8, 64 * 48)).ints("both", &[0, -1]).ints("twice", &[2, 64, 48]);
        net.ints("starts", &[62, -1])
            .ints("ends", &[3, i64::MIN])
            .ints("steps", &[-1, -2])
            .ints("rows", &[1, -1, 0]);
        constant(&mut net, "w", Tensor::from_f32(&[64, 48], &noise(7, 64 * 48)));
        case(&mut net).node("Mul", &["x", "r"], "y", &[]);
        let feeds = vec![("x".to_owned(), tensor(DType::F32, &[1], &[1.0]))];
        let after = one(&net.model(&["y"]), "fold_constants", &feeds, Bar::Exact);
        // The last one would be larger: what goes with it is the table alone.
        let left = if number == 11 { 3 } else { 1 };
        assert_eq!(after.model.graph.nodes().count(), left, "case {number}: {:?}", after.operators());
    }
}

#[test]
fn a_file_does_not_grow_and_a_weight_that_stays_is_not_stored_twice() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[64])
        .float("w", &[64, 64], &noise(1, 64 * 64))
        .float("v", &[64, 1], &noise(2, 64))
        .ints("to", &[64, 64]);
    net.node("MatMul", &["x", "w"], "a", &[]).node("Transpose", &["w"], "wt", &[]).node(
        "MatMul",
        &["x", "wt"],
        "b",
        &[],
    );
    net.node("Expand", &["v", "to"], "e", &[]).node("MatMul", &["x", "e"], "c", &[]);
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[64], &noise(3, 64)))];
    let after = one(&net.model(&["a", "b", "c"]), "fold_constants", &feeds, Bar::Exact);
    assert_eq!(after.applied(), 0);
    assert_eq!(after.refusals(), [("the result is larger than the constants that go".to_owned(), 2)].into());
}

#[test]
fn what_is_no_number_what_must_be_made_and_what_is_rounded_otherwise_stays() {
    let mut net = Net::new(DType::F32);
    let text = Attribute::String(b"text".to_vec());
    net.x("x", &[2]).float("c", &[2], &[0.5, 1.5]).node("Constant", &[], "text", &[("value_string", text)]);
    net.node("Sin", &["c"], "sin", &[]).node("Add", &["x", "sin"], "y", &[]).node("Neg", &["c"], "z", &[]);
    net.node("StringSplit", &["text"], "words", &[]);
    let model = net.model_typed(&[("y", DType::F32), ("z", DType::F32), ("words", DType::STRING)]);
    let after = rewrite(&model, &[pass("fold_constants").unwrap()], &Settings::default());
    assert_eq!(after.applied(), 0);
    let reasons = [
        "a constant of text, or a sparse one",
        "a graph output that is constant",
        "not computed here, because the last bit could differ from the runtime's",
    ];
    assert_eq!(after.refusals(), reasons.map(|why| (why.to_owned(), 1)).into());
}

#[test]
fn a_default_that_callers_may_replace_is_no_constant() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2]).x("scale", &[]).float("scale", &[], &[4.0]);
    net.node("Sqrt", &["scale"], "root", &[]).node("Mul", &["x", "root"], "y", &[]);
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[2], &[1.0, 2.0]))];
    assert_eq!(one(&net.model(&["y"]), "fold_constants", &feeds, Bar::Exact).applied(), 0);
}

/// A long chain of operations on a constant is one expression: neither nested nor computed again and again.
#[test]
fn long_chains_of_constants_are_folded_in_one_piece() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[1]).float("c0", &[64, 48], &noise(1, 64 * 48));
    let names: Vec<String> = (0..500).map(|at| format!("c{at}")).collect();
    names.windows(2).for_each(|pair| {
        net.node("Transpose", &[&pair[0]], &pair[1], &[]);
    });
    net.node("Mul", &["x", "c499"], "y", &[]);
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[1], &[1.0]))];
    let after = one(&net.model(&["y"]), "fold_constants", &feeds, Bar::Exact);
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("Mul", 1)]);
}

/// Whether a size is a certain number is not settled by some sizes that are not.
#[test]
fn sizes_are_not_compared_for_good() {
    for (axis, number) in [(0, 2), (0, 1), (1, 1), (1, 200)] {
        let mut net = Net::new(DType::F32);
        net.input("x", DType::F32, &["rows", "columns"].map(|name| Dim::Symbol(name.to_owned())));
        net.constant("axis", Tensor::from_i64(&[], &[axis]))
            .constant("number", Tensor::from_i64(&[], &[number]));
        net.node("Shape", &["x"], "shape", &[]).node("Gather", &["shape", "axis"], "size", &[]);
        net.node("Equal", &["size", "number"], "same", &[]);
        net.node("Cast", &["same"], "s", &[("to", int(1))]).node("Add", &["x", "s"], "y", &[]);
        let shape = if axis == 0 { [number as usize, 3] } else { [3, number as usize] };
        let feeds = vec![("x".to_owned(), tensor(DType::F32, &shape, &vec![0.0; shape[0] * shape[1]]))];
        let list = sequence("lean").unwrap();
        passes(&net.model(&["y"]), &list, &Settings::default(), &feeds, Bar::Exact);
    }
}
