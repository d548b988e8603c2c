//! Finds the first node at which two runs part.
//!
//! Both sides compute the same values on the same inputs: one graph on two devices, two graphs, or a graph beside tensors
//! that a reference computed. Values inside the graph are shown in batches that fit the memory; [`search`] decides which.

mod compare;
mod exposure;
mod inputs;
mod pairs;
mod prepared;
mod recorded;
mod report;
mod reproduction;
mod search;
mod side;
mod tensors;
mod units;

use std::{collections::HashMap, path::PathBuf};

use viaduct_export::{
    bytes::ByteSize,
    onnx::{NodeId, ValueId, WriteError},
};

use self::{
    compare::as_type,
    pairs::{Known, pairs},
    report::label,
    reproduction::Extract,
    search::{Compare, Found, search},
    side::Side,
    tensors::carried,
    units::{Units, coarse},
};
pub use self::{
    compare::{Difference, Parting, Tolerance},
    inputs::{Inputs, bind_by_tensors, inputs},
    prepared::{Form, Place, fits, prepare, probe_bytes},
    recorded::{Picture, recorded_inputs},
    report::{Finding, NodeOutline, Operand, Parted, Report},
    reproduction::{Reproduction, folder_name, quoted},
    search::Limits,
    side::{OnDevice, Subject, Tensors},
    tensors::{TensorFiles, TensorsError},
};
use crate::{
    atomic_file::FileError,
    pipeline::{
        event::{Event, Listener},
        flux2::Flux2Error,
        size::SizeError,
    },
    plan::OverBudget,
    runtime::{Runtime, RuntimeError},
    tensor::HostTensor,
    verify::VerifyError,
};

#[derive(Debug, thiserror::Error)]
pub enum BisectError {
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Pipeline(#[from] Flux2Error),
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
    #[error("input {input}: its element type is none that can be given")]
    InputType { input: String },
    #[error("input {input}: its shape is not known; give it with --inputs")]
    InputShape { input: String },
    #[error(
        "input {input}: {symbol} has no size; bind it with --dim {symbol}=N, or give the input with --inputs"
    )]
    Unbound { input: String, symbol: String },
    #[error("input {input}: the graph takes {wanted:?}, the given tensor has {given:?}")]
    GivenShape { input: String, wanted: Vec<usize>, given: Vec<usize> },
    #[error("a picture's run never gets to stage {stage}")]
    NotReached { stage: String },
    #[error("the two sides have no value in common that could be compared: {why}")]
    NothingInCommon { why: String },
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
        let why = match other_shape.is_empty() {
            true => "no name of one is a value of the other".to_owned(),
            false => format!("the shapes of {} differ", other_shape.join(", ")),
        };
        return Err(BisectError::NothingInCommon { why });
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
        found: None,
    };
    if let Some(found) = outcome.found {
        let mut finding = runs.finding(found);
        finding.reproduction = runs.reproduce(found, options, !is_same_graph)?;
        report.found = Some(finding);
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
                b.shapes.fact(there).dtype.and_then(carried)?;
                Some((b.model.graph[there].name.clone(), coarse_there.contains(&there)))
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
                    let Some(tensor) = files.tensor(&there)? else { continue };
                    match shapes.shape(*id).is_none_or(|shape| shape == tensor.shape) {
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

/// Both sides, as the search sees them.
struct Runs<'r> {
    a: OnDevice<'r>,
    b: &'r mut dyn Side,
    units: &'r Units,
    tolerance: Tolerance,
    differences: Vec<Option<Difference>>,
    probes: usize,
    listener: &'r mut dyn Listener,
}

impl Compare for Runs<'_> {
    type Error = BisectError;

    fn agree(&mut self, units: &[usize]) -> Result<Vec<bool>, BisectError> {
        let (graph, seen) = (&self.a.subject.model.graph, &self.units.seen);
        let names: Vec<&str> = units.iter().map(|unit| graph[seen[*unit].value].name.as_str()).collect();
        let others: Vec<&str> = units.iter().map(|unit| seen[*unit].other.as_str()).collect();
        let a = self.a.values(&names)?;
        let b = self.b.values(&others)?;
        let mut agree = Vec::with_capacity(units.len());
        for ((unit, a), b) in units.iter().zip(&a).zip(&b) {
            let tolerance = self.tolerance.of(self.units.seen[*unit].coarse);
            let difference = Difference::between(a, b, tolerance);
            agree.push(difference.agrees());
            // How a value parted is to be told, also where it agrees when less is shown.
            let known = &mut self.differences[*unit];
            if !(difference.agrees() && known.as_ref().is_some_and(|known| !known.agrees())) {
                *known = Some(difference);
            }
        }
        self.tell(units, &agree);
        Ok(agree)
    }
}

