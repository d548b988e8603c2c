use viaduct_export::onnx::DType;

use crate::{
    runtime_support::{Net, int, ints, noise, tensor},
    same::{Bar, one},
};

#[test]
fn chains_that_compute_the_same_are_computed_once() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2, 3]);
    for (a, b) in [("a1", "b1"), ("a2", "b2")] {
        net.node("Cos", &["x"], a, &[]).node("Transpose", &[a], b, &[("perm", ints(&[1, 0]))]);
    }
    net.node("Softmax", &["b1"], "s1", &[("axis", int(0))]).node(
        "Softmax",
        &["b2"],
        "s2",
        &[("axis", int(1))],
    );
    net.node("Add", &["s1", "s2"], "y", &[]);
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[2, 3], &noise(1, 6)))];
    let after = one(&net.model(&["y"]), "merge_duplicates", &feeds, Bar::Exact);
    assert_eq!(after.applied(), 2);
    assert_eq!(
        after.operators().into_iter().collect::<Vec<_>>(),
        [("Add", 1), ("Cos", 1), ("Softmax", 2), ("Transpose", 1)]
    );
}

#[test]
fn graph_outputs_and_chance_stay() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2, 3]).node("Neg", &["x"], "y", &[]).node("Neg", &["x"], "z", &[]);
    net.node("RandomNormalLike", &["x"], "r1", &[]).node("RandomNormalLike", &["x"], "r2", &[]);
    net.node("Sub", &["r1", "r2"], "d", &[]).node("Shape", &["d"], "n", &[]);
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[2, 3], &noise(1, 6)))];
    let model = net.model_typed(&[("y", DType::F32), ("z", DType::F32), ("n", DType::I64)]);
    let after = one(&model, "merge_duplicates", &feeds, Bar::Exact);
    assert_eq!(after.applied(), 0);
    assert_eq!(after.refusals(), [("a graph output, or used by a body by name".to_owned(), 1)].into());
}
