use viaduct_export::onnx::{DType, Tensor};

use crate::{
    runtime_support::{Net, noise, tensor},
    same::{Bar, one},
};

#[test]
fn equal_constants_are_stored_once_and_others_stay() {
    let mut net = Net::new(DType::F32);
    let weight = noise(1, 4000);
    let mut other = weight.clone();
    other[3999] += 1.0;
    net.x("x", &[4000]).float("a", &[4000], &weight).float("b", &[4000], &weight).float("c", &[4000], &other);
    net.constant("d", Tensor::from_f32(&[1, 4000], &weight));
    for (from, with, to) in [("x", "a", "1"), ("1", "b", "2"), ("2", "c", "3"), ("3", "d", "y")] {
        net.node("Add", &[from, with], to, &[]);
    }
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[4000], &noise(2, 4000)))];
    let after = one(&net.model(&["y"]), "dedupe_initializers", &feeds, Bar::Exact);
    assert_eq!(after.applied(), 1);
    assert_eq!(after.model.graph.values().filter(|(_, value)| value.constant.is_some()).count(), 3);
}

#[test]
fn zeros_of_different_signs_are_different() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2]).float("plus", &[], &[0.0]).float("minus", &[], &[-0.0]);
    net.node("Div", &["x", "plus"], "y", &[]).node("Div", &["x", "minus"], "z", &[]);
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[2], &[1.0, 2.0]))];
    assert_eq!(one(&net.model(&["y", "z"]), "dedupe_initializers", &feeds, Bar::Exact).applied(), 0);
}

#[test]
fn a_constant_that_is_a_graph_output_keeps_its_name() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2]).float("a", &[2], &[1.0, 2.0]).float("b", &[2], &[1.0, 2.0]);
    net.node("Add", &["x", "a"], "1", &[]).node("Mul", &["1", "b"], "y", &[]);
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[2], &[1.0, 2.0]))];
    let after = one(&net.model(&["y", "b"]), "dedupe_initializers", &feeds, Bar::Exact);
    assert_eq!(after.refusals(), [("a graph output, or used by a body by name".to_owned(), 1)].into());
}
