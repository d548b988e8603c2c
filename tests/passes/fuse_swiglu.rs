use viaduct_export::onnx::DType;

use crate::{
    runtime_support::{Net, noise, tensor},
    same::{Bar, one},
};

/// Halves of x [2, 16], one of which goes through SiLU where `gated`.
fn halves(gated: bool) -> Net {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2, 16]).ints("axes", &[1]).ints("start", &[0]).ints("half", &[8]).ints("end", &[i64::MAX]);
    net.node("Slice", &["x", "start", "half", "axes"], "a", &[])
        .node("Slice", &["x", "half", "end", "axes"], "b", &[])
        .node("Sigmoid", &["a"], "gate", &[])
        .node("Mul", &["a", if gated { "gate" } else { "b" }], "silu", &[])
        .node("Mul", &["silu", "b"], "y", &[]);
    net
}

#[test]
fn halves_of_a_gated_projection_become_one_split() {
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[2, 16], &noise(1, 32)))];
    let after = one(&halves(true).model(&["y"]), "fuse_swiglu", &feeds, Bar::Exact);
    let operators: Vec<_> = after.operators().into_iter().collect();
    assert_eq!(operators, [("Mul", 2), ("Sigmoid", 1), ("Split", 1)]);
    let after = one(&halves(false).model(&["y"]), "fuse_swiglu", &feeds, Bar::Exact);
    assert_eq!(after.applied(), 0, "halves without a gate are left to merge_slices");
}
