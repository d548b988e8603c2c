//! `viaduct calibrate`

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use viaduct_export::{bundle::Bundle, bytes::ByteSize, files::read_limited};

use super::{
    DeviceArguments, ProgressArguments, SizeArguments,
    exit::UsageError,
    interrupt::{leave_with, on_interrupt},
    model::ModelArguments,
    printer::print,
    progress::Progress,
};
use crate::{
    atomic_file::{self, Existing},
    calibrate::{Calibrated, CalibrationRequest, PROMPTS, calibrate},
    hub::{ModelName, Need},
    pipeline::{
        event::Event,
        text_to_image::{Family, Noise, Request, TextToImage},
    },
};

/// Collect statistics of what the layers of a model read, for `viaduct export --calibration`.
///
/// Draws pictures with a bundle of f32 or f16 weights and sums up the products of the inputs of each linear layer. Every fourth
/// picture takes twice the steps, so that the statistics are not those of one schedule. Then two are drawn once more, with each
/// layer changed a little in turn, to see which errors matter. Everything runs in this process.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Bundle folder, as made by `viaduct export --profile f32` (or f16), or a repository (owner/name)
    bundle: ModelName,
    #[command(flatten)]
    models: ModelArguments,
    /// File of statistics to write, safetensors
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Prompts, one a line; 32 of many kinds by default. A model that knows few things needs its own
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Pictures to draw, each with a seed of its own; one of each prompt by default
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    count: Option<u16>,
    /// Seed of the first picture's noise; it counts up from there
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u32,
    #[command(flatten)]
    size: SizeArguments,
    /// Memory for statistics and the values that they are of, besides the model's own; what does not fit is looked at in another
    /// pass
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    budget: ByteSize,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    device: DeviceArguments,
    #[command(flatten)]
    pub progress: ProgressArguments,
}

const EXAMPLES: &str = "\
Examples:
  viaduct export FLUX.2-klein-4B -o klein-f16 --profile f16
  viaduct calibrate klein-f16 -o klein.safetensors --size 512x512
  viaduct export FLUX.2-klein-4B -o klein-q4 --profile q4-fit --calibration klein.safetensors";

const MAX_PROMPT_BYTES: u64 = 1 << 20;
/// One picture of so many takes twice the steps.
const LONGER: usize = 4;

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    arguments.device.check()?;
    if arguments.out.extension().is_none_or(|extension| extension != "safetensors") {
        return Err(UsageError(format!("-o {}: name a .safetensors file", arguments.out.display())).into());
    }
    let mut progress = Progress::new(arguments.progress.progress);
    let bundle = Bundle::open(&arguments.models.folder(&arguments.bundle, Need::Bundle, &mut progress)?)?;
    let pictures = pictures(arguments, TextToImage::open(&bundle)?.family())?;
    stop_on_interrupt(&progress)?;
    let mut runtime = arguments.device.start(&mut progress)?;
    let request = CalibrationRequest {
        pictures: &pictures,
        budget: arguments.budget.0,
        out: &arguments.out,
        existing: if arguments.force { Existing::Replace } else { Existing::Keep },
    };
    let Calibrated { inputs, weights, passes, bytes } =
        calibrate(&bundle, &request, &mut runtime, &mut progress)?;
    drop(progress);
    let (out, pictures) = (arguments.out.display(), pictures.len());
    print(&match arguments.json {
        true => {
            let report = serde_json::json!({
                "statistics": out.to_string(), "inputs": inputs, "weights": weights, "pictures": pictures, "passes": passes,
                "bytes": bytes,
            });
            format!("{report}\n")
        }
        false => {
            let megabytes = bytes as f64 / 1e6;
            format!("{out}: {inputs} inputs of {weights} weights, {pictures} pictures, {megabytes:.1} MB\n")
        }
    })
}

/// An interrupt ends the process at once, without what it has written of the file.
fn stop_on_interrupt(progress: &Progress) -> anyhow::Result<()> {
    let last_word = progress.last_word();
    on_interrupt(move |signal| {
        let _discarded = atomic_file::discard_writes();
        let event = Event::warning("interrupted; nothing was kept".to_owned());
        leave_with(signal, move || last_word(event))
    })?;
    Ok(())
}

fn pictures(arguments: &Arguments, family: &dyn Family) -> anyhow::Result<Vec<Request>> {
    let [width, height] = arguments.size.asked();
    let own = family.default_size();
    let size = family.size(width.unwrap_or(own[0]), height.unwrap_or(own[1]))?;
    let prompts = prompts(arguments)?;
    let count = arguments.count.map_or(prompts.len(), usize::from);
    let usual = family.steps(None);
    let request = |index: usize| Request {
        prompt: prompts[index % prompts.len()].clone(),
        size,
        steps: if index % LONGER == LONGER - 1 { family.steps(Some(2 * usual)) } else { usual },
        negative: None,
        noise: Noise::Seed(u64::from(arguments.seed) + index as u64),
    };
    let mut pictures: Vec<_> = (0..count).map(request).collect();
    // Those that are alike go through one session.
    pictures.sort_by_key(|picture| picture.steps);
    Ok(pictures)
}

fn prompts(arguments: &Arguments) -> anyhow::Result<Vec<String>> {
    let Some(path) = &arguments.prompts else {
        return Ok(PROMPTS.iter().map(|prompt| (*prompt).to_owned()).collect());
    };
    let bytes =
        read_limited(path, MAX_PROMPT_BYTES).with_context(|| format!("--prompts {}", path.display()))?;
    let text = String::from_utf8(bytes)
        .map_err(|_| UsageError(format!("--prompts {}: not UTF-8", path.display())))?;
    let prompts: Vec<_> =
        text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect();
    if prompts.is_empty() {
        return Err(UsageError(format!("--prompts {}: no line is a prompt", path.display())).into());
    }
    Ok(prompts)
}
