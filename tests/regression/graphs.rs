//! Exports and graph files.

use std::{
    fs,
    io::{Read, Seek, SeekFrom, Write},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
};

use prost::Message;
use serde_json::Value;
use viaduct::{
    runtime::{Optimisation, RuntimeError},
    tensor::HostTensor,
};
use viaduct_export::{
    memory::PENDING_DISPATCHES,
    onnx::{
        Builder, Bytes, DType, MappedFile, Model, Tensor, ValueType, WriteOptions, model_bytes,
        proto::TensorProto, read_model, write_model,
    },
    passes::Facts,
};

use crate::{
    DRAW,
    bad::{Good, SET, put, snapshot, viaduct},
    count, feed, fixed,
    onnx_support::{assert_others_accept, external, sparse_inline_model, tensor_model},
    report, rewritten,
    runtime_support::{Feeds, Net, cpu, int, ints, noise, relative_error, run, string, tensor, webgpu},
    succeed, told,
};

const MIB: u64 = 1 << 20;

/// Operators that the conversion to f16 breaks: Resize with an absent and with an empty region, a Cast to float, Range,
/// and an output that a node in f32 makes.
fn mixed() -> (Model, Feeds) {
    let mut net = Net::new(DType::F32);
    net.x("x", &[1, 2, 3, 3]).input("i", DType::I64, &[]);
    net.constant("scales", Tensor::from_f32(&[4], &[1.0, 1.0, 2.0, 2.0]));
    net.constant("region", Tensor::from_f32(&[0], &[]));
    let nearest = [
        ("mode", string("nearest")),
        ("coordinate_transformation_mode", string("asymmetric")),
        ("nearest_mode", string("floor")),
    ];
    net.node("Resize", &["x", "", "scales"], "absent", &nearest);
    net.node("Resize", &["x", "region", "scales"], "empty", &nearest);
    net.node("Add", &["absent", "empty"], "both", &[]);
    net.node("Cast", &["i"], "float", &[("to", int(1))]).node("Mul", &["both", "float"], "scaled", &[]);
    for (name, value) in [("from", 0.0), ("to", 6.0), ("by", 1.0)] {
        net.float(name, &[], &[value]);
    }
    net.node("Range", &["from", "to", "by"], "columns", &[]).node("Add", &["scaled", "columns"], "y", &[]);
    net.node("Relu", &["y"], "positive", &[]).node("Sqrt", &["positive"], "root", &[]);
    let mut feeds = feed("x", tensor(DType::F32, &[1, 2, 3, 3], &noise(6, 18)));
    feeds.push(("i".to_owned(), HostTensor::i64(&[], vec![3])));
    let mut model = net.model(&["y", "root"]);
    // Other readers want to know the shapes of outputs.
    for name in ["y", "root"] {
        let (id, shape) = (model.graph.find(name).unwrap(), Some(fixed([1, 2, 6, 6]).to_vec()));
        model.graph[id].ty = Some(ValueType::Tensor { dtype: DType::F32, shape });
    }
    (model, feeds)
}

