//! `viaduct report`

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use anyhow::Context;
use clap::Args;
use viaduct_export::{
    arch::{SizesError, SizesRequest},
    bundle::{Bundle, Outline, OutlineRequest, OutlineSource, Stages},
    bytes::ByteSize,
    device::DeviceProfile,
    files::read_limited,
    memory::symbols,
    onnx::{Model, read_graph},
    shapes::Sizes,
};

use super::{
    ProgressStyle, SizeArguments, dimension, exit::UsageError, key_value, model::ModelArguments,
    printer::print, progress::Progress,
};
use crate::{
    atomic_file::{self, Existing},
    hub::{ModelName, Need},
    plan::{Budget, OverBudget, Plan, PlannedModel, largest_that},
    plot::{to_png, to_svg},
    report::{MAX_STAGES, Report, StageReport, Subject, chart, compare_cuts, table},
    runtime::{Provider, expected_profile},
};

/// Larger than any profile or output of `viaduct doctor`.
const MAX_PROFILE: u64 = 1 << 20;

/// What a checkpoint's folder has at its top.
const CHECKPOINT: [&str; 2] = ["model_index.json", "transformer/config.json"];
const DEFAULT_PROFILE: &str = "q8";

/// A report, and whether what it tells of fits the budget.
type Planned = (Report, Result<(), Box<OverBudget>>);

/// Tell what a model will need, without running it: memory, its largest tensors, limits and hazards.
///
/// Shapes follow from the sizes that you give, bytes from shapes, and the peak from the order of execution. Nothing is
/// loaded or run; weights are not read, and need not be there: a recipe with configs does for a plan. What is unknown is
/// listed and in no sum.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Bundle folder, checkpoint folder (its config files do) or .onnx file (its external data need not be there); or a repository
    /// (owner/name)
    #[arg(conflicts_with = "recipe")]
    path: Option<ModelName>,
    #[command(flatten)]
    models: ModelArguments,
    /// In place of a path: a model that is neither exported nor downloaded, by a shipped recipe's name or a .toml file
    #[arg(long, value_name = "NAME|FILE")]
    recipe: Option<String>,
    /// How the weights of a recipe or a checkpoint would be stored; q8 by default
    #[arg(long)]
    profile: Option<String>,
    /// Change a value of the recipe; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    /// Only this stage, with all its details
    #[arg(long, value_name = "NAME")]
    stage: Option<String>,
    #[command(flatten)]
    size: SizeArguments,
    /// Sampling steps; the recipe's number by default
    #[arg(long, visible_alias = "num-steps", value_name = "N")]
    steps: Option<usize>,
    /// Bind a size of the graph, by the name that it has there; may be repeated
    #[arg(long, value_name = "NAME=N", value_parser = dimension)]
    dim: Vec<(String, usize)>,
    /// Set the stages so that they fit, and exit with 4 if one does not: 512MiB, 12GiB, 5GB or bytes
    #[arg(long, value_name = "SIZE")]
    budget: Option<ByteSize>,
    /// A device to plan for: bc250, h200, llvmpipe, cpu, or a file made by `viaduct doctor --json`; this machine's by
    /// default
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "ep")]
    device: Option<String>,
    /// This machine's adapter, or its CPU; by default what `viaduct generate` takes
    #[arg(long, value_name = "auto|webgpu|cpu", default_value = "auto")]
    ep: Provider,
    /// Draw live bytes over the execution order into this .svg or .png file
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Replace an existing plot
    #[arg(long)]
    force: bool,
    /// Print everything as one JSON object (docs/report.md)
    #[arg(long)]
    pub json: bool,
}

const EXAMPLES: &str = "\
Examples:
  viaduct report klein-q8 --size 1024x1024                     what a picture of that size takes on this machine
  viaduct report klein-q8 --size 1024x1024 --device bc250      on another one
  viaduct report klein-q8 --size 1024x1024 --budget 6GiB       how it would be set, or the nearest size that fits
  viaduct report --recipe flux2-klein-4b --profile q4 --budget 8GiB   before anything is downloaded
  viaduct report FLUX.2-klein-4B --set vae_decoder.cuts=1,2,3  a checkpoint, before it is exported
  viaduct report klein-q8 --stage vae_post1 --plot vae.svg     one stage in detail, and as a drawing
  viaduct report decoder.onnx --dim latent_height=64 --dim latent_width=64
  viaduct doctor --json > here.json; viaduct report klein-q8 --device here.json

Exit code 4 if a stage is over the budget.";

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let plot = arguments.plot.as_deref().map(plot_format).transpose()?;
    let device = device(arguments)?;
    let (report, fits) = planned(arguments, device)?;
    if let (Some(path), Some(format)) = (&arguments.plot, plot) {
        draw(&report, path, format, arguments.force)?;
    }
    print(&if arguments.json {
        format!("{}\n", serde_json::to_string(&report)?)
    } else {
        table(&report, arguments.stage.is_some())
    })?;
    Ok(fits.map_err(|over| *over)?)
}

