//! Values that are used in the place of others.

use std::collections::HashMap;

use crate::onnx::{Graph, NodeId, ValueId};

/// Which value every node uses instead of another. What graph outputs and bodies name is not changed.
#[derive(Debug, Default)]
pub struct Substitution {
    new: HashMap<ValueId, ValueId>,
}

impl Substitution {
    pub fn put(&mut self, old: ValueId, new: ValueId) {
        let new = self.of(new);
        if new != old {
            self.new.insert(old, new);
        }
    }

    /// What stands for the value.
    pub fn of(&self, value: ValueId) -> ValueId {
        let mut value = value;
        while let Some(new) = self.new.get(&value) {
            value = *new;
        }
        value
    }

    pub fn apply(&self, graph: &mut Graph) {
        if self.new.is_empty() {
            return;
        }
        let nodes: Vec<NodeId> = graph.nodes().map(|(id, _)| id).collect();
        for id in nodes {
            for input in graph[id].inputs.iter_mut().flatten() {
                *input = self.of(*input);
            }
        }
    }
}
