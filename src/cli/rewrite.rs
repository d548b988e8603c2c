//! `viaduct rewrite`

mod list;
mod result;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::Context;
use clap::{Args, ValueEnum};
use regex::Regex;
use viaduct_export::{
    bytes::ByteSize,
    onnx::{DType, Model, WriteOptions, data_files, read_model, write_model_with},
    passes::{
        AttentionForm, Linears, Part, Pass, Refusal, SEQUENCES, Settings, Split, Splitting, apply, pass,
        sequences, split, split_named,
    },
    quant::BlockFormat,
};

use self::{
    list::list,
    result::{Counts, Rewrite},
};
use super::{
    ProgressArguments, dimension, exit::UsageError, model_folder, printer::print, progress::Progress,
};
use crate::{
    atomic_file::FileError,
    pipeline::event::{Event, Listener},
    printable,
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
    /// The .onnx file to write; with a split, the folder
    #[arg(short, long, value_name = "PATH", required_unless_present = "list")]
    out: Option<PathBuf>,
    /// A named sequence of passes; may be repeated
    #[arg(long, value_name = "NAME")]
    passes: Vec<String>,
    /// A single pass, after the sequences; may be repeated
    #[arg(long, value_name = "NAME")]
    pass: Vec<String>,
    /// List the passes, sequences and splits
    #[arg(long)]
    list: bool,
    /// Bind a size of the graph for good; may be repeated
    #[arg(long, value_name = "NAME=N", value_parser = bound)]
    dim: Vec<(String, usize)>,
    /// How attention is written
    #[arg(long, value_enum, default_value_t)]
    attention: Attention,
    /// Slices of the query rows of attention that is written out
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    slices: u16,
    #[command(flatten)]
    linears: LinearArguments,
    #[command(flatten)]
    splitting: SplitArguments,
    /// Replace an existing file, or folder of models
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
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = block)]
    block: usize,
    /// How exactly quantised products are computed: 0 as exact as weights allow, 4 with activations in 8 bits, which is fast on
    /// GPUs without matrix units
    #[arg(long, value_name = "0..4", default_value_t = 4, value_parser = clap::value_parser!(i64).range(0..=4))]
    accuracy_level: i64,
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

/// Whether and where the model is cut, after the passes, into parts that run one after another.
#[derive(Args)]
struct SplitArguments {
    /// Cut the model into parts; with --at or --max-bytes alone, split_at
    #[arg(long, value_name = "NAME")]
    split: Option<String>,
    /// Cut behind what this value depends on; may be repeated
    #[arg(long, value_name = "VALUE")]
    at: Vec<String>,
    /// Cut so that no part takes more: weights and live values, or with split_vae what WebGPU is predicted to take
    #[arg(long, value_name = "SIZE", conflicts_with = "at")]
    max_bytes: Option<ByteSize>,
    /// A size of the graph, which stays open, to count bytes for; may be repeated
    #[arg(long, value_name = "NAME=N", value_parser = bound)]
    size: Vec<(String, usize)>,
    /// Up blocks of an image decoder that begin a part of their own, counted from 0
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    cuts: Vec<usize>,
    /// Query rows per run of an attention of its own; left open otherwise
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    chunk_rows: Option<u32>,
}

impl SplitArguments {
    /// The split that was asked for.
    fn chosen(&self) -> anyhow::Result<Option<&'static Split>> {
        let name = match &self.split {
            Some(name) => name.as_str(),
            None if !self.at.is_empty() || self.max_bytes.is_some() => "split_at",
            None if !self.cuts.is_empty() || self.chunk_rows.is_some() || !self.size.is_empty() => {
                let message =
                    "--cuts, --chunk-rows and --size are for a split: add --split NAME (see --list)";
                return Err(UsageError(message.to_owned()).into());
            }
            None => return Ok(None),
        };
        Ok(Some(split_named(name)?))
    }

    fn settings(&self) -> Splitting {
        Splitting {
            at: self.at.clone(),
            max_bytes: self.max_bytes.map(|bytes| bytes.0),
            sizes: self.size.iter().cloned().collect(),
            cuts: self.cuts.clone(),
            chunk_rows: self.chunk_rows.map(|rows| rows as usize),
        }
    }
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
  viaduct rewrite model.onnx -o model2.onnx --pass fold_constants --pass drop_dead
  viaduct rewrite vae.onnx -o vae-stages --passes webgpu --split split_vae --cuts 2,3
  viaduct rewrite model.onnx -o parts --max-bytes 512MiB --size rows=4096";

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.list {
        return print(&list(arguments.json));
    }
    let (Some(source), Some(out)) = (&arguments.source, &arguments.out) else {
        return Err(UsageError("a model and -o are needed".to_owned()).into());
    };
    let chosen_split = arguments.splitting.chosen()?;
    match chosen_split {
        Some(_) => model_folder::check_target(source, out, model_folder::ENDINGS, arguments.force)?,
        None => check_target(source, out, arguments.force)?,
    }
    let passes = chosen(arguments, chosen_split.is_some())?;
    let settings = settings(arguments);
    let started = Instant::now();
    let mut progress = Progress::new(arguments.progress.progress);
    let mut model = read_model(source)?;
    if chosen_split.is_none() {
        check_data(&model, out, arguments.force)?;
    }
    let before = Counts::of(&model);
    let reports = apply(&mut model, &passes, &settings)?;
    let parts = chosen_split.map(|chosen| cut(&model, chosen, &settings)).transpose()?;
    let mut writing = Writing { progress: &mut progress, done: 0, total: 0 };
    match &parts {
        Some(parts) => writing.parts(&parts.parts, out, arguments.force)?,
        None => writing.model(&model, out)?,
    }
    drop(progress);
    let result = Rewrite { out, before, after: Counts::of(&model), reports, parts, started };
    print(&if arguments.json { result.json() } else { result.table() })
}

