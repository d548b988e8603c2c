//! Written attention as one operator.
//!
//! Before: MatMul(q, k^T), a scale, a mask, Softmax, MatMul with v, and the layouts around them (heads split off by
//! Reshape and Transpose and joined again, k transposed or not, keys repeated, scores cast to f32 and back).
//! After: com.microsoft MultiHeadAttention over q, k and v [1, rows, heads * d], with the mask as attention_bias. q, k and
//! v are taken from before their heads were split off, where nothing happens in between. Their shapes are recorded.
//!
//! The scores never exist as a whole; and where the operator is wrong or slow, the runner writes it out in slices that
//! fit. Nothing is done where the written form is asked for. Refused: what the constants below say.

use super::{
    AttentionForm, Outcome, Pass, PassError, Replacement, Settings, View,
    attention::{Attention, attentions},
    heads::{Axis, Heads, Output},
};
use crate::onnx::{Attribute, DType, Model, Node, ValueId};

pub const PASS: Pass = Pass {
    name: "fuse_attention",
    what: "MatMul, scale, mask, Softmax, MatMul -> MultiHeadAttention",
    why: "scores grow with the square of the rows; the operator, or the runner in slices, never holds them whole",
    run,
};

const OPSET: &str = "it is written for operators before version 13";
const AXIS: &str = "the softmax is not over the last axis";
const GUARD: &str = "a guard against NaN is in the way (remove_nan_guard)";
const ELSEWHERE: &str = "the weights are used for more than the values";
const UNEQUAL: &str = "q, k and v do not fit each other";
const SCALED_MASK: &str = "the mask is scaled together with the scores";
const SCALE: &str = "the scale is zero or not finite";
const SEVERAL: &str = "there is more than one mask";
const MASK: &str = "the mask's shape is not understood";

/// The lowest number of a mask that is cast to f16; sums with it do not overflow.
const LOWEST_F16: f32 = -32768.0;

struct Fusion {
    q: Heads,
    k: Heads,
    v: Heads,
    dtype: DType,
    scale: f32,
    bias: Option<Bias>,
    output: Output,
}

/// A mask that is added to scores.
struct Bias {
    mask: ValueId,
    dtype: DType,
    rank: usize,
    /// The shape to stretch it to: the operator wants a row for each query and a column for each key.
    stretch: Option<[usize; 4]>,
}

fn run(model: &mut Model, settings: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    if settings.attention != AttentionForm::Fused {
        return Ok(outcome);
    }
    let view = View::of(model);
    let mut fusions = Vec::new();
    for attention in attentions(&view) {
        match fusion(&view, &attention) {
            Ok(fusion) => fusions.push(fusion),
            Err(why) => outcome.refuse(view.graph.place(attention.softmax), why),
        }
    }
    for fusion in &fusions {
        model.import("com.microsoft", 1);
        fuse(model, fusion);
        outcome.applied += 1;
    }
    Ok(outcome)
}

