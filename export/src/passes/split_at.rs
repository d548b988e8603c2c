//! A graph cut into parts at named values, or wherever a budget asks for it.
//!
//! Before: one model. After: several that run one after another; each takes what earlier ones made for it. At a name: the
//! part before the cut is what the value depends on, and what remains comes behind it. With a budget: the fewest parts
//! that keep to it, cut where the fewest bytes cross.
//!
//! Refused: a value before or behind which nothing is computed, one that is computed together with the one before, and
//! a cut across a value whose type or shape is not known; a budget that one node exceeds, and one that the whole keeps.

use std::collections::{HashMap, HashSet};

use super::{
    Outcome, Part, Parts, PassError, Refusal, Settings, Split, View,
    budget::Costs,
    part::{Origins, ancestors, parts},
};
use crate::onnx::{Model, NodeId, ValueId};

pub const SPLIT: Split = Split {
    name: "split_at",
    what: "one graph -> parts, cut at --at NAME, or into the fewest that --max-bytes allows",
    why: "weights and values of all nodes are in memory together, although most of them never meet",
    run,
};

const NOTHING_BEFORE: &str = "nothing is computed before it";
const NOTHING_BEHIND: &str = "nothing is computed behind it";
const NOTHING_BETWEEN: &str = "nothing is computed between it and the cut before";

fn run(model: &Model, settings: &Settings) -> Parts {
    let view = View::of(model);
    let mut outcome = Outcome::default();
    let groups = match (&settings.split.at[..], settings.split.max_bytes) {
        ([], None) => return Err(PassError::NoCut),
        ([], Some(budget)) => {
            let cuts = Costs::of(&view, &settings.split.sizes)?.and_then(|costs| costs.cuts(budget));
            match cuts {
                Ok(cuts) => before_nodes(&view, &cuts),
                Err(refusal) => {
                    outcome.refused.push(refusal);
                    return Ok((Vec::new(), outcome));
                }
            }
        }
        (names, _) => before_values(&view, names, &mut outcome)?,
    };
    let parts = cut_behind(&view, &groups, |index| format!("part{index}"));
    match parts {
        Ok(parts) if parts.len() > 1 => {
            outcome.applied = parts.len() - 1;
            Ok((parts, outcome))
        }
        Ok(_) => Ok((Vec::new(), outcome)),
        Err(refusal) => {
            outcome.refused.push(refusal);
            Ok((Vec::new(), outcome))
        }
    }
}

/// Cuts a graph behind groups of nodes, each of which begins where the one before ends; the last part is the rest.
pub fn cut_behind(
    view: &View<'_>,
    groups: &[HashSet<NodeId>],
    name: impl Fn(usize) -> String,
) -> Result<Vec<Part>, Refusal> {
    let place = |id: &NodeId| groups.iter().position(|group| group.contains(id)).unwrap_or(groups.len());
    let part_of: HashMap<NodeId, usize> = live(view).into_iter().map(|id| (id, place(&id))).collect();
    let names: Vec<String> = (0..=groups.len()).map(name).collect();
    parts(view, &part_of, &names)
}

/// Nodes that an output depends on.
pub fn live(view: &View<'_>) -> HashSet<NodeId> {
    view.graph.outputs.iter().flat_map(|output| ancestors(view, *output)).collect()
}

/// What comes up to each of the nodes in execution order.
fn before_nodes(view: &View<'_>, cuts: &[NodeId]) -> Vec<HashSet<NodeId>> {
    let order: Vec<NodeId> = view.graph.nodes().map(|(id, _)| id).collect();
    let upto = |cut: &NodeId| order.iter().position(|id| id == cut).map_or(0, |at| at + 1);
    cuts.iter().map(|cut| order[..upto(cut)].iter().copied().collect()).collect()
}

/// What the values depend on, in execution order; values where no cut can be are left out.
fn before_values(
    view: &View<'_>,
    names: &[String],
    outcome: &mut Outcome,
) -> Result<Vec<HashSet<NodeId>>, PassError> {
    let places: HashMap<NodeId, usize> =
        view.graph.nodes().enumerate().map(|(at, (id, _))| (id, at)).collect();
    let place = |value: &ValueId| view.producer(*value).and_then(|(id, _)| places.get(&id));
    let found: Result<Vec<ValueId>, PassError> = names
        .iter()
        .map(|name| view.graph.find(name).ok_or_else(|| PassError::UnknownValue(name.clone())))
        .collect();
    let mut values = found?;
    values.sort_by_key(place);
    let origins = Origins::of(view);
    let mut computing = live(view);
    computing.retain(|id| origins.computes(&view.graph[*id]));
    let mut before: HashSet<NodeId> = HashSet::new();
    let mut groups = Vec::new();
    for value in values {
        let group = ancestors(view, value);
        let computed = || group.intersection(&computing);
        let refused = if computed().next().is_none() {
            NOTHING_BEFORE
        } else if computed().all(|id| before.contains(id)) {
            NOTHING_BETWEEN
        } else if computing.iter().all(|id| before.contains(id) || group.contains(id)) {
            NOTHING_BEHIND
        } else {
            before.extend(&group);
            groups.push(group);
            continue;
        };
        outcome.refuse(view.graph[value].name.clone(), refused);
    }
    Ok(groups)
}
