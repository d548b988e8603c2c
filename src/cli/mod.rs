//! The command line: one file per verb.

mod bench;
mod bisect;
mod calibrate;
mod doctor;
mod downloads;
mod exit;
mod export;
mod failure;
mod generate;
mod inspect;
mod interrupt;
mod list;
mod memory;
mod model;
mod model_folder;
mod printer;
mod progress;
mod pull;
mod report;
mod rewrite;
mod rm;
mod runs;
mod stop_at;
mod verify;

use std::path::Path;

use clap::{Args, Parser, Subcommand, ValueEnum};

use self::exit::UsageError;
pub use self::{exit::code_of, failure::Failure, printer::complain};

use crate::{
    pipeline::{
        event::{Event, Listener},
        size::TypedSize,
    },
    runtime::{Device, Executor, Provider, Runtime, RuntimeError, RuntimeOptions, Watchdog, Workers, serve},
};

/// Carries big models over small machines: turns checkpoints into staged ONNX bundles and runs them on any Vulkan GPU.
#[derive(Parser)]
#[command(version, propagate_version = true, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

impl Cli {
    /// How this command is to tell of a failure.
    pub fn failure(&self) -> Failure {
        let (json, progress) = match &self.command {
            Command::Export(a) => (a.json, a.progress.progress),
            Command::Generate(a) => (a.json, a.progress.progress),
            Command::Verify(a) => (a.json, a.progress.progress),
            Command::Rewrite(a) => (a.json, a.progress.progress),
            Command::Calibrate(a) => (a.json, a.progress.progress),
            Command::Bench(a) => (a.json, a.progress.progress),
            Command::Bisect(a) => (a.json, a.progress.progress),
            Command::Pull(a) => (a.json, a.progress.progress),
            Command::List(a) => (a.json, ProgressStyle::Auto),
            Command::Rm(a) => (a.json, ProgressStyle::Auto),
            Command::Report(a) => (a.json, ProgressStyle::Auto),
            Command::Inspect(a) => (a.json, ProgressStyle::Auto),
            Command::Doctor(a) => (a.json, ProgressStyle::Auto),
            Command::Worker => Default::default(),
        };
        Failure { json, event: progress == ProgressStyle::Json }
    }
}

const EXIT_CODES: &str = "\
Exit codes:
  0 done   1 failed (a file is corrupt, missing or cannot be written; numbers are not finite or all the same;
      a download did not succeed, or nothing is in the cache and HF_HUB_OFFLINE is set)
  2 usage (a bad flag, value or size; an unknown profile or recipe; the target exists)
  3 verify: a bar is missed; bisect: the runs part   4 the plan is over the budget   5 stopped by the watchdog, before memory ran out
  6 the device is lost, unfit or absent (--ep webgpu without an adapter)
  128 + N ended by signal N: 130 after Ctrl-C (an export leaves nothing, a picture is gone on with)";

#[derive(Subcommand)]
enum Command {
    Pull(pull::Arguments),
    List(list::Arguments),
    Rm(rm::Arguments),
    Export(export::Arguments),
    Generate(generate::Arguments),
    Verify(verify::Arguments),
    Bisect(bisect::Arguments),
    Calibrate(calibrate::Arguments),
    Bench(bench::Arguments),
    Report(report::Arguments),
    Rewrite(rewrite::Arguments),
    Inspect(inspect::Arguments),
    Doctor(doctor::Arguments),
    /// What `generate` starts for itself: one component of a model, served over standard input and output
    #[command(hide = true)]
    Worker,
}

/// Where graphs run.
#[derive(Args)]
struct DeviceArguments {
    /// Execution provider: `webgpu` never falls back, `auto` takes the CPU where there is no adapter and says so
    #[arg(long, value_name = "auto|webgpu|cpu", default_value = "auto", global = true)]
    ep: Provider,
    /// Adapter to use, by a part of its name (see `viaduct doctor`)
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
}

impl DeviceArguments {
    /// Starts the runtime and says what was chosen.
    fn start(&self, listener: &mut dyn Listener) -> Result<Runtime, RuntimeError> {
        let runtime = Runtime::start(&self.options())?;
        announce(runtime.device(), listener);
        Ok(runtime)
    }

    /// Starts the runtime on another provider.
    fn start_on(&self, provider: Provider, listener: &mut dyn Listener) -> Result<Runtime, RuntimeError> {
        let adapter = self.adapter.clone().filter(|_| provider != Provider::Cpu);
        let runtime = Runtime::start(&RuntimeOptions { provider, adapter, tuning: None })?;
        announce(runtime.device(), listener);
        Ok(runtime)
    }

