//! Host memory of the process that runs a stage, besides what the provider holds for graph and weights.

use super::{kernels, program::Program};
use crate::{
    device::{DeviceProfile, Provider},
    onnx::{Graph, ValueId},
    shapes::Shapes,
};

/// Resident bytes of a process with an open session of a one-node graph that has run once: the program, ONNX Runtime and,
/// for WebGPU, the Vulkan driver with its compiler. Measured with ONNX Runtime 1.31.1 on Linux, the latter on llvmpipe.
const CPU_RUNTIME: u64 = 34 << 20;
const WEBGPU_RUNTIME: u64 = 126 << 20;

/// What `Stage::run` keeps on the host at its peak, for a stage that runs more than once. An input exists once, where the
/// caller has it; an output as the runtime returns it and as the caller gets it.
///
/// WebGPU's cache keeps its buffers meanwhile, so that its peak is one of two moments: an output is read back through a
/// staging buffer, or an input is bound through one (core/providers/webgpu/buffer_manager.cc, Download and Upload). On the
/// CPU provider inputs and the runtime's outputs are tensors of the graph, part of the `held` bytes at its peak, and the
/// caller's outputs are made when the others of the graph are gone.
pub(super) fn bytes(graph: &Graph, shapes: &Shapes, provider: Provider, held: u64) -> u64 {
    let size = |id: &ValueId| shapes.bytes(*id);
    let given = graph.inputs.iter().filter(|id| graph[**id].constant.is_none());
    let inputs: Vec<u64> = given.filter_map(size).collect();
    let outputs: Vec<u64> = graph.outputs.iter().filter_map(size).collect();
    let largest = |sizes: &[u64]| sizes.iter().copied().max().unwrap_or(0);
    let (input, output) = (sum(&inputs), sum(&outputs));
    match provider {
        Provider::Cpu => {
            let after = sum(&[input, output, output]);
            sum(&[CPU_RUNTIME, after.saturating_sub(held)])
        }
        Provider::WebGpu => {
            let reading = sum(&[output, output, largest(&outputs)]);
            sum(&[WEBGPU_RUNTIME, input, reading.max(largest(&inputs))])
        }
    }
}

/// Bytes of host memory, besides `on_device`, while the session of a graph is made. What is computed of constants stays
/// until all of it is, and each result exists twice when it becomes a constant itself
/// (core/optimizer/constant_folding.cc).
pub(super) fn creation(shapes: &Shapes, program: &Program, device: &DeviceProfile, on_device: u64) -> u64 {
    let held = |id: &ValueId| kernels::held_bytes(device.provider, shapes.fact(*id));
    let folded: Vec<u64> = program.folded.iter().filter_map(held).collect();
    let Some(largest) = folded.iter().copied().max() else { return 0 };
    let runtime = match device.provider {
        Provider::Cpu => CPU_RUNTIME,
        Provider::WebGpu => WEBGPU_RUNTIME,
    };
    let bytes = sum(&[runtime, sum(&folded), largest]);
    // Nothing that the run takes is there yet.
    bytes.saturating_sub(if device.unified_memory { on_device } else { 0 })
}

fn sum(sizes: &[u64]) -> u64 {
    sizes.iter().copied().fold(0, u64::saturating_add)
}
