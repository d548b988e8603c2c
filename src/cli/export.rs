//! `viaduct export`

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    thread,
    time::Instant,
};

use clap::Args;
use viaduct_export::{
    arch::flux2::imported::contract::Role,
    bundle::{
        ExportEvent, ExportRequest, ExportSummary, ImportRequest, Published, check_target, export, import,
    },
    bytes::ByteSize,
    weights::Arrivals,
};

use super::{
    ProgressArguments,
    exit::UsageError,
    interrupt::{leave_with, on_interrupt},
    key_value,
    model::ModelArguments,
    printer::{complain, print},
    progress::Progress,
};
use crate::{
    hub::{Checkout, Hub, ModelName, Need, Settings, Teller},
    pipeline::event::{Event, Listener},
};

/// Turn a checkpoint, or graphs that others exported, into a bundle that `viaduct generate` runs.
///
/// SOURCE is a checkpoint folder in diffusers layout (model_index.json, text_encoder/, transformer/, vae/, tokenizer/).
/// All dimensions come from its config files; the rest comes from a recipe: --recipe, else the folder's own
/// recipe.toml, else the family's default.
///
/// Or SOURCE is a repository of a Hugging Face hub (owner/name): each weight file is exported as soon as it is whole, while the
/// next ones are downloaded.
///
/// Or SOURCES are .onnx files: a text encoder, a transformer and an image decoder, in any order. They are told apart by
/// their inputs.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Checkpoint folder, or a repository (owner/name), or .onnx files
    #[arg(required_unless_present_any = ["text_encoder", "transformer", "decoder"])]
    sources: Vec<ModelName>,
    #[command(flatten)]
    models: ModelArguments,
    /// Of a repository: keep the weight files that this export downloads. Without it they go when the bundle is made
    #[arg(long)]
    keep_source: bool,
    /// The text encoder's .onnx file, where its inputs do not tell
    #[arg(long, value_name = "FILE")]
    text_encoder: Option<PathBuf>,
    /// The transformer's .onnx file
    #[arg(long, value_name = "FILE")]
    transformer: Option<PathBuf>,
    /// The image decoder's .onnx file
    #[arg(long, value_name = "FILE")]
    decoder: Option<PathBuf>,
    /// For .onnx files: the folder with tokenizer.json and the chat template
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Bundle folder to make
    #[arg(short, long, value_name = "BUNDLE")]
    out: PathBuf,
    /// How weights are stored: f32, f16, q8, q4, q4-fit, auto, or a profile of your recipe; by default q8 for a checkpoint, and as they
    /// are for graphs
    #[arg(long)]
    profile: Option<String>,
    /// Statistics of the inputs of the layers, by which weights are fitted: a file that `viaduct calibrate` wrote. For profiles that
    /// fit: q4-fit, auto
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Bytes that the bundle may have: weights get more bits than the profile gives them, those first that lose most. Needs
    /// --calibration; the profile `auto` is made for it
    #[arg(long, value_name = "SIZE", requires = "calibration")]
    target_size: Option<ByteSize>,
    /// A shipped recipe's name or a .toml file
    #[arg(long)]
    recipe: Option<String>,
    /// Change a recipe value; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    /// Replace an existing bundle
    #[arg(long)]
    force: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub progress: ProgressArguments,
}

const EXAMPLES: &str = "\
Examples:
  viaduct export FLUX.2-klein-4B -o klein-q4 --profile q4
  viaduct export black-forest-labs/FLUX.2-klein-4B -o klein-q4 --profile q4     downloads what it needs, and exports meanwhile
  viaduct export my-tiny-model -o tiny --profile f32 --set text_encoder.taps=2,4,6 --set text_encoder.length=64
  viaduct export text.onnx transformer.onnx decoder.onnx --tokenizer FLUX.2-klein-4B/tokenizer -o imported";
/// How weights are stored where nothing else is asked for.
const DEFAULT_PROFILE: &str = "q8";

const INTERRUPTED: &str =
    "interrupted; no bundle was made (what was downloaded stays, and the same command goes on from there)";

