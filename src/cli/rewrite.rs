//! `viaduct rewrite`

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    path::{Path, PathBuf},
    time::Instant,
};

use clap::{Args, ValueEnum};
use regex::Regex;
use serde_json::json;
use viaduct_export::{
    bytes::ByteSize,
    onnx::{Model, WriteOptions, read_model, write_model_with},
    passes::{AttentionForm, Linears, PASSES, Pass, Report, SEQUENCES, Settings, apply, pass, sequence},
};

use super::{ProgressArguments, dimension, exit::UsageError, printer::print, progress::Progress};
use crate::{
    atomic_file::FileError,
    pipeline::event::{Event, Listener},
};

/// Rewrite an ONNX graph that another tool exported: leaner, and right and fast on WebGPU.
///
/// External data is read where it lies and streamed, so that a model of any size takes little memory. The new model's
/// weights go to NAME-00000.data, ... beside it. A table says for every pass what it rewrote, and what it left alone and
/// why.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// The model, an .onnx file; its external data lies beside it
    #[arg(required_unless_present = "list")]
    source: Option<PathBuf>,
    /// The .onnx file to write
    #[arg(short, long, value_name = "FILE", required_unless_present = "list")]
    out: Option<PathBuf>,
    /// A named sequence of passes; may be repeated
    #[arg(long, value_name = "NAME")]
    passes: Vec<String>,
    /// A single pass, after the sequences; may be repeated
    #[arg(long, value_name = "NAME")]
    pass: Vec<String>,
    /// List the passes and sequences
    #[arg(long)]
    list: bool,
    /// Bind a size of the graph for good; may be repeated
    #[arg(long, value_name = "NAME=N", value_parser = dimension)]
    dim: Vec<(String, usize)>,
    /// How attention is written
    #[arg(long, value_enum, default_value_t)]
    attention: Attention,
    /// Slices of the query rows of attention that is written out
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    slices: u16,
    #[command(flatten)]
    linears: LinearArguments,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub progress: ProgressArguments,
}

/// How weights of linear layers are quantised, in sequences that do it.
#[derive(Args)]
struct LinearArguments {
    /// Values that share a scale: 16, 32, 64, 128 or 256; fast kernels take 32
    #[arg(long, value_name = "N", default_value_t = 32)]
    block: usize,
    /// No zero points with 4 bits (8 bits never have them)
    #[arg(long)]
    symmetric: bool,
    /// Only weights whose name matches; may be repeated
    #[arg(long, value_name = "REGEX")]
    include: Vec<Regex>,
    /// Not these weights; may be repeated
    #[arg(long, value_name = "REGEX")]
    exclude: Vec<Regex>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Attention {
    /// One fused operator; `viaduct generate` writes it out where a device computes it wrongly
    #[default]
    Fused,
    /// MatMul, Softmax, MatMul: right on every device
    Written,
}

const EXAMPLES: &str = "\
Examples:
  viaduct rewrite --list
  viaduct rewrite model.onnx -o lean.onnx --passes lean
  viaduct rewrite dit.onnx -o out/dit.onnx --passes q8 --dim text_seq=512 --exclude 'norm_out|time'
  viaduct rewrite te.onnx -o te-safe.onnx --passes webgpu --attention written --slices 4
  viaduct rewrite model.onnx -o model2.onnx --pass fold_constants --pass drop_dead";

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.list {
        return print(&list(arguments.json));
    }
    let (Some(source), Some(out)) = (&arguments.source, &arguments.out) else {
        return Err(UsageError("a model and -o are needed".to_owned()).into());
    };
    check_target(source, out, arguments.force)?;
    let passes = chosen(arguments)?;
    let started = Instant::now();
    let mut progress = Progress::new(arguments.progress.progress);
    let mut model = read_model(source)?;
    let before = Counts::of(&model);
    let reports = apply(&mut model, &passes, &settings(arguments))?;
    let after = Counts::of(&model);
    let (mut done, total) = (0, Some(model.constant_bytes()));
    write_model_with(&model, out, &WriteOptions::default(), &mut |bytes| {
        done += bytes;
        progress.on_event(Event::Bytes { what: "writing".to_owned(), done, total });
    })?;
    drop(progress);
    let seconds = started.elapsed().as_secs_f64();
    if arguments.json {
        let reports: Vec<_> = reports.iter().map(report_json).collect();
        let value = json!({
            "model": out.to_string_lossy(), "seconds": seconds, "passes": reports,
            "before": before.json(), "after": after.json(),
        });
        return print(&format!("{value}\n"));
    }
    let table = table(&reports);
    print(&format!("{table}{}: {before} -> {after}, {seconds:.1} s\n", out.display()))
}

