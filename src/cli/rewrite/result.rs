//! What a rewrite did, for people and programs.

use std::{fmt, path::Path, time::Instant};

use serde_json::json;
use viaduct_export::{
    bytes::ByteSize,
    onnx::{Dim, Graph, Model, ValueId, ValueType},
    passes::{Part, Refusal, Report},
};

use super::Cut;
use crate::printable;

/// What was done, to be printed.
pub struct Rewrite<'a> {
    pub out: &'a Path,
    pub before: Counts,
    pub after: Counts,
    pub reports: Vec<Report>,
    pub parts: Option<Cut>,
    pub started: Instant,
}

impl Rewrite<'_> {
    fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    pub fn json(&self) -> String {
        let reports: Vec<_> = self.reports.iter().map(report_json).collect();
        let mut value = json!({
            "model": self.out.to_string_lossy(), "seconds": self.seconds(), "passes": reports,
            "before": self.before.json(), "after": self.after.json(),
        });
        if let Some(cut) = &self.parts {
            value["parts"] = cut.parts.iter().map(part_json).collect();
            value["refused"] = cut.refused.iter().map(refusal_json).collect();
        }
        format!("{value}\n")
    }

    pub fn table(&self) -> String {
        let (out, before, after, seconds) = (self.out.display(), &self.before, &self.after, self.seconds());
        let mut text = if self.reports.is_empty() { String::new() } else { table(&self.reports) };
        for refusal in self.parts.iter().flat_map(|cut| &cut.refused) {
            text.push_str(&printable::lines(&format!("not cut at {}: {}\n", refusal.place, refusal.why)));
        }
        text.push_str(&format!("{out}: {before} -> {after}, {seconds:.1} s\n"));
        for part in self.parts.iter().flat_map(|cut| &cut.parts) {
            text.push_str(&printable::lines(&part_lines(part)));
        }
        text
    }
}

/// A part in three lines: what it consists of, what it takes and what it gives.
fn part_lines(part: &Part) -> String {
    let graph = &part.model.graph;
    let list = |ids: &[ValueId]| ids.iter().map(|id| port(graph, *id)).collect::<Vec<_>>().join(", ");
    format!(
        "  {}.onnx: {}\n    takes {}\n    gives {}\n",
        part.name,
        Counts::of(&part.model),
        list(&graph.inputs),
        list(&graph.outputs)
    )
}

/// `name [1, rows] f32`.
fn port(graph: &Graph, id: ValueId) -> String {
    let value = &graph[id];
    match &value.ty {
        Some(ValueType::Tensor { dtype, shape: Some(shape) }) => {
            format!("{} [{}] {}", value.name, dims(shape).join(", "), dtype.name())
        }
        _ => value.name.clone(),
    }
}

fn dims(shape: &[Dim]) -> Vec<String> {
    shape.iter().map(ToString::to_string).collect()
}

fn part_json(part: &Part) -> serde_json::Value {
    let graph = &part.model.graph;
    let ports =
        |ids: &[ValueId]| -> Vec<serde_json::Value> { ids.iter().map(|id| port_json(graph, *id)).collect() };
    let mut value = Counts::of(&part.model).json();
    value["name"] = json!(part.name);
    value["inputs"] = json!(ports(&graph.inputs));
    value["outputs"] = json!(ports(&graph.outputs));
    value
}

fn port_json(graph: &Graph, id: ValueId) -> serde_json::Value {
    let value = &graph[id];
    match &value.ty {
        Some(ValueType::Tensor { dtype, shape }) => {
            json!({ "name": value.name, "dtype": dtype.name(), "shape": shape.as_deref().map(dims) })
        }
        _ => json!({ "name": value.name }),
    }
}

fn refusal_json(refusal: &Refusal) -> serde_json::Value {
    json!({ "place": refusal.place, "why": refusal.why })
}

/// What a model consists of, for the line that compares it with itself.
pub struct Counts {
    nodes: usize,
    constant_bytes: u64,
}

impl Counts {
    pub fn of(model: &Model) -> Counts {
        Counts { nodes: model.graph.nodes().count(), constant_bytes: model.constant_bytes() }
    }

    fn json(&self) -> serde_json::Value {
        json!({ "nodes": self.nodes, "constant_bytes": self.constant_bytes })
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} nodes, {} of constants", self.nodes, ByteSize(self.constant_bytes))
    }
}

fn table(reports: &[Report]) -> String {
    let width = reports.iter().map(|report| report.pass.name.len()).max().unwrap_or(0).max("pass".len());
    let mut text = format!("{:width$}  {:>7}  {:>7}  refused because\n", "pass", "matched", "applied");
    for report in reports {
        let (name, matched, applied) =
            (report.pass.name, report.applied + report.refused.len(), report.applied);
        text.push_str(format!("{name:width$}  {matched:>7}  {applied:>7}  ").trim_end());
        let indent = width + 2 * (2 + 7) + 2;
        for (i, (why, (count, place))) in report.reasons().into_iter().enumerate() {
            let start = if i == 0 { "  ".to_owned() } else { format!("\n{:indent$}", "") };
            text.push_str(&format!(
                "{start}{count} x {why} ({place}{})",
                if count > 1 { ", ..." } else { "" }
            ));
        }
        text.push('\n');
    }
    printable::lines(&text)
}

fn report_json(report: &Report) -> serde_json::Value {
    let refused: Vec<_> = report.refused.iter().map(refusal_json).collect();
    let matched = report.applied + report.refused.len();
    json!({ "pass": report.pass.name, "matched": matched, "applied": report.applied, "refused": refused })
}
