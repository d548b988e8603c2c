//! What a graph asks of a device that the device does not have.

use std::collections::HashSet;

use crate::{
    device::{DeviceProfile, Provider},
    onnx::{DType, Graph, Node, ValueId},
    shapes::{Fact, Shapes},
};

/// A limit of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Bytes of one buffer: [`DeviceProfile::max_buffer`].
    Buffer,
    /// Bytes that one binding covers: [`DeviceProfile::max_binding`].
    Binding,
    /// Storage buffers of one shader: [`DeviceProfile::max_storage_buffers`].
    StorageBuffers,
    /// Tensors in f16, where shaders cannot compute in it.
    F16,
}

/// A place where a graph exceeds a limit. Bytes for buffers and bindings, else a count.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Excess {
    pub limit: Limit,
    /// The first node that meets the limit.
    pub node: String,
    pub op_type: String,
    /// The tensor that is too large, or the first in f16; none where operands are counted.
    pub tensor: Option<String>,
    pub asked: u64,
    pub allowed: u64,
}

/// Operators whose result is their first operand seen with another shape: nothing is bound.
const VIEWS: &[&str] = &["Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"];
/// Operators that look at a shape alone.
const SHAPE_READERS: &[&str] = &["Shape", "Size"];
/// Operators whose operands from the given one on are read on the host: shapes, axes, bounds.
const HOST_OPERANDS: &[(&str, usize)] = &[
    ("Slice", 1),
    ("Expand", 1),
    ("Tile", 1),
    ("Pad", 1),
    ("Resize", 1),
    ("Split", 1),
    ("ConstantOfShape", 0),
    ("Range", 0),
    ("TopK", 1),
    ("CumSum", 1),
    ("ReduceMean", 1),
    ("ReduceSum", 1),
    ("ReduceMax", 1),
    ("ReduceMin", 1),
    ("ReduceProd", 1),
    ("ReduceL2", 1),
    ("ReduceSumSquare", 1),
];

/// Everything in the graph that exceeds a limit of the device, in execution order: each tensor once per limit, at the
/// first node that needs it on the device. The CPU provider has no such limits. Tensors of unknown size are not judged.
///
/// See <https://github.com/microsoft/onnxruntime/issues/25195> for tensors and
/// <https://github.com/microsoft/onnxruntime/pull/25177> for counts.
pub fn excesses(graph: &Graph, shapes: &Shapes, device: &DeviceProfile) -> Vec<Excess> {
    if device.provider == Provider::Cpu {
        return Vec::new();
    }
    let mut found = Vec::new();
    let (mut stored, mut bound) = (HashSet::new(), HashSet::new());
    for (_, node) in graph.nodes() {
        let values = device_values(graph, shapes, node);
        let view = VIEWS.contains(&node.op_type.as_str());
        for id in &values {
            let Some(bytes) = shapes.bytes(*id) else { continue };
            let mut check = |limit, allowed, seen: &mut HashSet<ValueId>| {
                if bytes > allowed && seen.insert(*id) {
                    found.push(excess(node, limit, Some(&graph[*id].name), bytes, allowed));
                }
            };
            check(Limit::Buffer, device.max_buffer, &mut stored);
            if !view {
                check(Limit::Binding, device.max_binding, &mut bound);
            }
        }
        let allowed = u64::from(device.max_storage_buffers);
        if !view && values.len() as u64 > allowed {
            found.push(excess(node, Limit::StorageBuffers, None, values.len() as u64, allowed));
        }
    }
    if !device.f16 {
        found.extend(first_f16(graph, shapes));
    }
    found
}

fn excess(node: &Node, limit: Limit, tensor: Option<&str>, asked: u64, allowed: u64) -> Excess {
    let (node, op_type) = (node.name.clone(), node.op_type.clone());
    Excess { limit, node, op_type, tensor: tensor.map(str::to_owned), asked, allowed }
}

/// Values that the node has in buffers of the device, each once: operands, then results.
fn device_values(graph: &Graph, shapes: &Shapes, node: &Node) -> Vec<ValueId> {
    if SHAPE_READERS.contains(&node.op_type.as_str()) {
        return Vec::new();
    }
    let host_from = match VIEWS.contains(&node.op_type.as_str()) {
        true => 1,
        false => HOST_OPERANDS.iter().find(|row| row.0 == node.op_type).map_or(usize::MAX, |row| row.1),
    };
    let operands = node.inputs.iter().enumerate().filter(|(place, _)| *place < host_from);
    let operands = operands.filter_map(|(_, id)| *id);
    let mut seen = HashSet::new();
    let values = operands.chain(node.outputs.iter().flatten().copied());
    values.filter(|id| seen.insert(*id) && !is_host(graph, *id, shapes.fact(*id))).collect()
}