/// Who may end the process: the thread that hears of the interrupt, as long as there is nothing to clean up.
static PHASE: AtomicU8 = AtomicU8::new(PREPARES);
const PREPARES: u8 = 0;
/// A folder is being filled: the thread that fills it ends the process.
const WRITES: u8 = 1;
/// The process is being ended.
const LEAVES: u8 = 2;
/// The signal that interrupted.
static SIGNAL: AtomicU8 = AtomicU8::new(0);
/// Set by an interrupt.
static STOPPED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    stop_on_interrupt()?;
    let progress = Arc::new(Mutex::new(Progress::new(arguments.progress.progress)));
    let started = Instant::now();
    let mut shown = Shown::default();
    let made = made(arguments, &progress, &mut |event| shown.event(event, &mut locked(&progress)));
    drop(progress);
    if made.is_err() && STOPPED.load(Ordering::Relaxed) {
        stop(shown.staging.as_deref());
    }
    let summary = made?;
    let seconds = started.elapsed().as_secs_f64();
    let stages = summary.manifest.stages.len();
    let report = if arguments.json {
        let report = serde_json::json!({
            "bundle": arguments.out.to_string_lossy(), "name": summary.manifest.name, "profile": summary.manifest.profile,
            "stages": stages, "bytes": summary.bytes, "seconds": seconds, "source": summary.manifest.source,
            "recipe": summary.manifest.recipe.name,
        });
        format!("{report}\n")
    } else {
        let (out, megabytes) = (arguments.out.display(), summary.bytes as f64 / 1e6);
        let speed = megabytes / seconds;
        format!("{out}: {stages} stages, {megabytes:.1} MB, {seconds:.1} s ({speed:.0} MB/s)\n")
    };
    print(&report)
}

/// Every display of events that come from several threads.
type Shared = Arc<Mutex<Progress>>;

fn locked(progress: &Shared) -> MutexGuard<'_, Progress> {
    progress.lock().unwrap_or_else(PoisonError::into_inner)
}

fn made(
    arguments: &Arguments,
    shared: &Shared,
    progress: &mut dyn FnMut(ExportEvent),
) -> anyhow::Result<ExportSummary> {
    let Arguments { sources, out, recipe, set, force, .. } = arguments;
    let (recipe, force) = (recipe.as_deref(), *force);
    let usage = |message: &str| Err(UsageError(message.to_owned()).into());
    let graphs = graphs(arguments);
    if graphs.is_empty() {
        let [source] = &sources[..] else {
            return usage("one checkpoint folder makes a bundle; several sources must be .onnx files");
        };
        if arguments.tokenizer.is_some() {
            return usage("--tokenizer is for .onnx files; a checkpoint has its own");
        }
        return of_checkpoint(arguments, source, shared, progress);
    }
    if arguments.calibration.is_some() {
        return usage("--calibration is for checkpoints");
    }
    if graphs.len() < sources.len() {
        return usage("a checkpoint folder and .onnx files do not go together");
    }
    let Some(tokenizer) = &arguments.tokenizer else {
        return usage("graphs come without a tokenizer; name its folder with --tokenizer DIR");
    };
    let profile = arguments.profile.as_deref();
    let request = ImportRequest { graphs: &graphs, tokenizer, out, recipe, profile, set, force };
    Ok(import(&request, progress)?)
}

/// Exports a checkpoint folder, or a repository whose weight files come while the first of them are exported.
fn of_checkpoint(
    arguments: &Arguments,
    source: &ModelName,
    shared: &Shared,
    progress: &mut dyn FnMut(ExportEvent),
) -> anyhow::Result<ExportSummary> {
    let folder;
    let checkout = checkout(arguments, source, shared)?;
    let source = match &checkout {
        Some(checkout) => &checkout.folder,
        None => {
            folder = arguments.models.folder(source, Need::Checkpoint, &mut locked(shared))?;
            &folder
        }
    };
    let request = ExportRequest {
        source,
        arrivals: checkout.as_ref().and_then(arrivals),
        out: &arguments.out,
        recipe: arguments.recipe.as_deref(),
        profile: arguments.profile.as_deref().unwrap_or(DEFAULT_PROFILE),
        calibration: arguments.calibration.as_deref(),
        target_bytes: arguments.target_size.map(|size| size.0),
        set: &arguments.set,
        force: arguments.force,
        published: checkout.as_ref().map(published),
        fault: None,
    };
    let summary = export(&request, progress)?;
    let freed = match checkout {
        Some(checkout) if arguments.keep_source => checkout.keep().map(|()| 0)?,
        Some(checkout) => checkout.forget()?,
        None => 0,
    };
    if freed > 0 {
        let freed = ByteSize(freed);
        let note = format!("the downloaded weight files are removed ({freed}); --keep-source keeps them");
        locked(shared).on_event(Event::note(note));
    }
    Ok(summary)
}

