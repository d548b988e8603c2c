//! Memory, limits of devices, and devices that go away.

use std::{fs, os::unix::fs::symlink, path::Path, process::Command};

use serde_json::json;
use viaduct::{
    runtime::{
        Adapter, DeviceKind, RuntimeError,
        memory::{Floor, MemorySource, effective_budget},
    },
    tensor::HostTensor,
    tune::self_tests,
};
use viaduct_export::{
    device::DeviceProfile,
    onnx::{Builder, DType, Model, model_bytes},
};

use crate::{
    DRAW,
    bad::{Good, finish, put, root, text, viaduct},
    feed, findings, fixed, rewritten,
    runtime_support::{Feeds, Net, int, noise, run, webgpu},
    system::System,
    told, toy,
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Bytes that this process holds of host and GPU together.
fn held() -> i64 {
    let (source, pid) = (MemorySource::system(), std::process::id());
    source.process(pid).unwrap().with_gpu(source.process_gpu(pid)) as i64
}

/// After one session is released the next finds its device gone:
/// <https://github.com/microsoft/onnxruntime/pull/27634>, <https://github.com/microsoft/onnxruntime/pull/23144>. Two
/// graphs alternate, and memory returns to what it was.
#[test]
fn bug_11_webgpu_sessions_come_and_go() {
    const SIDE: usize = 1536;
    const ROWS: usize = 16;
    let Some(mut gpu) = webgpu() else { return };
    let weights = noise(1, SIDE * SIDE);
    let nets = ["Neg", "Tanh"].map(|op| {
        let mut net = Net::new(DType::F32);
        net.x("x", &[ROWS, SIDE]).float("w", &[SIDE, SIDE], &weights);
        net.node("MatMul", &["x", "w"], "product", &[]).node(op, &["product"], "y", &[]);
        model_bytes(&net.model(&["y"])).unwrap()
    });
    let x = HostTensor::f32(&[ROWS, SIDE], noise(2, ROWS * SIDE));
    let (mut first, mut after): (Vec<Option<HostTensor>>, Vec<i64>) = (vec![None, None], Vec::new());
    for _ in 0..10 {
        for (bytes, first) in nets.iter().zip(&mut first) {
            let mut stage = gpu.runtime.open(toy(bytes.clone())).unwrap();
            stage.bind("x", &x).unwrap();
            let y = stage.run(&[], &["y"]).unwrap().remove(0);
            assert_eq!(&y, first.get_or_insert_with(|| y.clone()));
        }
        after.push(held());
    }
    println!("{:?} MiB", after.iter().map(|bytes| bytes / MIB as i64).collect::<Vec<_>>());
    // Shaders of the first rounds stay.
    assert!((after[9] - after[2]).abs() < 64 * MIB as i64, "{after:?}");
    // Bytes that nobody reads may be optimised away.
    let leak = std::hint::black_box(vec![1u8; 128 * MIB as usize]);
    assert!(held() - after[9] > 64 * MIB as i64, "a leak of {} bytes would be noticed", leak.len());
    drop(leak);
}

/// A Concat of more operands than a shader has storage buffers fails when it runs:
/// <https://github.com/microsoft/onnxruntime/pull/25177>. `report` counts them before.
#[test]
fn bug_12_concat_of_many_operands() {
    for (count, expected) in [(15, 0), (16, 1), (33, 1)] {
        let mut b = Builder::new("concat");
        let inputs: Vec<_> =
            (0..count).map(|i| b.input(&format!("x{i}"), DType::F32, &fixed([1, 8]))).collect();
        let y = b.concat(&inputs, 1);
        b.output(y, "y", &fixed([1, 8 * count]));
        let found = findings(&b.finish(), "bc250", "limits");
        assert_eq!(found.len(), expected, "{count}: {found:?}");
        if let [excess] = &found[..] {
            assert_eq!((&excess["limit"], &excess["op_type"]), (&"storage_buffers".into(), &"Concat".into()));
            assert_eq!((&excess["asked"], &excess["allowed"]), (&(count + 1).into(), &16.into()));
        }
    }
}

/// Concat or Split of so many values, and what it must give.
fn wide(op: &str, count: usize) -> (Model, Feeds, Vec<String>, Vec<f32>) {
    let mut net = Net::new(DType::F32);
    let names: Vec<String> = (0..count).map(|i| format!("part{i}")).collect();
    let values = noise(1, 4 * count);
    let parts: Vec<&str> = names.iter().map(String::as_str).collect();
    if op == "Split" {
        net.x("x", &[count, 4]).ints("sizes", &vec![1; count]);
        net.node("Split", &["x", "sizes"], &parts.join(" "), &[("axis", int(0))]);
        return (net.model(&parts), feed("x", HostTensor::f32(&[count, 4], values.clone())), names, values);
    }
    let mut feeds = Vec::new();
    for (name, part) in names.iter().zip(values.chunks(4)) {
        net.x(name, &[1, 4]);
        feeds.push((name.clone(), HostTensor::f32(&[1, 4], part.to_vec())));
    }
    net.node("Concat", &parts, "y", &[("axis", int(0))]);
    (net.model(&["y"]), feeds, vec!["y".to_owned()], values)
}

/// The same on the device. As it is, a node of too many is right or an error in our words; as a tree it is right.
#[test]
fn bug_12_webgpu_trees_of_many_operands() {
    let Some(mut gpu) = webgpu() else { return };
    let allowed = gpu.runtime.device().profile().max_storage_buffers;
    for (op, count) in [("Concat", 16), ("Concat", 33), ("Split", 16), ("Split", 33)] {
        let (model, feeds, outputs, expected) = wide(op, count);
        assert_eq!(findings(&model, "bc250", "limits").len(), 1, "{op} of {count}");
        let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
        let joined = |y: Vec<HostTensor>| y.iter().flat_map(HostTensor::to_f32).collect::<Vec<_>>();
        match run(&mut gpu.runtime, &model, &feeds, &outputs) {
            Ok(y) => assert_eq!(joined(y), expected, "{op} of {count}"),
            Err(error) => {
                let RuntimeError::StorageBuffers { ref node, allowed: told, .. } = error else {
                    panic!("{error}")
                };
                assert!(node.starts_with(op) && told == allowed && error.exit_code() == 6, "{error}");
                assert!(count as u32 >= allowed, "{error}");
            }
        }
        let tree = rewritten(&model, &["tree_concat"]);
        assert!(findings(&tree, "bc250", "limits").is_empty(), "{op} of {count}");
        let y = run(&mut gpu.runtime, &tree, &feeds, &outputs).unwrap();
        assert_eq!(joined(y), expected, "{op} of {count} as a tree");
    }
}

/// A tensor beyond the binding's limit is told as an opaque out-of-memory when it runs:
/// <https://github.com/microsoft/onnxruntime/issues/25195>. `report` names it with its bytes, and allocates nothing.
#[test]
fn bug_13_tensor_beyond_the_binding() {
    let directory = tempfile::tempdir().unwrap();
    let mut profile = serde_json::to_value(DeviceProfile::preset("bc250").unwrap()).unwrap();
    profile["max_binding"] = json!(GIB);
    let gib = directory.path().join("gib.json");
    put(&gib, profile.to_string());
    let gib = gib.to_str().unwrap();
    let tile = |mib: usize| {
        let mut b = Builder::new("tile");
        let x = b.input("x", DType::F32, &fixed([1, 1 << 18]));
        let repeats = b.ints(&[mib as i64, 1]);
        let y = b.op("Tile", &[x, repeats], &[]);
        b.output(y, "y", &fixed([mib, 1 << 18]));
        b.finish()
    };
    let matmul = |mib: usize| {
        let mut b = Builder::new("matmul");
        let x = b.input("x", DType::F32, &fixed([mib * 16, 4]));
        let w = b.input("w", DType::F32, &fixed([4, 1 << 14]));
        let y = b.matmul(x, w);
        b.output(y, "y", &fixed([mib * 16, 1 << 14]));
        b.finish()
    };
    // Qwen3-4B's table in f16.
    let mut b = Builder::new("embedding");
    let table = b.input("y", DType::F16, &fixed([151_936, 2560]));
    let ids = b.input("ids", DType::I64, &fixed([1, 512]));
    let rows = b.op("Gather", &[table, ids], &[]);
    b.output(rows, "rows", &fixed([1, 512, 2560]));
    let embedding = b.finish();
    for (model, device, bytes) in [
        (tile(1126), gib, 1126 * MIB),
        (matmul(1126), gib, 1126 * MIB),
        (tile(2150), "h200", 2150 * MIB),
        (matmul(2150), "h200", 2150 * MIB),
        (embedding.clone(), "llvmpipe", 151_936 * 2560 * 2),
    ] {
        let found = findings(&model, device, "limits");
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((&found[0]["tensor"], &found[0]["limit"]), (&"y".into(), &"binding".into()));
        assert_eq!(found[0]["asked"], bytes);
    }
    for (model, device) in [(tile(1023), gib), (matmul(2047), "h200"), (embedding, gib)] {
        assert!(findings(&model, device, "limits").is_empty());
    }
}

/// One that slips through gives right numbers or an error.
#[test]
fn bug_13_webgpu_tensor_beyond_the_binding() {
    let Some(mut gpu) = webgpu() else { return };
    let limit = gpu.runtime.device().profile().max_binding;
    if limit > GIB {
        return println!("not tried: a binding covers {limit} bytes");
    }
    let rows = (limit >> 12) as usize + 512;
    let mut net = Net::new(DType::F32);
    net.x("x", &[rows, 1024]).node("Neg", &["x"], "y", &[]);
    let x = HostTensor::f32(&[rows, 1024], (0..rows * 1024).map(|i| (i % 4096) as f32).collect());
    match run(&mut gpu.runtime, &net.model(&["y"]), &feed("x", x), &["y"]) {
        Ok(y) => assert!(y[0].to_f32().iter().enumerate().all(|(i, v)| *v == -((i % 4096) as f32))),
        Err(e) => println!("{} MiB: {e}", rows >> 8),
    }
}

/// A decoder at 1024x1024 eats the machine: <https://github.com/PrismML-Eng/Bonsai-Image-Demo/issues/27>. The plan says
/// before which stage does not fit, and what does; what is forced is stopped with one line and leaves no picture.
#[test]
fn bug_14_decoding_beyond_the_memory() {
    let directory = Good::bundle().copy();
    let plan = |size: &str, options: &str, code: i32| {
        let arguments = format!("report --recipe flux2-klein-4b --device bc250 --size {size} {options}");
        told(directory.path(), &arguments, code).1
    };
    plan("1024x1024", "--profile q4 --budget 6GiB", 0);
    for (size, options, stage, tensor) in [
        ("1024x1024", "--profile f16 --budget 6GiB", "transformer", "MatMul_"),
        ("1024x1024", "--profile q4 --budget 4GiB", "transformer", "MatMulNBits_"),
        ("1536x1536", "--profile q4 --budget 8GiB --set vae_decoder.cuts=", "vae_post0", "Resize_"),
    ] {
        let refused = plan(size, options, 4);
        assert!(refused.contains(&format!("{size} needs ")), "{refused}");
        assert!(refused.contains(&format!(" in {stage} (device ")), "{refused}");
        assert!(refused.contains(&format!("its largest tensor is {tensor}")), "{refused}");
        let advice = refused.trim_end().rsplit("; ").next().unwrap();
        if let Some(nearest) = advice.strip_suffix(" fits").filter(|advice| !advice.contains(' ')) {
            plan(nearest, options, 0);
        }
    }

    let (_, refused) = told(directory.path(), &format!("{DRAW} --budget 4MiB"), 4);
    assert!(refused.contains("more than the budget of 4 MiB"), "{refused}");
    let (_, stopped) = told(directory.path(), &format!("{DRAW} --floor 100% --force --progress none"), 5);
    assert!(stopped.contains("stopped by the watchdog in stage "), "{stopped}");
    let errors = stopped.lines().filter(|line| line.starts_with("error: "));
    assert_eq!(errors.count(), 1, "{stopped}");
    assert!(!directory.path().join("out.png").exists());
    told(directory.path(), DRAW, 0);
}

/// An adapter without shader-f16. That a bundle in f16 does not start there, `src/runtime/bundle.rs` tests.
#[test]
fn bug_14_f16_without_f16() {
    let directory = tempfile::tempdir().unwrap();
    let mut profile = serde_json::to_value(DeviceProfile::preset("llvmpipe").unwrap()).unwrap();
    profile["f16"] = json!(false);
    let path = directory.path().join("plain.json");
    put(&path, profile.to_string());
    let neg = |dtype| {
        let mut net = Net::new(dtype);
        net.x("x", &[4]).node("Neg", &["x"], "y", &[]).model(&["y"])
    };
    for (dtype, device, expected) in [
        (DType::F16, path.to_str().unwrap(), 1),
        (DType::F32, path.to_str().unwrap(), 0),
        (DType::F16, "llvmpipe", 0),
    ] {
        let found = findings(&neg(dtype), device, "limits");
        assert_eq!(found.len(), expected, "{found:?}");
        assert!(found.iter().all(|excess| excess["limit"] == "f16"), "{found:?}");
    }
}

fn bc250(memory: u64) -> DeviceProfile {
    DeviceProfile {
        memory,
        max_binding: 2 * GIB,
        max_buffer: 2 * GIB,
        ..DeviceProfile::preset("bc250").unwrap()
    }
}

/// Pages that the GPU shares with the CPU: <https://github.com/ggml-org/llama.cpp/issues/22774>. Those in use are missing
/// from the available memory and count once. That a worker which takes too many is killed, `tests/watchdog.rs` shows.
#[test]
fn bug_15_unified_memory_counts_once() {
    let system = System::new();
    system.put_bc250(15 * GIB, "4194304\n");
    let source = system.source();
    let (host, gpu) = (source.host().unwrap(), source.gpus().remove(0));
    assert_eq!((host.available(), gpu.gtt.used), (12 * GIB, GIB));
    let floor = Floor::Percent(12.5).of(host.total());
    let budget = effective_budget(&host, floor, &bc250(15 * GIB), Some(&gpu));
    assert_eq!((budget.host, budget.device), (10 * GIB, 10 * GIB + gpu.vram.free()));
    assert_eq!(budget.total, budget.device);
}

/// The kernel's ceiling for GPU memory is below the machine's: <https://github.com/akandr/bc250>.
#[test]
fn bug_16_ttm_ceiling_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let doctor = |system: &System, arguments: &str| {
        let mut command = viaduct(directory.path(), &format!("doctor --ep cpu {arguments}"));
        command.env("VIADUCT_SYSTEM_ROOT", system.path());
        let output = finish(command);
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).to_owned()
    };
    for (gtt, pages, ceiling, told) in [
        (15 * GIB, "3145728\n", 12 * GIB, "lends GPUs 12 GiB of the machine's 16 GiB"),
        // The kernel's default, which is less than half of the memory.
        (7948 << 20, "1939865\n", 1_939_865 * 4096, "lends GPUs 7.4 GiB of the machine's 16 GiB"),
    ] {
        let system = System::new();
        system.put_bc250(gtt, pages);
        let report = doctor(&system, "");
        assert!(
            report.contains(told) && report.contains("card0: 512 MiB of its own, 40 MiB used"),
            "{report}"
        );
        let report: serde_json::Value = serde_json::from_str(&doctor(&system, "--json")).unwrap();
        let memory = &report["memory"];
        assert_eq!(memory["gpus"][0]["ttm_ceiling"], ceiling, "{report}");
        assert_eq!(memory["gpus"][0]["shared_ceiling"], ceiling.min(gtt), "{report}");
        assert!(memory["note"].as_str().unwrap().contains(told), "{report}");
        // A plan counts with it: 12 GiB are available, and 1 of the ceiling is in use.
        let (host, gpu) = (system.source().host().unwrap(), system.source().gpus().remove(0));
        let budget = effective_budget(&host, 0, &bc250(15 * GIB), Some(&gpu));
        let shared = (ceiling.min(gtt) - GIB).min(12 * GIB);
        assert_eq!(budget.device, shared + gpu.vram.free(), "{budget:?}");
    }
    let system = System::new();
    system.put_bc250(15 * GIB, "4194304\n");
    system.put_cgroup("self", 2, "/job");
    system.put("sys/fs/cgroup/job/memory.max", "6442450944\n");
    system.put("sys/fs/cgroup/job/memory.current", "1073741824\n");
    let report = doctor(&system, "");
    assert!(report.contains("16 GiB in all, 12 GiB available; swap 2 GiB, 1 GiB free"), "{report}");
    assert!(report.contains("limited to 6 GiB by a control group (cgroup), 5 GiB available"), "{report}");
    assert!(!report.contains("ttm"), "{report}");
    let report: serde_json::Value = serde_json::from_str(&doctor(&system, "--json")).unwrap();
    assert_eq!(report["memory"]["available"], 5 * GIB);
    assert_eq!(report["memory"]["cgroup"]["limit"], 6 * GIB);
}

