//! Files that are broken or mean harm: each is refused with an error that says what and where, and none panics.

mod onnx_support;

use std::fs;

use onnx_support::*;
use prost::Message;
use viaduct_export::onnx::{
    proto::{AttributeProto, FunctionProto, GraphProto, ModelProto, SparseTensorProto, TensorProto},
    read_model, read_model_bytes,
};

/// Writes the model beside a data file `w.data` of 64 bytes and returns the reader's complaint.
fn complaint(proto: &ModelProto) -> String {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("model")).unwrap();
    fs::write(folder.path().join("outside.data"), [0; 64]).unwrap();
    fs::write(folder.path().join("model/w.data"), [0; 64]).unwrap();
    let path = folder.path().join("model/model.onnx");
    fs::write(&path, proto.encode_to_vec()).unwrap();
    match read_model(&path) {
        Ok(_) => "accepted".to_owned(),
        Err(error) => error.to_string(),
    }
}

/// Each complaint must contain the tensor's name and the given words.
fn assert_tensors_refused(cases: Vec<(&str, TensorProto)>) {
    for (words, tensor) in cases {
        let complaint = complaint(&tensor_model(tensor.clone()));
        assert!(complaint.contains("initializer 'w'"), "{complaint}\nfor {tensor:?}");
        assert!(complaint.contains(words), "{complaint}\nfor {tensor:?}");
    }
}

fn inline(dims: &[i64], data_type: i32, bytes: usize) -> TensorProto {
    TensorProto {
        dims: dims.to_vec(),
        data_type: Some(data_type),
        raw_data: Some(vec![0; bytes].into()),
        ..TensorProto::default()
    }
}

#[test]
fn external_locations_that_leave_the_folder() {
    let at = |location| external(&[("location", location)]);
    assert_tensors_refused(vec![
        ("leaves the model's folder", at("../outside.data")),
        ("leaves the model's folder", at("../../etc/passwd")),
        ("leaves the model's folder", at("../model/w.data")),
        ("leaves the model's folder", at("sub/../../outside.data")),
        ("leaves the model's folder", at("./../outside.data")),
        ("leaves the model's folder", at("..")),
        ("absolute", at("/etc/passwd")),
        ("absolute", at("//etc/passwd")),
        ("NUL", at("w.data\0.png")),
        ("backslash", at("..\\outside.data")),
        ("backslash", at("\\\\server\\share")),
        ("drive letter", at("C:/w.data")),
        ("drive letter", at("c:w.data")),
        ("names no file", at("")),
        ("names no file", at(".")),
        ("cannot read its data file", at("absent.data")),
        ("cannot read its data file", at("*/_ORT_MEM_ADDR_/*")),
        ("without a location", external(&[])),
        ("two entries 'location'", external(&[("location", "w.data"), ("location", "../outside.data")])),
    ]);
    let harmless = ["w.data", "./w.data", ".//w.data"];
    for location in harmless {
        assert_eq!(complaint(&tensor_model(at(location))), "accepted", "{location}");
    }
}

#[cfg(unix)]
#[test]
fn external_locations_that_are_no_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    fs::create_dir(folder.path().join("directory")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", folder.path().join("device")).unwrap();
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for location in ["directory", "device", "pipe"] {
        fs::write(&path, tensor_model(external(&[("location", location)])).encode_to_vec()).unwrap();
        let complaint = read_model(&path).unwrap_err().to_string();
        assert!(complaint.contains("not a regular file"), "{complaint}");
    }
}

#[test]
fn external_ranges() {
    let at = |offset, length| external(&[("location", "w.data"), ("offset", offset), ("length", length)]);
    assert_tensors_refused(vec![
        ("16 bytes at offset 49, reaches beyond the end", at("49", "16")),
        ("beyond the end", at("18446744073709551615", "16")),
        ("beyond the end", at("9223372036854775807", "16")),
        ("not a non-negative 64-bit number", at("18446744073709551616", "16")),
        ("offset '-1'", at("-1", "16")),
        ("offset '+1'", at("+1", "16")),
        ("offset ''", at("", "16")),
        ("offset '0x10'", at("0x10", "16")),
        ("length '1e1'", at("0", "1e1")),
        ("has 15 bytes or elements where type and shape ask for 16", at("0", "15")),
        ("ask for 16", at("0", "17")),
        ("ask for 16", at("0", "0")),
        ("stored twice", TensorProto { raw_data: Some(vec![0; 16].into()), ..at("0", "16") }),
        ("data_location is 7", TensorProto { data_location: Some(7), ..at("0", "16") }),
        ("element type 8 is unknown", TensorProto { data_type: Some(8), ..at("0", "16") }),
    ]);
    assert_eq!(complaint(&tensor_model(at("48", "16"))), "accepted");
}

