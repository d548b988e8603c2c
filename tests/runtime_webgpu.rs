//! The WebGPU provider against the CPU provider, on whatever Vulkan adapter there is (llvmpipe on CI).

mod runtime_support;

use std::time::Instant;

use runtime_support::{cases, cpu, relative_error, run, webgpu};
use viaduct::runtime::{Settings, lower};
use viaduct_export::{device::DeviceProfile, onnx::DType, tuning::Tuning};

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