impl Runs<'_> {
    fn name(&self, unit: usize) -> &str {
        &self.a.subject.model.graph[self.units.seen[unit].value].name
    }

    /// One line for each probe.
    fn tell(&mut self, units: &[usize], agree: &[bool]) {
        self.probes += 1;
        let bytes = units.iter().map(|unit| self.units.units[*unit].bytes).fold(0, u64::saturating_add);
        let (first, last) = (units.iter().min().unwrap_or(&0), units.iter().max().unwrap_or(&0));
        let parted = agree.iter().filter(|agrees| !**agrees).count();
        let outcome = match units.iter().zip(agree).filter(|(_, agrees)| !**agrees).map(|(u, _)| *u).min() {
            None => "agree".to_owned(),
            Some(unit) => {
                let words = self.differences[unit].as_ref().map(Difference::in_words).unwrap_or_default();
                format!("{parted} part, the first is {} ({words})", self.name(unit))
            }
        };
        self.listener.on_event(Event::note(format!(
            "probe {}: {} values, {}, numbers {}..{} of {}: {outcome}",
            self.probes,
            units.len(),
            ByteSize(bytes),
            first + 1,
            last + 1,
            self.units.units.len()
        )));
    }

    /// The nodes of a finding, in order; the last makes the value.
    fn between(&self, found: Found) -> Vec<NodeId> {
        self.units.between(&self.a.subject.model.graph, self.units.seen[found.unit].value)
    }

    fn finding(&self, found: Found) -> Finding {
        let Subject { model, shapes, .. } = self.a.subject;
        let graph = &model.graph;
        let difference = |id: ValueId| self.differences[self.units.unit(id)?].clone();
        let between = self.between(found);
        let made_by = between[between.len() - 1];
        let sources = &self.units.units[found.unit].sources;
        Finding {
            value: self.name(found.unit).to_owned(),
            other: self.units.seen[found.unit].other.clone(),
            difference: self.differences[found.unit].clone().expect("what was found was compared"),
            node: NodeOutline::of(graph, shapes, made_by, &difference),
            between: between.iter().map(|id| label(graph, *id)).collect(),
            agreeing: sources.iter().map(|unit| self.name(*unit).to_owned()).collect(),
            confirmed: found.confirmed,
            unseen_before: found.unseen_before,
            reproduction: None,
        }
    }

    /// Writes the nodes of a finding as a model of their own, with what the other side gives them and makes of it.
    fn reproduce(
        &mut self,
        found: Found,
        options: &Options,
        against_expected: bool,
    ) -> Result<Option<Reproduction>, BisectError> {
        let (subject, nodes) = (self.a.subject, self.between(found));
        if reproduction::is_small_enough(&subject.model, &nodes) {
            return Ok(None);
        }
        let graph = &subject.model.graph;
        let made_by = nodes[nodes.len() - 1];
        let made = graph[made_by].outputs.iter().flatten().copied();
        let outputs: Vec<ValueId> = made.filter(|id| self.units.unit(*id).is_some()).collect();
        let mut extract = Extract::of(subject, &nodes, &outputs);
        let (inputs, expected) = self.theirs(&extract)?;
        extract.state(&inputs, &expected);
        let names: Vec<&str> = outputs.iter().map(|id| graph[*id].name.as_str()).collect();
        let own = extract.subject.run(self.a.runtime, &inputs, &names)?;
        let place = outputs.iter().position(|id| self.units.unit(*id) == Some(found.unit)).unwrap_or(0);
        let tolerance = self.tolerance.of(self.units.seen[found.unit].coarse);
        let difference = Difference::between(&own[place], &expected[place], tolerance);
        let folder = (options.folder)(&graph.place(made_by));
        extract.write(&folder, options.replace, &inputs, &expected)?;
        let command = reproduction::command(&folder, against_expected, &options.flags);
        Ok(Some(Reproduction { folder, command, shows: !difference.agrees(), difference }))
    }

    /// What the other side has for the inputs and the results of an extract, in the types of this one.
    fn theirs(&mut self, extract: &Extract) -> Result<(Tensors, Vec<HostTensor>), BisectError> {
        let Subject { model, shapes, .. } = self.a.subject;
        let asked: Vec<(ValueId, &str)> = extract
            .inputs
            .iter()
            .chain(&extract.outputs)
            .filter_map(|id| Some((*id, self.units.seen[self.units.unit(*id)?].other.as_str())))
            .collect();
        let names: Vec<&str> = asked.iter().map(|(_, name)| *name).collect();
        let tensors = self.b.values(&names)?;
        let mut inputs = Tensors::new();
        let mut expected = Vec::new();
        for ((id, _), tensor) in asked.iter().zip(&tensors) {
            let dtype = shapes.fact(*id).dtype.and_then(carried);
            let tensor = as_type(tensor, dtype.unwrap_or_else(|| tensor.values.dtype()));
            match extract.outputs.contains(id) {
                true => expected.push(tensor),
                false => drop(inputs.insert(model.graph[*id].name.clone(), tensor)),
            }
        }
        for id in &extract.inputs {
            let name = &model.graph[*id].name;
            if let (None, Some(tensor)) = (inputs.get(name), self.a.inputs.get(name)) {
                inputs.insert(name.clone(), tensor.clone());
            }
        }
        Ok((inputs, expected))
    }
}
