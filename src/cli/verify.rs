//! `viaduct verify`

use std::path::PathBuf;

use clap::Args;
use viaduct_export::bundle::Bundle;

use super::{DeviceArguments, ProgressArguments, model::ModelArguments, printer::print, progress::Progress};
use crate::{
    hub::{ModelName, Need},
    pipeline::event::{Event, Listener},
    printable::one_line,
    runtime::Executor,
    verify::{Band, Oracle, Outcome, Planted, Report, Sensitivity, Verdict, VerifyOptions, keep, verify},
};

/// Compare a bundle with reference tensors, boundary by boundary, and see that a fault would be noticed.
///
/// DIR holds `request.json` and the tensors of a reference run as .npy. Every boundary is compared and then replaced by the
/// reference's tensor, so that a fault shows where it is made; a second, free run gives the picture. Bars come from the
/// bundle's recipe, by profile: relative errors, cosine errors of the text's worst row and of every step's velocity, PSNR of pictures.
///
/// Then the recipe's controls are planted: faults (zeroed padding rows, swapped position axes, ...) that must miss a bar. A
/// control that stays green means that the gate has no teeth. Exit code 3 if a bar is missed or a control stays green.
///
/// Results are kept in the bundle's `bundle.json`, one for each device and reference; `viaduct inspect` shows them. Those of a
/// repository are only printed.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Bundle folder, or a repository (owner/name)
    bundle: ModelName,
    #[command(flatten)]
    models: ModelArguments,
    /// Folder of reference tensors
    #[arg(long, value_name = "DIR")]
    oracle: PathBuf,
    /// Plant no controls
    #[arg(long)]
    no_controls: bool,
    /// Leave the bundle as it is: results are printed only
    #[arg(long)]
    no_store: bool,
    /// Draw N more pictures, each with the encoded prompt disturbed by 1e-5, and judge the free picture by how far they lie apart;
    /// N is 3 if it is left out
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "3", value_parser = clap::value_parser!(u16).range(1..))]
    sensitivity: Option<u16>,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    device: DeviceArguments,
    #[command(flatten)]
    pub progress: ProgressArguments,
}

const EXAMPLES: &str = "\
Examples:
  viaduct verify klein-q8 --oracle oracle                    on the GPU, if there is one
  viaduct verify klein-q8 --oracle oracle --ep cpu           on the CPU: is it the bundle, or the device?
  viaduct verify klein-q4 --oracle oracle --sensitivity      is a drop more than the model's own band?
What a missed bar says:
  input_ids, attention_mask, txt_ids, img_ids, sigmas        the host: tokenizer, position ids, schedule
  prompt_embeds                                              the text encoder; padding rows alone: its mask
  dit_*, pred_stepN                                          the transformer; the first that misses is where the fault is made
  vae_*, image_01 (reference latents)                        the decoder
  image_01 alone                                             errors that add up over the steps: see --sensitivity
`viaduct bisect BUNDLE --oracle DIR --stage STAGE` finds the node, where the oracle has tensors inside the graph (dit_*, vae_*).";

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let oracle = Oracle::open(&arguments.oracle)?;
    arguments.device.check()?;
    let mut progress = Progress::new(arguments.progress.progress);
    let bundle = Bundle::open(&arguments.models.folder(&arguments.bundle, Need::Bundle, &mut progress)?)?;
    let mut runtime = arguments.device.start(&mut progress)?;
    let options = VerifyOptions {
        controls: !arguments.no_controls,
        seeds: arguments.sensitivity.map_or(0, usize::from),
    };
    let report = verify(&bundle, &oracle, options, &mut runtime, &mut progress)?;
    // The files of a repository are what the hub says that they are.
    let is_ours = matches!(arguments.bundle, ModelName::Path(_));
    if is_ours
        && !arguments.no_store
        && let Err(error) = keep(&bundle, &oracle, Executor::device(&runtime), &report)
    {
        progress.on_event(Event::warning(format!("the results are not kept in the bundle: {error}")));
    }
    drop(progress);
    print(&if arguments.json {
        format!("{}\n", serde_json::to_string_pretty(&report)?)
    } else {
        table(&report, arguments.no_controls)
    })?;
    Ok(report.check()?)
}