/// A repository's checkpoint; none for what is taken from a local folder.
fn checkout(arguments: &Arguments, source: &ModelName, shared: &Shared) -> anyhow::Result<Option<Checkout>> {
    let (ModelName::Repository(repo), None) = (source, &arguments.models.model_dir) else { return Ok(None) };
    check_target(&arguments.out, arguments.force)?;
    let hub = Hub::new(Settings::from_env()?, Arc::clone(&STOPPED))?;
    let display = Arc::clone(shared);
    let tell: Teller = Arc::new(move |event| locked(&display).on_event(event));
    Ok(Some(hub.checkpoint(repo, arguments.recipe.as_deref(), &arguments.set, tell)?))
}

fn arrivals(checkout: &Checkout) -> Option<Arc<dyn Arrivals>> {
    Some(checkout.arriving.clone()?)
}

fn published(checkout: &Checkout) -> Published {
    Published {
        repo: checkout.repo().id.clone(),
        commit: checkout.folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        license: checkout.arriving.as_ref().and_then(|arriving| arriving.license().map(str::to_owned)),
    }
}

/// The sources that are graphs, and what the user says that they are.
fn graphs(arguments: &Arguments) -> Vec<(Option<Role>, PathBuf)> {
    let Arguments { text_encoder, transformer, decoder, sources, .. } = arguments;
    let named =
        [(Role::TextEncoder, text_encoder), (Role::Transformer, transformer), (Role::Decoder, decoder)];
    let named = named.into_iter().filter_map(|(role, path)| Some((Some(role), path.clone()?)));
    let paths = sources.iter().filter_map(|source| match source {
        ModelName::Path(path) => Some(path),
        ModelName::Repository(_) => None,
    });
    let is_graph = |path: &&PathBuf| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("onnx"));
    named.chain(paths.filter(is_graph).map(|path| (None, path.clone()))).collect()
}

/// Adds up bytes and hands events on; between two events it also notices an interrupt.
#[derive(Default)]
struct Shown {
    staging: Option<PathBuf>,
    what: String,
    done: u64,
    /// Bytes at the last event.
    shown: u64,
    total: u64,
}

impl Shown {
    fn event(&mut self, event: ExportEvent, progress: &mut Progress) {
        self.show(event, progress);
        if STOPPED.load(Ordering::Relaxed) {
            stop(self.staging.as_deref());
        }
    }

    fn show(&mut self, event: ExportEvent, progress: &mut Progress) {
        match event {
            ExportEvent::Recipe { origin, .. } => progress.on_event(Event::note(format!("recipe: {origin}"))),
            ExportEvent::Note(message) => progress.on_event(Event::note(message)),
            ExportEvent::Warning(message) => progress.on_event(Event::warning(message)),
            ExportEvent::Staging(folder) => self.staging = Some(folder),
            // The folder comes next.
            ExportEvent::Total { bytes } => {
                self.total = bytes;
                // Fails only if the process is being ended.
                let _ = PHASE.compare_exchange(PREPARES, WRITES, Ordering::SeqCst, Ordering::SeqCst);
            }
            ExportEvent::Stage { name } => self.what = name,
            ExportEvent::Bytes(n) => {
                self.done += n;
                // A hundred events tell as much as thousands.
                if self.done < self.shown + self.total / 100 && self.done < self.total {
                    return;
                }
                self.shown = self.done;
                let (what, done, total) = (self.what.clone(), self.done, Some(self.total));
                progress.on_event(Event::Bytes { what, done, total });
            }
        }
    }
}

/// Removes what was written and ends the process. This is the thread that writes, so nothing is written meanwhile, and
/// a bundle that is being given its name is never taken apart.
fn stop(staging: Option<&Path>) -> ! {
    while PHASE.load(Ordering::SeqCst) == LEAVES {
        thread::park();
    }
    if let Some(folder) = staging {
        let _ = fs::remove_dir_all(folder);
    }
    leave_with(SIGNAL.load(Ordering::Relaxed), || complain(INTERRUPTED))
}

/// The first interrupt lets the export clean up, which it does within a tensor's time; before there is anything to clean up, it
/// ends the process. A second one does not wait.
fn stop_on_interrupt() -> anyhow::Result<()> {
    on_interrupt(|signal| {
        SIGNAL.store(signal, Ordering::Relaxed);
        STOPPED.store(true, Ordering::SeqCst);
        if PHASE.compare_exchange(PREPARES, LEAVES, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            leave_with(signal, || complain(INTERRUPTED));
        }
    })?;
    Ok(())
}
