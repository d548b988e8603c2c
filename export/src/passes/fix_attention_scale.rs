//! The scale of attention's scores as one constant on the queries.
//!
//! Before: the exporter computes 1/sqrt(d) from a shape at run time (Shape, Slice, Cast, Sqrt, Div, Sqrt), and multiplies
//! q and k by its square root each; or the scores are scaled, which are larger than q.
//! After: MatMul(Mul(q, constant), k).
//!
//! GPUs have computed such chains of scalars wrong, and every multiplication is a pass over memory. In f16 the factor is
//! at most one, so that nothing grows that did not before. Refused: a scale that is not known before the run, one that
//! f16 cannot hold, other types than f32 and f16.

use std::collections::HashSet;

use super::{
    Outcome, Pass, PassError, Replacement, Settings, View,
    attention::{Attention, attentions, scaled},
};
use crate::onnx::{DType, Model, NodeId, ValueId};

pub const PASS: Pass = Pass {
    name: "fix_attention_scale",
    what: "scales of q, k and scores, computed at run time or not -> one constant on q",
    why: "GPUs have got chains of scalars wrong, and two scales are one too many",
    run,
};

const UNKNOWN: &str = "the scale is not known before the run";
const RANGE: &str = "f16 cannot hold the scale as one factor";
const TYPE: &str = "attention is of another type than f32 and f16";

/// The smallest factor that f16 holds with all its digits.
const SMALLEST: f64 = 1.0 / 16384.0;

struct Fix {
    root: NodeId,
    q: ValueId,
    k: ValueId,
    scale: f64,
    dtype: DType,
}

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    let view = View::of(model);
    let (mut fixes, mut roots) = (Vec::new(), HashSet::new());
    for attention in attentions(&view) {
        match fix(&view, &attention) {
            // Several attentions may share their scores.
            Ok(found) => fixes.extend(found.filter(|fix| roots.insert(fix.root))),
            Err(why) => outcome.refuse(view.graph.place(attention.scores.product), why),
        }
    }
    for fix in &fixes {
        let Some(output) = model.graph[fix.root].output(0) else { continue };
        let mut r = Replacement::of(&mut model.graph, fix.root);
        let scale = r.scalar(fix.dtype, fix.scale as f32);
        let q = r.op("Mul", &[fix.q, scale], &[]);
        r.op_into("MatMul", &[q, fix.k], &[], output);
        r.finish();
        outcome.applied += 1;
    }
    Ok(outcome)
}

/// What there is to do, if anything.
fn fix(view: &View<'_>, attention: &Attention) -> Result<Option<Fix>, &'static str> {
    let scores = &attention.scores;
    let (q, of_q, computed) = operand(view, scores.q)?;
    let (k, of_k, _) = operand(view, scores.k)?;
    let of_scores = scores.scaled;
    if of_k.is_none() && of_scores.is_none() && !computed {
        return Ok(None);
    }
    let dtype = view.facts().dtype(q).ok_or(TYPE)?;
    let scale = of_q.unwrap_or(1.0) * of_k.unwrap_or(1.0) * of_scores.map_or(1.0, |(_, scale)| scale);
    match dtype {
        DType::F16 if !(SMALLEST..=1.0).contains(&scale.abs()) => return Err(RANGE),
        DType::F32 if !(scale as f32).is_normal() => return Err(RANGE),
        DType::F16 | DType::F32 => {}
        _ => return Err(TYPE),
    }
    let root = of_scores.map_or(scores.product, |(node, _)| node);
    Ok(Some(Fix { root, q, k, scale, dtype }))
}

/// What an operand of the product scales, by how much, and whether that number is computed at run time.
fn operand(view: &View<'_>, value: ValueId) -> Result<(ValueId, Option<f64>, bool), &'static str> {
    let plain = (value, None, false);
    let Some((_, node)) = view.producer(value) else { return Ok(plain) };
    if let Some((inner, scale)) = scaled(view, node) {
        let number = node.inputs.iter().flatten().find(|input| **input != inner);
        let is_stored = |value: ValueId| {
            view.graph[value].constant.is_some() || view.made_by(value, "Constant").is_some()
        };
        return Ok((inner, Some(scale), number.is_some_and(|number| !is_stored(*number))));
    }
    let one =
        |value: &ValueId| view.facts().fixed_shape(*value).is_some_and(|shape| shape.iter().all(|n| *n == 1));
    let by_one = (node.is("Mul") || node.is("Div")) && node.inputs.iter().flatten().any(one);
    if by_one { Err(UNKNOWN) } else { Ok(plain) }
}
