//! Measures on the device itself whether an operator can be trusted there.

use std::path::Path;

use viaduct_export::{
    memory::PENDING_DISPATCHES,
    onnx::{Attribute, DType, Dim, Graph, Model, Node, ValueType, model_bytes},
};

use super::{DeviceKind, Provider, Runtime, RuntimeError, StageModel};
use crate::tensor::HostTensor;

/// Software adapters compute the fused attention wrongly once a sequence passes about 16 rows, and take minutes to
/// compile it; so do adapters with small subgroups.
const ROWS: usize = 80;
const HEADS: usize = 2;
const HEAD_SIZE: usize = 64;
/// An adapter whose kernel is wrong is off by more than a tenth.
const ALLOWED: f32 = 5e-3;
const SMALLEST_SUBGROUP: u32 = 32;

/// Whether the fused attention operator computes right on the device. It runs only on adapters that may pass.
pub fn fused_attention_is_right(runtime: &mut Runtime) -> Result<bool, RuntimeError> {
    let device = &runtime.device;
    if device.provider == Provider::Cpu {
        return Ok(true);
    }
    let small = device.subgroup_size.unwrap_or(0) < SMALLEST_SUBGROUP;
    if small || device.kind == DeviceKind::Software {
        return Ok(false);
    }
    let stage = "attention self-test";
    let failed = |reason: String| RuntimeError::Open { stage: stage.to_owned(), reason };
    let bytes = model_bytes(&attention_model()).map_err(|e| failed(e.to_string()))?;
    let mut session = runtime.open(StageModel {
        name: stage,
        bytes,
        folder: Path::new("."),
        pending_dispatches: PENDING_DISPATCHES,
    })?;
    let [q, k, v] = [1, 2, 3].map(|seed| HostTensor::f32(&[1, ROWS, HEADS * HEAD_SIZE], values(seed)));
    let y = session.run(&[("q", &q), ("k", &k), ("v", &v)], &["y"])?.swap_remove(0).to_f32();
    let expected = attention(&q.to_f32(), &k.to_f32(), &v.to_f32());
    Ok(y.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= ALLOWED))
}

fn attention_model() -> Model {
    let mut graph = Graph::default();
    let dims = [1, ROWS, HEADS * HEAD_SIZE].map(Dim::Fixed);
    let ty = ValueType::Tensor { dtype: DType::F32, shape: Some(dims.to_vec()) };
    let [q, k, v, y] = ["q", "k", "v", "y"].map(|name| {
        let id = graph.value(name);
        graph[id].ty = Some(ty.clone());
        id
    });
    graph.inputs = vec![q, k, v];
    graph.outputs = vec![y];
    graph.add_node(Node {
        op_type: "MultiHeadAttention".to_owned(),
        domain: "com.microsoft".to_owned(),
        inputs: graph.inputs.iter().copied().map(Some).collect(),
        outputs: vec![Some(y)],
        attributes: vec![("num_heads".to_owned(), Attribute::Int(HEADS as i64))],
        ..Node::default()
    });
    let opsets = vec![(String::new(), 23), ("com.microsoft".to_owned(), 1)];
    Model { graph, ir_version: 11, opsets, producer: "viaduct".to_owned(), ..Model::default() }
}

/// Reproducible values in -1..1.
fn values(seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..ROWS * HEADS * HEAD_SIZE).map(|_| next()).collect()
}

/// The reference: softmax(q k^T / sqrt(d)) v, head by head.
fn attention(q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
    let width = HEADS * HEAD_SIZE;
    let head = |x: &[f32], row: usize, head: usize| x[row * width + head * HEAD_SIZE..][..HEAD_SIZE].to_vec();
    let mut y = vec![0.0; ROWS * width];
    for h in 0..HEADS {
        for row in 0..ROWS {
            let query = head(q, row, h);
            let score = |key: usize| query.iter().zip(head(k, key, h)).map(|(a, b)| a * b).sum::<f32>();
            let weights: Vec<f32> =
                (0..ROWS).map(|key| (score(key) / (HEAD_SIZE as f32).sqrt()).exp()).collect();
            let total: f32 = weights.iter().sum();
            for (key, weight) in weights.iter().enumerate() {
                for (i, value) in head(v, key, h).iter().enumerate() {
                    y[row * width + h * HEAD_SIZE + i] += weight / total * value;
                }
            }
        }
    }
    y
}
