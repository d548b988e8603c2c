//! ONNX messages to graphs. What the types of this module do not hold is kept in their `extra` messages, so that
//! [`super::encode`] gives back what was read.

use std::{path::Path, sync::Arc};

use super::{
    encode,
    external::Folder,
    graph::{Dim, Graph, Model, Value, ValueType},
    mapped_file::MappedFile,
    node::{Attribute, Node},
    proto::{
        AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, TypeProto,
        ValueInfoProto, attribute_proto::AttributeType, tensor_shape_proto::dimension, type_proto,
    },
    read::{ReadError, TensorProblem},
    tensor::{Bytes, DType, Tensor},
    tensor_proto,
    validate::GraphError,
};

/// The standard operator domain has two spellings; graphs hold the empty one.
pub(super) fn standard_domain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

/// Raw data of at least this size in a mapped model file becomes a range of that file, like external data: a rewrite
/// of a model without external data can then give pages back, and a session need not have them in its message.
const MAPPED_FROM: usize = 64 << 10;

pub(super) struct Decoder<'a> {
    /// For messages.
    pub file: &'a Path,
    /// The model file itself, if it is mapped.
    pub whole: Option<Arc<MappedFile>>,
    pub folder: Option<Folder>,
}

impl Decoder<'_> {
    pub fn model(mut self, mut proto: ModelProto) -> Result<Model, ReadError> {
        let graph = proto.graph.take().ok_or_else(|| ReadError::NoGraph { file: self.file.to_owned() })?;
        let training = proto.training_info.iter().flat_map(|t| t.initialization.iter().chain(&t.algorithm));
        training.into_iter().try_for_each(|graph| self.carried_graph(graph))?;
        proto.functions.iter().try_for_each(|function| self.carried_nodes(&function.node))?;
        Ok(Model {
            graph: self.graph(graph)?,
            ir_version: proto.ir_version.unwrap_or_default(),
            opsets: proto
                .opset_import
                .iter()
                .map(|opset| {
                    let domain = standard_domain(opset.domain.as_deref().unwrap_or_default());
                    (domain.to_owned(), opset.version.unwrap_or_default())
                })
                .collect(),
            producer: proto.producer_name.clone().unwrap_or_default(),
            folder: self.folder.map(|folder| folder.path),
            extra: Some(Box::new(proto)),
        })
    }

    fn graph(&mut self, mut proto: GraphProto) -> Result<Graph, ReadError> {
        let mut graph = Graph { name: proto.name.clone().unwrap_or_default(), ..Graph::default() };
        for sparse in &proto.sparse_initializer {
            self.carried_sparse(sparse)?;
        }
        for mut tensor in std::mem::take(&mut proto.initializer) {
            let name = tensor.name.take().unwrap_or_default();
            if graph.find(&name).is_some() {
                let source = GraphError::DuplicateInitializer { value: name, graph: graph.name };
                return Err(ReadError::Graph { file: self.file.to_owned(), source });
            }
            let decoded = self.tensor(&tensor, || format!("initializer '{name}'"))?;
            graph.add_constant(&name, decoded);
            let shell = tensor_proto::shell(tensor);
            if shell != TensorProto::default() {
                proto.initializer.push(TensorProto { name: Some(name), ..shell });
            }
        }
        for info in std::mem::take(&mut proto.input) {
            let id = typed_value(&mut graph, info);
            graph.inputs.push(id);
        }
        // Outputs come after value_info here, so that values keep the order in which value_info lists them.
        for info in std::mem::take(&mut proto.value_info) {
            typed_value(&mut graph, info);
        }
        for info in std::mem::take(&mut proto.output) {
            let id = typed_value(&mut graph, info);
            graph.outputs.push(id);
        }
        for node in std::mem::take(&mut proto.node) {
            let node = self.node(&mut graph, node)?;
            graph.add_node(node);
        }
        graph.extra = Some(Box::new(proto));
        Ok(graph)
    }

    fn node(&mut self, graph: &mut Graph, mut proto: NodeProto) -> Result<Node, ReadError> {
        let mut value = |name: String| (!name.is_empty()).then(|| graph.value(&name));
        let mut node = Node {
            op_type: proto.op_type.take().unwrap_or_default(),
            domain: standard_domain(proto.domain.as_deref().unwrap_or_default()).to_owned(),
            name: proto.name.clone().unwrap_or_default(),
            inputs: std::mem::take(&mut proto.input).into_iter().map(&mut value).collect(),
            outputs: std::mem::take(&mut proto.output).into_iter().map(&mut value).collect(),
            ..Node::default()
        };
        for attribute in std::mem::take(&mut proto.attribute) {
            let name = attribute.name.clone().unwrap_or_default();
            let (attribute, shell) = self.attribute(&node, &name, attribute)?;
            proto.attribute.extend(shell.map(|shell| AttributeProto { name: Some(name.clone()), ..shell }));
            node.attributes.push((name, attribute));
        }
        // Only what the node itself does not say is worth keeping.
        proto.name = proto.name.filter(String::is_empty);
        proto.domain = proto.domain.filter(|domain| standard_domain(domain).is_empty());
        node.extra = (proto != NodeProto::default()).then(|| Box::new(proto));
        Ok(node)
    }

    /// The attribute, and what it does not hold of the message.
    fn attribute(
        &mut self,
        node: &Node,
        name: &str,
        mut proto: AttributeProto,
    ) -> Result<(Attribute, Option<AttributeProto>), ReadError> {
        let label = || format!("attribute '{name}' of node '{}' ({})", node.name, node.op_type);
        let mut shell = AttributeProto { doc_string: proto.doc_string.take(), ..AttributeProto::default() };
        let refers = proto.ref_attr_name.as_deref().is_some_and(|name| !name.is_empty());
        let kind = if refers { AttributeType::Undefined } else { kind(&proto) };
        let attribute = match kind {
            AttributeType::Float => Attribute::Float(proto.f.unwrap_or_default()),
            AttributeType::Int => Attribute::Int(proto.i.unwrap_or_default()),
            AttributeType::String => Attribute::String(proto.s.unwrap_or_default()),
            AttributeType::Floats => Attribute::Floats(proto.floats),
            AttributeType::Ints => Attribute::Ints(proto.ints),
            AttributeType::Strings => Attribute::Strings(proto.strings),
            AttributeType::Tensor => {
                let tensor = proto.t.unwrap_or_default();
                let decoded = self.tensor(&tensor, label)?;
                shell.t = Some(tensor_proto::shell(tensor)).filter(|shell| *shell != TensorProto::default());
                Attribute::Tensor(decoded)
            }
            AttributeType::Graph => Attribute::Graph(Box::new(self.graph(proto.g.unwrap_or_default())?)),
            AttributeType::Graphs => {
                let graphs: Result<_, _> = proto.graphs.into_iter().map(|graph| self.graph(graph)).collect();
                Attribute::Graphs(graphs?)
            }
            _ => {
                self.carried_attribute(&proto)?;
                Attribute::Other(Box::new(proto))
            }
        };
        Ok((attribute, Some(shell).filter(|shell| *shell != AttributeProto::default())))
    }

    fn tensor(&mut self, proto: &TensorProto, label: impl Fn() -> String) -> Result<Tensor, ReadError> {
        let mut tensor = tensor_proto::decode(proto, self.folder.as_mut())
            .map_err(|problem| ReadError::Tensor { file: self.file.to_owned(), tensor: label(), problem })?;
        if let (Bytes::Inline(bytes), Some(file)) = (&tensor.bytes, &self.whole) {
            let mapped = file.mapped().unwrap_or_default();
            let start = (bytes.as_ptr() as usize).wrapping_sub(mapped.as_ptr() as usize);
            // Typed values were converted into memory of their own, which is not in the map.
            if bytes.len() >= MAPPED_FROM && start < mapped.len() {
                let range = start..start + bytes.len();
                tensor.bytes = Bytes::Mapped { file: Arc::clone(file), range };
            }
        }
        Ok(tensor)
    }

    // Messages that are only carried along are not converted, so nothing would check the files they name.

    fn carried_graph(&self, graph: &GraphProto) -> Result<(), ReadError> {
        graph.initializer.iter().try_for_each(|tensor| self.carried_tensor(tensor))?;
        graph.sparse_initializer.iter().try_for_each(|sparse| self.carried_sparse(sparse))?;
        self.carried_nodes(&graph.node)
    }

    fn carried_nodes(&self, nodes: &[NodeProto]) -> Result<(), ReadError> {
        nodes.iter().flat_map(|node| &node.attribute).try_for_each(|a| self.carried_attribute(a))
    }

    fn carried_attribute(&self, attribute: &AttributeProto) -> Result<(), ReadError> {
        attribute.t.iter().chain(&attribute.tensors).try_for_each(|t| self.carried_tensor(t))?;
        let sparse = attribute.sparse_tensor.iter().chain(&attribute.sparse_tensors);
        sparse.into_iter().try_for_each(|sparse| self.carried_sparse(sparse))?;
        attribute.g.iter().chain(&attribute.graphs).try_for_each(|graph| self.carried_graph(graph))
    }

    fn carried_sparse(&self, sparse: &SparseTensorProto) -> Result<(), ReadError> {
        sparse.values.iter().chain(&sparse.indices).try_for_each(|tensor| self.carried_tensor(tensor))
    }

    fn carried_tensor(&self, tensor: &TensorProto) -> Result<(), ReadError> {
        if tensor.data_location.unwrap_or_default() == 0 && tensor.external_data.is_empty() {
            return Ok(());
        }
        Err(ReadError::Tensor {
            file: self.file.to_owned(),
            tensor: format!("tensor '{}'", tensor.name.as_deref().unwrap_or_default()),
            problem: TensorProblem::ExternalInCarried,
        })
    }
}

