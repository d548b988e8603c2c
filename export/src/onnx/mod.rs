//! ONNX models as data: graphs with typed ids, lazy tensors, a strict reader and a streaming writer.
//!
//! This module knows no model architecture and no runtime.

pub mod graph;
pub mod node;
pub mod proto;
pub mod tensor;

pub use graph::{Dim, Graph, Model, NodeId, Value, ValueId, ValueType};
pub use node::{Attribute, Node};
pub use tensor::{Bytes, DType, Tensor};
