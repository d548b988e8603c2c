use viaduct_export::{
    onnx::DType,
    passes::{PassError, Settings, apply, pass},
};

use crate::runtime_support::{Net, int};

/// A pass that replaces the node would leave the second one undefined.
#[test]
fn more_outputs_than_the_operator_has_are_an_error() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2, 32]).float("w", &[8, 32], &[1.0; 256]);
    net.node("Gemm", &["x", "w"], "y more", &[("transB", int(1))]);
    let mut model = net.model(&["y", "more"]);
    let error = apply(&mut model, &[pass("quantize_matmul_q8").unwrap()], &Settings::default()).unwrap_err();
    assert!(
        matches!(&error, PassError::SeveralOutputs { node } if node == "'Gemm_y more' (Gemm)"),
        "{error}"
    );
}
