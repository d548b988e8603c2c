//! The norm of an attention's heads as an operator and written out, timed over sequences of several lengths.

use serde::Serialize;
use viaduct_export::{
    device::DeviceProfile,
    memory::PENDING_DISPATCHES,
    onnx::{Attribute, Builder, DType, Dim, Model},
    tuning::Tuning,
};

use super::{
    Scale,
    micro_run::{best_seconds, compute_dtype, floats, lowered, noise},
};
use crate::runtime::{Runtime, RuntimeError};

/// Norms of the graph that is timed.
const LAYERS: usize = 8;
/// What is gained has to be more than what two measurements differ by.
const WORTHWHILE: f64 = 0.95;
const NAME: &str = "norms of heads";

/// Both forms over one length.
#[derive(Clone, Debug, Serialize)]
pub struct HeadNormTime {
    pub rows: usize,
    /// Seconds of one norm as an operator.
    pub operator: f64,
    /// Seconds of one that is written out.
    pub written: f64,
}

/// The lengths from the shortest on.
pub(super) fn times(runtime: &mut Runtime, scale: &Scale) -> Result<Vec<HeadNormTime>, RuntimeError> {
    let mut time = |rows: usize| {
        let mut seconds = |written_head_norms| seconds(runtime, scale, rows, written_head_norms);
        Ok(HeadNormTime { rows, operator: seconds(None)?, written: seconds(Some(1))? })
    };
    scale.rows.iter().map(|rows| time(*rows)).collect()
}

/// The shortest length from which on the written form is worthwhile at all that were measured.
pub(super) fn least_rows(times: &[HeadNormTime]) -> Option<usize> {
    let worthwhile = |time: &&HeadNormTime| time.written <= WORTHWHILE * time.operator;
    times.iter().rev().take_while(worthwhile).last().map(|time| time.rows)
}

fn seconds(
    runtime: &mut Runtime,
    scale: &Scale,
    rows: usize,
    written_head_norms: Option<usize>,
) -> Result<f64, RuntimeError> {
    let profile = runtime.device().profile();
    let dtype = compute_dtype(&profile);
    let mut model = graph(scale, rows, dtype);
    in_form(&mut model, profile, written_head_norms)?;
    let inputs = [("x", noise(&[1, rows, scale.heads, scale.head_size], 1, dtype))];
    Ok(best_seconds(runtime, NAME, model, &inputs, PENDING_DISPATCHES)? / LAYERS as f64)
}

/// Brings the graph's norms of heads into a form.
pub(super) fn in_form(
    model: &mut Model,
    profile: DeviceProfile,
    written_head_norms: Option<usize>,
) -> Result<(), RuntimeError> {
    let tuning = Tuning { written_head_norms, ..Tuning::default() };
    lowered(NAME, model, &DeviceProfile { tuning, ..profile })
}

/// Norms one after the other; one row of the last is the output.
fn graph(scale: &Scale, rows: usize, dtype: DType) -> Model {
    let mut graph = Builder::new(NAME);
    let Scale { heads, head_size, .. } = *scale;
    let mut x = graph.input("x", dtype, &[1, rows, heads, head_size].map(Dim::Fixed));
    let weight = graph.small_constant(floats(dtype, &vec![1.0; head_size]));
    let attributes = [("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(1e-6))];
    for _ in 0..LAYERS {
        x = graph.op("RMSNormalization", &[x, weight], &attributes);
    }
    let y = graph.slice(x, 1, 0, 1);
    graph.output(y, "y", &[1, 1, heads, head_size].map(Dim::Fixed));
    graph.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_written_form_must_pay_from_a_length_on() {
        let least = |times: &[(usize, f64)]| {
            let times = times.iter().map(|(rows, written)| HeadNormTime {
                rows: *rows,
                operator: 1.0,
                written: *written,
            });
            least_rows(&times.collect::<Vec<_>>())
        };
        assert_eq!(least(&[(10, 0.5), (20, 0.9)]), Some(10));
        assert_eq!(least(&[(10, 0.97), (20, 0.9)]), Some(20));
        assert_eq!(least(&[(10, 0.5), (20, 0.97)]), None);
        assert_eq!(least(&[]), None);
    }
}
