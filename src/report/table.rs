//! The report for people.

use std::collections::BTreeSet;

use viaduct_export::{
    device::Provider,
    memory::{Excess, Limit, Quadratic, TensorUse},
};

use super::{Chain, DecoderCuts, Report, StageReport, cuts::remedy, dims};
use crate::{plan::Overlap, printable};
use viaduct_export::bytes::ByteSize;

/// Rows of a list that people read; the rest is counted. `--json` has all.
const SHOWN: usize = 10;

/// The report as text: the headline, a row per stage, and the details of the stages that are asked for, by default of
/// the one with the largest peak. Findings are shown of every stage.
pub fn table(report: &Report, all: bool) -> String {
    let mut text = headline(report);
    text.push_str(&stages(report));
    for stage in &report.stages {
        if all || stage.name == report.chain.largest {
            text.push_str(&tensors(stage));
        }
        text.push_str(&findings(stage));
    }
    text.push_str(&decoder_cuts(&report.decoder_cuts));
    printable::lines(&text)
}

fn headline(report: &Report) -> String {
    let device = &report.device;
    let provider = if device.provider == Provider::WebGpu { "WebGPU" } else { "CPU" };
    let picture =
        report.picture.map(|p| format!(", {}x{}, {} steps", p.width, p.height, p.steps)).unwrap_or_default();
    let mut text = format!("{}{picture}, on {} ({provider} provider)\n", report.name, device.name);
    let Some(stage) = report.largest() else { return text + "no graphs\n" };
    let least = if report.chain.complete { "" } else { "at least " };
    text.push_str(&format!("peak {least}{} in {}", ByteSize(report.chain.peak), stage.name));
    let unbound: BTreeSet<&str> =
        report.stages.iter().flat_map(|stage| &stage.unbound).map(String::as_str).collect();
    if !unbound.is_empty() {
        let names = unbound.into_iter().collect::<Vec<_>>().join(", ");
        text.push_str(&format!(", while nothing binds {names}"));
    }
    if let Some(moment) = stage.peak_moment() {
        text.push_str(&format!(
            "; most activations ({}) at node {} ({})",
            ByteSize(moment.live),
            moment.node,
            moment.op_type
        ));
    }
    text.push('\n');
    if let Some(budget) = report.budget {
        let verdict = match report.chain.peak {
            peak if peak > budget => format!("over by {}", ByteSize(peak - budget)),
            peak if report.chain.complete => format!("{} to spare", ByteSize(budget - peak)),
            _ => "perhaps met: not every tensor's size is known".to_owned(),
        };
        text.push_str(&format!("budget {}: {verdict}\n", ByteSize(budget)));
        if report.stages.len() > 1 {
            text.push_str(&beside_each_other(&report.chain));
        }
    }
    report.choices.iter().for_each(|choice| text.push_str(&format!("set for it: {choice}\n")));
    if !report.chain.fits_device {
        text.push_str(&format!("more than the device's memory of {}\n", ByteSize(device.memory)));
    }
    text
}

/// Which sessions are there at once.
fn beside_each_other(chain: &Chain) -> String {
    let ahead = chain.overlap.as_ref().map(Overlap::ahead).unwrap_or_default();
    let all = match chain.may_stay_loaded {
        Some(true) => "all sessions fit it beside each other and may stay loaded\n",
        _ if ahead.is_empty() => "one session at a time: all beside each other do not fit it\n",
        _ => "all sessions beside each other do not fit it\n",
    };
    match ahead.is_empty() {
        true => all.to_owned(),
        false => format!(
            "{all}opened ahead, while the component before computes: {}; at most {} then\n",
            ahead.join(", "),
            ByteSize(chain.overlap_peak.unwrap_or_default())
        ),
    }
}

fn stages(report: &Report) -> String {
    let size = |bytes: u64| ByteSize(bytes).to_string();
    let mut rows =
        vec![["stage", "on disk", "uploaded", "activations", "device", "host", "peak"].map(str::to_owned)];
    for stage in &report.stages {
        let memory = &stage.memory;
        let live = stage.peak_moment().map_or(0, |moment| moment.live);
        rows.push([
            stage.name.clone(),
            size(memory.weights_disk),
            size(memory.weights_uploaded),
            size(live),
            size(memory.predicted.device),
            size(memory.predicted.host),
            size(stage.peak_bytes),
        ]);
    }
    if report.stages.len() > 1 {
        let chain = &report.chain;
        let [disk, uploaded, peak] = [chain.weights_disk, chain.weights_uploaded, chain.peak].map(size);
        let nothing = String::new;
        rows.push(["one at a time".to_owned(), disk, uploaded, nothing(), nothing(), nothing(), peak]);
    }
    format!("\n{}", aligned(&rows))
}

fn tensors(stage: &StageReport) -> String {
    let rows: Vec<[String; 5]> = stage
        .memory
        .largest
        .iter()
        .map(|tensor| {
            let made = match tensor.op_type.as_str() {
                "" => "input".to_owned(),
                op => op.to_owned(),
            };
            [
                ByteSize(tensor.bytes).to_string(),
                tensor.dtype.clone(),
                dims(&tensor.shape),
                made,
                tensor.name.clone(),
            ]
        })
        .collect();
    match rows.is_empty() {
        true => String::new(),
        false => format!("\nlargest tensors of {}\n{}", stage.name, aligned_left(&rows)),
    }
}

