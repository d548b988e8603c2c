//! Graphs to ONNX messages: the inverse of [`super::decode`].

use super::{
    decode::{same_type, standard_domain},
    graph::{Dim, Graph, Model, Value, ValueType},
    node::{Attribute, Node},
    proto::{
        AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto,
        TypeProto, ValueInfoProto, attribute_proto::AttributeType, tensor_shape_proto, type_proto,
    },
    tensor::Tensor,
    write::WriteError,
};

/// Puts a tensor's values, or the reference to them, into its message. Dimensions, type and name are there already.
pub(super) trait Store {
    fn store(&mut self, tensor: &Tensor, label: &str, proto: &mut TensorProto) -> Result<(), WriteError>;
}

/// `was` where it says the same as `now`: an absent field stays absent.
fn keep<T: Default + PartialEq>(was: Option<T>, now: T) -> Option<T> {
    if was.as_ref().unwrap_or(&T::default()) == &now { was } else { Some(now) }
}

pub(super) fn model(model: &Model, store: &mut dyn Store) -> Result<ModelProto, WriteError> {
    let mut proto = model.extra.as_deref().cloned().unwrap_or_default();
    proto.graph = Some(graph(&model.graph, store)?);
    proto.ir_version = keep(proto.ir_version, model.ir_version);
    proto.producer_name = keep(proto.producer_name, model.producer.clone());
    let was = std::mem::take(&mut proto.opset_import);
    for (domain, version) in &model.opsets {
        let same = was.iter().find(|o| standard_domain(o.domain.as_deref().unwrap_or_default()) == domain);
        let domain = same.map_or_else(|| Some(domain.clone()), |same| same.domain.clone());
        proto.opset_import.push(OperatorSetIdProto { domain, version: Some(*version) });
    }
    Ok(proto)
}

fn graph(graph: &Graph, store: &mut dyn Store) -> Result<GraphProto, WriteError> {
    let mut proto = graph.extra.as_deref().cloned().unwrap_or_default();
    proto.name = keep(proto.name, graph.name.clone());
    let shells = std::mem::take(&mut proto.initializer);
    let mut produced = vec![false; graph.values.len()];
    for (_, node) in graph.nodes() {
        for output in node.outputs.iter().flatten() {
            produced[output.0 as usize] = true;
        }
        proto.node.push(self::node(graph, node, store)?);
    }
    for (id, value) in graph.values() {
        if let Some(tensor) = &value.constant {
            let shell = shells.iter().find(|shell| shell.name.as_ref() == Some(&value.name));
            let shell = TensorProto { name: Some(value.name.clone()), ..shell.cloned().unwrap_or_default() };
            let label = format!("initializer '{}'", value.name);
            proto.initializer.push(self::tensor(tensor, shell, &label, store)?);
        }
        let listed = graph.inputs.contains(&id) || graph.outputs.contains(&id);
        let known = value.ty.is_some() || value.extra.is_some();
        // Types of values that a rewrite has left behind say nothing any more.
        if known && !listed && (produced[id.0 as usize] || value.constant.is_some()) {
            proto.value_info.push(value_info(value));
        }
    }
    proto.input = graph.inputs.iter().map(|id| value_info(&graph[*id])).collect();
    proto.output = graph.outputs.iter().map(|id| value_info(&graph[*id])).collect();
    Ok(proto)
}

fn node(graph: &Graph, node: &Node, store: &mut dyn Store) -> Result<NodeProto, WriteError> {
    let mut proto = node.extra.as_deref().cloned().unwrap_or_default();
    let names = |ids: &[Option<super::graph::ValueId>]| {
        ids.iter().map(|id| id.map_or_else(String::new, |id| graph[id].name.clone())).collect()
    };
    proto.input = names(&node.inputs);
    proto.output = names(&node.outputs);
    proto.op_type = Some(node.op_type.clone());
    proto.name = keep(proto.name, node.name.clone());
    if standard_domain(proto.domain.as_deref().unwrap_or_default()) != node.domain {
        proto.domain = Some(node.domain.clone());
    }
    let shells = std::mem::take(&mut proto.attribute);
    for (name, attribute) in &node.attributes {
        let shell = shells.iter().find(|shell| shell.name.as_ref() == Some(name));
        let shell = AttributeProto { name: Some(name.clone()), ..shell.cloned().unwrap_or_default() };
        let label = || format!("attribute '{name}' of node '{}' ({})", node.name, node.op_type);
        proto.attribute.push(self::attribute(attribute, shell, label, store)?);
    }
    Ok(proto)
}

