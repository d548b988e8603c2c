use viaduct_export::{
    onnx::{DType, Dim},
    passes::{Settings, pass},
};

use crate::{
    runtime_support::{Net, int, ints, noise, tensor},
    same::{Bar, one, rewrite},
};

/// Nodes from `x` [2, 3, 4] to `r`.
type Case = fn(&mut Net) -> &mut Net;

fn net(case: Case) -> Net {
    let mut net = Net::new(DType::F32);
    net.input("x", DType::F32, &[Dim::Symbol("rows".to_owned()), Dim::Fixed(3), Dim::Fixed(4)]);
    net.float("one", &[], &[1.0]).float("zero", &[1, 4], &[0.0; 4]).float("minus_zero", &[], &[-0.0]);
    net.ints("same", &[-1, 3, 4]).ints("flat", &[-1, 12]).ints("ones", &[1, 1, 1]).ints("first", &[0]);
    net.ints("start", &[0]).ints("end", &[i64::MAX]).ints("copy", &[0, 0, 2, 2]).ints("rows", &[0, 6, -1]);
    case(&mut net);
    net
}

fn nodes_left(case: Case) -> Vec<String> {
    let mut net = net(case);
    let model = net.node("Neg", &["r"], "y", &[]).model(&["y"]);
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[2, 3, 4], &noise(1, 24)))];
    let after = one(&model, "eliminate_identity", &feeds, Bar::Exact);
    after.model.graph.nodes().map(|(_, node)| node.op_type.clone()).collect()
}

#[test]
fn what_changes_nothing_goes() {
    let cases: [Case; 17] = [
        |net| net.node("Identity", &["x"], "i", &[]).node("Identity", &["i"], "r", &[]),
        |net| net.node("Cast", &["x"], "r", &[("to", int(1))]),
        |net| net.node("Transpose", &["x"], "r", &[("perm", ints(&[0, 1, 2]))]),
        |net| net.node("Transpose", &["x"], "t", &[]).node("Transpose", &["t"], "r", &[]),
        |net| net.node("Reshape", &["x", "same"], "r", &[]),
        |net| net.node("Reshape", &["x", "flat"], "f", &[]).node("Reshape", &["f", "same"], "r", &[]),
        |net| net.node("Unsqueeze", &["x", "first"], "u", &[]).node("Squeeze", &["u", "first"], "r", &[]),
        |net| net.node("Expand", &["x", "ones"], "r", &[]),
        |net| net.node("Tile", &["x", "ones"], "r", &[]),
        |net| net.node("Slice", &["x", "start", "end"], "r", &[]),
        |net| net.node("Concat", &["x"], "r", &[("axis", int(0))]),
        |net| net.node("Max", &["x"], "r", &[]),
        |net| net.node("Dropout", &["x"], "r", &[]),
        |net| net.node("Add", &["minus_zero", "x"], "r", &[]),
        |net| net.node("Sub", &["x", "zero"], "r", &[]),
        |net| net.node("Mul", &["one", "x"], "r", &[]),
        |net| net.node("Div", &["x", "one"], "r", &[]),
    ];
    for (number, case) in cases.into_iter().enumerate() {
        assert_eq!(nodes_left(case), ["Neg"], "case {number}");
    }
}

#[test]
fn two_in_a_row_become_one() {
    let transposes: Case = |net| {
        net.node("Transpose", &["x"], "t", &[("perm", ints(&[1, 2, 0]))]);
        net.node("Transpose", &["t"], "r", &[("perm", ints(&[0, 2, 1]))])
    };
    assert_eq!(nodes_left(transposes), ["Transpose", "Neg"]);
    let reshapes: Case =
        |net| net.node("Unsqueeze", &["x", "first"], "u", &[]).node("Reshape", &["u", "flat"], "r", &[]);
    assert_eq!(nodes_left(reshapes), ["Reshape", "Neg"]);
    // The second 0 copies 12, which x does not have there.
    let copies: Case = |net| {
        net.node("Reshape", &["x", "flat"], "f", &[])
            .node("Reshape", &["f", "copy2"], "r", &[])
            .ints("copy2", &[-1, 0, 1])
    };
    assert_eq!(nodes_left(copies), ["Reshape", "Reshape", "Neg"]);
}

