//! The norm of an attention's heads, written out.
//!
//! Before: RMSNormalization over the last axis, which is a head's.
//! After: x / sqrt(sum(x^2) / d + eps) * weight, with a sum of squares in f32, whatever the type.
//!
//! The operator takes a workgroup for every row. Rows of a hundred numbers keep few of its threads busy, so that on some
//! devices this, which reads everything three times, takes half the time. The runner decides by what was measured there.

use super::Replacement;
use crate::onnx::{Attribute, DType, Graph, Node, NodeId, ValueId};

/// Wider rows fill a workgroup.
const WIDEST: usize = 256;

/// An RMSNormalization of heads that can be written out.
#[derive(Clone, Debug)]
pub struct HeadNorm {
    pub x: ValueId,
    weight: ValueId,
    output: ValueId,
    /// f32 or f16.
    dtype: DType,
    width: usize,
    epsilon: f32,
}

impl HeadNorm {
    /// The node, if it is a norm over the last axis, of a constant weight of one head; `dtype` gives the type of a value.
    pub fn of(graph: &Graph, node: &Node, dtype: impl FnOnce(ValueId) -> Option<DType>) -> Option<HeadNorm> {
        let (x, weight, output) = (node.input(0)?, node.input(1)?, node.output(0)?);
        let [width] = graph[weight].constant.as_ref()?.shape[..] else { return None };
        let norms = node.is("RMSNormalization") || node.is("SimplifiedLayerNormalization");
        let alone = node.outputs.iter().flatten().count() == 1;
        if !norms || !alone || node.int("axis").unwrap_or(-1) != -1 || !(1..=WIDEST).contains(&width) {
            return None;
        }
        let dtype = dtype(x).filter(|dtype| matches!(dtype, DType::F16 | DType::F32))?;
        let epsilon = node.float("epsilon").unwrap_or(1e-5);
        Some(HeadNorm { x, weight, output, dtype, width, epsilon })
    }

    /// Replaces the node.
    pub fn write_out(&self, graph: &mut Graph, node: NodeId) {
        let mut r = Replacement::of(graph, node);
        let narrow = self.dtype == DType::F16;
        let x = if narrow { r.cast(self.x, DType::F32) } else { self.x };
        let last = r.ints(&[-1]);
        let sum = r.op("ReduceSumSquare", &[x, last], &[("keepdims", Attribute::Int(1))]);
        // The mean and not the sum, whose root could leave f16's range.
        let share = r.scalar(DType::F32, 1.0 / self.width as f32);
        let mean = r.op("Mul", &[sum, share], &[]);
        let epsilon = r.scalar(DType::F32, self.epsilon);
        let mean = r.op("Add", &[mean, epsilon], &[]);
        let root = r.op("Sqrt", &[mean], &[]);
        let root = if narrow { r.cast(root, DType::F16) } else { root };
        let normed = r.op("Div", &[self.x, root], &[]);
        r.op_into("Mul", &[normed, self.weight], &[], self.output);
        r.finish();
    }
}
