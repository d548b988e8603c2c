//! What the runtime says when something is missing. The environment is read once per process, so every case runs
//! this test's program again, as `probe`.

use std::{
    path::Path,
    process::{Command, Output},
    time::{Duration, Instant},
};

use viaduct::{
    runtime::{Provider, Runtime, RuntimeOptions, StageModel},
    tensor::HostTensor,
};
use viaduct_export::{
    memory::PENDING_DISPATCHES,
    onnx::{DType, Dim, Graph, Model, Node, ValueType, model_bytes},
};

/// Starts the runtime as the variables say, runs a graph and prints what happened.
#[test]
#[ignore = "the child process of the other tests"]
fn probe() {
    let provider: Provider = std::env::var("PROBE_PROVIDER").unwrap().parse().unwrap();
    let adapter = std::env::var("PROBE_ADAPTER").ok();
    let mut runtime = match Runtime::start(&RuntimeOptions { provider, adapter, tuning: None }) {
        Ok(runtime) => runtime,
        Err(e) => {
            println!("error {}: {e}", e.exit_code());
            return;
        }
    };
    let device = runtime.device().clone();
    println!("{} on {} ({}); note: {:?}", device.provider, device.name, device.kind, device.note);
    let mut graph = Graph::default();
    let [x, y] = ["x", "y"].map(|name| graph.value(name));
    graph[x].ty = Some(ValueType::Tensor { dtype: DType::F32, shape: Some(vec![Dim::Fixed(2)]) });
    graph[y].ty = graph[x].ty.clone();
    graph.inputs.push(x);
    graph.outputs.push(y);
    let (inputs, outputs) = (vec![Some(x)], vec![Some(y)]);
    graph.add_node(Node { op_type: "Neg".to_owned(), inputs, outputs, ..Node::default() });
    let opsets = vec![(String::new(), 23)];
    let bytes = model_bytes(&Model { graph, ir_version: 11, opsets, ..Model::default() }).unwrap();
    let mut stage = runtime
        .open(StageModel {
            name: "toy",
            bytes,
            folder: Path::new("."),
            pending_dispatches: PENDING_DISPATCHES,
        })
        .unwrap();
    let y = stage.run(&[("x", &HostTensor::f32(&[2], vec![1.0, 2.0]))], &["y"]).unwrap();
    println!("ran {:?}", y[0].to_f32());
}

fn probe_with(provider: &str, variables: &[(&str, &str)]) -> (String, Output) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["probe", "--exact", "--ignored", "--nocapture"]).env("PROBE_PROVIDER", provider);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    (String::from_utf8_lossy(&output.stdout).into_owned(), output)
}

/// Without drivers: the loader is told of none.
const NO_DRIVER: &[(&str, &str)] =
    &[("VK_DRIVER_FILES", "/nowhere.json"), ("VK_ICD_FILENAMES", "/nowhere.json")];

#[test]
fn a_missing_library_is_named() {
    let (text, _) = probe_with("cpu", &[("VIADUCT_RUNTIME", "/nowhere")]);
    assert!(
        text.contains("error 1: libonnxruntime.so is in none of: /nowhere; `make setup` fetches it"),
        "{text}"
    );
}

/// peteonrails/voxtype#684: the plugin's library is missing.
#[test]
fn a_missing_plugin_stops_webgpu_only() {
    let (text, _) = probe_with("cpu", &[]);
    assert!(text.contains("ran [-1.0, -2.0]"), "{text}");
    let folder = tempfile::tempdir().unwrap();
    let library =
        std::env::var_os("VIADUCT_RUNTIME").map_or_else(|| Path::new("runtime").to_owned(), Into::into);
    let library = library.canonicalize().unwrap().join("libonnxruntime.so");
    std::os::unix::fs::symlink(library, folder.path().join("libonnxruntime.so")).unwrap();
    let here = [("VIADUCT_RUNTIME", folder.path().to_str().unwrap())];
    let (text, _) = probe_with("webgpu", &here);
    assert!(text.contains("error 1: libonnxruntime_providers_webgpu.so is in none of"), "{text}");
    let (text, _) = probe_with("auto", &here);
    assert!(text.contains("cpu on CPU (cpu); note: Some(\"libonnxruntime_providers_webgpu.so"), "{text}");
    assert!(text.contains("ran [-1.0, -2.0]"), "{text}");
}

/// https://github.com/pykeio/ort/issues/349: no driver, and the CPU does the work in silence.
#[test]
fn without_an_adapter_webgpu_is_an_error_and_auto_says_why() {
    let (text, _) = probe_with("webgpu", NO_DRIVER);
    assert!(text.contains("error 6: no adapter for WebGPU"), "{text}");
    let (text, _) = probe_with("auto", NO_DRIVER);
    assert!(text.contains("cpu on CPU (cpu); note: Some(\"no adapter for WebGPU"), "{text}");
    assert!(text.contains("ran [-1.0, -2.0]"), "{text}");
}

#[test]
fn an_unknown_adapter_is_an_error_that_lists_the_known() {
    let (text, _) = probe_with("webgpu", &[("PROBE_ADAPTER", "no such card")]);
    assert!(text.contains("error 6: no adapter for WebGPU"), "{text}");
}

/// https://github.com/akandr/bc250: the process hangs after the image is written, when its device is torn down.
#[test]
fn webgpu_processes_end_cleanly() {
    let start = Instant::now();
    let (text, output) = probe_with("webgpu", &[]);
    if !text.contains("ran [-1.0, -2.0]") {
        assert!(!std::env::var("CI").is_ok_and(|v| v == "true"), "{text}");
        eprintln!("\n*** NOT TESTED: {text}\n");
        return;
    }
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}