/// Shapes and their parts are computed on the host: integers whose values are known before the run, or too few to be
/// anything else.
fn is_host(graph: &Graph, id: ValueId, fact: &Fact) -> bool {
    const SHAPE_RANK: u64 = 16;
    let dtype = fact.dtype.or_else(|| graph[id].constant.as_ref().map(|tensor| tensor.dtype));
    dtype == Some(DType::I64)
        && (fact.elements.is_some() || fact.bytes().is_some_and(|b| b <= 8 * SHAPE_RANK))
}

fn first_f16(graph: &Graph, shapes: &Shapes) -> Option<Excess> {
    let is_f16 = |id: &ValueId| shapes.fact(*id).dtype == Some(DType::F16);
    let uses = |node: &Node| node.inputs.iter().chain(&node.outputs).flatten().copied().find(is_f16);
    let (node, tensor) = graph.nodes().find_map(|(_, node)| Some((node, uses(node)?)))?;
    let count = graph.values().filter(|(id, _)| is_f16(id)).count();
    Some(excess(node, Limit::F16, Some(&graph[tensor].name), count as u64, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        onnx::{Builder, Dim, Model},
        shapes::infer,
    };

    fn device() -> DeviceProfile {
        DeviceProfile::preset("llvmpipe").unwrap()
    }

    fn found(model: &Model, device: &DeviceProfile) -> Vec<Excess> {
        let shapes = infer(model, &Default::default(), &Default::default());
        excesses(&model.graph, &shapes, device)
    }

    /// A Concat of `count` operands of `width` f16 elements.
    fn concat(count: usize, width: usize) -> Model {
        let mut b = Builder::new("concat");
        let dims = |width| [Dim::Fixed(1), Dim::Fixed(width)];
        let inputs: Vec<_> =
            (0..count).map(|i| b.input(&format!("x{i}"), DType::F16, &dims(width))).collect();
        let y = b.op("Concat", &inputs, &[("axis", crate::onnx::Attribute::Int(1))]);
        b.output(y, "y", &dims(count.saturating_mul(width)));
        b.finish()
    }

    #[test]
    fn operands_and_results_are_counted() {
        assert_eq!(found(&concat(15, 4), &device()), []);
        let found = found(&concat(16, 4), &device());
        assert_eq!((found.len(), found[0].limit), (1, Limit::StorageBuffers));
        assert_eq!((found[0].asked, found[0].allowed, found[0].op_type.as_str()), (17, 16, "Concat"));
    }

    #[test]
    fn an_operand_that_is_used_twice_is_one_buffer() {
        let mut b = Builder::new("twice");
        let x = b.input("x", DType::F32, &[Dim::Fixed(4)]);
        let y = b.op("Concat", &[x; 40], &[("axis", crate::onnx::Attribute::Int(0))]);
        b.output(y, "y", &[Dim::Fixed(160)]);
        assert_eq!(found(&b.finish(), &device()), []);
    }

    #[test]
    fn large_tensors_are_named_with_their_bytes() {
        let found = found(&concat(2, 40 << 20), &device());
        let [excess] = &found[..] else { panic!("{found:?}") };
        assert_eq!((excess.limit, excess.tensor.as_deref()), (Limit::Binding, Some("y")));
        assert_eq!((excess.asked, excess.allowed), (160 << 20, 128 << 20));
        let huge = super::tests::found(&concat(2, 3 << 30), &device());
        let limits: Vec<Limit> = huge.iter().map(|excess| excess.limit).collect();
        assert_eq!(limits.iter().filter(|limit| **limit == Limit::Buffer).count(), 3, "{huge:?}");
        assert_eq!(limits.len(), 6, "{huge:?}");
    }

    #[test]
    fn sizes_that_do_not_fit_are_not_judged() {
        let huge = concat(2, usize::MAX);
        assert_eq!(found(&huge, &device()), []);
    }

    #[test]
    fn f16_needs_a_device_that_has_it() {
        let without = DeviceProfile { f16: false, ..device() };
        let excesses = found(&concat(2, 4), &without);
        assert_eq!((excesses.len(), excesses[0].limit, excesses[0].asked), (1, Limit::F16, 3));
        assert_eq!(found(&concat(20, 4), &DeviceProfile::preset("cpu").unwrap()), []);
    }
}
