//! How fast a device multiplies at best: what shares of it say is how well stages use the device.

use std::time::Instant;

use half::f16;
use viaduct_export::{
    memory::PENDING_DISPATCHES,
    onnx::{Attribute, Builder, DType, Dim, Model, Tensor},
};

use crate::{
    runtime::{DeviceKind, Runtime, RuntimeError},
    tensor::{HostTensor, Values},
};

/// Products with a matrix of N rows and K columns, which lies transposed.
struct Products {
    rows: usize,
    n: usize,
    /// In a row, so that the way to the device and back does not count.
    count: usize,
}

/// Columns of the left side.
const K: usize = 3072;
/// Weights that share one scale.
const BLOCK: usize = 32;
/// The widest product of a FLUX.2 Klein 4B transformer.
const FAST: Products = Products { rows: 2048, n: 9216, count: 16 };
/// A hundredth of the work, for devices that compute on the CPU.
const SLOW: Products = Products { rows: 64, n: 3072, count: 2 };
/// Timed runs, of which the fastest counts.
const RUNS: usize = 5;

/// Floating-point operations per second of products with 8-bit weights in blocks of 32 and 8-bit arithmetic where the
/// provider has it (`accuracy_level` 4): the fastest kernel that bundles use. Activations are f16, on the CPU provider f32.
pub fn ceiling(runtime: &mut Runtime) -> Result<f64, RuntimeError> {
    let device = runtime.device();
    let products = match device.kind {
        DeviceKind::Software | DeviceKind::Cpu => SLOW,
        _ => FAST,
    };
    let Products { rows, n, count } = products;
    let is_half = device.f16 && device.kind != DeviceKind::Cpu;
    let model = products_in_a_row(&products, if is_half { DType::F16 } else { DType::F32 });
    let mut stage = runtime.open_model("ceiling", model, PENDING_DISPATCHES)?;
    let values = random().map(|byte| f32::from(byte) / 128.0 - 1.0).take(rows * K);
    let values = match is_half {
        true => Values::F16(values.map(f16::from_f32).collect::<Vec<_>>().into()),
        false => Values::F32(values.collect::<Vec<_>>().into()),
    };
    stage.bind("x", &HostTensor::new(&[rows, K], values))?;
    // The first run compiles shaders.
    stage.run(&[], &["y"])?;
    let mut fastest = f64::INFINITY;
    for _ in 0..RUNS {
        let started = Instant::now();
        stage.run(&[], &["y"])?;
        fastest = fastest.min(started.elapsed().as_secs_f64());
    }
    Ok((2 * count * rows * K * n) as f64 / fastest)
}

/// `x` times the matrix, cut to K columns and times the matrix again, and so on; `y` is one row of the last product.
fn products_in_a_row(products: &Products, dtype: DType) -> Model {
    let &Products { rows, n, count } = products;
    let mut graph = Builder::new("ceiling");
    let codes = random().take(n * K).collect();
    let codes = graph.constant("codes", Tensor::inline(DType::U8, &[n, K / BLOCK, BLOCK], codes));
    // Of codes around 128 and as far from it as random ones are, so that a product is about as large as what it is of.
    let scales = vec![1.0 / 4096.0; n * K / BLOCK];
    let scales = match dtype {
        DType::F16 => Tensor::from_f16(&[n, K / BLOCK], &scales),
        _ => Tensor::from_f32(&[n, K / BLOCK], &scales),
    };
    let scales = graph.constant("scales", scales);
    let attributes = [("K", K), ("N", n), ("bits", 8), ("block_size", BLOCK), ("accuracy_level", 4)]
        .map(|(name, value)| (name, Attribute::Int(value as i64)));
    let mut x = graph.input("x", dtype, &[rows, K].map(Dim::Fixed));
    for _ in 0..count {
        let columns = graph.slice(x, 1, 0, K as i64);
        x = graph.contrib("MatMulNBits", &[columns, codes, scales], &attributes);
    }
    let row = graph.slice(x, 0, 0, 1);
    graph.output(row, "y", &[1, n].map(Dim::Fixed));
    graph.finish()
}

/// Reproducible bytes.
fn random() -> impl Iterator<Item = u8> {
    let mut state = 1u32;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
}
