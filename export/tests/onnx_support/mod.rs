//! What several tests of the ONNX reader and writer need.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::{
    env, fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use prost::Message;
use viaduct_export::onnx::{
    DType, Dim, Graph, Model, Node, ValueType,
    proto::{
        GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TensorProto,
        TypeProto, ValueInfoProto, type_proto,
    },
};

/// Python with the `onnx` package: `VIADUCT_PYTHON`, or the `.venv` at the root of the workspace. Its absence fails
/// the test in CI and is announced elsewhere, past the capture of test output.
pub fn python() -> Option<PathBuf> {
    // Tests of both packages of the workspace include this file.
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let places = [package.join(".venv/bin/python"), package.join("../.venv/bin/python")];
    let venv = || places.into_iter().find(|python| python.exists());
    let found = env::var_os("VIADUCT_PYTHON").map(PathBuf::from).or_else(venv);
    if found.is_none() {
        assert!(env::var("CI").as_deref() != Ok("true"), "CI needs Python with onnx: set VIADUCT_PYTHON");
        let line = b"!!! NOT TESTED against Python onnx: set VIADUCT_PYTHON or make .venv\n";
        std::io::stderr().write_all(line).unwrap();
    }
    found
}

pub fn run_python(python: &Path, script: &str, args: &[&Path]) -> Output {
    let output = Command::new(python).arg("-c").arg(script).args(args).output().expect("Python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Both other readers of ONNX that the tests know must accept the file.
pub fn assert_others_accept(path: &Path) {
    assert_others_accept_all(&[path]);
}

/// As [`assert_others_accept`], but Python starts only once.
pub fn assert_others_accept_all(paths: &[&Path]) {
    paths.iter().for_each(|path| assert_protobuf_agrees(path));
    if let Some(python) = python() {
        let script = "import sys, onnx; [onnx.checker.check_model(path) for path in sys.argv[1:]]";
        run_python(&python, script, paths);
    }
}

/// The crate onnx-protobuf reads the file as we do.
fn assert_protobuf_agrees(path: &Path) {
    let bytes = fs::read(path).unwrap();
    let theirs: onnx_protobuf::ModelProto = protobuf::Message::parse_from_bytes(&bytes).unwrap();
    let ours = ModelProto::decode(bytes.as_slice()).unwrap();
    let (theirs, ours) = (theirs.graph.as_ref().unwrap(), ours.graph.unwrap());
    assert_eq!(theirs.node.len(), ours.node.len());
    assert_eq!(theirs.initializer.len(), ours.initializer.len());
    for (theirs, ours) in theirs.initializer.iter().zip(&ours.initializer) {
        assert_eq!(theirs.name, ours.name());
        assert_eq!(theirs.dims, ours.dims);
        assert_eq!(theirs.raw_data, ours.raw_data());
        assert_eq!(theirs.external_data.len(), ours.external_data.len());
    }
}

pub fn float(shape: &[usize]) -> Option<ValueType> {
    let shape = Some(shape.iter().map(|dim| Dim::Fixed(*dim)).collect());
    Some(ValueType::Tensor { dtype: DType::F32, shape })
}

/// A valid model around what `build` makes of a graph with input and output `x` and `y`.
pub fn model(build: impl FnOnce(&mut Graph)) -> Model {
    let mut graph = Graph::new("test");
    let (x, y) = (graph.value("x"), graph.value("y"));
    graph[x].ty = float(&[1]);
    graph[y].ty = float(&[1]);
    graph.inputs.push(x);
    graph.outputs.push(y);
    node(&mut graph, "Identity", &["x"], &["y"]);
    build(&mut graph);
    Model { graph, ir_version: 10, opsets: vec![(String::new(), 21)], ..Model::default() }
}

pub fn node(graph: &mut Graph, op_type: &str, inputs: &[&str], outputs: &[&str]) {
    let inputs = inputs.iter().map(|name| Some(graph.value(name))).collect();
    let outputs = outputs.iter().map(|name| Some(graph.value(name))).collect();
    graph.add_node(Node { op_type: op_type.into(), inputs, outputs, ..Node::default() });
}

pub fn files(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort();
    names
}

// Messages, for files that our writer would not write.

pub fn value_proto(name: &str) -> ValueInfoProto {
    let tensor = type_proto::Tensor { elem_type: Some(1), shape: Some(Default::default()) };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..ValueInfoProto::default() }
}

pub fn node_proto(name: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto {
        name: Some(name.into()),
        op_type: Some("Add".into()),
        input: inputs.iter().map(|name| name.to_string()).collect(),
        output: outputs.iter().map(|name| name.to_string()).collect(),
        ..NodeProto::default()
    }
}

/// A model with input `x`, output `y`, and the given nodes and initializers.
pub fn model_proto(node: Vec<NodeProto>, initializer: Vec<TensorProto>) -> ModelProto {
    let graph = GraphProto {
        name: Some("hostile".into()),
        node,
        initializer,
        input: vec![value_proto("x")],
        output: vec![value_proto("y")],
        ..GraphProto::default()
    };
    ModelProto {
        ir_version: Some(10),
        opset_import: vec![OperatorSetIdProto { domain: None, version: Some(21) }],
        graph: Some(graph),
        ..ModelProto::default()
    }
}

/// A model whose only initializer is `tensor`.
pub fn tensor_model(tensor: TensorProto) -> ModelProto {
    model_proto(
        vec![node_proto("n", &["x", "w"], &["y"])],
        vec![TensorProto { name: Some("w".into()), ..tensor }],
    )
}

pub fn external(entries: &[(&str, &str)]) -> TensorProto {
    let entry = |(key, value): &(&str, &str)| StringStringEntryProto {
        key: Some(key.to_string()),
        value: Some(value.to_string()),
    };
    TensorProto {
        dims: vec![4],
        data_type: Some(1),
        data_location: Some(1),
        external_data: entries.iter().map(entry).collect(),
        ..TensorProto::default()
    }
}

/// Writes a model with `len` zeros as raw data of initializer `w`. They are a hole at the end of a sparse file and
/// take no room on the disk.
pub fn sparse_inline_model(path: &Path, len: u64) {
    // Raw data comes last in its tensor, the tensor in its graph and the graph in its model.
    let field = |message: Vec<u8>, tag: u8, rest: u64, inner: Vec<u8>| -> (Vec<u8>, u64) {
        let mut bytes = message;
        bytes.push(tag);
        prost::encoding::encode_varint(rest, &mut bytes);
        let total = bytes.len() as u64 + rest;
        bytes.extend(inner);
        (bytes, total)
    };
    let mut model = tensor_model(TensorProto::default());
    let mut graph = model.graph.take().unwrap();
    graph.initializer.clear();
    let name = Some("w".into());
    let tensor = TensorProto { dims: vec![len as i64], data_type: Some(2), name, ..TensorProto::default() };
    let (bytes, total) = field(tensor.encode_to_vec(), 9 << 3 | 2, len, Vec::new());
    let (bytes, total) = field(graph.encode_to_vec(), 5 << 3 | 2, total, bytes);
    let (bytes, total) = field(model.encode_to_vec(), 7 << 3 | 2, total, bytes);
    let mut file = fs::File::create(path).unwrap();
    file.write_all(&bytes).unwrap();
    file.set_len(total).unwrap();
}
