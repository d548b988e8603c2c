//! `viaduct generate`

mod pictures;
mod place;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use anyhow::Context;
use clap::Args;
use serde::Serialize;
use viaduct_export::bundle::Bundle;

use self::{
    pictures::{check_writable, files, folder_of, requests},
    place::Place,
};
use super::{
    DeviceArguments, ProgressArguments, SizeArguments,
    exit::UsageError,
    interrupt::{leave_with, on_interrupt},
    memory::MemoryArguments,
    model::ModelArguments,
    printer::print,
    progress::Progress,
    runs::{Exchange, identity, runs},
    stop_at::StopAt,
};
use crate::{
    atomic_file::{self, Existing},
    hub::{ModelName, Need},
    pipeline::{
        dump::Dump,
        event::{Event, Listener},
        image::{Colour, Picture, Provenance},
        probe::{NoProbe, Probe},
        run::{Run, Watch},
        run_folder::{Earlier, NoiseIdentity, RunFolder},
        runs::Runs,
        text_to_image::{Noise, Request, TextToImage},
    },
    plan::Plan,
    runtime::Device,
    tensor::HostTensor,
};

/// Draw a picture from a prompt.
///
/// The same seed gives the same noise as `torch.Generator("cpu").manual_seed(seed)` in diffusers. The PNG carries prompt,
/// seed, steps, size and bundle; `viaduct inspect picture.png` shows them.
///
/// A run that is interrupted or killed keeps what it has finished: the same command goes on from there, to the same picture.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Bundle folder, as made by `viaduct export`, or a repository (owner/name), which is downloaded at the first use
    #[arg(short, long)]
    bundle: ModelName,
    #[command(flatten)]
    models: ModelArguments,
    /// What to draw; several times for several pictures
    #[arg(short, long, required = true, allow_hyphen_values = true)]
    prompt: Vec<String>,
    /// Pictures of each prompt, with seeds that count up
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000), conflicts_with = "noise")]
    count: u16,
    /// What not to draw, for models that are not distilled to one prompt (Qwen-Image); each step then takes twice as long
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    negative: Option<String>,
    /// How far away from the negative prompt, a number above 1
    #[arg(long, value_name = "SCALE", default_value_t = 4.0, requires = "negative")]
    guidance: f32,
    /// Colour behind what is transparent (#rrggbb, white, black or grey): the PNG of a model that draws transparency
    /// (Qwen-Image) is then opaque
    #[arg(long, value_name = "COLOUR")]
    background: Option<Colour>,
    /// PNG file to write; `out.png` becomes `out-1.png`, `out-2.png`, ... where there are several pictures
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    size: SizeArguments,
    /// Seed of the noise; drawn and printed if absent
    #[arg(long, allow_negative_numbers = true)]
    seed: Option<u64>,
    /// Sampling steps; the recipe's number by default
    #[arg(long, visible_alias = "steps", value_name = "N")]
    num_steps: Option<usize>,
    /// Initial noise [1,C,h,w] from an .npy file instead of a seed
    #[arg(long, value_name = "FILE", conflicts_with = "seed")]
    noise: Option<PathBuf>,
    /// Also write every boundary tensor as .npy into this folder
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// Replace an existing file; and start although the plan does not fit the memory there is. The watchdog stays on guard
    #[arg(long)]
    force: bool,
    /// Begin anew, and discard what an interrupted run of the same command has kept
    #[arg(long)]
    fresh: bool,
    /// Keep all sessions loaded, in this process, if they fit the budget beside each other: for several pictures. Nothing
    /// watches over memory then
    #[arg(long)]
    keep_loaded: bool,
    /// Run everything in this process instead of a child per component; nothing watches over memory then
    #[arg(long)]
    in_process: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    memory: MemoryArguments,
    #[command(flatten)]
    device: DeviceArguments,
    #[command(flatten)]
    pub progress: ProgressArguments,
}

