//! The part of a graph that some of its values depend on, with these as its results.
//!
//! What the host cannot hold is cast: an input of truth values is given in bytes, a result of 32-bit integers is read in 64.

use std::collections::HashSet;

use viaduct_export::{
    onnx::{Attribute, DType, Graph, Model, Node, ValueId, ValueType},
    passes::drop_dead,
    shapes::Shapes,
};

use super::tensors::carried;

/// A graph that shows values.
pub struct Exposure {
    pub model: Model,
    /// What it must be given: the name here, and the name in the whole graph.
    pub inputs: Vec<(String, String)>,
    /// Names of its results, in the order of the values that were asked for.
    pub outputs: Vec<String>,
}

/// Shows the values, whose types `shapes` knows, of a graph.
pub fn expose(whole: &Model, shapes: &Shapes, values: &[ValueId]) -> Exposure {
    let mut model = whole.clone();
    let graph = &mut model.graph;
    graph.outputs.clear();
    let mut outputs = Vec::new();
    for value in values {
        let dtype = shapes.known(*value).and_then(|fact| fact.dtype);
        let shown = show(graph, *value, dtype);
        outputs.push(graph[shown].name.clone());
        graph.add_output(shown);
    }
    drop_dead(&mut model);
    let inputs = give(&mut model.graph);
    Exposure { model, inputs, outputs }
}

fn show(graph: &mut Graph, value: ValueId, dtype: Option<DType>) -> ValueId {
    let typed = |dtype| Some(ValueType::Tensor { dtype, shape: None });
    match dtype.and_then(|dtype| Some((dtype, carried(dtype)?))) {
        Some((dtype, readable)) if dtype != readable => {
            let name = graph.free_name(&format!("{}.seen", graph[value].name));
            let seen = graph.value(&name);
            graph[seen].ty = typed(readable);
            graph.add_node(cast(value, seen, readable, name));
            seen
        }
        dtype => {
            if graph[value].ty.is_none() {
                graph[value].ty = dtype.and_then(|(dtype, _)| typed(dtype));
            }
            value
        }
    }
}

/// Leaves the inputs that are used, each in a type that the host can hold.
fn give(graph: &mut Graph) -> Vec<(String, String)> {
    let mut used: HashSet<ValueId> =
        graph.nodes().flat_map(|(_, node)| node.inputs.iter().flatten().copied()).collect();
    used.extend(graph.captured());
    used.extend(&graph.outputs);
    let kept: Vec<ValueId> = graph.inputs.iter().copied().filter(|id| used.contains(id)).collect();
    let (mut inputs, mut casts) = (Vec::new(), Vec::new());
    graph.inputs.clear();
    for id in kept {
        let name = graph[id].name.clone();
        let Some(ValueType::Tensor { dtype, shape }) = graph[id].ty.clone() else {
            graph.inputs.push(id);
            inputs.push((name.clone(), name));
            continue;
        };
        let given = carried(dtype).unwrap_or(dtype);
        if given == dtype {
            graph.inputs.push(id);
            inputs.push((name.clone(), name));
            continue;
        }
        let host_name = graph.free_name(&format!("{name}.given"));
        let host = graph.value(&host_name);
        graph[host].ty = Some(ValueType::Tensor { dtype: given, shape });
        graph.inputs.push(host);
        casts.push(cast(host, id, dtype, host_name.clone()));
        inputs.push((host_name, name));
    }
    let first = graph.nodes().next().map(|(id, node)| (id, node.clone()));
    if let (false, Some((id, first))) = (casts.is_empty(), first) {
        casts.push(first);
        graph.replace_node(id, casts);
    }
    inputs
}

fn cast(from: ValueId, to: ValueId, dtype: DType, name: String) -> Node {
    Node {
        op_type: "Cast".to_owned(),
        name,
        inputs: vec![Some(from)],
        outputs: vec![Some(to)],
        attributes: vec![("to".to_owned(), Attribute::Int(i64::from(dtype.to_onnx())))],
        ..Node::default()
    }
}
