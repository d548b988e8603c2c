//! One test per public bug report whose subject this program touches, through the binary. Reports about the ONNX files
//! themselves are in `export/tests/onnx_regression.rs`, those about the WebGPU provider in `tests/runtime_webgpu.rs`.

#[path = "support/bad.rs"]
mod bad;
#[path = "support/system.rs"]
mod system;

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use bad::{Good, SET, edit, finish, json, put, root, snapshot, text, viaduct};
use system::System;
use viaduct::{
    npy,
    runtime::memory::{Floor, effective_budget},
    tensor::{HostTensor, Values},
};
use viaduct_export::device::{DeviceProfile, Provider};
use viaduct_export::onnx::{Attribute, Builder, DType, Dim, Model, Tensor, model_bytes};
use viaduct_export::tuning::Tuning;

const DRAW: &str = "generate -b b -p cat --size 32x32 --steps 1 --seed 1 --ep cpu -o out.png";

fn run(directory: &Path, arguments: &str) -> Output {
    finish(viaduct(directory, arguments))
}

fn succeed(directory: &Path, arguments: &str) -> Output {
    let output = run(directory, arguments);
    assert!(output.status.success(), "{arguments}: {}", text(&output.stderr));
    output
}

/// What `report` finds in a model, stage by stage: `hazards` or `limits`.
fn findings(model: &Model, device: &str, key: &str) -> Vec<serde_json::Value> {
    let directory = tempfile::tempdir().unwrap();
    put(&directory.path().join("m.onnx"), model_bytes(model).unwrap());
    let output = succeed(directory.path(), &format!("report m.onnx --device {device} --json"));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    report["stages"][0][key].as_array().unwrap().clone()
}

fn fixed<const N: usize>(sizes: [usize; N]) -> [Dim; N] {
    sizes.map(Dim::Fixed)
}

/// A norm that an exporter wrote out overflows in f16, without a NaN:
/// <https://github.com/microsoft/onnxruntime/issues/31626>. `report` names the reduction; the fused operator is fine.
#[test]
fn bug_2_decomposed_norm_in_f16() {
    let norm = |dtype| {
        let mut b = Builder::new("norm");
        let x = b.input("x", dtype, &fixed([4, 64]));
        let two = b.scalar(dtype, 2.0);
        let square = b.op("Pow", &[x, two], &[]);
        let mean = b.op("ReduceMean", &[square], &[("axes", Attribute::Ints(vec![-1]))]);
        b.label(mean, "variance");
        let root = b.op("Sqrt", &[mean], &[]);
        let y = b.op("Div", &[x, root], &[]);
        b.output(y, "y", &fixed([4, 64]));
        let scale = b.constant("scale", Tensor::from_f32(&[64], &[1.0; 64]));
        let scale = b.cast(scale, dtype);
        let z = b.op("RMSNormalization", &[x, scale], &[]);
        b.output(z, "z", &fixed([4, 64]));
        findings(&b.finish(), "llvmpipe", "hazards")
    };
    let found = norm(DType::F16);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(
        (&found[0]["kind"], &found[0]["op_type"]),
        (&"f16_squares_summed".into(), &"ReduceMean".into())
    );
    assert_eq!(norm(DType::F32).len(), 0);
}

/// Scales that are computed of one element come out wrong: <https://github.com/microsoft/onnxruntime/issues/27661>.
/// `report` names the chain's end.
#[test]
fn bug_3_float_scalar_chain() {
    let mut b = Builder::new("scale");
    let x = b.input("length", DType::I64, &fixed([1]));
    let mut y = b.cast(x, DType::F32);
    b.record_shape(y, &fixed([1]));
    let fifteen = b.constant("fifteen", Tensor::from_f32(&[1], &[15.0]));
    for (op, operands) in [("Div", vec![fifteen]), ("Ceil", vec![]), ("Sqrt", vec![])] {
        y = b.op(op, &[vec![y], operands].concat(), &[]);
        b.record_shape(y, &fixed([1]));
    }
    b.output(y, "y", &fixed([1]));
    let found = findings(&b.finish(), "llvmpipe", "hazards");
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0]["what"], "Cast -> Div -> Ceil -> Sqrt on one element");
    assert_eq!(found[0]["op_type"], "Sqrt");
}

