//! `viaduct bench`

use anyhow::bail;
use clap::Args;
use viaduct_export::bundle::Bundle;

use super::{
    DeviceArguments, ProgressArguments, exit::UsageError, memory::MemoryArguments, model::ModelArguments,
    printer::print, progress::Progress,
};
use crate::{
    bench::{Environment, Measured, Report, Subject, sweep_table, table},
    hub::{ModelName, Need},
    pipeline::{
        size::TypedSize,
        text_to_image::{Family, TextToImage},
    },
    runtime::{Executor, KeptSessions, Provider, Runtime},
    tune::ceiling,
};

/// Measure how fast a bundle draws on this machine, and how much memory that takes.
///
/// For each size one picture is drawn cold, which loads every stage and compiles its shaders where the driver has not kept
/// them, and then several warm. Sessions stay loaded if they fit the budget beside each other, else each is opened again for every
/// picture and its loading is counted apart. Everything runs in this process.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Bundle folder, as made by `viaduct export`, or a repository (owner/name)
    bundle: ModelName,
    #[command(flatten)]
    models: ModelArguments,
    /// Sizes of the pictures; the model's own size by default
    #[arg(long, value_name = "WxH,...", value_delimiter = ',')]
    size: Vec<TypedSize>,
    /// Sampling steps; the recipe's number by default
    #[arg(long, visible_alias = "num-steps", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    steps: Option<u16>,
    /// Warm pictures of each size, of which medians are reported
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=1000))]
    runs: u16,
    /// Instead: time a step under every form of attention, number of dispatches per submission and form of the norms of heads, to see whether what
    /// `viaduct doctor --tune` chose is the best
    #[arg(long)]
    sweep: bool,
    /// Print everything as one JSON object
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
  viaduct bench klein-q8 --size 512x512,1024x1024
  viaduct bench klein-q4 --size 1024x1024 --budget 4GiB --json";

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    arguments.device.check()?;
    let mut progress = Progress::new(arguments.progress.progress);
    let bundle = Bundle::open(&arguments.models.folder(&arguments.bundle, Need::Bundle, &mut progress)?)?;
    let pipeline = TextToImage::open(&bundle)?;
    let pictures = pictures(arguments, pipeline.family())?;
    let subject = Subject { pipeline: &pipeline };
    let mut runtime = arguments.device.start(&mut progress)?;
    if arguments.sweep {
        if runtime.device().provider == Provider::Cpu {
            let message = "--sweep: the CPU provider has nothing to choose among; --ep webgpu has";
            bail!(UsageError(message.to_owned()));
        }
        return sweep(arguments, &subject, pictures, &mut runtime, progress);
    }
    // All at first, so that a size that does not fit is refused before the work.
    let planned = |measured: &Measured| {
        let picture = subject.asked(*measured)?;
        arguments.memory.plan(&bundle, &picture, runtime.device(), false, true, &mut progress)
    };
    let plans = pictures.iter().map(planned).collect::<anyhow::Result<Vec<_>>>()?;
    let environment = Environment::of(runtime.device());
    let ceiling_tflops = ceiling(&mut runtime)? / 1e12;
    let mut sessions = KeptSessions::new(runtime);
    let mut sizes = Vec::with_capacity(pictures.len());
    for (measured, plan) in pictures.into_iter().zip(&plans) {
        let alone = sessions.runtime();
        let executor: &mut dyn Executor = if plan.may_stay_loaded { &mut sessions } else { alone };
        sizes.push(subject.measure(measured, executor, plan, &mut progress)?);
    }
    drop(progress);
    let name = format!("{} {}", bundle.manifest.name, bundle.manifest.profile);
    let report = Report { bundle: name, environment, ceiling_tflops, sizes };
    print(&match arguments.json {
        true => format!("{}\n", serde_json::to_string(&report)?),
        false => table(&report),
    })
}

fn sweep(
    arguments: &Arguments,
    subject: &Subject<'_>,
    pictures: Vec<Measured>,
    runtime: &mut Runtime,
    mut progress: Progress,
) -> anyhow::Result<()> {
    let plan_of = |measured: &Measured, runtime: &Runtime| {
        let picture = subject.asked(*measured)?;
        arguments.memory.plan(subject.pipeline.bundle(), &picture, runtime.device(), false, true, &mut |_| ())
    };
    // All at first, so that a size that does not fit is refused before the work.
    pictures.iter().try_for_each(|measured| plan_of(measured, runtime).map(drop))?;
    let mut sweeps = Vec::with_capacity(pictures.len());
    for measured in pictures {
        let mut plan = |runtime: &Runtime| plan_of(&measured, runtime);
        sweeps.push(subject.sweep(measured, runtime, &mut plan, &mut progress)?);
    }
    drop(progress);
    print(&match arguments.json {
        true => format!("{}\n", serde_json::json!({ "sweeps": sweeps })),
        false => sweeps.iter().map(sweep_table).collect(),
    })
}

fn pictures(arguments: &Arguments, family: &dyn Family) -> anyhow::Result<Vec<Measured>> {
    let [width, height] = family.default_size();
    let sizes = match arguments.size.as_slice() {
        [] => vec![TypedSize(width, height)],
        asked => asked.to_vec(),
    };
    let steps = family.steps(arguments.steps.map(usize::from));
    let measured = |TypedSize(width, height)| {
        let size = family.size(width, height)?;
        Ok(Measured { size, steps, runs: usize::from(arguments.runs) })
    };
    sizes.into_iter().map(measured).collect()
}