fn fusion(view: &View<'_>, attention: &Attention) -> Result<Fusion, &'static str> {
    let scores = &attention.scores;
    let refusals = [
        (view.opset() < 13, OPSET),
        (!attention.over_keys, AXIS),
        (attention.guard.is_some(), GUARD),
        (attention.weights_shared, ELSEWHERE),
        (scores.masks_scaled, SCALED_MASK),
        (scores.masks.len() > 1, SEVERAL),
    ];
    if let Some((_, why)) = refusals.into_iter().find(|(refused, _)| *refused) {
        return Err(why);
    }
    let rows_last = [Axis::Rows, Axis::Width];
    let q = Heads::of(view, scores.q, rows_last)?.traced(view, true);
    let k = Heads::of(view, scores.k, [Axis::Width, Axis::Rows])?.traced(view, true);
    let v = Heads::of(view, attention.v, rows_last)?.traced(view, false);
    let output = Output::of(view, attention.apply)?;
    let fit = q.heads == k.heads
        && q.heads == v.heads
        && q.width == k.width
        && k.rows == v.rows
        && (output.heads().heads, output.heads().width) == (v.heads, v.width)
        && output.heads().rows == q.rows;
    if !fit {
        return Err(UNEQUAL);
    }
    let wide = [&q, &k, &v].iter().any(|heads| heads.dtype == DType::F32);
    let dtype = if wide { DType::F32 } else { DType::F16 };
    let scale = (q.scale * k.scale * scores.scale) as f32;
    if !scale.is_normal() {
        return Err(SCALE);
    }
    let bias = scores.masks.first().map(|mask| bias(view, mask.value, &q, &k)).transpose()?;
    Ok(Fusion { q, k, v, dtype, scale, bias, output })
}

fn bias(view: &View<'_>, mask: ValueId, q: &Heads, k: &Heads) -> Result<Bias, &'static str> {
    let facts = view.facts();
    let rank = facts.rank(mask).filter(|rank| *rank <= 4).ok_or(MASK)?;
    let dtype = facts.dtype(mask).filter(|dtype| matches!(dtype, DType::F32 | DType::F16)).ok_or(MASK)?;
    let at = |from_end: usize| {
        if from_end <= rank { facts.sizes(mask, -(from_end as i64)) } else { Some(vec![1; q.rows.len()]) }
    };
    let [batch, heads, rows, keys] = [at(4), at(3), at(2), at(1)];
    let is = |sizes: &Option<Vec<usize>>, size: usize| {
        sizes.as_ref().is_some_and(|s| s.iter().all(|n| *n == size))
    };
    if !is(&batch, 1) || !(is(&heads, 1) || is(&heads, q.heads)) {
        return Err(MASK);
    }
    let full = rows.as_ref() == Some(&q.rows) && keys.as_ref() == Some(&k.rows);
    if full {
        return Ok(Bias { mask, dtype, rank, stretch: None });
    }
    let fits = |sizes: &Option<Vec<usize>>, of: &Heads| is(sizes, 1) || sizes.as_ref() == Some(&of.rows);
    let (rows_fixed, keys_fixed) = (fixed(q), fixed(k));
    let (Some(q_rows), Some(k_rows), true) = (rows_fixed, keys_fixed, fits(&rows, q) && fits(&keys, k))
    else {
        return Err(MASK);
    };
    Ok(Bias {
        mask,
        dtype,
        rank,
        stretch: Some([1, if is(&heads, 1) { 1 } else { q.heads }, q_rows, k_rows]),
    })
}

fn fixed(heads: &Heads) -> Option<usize> {
    match heads.dim {
        crate::onnx::Dim::Fixed(size) => Some(size),
        _ => None,
    }
}

fn fuse(model: &mut Model, fusion: &Fusion) {
    let kept: Vec<ValueId> = model.graph.inputs.iter().chain(&model.graph.outputs).copied().collect();
    let mut r = Replacement::of(&mut model.graph, fusion.output.root);
    let mut inputs = Vec::new();
    for heads in [&fusion.q, &fusion.k, &fusion.v] {
        let value = heads.join(&mut r, fusion.dtype);
        if !kept.contains(&value) {
            r.set_type(value, fusion.dtype, Some(heads.shape()));
        }
        inputs.push(Some(value));
    }
    if let Some(bias) = &fusion.bias {
        inputs.extend([None, None, Some(bias_of(&mut r, bias, fusion.dtype))]);
    }
    let attributes = vec![
        ("num_heads".to_owned(), Attribute::Int(fusion.q.heads as i64)),
        ("scale".to_owned(), Attribute::Float(fusion.scale)),
    ];
    let Output { value, joined, .. } = fusion.output;
    let cast = fusion.output.dtype() != fusion.dtype;
    let result = if joined && !cast { value } else { r.value() };
    r.push(Node {
        op_type: "MultiHeadAttention".to_owned(),
        domain: "com.microsoft".to_owned(),
        inputs,
        outputs: vec![Some(result)],
        attributes,
        ..Node::default()
    });
    match (joined, cast) {
        (true, false) => {}
        (true, true) => r.cast_into(result, fusion.output.dtype(), value),
        (false, false) => fusion.output.split(&mut r, result),
        (false, true) => {
            let result = r.cast(result, fusion.output.dtype());
            fusion.output.split(&mut r, result);
        }
    }
    r.finish();
}

/// The mask as the operator takes it: of four axes, of the type of q, with a row for each query.
fn bias_of(r: &mut Replacement<'_>, bias: &Bias, dtype: DType) -> ValueId {
    let mut value = bias.mask;
    if bias.dtype != dtype {
        if dtype == DType::F16 {
            let lowest = r.scalar(DType::F32, LOWEST_F16);
            value = r.op("Clip", &[value, lowest], &[]);
        }
        value = r.cast(value, dtype);
    }
    if bias.rank < 4 {
        let axes = r.ints(&(0..4 - bias.rank as i64).collect::<Vec<_>>());
        value = r.op("Unsqueeze", &[value, axes], &[]);
    }
    if let Some(shape) = bias.stretch {
        let shape = r.ints(&shape.map(|size| i64::try_from(size).unwrap_or(i64::MAX)));
        value = r.op("Expand", &[value, shape], &[]);
    }
    value
}
