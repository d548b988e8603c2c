//! `bundle.json`: what a bundle is, what its stages take and give, and which files it consists of.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::{
    onnx::{DType, Dim, Graph, ValueId, ValueType},
    recipe::Recipe,
};

/// The manifest's file name.
pub const MANIFEST: &str = "bundle.json";
/// The format version that this program writes and reads.
pub const FORMAT: u32 = 1;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Manifest {
    pub format: u32,
    pub family: String,
    pub name: String,
    /// The program and version that wrote the bundle.
    pub writer: String,
    pub source: Origin,
    pub profile: String,
    /// SHA-256 of the statistics that weights were fitted with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<String>,
    /// The recipe as resolved for this export, gates included.
    pub recipe: Recipe,
    /// What the family's pipeline needs to know.
    pub parameters: Value,
    pub stages: Vec<Stage>,
    /// Every file of the bundle but the manifest itself.
    pub files: Vec<FileEntry>,
    /// What `verify` found, one entry for each device and reference, in that command's own form. It says nothing of what the
    /// bundle is: two bundles that differ in it alone are the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "results")]
    pub verified: Vec<Value>,
}

/// What others make of the field keeps no bundle from being opened: it counts as one result that nobody reads.
fn results<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Value>, D::Error> {
    Ok(match Value::deserialize(deserializer)? {
        Value::Array(results) => results,
        Value::Null => Vec::new(),
        other => vec![other],
    })
}

/// Where the weights came from.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Origin {
    /// Folder name of the exported checkpoint.
    pub checkpoint: String,
    /// Repository, revision and licence that the recipe states for the family's published checkpoint.
    pub repo: Option<String>,
    pub revision: Option<String>,
    pub license: Option<String>,
}

/// One graph: a session that runs alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    pub name: String,
    /// The part of the model that the stage belongs to. Stages of one component may share a process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub component: Option<String>,
    pub graph: String,
    pub inputs: Vec<Port>,
    pub outputs: Vec<Port>,
}

/// A graph input or output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Port {
    pub name: String,
    /// `f32`, `f16` or `i64`.
    pub dtype: String,
    /// Numbers, or names that are bound when the graph is run.
    pub dims: Vec<PortDim>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PortDim {
    Fixed(usize),
    Symbol(String),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Relative, with `/` between folders.
    pub path: String,
    pub bytes: u64,
    pub sha256: String,
}

impl FileEntry {
    /// A file of a layout that states no hashes.
    pub(super) fn without_hash(path: String, bytes: u64) -> FileEntry {
        FileEntry { path, bytes, sha256: String::new() }
    }
}

impl Stage {
    /// The stage's component; a stage of a manifest that names none is one by itself.
    pub fn component(&self) -> &str {
        self.component.as_deref().unwrap_or(&self.name)
    }

    /// The stage's entry, read off its graph.
    pub fn describe(name: &str, component: &str, graph: &Graph, file: &str) -> Stage {
        let ports = |ids: &[ValueId]| ids.iter().map(|id| port(graph, *id)).collect();
        Stage {
            name: name.to_owned(),
            component: Some(component.to_owned()),
            graph: file.to_owned(),
            inputs: ports(&graph.inputs),
            outputs: ports(&graph.outputs),
        }
    }
}

fn port(graph: &Graph, id: ValueId) -> Port {
    let value = &graph[id];
    let (dtype, dims) = match &value.ty {
        Some(ValueType::Tensor { dtype, shape }) => (*dtype, shape.clone().unwrap_or_default()),
        _ => (DType::Other(0), Vec::new()),
    };
    let dims = dims
        .into_iter()
        .map(|dim| match dim {
            Dim::Fixed(n) => PortDim::Fixed(n),
            Dim::Symbol(name) => PortDim::Symbol(name),
            Dim::Unknown => PortDim::Symbol("?".to_owned()),
        })
        .collect();
    Port { name: value.name.clone(), dtype: dtype.name(), dims }
}
