//! `viaduct verify`

use std::path::PathBuf;

use clap::Args;
use viaduct_export::bundle::Bundle;

use super::{DeviceArguments, ProgressArguments, printer::print, progress::Progress};
use crate::verify::{Oracle, Outcome, Report, verify};

/// Compare a bundle with reference tensors, boundary by boundary.
///
/// DIR holds `request.json` and the tensors of a reference run as .npy. Every boundary is compared and then replaced by the
/// reference's tensor, so that a fault shows where it is made; a second, free run gives the picture. Bars come from the
/// bundle's recipe. Exit code 3 if any is missed.
#[derive(Args)]
pub struct Arguments {
    /// Bundle folder
    bundle: PathBuf,
    /// Folder of reference tensors
    #[arg(long, value_name = "DIR")]
    oracle: PathBuf,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    device: DeviceArguments,
    #[command(flatten)]
    pub progress: ProgressArguments,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let bundle = Bundle::open(&arguments.bundle)?;
    let oracle = Oracle::open(&arguments.oracle)?;
    arguments.device.check()?;
    let mut progress = Progress::new(arguments.progress.progress);
    let mut runtime = arguments.device.start(&mut progress)?;
    let report = verify(&bundle, &oracle, &mut runtime, &mut progress)?;
    drop(progress);
    print(&if arguments.json {
        format!("{}\n", serde_json::to_string_pretty(&report)?)
    } else {
        table(&report)
    })?;
    Ok(report.check()?)
}

fn table(report: &Report) -> String {
    let (profile, device) = (&report.profile, &report.device);
    let head = format!("{:<34} {:<9} {:>11} {:>11}", "boundary", "measure", "value", "bar");
    let mut lines = vec![format!("profile {profile}, {device}"), head];
    for row in &report.rows {
        let verdict = if row.outcome == Outcome::Passed { "ok" } else { "MISS" };
        let [value, bar] = row.figures();
        let (name, measure) = (&row.name, row.measure);
        lines.push(format!("{name:<34} {measure:<9} {value:>11} {bar:>11}  {verdict:<4} {}", row.detail));
    }
    if !report.not_compared.is_empty() {
        lines.push(format!("not compared: {}", report.not_compared.join(", ")));
    }
    let nodes: Vec<String> = report.nodes.iter().map(|(ep, count)| format!("{ep} {count}")).collect();
    lines.push(format!("nodes by provider: {}\n", nodes.join(", ")));
    lines.join("\n")
}
