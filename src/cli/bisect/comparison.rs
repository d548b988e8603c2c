//! What the command line asks to be compared: graphs, devices, inputs and reference tensors.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use viaduct_export::{
    arch::SizesRequest,
    bundle::{Bundle, Stages},
    onnx::{Model, read_model},
    shapes::Sizes,
};

use super::{
    super::{exit::UsageError, report::check_names},
    Arguments,
};
use crate::{
    bisect::{
        BisectError, Form, Inputs, Limits, OnDevice, Options, Other, Picture, Place, Report, Subject,
        TensorFiles, Tensors, Tolerance, bind_by_graph, bind_by_tensors, bisect, fits, folder_name, inputs,
        needs_optimisation_on_cpu, prepare, probe_bytes, quoted, recorded_inputs,
    },
    pipeline::event::{Event, Listener},
    runtime::{Provider, Runtime},
    verify::Oracle,
};

/// Said of a finding that may be the reference's fault.
const DOUBTFUL_ON_CPU: &str = "the graph has MatMulNBits in f16 with accuracy_level 4, behind which ONNX Runtime's CPU provider may lose values unless its optimisations are all on: see whether the finding stays with --optimise all (docs/bisect.md)";

fn usage(message: impl Into<String>) -> anyhow::Error {
    UsageError(message.into()).into()
}