/// A GPU whose compute queue returns wrong results: <https://github.com/ROCm/legacy-rocm-build/issues/6313>. `doctor`
/// prints driver and version, and warns of those that have the queue.
#[test]
fn bug_17_drivers_that_compute_wrongly() {
    let adapter = |name: &str, driver: &str| Adapter {
        name: name.to_owned(),
        vendor_id: 0x1002,
        device_id: 0x13fe,
        kind: DeviceKind::Integrated,
        driver: driver.to_owned(),
        api_version: (1, 4, 0),
        f16: true,
        subgroup_size: 64,
        max_storage_buffer_range: 4 * GIB - 1,
        max_storage_buffers: 1 << 20,
        max_buffer: 4 * GIB - 1,
        local_memory: 8 * GIB,
    };
    for (name, driver, warned) in [
        ("AMD BC-250 (RADV GFX1013)", "radv Mesa 25.0.7-2", true),
        ("AMD BC-250 (RADV GFX1013)", "radv Mesa 24.3.0-devel (git-0123abc)", true),
        ("AMD BC-250 (RADV GFX1013)", "radv Mesa 25.1.0", false),
        ("AMD BC-250 (RADV GFX1013)", "radv Mesa 26.0.2", false),
        ("AMD BC-250 (RADV GFX1013)", "a driver of another kind", false),
        ("AMD Radeon RX 6700 XT (RADV NAVI22)", "radv Mesa 22.0.1", false),
    ] {
        let fault = adapter(name, driver).driver_fault();
        assert_eq!(fault.is_some_and(|fault| fault.contains("Mesa before 25.1")), warned, "{name}, {driver}");
    }
}

