//! The measurements for people.

use viaduct_export::bytes::ByteSize;

use super::{
    Report, SizeReport, StageReport, Sweep,
    report::{PictureTimes, median},
};
use crate::{printable, report::aligned};

/// Two lines that say what was measured where, and a table for each size.
pub fn table(report: &Report) -> String {
    let environment = &report.environment;
    let plugin = environment.webgpu_plugin.as_ref().map(|version| format!(", WebGPU plugin {version}"));
    let driver = match environment.driver.as_str() {
        "" => String::new(),
        driver => format!(" ({driver})"),
    };
    let mut text = format!(
        "{} on {}{driver}, {} provider; ceiling {} TFLOP/s\n{}, viaduct {}, ONNX Runtime {}{}\n",
        report.bundle,
        environment.adapter,
        environment.ep,
        figure(report.ceiling_tflops),
        environment.date,
        environment.viaduct,
        environment.onnx_runtime,
        plugin.unwrap_or_default(),
    );
    report.sizes.iter().for_each(|size| text.push_str(&size_table(size, report.ceiling_tflops)));
    printable::lines(&text)
}

fn size_table(size: &SizeReport, ceiling: f64) -> String {
    let sessions = if size.kept_loaded { "sessions stay loaded" } else { "one session at a time" };
    let SizeReport { width, height, steps, runs, .. } = size;
    let (cold, warm) = (&size.cold_seconds, &size.warm_seconds);
    let mut rows = vec![["seconds", "cold", "warm"].map(str::to_owned)];
    let parts = parts(cold).into_iter().zip(parts(warm));
    rows.extend(parts.map(|((name, cold), (_, warm))| [name.to_owned(), figure(cold), figure(warm)]));
    let head = ["stage", "load s", "first run s", "run s", "runs", "GFLOP", "TFLOP/s", "of ceiling"];
    let mut stages = vec![head.map(str::to_owned)];
    stages.extend(size.stages.iter().map(|stage| stage_row(stage, ceiling)));
    let [host, device] = [size.peak.host, size.peak.device].map(bytes);
    format!(
        "\n{width}x{height}, {steps} steps, {runs} warm after 1 cold, {sessions}; peak memory: host {host}, device {device}\n{}\n{}",
        aligned(&rows),
        aligned(&stages)
    )
}

fn parts(times: &PictureTimes) -> [(&'static str, f64); 6] {
    [
        ("loading", times.loading),
        ("text encoder", times.text_encoder),
        ("first step", times.steps.first().copied().unwrap_or(0.0)),
        ("median step", median(times.steps.clone())),
        ("decoder", times.decoder),
        ("whole picture", times.whole),
    ]
}

fn stage_row(stage: &StageReport, ceiling: f64) -> [String; 8] {
    [
        stage.name.clone(),
        figure(stage.load_seconds),
        figure(stage.first_run_seconds),
        figure(stage.run_seconds),
        stage.runs_per_picture.to_string(),
        figure(stage.flops as f64 / 1e9),
        figure(stage.tflops),
        format!("{:.1} %", stage.tflops / ceiling * 100.0),
    ]
}

fn bytes(bytes: Option<u64>) -> String {
    bytes.map_or("unknown".to_owned(), |bytes| ByteSize(bytes).to_string())
}

/// With three digits behind the point, or fewer where there are many before it.
fn figure(value: f64) -> String {
    let digits = match value {
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        0.1.. => 3,
        _ => 4,
    };
    format!("{value:.digits$}")
}

/// A line for each form, the fastest first, and how the tuning's choice compares.
pub fn sweep_table(sweep: &Sweep) -> String {
    let mut trials: Vec<_> = sweep.trials.iter().collect();
    trials.sort_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds));
    let mut rows = vec![["attention", "dispatches", "norms of heads", "s/step"].map(str::to_owned)];
    rows.extend(trials.iter().map(|trial| {
        let norms = if trial.written_head_norms.is_some() { "written out" } else { "operator" };
        let dispatches = trial.pending_dispatches.to_string();
        [trial.attention.to_string(), dispatches, norms.to_owned(), figure(trial.step_seconds)]
    }));
    let Sweep { width, height, tuned_step_seconds, tuned_over_best, .. } = sweep;
    format!(
        "{width}x{height}\n{}\nas tuned: {} s/step, {tuned_over_best:.3} times the best\n",
        aligned(&rows),
        figure(*tuned_step_seconds)
    )
}
