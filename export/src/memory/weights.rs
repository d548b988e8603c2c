//! Bytes of constants: in files, and where they are used.

use std::collections::HashSet;

use super::program::Program;
use crate::{
    device::Provider,
    onnx::{DType, Graph, ValueId},
    shapes::Shapes,
};

/// Bytes of all initializers, each once, those of bodies included.
pub(super) fn on_disk(graph: &Graph) -> u64 {
    let tensors = graph.values().filter_map(|(_, value)| value.constant.as_ref());
    let own = tensors.map(|tensor| tensor.bytes.len() as u64);
    let bodies = graph.nodes().flat_map(|(_, node)| node.subgraphs()).map(on_disk);
    own.chain(bodies).fold(0, u64::saturating_add)
}

/// Bytes of the constants that a session keeps, those of both branches of an If included.
///
/// WebGPU has a buffer for each, and the mapped pages of the file are dropped once they are copied. The CPU provider reads
/// f32 weights where they are mapped, so that their pages stay resident; of 4- and 8-bit weights it makes packed copies
/// (contrib_ops/cpu/quantization/matmul_nbits.cc) and drops the pages.
pub(super) fn held(graph: &Graph, shapes: &Shapes, program: &Program, provider: Provider) -> u64 {
    let bytes =
        program.weights.iter().filter_map(|id| super::kernels::held_bytes(provider, shapes.fact(*id)));
    let bytes = bytes.fold(program.body_weights, u64::saturating_add);
    match provider {
        Provider::WebGpu => bytes,
        Provider::Cpu => bytes.saturating_add(packing(graph, shapes)),
    }
}

/// Bytes of constants at the peak while the CPU provider makes a session, which can be more than it keeps.
///
/// Constants in f16 are cast first, all of them. Then every weight of a convolution over two dimensions is laid out anew
/// (core/optimizer/nchwc_transformer.cc), one after the other, and three more copies of it exist meanwhile (measured, as in
/// the file's mapped pages and on the way into the graph). Those that it is made from go at the end.
pub(super) fn loading(graph: &Graph, shapes: &Shapes, program: &Program) -> u64 {
    let held = |id: ValueId| super::kernels::held_bytes(Provider::Cpu, shapes.fact(id)).unwrap_or(0);
    let in_file = |id: ValueId| graph[id].constant.is_some() && shapes.fact(id).dtype != Some(DType::F16);
    let cast = program.weights.iter().filter(|id| !in_file(**id)).map(|id| held(*id));
    let (mut laid_out, mut most) = (0u64, 0);
    for weight in convolved(graph, shapes).filter(|id| program.weights.contains(id)) {
        let bytes = held(weight);
        laid_out = laid_out.saturating_add(bytes);
        most = laid_out.saturating_add(bytes.saturating_mul(3)).max(most);
    }
    cast.fold(most, u64::saturating_add)
}

/// Weights of convolutions over two dimensions, in execution order, each once.
fn convolved(graph: &Graph, shapes: &Shapes) -> impl Iterator<Item = ValueId> {
    let convolutions = graph.nodes().filter(|(_, node)| node.op_type == "Conv");
    let weights = convolutions.filter_map(|(_, node)| node.inputs.get(1).copied().flatten());
    let mut seen = HashSet::new();
    weights.filter(move |id| shapes.fact(*id).full_shape().is_some_and(|s| s.len() == 4) && seen.insert(*id))
}

/// What packed weights are larger than those in the file: with accuracy level 4, a scale and a sum in f32 per block take the
/// place of the scale.
fn packing(graph: &Graph, shapes: &Shapes) -> u64 {
    let quantised =
        graph.nodes().filter(|(_, n)| n.op_type == "MatMulNBits" && n.int("accuracy_level") == Some(4));
    let scales = quantised.filter_map(|(_, n)| n.inputs.get(2).copied().flatten());
    scales.map(|id| packed_scales(shapes, id)).fold(0, u64::saturating_add)
}

fn packed_scales(shapes: &Shapes, scales: ValueId) -> u64 {
    let fact = shapes.fact(scales);
    let (Some(bytes), Some(size)) = (fact.bytes(), fact.dtype.and_then(|dtype| dtype.size())) else {
        return 0;
    };
    let count = bytes / size.max(1) as u64;
    // The provider's own f16 scales are counted as f32 already.
    count.saturating_mul(4)
}
