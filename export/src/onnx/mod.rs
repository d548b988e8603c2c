//! ONNX models as data: graphs with typed ids, lazy tensors, a strict reader and a streaming writer.
//!
//! This module knows no model architecture and no runtime.

mod builder;
mod decode;
mod encode;
mod external;
pub mod graph;
pub mod links;
mod mapped_file;
pub mod node;
pub mod proto;
pub mod read;
mod shards;
pub mod tensor;
mod tensor_proto;
pub mod validate;
pub mod write;

pub use builder::Builder;
pub use graph::{Dim, Graph, Model, NodeId, Value, ValueId, ValueType};
pub use links::Links;
pub use mapped_file::MappedFile;
pub use node::{Attribute, Node};
pub use read::{ReadError, read_graph, read_model, read_model_bytes};
pub use tensor::{Bytes, Compute, ComputeError, DType, Tensor};
pub use validate::GraphError;
pub use write::{
    FileSummary, Stored, WriteError, WriteOptions, WriteSummary, constant_bytes, data_files, model_bytes,
    write_model, write_model_beside, write_model_with, written_bytes,
};
