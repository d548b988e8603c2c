//! Runs passes, again until nothing changes.

use std::collections::{BTreeMap, HashSet};

use super::{Outcome, Parts, Pass, Refusal, Settings, Split, bind_sizes, drop_dead, single_output};
use crate::onnx::{ComputeError, Graph, GraphError, Model, NodeId, ValueId};

/// Rounds over a list of passes. What one pass makes possible for an earlier one is done in the next round; graphs in the
/// wild settle after two or three.
const MAX_ROUNDS: usize = 12;

/// Why a model could not be rewritten.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    #[error("there is no pass '{0}'; `viaduct rewrite --list` names them")]
    UnknownPass(String),
    #[error("there is no sequence '{0}'; `viaduct rewrite --list` names them")]
    UnknownSequence(String),
    #[error("there is no split '{0}'; `viaduct rewrite --list` names them")]
    UnknownSplit(String),
    #[error("the graph has no value '{0}' to be cut at")]
    UnknownValue(String),
    #[error("where to cut is not said: name values, or the bytes that a part may take")]
    NoCut,
    #[error("bytes can be counted only for known sizes, and these are open: {0}")]
    OpenSizes(String),
    #[error("the pass {pass} made an invalid graph: {source}; this is a bug, please report it")]
    Invalid { pass: &'static str, source: GraphError },
    #[error("the passes {passes} still find work after {MAX_ROUNDS} rounds; this is a bug, please report it")]
    Unsettled { passes: String },
    #[error("the constant '{tensor}': {source}")]
    Constant { tensor: String, source: ComputeError },
    #[error("the node {node} has several outputs, but its operator has one")]
    SeveralOutputs { node: String },
    #[error("the graph has no dimension '{name}' to bind; it has {known}")]
    UnknownSize { name: String, known: String },
}

/// What one pass did in all rounds.
#[derive(Clone, Debug)]
pub struct Report {
    pub pass: &'static Pass,
    pub applied: usize,
    /// As the last round found them.
    pub refused: Vec<Refusal>,
}

impl Report {
    /// Refusals counted by reason, each with the first place.
    pub fn reasons(&self) -> BTreeMap<&str, (usize, &str)> {
        let mut reasons = BTreeMap::new();
        for refusal in &self.refused {
            reasons.entry(refusal.why.as_ref()).or_insert((0, refusal.place.as_str())).0 += 1;
        }
        reasons
    }
}

/// Runs the passes in order, and all of them again until a round changes nothing. After each one the graph is checked,
/// and what nothing uses any more is dropped.
pub fn apply(
    model: &mut Model,
    passes: &[&'static Pass],
    settings: &Settings,
) -> Result<Vec<Report>, PassError> {
    bind_sizes::check(&model.graph, settings)?;
    if let Some(id) = single_output::exceeded(&model.graph) {
        return Err(PassError::SeveralOutputs { node: model.graph.label(id) });
    }
    let mut reports: Vec<Report> =
        passes.iter().map(|pass| Report { pass, applied: 0, refused: Vec::new() }).collect();
    for _ in 0..MAX_ROUNDS {
        let mut applied = 0;
        for report in &mut reports {
            let outcome = run_one(model, report.pass, settings)?;
            applied += outcome.applied;
            report.applied += outcome.applied;
            report.refused = outcome.refused;
        }
        if applied == 0 {
            return Ok(reports);
        }
    }
    let passes = passes.iter().map(|pass| pass.name).collect::<Vec<_>>().join(", ");
    Err(PassError::Unsettled { passes })
}

/// Cuts a model into parts, each of which is checked. There are none if the outcome says why the model stays whole.
pub fn split(model: &Model, split: &Split, settings: &Settings) -> Parts {
    let (parts, outcome) = (split.run)(model, settings)?;
    for part in &parts {
        let invalid = |source| PassError::Invalid { pass: split.name, source };
        part.model.graph.validate().map_err(invalid)?;
    }
    Ok((parts, outcome))
}

/// Gives nodes of one name names of their own: ONNX Runtime refuses two of one name in some graphs.
fn name_apart(graph: &mut Graph) {
    let order: Vec<NodeId> = graph.nodes().map(|(id, _)| id).collect();
    let mut taken: HashSet<String> = graph.nodes().map(|(_, node)| node.name.clone()).collect();
    let mut seen = HashSet::new();
    for id in order {
        let name = &graph[id].name;
        if name.is_empty() || seen.insert(name.clone()) {
            continue;
        }
        let unique = (2..).map(|n| format!("{name}.{n}")).find(|name| !taken.contains(name));
        let Some(unique) = unique else { continue };
        taken.insert(unique.clone());
        graph[id].name = unique;
    }
}

/// Gives values that a pass has made names that no body has, at any depth: ONNX wants names to be unique across bodies
/// and the graphs around them.
fn name_apart_from_bodies(graph: &mut Graph, made: &[ValueId]) {
    let inner: HashSet<String> = graph.names_in_bodies().map(str::to_owned).collect();
    for id in made {
        let name = graph[*id].name.clone();
        let is_free = |name: &String| !inner.contains(name) && graph.find(name).is_none();
        if inner.contains(&name)
            && let Some(unique) = (2..).map(|n| format!("{name}.{n}")).find(is_free)
        {
            graph.rename(*id, &unique);
        }
    }
}

fn run_one(model: &mut Model, pass: &'static Pass, settings: &Settings) -> Result<Outcome, PassError> {
    let before = model.graph.values().count();
    let outcome = (pass.run)(model, settings)?;
    if outcome.applied > 0 {
        let made: Vec<ValueId> = model.graph.values().skip(before).map(|(id, _)| id).collect();
        name_apart_from_bodies(&mut model.graph, &made);
        // Since version 4 of the format, initializers need not be graph inputs.
        model.ir_version = model.ir_version.max(4);
        drop_dead::sweep(model);
        name_apart(&mut model.graph);
        let invalid = |source| PassError::Invalid { pass: pass.name, source };
        model.graph.validate().map_err(invalid)?;
    }
    Ok(outcome)
}
