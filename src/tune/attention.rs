//! Attention in its forms, timed over sequences of several lengths.

use serde::Serialize;
use viaduct_export::{
    device::DeviceProfile,
    memory::PENDING_DISPATCHES,
    onnx::{Attribute, Builder, DType, Dim, Model},
    tuning::{AttentionForm, TunedAttention, Tuning},
};

use super::{
    Scale,
    micro_run::{best_seconds, compute_dtype, lowered, noise},
};
use crate::runtime::{Runtime, RuntimeError};

/// Layers of the graph that is timed, so that reading a row back counts for little.
const LAYERS: usize = 3;
/// Parts into which the query rows are cut, the most first: what takes the least memory.
const PARTS: [u64; 4] = [8, 4, 2, 1];
/// Smaller score tensors save little memory and take many dispatches.
const LEAST_SCORES: u64 = 8 << 20;
/// Dispatches per submission that are tried, the fewest first.
pub const DISPATCHES: [u32; 3] = [PENDING_DISPATCHES, 16, 64];

/// One form over one length.
#[derive(Clone, Debug, Serialize)]
pub struct AttentionTime {
    pub rows: usize,
    pub form: AttentionForm,
    /// Of one attention.
    pub seconds: f64,
    /// Floating-point operations in a second.
    pub rate: f64,
}

/// All forms that are right on the device, the one that takes the least memory first; lengths whose scores the device
/// could not hold twice are left out.
pub(super) fn times(
    runtime: &mut Runtime,
    scale: &Scale,
    fused: bool,
) -> Result<Vec<AttentionTime>, RuntimeError> {
    let profile = runtime.device().profile();
    let mut times = Vec::new();
    for rows in scale.rows.iter().copied() {
        let whole = score_bytes(scale, rows, compute_dtype(&profile));
        if whole > profile.max_binding || whole.saturating_mul(4) > profile.memory {
            continue;
        }
        // As a whole, the scores of longer sequences are whole, too, as far as they can be bound.
        let bytes = PARTS.map(|parts| if parts == 1 { profile.max_binding } else { whole.div_ceil(parts) });
        let bytes = bytes.into_iter().filter(|bytes| *bytes >= LEAST_SCORES);
        let written = bytes.map(|score_bytes| AttentionForm::Written { score_bytes });
        for form in fused.then_some(AttentionForm::Fused).into_iter().chain(written) {
            let seconds =
                seconds(runtime, scale, rows, &[TunedAttention { rows, form }], PENDING_DISPATCHES)?;
            let seconds = seconds / LAYERS as f64;
            let operations = 4 * scale.heads * scale.head_size * rows * rows;
            times.push(AttentionTime { rows, form, seconds, rate: operations as f64 / seconds });
        }
    }
    Ok(times)
}

/// Seconds of the shortest sequence by dispatches per submission, the fewest first: the shorter a dispatch, the more it
/// matters how many are submitted at once.
pub(super) fn dispatch_times(
    runtime: &mut Runtime,
    scale: &Scale,
    forms: &[TunedAttention],
) -> Result<Vec<(u32, f64)>, RuntimeError> {
    let rows = scale.rows[0] / 4;
    DISPATCHES.iter().map(|count| Ok((*count, seconds(runtime, scale, rows, forms, *count)?))).collect()
}

fn seconds(
    runtime: &mut Runtime,
    scale: &Scale,
    rows: usize,
    forms: &[TunedAttention],
    pending_dispatches: u32,
) -> Result<f64, RuntimeError> {
    let tuning =
        Tuning { fused_attention: true, attention: forms.to_vec(), pending_dispatches, ..Tuning::default() };
    let profile = DeviceProfile { tuning, ..runtime.device().profile() };
    let dtype = compute_dtype(&profile);
    let mut model = graph(scale, rows, dtype);
    lowered(NAME, &mut model, &profile)?;
    let shape = [1, rows, scale.heads * scale.head_size];
    let inputs = [("q", 1), ("k", 2), ("v", 3)].map(|(name, seed)| (name, noise(&shape, seed, dtype)));
    best_seconds(runtime, NAME, model, &inputs, pending_dispatches)
}

const NAME: &str = "attention";

/// Attentions one after the other; one row of the last is the output.
fn graph(scale: &Scale, rows: usize, dtype: DType) -> Model {
    let mut graph = Builder::new(NAME);
    let width = scale.heads * scale.head_size;
    let shape = [1, rows, width].map(Dim::Fixed);
    let [mut q, k, v] = ["q", "k", "v"].map(|name| graph.input(name, dtype, &shape));
    for _ in 0..LAYERS {
        q = graph.contrib(
            "MultiHeadAttention",
            &[q, k, v],
            &[("num_heads", Attribute::Int(scale.heads as i64))],
        );
        graph.record_shape(q, &shape);
    }
    let y = graph.slice(q, 1, 0, 1);
    graph.output(y, "y", &[1, 1, width].map(Dim::Fixed));
    graph.finish()
}

fn score_bytes(scale: &Scale, rows: usize, dtype: DType) -> u64 {
    (scale.heads * rows * rows * dtype.size().unwrap_or(4)) as u64
}
