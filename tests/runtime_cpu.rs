//! The runtime on the CPU provider: binding, checking, running and dropping.

mod runtime_support;

use std::{collections::BTreeMap, fs, path::Path};

use runtime_support::{Net, cases, cpu, float, int, noise, relative_error, run, tensor};
use viaduct::{
    runtime::{DeviceKind, Provider, Runtime, RuntimeError, Settings, Stage, StageModel, lower},
    tensor::{HostTensor, TensorFile, Values, as_bytes},
};
use viaduct_export::{
    device::DeviceProfile,
    memory::PENDING_DISPATCHES,
    onnx::{DType, Dim, WriteOptions, model_bytes, read_model, write_model},
    tuning::Tuning,
};

fn matmul() -> Vec<u8> {
    let mut net = Net::new(DType::F32);
    let rows = Dim::Symbol("rows".to_owned());
    net.input("a", DType::F32, &[rows.clone(), Dim::Fixed(3)]).input(
        "bias",
        DType::F32,
        &[rows, Dim::Fixed(2)],
    );
    net.float("w", &[3, 2], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    net.node("MatMul", &["a", "w"], "y", &[]).node("Add", &["y", "bias"], "z", &[]);
    model_bytes(&net.model(&["y", "z"])).unwrap()
}

fn open(runtime: &mut Runtime) -> Stage<'_> {
    runtime
        .open(StageModel {
            name: "toy",
            bytes: matmul(),
            folder: Path::new("."),
            pending_dispatches: PENDING_DISPATCHES,
        })
        .unwrap()
}

#[test]
fn the_device_is_described() {
    let runtime = cpu();
    let device = runtime.device();
    assert_eq!((device.provider, device.kind), (Provider::Cpu, DeviceKind::Cpu));
    assert_eq!(device.ort_version, "1.31.1");
    assert_eq!(device.plugin_version, None);
}

#[test]
fn a_stage_runs_with_bound_and_given_inputs() {
    let mut runtime = cpu();
    let mut stage = open(&mut runtime);
    assert_eq!(stage.inputs()[0].shape, [Dim::Symbol("rows".to_owned()), Dim::Fixed(3)]);
    assert_eq!(stage.nodes().keys().collect::<Vec<_>>(), ["CPUExecutionProvider"]);
    stage.bind("bias", &HostTensor::f32(&[1, 2], vec![10.0, 20.0])).unwrap();
    for step in 0..3 {
        let a = HostTensor::f32(&[1, 3], vec![1.0, 2.0, step as f32]);
        let outputs = stage.run(&[("a", &a)], &["z", "y"]).unwrap();
        let step = step as f32;
        assert_eq!(outputs[0], HostTensor::f32(&[1, 2], vec![11.0 + step, 22.0 + step]));
        assert_eq!(outputs[1], HostTensor::f32(&[1, 2], vec![1.0 + step, 2.0 + step]));
    }
}

#[test]
fn a_stage_keeps_what_is_bound_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bias");
    let mut runtime = cpu();
    let mut stage = open(&mut runtime);
    let a = HostTensor::f32(&[1, 3], vec![1.0, 2.0, 0.0]);
    for round in 0..3 {
        // The caller drops the bound tensor, in memory or in a mapped file, and changes the one of the run.
        let bias = [10.0 * round as f32, 20.0];
        let bound = match round {
            1 => HostTensor::f32(&[1, 2], bias.to_vec()),
            _ => {
                fs::write(&path, as_bytes(&bias)).unwrap();
                let values = Values::mapped(TensorFile::adopt(&path).unwrap(), DType::F32, 2).unwrap();
                HostTensor::new(&[1, 2], values)
            }
        };
        stage.bind("bias", &bound).unwrap();
        drop(bound);
        for first in [1.0, 5.0] {
            let mut given = a.clone();
            let Values::F32(values) = &mut given.values else { unreachable!() };
            values.to_mut()[0] = first;
            let outputs = stage.run(&[("a", &given)], &["z"]).unwrap();
            assert_eq!(outputs[0], HostTensor::f32(&[1, 2], vec![first + bias[0], 2.0 + bias[1]]));
        }
        assert_eq!(path.exists(), round != 1, "a file lives as long as it is bound");
    }
    // After a value that is refused, the input counts as not bound.
    assert!(stage.bind("bias", &HostTensor::f32(&[1, 3], noise(3, 3))).is_err());
    assert!(stage.run(&[("a", &a)], &["z"]).is_err());
    drop(stage);
    assert!(!path.exists());
}

