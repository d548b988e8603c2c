//! `viaduct generate`

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Context;
use clap::Args;
use serde::Serialize;
use viaduct_export::{arch::SizesRequest, bundle::Bundle};

use super::{
    DeviceArguments, ProgressArguments, SizeArguments,
    exit::UsageError,
    interrupt::{leave, on_interrupt, within},
    memory::MemoryArguments,
    printer::print,
    progress::Progress,
    runs::{Exchange, identity, runs},
    stop_at::StopAt,
};
use crate::{
    atomic_file::{self, Existing},
    npy,
    pipeline::{
        dump::Dump,
        event::{Event, Listener},
        flux2::{Flux2, Noise, Request},
        image::{Picture, Provenance, check_finite},
        probe::{NoProbe, Probe},
        run::{Run, Watch},
        run_folder::{Earlier, NoiseIdentity, RunFolder},
        runs::Runs,
    },
    plan::Plan,
    runtime::{Device, Executor},
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
    /// Bundle folder, as made by `viaduct export`
    #[arg(short, long)]
    bundle: PathBuf,
    /// What to draw
    #[arg(short, long, allow_hyphen_values = true)]
    prompt: String,
    /// PNG file to write
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
  viaduct generate -b klein-q8 -p \"a fox\" -o fox.png --ep webgpu --json --progress json";

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let started = Instant::now();
    arguments.device.check()?;
    let bundle = Bundle::open(&arguments.bundle)?;
    let flux2 = Flux2::open(&bundle)?;
    let mut request = request(arguments, &flux2)?;
    check_writable(arguments)?;
    let mut progress = Progress::new(arguments.progress.progress);
    let runs = runs()?;
    let exchange = match arguments.in_process {
        true => None,
        false => Some(Exchange::create(runs.as_ref())?),
    };
    let mut executor = executor(arguments, exchange.as_ref(), &mut progress)?;
    let plan = arguments.memory.plan(
        &bundle,
        &picture(&request),
        executor.device(),
        arguments.force,
        arguments.in_process,
        &mut progress,
    )?;
    let kept = runs.filter(|_| arguments.dump.is_none());
    let folder = match kept {
        Some(runs) => {
            let place = (&bundle, executor.device(), &plan);
            run_folder(arguments, &mut request, &runs, place, &mut progress)
        }
        None => RunFolder::none(),
    };
    announce(&request, &mut progress);

    let existing = if arguments.force { Existing::Replace } else { Existing::Keep };
    let mut dump = arguments.dump.as_deref().map(|folder| Dump::create(folder, existing)).transpose()?;
    let mut nothing = NoProbe;
    let probe: &mut dyn Probe = match &mut dump {
        Some(dump) => dump,
        None => &mut nothing,
    };
    let place = stop_on_interrupt(&progress, folder.holds_tensors(), exchange.as_ref())?;
    let mut listener = Tracked { progress, place, memory: Vec::new(), stop: StopAt::from_environment() };
    let watch = Watch::new(&mut listener, probe);
    let mut run = Run { executor: &mut *executor, plan: Some(&plan), watch, folder };
    let image = flux2.draw(&request, &mut run)?;
    let (nodes, folder) = (run.watch.nodes, run.folder);
    let picture = Picture::from_tensor(&image)?;
    if let Some(dump) = dump {
        dump.finish(&image)?;
    }
    let png = picture.to_png(&provenance(arguments, &request, &bundle).texts())?;
    listener.end();
    write_picture(&arguments.out, existing, folder.id(), &png)?;
    let resumed_from = folder.resumed_from().map(str::to_owned);
    folder.finish(&mut listener);
    let memory = std::mem::take(&mut listener.memory);
    drop(listener);
    let made =
        Made { nodes: &nodes, memory: &memory, resumed_from, seconds: started.elapsed().as_secs_f64() };
    print(&report(arguments, &request, executor.device(), &made))
}

fn executor(
    arguments: &Arguments,
    exchange: Option<&Exchange>,
    progress: &mut Progress,
) -> anyhow::Result<Box<dyn Executor>> {
    Ok(match exchange {
        None => Box::new(arguments.device.start(progress)?),
        Some(exchange) => {
            let watchdog = arguments.memory.watchdog(progress);
            Box::new(arguments.device.start_workers(exchange.path(), watchdog, progress)?)
        }
    })
}

fn picture(request: &Request) -> SizesRequest {
    let (width, height) = (request.size.width(), request.size.height());
    SizesRequest { width, height, steps: request.steps, halvings: 0 }
}

/// The folder in which this command's run is kept. A seed that an interrupted run drew is taken over into the request.
fn run_folder(
    arguments: &Arguments,
    request: &mut Request,
    runs: &Runs,
    (bundle, device, plan): (&Bundle, &Device, &Plan),
    progress: &mut Progress,
) -> RunFolder {
    let earlier = if arguments.fresh { Earlier::Discard } else { Earlier::Continue };
    let identity = identity(request, arguments.seed.is_none(), bundle, device, plan);
    let drawn = seed_of(request).filter(|_| identity.noise == NoiseIdentity::Drawn);
    let folder = RunFolder::open(runs, &identity, drawn, earlier, progress);
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
}

type Place = Arc<Mutex<Position>>;

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
    place: Place,
    memory: Vec<StagePeak>,
    stop: Option<StopAt>,
}

impl Tracked {
    /// From now on an interrupt is not heeded, since the run is over.
    fn end(&self) {
        self.position().stage = None;
    }

