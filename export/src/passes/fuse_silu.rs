//! SiLU and the logistic function in the spelling that runtimes know.
//!
//! Before: x / (1 + exp(-x)), x * (1 / (1 + exp(-x))), the same with Reciprocal; Swish of opset 24.
//! After: x * Sigmoid(x), and Sigmoid for the logistic function by itself. ONNX Runtime makes one kernel of Sigmoid and
//! Mul when it loads a graph (com.microsoft QuickGelu with alpha 1), on WebGPU too; so the graph keeps the standard
//! operators, which every other runtime reads as well. Nothing is refused.
//!
//! Sigmoid is the better spelling in f16, where exp(-x) overflows. ONNX Runtime's CPU provider approximates it to 1.5e-7 of
//! its range: next to larger numbers of a tensor that is nothing, but x * Sigmoid(x) by itself has a relative error of 3e-5
//! at x = -8 and no digit that is right below -15.

use super::{Outcome, Pass, PassError, Replacement, Settings, View};
use crate::onnx::{Attribute, DType, Model, Node, NodeId, ValueId};

pub const PASS: Pass = Pass {
    name: "fuse_silu",
    what: "x / (1 + exp(-x)), Swish -> x * Sigmoid(x)",
    why: "four kernels instead of the one that runtimes make of Sigmoid and Mul, and no kernel for Swish",
    run,
};

struct Logistic {
    root: NodeId,
    output: ValueId,
    x: ValueId,
    /// What it multiplies; `None` is nothing.
    times: Option<ValueId>,
    /// A factor of the argument, and the type of its constant.
    alpha: Option<(f32, DType)>,
}

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let view = View::of(model);
    let found: Vec<Logistic> = view
        .graph
        .nodes()
        .filter_map(|(id, node)| quotient(&view, id, node).or_else(|| swish(&view, id, node)))
        .collect();
    for logistic in &found {
        let mut new = Replacement::of(&mut model.graph, logistic.root);
        let argument = match logistic.alpha {
            Some((alpha, dtype)) => {
                let alpha = new.scalar(dtype, alpha);
                new.op("Mul", &[logistic.x, alpha], &[])
            }
            None => logistic.x,
        };
        match logistic.times {
            Some(factor) => {
                let gate = new.op("Sigmoid", &[argument], &[]);
                new.op_into("Mul", &[factor, gate], &[], logistic.output);
            }
            None => new.op_into("Sigmoid", &[argument], &[], logistic.output),
        }
        new.finish();
    }
    Ok(Outcome::applied(found.len()))
}

/// `a / (1 + exp(-x))`, with Div or Reciprocal.
fn quotient(view: &View<'_>, root: NodeId, node: &Node) -> Option<Logistic> {
    let (over, divisor) = match node.op_type.as_str() {
        "Div" if node.is("Div") => (node.input(0), node.input(1)?),
        "Reciprocal" if node.is("Reciprocal") => (None, node.input(0)?),
        _ => return None,
    };
    let (_, sum) = view.made_by(divisor, "Add")?;
    let (power, _) = view.with_scalar(sum).filter(|(_, one)| *one == 1.0)?;
    let (_, exp) = view.made_by(power, "Exp")?;
    let (_, neg) = view.made_by(exp.input(0)?, "Neg")?;
    let x = neg.input(0)?;
    let facts = view.facts();
    let shaped = |value: ValueId| facts.same_shape(value, divisor);
    if !shaped(x) {
        return None; // the one that is added has a rank of its own
    }
    let times = match over {
        Some(over) if facts.scalar(over) == Some(1.0) && facts.rank(over) <= facts.rank(x) => None,
        over => over,
    };
    Some(Logistic { root, output: node.output(0)?, x, times, alpha: None })
}

fn swish(view: &View<'_>, root: NodeId, node: &Node) -> Option<Logistic> {
    let x = node.input(0).filter(|_| node.is("Swish"))?;
    let alpha = match node.attribute("alpha") {
        Some(Attribute::Float(alpha)) if *alpha != 1.0 => {
            let dtype = view.facts().dtype(x).filter(|dtype| matches!(dtype, DType::F32 | DType::F16))?;
            Some((*alpha, dtype))
        }
        _ => None,
    };
    Some(Logistic { root, output: node.output(0)?, x, times: Some(x), alpha })
}
