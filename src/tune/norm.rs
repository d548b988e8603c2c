//! Norms of heads, as the operator and as a reduction and products.

use viaduct_export::{
    memory::PENDING_DISPATCHES,
    onnx::{Attribute, Builder, DType, Dim, Model, Tensor},
    passes::reduce_norms,
};

use super::{
    Scale,
    micro_run::{best_seconds, noise},
};
use crate::runtime::{Runtime, RuntimeError};

const LAYERS: usize = 8;

/// Seconds of a norm over the heads of the longest sequence: of the operator, and reduced.
pub(super) fn times(runtime: &mut Runtime, scale: &Scale) -> Result<[f64; 2], RuntimeError> {
    let rows = scale.rows.last().copied().unwrap_or(1);
    let inputs = [("x", noise(&[1, rows, scale.heads, scale.head_size], 1, DType::F16))];
    let mut seconds = |model: Model| -> Result<f64, RuntimeError> {
        Ok(best_seconds(runtime, "norms of heads", model, &inputs, PENDING_DISPATCHES)? / LAYERS as f64)
    };
    let operator = graph(scale, rows);
    let mut reduced = operator.clone();
    reduce_norms(&mut reduced.graph);
    Ok([seconds(operator)?, seconds(reduced)?])
}

fn graph(scale: &Scale, rows: usize) -> Model {
    let Scale { heads, head_size, .. } = *scale;
    let mut graph = Builder::new("norms of heads");
    let mut x = graph.input("x", DType::F16, &[1, rows, heads, head_size].map(Dim::Fixed));
    let weight = graph.small_constant(Tensor::from_f16(&[head_size], &vec![1.0; head_size]));
    for _ in 0..LAYERS {
        let attributes = [("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(1e-6))];
        x = graph.op("RMSNormalization", &[x, weight], &attributes);
    }
    let y = graph.slice(x, 1, 0, 1);
    graph.output(y, "y", &[1, 1, heads, head_size].map(Dim::Fixed));
    graph.finish()
}