/// The self-tests have the reports about sums (1), scalars (3) and large dispatches (9), and a long graph, of which some
/// drivers gave zeros: <https://github.com/kvark/blade/issues/356>. A software adapter is never asked about fused
/// attention, because the answer takes it minutes; any other must give one. That a test can fail, bug 1 shows.
#[test]
fn bug_17_webgpu_self_tests() {
    let Some(mut gpu) = webgpu() else { return };
    let device = gpu.runtime.device();
    let (software, driver) = (device.kind == DeviceKind::Software, device.driver.clone());
    let tests = self_tests(&mut gpu.runtime).unwrap();
    for part in ["large sums", "chain of scalars", "lengths rounded up", "65535 workgroups", "long graph"] {
        assert!(tests.iter().any(|test| test.name.contains(part)), "{part}");
    }
    for test in tests {
        let fused = test.name.starts_with("fused attention");
        assert_eq!(test.error.is_none(), software && fused, "{test:?}");
        assert!(!(software && fused && test.passed), "{test:?}");
        let known = test.name.starts_with("large sums") || !software && test.name == "lengths rounded up";
        assert!(fused || test.passed || known, "{test:?}");
    }
    drop(gpu);
    let (report, _) = told(&root().join("tests"), "doctor --ep webgpu", 0);
    assert!(report.contains(&format!("driver {driver}, Vulkan ")), "{report}");
}