fn usage(message: String) -> anyhow::Error {
    UsageError(message).into()
}

fn device(arguments: &Arguments) -> anyhow::Result<DeviceProfile> {
    let Some(name) = &arguments.device else { return Ok(expected_profile(arguments.ep)?) };
    let path = Path::new(name);
    if !path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json")) {
        return DeviceProfile::preset(name).map_err(|e| usage(format!("--device: {e}")));
    }
    let text = read_limited(path, MAX_PROFILE).with_context(|| format!("--device {}", path.display()))?;
    DeviceProfile::from_json(&text).with_context(|| format!("--device {}", path.display()))
}

/// Looks at what the path or the recipe names.
fn planned(arguments: &Arguments, device: DeviceProfile) -> anyhow::Result<Planned> {
    let outline = |source| {
        let profile = arguments.profile.as_deref().unwrap_or(DEFAULT_PROFILE);
        let outline = Outline::author(&OutlineRequest { source, profile, set: &arguments.set })?;
        of_outline(&outline, arguments, device.clone())
    };
    let (path, need) = match (&arguments.path, &arguments.recipe) {
        (Some(ModelName::Path(path)), _) => (path, Need::Bundle),
        (Some(model), _) => {
            let mut progress = Progress::new(ProgressStyle::Auto);
            (&arguments.models.folder(model, Need::Description, &mut progress)?, Need::Description)
        }
        (None, Some(recipe)) => return outline(OutlineSource::Recipe(recipe)),
        (None, None) => {
            return Err(usage(
                "name a bundle, a checkpoint or an .onnx file, or --recipe NAME; see --help".to_owned(),
            ));
        }
    };
    let is_bundle = Bundle::is_at(path);
    if path.is_dir() && !is_bundle && CHECKPOINT.iter().any(|file| path.join(file).exists()) {
        return outline(OutlineSource::Checkpoint { folder: path, recipe: None });
    }
    let of_recipes = [("--profile", arguments.profile.is_some()), ("--set", !arguments.set.is_empty())];
    refuse(&of_recipes, "is for recipes and checkpoints; a bundle or a model is as it was exported")?;
    if path.is_dir() {
        of_stages(&need.open(path)?, arguments, device)
    } else if Bundle::is_described_by(path) {
        of_stages(&need.open(path.parent().unwrap_or(Path::new("")))?, arguments, device)
    } else {
        of_model(path, arguments, device)
    }
}

/// Refuses the first flag that was given.
fn refuse(flags: &[(&str, bool)], why: &str) -> anyhow::Result<()> {
    match flags.iter().find(|flag| flag.1) {
        Some((flag, _)) => Err(usage(format!("{flag} {why}"))),
        None => Ok(()),
    }
}

/// A model that is not exported yet: its decoder's cuts are still to be chosen.
fn of_outline(outline: &Outline, arguments: &Arguments, device: DeviceProfile) -> anyhow::Result<Planned> {
    let (mut report, fits) = of_stages(outline, arguments, device.clone())?;
    if arguments.stage.is_none() {
        let budget = Budget::asked(&device, report.budget);
        let model = PlannedModel::new(outline, device, budget)?;
        report.decoder_cuts = compare_cuts(outline, &model, &picture(outline, arguments)?, budget)?;
    }
    Ok((report, fits))
}

fn of_stages(stages: &dyn Stages, arguments: &Arguments, device: DeviceProfile) -> anyhow::Result<Planned> {
    let only = arguments.stage.as_deref();
    let names = stages.stage_names();
    if let Some(name) = only.filter(|name| !names.contains(name)) {
        return Err(usage(format!("--stage {name}: the model has {}", names.join(", "))));
    }
    let bound: Sizes = arguments.dim.iter().cloned().collect();
    let subject = Subject { stages, only, bound: &bound };
    let budget = arguments.budget.map(|budget| budget.0);
    let model = PlannedModel::new(&subject, device.clone(), Budget::asked(&device, budget))?.overlapped();
    check_names(&arguments.dim, model.graphs().iter().map(|(_, graph)| graph))?;
    let picture = picture(stages, arguments)?;
    let plan = model.plan(&picture)?;
    let mut reports = Vec::new();
    for (name, graph) in model.graphs() {
        let settings = plan.settings(name);
        let sizes = model.sizes(&picture, &settings)?;
        reports.push(StageReport::new(name, graph.clone(), &sizes, &device, settings));
    }
    let name = format!("{} {}", stages.name(), stages.profile());
    let fits = model.check(&plan, &picture);
    Ok((Report::new(name, Some(picture.into()), device, budget, &plan, reports), fits))
}