#[test]
fn wrong_inputs_are_named() {
    let mut runtime = cpu();
    let mut stage = open(&mut runtime);
    let a = HostTensor::f32(&[1, 3], noise(1, 3));
    let bias = HostTensor::f32(&[1, 2], noise(2, 2));
    let message = |r: Result<Vec<HostTensor>, RuntimeError>| r.unwrap_err().to_string();
    assert_eq!(message(stage.run(&[("a", &a)], &["y"])), "stage toy: input bias was neither bound nor given");
    assert_eq!(message(stage.run(&[("b", &a)], &["y"])), "stage toy has no input b; it has: a, bias");
    assert_eq!(
        message(stage.run(&[("a", &a), ("bias", &bias)], &["q"])),
        "stage toy has no output q; it has: y, z"
    );
    let wide = HostTensor::f32(&[1, 4], noise(1, 4));
    assert_eq!(
        message(stage.run(&[("a", &wide), ("bias", &bias)], &["y"])),
        "stage toy: tensor a: expected 3 on axis 1, got [1, 4]"
    );
    let two = HostTensor::f32(&[2, 2], noise(2, 4));
    assert_eq!(
        message(stage.run(&[("a", &a), ("bias", &two)], &["y"])),
        "stage toy: tensor bias: expected rows = 1 on axis 0 as in a, got [2, 2]"
    );
    let whole = HostTensor::i64(&[1, 3], vec![1, 2, 3]);
    assert_eq!(
        message(stage.run(&[("a", &whole), ("bias", &bias)], &["y"])),
        "stage toy: tensor a: expected F32, got I64"
    );
}

#[test]
fn a_broken_model_names_its_stage() {
    let error = cpu()
        .open(StageModel {
            name: "toy",
            bytes: vec![1, 2, 3],
            folder: Path::new("."),
            pending_dispatches: PENDING_DISPATCHES,
        })
        .err()
        .unwrap();
    assert!(error.to_string().starts_with("stage toy: the session could not be made"), "{error}");
    assert_eq!(error.exit_code(), 1);
}

