//! `viaduct inspect`

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::Context;
use clap::Args;
use serde_json::{Value, json};
use viaduct_export::{
    bundle::{Bundle, PortDim, Stages, gains},
    files::read_limited,
    onnx::{Graph, ValueId, ValueType, read_graph},
};

use super::{ProgressStyle, exit::UsageError, model::ModelArguments, printer::print, progress::Progress};
use crate::{
    hub::{ModelName, Need},
    pipeline::image::png_texts,
    printable,
    verify::summaries,
};

/// Larger than any picture that `viaduct generate` writes.
const MAX_PICTURE: u64 = 256 << 20;

/// Show what a bundle, an ONNX model or a picture made by `viaduct generate` is.
#[derive(Args)]
pub struct Arguments {
    /// Bundle folder, .onnx file or .png file, or a repository (owner/name), which is downloaded if it is not in the cache
    path: ModelName,
    #[command(flatten)]
    models: ModelArguments,
    /// Read every file of a bundle and compare its SHA-256
    #[arg(long)]
    hashes: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut progress = Progress::new(ProgressStyle::Auto);
    // Hashes are of all files; the rest shows in the graphs.
    let is_local = matches!(arguments.path, ModelName::Path(_));
    let need = if is_local || arguments.hashes { Need::Bundle } else { Need::Graphs };
    let path = &arguments.models.folder(&arguments.path, need, &mut progress)?;
    drop(progress);
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_lowercase();
    let report = match extension.as_str() {
        _ if path.is_dir() => bundle(path, need, arguments.hashes)?,
        "png" => picture(path)?,
        "onnx" => model(path)?,
        _ if Bundle::is_described_by(path) => {
            bundle(path.parent().unwrap_or(Path::new(".")), need, arguments.hashes)?
        }
        _ if !path.exists() => {
            fs::metadata(path).with_context(|| path.display().to_string())?;
            Value::Null
        }
        _ => {
            let message = format!("{}: not a bundle folder, an .onnx or a .png file", path.display());
            return Err(UsageError(message).into());
        }
    };
    print(&if arguments.json { format!("{report}\n") } else { lines(&report, 0) })
}

fn bundle(path: &Path, need: Need, hashes: bool) -> anyhow::Result<Value> {
    let bundle = need.open(path)?;
    if hashes {
        bundle.verify_hashes(&mut |_| ())?;
    }
    let manifest = &bundle.manifest;
    // A list, because JSON objects have no order and stages do.
    let stages: Vec<Value> = manifest
        .stages
        .iter()
        .map(|stage| {
            let ports = |ports: &[viaduct_export::bundle::Port]| -> Vec<String> {
                ports.iter().map(|p| format!("{} {} {}", p.name, p.dtype, dims(&p.dims))).collect()
            };
            json!({ "name": stage.name, "inputs": ports(&stage.inputs), "outputs": ports(&stage.outputs) })
        })
        .collect();
    let hashed = match (bundle.states_hashes(), hashes) {
        (false, _) => "not stated in this layout",
        (true, true) => "all equal",
        (true, false) => "not read (--hashes reads them)",
    };
    let mut report = json!({
        "bundle": manifest.name, "family": manifest.family, "profile": manifest.profile, "writer": manifest.writer,
        "source": manifest.source, "bytes": bundle.bytes(), "files": manifest.files.len(),
        "hashes": hashed, "parameters": manifest.parameters, "stages": stages,
    });
    if !manifest.verified.is_empty() {
        report["verified"] = summaries(&manifest.verified).into();
    }
    if bundle.is_imported() && need == Need::Bundle {
        report["reexport_gains"] = serde_json::to_value(gains(&bundle)?)?;
    }
    Ok(report)
}

fn dims(dims: &[PortDim]) -> String {
    let dims: Vec<String> = dims
        .iter()
        .map(|dim| match dim {
            PortDim::Fixed(n) => n.to_string(),
            PortDim::Symbol(name) => name.clone(),
        })
        .collect();
    format!("[{}]", dims.join(","))
}

fn picture(path: &Path) -> anyhow::Result<Value> {
    let bytes = read_limited(path, MAX_PICTURE).with_context(|| path.display().to_string())?;
    let texts = png_texts(&bytes).with_context(|| path.display().to_string())?;
    if texts.is_empty() {
        return Ok(json!({ "note": "a PNG without texts; not made by viaduct" }));
    }
    Ok(Value::Object(texts.into_iter().map(|(keyword, text)| (keyword, Value::String(text))).collect()))
}

fn model(path: &Path) -> anyhow::Result<Value> {
    let model = read_graph(path)?;
    let graph = &model.graph;
    let mut operators: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, node) in graph.nodes() {
        *operators.entry(&node.op_type).or_default() += 1;
    }
    let opsets: Vec<String> = model
        .opsets
        .iter()
        .map(|(domain, version)| format!("{} {version}", if domain.is_empty() { "onnx" } else { domain }))
        .collect();
    Ok(json!({
        "graph": graph.name, "producer": model.producer, "opsets": opsets,
        "inputs": ports(graph, &graph.inputs), "outputs": ports(graph, &graph.outputs),
        "nodes": graph.nodes().count(), "operators": operators, "constant_bytes": model.constant_bytes(),
    }))
}

/// `ctx f32 [1,text_seq,192]`
fn ports(graph: &Graph, ids: &[ValueId]) -> Vec<String> {
    let port = |id: &ValueId| match &graph[*id].ty {
        Some(ValueType::Tensor { dtype, shape: Some(shape) }) => {
            let dims: Vec<String> = shape.iter().map(ToString::to_string).collect();
            format!("{} {} [{}]", graph[*id].name, dtype.name(), dims.join(","))
        }
        Some(ValueType::Tensor { dtype, shape: None }) => format!("{} {}", graph[*id].name, dtype.name()),
        _ => graph[*id].name.clone(),
    };
    ids.iter().map(port).collect()
}

/// Keys and values, nested ones indented.
fn lines(value: &Value, depth: usize) -> String {
    let indent = "  ".repeat(depth);
    let Value::Object(entries) = value else { return String::new() };
    let entry = |(key, value): (&String, &Value)| match value {
        Value::Object(_) => format!("{indent}{key}:\n{}", lines(value, depth + 1)),
        Value::String(text) => format!("{indent}{key}: {}\n", printable::one_line(text)),
        Value::Array(items) if items.iter().all(Value::is_string) => {
            let items = items.iter().filter_map(Value::as_str).map(printable::one_line);
            format!("{indent}{key}:\n{}", items.map(|item| format!("{indent}  {item}\n")).collect::<String>())
        }
        Value::Array(items) if items.iter().all(Value::is_object) => {
            let items = items.iter().map(|item| format!("{}\n", lines(item, depth + 1)));
            format!("{indent}{key}:\n{}", items.collect::<String>())
        }
        other => format!("{indent}{key}: {other}\n"),
    };
    entries.iter().map(entry).collect()
}
