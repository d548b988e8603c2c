//! The linear layers of a graph, and which of its values they read.

use std::collections::BTreeMap;

use viaduct_export::onnx::{Graph, Node, ValueId};

/// A value that is multiplied with a constant matrix, or with one that is cast.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Name of the matrix.
    pub weight: String,
    /// Name of the value.
    pub input: String,
    /// Whether the value is an input of the graph itself.
    pub is_graph_input: bool,
    /// Columns of the value.
    pub inputs: usize,
    /// Name of the product.
    pub output: String,
    /// Columns of the product.
    pub outputs: usize,
}

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

/// The linear layers of a graph, in its order. A weight counts for the first value that it is multiplied with.
pub fn layers(graph: &Graph) -> Vec<Layer> {
    let casts: BTreeMap<ValueId, ValueId> = graph
        .nodes()
        .filter(|(_, node)| node.is("Cast"))
        .filter_map(|(_, node)| Some((node.output(0)?, node.input(0)?)))
        .collect();
    let mut layers: Vec<Layer> = Vec::new();
    for layer in graph.nodes().filter_map(|(_, node)| layer(graph, &casts, node)) {
        if layers.iter().all(|known| known.weight != layer.weight) {
            layers.push(layer);
        }
    }
    layers
}

/// What the linear layers of a graph read, in the graph's order.
pub fn layer_inputs(graph: &Graph) -> Vec<LayerInput> {
    let mut inputs: Vec<LayerInput> = Vec::new();
    for Layer { weight, input: value, is_graph_input, inputs: width, .. } in layers(graph) {
        match inputs.iter_mut().find(|input| input.value == value && input.width == width) {
            Some(input) => input.weights.push(weight),
            None => inputs.push(LayerInput { value, is_graph_input, weights: vec![weight], width }),
        }
    }
    inputs
}

/// The layer that a matrix product is.
fn layer(graph: &Graph, casts: &BTreeMap<ValueId, ValueId>, node: &Node) -> Option<Layer> {
    if !node.is("MatMul") {
        return None;
    }
    let (value, matrix, product) = (node.input(0)?, node.input(1)?, node.output(0)?);
    let weight = casts.get(&matrix).copied().unwrap_or(matrix);
    let [inputs, outputs] = graph[weight].constant.as_ref()?.shape[..] else { return None };
    Some(Layer {
        weight: graph[weight].name.clone(),
        input: graph[value].name.clone(),
        is_graph_input: graph.inputs.contains(&value),
        inputs,
        output: graph[product].name.clone(),
        outputs,
    })
}