/// The CPU provider has few f16 kernels; ONNX Runtime puts casts around the others, the fused attention included.
#[test]
fn every_operator_runs_in_f16_too() {
    let mut runtime = cpu();
    let mut wrong = Vec::new();
    for (case, plain) in cases::all(DType::F16).iter().zip(&cases::all(DType::F32)) {
        let expected = run(&mut runtime, &plain.net.model(&["y"]), &plain.feeds, &["y"]).unwrap();
        let error = match run(&mut runtime, &case.net.model(&["y"]), &case.feeds, &["y"]) {
            Ok(y) => relative_error(&y[0].to_f32(), &expected[0].to_f32()),
            Err(e) => {
                wrong.push(format!("{}: {e}", case.name));
                continue;
            }
        };
        println!("{:46} {error:9.2e}", case.name);
        if error > case.bars[1] {
            wrong.push(format!("{}: {error:e}", case.name));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn attention_stays_fused() {
    let mut runtime = cpu();
    let device = runtime.device().profile();
    let run_attention = |runtime: &mut Runtime, dtype, device: &DeviceProfile| {
        let (net, feeds) = cases::attention(dtype, 80, 4, 32);
        let mut model = net.model(&["y"]);
        let lowered = lower(&mut model, device, &BTreeMap::new(), &[], &Settings::default()).unwrap();
        (lowered.attention[0].chunks, run(runtime, &model, &feeds, &["y"]).unwrap()[0].to_f32())
    };
    let unfit = DeviceProfile { tuning: Tuning::default(), ..device.clone() };
    let (chunks, expected) = run_attention(&mut runtime, DType::F32, &unfit);
    assert_eq!(chunks, Some(1));
    for (dtype, bar) in [(DType::F32, 1e-6), (DType::F16, 2e-3)] {
        let (chunks, y) = run_attention(&mut runtime, dtype, &device);
        assert_eq!(chunks, None);
        let error = relative_error(&y, &expected);
        assert!(error <= bar, "{dtype:?}: {error:e}");
    }
}

/// The number of query rows follows from the recorded shape and the sizes of its symbols.
#[test]
fn the_rows_of_attention_follow_from_recorded_shapes() {
    let mut net = Net::new(DType::F16);
    let joint = [Dim::Fixed(1), Dim::Symbol("joint_seq".to_owned()), Dim::Fixed(64)];
    net.input("q", DType::F16, &joint).input("k", DType::F16, &joint).input("v", DType::F16, &joint);
    net.node("ms.MultiHeadAttention", &["q", "k", "v"], "y", &[("num_heads", int(2))]);
    let mut model = net.model(&["y"]);
    let unfit = DeviceProfile { tuning: Tuning::written(1000), ..cpu().device().profile() };
    let dims = BTreeMap::from([("joint_seq".to_owned(), 32)]);
    // 2 heads x 32 keys x 2 bytes for each of 32 rows, in slices of at most 1000 bytes: 7 rows, so 5 slices.
    let lowered = lower(&mut model.clone(), &unfit, &dims, &[], &Settings::default()).unwrap();
    assert_eq!((lowered.attention[0].chunks, lowered.attention[0].score_bytes), (Some(5), 7 * 2 * 32 * 2));
    let error =
        lower(&mut model, &unfit, &BTreeMap::new(), &[], &Settings::default()).unwrap_err().to_string();
    assert!(error.contains("the number of query rows does not follow"), "{error}");
}

/// Where no shape is recorded, as in graphs of other exporters, the rows follow from what makes q; a mask is sliced, too.
#[test]
fn the_rows_of_masked_attention_follow_from_the_graph() {
    let (mut net, mut feeds) = cases::attention(DType::F32, 6, 2, 8);
    net.node("Neg", &["q"], "nq", &[]).node("Neg", &["k"], "nk", &[]).x("bias", &[1, 1, 6, 6]);
    feeds.push(("bias".to_owned(), HostTensor::f32(&[1, 1, 6, 6], noise(5, 36))));
    net.node("ms.MultiHeadAttention", &["nq", "nk", "v", "", "", "bias"], "z", &[("num_heads", int(2))]);
    let mut model = net.model(&["z"]);
    let expected = run(&mut cpu(), &model, &feeds, &["z"]).unwrap();
    let unfit = DeviceProfile { tuning: Tuning::written(96), ..cpu().device().profile() };
    // 2 heads x 6 keys x 4 bytes for each of 6 rows: 2 rows in 96 bytes.
    let lowered = lower(&mut model, &unfit, &BTreeMap::new(), &[], &Settings::default()).unwrap();
    assert_eq!(lowered.attention.last().unwrap().chunks, Some(3));
    let found = run(&mut cpu(), &model, &feeds, &["z"]).unwrap();
    assert!(relative_error(&found[0].to_f32(), &expected[0].to_f32()) <= 1e-6);
}

/// A head of zeros, of ordinary values and of some whose squares leave f16's range; both forms agree, and only rows enough
/// without a need to save memory are written out.
#[test]
fn norms_of_heads_are_written_out_where_that_is_faster() {
    const ROWS: usize = 6;
    let device = DeviceProfile {
        tuning: Tuning { written_head_norms: Some(ROWS), ..Tuning::fused() },
        ..cpu().device().profile()
    };
    for (dtype, bar) in [(DType::F32, 1e-6), (DType::F16, 2e-3)] {
        let mut net = Net::new(dtype);
        net.x("x", &[1, ROWS, 3, 16]).float("w", &[16], &noise(1, 16));
        net.node("RMSNormalization", &["x", "w"], "y", &[("axis", int(-1)), ("epsilon", float(1e-6))]);
        let factors = [0.0, 1.0, 3000.0];
        let x = noise(2, ROWS * 48).into_iter().enumerate().map(|(i, x)| x * factors[i / 16 % 3]);
        let x = tensor(dtype, &[1, ROWS, 3, 16], &x.collect::<Vec<_>>());
        let feeds = vec![("x".to_owned(), x)];
        let model = net.model(&["y"]);
        let expected = run(&mut cpu(), &model, &feeds, &["y"]).unwrap()[0].to_f32();
        let operators = |device: &DeviceProfile, settings: &Settings| {
            let mut lowered = model.clone();
            lower(&mut lowered, device, &BTreeMap::new(), &[], settings).unwrap();
            let found = run(&mut cpu(), &lowered, &feeds, &["y"]).unwrap()[0].to_f32();
            assert!(relative_error(&found, &expected) <= bar, "{dtype:?}");
            lowered.graph.nodes().any(|(_, node)| node.is("RMSNormalization"))
        };
        assert!(!operators(&device, &Settings::default()));
        assert!(operators(&device, &Settings { halvings: 1, ..Settings::default() }));
        let tuning = Tuning { written_head_norms: Some(ROWS + 1), ..Tuning::fused() };
        assert!(operators(&DeviceProfile { tuning, ..device.clone() }, &Settings::default()));
    }
}

/// Weights in a file beside the model, and behind a link as in a Hub cache:
/// https://github.com/microsoft/onnxruntime/issues/27353
#[test]
fn external_weights_may_be_behind_links() {
    let weight = noise(1, 64 * 64);
    let mut net = Net::new(DType::F32);
    net.x("x", &[1, 64]).float("w", &[64, 64], &weight).node("MatMul", &["x", "w"], "y", &[]);
    let feeds = vec![("x".to_owned(), HostTensor::f32(&[1, 64], noise(2, 64)))];
    let expected = run(&mut cpu(), &net.model(&["y"]), &feeds, &["y"]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let real = folder.path().join("blobs");
    let linked = folder.path().join("snapshot");
    std::fs::create_dir_all(&real).unwrap();
    std::fs::create_dir_all(&linked).unwrap();
    write_model(&net.model(&["y"]), &real.join("m.onnx"), &WriteOptions::default()).unwrap();
    for entry in std::fs::read_dir(&real).unwrap() {
        let name = entry.unwrap().file_name();
        std::os::unix::fs::symlink(Path::new("../blobs").join(&name), linked.join(&name)).unwrap();
    }
    for folder in [&real, &linked] {
        let model = read_model(&folder.join("m.onnx")).unwrap();
        let mut runtime = cpu();
        let mut stage = runtime.open_model("toy", model, PENDING_DISPATCHES).unwrap();
        assert_eq!(stage.run(&[("x", &feeds[0].1)], &["y"]).unwrap(), expected);
    }
}

/// A kernel that is larger than its picture.
#[test]
fn outputs_of_negative_size_are_an_error() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[1, 1, 2, 2]).float("w", &[1, 1, 6, 6], &[1.0; 36]).node("Conv", &["x", "w"], "y", &[]);
    let feeds = vec![("x".to_owned(), HostTensor::f32(&[1, 1, 2, 2], vec![1.0; 4]))];
    let error = run(&mut cpu(), &net.model(&["y"]), &feeds, &["y"]).unwrap_err().to_string();
    assert!(error.contains("negative size"), "{error}");
}