/// Hundreds of nodes in a row, all of which count.
#[test]
fn bug_17_webgpu_long_chains() {
    let Some(mut gpu) = webgpu() else { return };
    let mut net = Net::new(DType::F32);
    net.x("v0", &[256]).x("step", &[256]);
    for i in 0..500 {
        net.node("Add", &[&format!("v{i}"), "step"], &format!("v{}", i + 1), &[]);
    }
    let ones = HostTensor::f32(&[256], vec![1.0; 256]);
    let feeds = [feed("v0", ones.clone()), feed("step", ones)].concat();
    let y = run(&mut gpu.runtime, &net.model(&["v500"]), &feeds, &["v500"]).unwrap();
    assert_eq!(y[0].to_f32(), vec![501.0; 256]);
}

/// A silent fall back to the CPU: <https://github.com/peteonrails/voxtype/issues/684>,
/// <https://github.com/pykeio/ort/issues/349>.
#[test]
fn bug_18_silent_cpu_fallback() {
    let directory = Good::bundle().copy();
    let without_adapter = |provider: &str| {
        let mut command = viaduct(directory.path(), &DRAW.replace("--ep cpu", provider));
        command.arg("--json").env("VK_DRIVER_FILES", "/nowhere").env("VK_ICD_FILENAMES", "/nowhere");
        finish(command)
    };
    let output = without_adapter("--ep webgpu");
    assert_eq!(output.status.code(), Some(6), "{}", text(&output.stderr));
    assert!(!directory.path().join("out.png").exists());
    let output = without_adapter("--ep auto");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).lines().any(|line| line.starts_with("warning: running on the CPU: no adapter"))
    );
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["ep"], "cpu");
    let nodes = report["nodes"].as_object().unwrap();
    assert!(nodes.len() == 1 && nodes["CPUExecutionProvider"].as_u64() > Some(0), "{report}");
}

