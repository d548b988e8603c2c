//! Finds the first node at which two runs part.
//!
//! Both sides compute the same values on the same inputs: one graph on two devices, two graphs, or a graph beside tensors
//! that a reference computed. Values inside the graph are shown in batches that fit the memory; [`search`] decides which.

mod alone;
mod compare;
mod exposure;
mod inputs;
mod pairs;
mod prepared;
mod recorded;
mod report;
mod reproduction;
mod runs;
mod search;
mod side;
mod tensors;
mod units;

use std::{collections::HashMap, path::PathBuf};

use viaduct_export::onnx::{ValueId, WriteError};

pub use self::{
    compare::{Difference, Parting, Tolerance},
    inputs::{InputError, Inputs, bind_by_graph, bind_by_tensors, inputs},
    prepared::{Form, Place, fits, needs_optimisation_on_cpu, prepare, probe_bytes},
    recorded::{Picture, recorded_inputs},
    report::{Contribution, Finding, NodeOutline, Operand, Parted, Report},
    reproduction::{Reproduction, folder_name, quoted},
    search::Limits,
    side::{OnDevice, Subject, Tensors},
    tensors::{TensorFiles, TensorsError},
};
use self::{
    pairs::{Known, pairs},
    runs::Runs,
    search::search,
    side::Side,
    units::{Units, coarse, is_readable},
};
use crate::{
    atomic_file::FileError,
    pipeline::{
        event::{Event, Listener},
        size::SizeError,
        text_to_image::PipelineError,
    },
    plan::OverBudget,
    runtime::{Runtime, RuntimeError},
    verify::VerifyError,
};

#[derive(Debug, thiserror::Error)]
pub enum BisectError {
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    #[error(transparent)]
    Size(#[from] SizeError),
    #[error(transparent)]
    Oracle(#[from] VerifyError),
    #[error(transparent)]
    OverBudget(#[from] Box<OverBudget>),
    #[error(transparent)]
    Tensors(#[from] TensorsError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("the reproduction cannot be written: {0}")]
    Write(#[from] WriteError),
    #[error("{graph} has no value {value}")]
    NoValue { graph: String, value: String },
    #[error("{graph}: {source}")]
    Input { graph: String, source: InputError },
    #[error("a picture's run never gets to stage {stage}")]
    NotReached { stage: String },
    #[error(
        "the two sides have no value in common that could be compared: no name of one is a value of the other; name the tensors as the graph's values"
    )]
    NoSharedName,
    #[error("the two sides have no value in common that could be compared: the shapes of {} differ; --size or --dim binds those of the reference", .values.join(", "))]
    NoSharedShape { values: Vec<String> },
}

/// What a graph is compared with.
pub enum Other<'a> {
    /// The same graph on another device.
    SameGraph(&'a mut Runtime),
    Graph(OnDevice<'a>),
    /// Tensors by the names of the graph's values; those of the first step may say so.
    Tensors(&'a TensorFiles),
}

/// How to compare, and what to leave behind.
pub struct Options {
    pub tolerance: Tolerance,
    pub limits: Limits,
    /// Where a reproduction goes: a folder for the node of that name.
    pub folder: Box<dyn Fn(&str) -> PathBuf>,
    /// Whether an earlier one there may be replaced.
    pub replace: bool,
    /// Flags with which the reproduction's command runs as this did.
    pub flags: Vec<String>,
}

/// Compares a graph's values with another side's, and finds the first that parts. `names` are what reports call the sides.
pub fn bisect(
    a: OnDevice<'_>,
    other: Other<'_>,
    names: [String; 2],
    options: &Options,
    listener: &mut dyn Listener,
) -> Result<Report, BisectError> {
    let subject = a.subject;
    let is_same_graph = matches!(other, Other::SameGraph(_));
    let (units, other_shape) = units(subject, &other)?;
    if units.units.is_empty() {
        return Err(match other_shape.is_empty() {
            true => BisectError::NoSharedName,
            false => BisectError::NoSharedShape { values: other_shape },
        });
    }
    let (inputs, runtime) = (a.inputs, a.runtime);
    let mut files;
    let mut on_device;
    let b: &mut dyn Side = match other {
        Other::SameGraph(runtime) => {
            on_device = OnDevice { subject, runtime, inputs };
            &mut on_device
        }
        Other::Graph(graph) => {
            on_device = graph;
            &mut on_device
        }
        Other::Tensors(tensors) => {
            files = tensors;
            &mut files
        }
    };
    let mut runs = Runs {
        a: OnDevice { subject, runtime, inputs },
        b,
        units: &units,
        tolerance: options.tolerance,
        differences: vec![None; units.units.len()],
        probes: 0,
        listener,
    };
    let outcome = search(&units.units, options.limits, &mut runs)?;
    let mut report = Report {
        a: names[0].clone(),
        b: names[1].clone(),
        values: units.units.len(),
        compared: outcome.compared,
        probes: runs.probes,
        invented_inputs: Vec::new(),
        other_shape,
        nothing_in: runs.nothing_in(),
        found: None,
    };
    if let Some(first) = report.nothing_in.first() {
        runs.listener.on_event(Event::warning(format!(
            "{} of the {} values that were compared are empty, or NaN throughout on both sides, and show nothing; the first is {first}",
            report.nothing_in.len(),
            report.compared
        )));
    }
    if let Some(found) = outcome.found {
        report.found = Some(runs.explain(found, options, !is_same_graph)?);
        report.probes = runs.probes;
    }
    Ok(report)
}

/// The values that both sides have, and names that they share for tensors of other shapes.
fn units(subject: &Subject, other: &Other<'_>) -> Result<(Units, Vec<String>), BisectError> {
    let Subject { model, shapes, .. } = subject;
    let name = |id: ValueId| model.graph[id].name.clone();
    match other {
        Other::SameGraph(_) => Ok((Units::of(model, shapes, &|id| Some((name(id), false))), Vec::new())),
        Other::Graph(OnDevice { subject: b, .. }) => {
            let paired = pairs(
                Known { graph: &model.graph, shapes },
                Known { graph: &b.model.graph, shapes: &b.shapes },
            );
            let coarse_there = coarse(&b.model.graph, &b.shapes);
            let other = |id: ValueId| {
                let there = *paired.get(&id)?;
                is_readable(&b.shapes, there)
                    .then(|| (b.model.graph[there].name.clone(), coarse_there.contains(&there)))
            };
            Ok((Units::of(model, shapes, &other), Vec::new()))
        }
        Other::Tensors(files) => {
            let mut named = HashMap::new();
            let mut other_shape = Vec::new();
            for (_, node) in model.graph.nodes() {
                for id in node.outputs.iter().flatten() {
                    let own = name(*id);
                    let names = [own.clone(), format!("{own}_step0")];
                    let Some(there) = names.into_iter().find(|name| files.has(name)) else { continue };
                    let Some(found) = files.shape(&there)? else { continue };
                    match shapes.shape(*id).is_none_or(|shape| shape == found) {
                        true => drop(named.insert(*id, there)),
                        false => other_shape.push(there),
                    }
                }
            }
            let other = |id: ValueId| Some((named.get(&id)?.clone(), false));
            Ok((Units::of(model, shapes, &other), other_shape))
        }
    }
}
