//! Graphs whose data files are absent.

mod onnx_support;

use std::fs;

use onnx_support::*;
use prost::Message;
use viaduct_export::onnx::{
    Bytes, ReadError, WriteError, WriteOptions, model_bytes,
    proto::{StringStringEntryProto, TensorProto},
    read::TensorProblem,
    read_graph, read_model, write_model,
};

fn external(location: &str, dims: &[i64]) -> TensorProto {
    let location = StringStringEntryProto { key: Some("location".into()), value: Some(location.into()) };
    TensorProto {
        dims: dims.to_vec(),
        data_type: Some(10),
        data_location: Some(1),
        external_data: vec![location],
        ..TensorProto::default()
    }
}

#[test]
fn absent_weights_have_a_length_and_no_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    // More than any machine could allocate.
    fs::write(&path, tensor_model(external("weights.data", &[1 << 29, 1 << 30])).encode_to_vec()).unwrap();

    let error = read_model(&path).unwrap_err();
    assert!(matches!(error, ReadError::Tensor { problem: TensorProblem::Open { .. }, .. }), "{error}");

    let model = read_graph(&path).unwrap();
    let weights = model.graph[model.graph.find("w").unwrap()].constant.as_ref().unwrap();
    assert!(matches!(weights.bytes, Bytes::Absent { .. }));
    assert_eq!(weights.bytes.len(), 1 << 60);
    weights.bytes.release();
    assert!(weights.bytes.read().unwrap_err().to_string().contains("weights.data"));
    assert!(matches!(model_bytes(&model), Err(WriteError::Absent { .. })));
    let copy = folder.path().join("copy.onnx");
    let error = write_model(&model, &copy, &WriteOptions::default()).unwrap_err();
    assert!(matches!(error, WriteError::Absent { .. }), "{error}");
    assert_eq!(files(folder.path()), ["model.onnx"]);
}

#[test]
fn graphs_are_no_less_checked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let problem = |tensor: TensorProto| {
        fs::write(&path, tensor_model(tensor).encode_to_vec()).unwrap();
        match read_graph(&path) {
            Err(ReadError::Tensor { problem, .. }) => problem,
            other => panic!("{other:?}"),
        }
    };
    assert!(matches!(problem(external("../weights.data", &[2])), TensorProblem::Location { .. }));
    assert!(matches!(problem(external("weights.data", &[1 << 40, 1 << 40])), TensorProblem::TooLarge { .. }));
    assert!(matches!(problem(external("weights.data", &[-1])), TensorProblem::BadDim { .. }));
    fs::write(folder.path().join("short.data"), [0; 3]).unwrap();
    assert!(matches!(problem(external("short.data", &[2])), TensorProblem::BeyondFile { .. }));
}
