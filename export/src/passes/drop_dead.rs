//! Nodes and constants whose results nothing uses.
//!
//! Before: a node none of whose outputs reaches a graph output, an initializer that no node reads.
//! After: neither. Nothing is refused: operators have no side effects. Graph inputs stay, used or not, because callers
//! feed them by name.

use std::collections::HashSet;

use super::{Outcome, Pass, PassError, Settings};
use crate::onnx::{Model, ValueId};

pub const PASS: Pass = Pass {
    name: "drop_dead",
    what: "nodes and initializers that no output depends on -> nothing",
    why: "exporters leave them behind, and they are loaded and uploaded all the same",
    run,
};

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    Ok(Outcome::applied(sweep(model)))
}

/// Drops what is dead, and says how many nodes and constants that were.
pub fn sweep(model: &mut Model) -> usize {
    let graph = &mut model.graph;
    let mut live: HashSet<ValueId> = graph.outputs.iter().copied().collect();
    let order: Vec<_> = graph.nodes().map(|(id, _)| id).collect();
    let mut dead = HashSet::new();
    for id in order.into_iter().rev() {
        let node = &graph[id];
        if !node.outputs.iter().flatten().any(|output| live.contains(output)) {
            dead.insert(id);
            continue;
        }
        live.extend(graph.used_by(node));
    }
    live.extend(&graph.inputs);
    let constants: Vec<ValueId> = graph
        .values()
        .filter(|(id, value)| value.constant.is_some() && !live.contains(id))
        .map(|(id, _)| id)
        .collect();
    for id in &constants {
        graph[*id].constant = None;
    }
    graph.remove_nodes(&dead);
    dead.len() + constants.len()
}