#[test]
fn what_only_looks_like_it_stays() {
    let cases: [Case; 4] = [
        |net| net.node("Sub", &["one", "x"], "r", &[]),
        |net| net.node("Div", &["one", "x"], "r", &[]),
        |net| net.node("Transpose", &["x"], "r", &[]),
        |net| {
            net.ints("back", &[-1]).ints("from", &[-1]).ints("to", &[i64::MIN]).node(
                "Slice",
                &["x", "from", "to", "first", "back"],
                "r",
                &[],
            )
        },
    ];
    for (number, case) in cases.into_iter().enumerate() {
        assert_eq!(nodes_left(case).len(), 2, "case {number}");
    }
}

#[test]
fn the_sign_of_zero_is_kept() {
    let case: Case = |net| net.node("Add", &["x", "zero"], "y", &[]);
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[1, 3, 4], &[-0.0; 12]))];
    let after = one(&net(case).model(&["y"]), "eliminate_identity", &feeds, Bar::Exact);
    assert_eq!(after.refusals(), [("adding +0.0 turns -0.0 into +0.0".to_owned(), 1)].into());
}

#[test]
fn graph_outputs_keep_their_names() {
    let case: Case = |net| {
        net.node("Neg", &["x"], "n", &[]).node("Identity", &["n"], "y", &[]).node("Abs", &["n"], "z", &[])
    };
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[2, 3, 4], &noise(1, 24)))];
    let after = one(&net(case).model(&["y", "z"]), "eliminate_identity", &feeds, Bar::Exact);
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("Abs", 1), ("Neg", 1)]);
    let case: Case = |net| {
        net.node("Identity", &["x"], "y", &[]).node("Neg", &["x"], "n", &[]).node(
            "Identity",
            &["n"],
            "z",
            &[],
        )
    };
    let after = one(&net(case).model(&["y", "n", "z"]), "eliminate_identity", &feeds, Bar::Exact);
    assert_eq!(after.refusals(), [("a graph output that repeats another value".to_owned(), 2)].into());
}

/// However long, a row is done with at once.
#[test]
fn long_rows_settle() {
    let row = |ops: &[(&str, [i64; 3])], count: usize| {
        let mut net = Net::new(DType::F32);
        net.input("x", DType::F32, &[Dim::Symbol("rows".to_owned()), Dim::Fixed(3), Dim::Fixed(4)]);
        for at in 0..count {
            let (op, numbers) = &ops[at % ops.len()];
            let (from, to) =
                (if at == 0 { "x".to_owned() } else { format!("v{at}") }, format!("v{}", at + 1));
            let target = format!("to{at}");
            match *op {
                "Transpose" => net.node(op, &[&from], &to, &[("perm", ints(numbers))]),
                "Reshape" => net.ints(&target, numbers).node(op, &[&from, &target], &to, &[]),
                _ => net.node(op, &[&from], &to, &[]),
            };
        }
        let model = net.node("Neg", &[&format!("v{count}")], "y", &[]).model(&["y"]);
        let after = rewrite(&model, &[pass("eliminate_identity").unwrap()], &Settings::default());
        after.model.graph.nodes().map(|(_, node)| node.op_type.clone()).collect::<Vec<_>>()
    };
    let perms = [("Transpose", [1, 0, 2]), ("Transpose", [0, 2, 1])];
    assert_eq!(row(&perms, 6000), ["Neg"]);
    assert_eq!(row(&perms, 6001), ["Transpose", "Neg"]);
    let halves = |at: i64| ("Reshape", [-1, at, 12 / at]);
    assert_eq!(row(&[1, 2, 3, 4, 6, 12].map(halves), 3000), ["Reshape", "Neg"]);
    let shapes: Vec<(&str, [i64; 3])> = (1..=12).map(|at| ("Reshape", [at, 1, -1])).collect();
    assert_eq!(row(&shapes, 3000), ["Reshape", "Neg"]);
    assert_eq!(row(&[("Identity", [0; 3])], 20_000), ["Neg"]);
}
