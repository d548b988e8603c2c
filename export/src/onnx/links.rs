//! Who defines and who uses each value.

use std::collections::HashSet;

use super::{
    graph::{Graph, NodeId, ValueId},
    node::Node,
};

/// A snapshot of a graph's edges, made by [`Graph::links`]. Changes to the graph do not show in it.
#[derive(Clone, Debug)]
pub struct Links {
    producers: Vec<Option<NodeId>>,
    uses: Vec<Vec<NodeId>>,
}

impl Links {
    /// The node that defines the value; `None` for graph inputs, constants and values made later.
    pub fn producer(&self, value: ValueId) -> Option<NodeId> {
        *self.producers.get(value.0 as usize)?
    }

    /// The nodes that use the value, each once, in execution order. A node uses what its subgraphs use.
    /// Graph outputs are not nodes; see [`Graph::outputs`].
    pub fn uses(&self, value: ValueId) -> &[NodeId] {
        self.uses.get(value.0 as usize).map_or(&[], Vec::as_slice)
    }
}

impl Graph {
    /// Producers and uses of all values, for passes that ask about many.
    pub fn links(&self) -> Links {
        let count = self.values.len();
        let mut links = Links { producers: vec![None; count], uses: vec![Vec::new(); count] };
        for (id, node) in self.nodes() {
            for output in node.outputs.iter().flatten() {
                links.producers[output.0 as usize] = Some(id);
            }
            for value in self.used_by(node) {
                let uses = &mut links.uses[value.0 as usize];
                if uses.last() != Some(&id) {
                    uses.push(id);
                }
            }
        }
        links
    }

    /// The node that defines a value. Looks through all nodes; use [`Graph::links`] for many values.
    pub fn producer(&self, value: ValueId) -> Option<NodeId> {
        self.nodes().find(|(_, node)| node.outputs.contains(&Some(value))).map(|(id, _)| id)
    }

    /// The nodes that use a value. Looks through all nodes; use [`Graph::links`] for many values.
    pub fn uses(&self, value: ValueId) -> Vec<NodeId> {
        self.links().uses(value).to_vec()
    }

    /// What a node uses: its inputs, and what its bodies name. A value may come several times.
    pub fn used_by<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = ValueId> + 'a {
        node.inputs.iter().flatten().copied().chain(self.captured_by(node))
    }

    /// The values that a node's bodies use by name, at any depth.
    pub fn captured_by<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = ValueId> + 'a {
        node.subgraphs().flat_map(Graph::captures).filter_map(|name| self.find(name))
    }

    /// Names of outer values that this subgraph, or one inside it, uses.
    pub fn captures(&self) -> HashSet<&str> {
        let mut defined: HashSet<&str> = self.inputs.iter().map(|id| self[*id].name.as_str()).collect();
        defined.extend(self.values.iter().filter(|v| v.constant.is_some()).map(|v| v.name.as_str()));
        defined.extend(self.sparse_names());
        let mut used: HashSet<&str> = self.outputs.iter().map(|id| self[*id].name.as_str()).collect();
        for (_, node) in self.nodes() {
            used.extend(node.inputs.iter().flatten().map(|id| self[*id].name.as_str()));
            used.extend(node.subgraphs().flat_map(Graph::captures));
            defined.extend(node.outputs.iter().flatten().map(|id| self[*id].name.as_str()));
        }
        &used - &defined
    }
}
