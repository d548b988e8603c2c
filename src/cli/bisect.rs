//! `viaduct bisect`

mod comparison;
mod verdict;

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, ValueEnum};

use self::comparison::Comparison;
use super::{
    DeviceArguments, ProgressArguments, SizeArguments, dimension, memory::MemoryArguments, model_folder,
    printer::print, progress::Progress,
};
use crate::{
    bisect::folder_name,
    runtime::{Optimisation, Provider},
};

/// Find the first node at which two runs part.
///
/// Both sides compute on the same inputs, and their inner values are compared: those of one graph on two devices, of two
/// graphs, or of a graph and a reference. The answer is the node whose inputs agree and whose output does not, and a
/// one-node model that shows it. Two tensors agree if their relative L2 is at most 1e-4, or 2e-2 behind f16 or quantised
/// arithmetic, if NaNs and infinities are in the same places, and if no row points elsewhere; integers must be equal.
///
/// Values are shown by making them outputs, which keeps ONNX Runtime from fusing them away. So that it looks at the graph
/// that is written down, nothing is fused at all by default: `--optimise all` allows what a usual run does.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// What is suspected: a bundle (with --stage) or an .onnx file
    a: PathBuf,
    /// What it is compared with: another bundle or .onnx file of the same architecture; by default the same graph on the
    /// other provider
    b: Option<PathBuf>,
    /// The stage of the bundles
    #[arg(long, value_name = "NAME")]
    stage: Option<String>,
    /// The other side's provider: cpu for one graph, that of --ep for two
    #[arg(long, value_name = "cpu|webgpu", value_parser = other_provider)]
    against: Option<Provider>,
    /// Compare with these tensors: a folder of .npy and .safetensors (one that `viaduct verify --oracle` takes gives a
    /// bundle's inputs, too), or a .safetensors file; names are those of the graph's values
    #[arg(long, value_name = "PATH", conflicts_with_all = ["b", "against"])]
    oracle: Option<PathBuf>,
    /// Inputs by name: a .safetensors file, or a folder of .npy and .safetensors. What is missing is noise
    #[arg(long, value_name = "PATH")]
    inputs: Option<PathBuf>,
    /// Take the inputs of a bundle's stage from the run that draws this prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "inputs")]
    prompt: Option<String>,
    /// Seed of the noise, and of the prompt's picture
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    size: SizeArguments,
    /// Bind a size of the graph; may be repeated
    #[arg(long, value_name = "NAME=N", value_parser = dimension)]
    dim: Vec<(String, usize)>,
    /// Run the graph as it is written, also where it would be changed for the device (attention that is wrong when fused)
    #[arg(long)]
    as_is: bool,
    /// How far ONNX Runtime may change the graph
    #[arg(long, value_enum, default_value_t, value_name = "HOW")]
    optimise: Optimise,
    /// The largest relative L2 of values that agree, for all of them
    #[arg(long, value_name = "X", value_parser = tolerance, allow_negative_numbers = true)]
    tolerance: Option<f64>,
    /// Compare every value before the finding, to find errors that heal; without, only as far as that takes few runs
    #[arg(long)]
    exhaustive: bool,
    /// Folder for the one-node model, its inputs and what should come out; bisect-NODE by default
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Replace an earlier reproduction
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    memory: MemoryArguments,
    /// Print the verdict as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    device: DeviceArguments,
    #[command(flatten)]
    pub progress: ProgressArguments,
}

const EXAMPLES: &str = "\
Examples:
  viaduct bisect klein-q8 --stage transformer --ep webgpu       this GPU against the CPU
  viaduct bisect klein-q8 --stage transformer --prompt 'red apple' --as-is
  viaduct bisect klein-q8 klein-f16 --stage transformer --tolerance 5e-2
  viaduct bisect klein-f32 --stage transformer --oracle oracle  a bundle against reference tensors
  viaduct bisect mine.onnx theirs.onnx --inputs x.safetensors   two graphs on the same device
  viaduct bisect decoder.onnx --dim latent_height=16 --dim latent_width=16 --out broken-node

Exit code 0 if the runs agree, 3 if a node is found.";

/// How far ONNX Runtime may change the graph.
#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Optimise {
    /// Not at all
    #[default]
    None,
    /// Constants are folded, and what is redundant goes
    Basic,
    /// Nodes are fused as in a usual run, where no value between them is looked at
    All,
}

impl Optimise {
    fn optimisation(self) -> Optimisation {
        match self {
            Optimise::None => Optimisation::None,
            Optimise::Basic => Optimisation::Basic,
            Optimise::All => Optimisation::All,
        }
    }

    fn flag(self) -> Option<&'static str> {
        match self {
            Optimise::None => None,
            Optimise::Basic => Some("--optimise basic"),
            Optimise::All => Some("--optimise all"),
        }
    }
}

fn tolerance(text: &str) -> Result<f64, String> {
    let wrong = "write a number from 0 on, for example 1e-3";
    text.parse().ok().filter(|tolerance: &f64| tolerance.is_finite() && *tolerance >= 0.0).ok_or(wrong.into())
}

/// The other side's provider is no matter of chance.
fn other_provider(text: &str) -> Result<Provider, String> {
    let named = text.parse().ok().filter(|provider| *provider != Provider::Auto);
    named.ok_or_else(|| "name a provider, cpu or webgpu".to_owned())
}

/// Endings of the files that a reproduction consists of.
const REPRODUCTION: &[&str] = &["onnx", "data", "safetensors"];

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    check(arguments)?;
    let mut progress = Progress::new(arguments.progress.progress);
    let mut comparison = Comparison::open(arguments, &mut progress)?;
    let report = comparison.run(&mut progress)?;
    drop(progress);
    print(&if arguments.json {
        format!("{}\n", serde_json::to_string_pretty(&report)?)
    } else {
        verdict::table(&report)
    })?;
    let unwritten = report.found.as_ref().and_then(|found| found.reproduction.as_ref()?.unwritten.clone());
    match unwritten {
        Some(problem) => report.check().context(problem),
        None => Ok(report.check()?),
    }
}

fn check(arguments: &Arguments) -> anyhow::Result<()> {
    arguments.device.check()?;
    if let Some(out) = &arguments.out {
        model_folder::check_target(&arguments.a, out, REPRODUCTION, arguments.force)?;
    }
    let out = arguments.out.clone().unwrap_or_else(|| folder_name("").into());
    Ok(model_folder::check_writable(&out)?)
}
