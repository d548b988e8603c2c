//! `viaduct generate`

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::Context;
use clap::Args;
use viaduct_export::bundle::Bundle;

use super::{DeviceArguments, ProgressArguments, exit::UsageError, printer::print, progress::Progress};
use crate::{
    atomic_file::{self, Existing},
    npy,
    pipeline::{
        dump::Dump,
        event::{Event, Listener},
        flux2::{Flux2, Noise, Request, Run, Watch},
        image::{Picture, Provenance, check_finite},
        probe::{NoProbe, Probe},
        size::{Size, TypedSize},
    },
    runtime::{Device, Executor},
};

/// Draw a picture from a prompt.
///
/// The same seed gives the same noise as `torch.Generator("cpu").manual_seed(seed)` in diffusers. The PNG carries prompt,
/// seed, steps, size and bundle; `viaduct inspect picture.png` shows them.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Bundle folder, as made by `viaduct export`
    #[arg(short, long)]
    bundle: PathBuf,
    /// What to draw
    #[arg(short, long)]
    prompt: String,
    /// PNG file to write
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Width in pixels, a multiple of 16 for FLUX.2; the model's own size by default
    #[arg(long)]
    width: Option<usize>,
    /// Height in pixels
    #[arg(long)]
    height: Option<usize>,
    /// Width and height at once
    #[arg(long, value_name = "WxH", conflicts_with_all = ["width", "height"])]
    size: Option<TypedSize>,
    /// Seed of the noise; drawn and printed if absent
    #[arg(long)]
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
    /// Replace an existing file
    #[arg(long)]
    force: bool,
    /// Run everything in this process instead of a child per component
    #[arg(long)]
    in_process: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArguments,
    #[command(flatten)]
    progress: ProgressArguments,
}

const EXAMPLES: &str = "\
Examples:
  viaduct generate -b klein-q8 -p \"a lighthouse in fog\" -o lighthouse.png --size 512x512 --seed 7
  viaduct generate -b klein-q8 -p \"a fox\" -o fox.png --ep webgpu --json --progress json";

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let started = Instant::now();
    let bundle = Bundle::open(&arguments.bundle)?;
    let flux2 = Flux2::open(&bundle)?;
    let request = request(arguments, &flux2)?;
    check_writable(arguments)?;
    let mut progress = Progress::new(arguments.progress.progress);
    let exchange = tempfile::tempdir().context("no folder for the workers' tensors")?;
    let mut executor = executor(arguments, exchange.path(), &mut progress)?;
    announce(&request, &mut progress);

    let existing = if arguments.force { Existing::Replace } else { Existing::Keep };
    let mut dump = arguments.dump.as_deref().map(|folder| Dump::create(folder, existing)).transpose()?;
    let mut nothing = NoProbe;
    let probe: &mut dyn Probe = match &mut dump {
        Some(dump) => dump,
        None => &mut nothing,
    };
    let mut run = Run { executor: &mut *executor, plan: None, watch: Watch::new(&mut progress, probe) };
    let image = flux2.draw(&request, &mut run)?;
    let nodes = run.watch.nodes;
    let picture = Picture::from_tensor(&image)?;
    if let Some(dump) = dump {
        dump.finish(&image)?;
    }
    let provenance = provenance(arguments, &request, &bundle);
    let folder = folder_of(&arguments.out);
    fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    atomic_file::write(&arguments.out, existing, &picture.to_png(&provenance.texts())?)?;
    drop(progress);
    print(&report(arguments, &request, executor.device(), &nodes, started.elapsed().as_secs_f64()))
}

fn executor(
    arguments: &Arguments,
    exchange: &Path,
    progress: &mut Progress,
) -> anyhow::Result<Box<dyn Executor>> {
    Ok(match arguments.in_process {
        true => Box::new(arguments.device.start(progress)?),
        false => Box::new(arguments.device.start_workers(exchange, progress)?),
    })
}

fn request(arguments: &Arguments, flux2: &Flux2<'_>) -> anyhow::Result<Request> {
    let parameters = flux2.parameters();
    let multiple = parameters.vae.pixels_per_token;
    let own = parameters.vae.default_side;
    let (width, height) = match arguments.size {
        Some(TypedSize(width, height)) => (width, height),
        None => (arguments.width.unwrap_or(own), arguments.height.unwrap_or(own)),
    };
    let size = Size::new(width, height, multiple)?;
    let steps = arguments.num_steps.unwrap_or(parameters.schedule.steps);
    if !(1..=1000).contains(&steps) {
        return Err(UsageError(format!("--num-steps {steps}: a picture takes 1 to 1000 steps")).into());
    }
    let noise = match &arguments.noise {
        Some(path) => {
            let noise = npy::read(path).context("--noise")?;
            check_finite(&format!("--noise {}", path.display()), None, &noise)?;
            Noise::Given(noise)
        }
        None => Noise::Seed(arguments.seed.unwrap_or_else(random_seed)),
    };
    Ok(Request { prompt: arguments.prompt.clone(), size, steps, noise })
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

fn report(
    arguments: &Arguments,
    request: &Request,
    device: &Device,
    nodes: &BTreeMap<String, usize>,
    seconds: f64,
) -> String {
    let seed = seed_of(request);
    if arguments.json {
        let report = serde_json::json!({
            "image": arguments.out.to_string_lossy(), "seed": seed, "width": request.size.width(), "height": request.size.height(),
            "steps": request.steps, "ep": device.provider.to_string(), "adapter": device.name,
            "nodes": nodes, "seconds": seconds,
        });
        format!("{report}\n")
    } else {
        let seed = seed.map_or("given noise".to_owned(), |seed| format!("seed {seed}"));
        format!("{}: {}, {seed}, {seconds:.1} s\n", arguments.out.display(), request.size)
    }
}