/// Convolutions over three dimensions in f16 make an invalid shader:
/// <https://github.com/microsoft/onnxruntime/issues/22974>.
#[test]
fn bug_8_conv3d_in_f16() {
    let mut b = Builder::new("conv");
    let x = b.input("x", DType::F16, &fixed([1, 4, 3, 8, 8]));
    let w = b.constant("w", Tensor::from_f16(&[4, 4, 3, 3, 3], &[0.0; 432]));
    let y = b.op("Conv", &[x, w], &[]);
    b.output(y, "y", &fixed([1, 4, 1, 6, 6]));
    let found = findings(&b.finish(), "llvmpipe", "hazards");
    assert!(found.len() == 1 && found[0]["kind"] == "f16_conv3d", "{found:?}");
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

/// A tensor beyond the binding's limit is told as an opaque out-of-memory when it runs:
/// <https://github.com/microsoft/onnxruntime/issues/25195>. `report` names it with its bytes.
#[test]
fn bug_13_tensor_beyond_the_binding() {
    let matmul = |rows: usize| {
        let mut b = Builder::new("matmul");
        let x = b.input("x", DType::F32, &fixed([rows, 4]));
        let w = b.input("w", DType::F32, &fixed([4, 1 << 14]));
        let y = b.matmul(x, w);
        b.output(y, "y", &fixed([rows, 1 << 14]));
        b.finish()
    };
    assert_eq!(findings(&matmul(1 << 14), "h200", "limits").len(), 0);
    let found = findings(&matmul(1 << 15), "h200", "limits");
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((&found[0]["tensor"], &found[0]["limit"]), (&"y".into(), &"binding".into()));
    assert_eq!(found[0]["asked"], 1u64 << 31);
}

/// Pages that the GPU shares with the CPU: <https://github.com/ggml-org/llama.cpp/issues/22774>. Those in use are missing
/// from the available memory and count once. That a worker which takes too many is killed, `tests/watchdog.rs` shows.
#[test]
fn bug_15_unified_memory_counts_once() {
    const GIB: u64 = 1 << 30;
    let system = System::new();
    system.put_bc250(15 * GIB, "4194304\n");
    let source = system.source();
    let (host, gpu) = (source.host().unwrap(), source.gpus().remove(0));
    assert_eq!((host.available(), gpu.gtt.used), (12 * GIB, GIB));
    let device = DeviceProfile {
        name: "BC-250".to_owned(),
        provider: Provider::WebGpu,
        unified_memory: true,
        memory: 15 * GIB,
        f16: true,
        subgroup_size: 64,
        max_binding: 2 * GIB,
        max_buffer: 2 * GIB,
        max_storage_buffers: 16,
        tuning: Tuning::default(),
    };
    let floor = Floor::Percent(12.5).of(host.total());
    let budget = effective_budget(&host, floor, &device, Some(&gpu));
    assert_eq!((budget.host, budget.device), (10 * GIB, 10 * GIB + gpu.vram.free()));
    assert_eq!(budget.total, budget.device);
}

/// The kernel's ceiling for GPU memory is below the machine's: <https://github.com/akandr/bc250>.
#[test]
fn bug_16_ttm_ceiling_is_told() {
    const GIB: u64 = 1 << 30;
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

/// Padding rows of the prompt reach the transformer: <https://github.com/black-forest-labs/flux2/issues/59>. They are
/// compared apart from the real rows, and zeroed ones are noticed.
#[test]
fn bug_25_padding_rows() {
    let directory = Good::bundle().copy();
    let oracle = directory.path().join("o");
    fs::create_dir(&oracle).unwrap();
    for entry in fs::read_dir(root().join("tests/fixtures/flux2-a/oracle")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, oracle.join(path.file_name().unwrap())).unwrap();
    }
    let output = succeed(directory.path(), "verify b --oracle o --ep cpu");
    for class in ["prompt_embeds (real rows)", "prompt_embeds (padding rows)"] {
        assert!(text(&output.stdout).contains(class), "{}", text(&output.stdout));
    }
    let mask = npy::read(&oracle.join("attention_mask.npy")).unwrap().to_f32();
    let embeds = npy::read(&oracle.join("prompt_embeds.npy")).unwrap();
    let (shape, mut values) = (embeds.shape.clone(), embeds.to_f32());
    let width = values.len() / mask.len();
    for (row, _) in mask.iter().enumerate().filter(|(_, mask)| **mask == 0.0) {
        values[row * width..][..width].fill(0.0);
    }
    put(
        &oracle.join("prompt_embeds.npy"),
        npy::to_bytes(&HostTensor::new(&shape, Values::F32(values.into()))),
    );
    let output = run(directory.path(), "verify b --oracle o --ep cpu --no-controls");
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("the first is prompt_embeds (padding rows)"),
        "{}",
        text(&output.stderr)
    );
}

