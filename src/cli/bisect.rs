//! `viaduct bisect`

mod verdict;

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use viaduct_export::{
    arch::SizesRequest,
    bundle::{Bundle, Stages},
    onnx::{Model, read_model},
    shapes::Sizes,
};

use super::{
    DeviceArguments, ProgressArguments, SizeArguments, dimension, exit::UsageError, memory::MemoryArguments,
    model_folder, printer::print, progress::Progress, report::check_names,
};
use crate::{
    bisect::{
        BisectError, Form, Limits, OnDevice, Options, Other, Picture, Place, Report, Subject, TensorFiles,
        Tensors, Tolerance, bind_by_tensors, bisect, fits, folder_name, inputs, prepare, probe_bytes, quoted,
        recorded_inputs,
    },
    pipeline::event::{Event, Listener},
    runtime::{Optimisation, Provider, Runtime},
    verify::Oracle,
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
    #[arg(long, value_name = "cpu|webgpu")]
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

/// Endings of the files that a reproduction consists of.
const REPRODUCTION: &[&str] = &["onnx", "data", "safetensors"];

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    check(arguments)?;
    let a = Located::open(&arguments.a, arguments)?;
    let b = arguments.b.as_deref().map(|path| Located::open(path, arguments)).transpose()?;
    let given = arguments.inputs.as_deref().map(TensorFiles::open).transpose()?;
    let oracle = arguments.oracle.as_deref().map(TensorFiles::open).transpose()?;
    let mut progress = Progress::new(arguments.progress.progress);
    let devices = Devices::start(arguments, &mut progress)?;
    let mut comparison = Comparison { arguments, a, b, given, oracle, devices };
    let report = comparison.run(&mut progress)?;
    drop(progress);
    print(&if arguments.json {
        format!("{}\n", serde_json::to_string_pretty(&report)?)
    } else {
        verdict::table(&report)
    })?;
    Ok(report.check()?)
}

fn usage(message: impl Into<String>) -> anyhow::Error {
    UsageError(message.into()).into()
}

fn check(arguments: &Arguments) -> anyhow::Result<()> {
    arguments.device.check()?;
    if arguments.against == Some(Provider::Auto) {
        return Err(usage("--against auto: name a provider, cpu or webgpu"));
    }
    match &arguments.out {
        Some(out) => Ok(model_folder::check_target(&arguments.a, out, REPRODUCTION, arguments.force)?),
        None => Ok(()),
    }
}

/// A graph of the command line.
struct Located {
    name: String,
    model: Model,
    /// Of a bundle's stage: the bundle, and the stage's name.
    stage: Option<(Bundle, String)>,
}

impl Located {
    fn open(path: &Path, arguments: &Arguments) -> anyhow::Result<Located> {
        if !path.is_dir() {
            if arguments.stage.is_some() {
                return Err(usage(format!("--stage is for bundles, and {} is none", path.display())));
            }
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            return Ok(Located { name, model: read_model(path)?, stage: None });
        }
        let bundle = Bundle::open(path)?;
        let stages = bundle.stage_names();
        let stage = match (&arguments.stage, &stages[..]) {
            (Some(stage), _) if stages.contains(&stage.as_str()) => stage.clone(),
            (None, [only]) => (*only).to_owned(),
            (asked, _) => {
                let asked = asked.as_ref().map(|stage| format!(" {stage}")).unwrap_or_default();
                let stages = stages.join(", ");
                return Err(usage(format!("--stage{asked}: name a stage of {}: {stages}", path.display())));
            }
        };
        let model = if arguments.as_is { bundle.original(&stage)? } else { bundle.model(&stage)? };
        let folder = path.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = format!("{}/{stage}", folder.unwrap_or_else(|| path.display().to_string()));
        Ok(Located { name, model, stage: Some((bundle, stage)) })
    }
}

/// The devices of both sides; there is one for a comparison with tensors.
struct Devices {
    a: Runtime,
    b: Option<Runtime>,
}

impl Devices {
    fn start(arguments: &Arguments, listener: &mut dyn Listener) -> anyhow::Result<Devices> {
        let device = &arguments.device;
        let a = device.start(listener)?;
        let own = a.device().provider;
        let b = match (&arguments.oracle, &arguments.b, arguments.against) {
            (Some(_), ..) => None,
            (None, _, Some(provider)) => Some(device.start_on(provider, listener)?),
            (None, Some(_), None) => Some(device.start_on(own, listener)?),
            (None, None, None) => Some(device.start_on(Provider::Cpu, listener)?),
        };
        let same = b.as_ref().is_some_and(|b| b.device().provider == own);
        if same && arguments.b.is_none() {
            return Err(usage(format!(
                "both sides would be the same graph on the {own} provider: choose another with --ep or --against, name a second graph, or give --oracle"
            )));
        }
        Ok(Devices { a, b })
    }
}