const EXAMPLES: &str = "\
Examples:
  viaduct generate -b klein-q8 -p \"a lighthouse in fog\" -o lighthouse.png --size 512x512 --seed 7
  viaduct generate -b klein-q8 -p \"a fox\" -o fox.png --ep webgpu --json --progress json
  viaduct generate -b MarkShark2/flux2-klein-4b-onnx-webgpu-q4 -p \"a fox\" -o fox.png   a bundle of the hub, downloaded once
  viaduct generate -b qwen-image-q4 -p \"a sticker of a fox, transparent background\" --negative \"blurry\" -o fox.png
  viaduct generate -b klein-q8 -p \"a fox\" -p \"a hen\" --count 4 -o animal.png --keep-loaded   eight pictures";

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let started = Instant::now();
    arguments.device.check()?;
    let files = files(&arguments.out, arguments.prompt.len() * usize::from(arguments.count));
    check_writable(arguments, &files)?;
    let mut progress = Progress::new(arguments.progress.progress);
    let bundle = Bundle::open(&arguments.models.folder(&arguments.bundle, Need::Bundle, &mut progress)?)?;
    let pipeline = TextToImage::open(&bundle)?;
    let mut requests = requests(arguments, &pipeline)?;
    check_alone(arguments, &requests)?;
    let runs = runs()?;
    let position = stop_on_interrupt(&progress)?;
    // Held while the folder is made, so that an interrupt finds none or removes it.
    let mut exchange = || {
        let mut position = locked(&position);
        let exchange = Exchange::create(runs.as_ref())?;
        position.exchange = Some(exchange.path().to_owned());
        Ok(exchange)
    };
    let place = Place::start(arguments, &bundle, &pipeline.asked(&requests)?, &mut exchange, &mut progress)?;
    let Place { mut executor, plan, exchange: _exchange, kept } = place;
    let folder =
        run_folder(arguments, &mut requests, runs, (&bundle, executor.device(), &plan), &mut progress);
    announce(&requests, arguments, &mut progress);

    let existing = if arguments.force { Existing::Replace } else { Existing::Keep };
    let mut dump = arguments.dump.as_deref().map(|folder| Dump::create(folder, existing)).transpose()?;
    let mut nothing = NoProbe;
    let probe: &mut dyn Probe = match &mut dump {
        Some(dump) => dump,
        None => &mut nothing,
    };
    locked(&position).kept = folder.holds_tensors();
    let stop = StopAt::from_environment();
    let mut listener = Tracked { progress, position: position.clone(), memory: Vec::new(), stop };
    let watch = Watch::new(&mut listener, probe);
    let mut run = Run { executor: &mut *executor, plan: Some(&plan), watch, folder };
    let id = run.folder.id().map(str::to_owned);
    let mut write = |index: usize, image: HostTensor| {
        let picture = Picture::from_tensor(&image)?;
        let picture = arguments.background.into_iter().fold(picture, Picture::on_background);
        let mut texts = provenance(&requests[index], &bundle).texts();
        texts.extend(arguments.background.map(|colour| ("background".to_owned(), colour.to_string())));
        let png = picture.to_png(&texts)?;
        if index + 1 == requests.len() {
            end(&position);
        }
        write_picture(&files[index], existing, id.as_deref(), &png)?;
        locked(&position).drawn = index + 1;
        Ok(())
    };
    let alone = match &requests[..] {
        [request] => Some(pipeline.draw(request, &mut run)?),
        several => {
            draw_several(&pipeline, several, kept, &mut run, &mut write)?;
            None
        }
    };
    let (nodes, folder) = (run.watch.nodes, run.folder);
    if let Some(image) = alone {
        if let Some(dump) = dump {
            dump.finish(&image)?;
        }
        write(0, image)?;
    }
    let resumed_from = folder.resumed_from().map(str::to_owned);
    folder.finish(&mut listener);
    let memory = std::mem::take(&mut listener.memory);
    drop(listener);
    let seconds = started.elapsed().as_secs_f64();
    let made = Made { nodes: &nodes, memory: &memory, resumed_from, kept_loaded: kept, seconds };
    print(&report(arguments, &requests, &files, executor.device(), &made))
}