/// What is to be drawn: what the user asks for, else the model's own picture.
fn picture(stages: &dyn Stages, arguments: &Arguments) -> Result<SizesRequest, SizesError> {
    let usual = stages.usual()?;
    let [width, height] = arguments.size.asked();
    Ok(SizesRequest {
        width: width.unwrap_or(usual.width),
        height: height.unwrap_or(usual.height),
        steps: arguments.steps.unwrap_or(usual.steps),
        ..usual
    })
}

fn of_model(path: &Path, arguments: &Arguments, device: DeviceProfile) -> anyhow::Result<Planned> {
    let of_bundles = [
        ("--stage", arguments.stage.is_some()),
        ("--size", arguments.size.size.is_some()),
        ("--width", arguments.size.width.is_some()),
        ("--height", arguments.size.height.is_some()),
        ("--steps", arguments.steps.is_some()),
    ];
    refuse(&of_bundles, "is for bundles; bind the sizes of a model with --dim name=N")?;
    let model = read_graph(path)?;
    check_names(&arguments.dim, [&model].into_iter())?;
    let sizes: Sizes = arguments.dim.iter().cloned().collect();
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let asked = arguments.budget.map(|budget| budget.0);
    let budget = Budget::asked(&device, asked);
    let graphs = [(name.clone(), model)];
    let planned = |sizes: &Sizes| Plan::new(&graphs, &|_| sizes.clone(), &device, budget, 0);
    let plan = planned(&sizes);
    let fits = plan.check(&file, || {
        // What the graph contradicts at any size is no reason against one.
        let possible = |smaller: &Plan| plan.contradicts() || !smaller.contradicts();
        nearest(&arguments.dim, &|sizes| planned(sizes).offender().is_none(), &|sizes| {
            possible(&planned(sizes))
        })
    });
    let settings = plan.settings(&name);
    let [(_, model)] = graphs.clone();
    let stage = StageReport::new(&name, model, &sizes, &device, settings);
    Ok((Report::new(file, None, device, asked, &plan, vec![stage]), fits))
}

/// The largest sizes of about the same proportions that fit and that the graph can have, as they would be typed. What a
/// graph contradicts takes less memory than it seems to, so only sizes are tried that it can have: a graph may want
/// multiples of a power of two.
fn nearest(
    dims: &[(String, usize)],
    fits: &dyn Fn(&Sizes) -> bool,
    possible: &dyn Fn(&Sizes) -> bool,
) -> Option<String> {
    let longest = dims.iter().map(|dim| dim.1).max()?;
    let scaled = |part: usize| {
        let size = move |size: usize| (size as u128 * part as u128 / longest as u128).max(1) as usize;
        dims.iter().map(move |(name, own)| (name.clone(), size(*own)))
    };
    let can_have = |part: usize| part > 0 && possible(&scaled(part).collect());
    let steps = (0..=8).map(|bits| 1usize << bits);
    let step = steps
        .map(|step| (step, longest / step))
        .find(|(step, count)| *count > 1 && can_have(count * step) && can_have((count - 1) * step));
    let (step, _) = step?;
    let part = step * largest_that(longest.div_ceil(step), |count| fits(&scaled(count * step).collect()))?;
    if !can_have(part) {
        return None;
    }
    let typed: Vec<String> = scaled(part).map(|(name, size)| format!("--dim {name}={size}")).collect();
    Some(typed.join(" "))
}

/// Refuses names that no graph has.
pub fn check_names<'a>(
    given: &[(String, usize)],
    graphs: impl Iterator<Item = &'a Model>,
) -> anyhow::Result<()> {
    let known: BTreeSet<String> = graphs.flat_map(|model| symbols(&model.graph)).collect();
    let Some((name, size)) = given.iter().find(|(name, _)| !known.contains(name)) else { return Ok(()) };
    let known = match known.is_empty() {
        true => "no sizes by name".to_owned(),
        false => known.into_iter().collect::<Vec<_>>().join(", "),
    };
    Err(usage(format!("--dim {name}={size}: the graph has {known}")))
}

#[derive(Clone, Copy)]
enum PlotFormat {
    Svg,
    Png,
}

fn plot_format(path: &Path) -> anyhow::Result<PlotFormat> {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    match extension.to_lowercase().as_str() {
        "svg" => Ok(PlotFormat::Svg),
        "png" => Ok(PlotFormat::Png),
        _ => Err(usage(format!("--plot {}: name a .svg or a .png file", path.display()))),
    }
}

fn draw(report: &Report, path: &Path, format: PlotFormat, force: bool) -> anyhow::Result<()> {
    if report.stages.len() > MAX_STAGES {
        let count = report.stages.len();
        return Err(usage(format!(
            "--plot: {count} stages, and {MAX_STAGES} have room; choose one with --stage"
        )));
    }
    let drawing = chart(report);
    let bytes = match format {
        PlotFormat::Svg => to_svg(&drawing).into_bytes(),
        PlotFormat::Png => to_png(&drawing)?,
    };
    let existing = if force { Existing::Replace } else { Existing::Keep };
    atomic_file::write(path, existing, &bytes).context("--plot")
}
