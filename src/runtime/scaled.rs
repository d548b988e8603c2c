//! Values of a graph that a further input scales, column by column: so is seen what an error of a layer does.

use viaduct_export::onnx::{Dim, Model, Node, ValueType};

use super::LowerError;

/// Name of the input that scales a value.
pub fn gain_of(value: &str) -> String {
    format!("{value}.gain")
}

/// Gives the graph an input [columns] for each of the values, of the value's type, which multiplies it.
pub(super) fn scale_values(model: &mut Model, values: &[&str]) -> Result<(), LowerError> {
    let graph = &mut model.graph;
    let links = graph.links();
    for name in values {
        let unknown = || LowerError::UnknownValue((*name).to_owned());
        let value = graph.find(name).ok_or_else(unknown)?;
        let producer = links.producer(value).ok_or_else(unknown)?;
        let Some(ValueType::Tensor { dtype, .. }) = graph[value].ty else {
            return Err(LowerError::UntypedValue((*name).to_owned()));
        };
        let unscaled = graph.value(&graph.free_name(&format!("{name}.unscaled")));
        let gain = graph.value(&gain_of(name));
        graph[unscaled].ty = graph[value].ty.clone();
        graph[gain].ty = Some(ValueType::Tensor { dtype, shape: Some(vec![Dim::Unknown]) });
        graph.inputs.push(gain);
        let mut node = graph[producer].clone();
        node.outputs
            .iter_mut()
            .filter(|output| **output == Some(value))
            .for_each(|output| *output = Some(unscaled));
        let scaled = Node {
            op_type: "Mul".to_owned(),
            name: gain_of(name),
            inputs: vec![Some(unscaled), Some(gain)],
            outputs: vec![Some(value)],
            ..Node::default()
        };
        graph.replace_node(producer, vec![node, scaled]);
    }
    Ok(())
}
