//! Names of what passes make.

use viaduct_export::{
    onnx::{Attribute, DType, Graph},
    passes::{Settings, pass},
};

use crate::{
    runtime_support::{Net, int, noise, tensor},
    same::{Bar, passes},
};

fn conditional(net: &mut Net, body: Graph, output: &str) {
    let branch = Attribute::Graph(Box::new(body));
    net.node("If", &["c"], output, &[("then_branch", branch.clone()), ("else_branch", branch)]);
}

/// Bodies, and bodies in bodies, have values and constants of the names that passes would give.
#[test]
fn names_in_bodies_are_not_taken() {
    let mut inner = Net::new(DType::F32);
    inner.float("W.codes", &[1], &[1.0]).node("Neg", &["W.codes"], "y/1", &[]);
    let mut outer = Net::new(DType::F32);
    outer.float("W.scales", &[1], &[2.0]);
    conditional(&mut outer, inner.model(&["y/1"]).graph, "inner");
    outer.node("Add", &["inner", "W.scales"], "y/1.2", &[]);
    let mut net = Net::new(DType::F32);
    net.x("x", &[2, 32]).x("flag", &[]).float("W", &[32, 8], &noise(1, 256));
    net.float("one", &[], &[1.0]).node("Greater", &["flag", "one"], "c", &[]);
    net.node("MatMul", &["x", "W"], "m", &[]).node("Neg", &["m"], "minus", &[]);
    net.node("Exp", &["minus"], "power", &[]).node("Add", &["one", "power"], "sum", &[]);
    net.node("Div", &["m", "sum"], "silu", &[]);
    conditional(&mut net, outer.model(&["y/1.2"]).graph, "z");
    net.node("Add", &["silu", "z"], "a", &[]).node("Concat", &["a"; 12], "y", &[("axis", int(0))]);
    let mut model = net.model(&["y"]);
    let nameless = |model: &mut viaduct_export::onnx::Model| {
        let ids: Vec<_> = model.graph.nodes().map(|(id, _)| id).collect();
        ids.into_iter().for_each(|id| model.graph[id].name.clear());
    };
    nameless(&mut model);
    let feeds = vec![
        ("x".to_owned(), tensor(DType::F32, &[2, 32], &noise(2, 64))),
        ("flag".to_owned(), tensor(DType::F32, &[], &[2.0])),
    ];
    let list = ["fuse_silu", "tree_concat", "quantize_matmul_q8"].map(|name| pass(name).unwrap());
    let after = passes(&model, &list, &Settings::default(), &feeds, Bar::Relative(2e-2));
    assert_eq!(after.applied(), 3);
    let taken = ["y/1", "y/1.2", "W.codes", "W.scales"];
    let inner: Vec<&str> = after.model.graph.names_in_bodies().collect();
    assert!(taken.iter().all(|name| inner.contains(name)), "{inner:?}");
    assert!(taken.iter().all(|name| after.model.graph.find(name).is_none()));
    assert!(after.model.graph.find("W.codes.2").is_some());
}
