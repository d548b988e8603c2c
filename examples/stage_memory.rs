//! `stage_memory BUNDLE STAGE EP RUNS DISPATCHES [--hide INPUT] [SYMBOL=SIZE ...]`: runs one stage of a bundle in this process and
//! prints the peak of its resident memory (VmHWM, pages of mapped files included) beside the predicted one, as JSON.
//! `--hide` puts a product of all rows of an input [1,rows,columns] with each other into the graph, which no output shows.

use std::{error::Error, path::Path, process::ExitCode};

use viaduct::{
    runtime::{Runtime, RuntimeOptions, Settings, Stage, TensorInfo, lower, memory::MemorySource},
    tensor::{HostTensor, Values},
};
use viaduct_export::{
    bundle::Bundle,
    memory::{StageMemory, analyse},
    onnx::{Attribute, DType, Dim, Graph, Model, Node, Tensor, ValueId, read_model},
    shapes::Sizes,
};

const USAGE: &str = "usage: stage_memory BUNDLE STAGE EP RUNS DISPATCHES [--hide INPUT] [SYMBOL=SIZE ...]";

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
    let [bundle, name, ep, runs, pending_dispatches, rest @ ..] = arguments else { return Err(USAGE.into()) };
    let (hidden, sizes) = match rest {
        [option, input, sizes @ ..] if option == "--hide" => (Some(input), sizes),
        sizes => (None, sizes),
    };
    let pending_dispatches = pending_dispatches.parse()?;
    let sizes = sizes.iter().map(|s| size(s)).collect::<Result<Sizes, _>>()?;
    let bundle = Bundle::open(Path::new(bundle))?;
    let mut runtime = Runtime::start(&RuntimeOptions { provider: ep.parse()?, ..RuntimeOptions::default() })?;
    let profile = runtime.device().profile();
    let graph = || -> Result<Model, Box<dyn Error>> {
        let mut model = read_model(&bundle.path(&bundle.stage(name)?.graph)?)?;
        if let Some(input) = hidden {
            hide_square(&mut model.graph, input)?;
        }
        lower(&mut model, &profile, &sizes, &[], &Settings::default())?;
        Ok(model)
    };
    let mut stage = runtime.open_model(name, graph()?, pending_dispatches)?;
    draw(&mut stage, runs.parse()?, &sizes)?;
    let peak = resident_peak()?;
    drop(stage);
    let memory = analyse(&graph()?, &sizes, &profile, pending_dispatches).0;
    println!("{}", figures(&memory, peak));
    viaduct::runtime::exit(0)
}

/// Runs the stage over random inputs.
fn draw(stage: &mut Stage<'_>, runs: usize, sizes: &Sizes) -> Result<(), Box<dyn Error>> {
    let inputs = stage.inputs().iter().map(|input| Ok((input.name.clone(), random(input, sizes)?)));
    let inputs: Vec<(String, HostTensor)> = inputs.collect::<Result<_, String>>()?;
    let inputs: Vec<(&str, &HostTensor)> =
        inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let outputs: Vec<String> = stage.outputs().iter().map(|output| output.name.clone()).collect();
    let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
    for _ in 0..runs {
        stage.run(&inputs, &outputs)?;
    }
    Ok(())
}

fn figures(memory: &StageMemory, peak: u64) -> serde_json::Value {
    serde_json::json!({
        "peak": peak,
        "predicted": memory.predicted.total(),
        "device": memory.predicted.device,
        "host": memory.predicted.host,
        "weights": memory.weights_uploaded,
        "live": memory.peak.map(|peak| memory.timeline[peak].live),
        "unknown": memory.unknown,
    })
}

/// Puts `x + 0 * (x x^T) x` in the place of an input x [1,rows,columns].
fn hide_square(graph: &mut Graph, input: &str) -> Result<(), String> {
    let x = graph.find(input).filter(|id| graph.inputs.contains(id)).ok_or("no such input to hide behind")?;
    let mut readers: Vec<(_, Node)> = graph.nodes().map(|(id, node)| (id, node.clone())).collect();
    let zero = graph.add_constant("hidden/zero", Tensor::from_f32(&[], &[0.0]));
    let mut nodes = Vec::new();
    let mut op = |op_type: &str, inputs: &[ValueId], attributes: Vec<(String, Attribute)>| {
        let name = format!("hidden/{}", nodes.len());
        let output = graph.value(&name);
        let inputs = inputs.iter().copied().map(Some).collect();
        let op_type = op_type.to_owned();
        nodes.push(Node {
            op_type,
            name,
            inputs,
            outputs: vec![Some(output)],
            attributes,
            ..Node::default()
        });
        output
    };
    let transposed = op("Transpose", &[x], vec![("perm".to_owned(), Attribute::Ints(vec![0, 2, 1]))]);
    let square = op("MatMul", &[x, transposed], Vec::new());
    let rows = op("MatMul", &[square, x], Vec::new());
    let nothing = op("Mul", &[rows, zero], Vec::new());
    let same = op("Add", &[x, nothing], Vec::new());
    for (place, (id, node)) in readers.iter_mut().enumerate() {
        node.inputs.iter_mut().filter(|input| **input == Some(x)).for_each(|input| *input = Some(same));
        let before = if place == 0 { std::mem::take(&mut nodes) } else { Vec::new() };
        graph.replace_node(*id, before.into_iter().chain([node.clone()]).collect());
    }
    Ok(())
}

fn size(text: &str) -> Result<(String, usize), Box<dyn Error>> {
    let (name, size) = text.split_once('=').ok_or_else(|| format!("{text}: no SYMBOL=SIZE"))?;
    Ok((name.to_owned(), size.parse()?))
}

/// Bytes.
fn resident_peak() -> Result<u64, Box<dyn Error>> {
    let process = MemorySource::at("/").process(std::process::id());
    Ok(process.ok_or("the system tells nothing of this process")?.peak)
}

/// Values in -1..1, or token ids.
fn random(input: &TensorInfo, sizes: &Sizes) -> Result<HostTensor, String> {
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