/// Draws all pictures; `drawn` gets the index and the tensor of each.
fn draw_several(
    pipeline: &TextToImage<'_>,
    requests: &[Request],
    kept: bool,
    run: &mut Run<'_>,
    drawn: &mut dyn FnMut(usize, HostTensor) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    if !kept {
        return pipeline.draw_batch(requests, run, drawn);
    }
    // With sessions that stay, no order loads anything twice; this one has the first picture soonest.
    let mut pictures = requests.iter().enumerate();
    pictures.try_for_each(|(index, request)| drawn(index, pipeline.draw(request, run)?))
}

/// Refuses what goes with one picture alone.
fn check_alone(arguments: &Arguments, requests: &[Request]) -> Result<(), UsageError> {
    match arguments.dump.is_some() && requests.len() > 1 {
        true => Err(UsageError(format!("--dump is for one picture, and {} are asked for", requests.len()))),
        false => Ok(()),
    }
}

/// The folder in which this command's run is kept, if it is for one picture and no dump. A seed that an interrupted run drew
/// is taken over into the request.
fn run_folder(
    arguments: &Arguments,
    requests: &mut [Request],
    runs: Option<Runs>,
    (bundle, device, plan): (&Bundle, &Device, &Plan),
    progress: &mut Progress,
) -> RunFolder {
    let (Some(runs), [request], None) = (runs, requests, &arguments.dump) else { return RunFolder::none() };
    let earlier = if arguments.fresh { Earlier::Discard } else { Earlier::Continue };
    let identity = identity(request, arguments.seed.is_none(), bundle, device, plan);
    let drawn = seed_of(request).filter(|_| identity.noise == NoiseIdentity::Drawn);
    let folder = RunFolder::open(&runs, &identity, drawn, earlier, progress);
    if let Some(seed) = folder.drawn_seed() {
        request.noise = Noise::Seed(seed);
    }
    folder
}

fn write_picture(out: &Path, existing: Existing, run: Option<&str>, png: &[u8]) -> anyhow::Result<()> {
    let folder = folder_of(out);
    fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    Ok(atomic_file::write_through(out, existing, run, |file| file.write_all(png))?)
}

/// Where a run is, for whoever interrupts it.
struct Position {
    /// None when the picture is done, and its writing is not to be interrupted.
    stage: Option<String>,
    /// Whether something is on disk that the same command goes on from.
    kept: bool,
    /// Pictures that are written.
    drawn: usize,
    /// The folder for the workers' tensors, which goes with the run.
    exchange: Option<PathBuf>,
}

type SharedPosition = Arc<Mutex<Position>>;

fn locked(position: &SharedPosition) -> MutexGuard<'_, Position> {
    position.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on an interrupt is not heeded, since the run is over.
fn end(position: &SharedPosition) {
    locked(position).stage = None;
}

/// Bytes that a stage's process took at its peak, as planned and as measured.
#[derive(Serialize)]
struct StagePeak {
    stage: String,
    planned: u64,
    measured: u64,
}

/// Hands events on, and notes where the run is and what its stages took.
struct Tracked {
    progress: Progress,
    position: SharedPosition,
    memory: Vec<StagePeak>,
    stop: Option<StopAt>,
}

impl Listener for Tracked {
    fn on_event(&mut self, event: Event) {
        match &event {
            Event::Stage { name, .. } => {
                locked(&self.position).stage = Some(name.clone());
            }
            Event::Kept { .. } => locked(&self.position).kept = true,
            Event::Memory { stage, planned, measured } => {
                let (stage, planned, measured) = (stage.clone(), *planned, *measured);
                self.memory.push(StagePeak { stage, planned, measured });
            }
            _ => {}
        }
        self.progress.on_event(event.clone());
        if let Some(stop) = &self.stop {
            stop.hear(&event);
        }
    }
}

