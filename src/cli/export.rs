//! `viaduct export`

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use clap::Args;
use viaduct_export::{
    arch::flux2::imported::contract::Role,
    bundle::{ExportEvent, ExportRequest, ExportSummary, ImportRequest, export, import},
    bytes::ByteSize,
};

use super::{
    ProgressArguments,
    exit::UsageError,
    key_value,
    printer::{complain, print},
    progress::Progress,
};
use crate::{
    pipeline::event::{Event, Listener},
    runtime::exit,
};

/// Turn a checkpoint, or graphs that others exported, into a bundle that `viaduct generate` runs.
///
/// SOURCE is a checkpoint folder in diffusers layout (model_index.json, text_encoder/, transformer/, vae/, tokenizer/).
/// All dimensions come from its config files; the rest comes from a recipe: --recipe, else the folder's own
/// recipe.toml, else the family's default.
///
/// Or SOURCES are .onnx files: a text encoder, a transformer and an image decoder, in any order. They are told apart by
/// their inputs.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Checkpoint folder, or .onnx files
    #[arg(required_unless_present_any = ["text_encoder", "transformer", "decoder"])]
    sources: Vec<PathBuf>,
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
  viaduct export my-tiny-model -o tiny --profile f32 --set text_encoder.taps=2,4,6 --set text_encoder.length=64
  viaduct export text.onnx transformer.onnx decoder.onnx --tokenizer FLUX.2-klein-4B/tokenizer -o imported";
/// How weights are stored where nothing else is asked for.
const DEFAULT_PROFILE: &str = "q8";

/// 128 and the signal's number, as shells have it.
const INTERRUPTED: u8 = 130;

/// Set by an interrupt.
static STOPPED: AtomicBool = AtomicBool::new(false);

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    stop_on_interrupt()?;
    let mut progress = Progress::new(arguments.progress.progress);
    let started = Instant::now();
    let mut shown = Shown::default();
    let summary = made(arguments, &mut |event| shown.event(event, &mut progress))?;
    drop(progress);
    let seconds = started.elapsed().as_secs_f64();
    let stages = summary.manifest.stages.len();
    let report = if arguments.json {
        let report = serde_json::json!({
            "bundle": arguments.out.to_string_lossy(), "name": summary.manifest.name, "profile": summary.manifest.profile,
            "stages": stages, "bytes": summary.bytes, "seconds": seconds,
        });
        format!("{report}\n")
    } else {
        let (out, megabytes) = (arguments.out.display(), summary.bytes as f64 / 1e6);
        let speed = megabytes / seconds;
        format!("{out}: {stages} stages, {megabytes:.1} MB, {seconds:.1} s ({speed:.0} MB/s)\n")
    };
    print(&report)
}

fn made(arguments: &Arguments, progress: &mut dyn FnMut(ExportEvent)) -> anyhow::Result<ExportSummary> {
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
        let profile = arguments.profile.as_deref().unwrap_or(DEFAULT_PROFILE);
        let calibration = arguments.calibration.as_deref();
        let target_bytes = arguments.target_size.map(|size| size.0);
        let request = ExportRequest {
            source,
            arrivals: None,
            out,
            recipe,
            profile,
            calibration,
            target_bytes,
            set,
            force,
            fault: None,
        };
        return Ok(export(&request, progress)?);
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

/// The sources that are graphs, and what the user says that they are.
fn graphs(arguments: &Arguments) -> Vec<(Option<Role>, PathBuf)> {
    let Arguments { text_encoder, transformer, decoder, sources, .. } = arguments;
    let named =
        [(Role::TextEncoder, text_encoder), (Role::Transformer, transformer), (Role::Decoder, decoder)];
    let named = named.into_iter().filter_map(|(role, path)| Some((Some(role), path.clone()?)));
    let is_graph = |path: &&PathBuf| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("onnx"));
    named.chain(sources.iter().filter(is_graph).map(|path| (None, path.clone()))).collect()
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
            ExportEvent::Total { bytes } => self.total = bytes,
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
    if let Some(folder) = staging {
        let _ = fs::remove_dir_all(folder);
    }
    complain("interrupted; nothing was kept");
    exit(INTERRUPTED)
}

/// The first interrupt lets the export clean up, which it does within a tensor's time; a second one does not wait.
fn stop_on_interrupt() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        if STOPPED.swap(true, Ordering::Relaxed) {
            exit(INTERRUPTED);
        }
    })?;
    Ok(())
}