/// The passes that were asked for, in order.
fn chosen(arguments: &Arguments) -> anyhow::Result<Vec<&'static Pass>> {
    let mut passes = Vec::new();
    for name in &arguments.passes {
        passes.extend(sequence(name)?);
    }
    for name in &arguments.pass {
        passes.push(pass(name)?);
    }
    // Sequences share their beginnings.
    let mut seen = BTreeSet::new();
    passes.retain(|pass| seen.insert(pass.name));
    if passes.is_empty() {
        let names: Vec<&str> = SEQUENCES.iter().map(|sequence| sequence.name).collect();
        let message = format!("nothing to do: --passes {} or --pass NAME (see --list)", names.join("|"));
        return Err(UsageError(message).into());
    }
    Ok(passes)
}

fn settings(arguments: &Arguments) -> Settings {
    let LinearArguments { block, symmetric, include, exclude } = &arguments.linears;
    let linears = Linears {
        block: *block,
        symmetric: *symmetric,
        include: include.clone(),
        exclude: exclude.clone(),
        ..Linears::default()
    };
    let attention = match arguments.attention {
        Attention::Fused => AttentionForm::Fused,
        Attention::Written => AttentionForm::Written { slices: usize::from(arguments.slices) },
    };
    Settings { sizes: arguments.dim.iter().cloned().collect(), linears, attention }
}

/// Refuses a target that exists, or that is the source: its weights are read while the new ones are written.
fn check_target(source: &Path, out: &Path, force: bool) -> anyhow::Result<()> {
    if !out.exists() {
        return Ok(());
    }
    if fs::canonicalize(source).ok() == fs::canonicalize(out).ok() {
        let message = format!("{} cannot be rewritten in place: give -o another name", source.display());
        return Err(UsageError(message).into());
    }
    if out.is_dir() {
        return Err(FileError::IsDirectory(out.to_owned()).into());
    }
    if force { Ok(()) } else { Err(FileError::Exists(out.to_owned()).into()) }
}

/// What a model consists of, for the line that compares it with itself.
struct Counts {
    nodes: usize,
    constant_bytes: u64,
}

impl Counts {
    fn of(model: &Model) -> Counts {
        Counts { nodes: model.graph.nodes().count(), constant_bytes: model.constant_bytes() }
    }

    fn json(&self) -> serde_json::Value {
        json!({ "nodes": self.nodes, "constant_bytes": self.constant_bytes })
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} nodes, {} of constants", self.nodes, ByteSize(self.constant_bytes))
    }
}

fn table(reports: &[Report]) -> String {
    let width = reports.iter().map(|report| report.pass.name.len()).max().unwrap_or(0).max("pass".len());
    let mut text = format!("{:width$}  {:>7}  {:>7}  refused because\n", "pass", "matched", "applied");
    for report in reports {
        let (name, matched, applied) =
            (report.pass.name, report.applied + report.refused.len(), report.applied);
        text.push_str(format!("{name:width$}  {matched:>7}  {applied:>7}  ").trim_end());
        let indent = width + 2 * (2 + 7) + 2;
        for (i, (why, (count, place))) in report.reasons().into_iter().enumerate() {
            let start = if i == 0 { "  ".to_owned() } else { format!("\n{:indent$}", "") };
            text.push_str(&format!(
                "{start}{count} x {why} ({place}{})",
                if count > 1 { ", ..." } else { "" }
            ));
        }
        text.push('\n');
    }
    // Names come from files.
    text.replace(|c: char| c.is_control() && c != '\n', "\u{fffd}")
}

fn report_json(report: &Report) -> serde_json::Value {
    let refused: Vec<_> =
        report.refused.iter().map(|refusal| json!({ "place": refusal.place, "why": refusal.why })).collect();
    let matched = report.applied + report.refused.len();
    json!({ "pass": report.pass.name, "matched": matched, "applied": report.applied, "refused": refused })
}

fn list(as_json: bool) -> String {
    if as_json {
        let passes: Vec<_> = PASSES
            .iter()
            .map(|pass| json!({ "name": pass.name, "what": pass.what, "why": pass.why }))
            .collect();
        let sequences: BTreeMap<&str, _> = SEQUENCES
            .iter()
            .map(|sequence| {
                (
                    sequence.name,
                    json!({ "what": sequence.what, "after": sequence.after, "passes": sequence.passes }),
                )
            })
            .collect();
        return format!("{}\n", json!({ "passes": passes, "sequences": sequences }));
    }
    let mut text = "Sequences (--passes NAME):\n".to_owned();
    for sequence in SEQUENCES {
        text.push_str(&format!(
            "  {}: {}\n      {}{}\n",
            sequence.name,
            sequence.what,
            sequence.after.map_or(String::new(), |name| format!("{name}, then ")),
            sequence.passes.join(", ")
        ));
    }
    text.push_str("\nPasses (--pass NAME):\n");
    for pass in PASSES {
        text.push_str(&format!("  {}: {}\n      because {}\n", pass.name, pass.what, pass.why));
    }
    text
}
