//! Every node by itself: it gets the other side's values, so that nothing adds up from node to node.

use std::collections::HashMap;

use viaduct_export::{
    onnx::{Graph, Model, Node, NodeId, ValueId, ValueType},
    passes::drop_dead,
    shapes::Shapes,
};

use super::{side::Subject, units::Units};

/// Nodes of a graph that do not depend on each other any more.
pub struct Alone {
    pub subject: Subject,
    /// Values of the whole graph that they take.
    pub inputs: Vec<ValueId>,
    /// Of each value that is wanted: the value, and the name of what stands for it here.
    pub outputs: Vec<(ValueId, String)>,
}

impl Alone {
    /// The nodes that make these values, each with those before it that cannot be looked at.
    pub fn of(whole: &Subject, units: &Units, wanted: &[usize]) -> Alone {
        let mut apart = Apart {
            whole: &whole.model.graph,
            shapes: &whole.shapes,
            model: whole.model.clone(),
            nodes: Vec::new(),
            inputs: Vec::new(),
        };
        let mut done: HashMap<NodeId, Option<Renamed>> = HashMap::new();
        let mut outputs = Vec::new();
        for unit in wanted {
            let value = units.seen[*unit].value;
            let nodes = units.between(apart.whole, value);
            let Some(made_by) = nodes.last().copied() else { continue };
            let renamed = done.entry(made_by).or_insert_with(|| apart.take(&nodes));
            if let Some(own) = renamed.as_ref().and_then(|renamed| renamed.get(&value)) {
                outputs.push((value, *own));
            }
        }
        let Apart { mut model, nodes, inputs, .. } = apart;
        let graph = &mut model.graph;
        let all = graph.nodes().map(|(id, _)| id).collect();
        graph.remove_nodes(&all);
        for node in nodes {
            graph.add_node(node);
        }
        graph.inputs.clone_from(&inputs);
        graph.outputs = outputs.iter().map(|(_, own)| *own).collect();
        let outputs = outputs.into_iter().map(|(value, own)| (value, graph[own].name.clone())).collect();
        drop_dead(&mut model);
        let Subject { pending_dispatches, optimisation, .. } = *whole;
        let (name, shapes) = (whole.name.clone(), whole.shapes.clone());
        Alone { subject: Subject { name, model, shapes, pending_dispatches, optimisation }, inputs, outputs }
    }
}

/// What stands for a value where its node is alone.
type Renamed = HashMap<ValueId, ValueId>;

struct Apart<'a> {
    whole: &'a Graph,
    shapes: &'a Shapes,
    model: Model,
    nodes: Vec<Node>,
    inputs: Vec<ValueId>,
}

impl Apart<'_> {
    /// Copies some nodes with results of other names. None if a body among them uses one of these by its name.
    fn take(&mut self, nodes: &[NodeId]) -> Option<Renamed> {
        let mut renamed = Renamed::new();
        let (mut copies, mut inputs) = (Vec::new(), Vec::new());
        for id in nodes {
            let mut node = self.whole[*id].clone();
            if self.whole.captured_by(&node).any(|value| renamed.contains_key(&value)) {
                return None;
            }
            let taken = self.whole.used_by(&node);
            inputs.extend(taken.filter(|v| !renamed.contains_key(v) && self.whole[*v].constant.is_none()));
            for input in node.inputs.iter_mut().flatten() {
                *input = renamed.get(input).copied().unwrap_or(*input);
            }
            for output in node.outputs.iter_mut().flatten() {
                let own = self.stand_in(*output);
                renamed.insert(*output, own);
                *output = own;
            }
            // Several values may need the same node: each copy has a name of its own.
            if let Some(own) = node.outputs.iter().flatten().next() {
                node.name.clone_from(&self.model.graph[*own].name);
            }
            copies.push(node);
        }
        self.nodes.extend(copies);
        for input in inputs {
            if !self.inputs.contains(&input) {
                self.inputs.push(input);
            }
        }
        Some(renamed)
    }

    fn stand_in(&mut self, value: ValueId) -> ValueId {
        let graph = &mut self.model.graph;
        let name = graph.free_name(&format!("{}.alone", graph[value].name));
        let own = graph.value(&name);
        let dtype = self.shapes.fact(value).dtype;
        graph[own].ty = dtype.map(|dtype| ValueType::Tensor { dtype, shape: None });
        own
    }
}