/// The plugin's library is missing.
#[test]
fn bug_18_missing_plugin() {
    let directory = Good::bundle().copy();
    let library = std::env::var_os("VIADUCT_RUNTIME").map_or_else(|| root().join("runtime"), Into::into);
    fs::create_dir(directory.path().join("runtime")).unwrap();
    let there = Path::new(&library).canonicalize().unwrap().join("libonnxruntime.so");
    symlink(there, directory.path().join("runtime/libonnxruntime.so")).unwrap();
    for (provider, code) in [("webgpu", 1), ("auto", 0)] {
        let mut command = viaduct(directory.path(), &DRAW.replace("--ep cpu", &format!("--ep {provider}")));
        command.env("VIADUCT_RUNTIME", directory.path().join("runtime"));
        let output = finish(command);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{told}");
        assert!(told.contains("libonnxruntime_providers_webgpu.so is in none of"), "{told}");
        assert_eq!(directory.path().join("out.png").exists(), code == 0, "{told}");
    }
}

/// A run tells its adapter, its provider and how many nodes each provider runs; a node on the CPU is an error. Sin of
/// opset 22 has no WebGPU kernel in the pinned version.
#[test]
fn bug_18_webgpu_nodes_on_the_cpu() {
    let Some(mut gpu) = webgpu() else { return };
    let name = gpu.runtime.device().name.clone();
    let mut net = Net::new(DType::F32);
    net.x("x", &[4]).node("Sin", &["x"], "y", &[]);
    let error = gpu.runtime.open(toy(model_bytes(&net.model(&["y"])).unwrap())).err().unwrap();
    assert!(matches!(&error, RuntimeError::CpuNodes { nodes, .. } if nodes == &["Sin Sin_y"]), "{error}");
    assert_eq!(error.exit_code(), 6);
    drop(gpu);
    let directory = Good::bundle().copy();
    let (result, _) = told(directory.path(), &format!("{} --json", DRAW.replace("cpu", "webgpu")), 0);
    let result: serde_json::Value = serde_json::from_str(&result).unwrap();
    assert_eq!((&result["ep"], &result["adapter"]), (&"webgpu".into(), &name.into()), "{result}");
    let nodes = result["nodes"].as_object().unwrap();
    assert!(nodes.len() == 1 && nodes["WebGpuExecutionProvider"].as_u64() > Some(0), "{result}");
}

/// The process hangs in a driver after the picture is written: <https://github.com/akandr/bc250>,
/// <https://github.com/ROCm/legacy-rocm-build/issues/6313>. A library whose teardown never ends must not matter.
#[test]
fn bug_30_the_process_ends_after_the_picture() {
    let directory = Good::bundle().copy();
    let source =
        "#include <unistd.h>\n__attribute__((destructor)) static void stall(void) { for (;;) pause(); }\n";
    put(&directory.path().join("stall.c"), source);
    let mut compile = Command::new("cc");
    compile.current_dir(directory.path()).args(["-shared", "-fPIC", "-o", "stall.so", "stall.c"]);
    assert!(compile.status().unwrap().success());
    for (arguments, code) in [(DRAW, 0), ("inspect nowhere", 1), ("--version", 0), ("inspect", 2)] {
        let mut command = viaduct(directory.path(), arguments);
        command.env("LD_PRELOAD", directory.path().join("stall.so"));
        let output = finish(command);
        assert_eq!(output.status.code(), Some(code), "{arguments}: {}", text(&output.stderr));
    }
    assert!(directory.path().join("out.png").is_file());
}
