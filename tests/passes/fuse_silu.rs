use viaduct_export::onnx::DType;

use crate::{
    runtime_support::{Feeds, Net, noise, tensor},
    same::{Bar, one},
};

fn net() -> Net {
    let mut net = Net::new(DType::F32);
    net.x("x", &[3, 8])
        .float("one", &[], &[1.0])
        .node("Neg", &["x"], "minus", &[])
        .node("Exp", &["minus"], "power", &[])
        .node("Add", &["one", "power"], "sum", &[]);
    net
}

fn feeds() -> Feeds {
    vec![("x".to_owned(), tensor(DType::F32, &[3, 8], &noise(1, 24)))]
}

#[test]
fn a_quotient_becomes_sigmoid_and_mul() {
    let mut net = net();
    net.node("Div", &["x", "sum"], "y", &[]);
    let after = one(&net.model(&["y"]), "fuse_silu", &feeds(), Bar::Relative(1e-6));
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("Mul", 1), ("Sigmoid", 1)]);
}

#[test]
fn the_logistic_function_by_itself_becomes_sigmoid() {
    let mut net = net();
    net.node("Reciprocal", &["sum"], "gate", &[]).node("Mul", &["x", "gate"], "y", &[]);
    let after = one(&net.model(&["y"]), "fuse_silu", &feeds(), Bar::Relative(1e-6));
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("Mul", 1), ("Sigmoid", 1)]);
}