/// A model that was cut.
struct Cut {
    parts: Vec<Part>,
    /// Cuts that were not made.
    refused: Vec<Refusal>,
}

fn cut(model: &Model, chosen: &Split, settings: &Settings) -> anyhow::Result<Cut> {
    let (parts, outcome) = split(model, chosen, settings)?;
    match outcome.refused.first() {
        Some(refusal) if parts.is_empty() => {
            let message =
                format!("{} leaves the model whole: {}: {}", chosen.name, refusal.place, refusal.why);
            Err(UsageError(printable::lines(&message)).into())
        }
        _ => Ok(Cut { parts, refused: outcome.refused }),
    }
}

/// Writes models and says how far it is.
struct Writing<'a> {
    progress: &'a mut Progress,
    done: u64,
    total: u64,
}

impl Writing<'_> {
    fn model(&mut self, model: &Model, out: &Path) -> anyhow::Result<()> {
        self.total = model.constant_bytes();
        if let Some(folder) = out.parent() {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make the folder {}", folder.display()))?;
        }
        write_model_with(model, out, &WriteOptions::default(), &mut |bytes| self.wrote(bytes))?;
        Ok(())
    }

    fn parts(&mut self, parts: &[Part], out: &Path, force: bool) -> anyhow::Result<()> {
        self.total = parts.iter().map(|part| part.model.constant_bytes()).sum();
        model_folder::write(parts, out, force, &mut |bytes| self.wrote(bytes))
    }

    fn wrote(&mut self, bytes: u64) {
        self.done += bytes;
        let (what, done, total) = ("writing".to_owned(), self.done, Some(self.total));
        self.progress.on_event(Event::Bytes { what, done, total });
    }
}

/// The passes that were asked for, in order.
fn chosen(arguments: &Arguments, splits: bool) -> anyhow::Result<Vec<&'static Pass>> {
    let names: Vec<&str> = arguments.passes.iter().map(String::as_str).collect();
    let mut passes = sequences(&names)?;
    // Sequences bind sizes; single passes do where a size is given.
    if !arguments.dim.is_empty() && passes.is_empty() {
        passes.push(pass("bind_sizes")?);
    }
    for name in &arguments.pass {
        passes.push(pass(name)?);
    }
    if passes.is_empty() && !splits {
        let names: Vec<&str> = SEQUENCES.iter().map(|sequence| sequence.name).collect();
        let message =
            format!("nothing to do: --passes {}, --pass NAME or --split NAME (see --list)", names.join("|"));
        return Err(UsageError(message).into());
    }
    Ok(passes)
}

/// Kernels count elements in 32 bits with a sign.
const LARGEST_SIZE: usize = i32::MAX as usize;

/// `NAME=N`, a size that a graph may have when it runs.
fn bound(text: &str) -> Result<(String, usize), String> {
    let (name, size) = dimension(text)?;
    match size <= LARGEST_SIZE {
        true => Ok((name, size)),
        false => Err(format!("no kernel takes so many; at most {LARGEST_SIZE}")),
    }
}

/// The size of a block that the format knows.
fn block(text: &str) -> Result<usize, String> {
    let block = text.parse().map_err(|e| format!("{e}"))?;
    let format = BlockFormat { bits: 8, block, symmetric: true, scale: DType::F32 };
    format.check().map_err(|e| e.to_string()).map(|()| block)
}

fn settings(arguments: &Arguments) -> Settings {
    let LinearArguments { block, accuracy_level, symmetric, include, exclude } = &arguments.linears;
    let linears = Linears {
        block: *block,
        symmetric: *symmetric,
        accuracy_level: *accuracy_level,
        include: include.clone(),
        rules: exclude.iter().map(|name| (name.clone(), None)).collect(),
    };
    let attention = match arguments.attention {
        Attention::Fused => AttentionForm::Fused,
        Attention::Written => AttentionForm::Written { slices: usize::from(arguments.slices) },
    };
    let split = arguments.splitting.settings();
    Settings { sizes: arguments.dim.iter().cloned().collect(), linears, attention, split }
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
        let message = format!("{} is a folder: name an .onnx file, or a folder with --split", out.display());
        return Err(UsageError(message).into());
    }
    if !out.is_file() {
        return Err(FileError::NotRegular(out.to_owned()).into());
    }
    if force { Ok(()) } else { Err(FileError::Exists(out.to_owned()).into()) }
}

/// Refuses to write over data files: others' without `--force`, and the source's own in any case.
fn check_data(model: &Model, out: &Path, force: bool) -> anyhow::Result<()> {
    let read: BTreeSet<PathBuf> =
        model.mapped_files().filter_map(|file| fs::canonicalize(&file.path).ok()).collect();
    for path in data_files(out) {
        if fs::canonicalize(&path).is_ok_and(|path| read.contains(&path)) {
            let message =
                format!("{} holds weights of the model that is read: give -o another name", path.display());
            return Err(UsageError(message).into());
        }
        if !force {
            return Err(FileError::Exists(path).into());
        }
    }
    Ok(())
}