fn table(report: &Report, without_controls: bool) -> String {
    let (profile, device) = (&report.profile, &report.device);
    let head = format!("{:<34} {:<9} {:>11} {:>11}", "boundary", "measure", "value", "bar");
    let mut lines = vec![format!("profile {profile}, {device}"), head];
    for row in &report.rows {
        let verdict = match row.outcome {
            Outcome::Passed => "ok",
            Outcome::Missed => "MISS",
            Outcome::WithinBand => "band",
        };
        let [value, bar] = row.figures();
        let (name, measure) = (&row.name, row.measure.name());
        lines.push(format!("{name:<34} {measure:<9} {value:>11} {bar:>11}  {verdict:<4} {}", row.detail));
    }
    if !report.controls.is_empty() {
        let head = format!("{:<34} {:<44} {:>11} {:>11}", "control", "must miss", "value", "bar");
        lines.extend([String::new(), head]);
        lines.extend(report.controls.iter().map(control));
    }
    if let Some(sensitivity) = &report.sensitivity {
        lines.push(String::new());
        lines.extend(band(sensitivity, report));
    }
    if !report.not_compared.is_empty() {
        lines.push(format!("not compared: {}", report.not_compared.join(", ")));
    }
    let nodes: Vec<String> = report.nodes.iter().map(|(ep, count)| format!("{ep} {count}")).collect();
    lines.push(format!("nodes by provider: {}", nodes.join(", ")));
    let no_controls = match (report.controls.is_empty(), without_controls) {
        (false, _) => "",
        (true, true) => ", no controls planted",
        (true, false) => ", no controls in the recipe",
    };
    lines.push(format!("{}{no_controls}", report.tally()));
    // Recipes and oracles name what is shown.
    lines.iter().map(|line| format!("{}\n", one_line(line))).collect()
}

fn control(control: &Planted) -> String {
    let Planted { name, misses, measure, detail, .. } = control;
    let verdict = match control.verdict {
        Verdict::Red => "red",
        Verdict::Green => "GREEN",
        Verdict::NotRun => "not run",
    };
    let [value, bar] = control.figures().unwrap_or_default();
    let misses = format!("{misses}, {}", measure.name());
    let separator = if detail.is_empty() { "" } else { ": " };
    format!("{name:<34} {misses:<44} {value:>11} {bar:>11}  {verdict}{separator}{detail}")
}

/// The model's own band, and where the free picture lies.
fn band(sensitivity: &Sensitivity, report: &Report) -> Vec<String> {
    let Sensitivity { seeds, strength, image_db, velocity, latents } = sensitivity;
    let mut lines = vec![
        format!("the model's own band, {seeds} prompts disturbed by {strength:e}: worst, mean, best"),
        format!("  picture            {}", decibels(image_db)),
    ];
    let errors = [("last velocity, 1-cos", velocity), ("final latents, 1-cos", latents)];
    for (what, band) in errors.into_iter().filter_map(|(what, band)| Some((what, band.as_ref()?))) {
        lines.push(format!("  {what} {:.2e}, {:.2e}, {:.2e}", band.worst, band.mean, band.best));
    }
    lines.extend(report.picture_within_band.map(|within| match within {
        true => "the free picture lies within the band: the model differs from itself by as much".to_owned(),
        false => {
            let below = "the free picture lies below the band: it differs by more than the model from itself";
            let met = if report.tally().missed == 0 { " (its bar is met all the same)" } else { "" };
            format!("{below}{met}")
        }
    }));
    lines
}

fn decibels(band: &Band) -> String {
    format!("{:.1}, {:.1}, {:.1} dB", band.worst, band.mean, band.best)
}
