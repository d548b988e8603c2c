//! Which values of a graph its linear layers read.

use std::collections::BTreeMap;

use viaduct_export::onnx::{Graph, Node, NodeId, ValueId};

/// A value that linear layers read.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerInput {
    /// The value's name.
    pub value: String,
    /// Whether it is an input of the graph itself.
    pub is_graph_input: bool,
    /// Names of the weights that it is multiplied with.
    pub weights: Vec<String>,
    /// Columns of the value: the layers' inputs.
    pub width: usize,
}

/// What the linear layers of a graph read, in the graph's order: every value that is multiplied with a constant matrix, or
/// with one that is cast. A weight counts for the first value that it is multiplied with.
pub fn layer_inputs(graph: &Graph) -> Vec<LayerInput> {
    let casts: BTreeMap<ValueId, ValueId> = graph
        .nodes()
        .filter(|(_, node)| node.is("Cast"))
        .filter_map(|(_, node)| Some((node.output(0)?, node.input(0)?)))
        .collect();
    let mut inputs: Vec<LayerInput> = Vec::new();
    let matrices = graph.nodes().filter_map(|node| matrix(graph, &casts, node));
    for (value, weight, width) in matrices {
        let weight = &graph[weight].name;
        let name = &graph[value].name;
        if inputs.iter().any(|input| input.weights.contains(weight)) {
            continue;
        }
        match inputs.iter_mut().find(|input| input.value == *name && input.width == width) {
            Some(input) => input.weights.push(weight.clone()),
            None => inputs.push(LayerInput {
                value: name.clone(),
                is_graph_input: graph.inputs.contains(&value),
                weights: vec![weight.clone()],
                width,
            }),
        }
    }
    inputs
}

/// The value, the constant [K, N] and K of a matrix product.
fn matrix(
    graph: &Graph,
    casts: &BTreeMap<ValueId, ValueId>,
    (_, node): (NodeId, &Node),
) -> Option<(ValueId, ValueId, usize)> {
    if !node.is("MatMul") {
        return None;
    }
    let (value, matrix) = (node.input(0)?, node.input(1)?);
    let weight = casts.get(&matrix).copied().unwrap_or(matrix);
    match graph[weight].constant.as_ref()?.shape[..] {
        [k, _] => Some((value, weight, k)),
        _ => None,
    }
}
