//! Guards against rows of attention without a number.
//!
//! Before: Where(IsNaN(softmax), 0, softmax), as torch exports attention with a mask. After: softmax.
//!
//! A softmax of finite scores has no NaN, unless a mask of -inf hides every key of a row; and IsNaN runs on the CPU, with
//! all weights of the attention copied there and back. `finite_masks` takes -inf out first. Refused: a guard whose mask is
//! still infinite, or is not known, or whose scores are not understood.

use super::{
    Outcome, Pass, PassError, Replacement, Settings, View,
    attention::{Attention, attentions},
    finite_masks::Origin,
};
use crate::onnx::Model;

pub const PASS: Pass = Pass {
    name: "remove_nan_guard",
    what: "Where(IsNaN(softmax), 0, softmax) -> softmax",
    why: "IsNaN runs on the CPU, and finite masks leave it nothing to find",
    run,
};

const INFINITE: &str = "the mask may hide all keys of a row with -inf";
const OUTSIDE: &str = "it is not known whether the mask may hide all keys of a row";
const SCORES: &str = "what goes into the softmax is not understood";

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    let view = View::of(model);
    let mut guards = Vec::new();
    let attentions: Vec<Attention> = attentions(&view);
    for attention in &attentions {
        let Some(guard) = attention.guard else { continue };
        match inert(&view, attention) {
            Ok(()) => guards.push(guard),
            Err(why) => outcome.refuse(view.graph.place(guard.choose), why),
        }
    }
    let known = |weights| attentions.iter().any(|a| a.guard.is_some_and(|guard| guard.weights == weights));
    for (id, node) in view.nodes("IsNaN") {
        let weights = node.input(0).filter(|weights| view.made_by(*weights, "Softmax").is_some());
        if weights.is_some_and(|weights| !known(weights)) {
            outcome.refuse(view.graph.place(id), SCORES);
        }
    }
    let captured = model.graph.captured();
    for guard in guards {
        if model.graph.outputs.contains(&guard.output) || captured.contains(&guard.output) {
            let mut r = Replacement::of(&mut model.graph, guard.choose);
            r.op_into("Identity", &[guard.weights], &[], guard.output);
            r.finish();
        } else {
            model.graph.replace_uses(guard.output, guard.weights);
        }
        outcome.applied += 1;
    }
    Ok(outcome)
}

/// Whether the guard finds nothing.
fn inert(view: &View<'_>, attention: &Attention) -> Result<(), &'static str> {
    for mask in &attention.scores.masks {
        let origin = Origin::of(view, mask);
        if origin.may_hide_rows() {
            return Err(INFINITE);
        }
        if origin.unknown {
            return Err(OUTSIDE);
        }
    }
    Ok(())
}
