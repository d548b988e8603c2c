//! What a device can do, as far as graphs and plans depend on it. Data: measured by `doctor`, or a preset.

use serde::{Deserialize, Serialize};

/// Which of ONNX Runtime's providers runs the graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Provider {
    WebGpu,
    Cpu,
}

/// A device's limits. Sizes are bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceProfile {
    pub name: String,
    pub provider: Provider,
    /// Whether CPU and device share one memory: integrated GPUs, software adapters, the CPU provider.
    pub unified_memory: bool,
    /// Memory of the device's own; with unified memory, what it may take of the shared one.
    pub memory: u64,
    /// Whether shaders compute in f16.
    pub f16: bool,
    pub subgroup_size: u32,
    /// The largest range that one binding of a shader may cover.
    pub max_binding: u64,
    /// The largest buffer.
    pub max_buffer: u64,
    /// Storage buffers that one shader may use: operands and results of a node.
    pub max_storage_buffers: u32,
    /// Whether the fused attention operator computes right.
    pub fused_attention: bool,
}
