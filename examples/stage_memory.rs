//! `stage_memory BUNDLE STAGE EP RUNS [SYMBOL=SIZE ...]`: runs one stage of a bundle in this process and prints the peak
//! of its resident memory (VmHWM, pages of mapped files included), as JSON. `tools/memory` compares it with the prediction.

use std::{collections::BTreeMap, error::Error, fs, path::Path, process::ExitCode};

use viaduct::{
    runtime::{Binding, Device, Runtime, RuntimeOptions, TensorInfo, lower},
    tensor::{HostTensor, Values},
};
use viaduct_export::{
    bundle::Bundle,
    memory::{BufferCache, StageMemory, analyse},
    onnx::{DType, Dim, read_model},
};

fn main() -> ExitCode {
    match run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [bundle, name, ep, runs, sizes @ ..] = arguments else {
        return Err("usage: stage_memory BUNDLE STAGE EP RUNS [SYMBOL=SIZE ...]".into());
    };
    let sizes = sizes.iter().map(|s| size(s)).collect::<Result<BTreeMap<_, _>, _>>()?;
    let bundle = Bundle::open(Path::new(bundle))?;
    let mut runtime = Runtime::start(&RuntimeOptions { provider: ep.parse()?, adapter: None })?;
    let started = resident("VmHWM")?;
    let mut stage = runtime.open_stage(&bundle, name, &Binding::new(&sizes))?;
    let opened = resident("VmHWM")?;
    let inputs: Vec<(String, HostTensor)> = stage
        .inputs()
        .iter()
        .map(|input| Ok((input.name.clone(), random(input, &sizes)?)))
        .collect::<Result<_, String>>()?;
    let given: Vec<(&str, &HostTensor)> =
        inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let outputs: Vec<String> = stage.outputs().iter().map(|o| o.name.clone()).collect();
    let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
    for _ in 0..runs.parse()? {
        stage.run(&given, &outputs)?;
    }
    let peak = resident("VmHWM")?;
    drop(stage);
    let memory = predict(&bundle, name, &sizes, runtime.device())?;
    let figures = serde_json::json!({
        "started": started,
        "opened": opened,
        "peak": peak,
        "predicted": memory.predicted.total(),
        "device": memory.predicted.device,
        "host": memory.predicted.host,
        "weights": memory.weights_uploaded,
        "live": memory.peak.map(|peak| memory.timeline[peak].live),
        "unknown": memory.unknown,
    });
    println!("{figures}");
    viaduct::runtime::exit(0)
}

/// The prediction for the graph as this device runs it.
fn predict(
    bundle: &Bundle,
    name: &str,
    sizes: &BTreeMap<String, usize>,
    device: &Device,
) -> Result<StageMemory, Box<dyn Error>> {
    let mut model = read_model(&bundle.path(&bundle.stage(name)?.graph)?)?;
    let profile = device.profile();
    lower(&mut model, &profile, sizes, &[])?;
    Ok(analyse(&model, sizes, &profile, BufferCache::default()).0)
}

fn size(text: &str) -> Result<(String, usize), Box<dyn Error>> {
    let (name, size) = text.split_once('=').ok_or_else(|| format!("{text}: no SYMBOL=SIZE"))?;
    Ok((name.to_owned(), size.parse()?))
}

/// Bytes, from this process's status.
fn resident(field: &str) -> Result<u64, Box<dyn Error>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with(field)).ok_or("no such field")?;
    let kilobytes: u64 = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(kilobytes << 10)
}

/// Values in -1..1, or token ids.
fn random(input: &TensorInfo, sizes: &BTreeMap<String, usize>) -> Result<HostTensor, String> {
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => Ok(*size),
        Dim::Symbol(name) => sizes.get(name).copied().ok_or_else(|| format!("no size for {name}")),
        Dim::Unknown => Err(format!("{}: unknown size", input.name)),
    };
    let shape = input.shape.iter().map(size).collect::<Result<Vec<_>, _>>()?;
    let mut state = 1u32;
    let mut next = move || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let count: usize = shape.iter().product();
    let values = match input.dtype {
        DType::F32 => Values::F32((0..count).map(|_| next()).collect()),
        DType::F16 => Values::F16((0..count).map(|_| half::f16::from_f32(next())).collect()),
        DType::I64 => Values::I64(vec![0; count].into()),
        other => return Err(format!("{}: {other:?} is not fed", input.name)),
    };
    Ok(HostTensor::new(&shape, values))
}
