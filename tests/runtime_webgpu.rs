//! The WebGPU provider against the CPU provider, on whatever Vulkan adapter there is (llvmpipe on CI).

mod runtime_support;

use std::{path::Path, time::Instant};

use runtime_support::{Net, cases, cpu, float, int, ints, noise, relative_error, run, webgpu};
use viaduct::{
    runtime::{RuntimeError, Settings, StageModel, lower},
    tensor::HostTensor,
    tune::self_tests,
};
use viaduct_export::{
    device::DeviceProfile,
    memory::PENDING_DISPATCHES,
    onnx::{DType, Tensor, model_bytes},
    tuning::Tuning,
};

/// Every operator of our bundles runs on the device, and agrees with the CPU provider in f32.
#[test]
fn webgpu_runs_every_operator() {
    let Some(mut gpu) = webgpu() else { return };
    let mut cpu = cpu();
    let mut wrong = Vec::new();
    let mut dtypes = vec![DType::F32, DType::F16];
    dtypes.truncate(if gpu.runtime.device().f16 { 2 } else { 1 });
    for (i, dtype) in dtypes.into_iter().enumerate() {
        for (case, plain) in cases::all(dtype).iter().zip(&cases::all(DType::F32)) {
            let expected = run(&mut cpu, &plain.net.model(&["y"]), &plain.feeds, &["y"]);
            let expected =
                expected.unwrap_or_else(|e| panic!("{} on the CPU: {e}", plain.name)).remove(0).to_f32();
            let start = Instant::now();
            let outcome = match run(&mut gpu.runtime, &case.net.model(&["y"]), &case.feeds, &["y"]) {
                Ok(y) => Ok(relative_error(&y[0].to_f32(), &expected)),
                Err(e) => Err(e.to_string()),
            };
            let text = outcome.as_ref().map_or_else(String::clone, |error| format!("{error:9.2e}"));
            let line = format!("{dtype:?} {:46} {text} {:6.2} s", case.name, start.elapsed().as_secs_f32());
            println!("{line}");
            if !outcome.is_ok_and(|error| error <= case.bars[i]) {
                wrong.push(line);
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// https://github.com/pykeio/ort/issues/349 and peteonrails/voxtype#684: nodes that fall back to the CPU in silence.
/// Sin of opset 22 has no WebGPU kernel in the pinned version.
#[test]
fn webgpu_refuses_nodes_on_the_cpu() {
    let Some(mut gpu) = webgpu() else { return };
    let mut net = Net::new(DType::F32);
    net.x("x", &[4]).node("Sin", &["x"], "y", &[]);
    let bytes = model_bytes(&net.model(&["y"])).unwrap();
    let error = gpu
        .runtime
        .open(StageModel {
            name: "toy",
            bytes,
            folder: Path::new("."),
            pending_dispatches: PENDING_DISPATCHES,
        })
        .err()
        .unwrap();
    assert!(matches!(&error, RuntimeError::CpuNodes { nodes, .. } if nodes == &["Sin Sin_y"]), "{error}");
    assert_eq!(error.exit_code(), 6);
}

#[test]
fn webgpu_lowered_attention_agrees_with_the_fused_one() {
    let Some(mut gpu) = webgpu() else { return };
    let (plain, plain_feeds) = cases::attention(DType::F32, 80, 4, 32);
    let expected = run(&mut cpu(), &plain.model(&["y"]), &plain_feeds, &["y"]).unwrap()[0].to_f32();
    for (dtype, bar) in [(DType::F32, 1e-6), (DType::F16, 3e-3)] {
        let (net, feeds) = cases::attention(dtype, 80, 4, 32);
        // 80 rows of scores for 4 heads, whole; in 4 slices; and in 10, which takes a tree of two levels.
        let bytes = 80 * 80 * 4 * if dtype == DType::F16 { 2 } else { 4 };
        for (limit, chunks) in [(u64::MAX, 1), (bytes / 4, 4), (bytes / 10, 10)] {
            let mut model = net.model(&["y"]);
            let device = DeviceProfile { tuning: Tuning::written(limit), ..gpu.runtime.device().profile() };
            let lowered = lower(&mut model, &device, &Default::default(), &[], &Settings::default()).unwrap();
            assert_eq!(lowered.attention[0].chunks, Some(chunks));
            let start = Instant::now();
            let y = run(&mut gpu.runtime, &model, &feeds, &["y"]).unwrap();
            let error = relative_error(&y[0].to_f32(), &expected);
            println!(
                "{dtype:?} attention in {chunks} slices: {error:.2e} {:.2} s",
                start.elapsed().as_secs_f32()
            );
            assert!(error <= bar, "{dtype:?} in {chunks} slices: {error:e}");
        }
    }
}

/// A software adapter is never asked about fused attention, because the answer takes it minutes; any other must give one.
#[test]
fn webgpu_self_tests_answer() {
    let Some(mut gpu) = webgpu() else { return };
    let software = gpu.runtime.device().kind == viaduct::runtime::DeviceKind::Software;
    let start = Instant::now();
    let tests = self_tests(&mut gpu.runtime).unwrap();
    println!("{tests:?} after {:.2} s", start.elapsed().as_secs_f32());
    for test in tests {
        let fused = test.name.starts_with("fused attention");
        assert_eq!(test.error.is_none(), software && fused, "{test:?}");
        assert!(!(software && fused && test.passed), "{test:?}");
        assert!(fused || test.passed || test.name.starts_with("large sums"), "{test:?}");
    }
}

/// Inner values can be looked at, which is how `verify` compares every boundary.
#[test]
fn webgpu_exposes_inner_values() {
    let Some(mut gpu) = webgpu() else { return };
    let (mut net, feeds) = cases::attention(DType::F32, 8, 1, 8);
    net.node("Neg", &["y"], "z", &[]);
    let mut model = net.model(&["z"]);
    let y = model.graph.find("y").unwrap();
    model.graph[y].ty = model.graph[model.graph.find("q").unwrap()].ty.clone();
    let device = gpu.runtime.device().profile();
    let lowered = lower(&mut model, &device, &Default::default(), &["y"], &Settings::default()).unwrap();
    assert_eq!(lowered.exposed, ["y"]);
    let values = run(&mut gpu.runtime, &model, &feeds, &["y", "z"]).unwrap();
    assert!(values[0].to_f32().iter().zip(values[1].to_f32()).all(|(y, z)| *y == -z));
    let unknown =
        lower(&mut model, &device, &Default::default(), &["nowhere"], &Settings::default()).unwrap_err();
    assert_eq!(unknown.to_string(), "the graph has no value nowhere to expose");
}

/// Resident bytes of this process.
fn resident() -> i64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<i64>().unwrap() * 4096
}

/// https://github.com/microsoft/onnxruntime/pull/27634: after one session is released the next finds its device gone.
#[test]
fn webgpu_sessions_come_and_go() {
    let Some(mut gpu) = webgpu() else { return };
    let weights = noise(1, 1024 * 1024);
    let nets = ["MatMul", "Add"].map(|op| {
        let mut net = Net::new(DType::F32);
        net.x("x", &[1024, 1024]).float("w", &[1024, 1024], &weights).node(op, &["x", "w"], "y", &[]);
        model_bytes(&net.model(&["y"])).unwrap()
    });
    let x = HostTensor::f32(&[1024, 1024], noise(2, 1024 * 1024));
    let (mut first, mut after): (Vec<Option<HostTensor>>, Vec<i64>) = (vec![None, None], Vec::new());
    for round in 0..10 {
        let start = Instant::now();
        for (bytes, first) in nets.iter().zip(&mut first) {
            let model = StageModel {
                name: "toy",
                bytes: bytes.clone(),
                folder: Path::new("."),
                pending_dispatches: PENDING_DISPATCHES,
            };
            let mut stage = gpu.runtime.open(model).unwrap();
            stage.bind("x", &x).unwrap();
            for _ in 0..2 {
                let y = stage.run(&[], &["y"]).unwrap().remove(0);
                assert_eq!(&y, first.get_or_insert_with(|| y.clone()));
            }
        }
        after.push(resident());
        println!("round {round}: {:.2} s, {} MiB", start.elapsed().as_secs_f32(), after[round] >> 20);
    }
    assert!(after[9] - after[2] < 64 << 20, "{after:?}");
}

/// https://github.com/microsoft/onnxruntime/pull/25177: every operand of a Concat takes a storage buffer.
/// Bundles join through trees; this records what the pinned version does with more operands than that.
#[test]
fn webgpu_concat_of_many() {
    let Some(mut gpu) = webgpu() else { return };
    for count in [8, 16, 33] {
        let mut net = Net::new(DType::F32);
        let names: Vec<String> = (0..count).map(|i| format!("x{i}")).collect();
        let mut feeds = Vec::new();
        for (i, name) in names.iter().enumerate() {
            net.x(name, &[1, 4]);
            feeds.push((name.clone(), HostTensor::f32(&[1, 4], noise(i as u64, 4))));
        }
        net.node("Concat", &names.iter().map(String::as_str).collect::<Vec<_>>(), "y", &[("axis", int(0))]);
        let expected: Vec<f32> = feeds.iter().flat_map(|f| f.1.to_f32()).collect();
        match run(&mut gpu.runtime, &net.model(&["y"]), &feeds, &["y"]) {
            Ok(y) => assert_eq!(y[0].to_f32(), expected, "{count} operands"),
            Err(e) => {
                println!("{count} operands: {e}");
                assert!(count > 8, "{e}");
            }
        }
    }
}

/// https://github.com/microsoft/onnxruntime/issues/28536, /pull/23696, /pull/21687: outputs that take more than 65535
/// workgroups on one axis are corrupted.
#[test]
fn webgpu_large_dispatches() {
    let Some(mut gpu) = webgpu() else { return };
    let mut nets: Vec<(&str, Net, Vec<usize>)> = Vec::new();
    let mut net = Net::new(DType::F32);
    net.x("x", &[1, 3, 1536, 1536]).node("Neg", &["x"], "y", &[]);
    nets.push(("Neg", net, vec![1, 3, 1536, 1536]));
    let mut net = Net::new(DType::F32);
    net.x("x", &[70_000, 8]).node("Softmax", &["x"], "y", &[("axis", int(-1))]);
    nets.push(("Softmax of 70000 rows", net, vec![70_000, 8]));
    let mut net = Net::new(DType::F32);
    net.x("x", &[70_000, 8]).float("s", &[8], &noise(5, 8));
    net.node("RMSNormalization", &["x", "s"], "y", &[("epsilon", float(1e-6))]);
    nets.push(("RMSNormalization of 70000 rows", net, vec![70_000, 8]));
    let mut net = Net::new(DType::F32);
    net.x("x", &[1, 3, 1536, 1536]).constant("w", Tensor::from_f32(&[2, 3, 3, 3], &noise(4, 54)));
    net.node("Conv", &["x", "w"], "y", &[("pads", ints(&[1, 1, 1, 1]))]);
    nets.push(("Conv", net, vec![1, 3, 1536, 1536]));
    let mut cpu = cpu();
    for (name, net, shape) in nets {
        let x = HostTensor::f32(&shape, noise(3, shape.iter().product()));
        let feeds = vec![("x".to_owned(), x)];
        let model = net.model(&["y"]);
        let expected = run(&mut cpu, &model, &feeds, &["y"]).unwrap()[0].to_f32();
        let start = Instant::now();
        let y = run(&mut gpu.runtime, &model, &feeds, &["y"]).unwrap();
        let error = relative_error(&y[0].to_f32(), &expected);
        println!("{name}: {error:.2e} {:.2} s", start.elapsed().as_secs_f32());
        assert!(error < 2e-6, "{name}: {error:e}");
    }
}

/// https://github.com/kvark/blade/issues/356: long chains in one submission gave zeros on some drivers.
#[test]
fn webgpu_long_chains() {
    let Some(mut gpu) = webgpu() else { return };
    let mut net = Net::new(DType::F32);
    net.x("v0", &[256]).x("step", &[256]);
    for i in 0..500 {
        net.node("Add", &[&format!("v{i}"), "step"], &format!("v{}", i + 1), &[]);
    }
    let ones = HostTensor::f32(&[256], vec![1.0; 256]);
    let feeds = vec![("v0".to_owned(), ones.clone()), ("step".to_owned(), ones)];
    let y = run(&mut gpu.runtime, &net.model(&["v500"]), &feeds, &["v500"]).unwrap();
    assert_eq!(y[0].to_f32(), vec![501.0; 256]);
}

/// https://github.com/microsoft/onnxruntime/issues/25195: a tensor larger than a binding of the adapter may be. The
/// plan refuses such graphs; this holds that one that slips through gives right numbers or an error.
#[test]
fn webgpu_tensors_larger_than_a_binding() {
    let Some(mut gpu) = webgpu() else { return };
    let limit = gpu.runtime.device().adapter.as_ref().unwrap().max_storage_buffer_range;
    let rows = (limit >> 12) as usize + 512;
    if limit > 1 << 30 {
        return;
    }
    let mut net = Net::new(DType::F32);
    net.x("x", &[rows, 1024]).node("Neg", &["x"], "y", &[]);
    let x = HostTensor::f32(&[rows, 1024], (0..rows * 1024).map(|i| (i % 4096) as f32).collect());
    let feeds = vec![("x".to_owned(), x)];
    match run(&mut gpu.runtime, &net.model(&["y"]), &feeds, &["y"]) {
        Ok(y) => assert!(y[0].to_f32().iter().enumerate().all(|(i, v)| *v == -((i % 4096) as f32))),
        Err(e) => println!("{} MiB: {e}", rows >> 8),
    }
}
