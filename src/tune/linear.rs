//! Linear layers with quantised weights, timed by format.

use serde::Serialize;
use viaduct_export::{
    memory::PENDING_DISPATCHES,
    onnx::{Attribute, Builder, DType, Dim, Model, Tensor},
};

use super::{
    Scale,
    micro_run::{best_seconds, compute_dtype, floats, noise},
};
use crate::runtime::{Runtime, RuntimeError};

/// Layers of the graph that is timed.
const LAYERS: usize = 4;
/// Outputs of a layer by its inputs, as in a model's wider layers.
const WIDER: usize = 3;
/// Bits, block and accuracy level: those that exports know, and those that others' bundles use.
const FORMATS: [[usize; 3]; 6] = [[4, 32, 4], [8, 32, 4], [4, 128, 4], [8, 128, 4], [4, 16, 4], [4, 32, 0]];

/// One format of weights.
#[derive(Clone, Debug, Serialize)]
pub struct LinearRate {
    pub bits: usize,
    /// Weights that share a scale.
    pub block: usize,
    /// MatMulNBits' own: 4 allows sums of 8-bit products.
    pub accuracy_level: usize,
    /// Floating-point operations in a second.
    pub rate: f64,
}

pub(super) fn rates(runtime: &mut Runtime, scale: &Scale) -> Result<Vec<LinearRate>, RuntimeError> {
    FORMATS.iter().map(|format| rate(runtime, scale, *format)).collect()
}

/// Floating-point operations in a second of the fastest layer: what a device's linears can come to.
pub fn ceiling(runtime: &mut Runtime) -> Result<f64, RuntimeError> {
    let scale = Scale::of(runtime.device().kind);
    Ok(rate(runtime, &scale, FORMATS[1])?.rate)
}

fn rate(runtime: &mut Runtime, scale: &Scale, format: [usize; 3]) -> Result<LinearRate, RuntimeError> {
    let [rows, width] = scale.linear;
    let dtype = compute_dtype(&runtime.device().profile());
    let inputs = [("x", noise(&[1, rows, width], 1, dtype))];
    let model = graph(scale, format, dtype);
    let seconds = best_seconds(runtime, "linear layers", model, &inputs, PENDING_DISPATCHES)?;
    let operations = LAYERS * 2 * rows * width * WIDER * width;
    let [bits, block, accuracy_level] = format;
    Ok(LinearRate { bits, block, accuracy_level, rate: operations as f64 / seconds })
}

/// Layers beside each other, over the same input; the sum of a row of each is the output.
fn graph(scale: &Scale, [bits, block, accuracy_level]: [usize; 3], dtype: DType) -> Model {
    let mut graph = Builder::new("linear layers");
    let [rows, inputs] = scale.linear;
    let outputs = WIDER * inputs;
    let x = graph.input("x", dtype, &[1, rows, inputs].map(Dim::Fixed));
    let blocks = inputs / block;
    // Any codes do: what is timed does not depend on them. Results stay near the size of the inputs.
    let codes = |i: usize| (i.wrapping_mul(2_654_435_761) >> 13) as u8;
    let step = 2.0 / (1 << bits) as f32 / (inputs as f32).sqrt();
    let attributes = [
        ("K", inputs),
        ("N", outputs),
        ("bits", bits),
        ("block_size", block),
        ("accuracy_level", accuracy_level),
    ];
    let attributes = attributes.map(|(name, value)| (name, Attribute::Int(value as i64)));
    let layer = |graph: &mut Builder, index: usize| {
        let shape = [outputs, blocks, block * bits / 8];
        let bytes = (0..shape.iter().product()).map(|i: usize| codes(i + index)).collect();
        let weight = graph.constant(&format!("codes{index}"), Tensor::inline(DType::U8, &shape, bytes));
        let steps = floats(dtype, &vec![step; outputs * blocks]);
        let scales = graph.constant(&format!("scales{index}"), steps);
        let y = graph.contrib("MatMulNBits", &[x, weight, scales], &attributes);
        graph.slice(y, 1, 0, 1)
    };
    let first = layer(&mut graph, 0);
    let y = (1..LAYERS).fold(first, |sum, index| {
        let y = layer(&mut graph, index);
        graph.add(sum, y)
    });
    graph.output(y, "y", &[1, 1, outputs].map(Dim::Fixed));
    graph.finish()
}
