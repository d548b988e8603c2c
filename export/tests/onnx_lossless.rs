//! Every node model of the ONNX standard's own test suite is read and written without loss.

mod onnx_support;

use std::{fs, path::Path};

use onnx_support::*;
use prost::Message;
use viaduct_export::onnx::{
    Attribute, WriteOptions, model_bytes,
    proto::{
        AttributeProto, FunctionProto, GraphProto, ModelProto, SparseTensorProto, TensorAnnotation,
        TensorProto, TensorShapeProto, TypeProto, ValueInfoProto,
        tensor_shape_proto::{Dimension, dimension},
        type_proto,
    },
    read_model, read_model_bytes, write_model,
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

/// What no node model of the suite has, in one model.
#[test]
fn whatever_a_model_carries_survives() {
    let text = |key: &str| external(&[(key, "text")]).external_data;
    let weight = TensorProto {
        name: Some("w".into()),
        doc_string: Some("a weight".into()),
        metadata_props: text("tensor"),
        dims: vec![2],
        data_type: Some(1),
        float_data: vec![1.0, f32::MIN_POSITIVE],
        ..TensorProto::default()
    };
    let plain = TensorProto { name: Some("v".into()), doc_string: None, ..weight.clone() };
    let attribute = |name: &str, kind, attribute: AttributeProto| AttributeProto {
        name: Some(name.into()),
        r#type: Some(kind),
        doc_string: Some(format!("about {name}")),
        ..attribute
    };
    let none = AttributeProto::default;
    let body = GraphProto {
        name: Some("body".into()),
        doc_string: Some("inner".into()),
        initializer: vec![TensorProto { name: Some("inner".into()), ..weight.clone() }],
        node: vec![node_proto("n", &["x", "inner"], &["z"])],
        output: vec![value_proto("z")],
        ..GraphProto::default()
    };
    let sparse = SparseTensorProto {
        values: Some(TensorProto { name: Some("sparse".into()), ..weight.clone() }),
        dims: vec![8],
        ..SparseTensorProto::default()
    };
    let mut node = node_proto("n", &["x", "", "sparse"], &["a", "", "y"]);
    node.domain = Some("ai.onnx".into());
    node.overload = Some("overload".into());
    node.doc_string = Some("about n".into());
    node.metadata_props = text("node");
    node.attribute = vec![
        attribute("i", 2, AttributeProto { i: Some(-1), ..none() }),
        attribute("f", 1, AttributeProto { f: Some(0.5), ..none() }),
        attribute("s", 3, AttributeProto { s: Some(vec![0xff, 0]), ..none() }),
        attribute("is", 7, AttributeProto { ints: vec![1, 2], ..none() }),
        attribute("fs", 6, AttributeProto { floats: vec![], ..none() }),
        attribute("ss", 8, AttributeProto { strings: vec![vec![], vec![1]], ..none() }),
        attribute("t", 4, AttributeProto { t: Some(weight.clone()), ..none() }),
        attribute("ts", 9, AttributeProto { tensors: vec![weight.clone()], ..none() }),
        attribute("g", 5, AttributeProto { g: Some(body.clone()), ..none() }),
        attribute("gs", 10, AttributeProto { graphs: vec![body.clone(), body], ..none() }),
        attribute("sparse", 11, AttributeProto { sparse_tensor: Some(sparse.clone()), ..none() }),
        attribute("tp", 13, AttributeProto { tp: value_proto("").r#type, ..none() }),
        attribute("ref", 2, AttributeProto { ref_attr_name: Some("outer".into()), ..none() }),
        attribute("unheard", 77, none()),
    ];
    let mut proto = model_proto(vec![node], vec![weight.clone(), plain]);
    proto.producer_version = Some("1".into());
    proto.doc_string = Some(String::new());
    proto.metadata_props = text("model");
    proto.opset_import[0].domain = Some("ai.onnx".into());
    proto.functions = vec![FunctionProto { name: Some("f".into()), ..FunctionProto::default() }];
    let graph = proto.graph.as_mut().unwrap();
    graph.doc_string = Some("outer".into());
    graph.sparse_initializer = vec![sparse];
    graph.quantization_annotation =
        vec![TensorAnnotation { tensor_name: Some("a".into()), ..Default::default() }];
    graph.value_info = vec![value_proto("a"), value_proto("w")];
    graph.value_info[0].metadata_props = text("value");
    // Sizes that nothing else can hold: negative, empty name, denotation.
    let value = |value| Dimension { denotation: Some("DATA_BATCH".into()), value };
    let dim = vec![
        value(Some(dimension::Value::DimValue(-1))),
        value(Some(dimension::Value::DimParam(String::new()))),
        value(Some(dimension::Value::DimParam("n".into()))),
        value(None),
    ];
    let ty = type_proto::Tensor { elem_type: Some(16), shape: Some(TensorShapeProto { dim }) };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(ty)), denotation: Some("IMAGE".into()) };
    graph.input.push(ValueInfoProto { r#type: Some(ty), ..value_proto("image") });
    graph.input.push(ValueInfoProto { r#type: None, ..value_proto("untyped") });

    let here = Path::new(".");
    let bytes = proto.encode_to_vec();
    let model = read_model_bytes(bytes.clone().into(), None).unwrap();
    let again = normal(&model_bytes(&model).unwrap(), here);
    // Value infos come in the order of their values: initializers first.
    let mut expected = normal(&bytes, here);
    expected.graph.as_mut().unwrap().value_info.reverse();
    assert_eq!(expected, again);
}

/// Each typed storage form against the raw bytes it stands for.
#[test]
fn typed_values_become_bytes() {
    let typed = |dims: &[i64], data_type, tensor: TensorProto| TensorProto {
        dims: dims.to_vec(),
        data_type: Some(data_type),
        ..tensor
    };
    let ints = |values: &[i32]| TensorProto { int32_data: values.to_vec(), ..TensorProto::default() };
    let floats = |values: &[f32]| TensorProto { float_data: values.to_vec(), ..TensorProto::default() };
    let unsigned = |values: &[u64]| TensorProto { uint64_data: values.to_vec(), ..TensorProto::default() };
    let doubles = |values: &[f64]| TensorProto { double_data: values.to_vec(), ..TensorProto::default() };
    let cases: Vec<(TensorProto, Vec<u8>)> = vec![
        (typed(&[1], 1, floats(&[1.0])), vec![0, 0, 0x80, 0x3f]),
        (typed(&[2], 2, ints(&[0, 255])), vec![0, 255]),
        (typed(&[3], 3, ints(&[-128, 127, 255])), vec![128, 127, 255]),
        (typed(&[1], 4, ints(&[65535])), vec![255, 255]),
        (typed(&[2], 5, ints(&[-2, 3])), vec![254, 255, 3, 0]),
        (typed(&[1], 6, ints(&[-2])), vec![254, 255, 255, 255]),
        (typed(&[1], 7, TensorProto { int64_data: vec![-1], ..TensorProto::default() }), vec![255; 8]),
        (typed(&[2, 1], 9, ints(&[1, 0])), vec![1, 0]),
        (typed(&[2], 10, ints(&[0x3c00, -1])), vec![0, 0x3c, 255, 255]),
        (typed(&[], 11, doubles(&[0.0])), vec![0; 8]),
        (typed(&[1], 12, unsigned(&[u32::MAX.into()])), vec![255; 4]),
        (typed(&[1], 13, unsigned(&[u64::MAX])), vec![255; 8]),
        (typed(&[1], 14, floats(&[0.0, 1.0])), vec![0, 0, 0, 0, 0, 0, 0x80, 0x3f]),
        (typed(&[1], 15, doubles(&[0.0, 0.0])), vec![0; 16]),
        (typed(&[1], 16, ints(&[0x3f80])), vec![0x80, 0x3f]),
        (typed(&[2], 17, ints(&[1, 254])), vec![1, 254]),
        (typed(&[3], 21, ints(&[0x21, 0x03])), vec![0x21, 3]),
        (typed(&[3], 22, ints(&[0xef, 0x0d])), vec![0xef, 0x0d]),
        (typed(&[0], 6, ints(&[])), vec![]),
    ];
    for (tensor, expected) in cases {
        let model = read_model_bytes(tensor_model(tensor.clone()).encode_to_vec().into(), None).unwrap();
        let read = model.graph[model.graph.find("w").unwrap()].constant.as_ref().unwrap();
        assert_eq!(*read.bytes.read().unwrap(), expected, "{tensor:?}");
        let proto = ModelProto::decode(model_bytes(&model).unwrap().as_slice()).unwrap();
        let written = &proto.graph.unwrap().initializer[0];
        assert_eq!((&written.dims, written.data_type), (&tensor.dims, tensor.data_type));
        assert_eq!(written.raw_data.as_deref(), Some(expected.as_slice()));
    }
    let strings = TensorProto { string_data: vec![b"a".to_vec(), vec![0xff]], ..TensorProto::default() };
    let strings = typed(&[2], 8, strings);
    let model = read_model_bytes(tensor_model(strings.clone()).encode_to_vec().into(), None).unwrap();
    let proto = ModelProto::decode(model_bytes(&model).unwrap().as_slice()).unwrap();
    assert_eq!(proto.graph.unwrap().initializer[0].string_data, strings.string_data);
}

/// Files of the first IR version do not state the types of attributes.
#[test]
fn attributes_without_a_type() {
    let mut node = node_proto("n", &["x"], &["y"]);
    let unset = |name: &str| AttributeProto { name: Some(name.into()), ..AttributeProto::default() };
    node.attribute = vec![
        AttributeProto { i: Some(3), ..unset("i") },
        AttributeProto { floats: vec![1.5], ..unset("fs") },
        unset("nothing"),
        AttributeProto { i: Some(3), f: Some(1.0), ..unset("both") },
    ];
    let model = read_model_bytes(model_proto(vec![node], vec![]).encode_to_vec().into(), None).unwrap();
    let (_, node) = model.graph.nodes().next().unwrap();
    assert_eq!(node.int("i"), Some(3));
    assert!(matches!(node.attribute("fs"), Some(Attribute::Floats(values)) if *values == [1.5]));
    assert!(matches!(node.attribute("nothing"), Some(Attribute::Other(_))));
    assert!(matches!(node.attribute("both"), Some(Attribute::Other(_))));
}
