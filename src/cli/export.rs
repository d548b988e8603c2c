//! `viaduct export`

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use clap::Args;
use viaduct_export::bundle::{ExportEvent, ExportRequest, export};

use super::{
    ProgressArguments, key_value,
    printer::{complain, print},
    progress::Progress,
};
use crate::{
    pipeline::event::{Event, Listener},
    runtime::exit,
};

/// Turn a checkpoint into a bundle that `viaduct generate` runs.
///
/// SOURCE is a checkpoint folder in diffusers layout (model_index.json, text_encoder/, transformer/, vae/, tokenizer/).
/// All dimensions come from its config files; the rest comes from a recipe: --recipe, else the folder's own
/// recipe.toml, else the family's default.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Checkpoint folder
    source: PathBuf,
    /// Bundle folder to make
    #[arg(short, long, value_name = "BUNDLE")]
    out: PathBuf,
    /// How weights are stored: f32, f16, q8 or q4, or a profile of your recipe
    #[arg(long, default_value = "q8")]
    profile: String,
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
  viaduct export my-tiny-model -o tiny --profile f32 --set text_encoder.taps=2,4,6 --set text_encoder.length=64";

/// 128 and the signal's number, as shells have it.
const INTERRUPTED: u8 = 130;

/// Set by an interrupt.
static STOPPED: AtomicBool = AtomicBool::new(false);

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    stop_on_interrupt()?;
    let mut progress = Progress::new(arguments.progress.progress);
    let started = Instant::now();
    let request = ExportRequest {
        source: &arguments.source,
        out: &arguments.out,
        recipe: arguments.recipe.as_deref(),
        profile: &arguments.profile,
        set: &arguments.set,
        force: arguments.force,
        fault: None,
    };
    let mut shown = Shown::default();
    let summary = export(&request, &mut |event| shown.event(event, &mut progress))?;
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