/// The attribute's type. Files of the first IR version do not state it; then the field in use does.
fn kind(proto: &AttributeProto) -> AttributeType {
    let stated = proto.r#type.unwrap_or_default();
    if stated != 0 {
        return AttributeType::try_from(stated).unwrap_or(AttributeType::Undefined);
    }
    let fields = [
        (AttributeType::Float, proto.f.is_some()),
        (AttributeType::Int, proto.i.is_some()),
        (AttributeType::String, proto.s.is_some()),
        (AttributeType::Tensor, proto.t.is_some()),
        (AttributeType::Graph, proto.g.is_some()),
        (AttributeType::Floats, !proto.floats.is_empty()),
        (AttributeType::Ints, !proto.ints.is_empty()),
        (AttributeType::Strings, !proto.strings.is_empty()),
        (AttributeType::Graphs, !proto.graphs.is_empty()),
    ];
    let mut used = fields.into_iter().filter(|field| field.1);
    match (used.next(), used.next()) {
        (Some((kind, _)), None) => kind,
        _ => AttributeType::Undefined,
    }
}

/// The value that a `ValueInfoProto` names, with its type. The first statement about a value counts.
fn typed_value(graph: &mut Graph, info: ValueInfoProto) -> super::graph::ValueId {
    let id = graph.value(info.name.as_deref().unwrap_or_default());
    let value = &mut graph[id];
    if value.ty.is_none() && value.extra.is_none() {
        value.ty = info.r#type.as_ref().map(value_type);
        if encode::value_info(value) != info {
            value.extra = Some(Box::new(info));
        }
    }
    id
}

pub(super) fn value_type(proto: &TypeProto) -> ValueType {
    let Some(type_proto::Value::TensorType(tensor)) = &proto.value else {
        return ValueType::Other(Box::new(proto.clone()));
    };
    let dim = |dim: &Option<dimension::Value>| match dim {
        Some(dimension::Value::DimValue(n)) => usize::try_from(*n).map_or(Dim::Unknown, Dim::Fixed),
        Some(dimension::Value::DimParam(name)) if !name.is_empty() => Dim::Symbol(name.clone()),
        _ => Dim::Unknown,
    };
    let shape = tensor.shape.as_ref().map(|shape| shape.dim.iter().map(|d| dim(&d.value)).collect());
    ValueType::Tensor { dtype: DType::from_onnx(tensor.elem_type.unwrap_or_default()), shape }
}

/// Whether a value's message still says what the value says.
pub(super) fn same_type(proto: &Option<TypeProto>, value: &Value) -> bool {
    proto.as_ref().map(value_type) == value.ty
}
