//! `viaduct report`

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use viaduct_export::{
    bundle::{Bundle, MANIFEST},
    bytes::ByteSize,
    device::DeviceProfile,
    files::read_limited,
    memory::symbols,
    onnx::read_model,
    shapes::Sizes,
};

use super::{dimension, exit::UsageError, printer::print};
use crate::{
    atomic_file::{self, Existing},
    pipeline::size::TypedSize,
    plot::{to_png, to_svg},
    report::{MAX_STAGES, Report, StageReport, bundle_sizes, bundle_symbols, chart, table},
    runtime::{Provider, expected_profile},
};

/// Larger than any profile or output of `viaduct doctor`.
const MAX_PROFILE: u64 = 1 << 20;

/// Tell what a bundle or a model will need, without running it: memory, its largest tensors, limits and hazards.
///
/// Shapes follow from the sizes that you give, bytes from shapes, and the peak from the order of execution. Nothing is
/// loaded or run; weights are not read. What is unknown is listed and in no sum.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Bundle folder or .onnx file; a model's external data need not be there
    path: PathBuf,
    /// Only this stage of a bundle, with all its details
    #[arg(long, value_name = "NAME")]
    stage: Option<String>,
    /// Width of the picture in pixels; the model's own size by default
    #[arg(long)]
    width: Option<usize>,
    /// Height of the picture in pixels
    #[arg(long)]
    height: Option<usize>,
    /// Width and height at once
    #[arg(long, value_name = "WxH", conflicts_with_all = ["width", "height"])]
    size: Option<TypedSize>,
    /// Sampling steps; the recipe's number by default
    #[arg(long, visible_alias = "num-steps", value_name = "N")]
    steps: Option<usize>,
    /// Bind a size of the graph, by the name that it has there; may be repeated
    #[arg(long, value_name = "NAME=N", value_parser = dimension)]
    dim: Vec<(String, usize)>,
    /// Exit with 4 if the peak is larger: 512MiB, 12GiB, 5GB or bytes
    #[arg(long, value_name = "SIZE")]
    budget: Option<ByteSize>,
    /// A device to plan for: bc250, h200, llvmpipe, cpu, or a file made by `viaduct doctor --json`; this machine's by
    /// default
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "ep")]
    device: Option<String>,
    /// This machine's adapter, or its CPU; the adapter by default, if there is one
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
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  viaduct report klein-q8 --size 1024x1024                     what a picture of that size takes on this machine
  viaduct report klein-q8 --size 1024x1024 --device bc250      on another one
  viaduct report klein-q8 --budget 6GiB && viaduct generate -b klein-q8 ...
  viaduct report klein-q8 --stage vae_post1 --plot vae.svg     one stage in detail, and as a drawing
  viaduct report decoder.onnx --dim latent_height=64 --dim latent_width=64
  viaduct doctor --json > here.json; viaduct report klein-q8 --device here.json

Exit code 4 if the peak is over the budget.";

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let plot = arguments.plot.as_deref().map(plot_format).transpose()?;
    let device = device(arguments)?;
    let path = &arguments.path;
    let report = if path.is_dir() {
        of_bundle(path, arguments, device)?
    } else if path.file_name().is_some_and(|name| name == MANIFEST) {
        of_bundle(path.parent().unwrap_or(Path::new("")), arguments, device)?
    } else {
        of_model(path, arguments, device)?
    };
    if let (Some(path), Some(format)) = (&arguments.plot, plot) {
        draw(&report, path, format, arguments.force)?;
    }
    print(&if arguments.json {
        format!("{}\n", serde_json::to_string(&report)?)
    } else {
        table(&report, arguments.stage.is_some())
    })?;
    Ok(report.check_budget()?)
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

fn of_bundle(path: &Path, arguments: &Arguments, device: DeviceProfile) -> anyhow::Result<Report> {
    let bundle = Bundle::open(path)?;
    let (width, height) = match arguments.size {
        Some(TypedSize(width, height)) => (Some(width), Some(height)),
        None => (arguments.width, arguments.height),
    };
    let (picture, mut sizes) = bundle_sizes(&bundle, [width, height, arguments.steps])?;
    let known = bundle_symbols(&bundle);
    bind(&mut sizes, &arguments.dim, &known.into_keys().collect::<Vec<_>>())?;
    let wanted = match &arguments.stage {
        Some(name) => std::slice::from_ref(bundle.stage(name).map_err(|_| no_stage(&bundle, name))?),
        None => &bundle.manifest.stages[..],
    };
    let mut stages = Vec::new();
    for stage in wanted {
        let model =
            read_model(&bundle.path(&stage.graph)?).with_context(|| format!("stage {}", stage.name))?;
        stages.push(StageReport::new(&stage.name, model, &sizes, &device));
    }
    let name = format!("{} {}", bundle.manifest.name, bundle.manifest.profile);
    Ok(Report::new(name, Some(picture), device, arguments.budget.map(|budget| budget.0), stages))
}

fn no_stage(bundle: &Bundle, name: &str) -> anyhow::Error {
    let stages: Vec<&str> = bundle.manifest.stages.iter().map(|stage| stage.name.as_str()).collect();
    usage(format!("--stage {name}: the bundle has {}", stages.join(", ")))
}

fn of_model(path: &Path, arguments: &Arguments, device: DeviceProfile) -> anyhow::Result<Report> {
    let of_bundles = [
        ("--stage", arguments.stage.is_some()),
        ("--size", arguments.size.is_some()),
        ("--width", arguments.width.is_some()),
        ("--height", arguments.height.is_some()),
        ("--steps", arguments.steps.is_some()),
    ];
    if let Some((flag, _)) = of_bundles.iter().find(|flag| flag.1) {
        return Err(usage(format!("{flag} is for bundles; bind the sizes of a model with --dim name=N")));
    }
    let model = read_model(path)?;
    let mut sizes = Sizes::new();
    bind(&mut sizes, &arguments.dim, &symbols(&model.graph).into_iter().collect::<Vec<_>>())?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let stage = StageReport::new(&name, model, &sizes, &device);
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Report::new(name, None, device, arguments.budget.map(|budget| budget.0), vec![stage]))
}

/// Adds sizes that the user gave to those that the picture has.
fn bind(sizes: &mut Sizes, given: &[(String, usize)], known: &[String]) -> anyhow::Result<()> {
    for (name, size) in given {
        if !known.contains(name) {
            let known = if known.is_empty() { "no sizes by name".to_owned() } else { known.join(", ") };
            return Err(usage(format!("--dim {name}={size}: the graph has {known}")));
        }
        sizes.insert(name.clone(), *size);
    }
    Ok(())
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
    atomic_file::write(path, existing, &bytes).context("--plot (--force replaces a file)")
}