#[test]
fn external_data_needs_a_folder_and_is_refused_where_it_is_not_read() {
    let tensor = external(&[("location", "w.data")]);
    let bytes = tensor_model(tensor.clone()).encode_to_vec();
    let complaint_in_memory = read_model_bytes(bytes.into(), None).unwrap_err().to_string();
    assert!(complaint_in_memory.contains("without a folder"), "{complaint_in_memory}");

    let hidden = external(&[("location", "../outside.data")]);
    let attribute = |attribute: AttributeProto| AttributeProto { name: Some("value".into()), ..attribute };
    let tensors = attribute(AttributeProto {
        r#type: Some(9),
        tensors: vec![hidden.clone()],
        ..AttributeProto::default()
    });
    let sparse = SparseTensorProto { values: Some(hidden.clone()), ..SparseTensorProto::default() };
    let with = |change: &dyn Fn(&mut ModelProto)| {
        let mut proto = model_proto(vec![node_proto("n", &["x", "x"], &["y"])], vec![]);
        change(&mut proto);
        complaint(&proto)
    };
    let function =
        FunctionProto { node: vec![onnx_support::node_proto("f", &[], &["z"])], ..FunctionProto::default() };
    let complaints = [
        with(&|proto| proto.graph.as_mut().unwrap().node[0].attribute.push(tensors.clone())),
        with(&|proto| proto.graph.as_mut().unwrap().sparse_initializer.push(sparse.clone())),
        with(&|proto| {
            let mut function = function.clone();
            function.node[0].attribute.push(tensors.clone());
            proto.functions.push(function);
        }),
    ];
    for complaint in complaints {
        assert!(complaint.contains("not supported in sparse tensors, functions"), "{complaint}");
    }
    let value = AttributeProto { r#type: Some(4), t: Some(hidden), ..AttributeProto::default() };
    let complaint =
        with(&|proto| proto.graph.as_mut().unwrap().node[0].attribute.push(attribute(value.clone())));
    assert!(complaint.contains("attribute 'value' of node 'n' (Add)"), "{complaint}");
    assert!(complaint.contains("leaves the model's folder"), "{complaint}");
}

#[test]
fn sizes_and_types() {
    const HUGE: i64 = 1 << 40;
    let typed = |data_type, values: &[i32]| TensorProto {
        dims: vec![values.len() as i64],
        data_type: Some(data_type),
        int32_data: values.to_vec(),
        ..TensorProto::default()
    };
    assert_tensors_refused(vec![
        ("dimension 1 is -4", inline(&[1, -4], 1, 16)),
        ("dimension 0 is -9223372036854775808", inline(&[i64::MIN], 1, 16)),
        ("does not fit into 64 bits", inline(&[HUGE, HUGE], 1, 16)),
        ("does not fit into 64 bits", inline(&[HUGE, HUGE, 0], 1, 0)),
        ("does not fit into 64 bits", inline(&[1 << 62], 1, 0)),
        (
            "raw_data has 16 bytes or elements where type and shape ask for 1099511627776",
            inline(&[HUGE], 2, 16),
        ),
        ("ask for 12", inline(&[3], 1, 16)),
        ("ask for 4", inline(&[], 1, 0)),
        ("element type 0 is unknown", inline(&[4], 0, 16)),
        ("element type 999 is unknown", inline(&[4], 999, 16)),
        ("element type -1 is unknown", inline(&[4], -1, 16)),
        ("raw_data cannot hold element type 8", inline(&[4], 8, 16)),
        ("int32_data cannot hold element type 1", typed(1, &[1])),
        ("element 1 of int32_data is 256", typed(2, &[255, 256])),
        ("element 0 of int32_data is -129", typed(3, &[-129])),
        ("element 0 of int32_data is 65536", typed(10, &[65536])),
        ("int32_data has 8 bytes or elements where", TensorProto { dims: vec![3], ..typed(6, &[1, 2]) }),
        (
            "string_data has 1 bytes or elements where",
            TensorProto {
                dims: vec![2],
                data_type: Some(8),
                string_data: vec![b"one".to_vec()],
                ..TensorProto::default()
            },
        ),
        ("raw_data and float_data", TensorProto { float_data: vec![1.0], ..inline(&[1], 1, 4) }),
        (
            "segments are not supported",
            TensorProto { segment: Some(Default::default()), ..inline(&[1], 1, 4) },
        ),
    ]);
}

#[test]
fn graphs_that_break_the_rules() {
    let weight = |name: &str| TensorProto { name: Some(name.into()), ..inline(&[1], 1, 4) };
    let body = |nodes| AttributeProto {
        name: Some("body".into()),
        r#type: Some(5),
        g: Some(GraphProto { name: Some("inner".into()), node: nodes, ..GraphProto::default() }),
        ..AttributeProto::default()
    };
    let with_body = |nodes| {
        let mut outer = node_proto("loop", &["x"], &["y"]);
        outer.attribute.push(body(nodes));
        model_proto(vec![outer], vec![])
    };
    let add = node_proto;
    let mut two_inputs = model_proto(vec![add("n", &["x"], &["y"])], vec![]);
    two_inputs.graph.as_mut().unwrap().input.push(value_proto("x"));
    let mut twice = add("n", &["x"], &["y"]);
    twice.attribute =
        vec![AttributeProto { name: Some("a".into()), i: Some(1), ..AttributeProto::default() }; 2];
    let no_graph = ModelProto { graph: None, ..model_proto(vec![], vec![]) };
    let cases = [
        (
            "'w' is used by node 'n' (Add) but nothing defines it",
            model_proto(vec![add("n", &["x", "w"], &["y"])], vec![]),
        ),
        (
            "'a' is used by node 'first' (Add) before node 'second' (Add) defines it",
            model_proto(vec![add("first", &["a"], &["y"]), add("second", &["x"], &["a"])], vec![]),
        ),
        (
            "'b' is used by node 'first' (Add) before node 'second' (Add) defines it",
            model_proto(vec![add("first", &["b"], &["a"]), add("second", &["a"], &["b", "y"])], vec![]),
        ),
        (
            "'y' is used by node 'self' (Add) before node 'self'",
            model_proto(vec![add("self", &["y"], &["y"])], vec![]),
        ),
        (
            "'y' is defined by node 'second' (Add) although it is already an output of node 'first' (Add)",
            model_proto(vec![add("first", &["x"], &["y"]), add("second", &["x"], &["y"])], vec![]),
        ),
        ("already one of its outputs", model_proto(vec![add("n", &["x"], &["y", "y"])], vec![])),
        (
            "'x' is defined by node 'n' (Add) although it is already a graph input",
            model_proto(vec![add("n", &["x"], &["x", "y"])], vec![]),
        ),
        ("already an initializer", model_proto(vec![add("n", &["x"], &["w", "y"])], vec![weight("w")])),
        (
            "two initializers named 'w'",
            model_proto(vec![add("n", &["x"], &["y"])], vec![weight("w"), weight("w")]),
        ),
        ("two inputs named 'x'", two_inputs),
        ("without a name", model_proto(vec![add("n", &["x"], &["y"])], vec![weight("")])),
        ("graph output 'y' of graph 'hostile' is not defined", model_proto(vec![], vec![])),
        ("two attributes named 'a'", model_proto(vec![twice], vec![])),
        ("'later' is used by node 'in' (Add)", {
            let mut proto = with_body(vec![add("in", &["later"], &["z"])]);
            proto.graph.as_mut().unwrap().node.push(add("after", &["x"], &["later"]));
            proto
        }),
        ("accepted", with_body(vec![add("in", &["x"], &["z"])])),
        ("holds no graph", no_graph),
    ];
    for (words, proto) in cases {
        let complaint = complaint(&proto);
        assert!(complaint.contains(words), "{complaint}\ninstead of {words}");
    }
}

#[test]
fn nesting_without_end() {
    let mut graph = GraphProto { name: Some("innermost".into()), ..GraphProto::default() };
    for _ in 0..1000 {
        let mut node = node_proto("n", &[], &[]);
        let attribute = AttributeProto {
            name: Some("body".into()),
            r#type: Some(5),
            g: Some(graph),
            ..Default::default()
        };
        node.attribute.push(attribute);
        graph = GraphProto { node: vec![node], ..GraphProto::default() };
    }
    let complaint = complaint(&ModelProto { graph: Some(graph), ..ModelProto::default() });
    assert!(complaint.contains("recursion limit"), "{complaint}");
}

/// Cut and damaged files. Whether one is accepted depends on the byte; that nothing panics does not.
#[test]
fn truncation_and_damage() {
    let mut tensor = inline(&[4], 1, 16);
    tensor.metadata_props = external(&[("key", "value")]).external_data;
    let whole = tensor_model(tensor).encode_to_vec();
    assert!(read_model_bytes(whole.clone().into(), None).is_ok());
    for end in 0..whole.len() {
        let cut = read_model_bytes(whole[..end].to_vec().into(), None);
        // A cut at the end of a top-level field leaves a complete message; only one with the graph is a model.
        assert!(cut.is_err() || end > whole.len() / 2, "{end} of {}", whole.len());
    }
    for place in 0..whole.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut damaged = whole.clone();
            damaged[place] ^= flip;
            let _ = read_model_bytes(damaged.into(), None);
        }
    }
    for text in ["", "<!DOCTYPE html><html>not found</html>", "version https://git-lfs.github.com/spec/v1\n"]
    {
        assert!(read_model_bytes(text.as_bytes().into(), None).is_err(), "{text}");
    }
}

#[test]
fn unreadable_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path().join("absent.onnx"), folder.path().to_owned()] {
        let complaint = read_model(&path).unwrap_err().to_string();
        assert!(complaint.contains(path.to_str().unwrap()), "{complaint}");
    }
}