fn findings(stage: &StageReport) -> String {
    let of = |what: &str| format!("\n{what} {}\n", stage.name);
    let mut text = String::new();
    let mut list = |what: &str, lines: Vec<String>| {
        if lines.is_empty() {
            return;
        }
        text.push_str(&of(what));
        lines.iter().take(SHOWN).for_each(|line| text.push_str(&format!("  {line}\n")));
        if lines.len() > SHOWN {
            text.push_str(&format!("  and {} more (--json lists them)\n", lines.len() - SHOWN));
        }
    };
    list("tensors that grow with a square in", stage.quadratic.iter().map(quadratic_line).collect());
    list("over the device's limits in", limit_lines(stage));
    list("hazards in", hazard_lines(stage));
    list("contradictions in", stage.conflicts.clone());
    if let Some(why) = &stage.not_lowered {
        list("not fitted to the device:", vec![why.clone()]);
    }
    if !stage.unbound.is_empty() {
        let names = stage.unbound.join(", ");
        list(
            "sizes that are not bound in",
            vec![format!("{names}: bind them with --dim; until then sums are incomplete")],
        );
    }
    let unknown =
        stage.memory.unknown.iter().map(|(op, count)| format!("{count} of {op}")).collect::<Vec<_>>();
    if !unknown.is_empty() {
        list("outputs of unknown size, in no sum, in", vec![unknown.join(", ")]);
    }
    let scratch = &stage.memory.unknown_scratch;
    let scratch = scratch.iter().map(|(op, count)| format!("{count} of {op}")).collect::<Vec<_>>();
    if !scratch.is_empty() {
        list("scratch memory of unknown size, in no sum, in", vec![scratch.join(", ")]);
    }
    text
}

fn quadratic_line(tensor: &Quadratic) -> String {
    let TensorUse { name, dtype, shape, bytes, .. } = &tensor.tensor;
    let with = tensor.symbol.as_deref().map(|symbol| format!(", grows with {symbol}")).unwrap_or_default();
    format!("{} MiB  {dtype}  {}  {name}{with}", mib(*bytes), dims(shape))
}

/// Mebibytes, to a tenth where there are few.
fn mib(bytes: u64) -> String {
    let mib = bytes as f64 / (1u64 << 20) as f64;
    if mib < 10.0 { format!("{mib:.1}") } else { format!("{mib:.0}") }
}

/// Counts first, then tensors, largest first.
fn limit_lines(stage: &StageReport) -> Vec<String> {
    let mut limits: Vec<&Excess> = stage.limits.iter().collect();
    limits.sort_by_key(|excess| (excess.tensor.is_some(), std::cmp::Reverse(excess.asked)));
    limits.into_iter().map(limit_line).collect()
}

fn limit_line(excess: &Excess) -> String {
    let Excess { node, op_type, asked, allowed, .. } = excess;
    let tensor = excess.tensor.as_deref().unwrap_or_default();
    let [bytes, most] = [*asked, *allowed].map(ByteSize);
    match excess.limit {
        Limit::Buffer => format!("{bytes} {tensor}, at {op_type} {node}: a buffer has at most {most}"),
        Limit::Binding => format!("{bytes} {tensor}, at {op_type} {node}: a binding covers at most {most}"),
        Limit::StorageBuffers => {
            format!(
                "{asked} operands and results of {op_type} {node}: a shader has {allowed} storage buffers"
            )
        }
        Limit::F16 => {
            format!(
                "{asked} tensors in f16, first {tensor} at {op_type} {node}: the device does not compute in f16"
            )
        }
    }
}

/// Each kind once, with its first nodes: a model repeats its blocks.
fn hazard_lines(stage: &StageReport) -> Vec<String> {
    let mut lines = Vec::new();
    let mut kinds: Vec<&str> = Vec::new();
    for hazard in &stage.hazards {
        if kinds.contains(&hazard.kind) {
            continue;
        }
        kinds.push(hazard.kind);
        let same: Vec<_> = stage.hazards.iter().filter(|other| other.kind == hazard.kind).collect();
        let more = if same.len() > 1 { format!(" and {} more", same.len() - 1) } else { String::new() };
        lines.push(format!("{}, at node {}{more}", hazard.what, hazard.node));
        lines.push(format!("  why: {}", hazard.why));
        lines.push(format!("  what to do: {} ({})", hazard.remedy, hazard.source));
    }
    lines
}

fn decoder_cuts(compared: &[DecoderCuts]) -> String {
    if compared.is_empty() {
        return String::new();
    }
    let mut rows = vec![["cuts", "stages", "peak", "in"].map(str::to_owned)];
    rows.extend(compared.iter().map(|cuts| {
        let own = if cuts.own { " (as planned)" } else { "" };
        let stages = cuts.stages.to_string();
        [format!("{}{own}", cuts.in_words()), stages, ByteSize(cuts.peak).to_string(), cuts.largest.clone()]
    }));
    let mut text = format!("\nthe image decoder, cut before these up blocks\n{}", aligned(&rows));
    if let Some(cuts) = remedy(compared) {
        text.push_str(&format!("the decoder fits the budget if exported with --set {}\n", cuts.setting()));
    }
    text
}

/// Columns side by side; the first is left-aligned, the others are right-aligned.
/// Columns side by side, of which the first holds names.
pub(crate) fn aligned<const N: usize>(rows: &[[String; N]]) -> String {
    columns(rows, |column| column > 0)
}

/// Columns side by side, of which the first holds sizes.
fn aligned_left<const N: usize>(rows: &[[String; N]]) -> String {
    columns(rows, |column| column == 0)
}

fn columns<const N: usize>(rows: &[[String; N]], is_right: fn(usize) -> bool) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells =
            row.iter().zip(widths).enumerate().map(|(column, (cell, width))| match is_right(column) {
                true => format!("{cell:>width$}"),
                false => format!("{cell:<width$}"),
            });
        format!("  {}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}
