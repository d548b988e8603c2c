//! Nodes and their attributes.

use super::{
    graph::{Graph, ValueId},
    proto,
    tensor::Tensor,
};

/// One operator of a graph. An absent optional input or output is `None`.
#[derive(Clone, Debug, Default)]
pub struct Node {
    pub op_type: String,
    /// Empty for the standard operators.
    pub domain: String,
    pub name: String,
    pub inputs: Vec<Option<ValueId>>,
    pub outputs: Vec<Option<ValueId>>,
    pub attributes: Vec<(String, Attribute)>,
    /// Fields that the project only carries along: overload, doc string, metadata, device configurations.
    pub extra: Option<Box<proto::NodeProto>>,
}

/// The value of a node's attribute.
#[derive(Clone, Debug)]
pub enum Attribute {
    Int(i64),
    Float(f32),
    String(Vec<u8>),
    Ints(Vec<i64>),
    Floats(Vec<f32>),
    Strings(Vec<Vec<u8>>),
    Tensor(Tensor),
    Graph(Box<Graph>),
    Graphs(Vec<Graph>),
    /// Kinds that the project only carries along: sparse tensors, type protos, references to function attributes.
    Other(Box<proto::AttributeProto>),
}

impl Node {
    /// Whether this is that operator of the standard domain.
    pub fn is(&self, op_type: &str) -> bool {
        self.op_type == op_type && matches!(self.domain.as_str(), "" | "ai.onnx")
    }

    /// Whether this is that operator of ONNX Runtime's own domain.
    pub fn is_contrib(&self, op_type: &str) -> bool {
        self.op_type == op_type && self.domain == "com.microsoft"
    }

    /// The input at that place, if it is there.
    pub fn input(&self, index: usize) -> Option<ValueId> {
        *self.inputs.get(index)?
    }

    /// The output at that place, if it is there.
    pub fn output(&self, index: usize) -> Option<ValueId> {
        *self.outputs.get(index)?
    }

    pub fn attribute(&self, name: &str) -> Option<&Attribute> {
        self.attributes.iter().find(|a| a.0 == name).map(|a| &a.1)
    }

    pub fn int(&self, name: &str) -> Option<i64> {
        match self.attribute(name)? {
            Attribute::Int(value) => Some(*value),
            _ => None,
        }
    }

    pub fn ints(&self, name: &str) -> Option<&[i64]> {
        match self.attribute(name)? {
            Attribute::Ints(values) => Some(values),
            _ => None,
        }
    }

    /// A string attribute, if it is UTF-8.
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.attribute(name)? {
            Attribute::String(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    pub fn float(&self, name: &str) -> Option<f32> {
        match self.attribute(name)? {
            Attribute::Float(value) => Some(*value),
            _ => None,
        }
    }
}