/// An interrupt ends the process at once, but for a file that is being written.
fn stop_on_interrupt(progress: &Progress) -> anyhow::Result<SharedPosition> {
    let stage = Some("text_encoder".to_owned());
    let place = SharedPosition::new(Mutex::new(Position { stage, kept: false, drawn: 0, exchange: None }));
    let (at, last_word) = (place.clone(), progress.last_word());
    on_interrupt(move |signal| {
        // Held to the end, so that the run gets no further.
        let position = locked(&at);
        let Some(stage) = position.stage.as_ref() else { return };
        let _held = atomic_file::hold_writes();
        let event = Event::warning(match (position.kept, position.drawn) {
            (true, _) => format!("interrupted in stage {stage}; the same command goes on from there"),
            (false, 0) => format!("interrupted in stage {stage}; nothing was kept"),
            (false, drawn) => {
                format!("interrupted in stage {stage}; the {drawn} pictures that are written stay")
            }
        });
        let _ = position.exchange.as_ref().map(fs::remove_dir_all);
        leave_with(signal, move || last_word(event))
    })?;
    Ok(place)
}

fn announce(requests: &[Request], arguments: &Arguments, progress: &mut Progress) {
    let (Request { size, steps, .. }, noise) = (&requests[0], noise_in_words(&requests[0]));
    if let Some(asked) = arguments.num_steps.filter(|asked| asked != steps) {
        let message =
            format!("--num-steps {asked}: this model's noise levels are fixed; {steps} steps are taken");
        progress.on_event(Event::warning(message));
    }
    let own = [size.width(), size.height()];
    if arguments.size.asked().iter().zip(own).any(|(asked, own)| asked.is_some_and(|asked| asked != own)) {
        progress
            .on_event(Event::warning(format!("this model draws no such size; {size} is the next below it")));
    }
    let pictures = match requests.len() {
        1 => noise,
        count => format!("{count} pictures from {noise}"),
    };
    progress.on_event(Event::note(format!("{size}, {steps} steps, {pictures}")));
}

fn noise_in_words(request: &Request) -> String {
    seed_of(request).map_or("given noise".to_owned(), |seed| format!("seed {seed}"))
}

fn seed_of(request: &Request) -> Option<u64> {
    match request.noise {
        Noise::Seed(seed) => Some(seed),
        Noise::Given(_) => None,
    }
}

fn provenance(request: &Request, bundle: &Bundle) -> Provenance {
    Provenance {
        prompt: request.prompt.clone(),
        negative: request.negative.clone(),
        seed: seed_of(request),
        steps: request.steps,
        width: request.size.width(),
        height: request.size.height(),
        bundle: format!("{} {}", bundle.manifest.name, bundle.manifest.profile),
        generator: "viaduct".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// How pictures came about.
struct Made<'a> {
    /// Nodes that each provider ran.
    nodes: &'a BTreeMap<String, usize>,
    /// Peaks of the stages that ran.
    memory: &'a [StagePeak],
    /// What an earlier attempt had finished.
    resumed_from: Option<String>,
    kept_loaded: bool,
    seconds: f64,
}

fn report(
    arguments: &Arguments,
    requests: &[Request],
    files: &[PathBuf],
    device: &Device,
    made: &Made<'_>,
) -> String {
    let pictures = requests.iter().zip(files);
    let (Request { size, steps, .. }, seconds) = (&requests[0], made.seconds);
    if !arguments.json {
        if let [file] = files {
            return format!("{}: {size}, {}, {seconds:.1} s\n", file.display(), noise_in_words(&requests[0]));
        }
        let line = |(request, file): (&Request, &PathBuf)| {
            format!("{}: {size}, {}\n", file.display(), noise_in_words(request))
        };
        return format!(
            "{}{} pictures, {seconds:.1} s\n",
            pictures.map(line).collect::<String>(),
            files.len()
        );
    }
    let mut report = serde_json::json!({
        "width": size.width(), "height": size.height(), "steps": steps, "ep": device.provider.to_string(),
        "adapter": device.name, "nodes": made.nodes, "memory": made.memory, "resumed_from": made.resumed_from,
        "kept_loaded": made.kept_loaded, "seconds": seconds,
    });
    if let [file] = files {
        report["image"] = file.to_string_lossy().into();
        report["seed"] = seed_of(&requests[0]).into();
    } else {
        let image = |(request, file): (&Request, &PathBuf)| serde_json::json!({ "image": file.to_string_lossy(), "prompt": request.prompt, "seed": seed_of(request) });
        report["images"] = pictures.map(image).collect();
    }
    format!("{report}\n")
}
