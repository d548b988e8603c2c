//! The noise level, which f16 would round.
//!
//! Before: an input of f16 that is reshaped, multiplied with a constant and cast to f32 for the sines and cosines of the time
//! embedding. After: all of that in f32. What else takes the input gets f16 as before, by a Cast.

use std::collections::HashSet;

use crate::{
    onnx::{Attribute, DType, Graph, Node, NodeId, ValueId, ValueType},
    quant,
};

/// Operators that only move elements, by their first input.
const MOVES: &[&str] = &["Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"];

/// Gives an input of f16 the type f32, and what is computed of it as far as the next Cast. An input that a body of a node
/// takes stays as it is.
pub fn take_in_f32(graph: &mut Graph, input: &str) {
    let halved = |ty: &Option<ValueType>| matches!(ty, Some(ValueType::Tensor { dtype: DType::F16, .. }));
    let Some(input) = graph.find(input).filter(|id| halved(&graph[*id].ty)) else { return };
    let captured = graph.captured();
    if captured.contains(&input) {
        return;
    }
    let mut wide = HashSet::from([input]);
    let order: Vec<NodeId> = graph.nodes().map(|(id, _)| id).collect();
    for id in order {
        let takes = graph[id].inputs.iter().flatten().any(|value| wide.contains(value));
        if !takes || graph[id].is("Cast") {
            continue;
        }
        let given_out = |value: &ValueId| graph.outputs.contains(value) || captured.contains(value);
        let stays = graph[id].outputs.iter().flatten().any(given_out);
        let node = if stays { None } else { widened(graph, id, &wide) };
        match node {
            Some(node) => {
                wide.extend(node.outputs.iter().flatten());
                graph[id] = node;
            }
            None => narrow_inputs(graph, id, &wide),
        }
    }
    for value in wide {
        if let Some(ValueType::Tensor { dtype, .. }) = &mut graph[value].ty {
            *dtype = DType::F32;
        }
    }
}

/// The node with f32 in place of f16, if it moves elements or multiplies them with a constant.
fn widened(graph: &mut Graph, id: NodeId, wide: &HashSet<ValueId>) -> Option<Node> {
    let mut node = graph[id].clone();
    if MOVES.iter().any(|op| node.is(op)) {
        return node.input(0).filter(|value| wide.contains(value)).map(|_| node);
    }
    if !node.is("Mul") {
        return None;
    }
    for input in node.inputs.iter_mut().flatten().filter(|value| !wide.contains(value)) {
        let tensor = graph[*input].constant.clone().filter(|_| !graph.inputs.contains(input))?;
        let name = graph.free_name(&format!("{}.f32", graph[*input].name));
        *input = graph.add_constant(&name, quant::cast(tensor, DType::F32).ok()?);
    }
    Some(node)
}

/// Casts what the node takes in f32 now back to f16.
fn narrow_inputs(graph: &mut Graph, id: NodeId, wide: &HashSet<ValueId>) {
    let mut node = graph[id].clone();
    let mut nodes = Vec::new();
    for input in node.inputs.iter_mut().flatten().filter(|value| wide.contains(value)) {
        let name = graph.free_name(&format!("{}.f16", graph[*input].name));
        let narrow = graph.value(&name);
        nodes.push(Node {
            op_type: "Cast".to_owned(),
            name,
            inputs: vec![Some(*input)],
            outputs: vec![Some(narrow)],
            attributes: vec![("to".to_owned(), Attribute::Int(i64::from(DType::F16.to_onnx())))],
            ..Node::default()
        });
        *input = narrow;
    }
    nodes.push(node);
    graph.replace_node(id, nodes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::{Builder, Dim, Model};

    /// An input of f16 that goes through the operators one after the other, and is cast to f32.
    fn model(operators: &[&str]) -> Model {
        let mut b = Builder::new("time");
        let mut x = b.input("sigma", DType::F16, &[Dim::Fixed(1)]);
        for op in operators {
            let scale = b.scalar(DType::F16, 1000.0);
            x = if *op == "Mul" { b.mul(x, scale) } else { b.op(op, &[x], &[]) };
        }
        let to = ("to", Attribute::Int(i64::from(DType::F32.to_onnx())));
        let y = b.op("Cast", &[x], &[to]);
        b.output(y, "y", &[Dim::Fixed(1)]);
        b.finish()
    }

    /// Operators after the input is taken in f32.
    fn operators(before: &[&str]) -> Vec<String> {
        let mut model = model(before);
        for _ in 0..2 {
            take_in_f32(&mut model.graph, "sigma");
            model.graph.validate().unwrap();
            let ty = &model.graph[model.graph.inputs[0]].ty;
            assert!(matches!(ty, Some(ValueType::Tensor { dtype: DType::F32, .. })));
        }
        model.graph.nodes().map(|(_, node)| node.op_type.clone()).collect()
    }

    #[test]
    fn moves_and_factors_are_computed_in_f32_and_the_rest_as_before() {
        assert_eq!(operators(&[]), ["Cast"]);
        assert_eq!(operators(&["Identity", "Mul"]), ["Identity", "Mul", "Cast"]);
        assert_eq!(operators(&["Identity", "Sin"]), ["Identity", "Cast", "Sin", "Cast"]);
    }
}