    /// [`DeviceArguments::start`] in a child process; tensors pass through files in `exchange`.
    fn start_workers(
        &self,
        exchange: &Path,
        watchdog: Option<Watchdog>,
        listener: &mut dyn Listener,
    ) -> Result<Workers, RuntimeError> {
        let workers = Workers::start(self.options(), exchange, watchdog)?;
        announce(workers.device(), listener);
        Ok(workers)
    }

    /// Refuses an adapter for a provider that has none.
    fn check(&self) -> Result<(), UsageError> {
        match &self.adapter {
            Some(adapter) if self.ep == Provider::Cpu => {
                Err(UsageError(format!("--adapter {adapter}: --ep cpu takes no adapter")))
            }
            _ => Ok(()),
        }
    }

    fn options(&self) -> RuntimeOptions {
        RuntimeOptions { provider: self.ep, adapter: self.adapter.clone(), tuning: None }
    }
}

fn announce(device: &Device, listener: &mut dyn Listener) {
    if let Some(why) = &device.note {
        listener.on_event(Event::warning(format!("running on the CPU: {why}")));
    }
    listener.on_event(Event::note(format!("device: {device}")));
}

/// How large a picture is.
#[derive(Args)]
struct SizeArguments {
    /// Width in pixels, a multiple of 16 for FLUX.2, cut to one of 32 for Qwen-Image; the model's own size by default
    #[arg(long)]
    width: Option<usize>,
    /// Height in pixels
    #[arg(long)]
    height: Option<usize>,
    /// Width and height at once
    #[arg(long, value_name = "WxH", conflicts_with_all = ["width", "height"])]
    size: Option<TypedSize>,
}

impl SizeArguments {
    /// Width and height, where they are asked for.
    fn asked(&self) -> [Option<usize>; 2] {
        match self.size {
            Some(TypedSize(width, height)) => [Some(width), Some(height)],
            None => [self.width, self.height],
        }
    }
}

/// How progress is shown on standard error.
#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum ProgressStyle {
    /// Bars on a terminal, a line per stage and step elsewhere
    #[default]
    Auto,
    /// One JSON object per line
    Json,
    /// Warnings only
    None,
}

#[derive(Args)]
struct ProgressArguments {
    /// How progress is shown on standard error
    #[arg(long, value_enum, default_value_t, value_name = "STYLE")]
    progress: ProgressStyle,
}

/// What to do where the command line is no command: help is printed, anything else is an error in one line.
pub fn misuse(error: &clap::Error) -> anyhow::Result<()> {
    use clap::error::ErrorKind::{
        DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand as NoCommand, DisplayVersion,
    };
    let text = error.to_string();
    if matches!(error.kind(), DisplayHelp | DisplayVersion) {
        return printer::print(&text);
    }
    if error.kind() == NoCommand {
        let message = "no command; `viaduct export`, `generate`, `verify`, `bisect`, `calibrate`, `bench`, `report`, `rewrite`, `inspect`, `doctor`, `pull`, `list` and `rm` take --help";
        return Err(UsageError(message.to_owned()).into());
    }
    let message = text.split("\n\nUsage:").next().unwrap_or(&text);
    let message = message.split("\n\nFor more information").next().unwrap_or(message);
    let message = message.strip_prefix("error: ").unwrap_or(message);
    Err(UsageError(format!("{message}; see --help")).into())
}

/// Runs the command that the user asked for.
pub fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        Command::Pull(arguments) => pull::run(&arguments),
        Command::List(arguments) => list::run(&arguments),
        Command::Rm(arguments) => rm::run(&arguments),
        Command::Export(arguments) => export::run(&arguments),
        Command::Generate(arguments) => generate::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Bisect(arguments) => bisect::run(&arguments),
        Command::Calibrate(arguments) => calibrate::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Report(arguments) => report::run(&arguments),
        Command::Rewrite(arguments) => rewrite::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Worker => Ok(serve()?),
    }
}

/// `key=value`, as `--set` takes it.
fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write key=value, for example text_encoder.length=64")?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

/// `name=N`, as `--dim` takes it.
fn dimension(text: &str) -> Result<(String, usize), String> {
    let wrong = "write name=N with a whole number from 1, for example latent_height=64";
    let (name, size) = text.split_once('=').ok_or(wrong)?;
    let size = size.trim().parse().ok().filter(|size| *size > 0).ok_or(wrong)?;
    Ok((name.trim().to_owned(), size))
}
