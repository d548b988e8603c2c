//! One small graph, timed.

use std::time::{Duration, Instant};

use viaduct_export::{
    device::DeviceProfile,
    onnx::{DType, Model, Tensor},
};

use crate::{
    runtime::{Runtime, RuntimeError, Settings, lower},
    tensor::{HostTensor, Values},
};

/// Before a time counts: shaders are compiled, and the device's clocks go up.
const WARM_UP: Duration = Duration::from_millis(300);
const LEAST_TIME: Duration = Duration::from_millis(150);
const LEAST_RUNS: usize = 5;
/// No graph is run for longer, however slow the device is.
const MOST_TIME: Duration = Duration::from_secs(4);

/// Seconds of the fastest run of the graph, inputs bound beforehand; its outputs should be small, since they are read back.
/// Other work on the machine makes runs slower and never faster.
pub(super) fn best_seconds(
    runtime: &mut Runtime,
    name: &str,
    model: Model,
    inputs: &[(&str, HostTensor)],
    pending_dispatches: u32,
) -> Result<f64, RuntimeError> {
    let mut stage = runtime.open_model(name, model, pending_dispatches)?;
    for (input, tensor) in inputs {
        stage.bind(input, tensor)?;
    }
    let outputs: Vec<String> = stage.outputs().iter().map(|output| output.name.clone()).collect();
    let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
    stage.run(&[], &outputs)?;
    let warm = Instant::now();
    while warm.elapsed() < WARM_UP {
        stage.run(&[], &outputs)?;
    }
    let (begun, mut runs, mut best) = (Instant::now(), 0, f64::INFINITY);
    while (runs < LEAST_RUNS || begun.elapsed() < LEAST_TIME) && begun.elapsed() < MOST_TIME {
        let run = Instant::now();
        stage.run(&[], &outputs)?;
        best = best.min(run.elapsed().as_secs_f64());
        runs += 1;
    }
    Ok(best)
}

/// Reproducible values in -1..1, of the type in which graphs compute on the device.
pub(super) fn noise(shape: &[usize], seed: u32, dtype: DType) -> HostTensor {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    match dtype {
        DType::F16 => {
            let values: Vec<half::f16> = values.into_iter().map(half::f16::from_f32).collect();
            HostTensor { shape: shape.to_vec(), values: Values::F16(values.into()) }
        }
        _ => HostTensor::f32(shape, values),
    }
}

/// The type in which graphs compute on the device.
pub(super) fn compute_dtype(profile: &DeviceProfile) -> DType {
    if profile.f16 { DType::F16 } else { DType::F32 }
}

/// A constant vector of that type.
pub(super) fn floats(dtype: DType, values: &[f32]) -> Tensor {
    match dtype {
        DType::F16 => Tensor::from_f16(&[values.len()], values),
        _ => Tensor::from_f32(&[values.len()], values),
    }
}

/// Fits a graph to the device as it is tuned.
pub(super) fn lowered(name: &str, model: &mut Model, profile: &DeviceProfile) -> Result<(), RuntimeError> {
    let unfit = |e| RuntimeError::Lower { stage: name.to_owned(), source: Box::new(e) };
    lower(model, profile, &Default::default(), &[], &Settings::default()).map_err(unfit)?;
    Ok(())
}
