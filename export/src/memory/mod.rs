//! Memory of a stage, known before it runs: a pure function of graph, sizes and device.

mod hazards;
mod limits;
mod quadratic;

pub use hazards::{Hazard, hazards};
pub use limits::{Excess, Limit, excesses};
pub use quadratic::{Quadratic, quadratic, symbols};

use crate::{
    device::DeviceProfile,
    onnx::Model,
    shapes::{Shapes, Sizes},
};

/// How the provider keeps buffers of activations that are free again: WebGPU's `storageBufferCacheMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BufferCache {
    /// Buffers of exactly the size that is asked for, kept until the session ends.
    #[default]
    Simple,
    /// Freed once the commands that use them are submitted.
    LazyRelease,
    Disabled,
}

/// A tensor and where in the execution it appears.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct TensorUse {
    pub name: String,
    /// The node that makes it, and its operator; empty for inputs and weights.
    pub node: String,
    pub op_type: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: u64,
}

/// One node in execution order.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Moment {
    pub node: String,
    pub op_type: String,
    /// Bytes of all activations (inputs and outputs of the graph included) that are alive while the node runs.
    pub live: u64,
    /// Bytes of buffers that the provider holds then, its cache of free ones included.
    pub held: u64,
}

/// Bytes of a stage, and what they consist of.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct StageMemory {
    /// Bytes of all weights as they lie in files.
    pub weights_disk: u64,
    /// Bytes that the device holds of them.
    pub weights_uploaded: u64,
    /// In execution order.
    pub timeline: Vec<Moment>,
    /// Index into `timeline` of the first moment with the most live bytes; none for an empty graph.
    pub peak: Option<usize>,
    /// The ten largest activations, largest first.
    pub largest: Vec<TensorUse>,
    /// Operators whose outputs' sizes are unknown, with how many such outputs. They are in no sum.
    pub unknown: std::collections::BTreeMap<String, usize>,
    /// What the process of the stage is predicted to take at its peak, on host and device.
    pub predicted: Predicted,
}

/// Predicted peak of the process that runs a stage. With unified memory the sum counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Predicted {
    /// Bytes of the device's memory.
    pub device: u64,
    /// Bytes of host memory besides.
    pub host: u64,
}

impl Predicted {
    pub fn total(self) -> u64 {
        self.device + self.host
    }
}

/// Analyses one lowered graph.
pub fn analyse(
    model: &Model,
    sizes: &Sizes,
    device: &DeviceProfile,
    cache: BufferCache,
) -> (StageMemory, Shapes) {
    let _ = (device, cache);
    let shapes = crate::shapes::infer(model, sizes, &Default::default());
    (StageMemory { unknown: shapes.unknown(&model.graph), ..StageMemory::default() }, shapes)
}