struct Comparison<'a> {
    arguments: &'a Arguments,
    a: Located,
    b: Option<Located>,
    given: Option<TensorFiles>,
    oracle: Option<TensorFiles>,
    devices: Devices,
}

/// Graphs that are ready to run.
struct Prepared {
    a: Subject,
    sizes: Sizes,
    /// A second graph, with its sizes.
    b: Option<(Subject, Sizes)>,
    /// Bytes of values that both sides can show at once.
    probe_bytes: u64,
}

impl Comparison<'_> {
    fn run(&mut self, listener: &mut dyn Listener) -> anyhow::Result<Report> {
        let arguments = self.arguments;
        let picture = self.picture()?;
        let Prepared { a, sizes, b, probe_bytes } = self.prepare(picture, listener)?;
        let (inputs_a, invented) = self.inputs(&a, &sizes, picture, listener)?;
        let inputs_b = match &b {
            Some((b, sizes)) => {
                let known = |name: &str| Ok(inputs_a.get(name).cloned());
                inputs(&b.model.graph, sizes, &known, arguments.seed)?.tensors
            }
            None => Tensors::new(),
        };
        let limits = Limits { probe_bytes, exhaustive: arguments.exhaustive };
        let options = options(arguments, self.devices.a.device().provider, limits);
        let names = self.names();
        let side_b = match (&self.oracle, &b, &mut self.devices.b) {
            (Some(tensors), ..) => Other::Tensors(tensors),
            (None, Some((subject, _)), Some(runtime)) => {
                Other::Graph(OnDevice { subject, runtime, inputs: &inputs_b })
            }
            (None, None, Some(runtime)) => Other::SameGraph(runtime),
            (None, _, None) => unreachable!("a comparison without tensors has a second device"),
        };
        let side_a = OnDevice { subject: &a, runtime: &mut self.devices.a, inputs: &inputs_a };
        let mut report = bisect(side_a, side_b, names, &options, listener)?;
        report.invented_inputs = invented;
        Ok(report)
    }

    /// Fits the graphs to their devices, and the values that are shown to what memory is left.
    fn prepare(
        &self,
        picture: Option<SizesRequest>,
        listener: &mut dyn Listener,
    ) -> anyhow::Result<Prepared> {
        let arguments = self.arguments;
        let form = Form { as_is: arguments.as_is, optimisation: arguments.optimise.optimisation() };
        let sizes = self.sizes(&self.a, picture)?;
        let place = self.place(&self.devices.a, listener);
        let (a, predicted) = prepare(&self.a.name, self.a.model.clone(), &sizes, &place, form)?;
        let bytes = probe_bytes(place.budget, predicted);
        let Some(runtime) = &self.devices.b else {
            return Ok(Prepared { a, sizes, b: None, probe_bytes: bytes });
        };
        let place = self.place(runtime, listener);
        let (b, predicted) = match &self.b {
            Some(located) => {
                let sizes = self.sizes(located, picture)?;
                let (b, predicted) = prepare(&located.name, located.model.clone(), &sizes, &place, form)?;
                (Some((b, sizes)), predicted)
            }
            None => (None, fits(&a.name, &a.model, &sizes, &place, a.pending_dispatches)?.0),
        };
        Ok(Prepared { a, sizes, b, probe_bytes: bytes.min(probe_bytes(place.budget, predicted)) })
    }

    fn place(&self, runtime: &Runtime, listener: &mut dyn Listener) -> Place {
        let budget = self.arguments.memory.budget(runtime.device(), listener);
        Place { profile: runtime.device().profile(), budget }
    }

    /// What is drawn, where bundles are compared: what is asked for, else what the reference drew, else the usual picture.
    fn picture(&self) -> anyhow::Result<Option<SizesRequest>> {
        let Some((bundle, _)) = &self.a.stage else { return Ok(None) };
        let mut picture = bundle.usual()?;
        if let Some(oracle) = self.reference()? {
            let asked = &oracle.request;
            picture =
                SizesRequest { width: asked.width, height: asked.height, steps: asked.steps, ..picture };
        }
        let [width, height] = self.arguments.size.asked();
        (picture.width, picture.height) = (width.unwrap_or(picture.width), height.unwrap_or(picture.height));
        Ok(Some(picture))
    }

    /// The oracle as `verify` knows it: with a request.
    fn reference(&self) -> anyhow::Result<Option<Oracle>> {
        let folder = self.arguments.oracle.as_deref().filter(|path| path.join("request.json").is_file());
        Ok(folder.map(Oracle::open).transpose()?)
    }

    /// Sizes of a graph's symbols: those that are typed, those of a bundle's picture, those of given tensors.
    fn sizes(&self, graph: &Located, picture: Option<SizesRequest>) -> anyhow::Result<Sizes> {
        check_names(&self.arguments.dim, [&graph.model].into_iter())?;
        let mut sizes = match (&graph.stage, picture) {
            (Some((bundle, _)), Some(picture)) => bundle.sizes(&picture)?,
            _ => Sizes::new(),
        };
        sizes.extend(self.arguments.dim.iter().cloned());
        for files in self.given.iter().chain(&self.oracle) {
            bind_by_tensors(&graph.model.graph, files, &mut sizes)?;
        }
        Ok(sizes)
    }

    /// Inputs of the first graph, and the names of those that are noise.
    fn inputs(
        &mut self,
        subject: &Subject,
        sizes: &Sizes,
        picture: Option<SizesRequest>,
        listener: &mut dyn Listener,
    ) -> anyhow::Result<(Tensors, Vec<String>)> {
        let recorded = self.recorded(picture, listener)?;
        let files: Vec<&TensorFiles> = self.given.iter().chain(&self.oracle).collect();
        let known = |name: &str| {
            if let Some(tensor) = recorded.get(name) {
                return Ok(Some(tensor.clone()));
            }
            let file = files.iter().find(|file| file.has(name));
            file.map_or(Ok(None), |file| file.tensor(name).map_err(BisectError::from))
        };
        let made = inputs(&subject.model.graph, sizes, &known, self.arguments.seed)?;
        if !made.invented.is_empty() {
            let names = made.invented.join(", ");
            listener.on_event(Event::note(format!("noise from seed {}: {names}", self.arguments.seed)));
        }
        Ok((made.tensors, made.invented))
    }

    /// Inputs from a picture's run, where one is asked for; the reference draws it as far as there is a choice.
    fn recorded(
        &mut self,
        picture: Option<SizesRequest>,
        listener: &mut dyn Listener,
    ) -> anyhow::Result<Tensors> {
        let reference = self.reference()?.filter(|_| self.given.is_none());
        let asked = match (&reference, &self.arguments.prompt, picture) {
            (Some(oracle), ..) => Picture::Oracle(oracle),
            (None, Some(prompt), Some(size)) => Picture::Asked { prompt, size, seed: self.arguments.seed },
            (None, Some(_), None) => return Err(usage("--prompt is for bundles; give a graph --inputs")),
            (None, None, _) => return Ok(Tensors::new()),
        };
        let located = self.b.as_ref().unwrap_or(&self.a);
        let Some((bundle, stage)) = &located.stage else { return Ok(Tensors::new()) };
        let runtime = self.devices.b.as_mut().unwrap_or(&mut self.devices.a);
        Ok(recorded_inputs(bundle, stage, &asked, runtime, listener)?)
    }

    /// What reports call the sides.
    fn names(&self) -> [String; 2] {
        let on = |name: &str, runtime: &Runtime| format!("{name} on {}", runtime.device());
        let b = match (&self.arguments.oracle, &self.b, &self.devices.b) {
            (_, b, Some(runtime)) => on(&b.as_ref().unwrap_or(&self.a).name, runtime),
            (Some(path), ..) => path.display().to_string(),
            _ => String::new(),
        };
        [on(&self.a.name, &self.devices.a), b]
    }
}

fn options(arguments: &Arguments, provider: Provider, limits: Limits) -> Options {
    let mut flags = vec!["--as-is".to_owned(), format!("--ep {provider}")];
    flags.extend(arguments.device.adapter.as_ref().map(|name| format!("--adapter {}", quoted(name))));
    let against = arguments.against.filter(|_| arguments.b.is_none());
    flags.extend(against.map(|provider| format!("--against {provider}")));
    flags.extend(arguments.optimise.flag().map(str::to_owned));
    flags.extend(arguments.tolerance.map(|tolerance| format!("--tolerance {tolerance:e}")));
    let out = arguments.out.clone();
    Options {
        tolerance: arguments.tolerance.map_or(Tolerance::Default, Tolerance::Fixed),
        limits,
        folder: Box::new(move |node| out.clone().unwrap_or_else(|| free_folder(node))),
        replace: arguments.force,
        flags,
    }
}

/// A folder of this node's name that is not there yet.
fn free_folder(node: &str) -> PathBuf {
    let name = folder_name(node);
    let others = (2..).map(|n: usize| format!("{name}-{n}"));
    let mut free = std::iter::once(name.clone()).chain(others).filter(|name| !Path::new(name).exists());
    free.next().unwrap_or(name).into()
}