fn attribute(
    attribute: &Attribute,
    shell: AttributeProto,
    label: impl Fn() -> String,
    store: &mut dyn Store,
) -> Result<AttributeProto, WriteError> {
    let mut proto = AttributeProto { t: None, ..shell };
    let kind = match attribute {
        Attribute::Int(value) => {
            proto.i = Some(*value);
            AttributeType::Int
        }
        Attribute::Float(value) => {
            proto.f = Some(*value);
            AttributeType::Float
        }
        Attribute::String(value) => {
            proto.s = Some(value.clone());
            AttributeType::String
        }
        Attribute::Ints(values) => {
            proto.ints = values.clone();
            AttributeType::Ints
        }
        Attribute::Floats(values) => {
            proto.floats = values.clone();
            AttributeType::Floats
        }
        Attribute::Strings(values) => {
            proto.strings = values.clone();
            AttributeType::Strings
        }
        Attribute::Tensor(value) => {
            proto.t = Some(tensor(value, shell.t.unwrap_or_default(), &label(), store)?);
            AttributeType::Tensor
        }
        Attribute::Graph(value) => {
            proto.g = Some(graph(value, store)?);
            AttributeType::Graph
        }
        Attribute::Graphs(values) => {
            proto.graphs = values.iter().map(|value| graph(value, store)).collect::<Result<_, _>>()?;
            AttributeType::Graphs
        }
        Attribute::Other(value) => {
            let (name, doc_string) = (proto.name, proto.doc_string);
            return Ok(AttributeProto { name, doc_string, ..(**value).clone() });
        }
    };
    proto.r#type = Some(kind as i32);
    Ok(proto)
}

fn tensor(
    tensor: &Tensor,
    shell: TensorProto,
    label: &str,
    store: &mut dyn Store,
) -> Result<TensorProto, WriteError> {
    let dims = tensor.shape.iter().map(|dim| *dim as i64).collect();
    let mut proto = TensorProto { dims, data_type: Some(tensor.dtype.to_onnx()), ..shell };
    store.store(tensor, label, &mut proto)?;
    Ok(proto)
}

pub(super) fn value_info(value: &Value) -> ValueInfoProto {
    let mut proto = value.extra.as_deref().cloned().unwrap_or_default();
    proto.name = Some(value.name.clone());
    if !same_type(&proto.r#type, value) {
        proto.r#type = value.ty.as_ref().map(type_proto);
    }
    proto
}

fn type_proto(ty: &ValueType) -> TypeProto {
    let (dtype, shape) = match ty {
        ValueType::Tensor { dtype, shape } => (dtype, shape),
        ValueType::Other(proto) => return (**proto).clone(),
    };
    let dim = |dim: &Dim| tensor_shape_proto::Dimension {
        denotation: None,
        value: match dim {
            Dim::Fixed(size) => Some(tensor_shape_proto::dimension::Value::DimValue(*size as i64)),
            Dim::Symbol(name) => Some(tensor_shape_proto::dimension::Value::DimParam(name.clone())),
            Dim::Unknown => None,
        },
    };
    let shape = shape.as_ref().map(|shape| TensorShapeProto { dim: shape.iter().map(dim).collect() });
    let tensor = type_proto::Tensor { elem_type: Some(dtype.to_onnx()), shape };
    TypeProto { denotation: None, value: Some(type_proto::Value::TensorType(tensor)) }
}
