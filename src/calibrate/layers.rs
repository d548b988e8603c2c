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

/// What the same linear layers read.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerInput {
    /// The values, in the order of the stages: several where stages, or parts of one, have weights in common.
    pub sources: Vec<Source>,
    /// Names of the weights that they are multiplied with.
    pub weights: Vec<String>,
    /// Columns of the values: the layers' inputs.
    pub width: usize,
}

/// A value of a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    pub stage: String,
    /// The value's name.
    pub value: String,
    /// Whether it is an input of the graph itself.
    pub is_graph_input: bool,
}

/// The linear layers of a graph, in its order: every weight with each value that it is multiplied with.
pub fn layers(graph: &Graph) -> Vec<Layer> {
    let casts: BTreeMap<ValueId, ValueId> = graph
        .nodes()
        .filter(|(_, node)| node.is("Cast"))
        .filter_map(|(_, node)| Some((node.output(0)?, node.input(0)?)))
        .collect();
    let mut layers: Vec<Layer> = Vec::new();
    for layer in graph.nodes().filter_map(|(_, node)| layer(graph, &casts, node)) {
        if layers.iter().all(|known| (&known.weight, &known.input) != (&layer.weight, &layer.input)) {
            layers.push(layer);
        }
    }
    layers
}

/// What the linear layers of stages read, in their order. Weights that read the same values have one input.
pub fn layer_inputs(stages: impl IntoIterator<Item = (String, Vec<Layer>)>) -> Vec<LayerInput> {
    let mut by_weight: Vec<LayerInput> = Vec::new();
    for (stage, layers) in stages {
        for Layer { weight, input: value, is_graph_input, inputs: width, .. } in layers {
            let source = Source { stage: stage.clone(), value, is_graph_input };
            match by_weight.iter_mut().find(|input| input.weights[0] == weight) {
                Some(input) => input.sources.push(source),
                None => by_weight.push(LayerInput { sources: vec![source], weights: vec![weight], width }),
            }
        }
    }
    let mut inputs: Vec<LayerInput> = Vec::new();
    for input in by_weight {
        let same = |known: &&mut LayerInput| (&known.sources, known.width) == (&input.sources, input.width);
        match inputs.iter_mut().find(same) {
            Some(known) => known.weights.extend(input.weights),
            None => inputs.push(input),
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
