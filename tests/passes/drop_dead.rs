use viaduct_export::onnx::DType;

use crate::{
    runtime_support::{Net, noise, tensor},
    same::{Bar, one},
};

#[test]
fn what_no_output_needs_goes_and_inputs_stay() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2, 3]).x("unused", &[4]).float("w", &[3], &[1.0, 2.0, 3.0]).float("dead_w", &[3], &[0.0; 3]);
    net.node("Mul", &["x", "w"], "y", &[]).node("Add", &["y", "dead_w"], "z", &[]).node(
        "Neg",
        &["z"],
        "z2",
        &[],
    );
    let feeds = vec![
        ("x".to_owned(), tensor(DType::F32, &[2, 3], &noise(1, 6))),
        ("unused".to_owned(), tensor(DType::F32, &[4], &[0.0; 4])),
    ];
    let after = one(&net.model(&["y"]), "drop_dead", &feeds, Bar::Exact);
    assert_eq!(after.applied(), 3, "two nodes and a constant");
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("Mul", 1)]);
    assert_eq!(after.model.graph.inputs.len(), 2);
}
