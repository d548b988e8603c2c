//! Every node model of the ONNX standard's own test suite is read and written without loss.

mod onnx_support;

use std::{fs, path::Path};

use onnx_support::{python, run_python};
use prost::Message;
use viaduct_export::onnx::{
    WriteOptions, model_bytes,
    proto::{AttributeProto, GraphProto, ModelProto, TensorProto},
    read_model, write_model,
};

/// Values as raw bytes, wherever and however they are stored: the one thing that may change.
fn to_raw(tensor: &mut TensorProto, folder: &Path) {
    let entry = |key| tensor.external_data.iter().find(|e| e.key() == key).map(|e| e.value());
    let bytes: Vec<u8> = if let Some(location) = entry("location") {
        let number = |key| entry(key).unwrap().parse::<usize>().unwrap();
        let file = fs::read(folder.join(location)).unwrap();
        file[number("offset")..][..number("length")].to_vec()
    } else if let Some(raw) = &tensor.raw_data {
        raw.to_vec()
    } else {
        let small = tensor.int32_data.iter();
        match tensor.data_type() {
            8 => return,
            1 | 14 => tensor.float_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
            11 | 15 => tensor.double_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
            6 => small.flat_map(|v| v.to_le_bytes()).collect(),
            4 | 5 | 10 | 16 => small.flat_map(|v| (*v as u16).to_le_bytes()).collect(),
            7 => tensor.int64_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
            12 => tensor.uint64_data.iter().flat_map(|v| (*v as u32).to_le_bytes()).collect(),
            13 => tensor.uint64_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
            _ => small.map(|v| *v as u8).collect(),
        }
    };
    *tensor = TensorProto {
        raw_data: Some(bytes.into()),
        dims: std::mem::take(&mut tensor.dims),
        data_type: tensor.data_type,
        name: tensor.name.take(),
        doc_string: tensor.doc_string.take(),
        metadata_props: std::mem::take(&mut tensor.metadata_props),
        ..TensorProto::default()
    };
}

fn normalise(graph: &mut GraphProto, folder: &Path) {
    graph.initializer.iter_mut().for_each(|tensor| to_raw(tensor, folder));
    for attribute in graph.node.iter_mut().flat_map(|node| &mut node.attribute) {
        let AttributeProto { t, g, graphs, .. } = attribute;
        t.iter_mut().for_each(|tensor| to_raw(tensor, folder));
        g.iter_mut().chain(graphs).for_each(|graph| normalise(graph, folder));
    }
}

fn normal(bytes: &[u8], folder: &Path) -> ModelProto {
    let mut proto = ModelProto::decode(bytes).unwrap();
    normalise(proto.graph.as_mut().unwrap(), folder);
    proto
}

const FIND: &str =
    "import os, onnx.backend.test as t; print(os.path.join(os.path.dirname(t.__file__), 'data', 'node'))";

/// Prints the models of a folder tree that the checker refuses.
const CHECK: &str = "
import glob, sys, onnx
for path in sorted(glob.glob(sys.argv[1] + '/*/model.onnx')):
    try: onnx.checker.check_model(path)
    except Exception as error: print(path.split('/')[-2], str(error).splitlines()[0])
";

#[test]
fn node_models_survive_reading_and_writing() {
    let Some(python) = python() else { return };
    let source = String::from_utf8(run_python(&python, FIND, &[]).stdout).unwrap();
    let source = Path::new(source.trim());
    let target = tempfile::tempdir().unwrap();
    // Everything that can lie outside the graph file does.
    let options = WriteOptions { inline_below: 0, ..WriteOptions::default() };
    let mut count = 0;
    for entry in fs::read_dir(source).unwrap() {
        let original = entry.unwrap().path();
        let copy = target.path().join(original.file_name().unwrap());
        fs::create_dir(&copy).unwrap();
        let name = copy.display();
        let model = read_model(&original.join("model.onnx")).unwrap_or_else(|e| panic!("{name}: {e}"));
        write_model(&model, &copy.join("model.onnx"), &options).unwrap_or_else(|e| panic!("{name}: {e}"));

        let before = normal(&fs::read(original.join("model.onnx")).unwrap(), &original);
        let written = fs::read(copy.join("model.onnx")).unwrap();
        assert_eq!(before, normal(&written, &copy), "{name}");
        let again = read_model(&copy.join("model.onnx")).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(before, normal(&model_bytes(&again).unwrap(), &copy), "{name}, in memory");
        let _: onnx_protobuf::ModelProto = protobuf::Message::parse_from_bytes(&written).unwrap();
        count += 1;
    }
    assert!(count >= 1600, "only {count} models");
    let refused = |folder: &Path| String::from_utf8(run_python(&python, CHECK, &[folder]).stdout).unwrap();
    assert_eq!(refused(source), refused(target.path()));
}