/// Converting to f16 breaks graphs: <https://github.com/microsoft/onnxruntime/issues/14827>,
/// <https://github.com/microsoft/onnxconverter-common/issues/320>,
/// <https://github.com/microsoft/onnxconverter-common/issues/208>, <https://github.com/pytorch/pytorch/issues/148041>.
#[test]
fn bug_19_webgpu_conversion_to_f16() {
    let (model, feeds) = mixed();
    let halved = rewritten(&model, &["to_f16"]);
    let (graph, facts) = (&halved.graph, Facts::of(&halved));
    let dtype = |name: &str| facts.dtype(graph.find(name).unwrap()).unwrap();
    for (name, expected) in [
        ("scales", DType::F32),
        ("region", DType::F32),
        ("columns", DType::F32),
        ("y", DType::F32),
        ("root", DType::F32),
        ("absent", DType::F16),
        ("both", DType::F16),
        ("float", DType::F16),
    ] {
        assert_eq!(dtype(name), expected, "{name}");
    }
    let mut made: Vec<_> = graph.inputs.clone();
    for (_, node) in graph.nodes() {
        let ready = |id| made.contains(id) || graph[*id].constant.is_some();
        assert!(node.inputs.iter().flatten().all(ready), "{} comes too early", node.name);
        made.extend(node.outputs.iter().flatten());
        if node.op_type == "Resize" && node.outputs == [graph.find("absent")] {
            assert_eq!(node.inputs[1], None, "the absent region stays absent");
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.onnx");
    write_model(&halved, &path, &WriteOptions::default()).unwrap();
    assert_others_accept(&path);

    let outputs = ["y", "root"];
    let expected = run(&mut cpu(), &model, &feeds, &outputs).unwrap();
    let near = |found: &[HostTensor]| {
        let pairs = found.iter().zip(&expected);
        pairs.map(|(y, expected)| relative_error(&y.to_f32(), &expected.to_f32())).fold(0.0, f32::max)
    };
    assert!(near(&run(&mut cpu(), &halved, &feeds, &outputs).unwrap()) < 4e-3);
    // Scales in f16 are the fault of the report, and do not load.
    let mut broken = halved.clone();
    let scales = broken.graph.find("scales").unwrap();
    broken.graph[scales].constant = Some(Tensor::from_f16(&[4], &[1.0, 1.0, 2.0, 2.0]));
    assert!(matches!(run(&mut cpu(), &broken, &feeds, &outputs), Err(RuntimeError::Open { .. })));
    let Some(mut gpu) = webgpu() else { return };
    let stage = gpu.runtime.open_for_inspection("mixed", halved, PENDING_DISPATCHES, Optimisation::All);
    let inputs: Vec<_> = feeds.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    assert!(near(&stage.unwrap().run(&inputs, &outputs).unwrap()) < 4e-3, "on WebGPU");
}

/// The most memory that a command had, pages of mapped files included, in bytes; it must succeed.
fn peak_of(directory: &Path, arguments: &str) -> (String, u64) {
    let mut command = viaduct(directory, arguments);
    #[expect(clippy::zombie_processes, reason = "the call that tells its memory waits for it")]
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
    let (mut result, pid) = (String::new(), child.id());
    child.stdout.take().unwrap().read_to_string(&mut result).unwrap();
    // SAFETY: all zeros are a valid value of the C structure, which the call fills; the child is ours, and nobody else
    // waits for it.
    let (status, usage) = unsafe {
        let (mut status, mut usage) = (0, std::mem::zeroed::<libc::rusage>());
        assert_eq!(libc::wait4(pid as i32, &mut status, 0, &mut usage), pid as i32);
        (status, usage)
    };
    assert_eq!(status, 0, "{arguments}");
    (result, usage.ru_maxrss as u64 * 1024)
}

/// Models of more than 2 GiB cannot be checked, planned or run: <https://github.com/onnx/onnx/issues/3275>,
/// <https://github.com/onnx/onnx/issues/5949>, <https://github.com/onnx/onnx/issues/6556>. The weights are holes in
/// sparse files. One large tensor, many, and one inside the graph file.
#[test]
fn bug_20_more_than_two_gib() {
    const LARGE: u64 = 2_252 * MIB;
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::File::create(path("w.data")).unwrap().set_len(3000 * MIB).unwrap();
    let one = TensorProto {
        dims: vec![LARGE as i64 / 4],
        ..external(&[("location", "w.data"), ("length", &LARGE.to_string())])
    };
    fs::write(path("one.onnx"), tensor_model(one).encode_to_vec()).unwrap();
    let mut many = tensor_model(TensorProto {
        dims: vec![1],
        raw_data: Some(vec![0; 4].into()),
        data_type: Some(1),
        ..TensorProto::default()
    });
    many.graph.as_mut().unwrap().initializer.extend((0..3000).map(|i| TensorProto {
        name: Some(format!("w{i}")),
        dims: vec![MIB as i64 / 4],
        ..external(&[
            ("location", "w.data"),
            ("offset", &(i * MIB).to_string()),
            ("length", &MIB.to_string()),
        ])
    }));
    fs::write(path("many.onnx"), many.encode_to_vec()).unwrap();
    let inline = (1 << 31) - 1000;
    sparse_inline_model(&path("inline.onnx"), inline);
    for (name, bytes) in [("one", LARGE), ("many", 3000 * MIB + 4), ("inline", inline)] {
        let (report, peak) = peak_of(directory.path(), &format!("report {name}.onnx --device cpu --json"));
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["stages"][0]["weights_disk"], bytes, "{name}");
        assert!(peak < 128 * MIB, "{name}: {} MiB", peak / MIB);
        let model = rewritten(
            &read_model(&path(&format!("{name}.onnx"))).unwrap(),
            &["fold_constants", "eliminate_identity"],
        );
        assert!(model_bytes(&model).unwrap().len() < 1 << 20, "{name}: no weight in the message");
    }
}

/// The last row of a table that begins beyond 2 GiB is read where it is.
#[test]
fn bug_20_weights_beyond_two_gib_are_used() {
    const ROWS: u64 = 2_304;
    let directory = tempfile::tempdir().unwrap();
    let mut data = fs::File::create(directory.path().join("w.data")).unwrap();
    data.set_len(ROWS * MIB).unwrap();
    data.seek(SeekFrom::Start((ROWS - 1) * MIB)).unwrap();
    data.write_all(&7f32.to_le_bytes()).unwrap();
    drop(data);
    let mut b = Builder::new("table");
    let rows = b.input("rows", DType::I64, &fixed([2]));
    let table = b.input("w", DType::F32, &fixed([ROWS as usize, 1 << 18]));
    let y = b.op("Gather", &[table, rows], &[]);
    let y = b.slice(y, 1, 0, 1);
    let y = b.cast(y, DType::F32);
    b.output(y, "y", &fixed([2, 1]));
    let mut model = b.finish();
    let graph = &mut model.graph;
    graph.inputs.retain(|input| *input != table);
    let file = MappedFile::open(&directory.path().join("w.data")).unwrap();
    let bytes = Bytes::Mapped { file: Arc::new(file), range: 0..(ROWS * MIB) as usize };
    graph[table].constant = Some(Tensor { dtype: DType::F32, shape: vec![ROWS as usize, 1 << 18], bytes });
    model.folder = Some(directory.path().to_owned());
    let mut runtime = cpu();
    let mut stage = runtime.open_model("table", model, PENDING_DISPATCHES).unwrap();
    let y = stage.run(&[("rows", &HostTensor::i64(&[2], vec![0, ROWS as i64 - 1]))], &["y"]).unwrap();
    assert_eq!(y[0].to_f32(), [0.0, 7.0]);
}

/// Lays a folder out as a Hub cache does: every file is a link into `blobs`.
fn hub_cache(folder: &Path, cache: &Path) -> PathBuf {
    let snapshot_folder = cache.join("snapshots/0123abcd");
    fs::create_dir_all(cache.join("blobs")).unwrap();
    for (number, path) in snapshot(folder).into_keys().filter(|path| !folder.join(path).is_dir()).enumerate()
    {
        let blob = format!("blobs/{number:064x}");
        fs::copy(folder.join(&path), cache.join(&blob)).unwrap();
        let link = snapshot_folder.join(&path);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        let up = "../".repeat(1 + path.components().count());
        symlink(format!("{up}{blob}"), link).unwrap();
    }
    snapshot_folder
}

/// Links of a download cache are refused: <https://github.com/microsoft/onnxruntime/issues/27353>.
#[test]
fn bug_21_hub_cache_links() {
    let good = Good::checkpoint().copy();
    let directory = good.path();
    hub_cache(&directory.join("ck"), &directory.join("hub"));
    fs::remove_dir_all(directory.join("ck")).unwrap();
    succeed(directory, &format!("export hub/snapshots/0123abcd -o b --profile q8 {SET}"));
    succeed(directory, DRAW);
    hub_cache(&directory.join("b"), &directory.join("cached"));
    fs::remove_dir_all(directory.join("b")).unwrap();
    succeed(directory, "inspect cached/snapshots/0123abcd --hashes");
    succeed(
        directory,
        &DRAW.replace("-b b", "-b cached/snapshots/0123abcd").replace("out.png", "linked.png"),
    );
    let picture = |name: &str| fs::read(directory.join(name)).unwrap();
    assert_eq!(picture("out.png"), picture("linked.png"));
}

/// A hostile location of external data: <https://github.com/onnx/onnx/issues/3991>. What it leads to exists.
#[test]
fn bug_21_hostile_locations() {
    let directory = tempfile::tempdir().unwrap();
    let inside = directory.path().join("inside");
    fs::create_dir(&inside).unwrap();
    for path in [directory.path().join("w.data"), inside.join("w.data")] {
        put(&path, [0; 16]);
    }
    let absolute = directory.path().join("w.data").to_str().unwrap().to_owned();
    let bisect = "bisect m.onnx --oracle w.data --ep cpu --out found";
    let all = ["../w.data", &absolute, "w.data\0", "..\\w.data", "./../w.data", "a/../../w.data"];
    for location in all {
        put(&inside.join("m.onnx"), tensor_model(external(&[("location", location)])).encode_to_vec());
        for command in ["rewrite m.onnx -o out.onnx --passes lean", bisect, "report m.onnx --device cpu"] {
            let (_, complaint) = told(&inside, command, 1);
            assert!(complaint.contains("initializer 'w'"), "{command}, {location:?}: {complaint}");
        }
        assert!(!inside.join("out.onnx").exists());
    }
    put(&inside.join("m.onnx"), tensor_model(external(&[("location", "w.data")])).encode_to_vec());
    told(&inside, "rewrite m.onnx -o out.onnx --passes lean", 0);
}

/// Shape inference stops at operators of ONNX Runtime's own: <https://github.com/microsoft/onnxruntime/issues/21194>,
/// <https://github.com/microsoft/onnxruntime/issues/10484>. Behind a quantised layer, a shape that the graph computes and
/// an attention, every tensor has its bytes; what is unknown is listed, and its bytes are in no sum.
#[test]
fn bug_22_shapes_behind_matmulnbits() {
    let model = |between: &str| {
        let mut net = Net::new(DType::F32);
        net.x("x", &[1, 40, 64]);
        net.constant("codes", Tensor::inline(DType::U8, &[192, 2, 16], vec![0x88; 192 * 32]));
        net.float("scales", &[192, 2], &[1.0; 384]);
        let sizes =
            [("K", 64), ("N", 192), ("bits", 4), ("block_size", 32)].map(|(name, size)| (name, int(size)));
        net.node("ms.MatMulNBits", &["x", "codes", "scales"], "qkv", &sizes);
        net.node(between, &["qkv"], "seen", &[]);
        net.node("Shape", &["seen"], "shape", &[])
            .ints("0", &[0])
            .ints("1", &[1])
            .ints("three", &[3])
            .ints("rest", &[-1]);
        net.node("Gather", &["shape", "0"], "batch", &[]).node("Gather", &["shape", "1"], "rows", &[]);
        net.node("Concat", &["batch", "rows", "three", "rest"], "to", &[("axis", int(0))]);
        net.node("Reshape", &["seen", "to"], "heads", &[]);
        net.node("Split", &["heads"], "q4 k4 v4", &[("axis", int(2)), ("num_outputs", int(3))]);
        net.ints("axis", &[2]);
        for name in ["q", "k", "v"] {
            net.node("Squeeze", &[&format!("{name}4"), "axis"], name, &[]);
        }
        net.node("ms.MultiHeadAttention", &["q", "k", "v"], "y", &[("num_heads", int(4))]);
        net.model(&["y"])
    };
    let known = report(&model("Relu"), "llvmpipe");
    assert_eq!(known["chain"]["complete"], true, "{}", known["stages"][0]["unknown"]);
    assert_eq!(known["stages"][0]["unknown"], serde_json::json!({}));
    let unknown = report(&model("ms.Frobnicate"), "llvmpipe");
    assert_eq!(unknown["chain"]["complete"], false);
    assert_eq!(unknown["stages"][0]["unknown"]["Frobnicate"], 1, "{}", unknown["stages"][0]["unknown"]);
}

/// All forms in which exporters write a linear layer are quantised, and a shared weight is stored once:
/// <https://github.com/pytorch/pytorch/issues/138195>, <https://github.com/pytorch/pytorch/issues/151693>. Complex numbers
/// (<https://github.com/pytorch/pytorch/issues/126972>) are in `tests/passes/fuse_rope.rs`.
#[test]
fn bug_24_every_linear_layer_is_quantised() {
    const K: usize = 64;
    const N: usize = 96;
    let mut net = Net::new(DType::F32);
    net.x("x", &[5, K]).float("shared", &[K, N], &noise(1, K * N)).float(
        "straight",
        &[N, K],
        &noise(2, K * N),
    );
    net.float("bias", &[N], &noise(3, N)).float("other", &[N, K], &noise(4, K * N));
    net.node("MatMul", &["x", "shared"], "y1", &[]);
    net.node("Transpose", &["straight"], "turned", &[("perm", ints(&[1, 0]))]);
    net.node("MatMul", &["x", "turned"], "y2", &[]);
    net.node("Gemm", &["x", "other", "bias"], "y3", &[("transB", int(1))]);
    net.node("Gemm", &["x", "shared"], "y4", &[]);
    let outputs = ["y1", "y2", "y3", "y4"];
    let model = net.model(&outputs);
    let directory = tempfile::tempdir().unwrap();
    put(&directory.path().join("m.onnx"), model_bytes(&model).unwrap());
    let rewrite = |name: &str, options: &str| -> Value {
        let arguments = format!("rewrite m.onnx -o {name}.onnx --passes q8 --json {options}");
        let report: Value = serde_json::from_str(&told(directory.path(), &arguments, 0).0).unwrap();
        let is_linear = |pass: &&Value| pass["pass"].as_str().unwrap().starts_with("quantize_matmul");
        report["passes"].as_array().unwrap().iter().find(is_linear).unwrap().clone()
    };
    assert_eq!(rewrite("all", "")["applied"], 4);
    let all = read_model(&directory.path().join("all.onnx")).unwrap();
    assert_eq!((count(&all, "MatMulNBits"), all.graph.nodes().count()), (4, 4));
    let codes =
        all.graph.values().filter(|(_, value)| value.constant.as_ref().is_some_and(|t| t.dtype == DType::U8));
    assert_eq!(codes.count(), 3, "three weights, one of them shared");
    // One that is left out is missed.
    assert_eq!(rewrite("some", "--exclude ^other$")["applied"], 3);
    let feeds = feed("x", tensor(DType::F32, &[5, K], &noise(9, 5 * K)));
    let expected = run(&mut cpu(), &model, &feeds, &outputs).unwrap();
    let mut runtime = cpu();
    let mut stage = runtime.open_model("all", all, PENDING_DISPATCHES).unwrap();
    let found = stage.run(&[("x", &feeds[0].1)], &outputs).unwrap();
    for (y, expected) in found.iter().zip(&expected) {
        assert!(relative_error(&y.to_f32(), &expected.to_f32()) < 2e-2);
    }
}
