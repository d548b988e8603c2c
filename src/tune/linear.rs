//! Linear layers with quantised weights, timed by format.

use serde::Serialize;
use viaduct_export::{
    memory::PENDING_DISPATCHES,
    onnx::{Attribute, Builder, DType, Dim, Model, Tensor},
};

use super::{
    Scale,
    micro_run::{best_seconds, noise},
};
use crate::runtime::{Runtime, RuntimeError};

/// Layers of the graph that is timed, one after the other.
const LAYERS: usize = 4;
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

fn rate(
    runtime: &mut Runtime,
    scale: &Scale,
    [bits, block, accuracy_level]: [usize; 3],
) -> Result<LinearRate, RuntimeError> {
    let [rows, width] = scale.linear;
    let dtype = if runtime.device().f16 { DType::F16 } else { DType::F32 };
    let model = graph(scale, [bits, block, accuracy_level], dtype);
    let inputs = [("x", noise(&[1, rows, width], 1, dtype))];
    let seconds = best_seconds(runtime, "linear layers", model, &inputs, PENDING_DISPATCHES)?;
    let operations = LAYERS * 2 * rows * width * width;
    Ok(LinearRate { bits, block, accuracy_level, rate: operations as f64 / seconds })
}

fn graph(scale: &Scale, [bits, block, accuracy_level]: [usize; 3], dtype: DType) -> Model {
    let mut graph = Builder::new("linear layers");
    let [rows, width] = scale.linear;
    let mut x = graph.input("x", dtype, &[1, rows, width].map(Dim::Fixed));
    let blocks = width / block;
    // Any codes do: what is timed does not depend on them. Sums stay near the size of the inputs.
    let codes = |i: usize| (i.wrapping_mul(2_654_435_761) >> 13) as u8;
    let scale = 2.0 / (1 << bits) as f32 / (width as f32).sqrt();
    for layer in 0..LAYERS {
        let shape = [width, blocks, block * bits / 8];
        let bytes = (0..shape.iter().product()).map(|i: usize| codes(i + layer)).collect();
        let weight = graph.constant(&format!("codes{layer}"), Tensor::inline(DType::U8, &shape, bytes));
        let scales = vec![scale; width * blocks];
        let scales = match dtype {
            DType::F16 => Tensor::from_f16(&[width * blocks], &scales),
            _ => Tensor::from_f32(&[width * blocks], &scales),
        };
        let scales = graph.constant(&format!("scales{layer}"), scales);
        let attributes = [
            ("K", Attribute::Int(width as i64)),
            ("N", Attribute::Int(width as i64)),
            ("bits", Attribute::Int(bits as i64)),
            ("block_size", Attribute::Int(block as i64)),
            ("accuracy_level", Attribute::Int(accuracy_level as i64)),
        ];
        x = graph.contrib("MatMulNBits", &[x, weight, scales], &attributes);
    }
    let y = graph.slice(x, 1, 0, 1);
    graph.output(y, "y", &[1, 1, width].map(Dim::Fixed));
    graph.finish()
}