/// Refuses what says something of a picture: a graph of its own draws none.
fn check_no_picture(arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.prompt.is_some() {
        return Err(usage("--prompt is for bundles; give a graph --inputs"));
    }
    if arguments.size.asked() != [None, None] {
        return Err(usage("--size is for bundles; bind a graph's sizes with --dim"));
    }
    Ok(())
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

/// Two sides that are ready to be compared.
pub struct Comparison<'a> {
    arguments: &'a Arguments,
    a: Located,
    b: Option<Located>,
    given: Option<TensorFiles>,
    oracle: Option<TensorFiles>,
    /// The oracle as `verify` knows it, with a request; none without one.
    reference: Option<Oracle>,
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
    /// Opens what the command line names, and starts the devices.
    pub fn open<'a>(arguments: &'a Arguments, listener: &mut dyn Listener) -> anyhow::Result<Comparison<'a>> {
        let a = Located::open(&arguments.a, arguments)?;
        let b = arguments.b.as_deref().map(|path| Located::open(path, arguments)).transpose()?;
        check_names(&arguments.dim, [Some(&a), b.as_ref()].into_iter().flatten().map(|graph| &graph.model))?;
        if a.stage.is_none() {
            check_no_picture(arguments)?;
        }
        let given = arguments.inputs.as_deref().map(TensorFiles::open).transpose()?;
        let oracle = arguments.oracle.as_deref().map(TensorFiles::open).transpose()?;
        let request = arguments.oracle.as_deref().filter(|path| path.join("request.json").is_file());
        let reference = request.filter(|_| a.stage.is_some()).map(Oracle::open).transpose()?;
        let devices = Devices::start(arguments, listener)?;
        Ok(Comparison { arguments, a, b, given, oracle, reference, devices })
    }

    pub fn run(&mut self, listener: &mut dyn Listener) -> anyhow::Result<Report> {
        let arguments = self.arguments;
        let picture = self.picture()?;
        let Prepared { a, sizes, b, probe_bytes } = self.prepare(picture, listener)?;
        self.check_given(&a, b.as_ref().map(|(b, _)| b))?;
        let recorded = self.recorded(picture, listener)?;
        let Inputs { tensors: inputs_a, mut invented } = self.inputs('A', &a, &sizes, &recorded)?;
        let inputs_b = match &b {
            Some((b, sizes)) => {
                let made = self.inputs('B', b, sizes, &inputs_a)?;
                invented.extend(made.invented);
                made.tensors
            }
            None => Tensors::new(),
        };
        if !invented.is_empty() {
            let names = invented.join(", ");
            listener.on_event(Event::note(format!("noise from seed {}: {names}", arguments.seed)));
        }
        let limits = Limits { probe_bytes, exhaustive: arguments.exhaustive };
        let options = options(arguments, self.devices.a.device().provider, limits);
        let names = self.names();
        let is_doubtful = self.is_doubtful(&a, b.as_ref().map_or(&a, |(b, _)| b));
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
        if is_doubtful && report.found.is_some() {
            listener.on_event(Event::note(DOUBTFUL_ON_CPU));
        }
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
        let (sizes, sizes_b) = self.both_sizes(picture)?;
        let place = self.place(&self.devices.a, listener);
        let (a, predicted) = prepare(&self.a.name, self.a.model.clone(), &sizes, &place, form)?;
        let bytes = probe_bytes(place.budget, predicted);
        let Some(runtime) = &self.devices.b else {
            return Ok(Prepared { a, sizes, b: None, probe_bytes: bytes });
        };
        let place = self.place(runtime, listener);
        let (b, predicted) = match self.b.as_ref().zip(sizes_b) {
            Some((located, sizes)) => {
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
        if let Some(oracle) = &self.reference {
            let asked = &oracle.request;
            picture =
                SizesRequest { width: asked.width, height: asked.height, steps: asked.steps, ..picture };
        }
        let [width, height] = self.arguments.size.asked();
        (picture.width, picture.height) = (width.unwrap_or(picture.width), height.unwrap_or(picture.height));
        Ok(Some(picture))
    }

    /// Sizes of both graphs. A symbol of one counts for the other, too, where inputs of the same name have it.
    fn both_sizes(&self, picture: Option<SizesRequest>) -> anyhow::Result<(Sizes, Option<Sizes>)> {
        let mut sizes = self.sizes(&self.a, picture)?;
        let Some(b) = &self.b else { return Ok((sizes, None)) };
        let mut sizes_b = self.sizes(b, picture)?;
        let (graph_a, graph_b) = (&self.a.model.graph, &b.model.graph);
        bind_by_graph(graph_a, graph_b, &sizes_b, &mut sizes);
        bind_by_graph(graph_b, graph_a, &sizes, &mut sizes_b);
        Ok((sizes, Some(sizes_b)))
    }

    /// Sizes of a graph's symbols: those that are typed, those of a bundle's picture, those of given tensors.
    fn sizes(&self, graph: &Located, picture: Option<SizesRequest>) -> anyhow::Result<Sizes> {
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

    /// Whether a side is on the CPU provider, which may compute its graph wrongly.
    fn is_doubtful(&self, a: &Subject, b: &Subject) -> bool {
        let sides = [(a, Some(&self.devices.a)), (b, self.devices.b.as_ref())];
        sides.into_iter().any(|(subject, runtime)| {
            runtime.is_some_and(|runtime| runtime.device().provider == Provider::Cpu)
                && needs_optimisation_on_cpu(subject)
        })
    }

    /// Refuses files none of whose tensors is an input.
    fn check_given(&self, a: &Subject, b: Option<&Subject>) -> anyhow::Result<()> {
        let Some(files) = &self.given else { return Ok(()) };
        let graphs = [Some(a), b].into_iter().flatten().map(|subject| &subject.model.graph);
        let names: BTreeSet<&str> =
            graphs.flat_map(|graph| graph.inputs.iter().map(|id| graph[*id].name.as_str())).collect();
        if names.is_empty() || names.iter().any(|name| files.has(name)) {
            return Ok(());
        }
        let names = names.into_iter().collect::<Vec<_>>().join(", ");
        let path = files.path().display();
        Err(usage(format!("--inputs {path}: none of its tensors is an input; the inputs are {names}")))
    }

    /// Inputs of a graph: what is known of them already, what files have, else noise.
    fn inputs(
        &self,
        side: char,
        subject: &Subject,
        sizes: &Sizes,
        known: &Tensors,
    ) -> anyhow::Result<Inputs> {
        let files: Vec<&TensorFiles> = self.given.iter().chain(&self.oracle).collect();
        let known = |name: &str| match known.get(name) {
            Some(tensor) => Ok(Some(tensor.clone())),
            None => files.iter().find(|file| file.has(name)).map_or(Ok(None), |file| file.tensor(name)),
        };
        let graph = || format!("graph {side} ({})", subject.name);
        inputs(&subject.model.graph, sizes, &known, self.arguments.seed)
            .map_err(|source| BisectError::Input { graph: graph(), source }.into())
    }

    /// Inputs from a picture's run, where one is asked for; the reference draws it as far as there is a choice.
    fn recorded(
        &mut self,
        picture: Option<SizesRequest>,
        listener: &mut dyn Listener,
    ) -> anyhow::Result<Tensors> {
        let reference = self.reference.as_ref().filter(|_| self.given.is_none());
        let asked = match (reference, &self.arguments.prompt, picture) {
            (Some(oracle), ..) => Picture::Oracle(oracle),
            (None, Some(prompt), Some(size)) => Picture::Asked { prompt, size, seed: self.arguments.seed },
            (None, ..) => return Ok(Tensors::new()),
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