/// NaN and constant pictures are written as black ones: <https://github.com/Tongyi-MAI/Z-Image/issues/14>,
/// <https://github.com/huggingface/diffusers/issues/1083>, <https://github.com/leejet/stable-diffusion.cpp/issues/968>.
#[test]
fn bug_27_broken_numbers_are_no_picture() {
    let good = Good::bundle();
    for (file, byte, told) in [
        ("transformer-00000.data", 0xFF, "transformer, step 0"),
        ("vae_post0-00000.data", 0xFF, "vae_post0"),
        ("vae_post1-00000.data", 0, "vae: the same everywhere"),
    ] {
        let directory = good.copy();
        put(&directory.path().join("out.png"), "a good picture");
        edit(&directory.path().join("b").join(file), |bytes| bytes.fill(byte));
        let output = run(directory.path(), &format!("{DRAW} --force"));
        assert_eq!(output.status.code(), Some(1), "{file}");
        assert!(text(&output.stderr).contains(told), "{}", text(&output.stderr));
        assert_eq!(fs::read(directory.path().join("out.png")).unwrap(), b"a good picture");
    }
}

/// A half-downloaded file passes for a whole one: <https://github.com/huggingface/huggingface_hub/issues/4223>.
#[test]
fn bug_28_half_downloaded_files() {
    let good = Good::checkpoint();
    let weights: Vec<PathBuf> = snapshot(good.copy().path())
        .into_keys()
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    assert_eq!(weights.len(), 5);
    for path in weights {
        let directory = good.copy();
        edit(&directory.path().join(&path), |bytes| bytes.truncate(bytes.len() * 6 / 10));
        let output = run(directory.path(), &format!("export ck -o b {SET}"));
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(
            told.contains(path.to_str().unwrap()) && told.contains("the download did not finish"),
            "{told}"
        );
        assert!(!directory.path().join("b").exists());
    }
}

/// An index that lies gives garbage weights: <https://github.com/sgl-project/sglang/issues/32279>,
/// <https://github.com/Blaizzy/mlx-vlm/issues/1827>, <https://github.com/huggingface/huggingface_hub/issues/4728>.
/// Each lie has a message of its own, and files that are in nobody's list do no harm.
#[test]
fn bug_29_lying_index() {
    const INDEX: &str = "ck/transformer/diffusion_pytorch_model.safetensors.index.json";
    const SHARD: &str = "ck/transformer/diffusion_pytorch_model-00002-of-00003.safetensors";
    let map = |d: &Path, change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>)| {
        json(&d.join(INDEX), |index| change(index["weight_map"].as_object_mut().unwrap()));
    };
    let good = Good::checkpoint();
    let told = |harm: &dyn Fn(&Path)| {
        let directory = good.copy();
        harm(directory.path());
        let output = run(directory.path(), &format!("export ck -o b {SET} --progress none"));
        (output.status.code(), text(&output.stderr))
    };
    type Harm<'a> = &'a dyn Fn(&Path);
    let first = "x_embedder.weight";
    let cases: [(Harm, &str); 4] = [
        (&|d| fs::remove_file(d.join(SHARD)).unwrap(), "shard file is missing"),
        (&|d| map(d, &|map| drop(map.insert("ghost".to_owned(), map[first].clone()))), "does not have it"),
        (&|d| map(d, &|map| drop(map.remove(first))), "does not list it"),
        (&|d| map(d, &|map| map[first] = "../x.safetensors".into()), "leaves the directory"),
    ];
    for (harm, message) in cases {
        let (code, told) = told(harm);
        assert!(code == Some(1) && told.contains(message), "{message}: {told}");
    }
    let stray = "ck/transformer/diffusion_pytorch_model.safetensors";
    let (code, told) = told(&|d| put(&d.join(stray), "a stray file"));
    assert_eq!(code, Some(0), "{told}");
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
