//! Host memory of the process that runs a stage, besides what the provider holds for graph and weights.

use crate::{
    device::Provider,
    onnx::{Graph, ValueId},
    shapes::Shapes,
};

/// Resident bytes of a process with an open session of a one-node graph that has run once: the program, ONNX Runtime and,
/// for WebGPU, the Vulkan driver with its compiler. Measured with ONNX Runtime 1.31.1 on Linux, the latter on llvmpipe.
const CPU_RUNTIME: u64 = 34 << 20;
const WEBGPU_RUNTIME: u64 = 126 << 20;

/// What `Stage::run` keeps on the host at its peak. An input exists as the caller has it and as the copy that is bound; an
/// output as the runtime returns it and as the caller gets it. WebGPU reads outputs back through a staging buffer
/// (core/providers/webgpu/buffer_manager.cc, Download), one at a time, while its cache keeps all buffers. On the CPU
/// provider the bound copies and the runtime's outputs are tensors of the graph, part of the `held` bytes at its peak, and
/// the caller's outputs are made when the others of the graph are gone.
pub(super) fn bytes(graph: &Graph, shapes: &Shapes, provider: Provider, held: u64) -> u64 {
    let inputs = total(graph.inputs.iter().filter(|id| graph[**id].constant.is_none()), shapes);
    let outputs = total(graph.outputs.iter(), shapes);
    let staging = graph.outputs.iter().filter_map(|id| shapes.bytes(*id)).max().unwrap_or(0);
    let after = inputs.saturating_add(outputs.saturating_mul(2));
    let parts = match provider {
        Provider::Cpu => [CPU_RUNTIME, inputs, after.saturating_sub(held), 0],
        Provider::WebGpu => [WEBGPU_RUNTIME, inputs.saturating_mul(2), outputs.saturating_mul(2), staging],
    };
    parts.into_iter().fold(0, u64::saturating_add)
}

fn total<'g>(values: impl Iterator<Item = &'g ValueId>, shapes: &Shapes) -> u64 {
    values.filter_map(|id| shapes.bytes(*id)).fold(0, u64::saturating_add)
}