    fn position(&self) -> MutexGuard<'_, Position> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener for Tracked {
    fn on_event(&mut self, event: Event) {
        match &event {
            Event::Stage { name, .. } => {
                self.position().stage = Some(name.clone());
            }
            Event::Kept { .. } => self.position().kept = true,
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

/// How long the last word may take: standard error may be a pipe that nobody reads.
const LAST_WORD: Duration = Duration::from_millis(500);

/// An interrupt ends the process at once, but for a file that is being written.
fn stop_on_interrupt(progress: &Progress, kept: bool, exchange: Option<&Exchange>) -> anyhow::Result<Place> {
    let place = Place::new(Mutex::new(Position { stage: Some("text_encoder".to_owned()), kept }));
    let (at, last_word) = (place.clone(), progress.last_word());
    let exchange = exchange.map(|exchange| exchange.path().to_owned());
    on_interrupt(move |signal| {
        // Held to the end, so that the run gets no further.
        let position = at.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(stage) = position.stage.as_ref() else { return };
        let _held = atomic_file::hold_writes();
        let event = Event::warning(match position.kept {
            true => format!("interrupted in stage {stage}; the same command goes on from there"),
            false => format!("interrupted in stage {stage}; nothing was kept"),
        });
        let _ = exchange.map(fs::remove_dir_all);
        within(LAST_WORD, move || last_word(event));
        leave(signal)
    })?;
    Ok(place)
}

fn request(arguments: &Arguments, flux2: &Flux2<'_>) -> anyhow::Result<Request> {
    let form = flux2.form();
    let [width, height] = arguments.size.asked();
    let own = form.default_size();
    let size = form.size(width.unwrap_or(own[0]), height.unwrap_or(own[1]))?;
    let steps = arguments.num_steps.unwrap_or(form.steps());
    if !(1..=1000).contains(&steps) {
        return Err(UsageError(format!("--num-steps {steps}: a picture takes 1 to 1000")).into());
    }
    let noise = match &arguments.noise {
        Some(path) => {
            let noise = npy::read(path).context("--noise")?;
            check_finite(&format!("--noise {}", path.display()), None, &noise)?;
            Noise::Given(noise)
        }
        None => Noise::Seed(arguments.seed.unwrap_or_else(random_seed)),
    };
    let request = Request { prompt: arguments.prompt.clone(), size, steps, noise };
    flux2.check(&request)?;
    Ok(request)
}

/// A seed that fits every program that reads it: 32 bits.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()) & 0xFFFF_FFFF
}

/// Refuses before the work what could not be written after it.
fn check_writable(arguments: &Arguments) -> anyhow::Result<()> {
    let out = &arguments.out;
    if out.is_dir() {
        return Err(UsageError(format!("-o {}: that is a folder; name a .png file", out.display())).into());
    }
    if out.extension().is_some_and(|e| !e.eq_ignore_ascii_case("png")) {
        let message = format!("-o {}: pictures are written as PNG; name a .png file", out.display());
        return Err(UsageError(message).into());
    }
    if out.as_os_str().as_encoded_bytes().ends_with(b"/") || out.file_name().is_none() {
        return Err(UsageError(format!("-o {}: name a .png file", out.display())).into());
    }
    if out.symlink_metadata().is_ok() && !arguments.force {
        let message = format!("{} exists; choose another -o or pass --force to replace it", out.display());
        return Err(UsageError(message).into());
    }
    // Folders that are missing are made when there is something to put into them.
    let there = folder_of(out).ancestors().find(|p| p.exists()).unwrap_or(Path::new("."));
    tempfile::tempfile_in(there).with_context(|| format!("cannot write into {}", there.display()))?;
    Ok(())
}

fn folder_of(out: &Path) -> &Path {
    out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn announce(request: &Request, progress: &mut Progress) {
    let noise = match &request.noise {
        Noise::Seed(seed) => format!("seed {seed}"),
        Noise::Given(_) => "given noise".to_owned(),
    };
    progress.on_event(Event::note(format!("{}, {} steps, {noise}", request.size, request.steps)));
}

fn seed_of(request: &Request) -> Option<u64> {
    match request.noise {
        Noise::Seed(seed) => Some(seed),
        Noise::Given(_) => None,
    }
}

fn provenance(arguments: &Arguments, request: &Request, bundle: &Bundle) -> Provenance {
    Provenance {
        prompt: arguments.prompt.clone(),
        seed: seed_of(request),
        steps: request.steps,
        width: request.size.width(),
        height: request.size.height(),
        bundle: format!("{} {}", bundle.manifest.name, bundle.manifest.profile),
        generator: "viaduct".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// How a picture came about.
struct Made<'a> {
    /// Nodes that each provider ran.
    nodes: &'a BTreeMap<String, usize>,
    /// Peaks of the stages that ran.
    memory: &'a [StagePeak],
    /// What an earlier attempt had finished.
    resumed_from: Option<String>,
    seconds: f64,
}

fn report(arguments: &Arguments, request: &Request, device: &Device, made: &Made<'_>) -> String {
    let (seed, seconds) = (seed_of(request), made.seconds);
    if arguments.json {
        let report = serde_json::json!({
            "image": arguments.out.to_string_lossy(), "seed": seed, "width": request.size.width(), "height": request.size.height(),
            "steps": request.steps, "ep": device.provider.to_string(), "adapter": device.name,
            "nodes": made.nodes, "memory": made.memory, "resumed_from": made.resumed_from, "seconds": seconds,
        });
        format!("{report}\n")
    } else {
        let seed = seed.map_or("given noise".to_owned(), |seed| format!("seed {seed}"));
        format!("{}: {}, {seed}, {seconds:.1} s\n", arguments.out.display(), request.size)
    }
}
