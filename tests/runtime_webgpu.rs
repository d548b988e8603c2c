//! The WebGPU provider against the CPU provider, on whatever Vulkan adapter there is (llvmpipe on CI).

mod runtime_support;

use runtime_support::{cases, cpu, relative_error, run, webgpu};
use viaduct_export::onnx::DType;

/// Every operator of our bundles runs on the device, and agrees with the CPU provider in f32.
#[test]
fn webgpu_runs_every_operator() {
    let Some(mut gpu) = webgpu() else { return };
    let mut cpu = cpu();
    let mut wrong = Vec::new();
    let f16 = if gpu.runtime.device().f16 { vec![DType::F32, DType::F16] } else { vec![DType::F32] };
    for dtype in f16 {
        let reference = cases::all(DType::F32);
        for (case, plain) in cases::all(dtype).iter().zip(&reference) {
            let expected = run(&mut cpu, &plain.net.model(&["y"]), &plain.feeds, &["y"]);
            let expected = expected.unwrap_or_else(|e| panic!("{} on the CPU: {e}", plain.name)).remove(0).to_f32();
            let start = std::time::Instant::now();
            let result = run(&mut gpu.runtime, &case.net.model(&["y"]), &case.feeds, &["y"]);
            let took = start.elapsed().as_secs_f32();
            match result {
                Ok(y) => {
                    let error = relative_error(&y[0].to_f32(), &expected);
                    println!("{dtype:?} {:44} {error:9.2e} {took:6.2} s", case.name);
                    if error > if dtype == DType::F16 { 2e-3 } else { 2e-6 } {
                        wrong.push(format!("{dtype:?} {}: {error:e}", case.name));
                    }
                }
                Err(e) => {
                    println!("{dtype:?} {:44} {e}", case.name);
                    wrong.push(format!("{dtype:?} {}: {e}", case.name));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
