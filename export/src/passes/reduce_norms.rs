//! Norms over short rows as a reduction and products.
//!
//! Before: RMSNormalization in f16 over a last axis of at most 256, such as the norm of each head.
//! After: x' = x / 32, y = x' / max(ReduceL2(x'), sqrt(d * epsilon) / 32) * (sqrt(d) * weight).
//!
//! The operator's kernel launches a workgroup for each row, and attention has dozens of rows for each token: on an H200 it
//! takes three times as long. ReduceL2 squares in f16, so that x is divided first, which changes no norm: values up to
//! 8160 stay finite. The epsilon bounds the divisor instead of being added, which makes a difference only for rows that
//! are all but zero. The runner does this where `viaduct doctor --tune` found it right and faster; the pass is for graphs
//! that other programs run. Refused: what the constants below say.

use super::{Outcome, Pass, PassError, Replacement, Settings};
use crate::onnx::{Attribute, DType, Graph, Model, Node, NodeId, Tensor, ValueId};

pub const PASS: Pass = Pass {
    name: "reduce_norms",
    what: "RMSNormalization over short rows in f16 -> ReduceL2, Div, Mul",
    why: "its kernel takes a workgroup for each of very many short rows",
    run,
};

const LONGEST: usize = 256;
/// Values are divided by this, so that their squares do not leave f16's range.
const DIVISOR: f32 = 32.0;
/// The smallest f16 that is not subnormal, for an epsilon of zero.
const LEAST: f32 = 6.2e-5;

const AXIS: &str = "it is not over the last axis";
const WEIGHT: &str = "its weight is not a row of f16 that is known";
const LONG: &str = "its rows are long enough for the operator";

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    let norms: Vec<_> = model.graph.nodes().filter(|(_, node)| node.is("RMSNormalization")).collect();
    let mut found = Vec::new();
    for (id, node) in norms {
        match ShortNorm::of(&model.graph, id, node) {
            Ok(norm) => found.push(norm),
            Err(reason) => outcome.refuse(&model.graph.place(id), reason),
        }
    }
    outcome.applied = found.len();
    found.iter().for_each(|norm| norm.write_out(&mut model.graph));
    Ok(outcome)
}

/// Writes out the norms that can be; the others stay. How many were.
pub fn reduce_norms(graph: &mut Graph) -> usize {
    let norms = graph.nodes().filter(|(_, node)| node.is("RMSNormalization"));
    let found: Vec<_> = norms.filter_map(|(id, node)| ShortNorm::of(graph, id, node).ok()).collect();
    found.iter().for_each(|norm| norm.write_out(graph));
    found.len()
}

/// A norm over short rows.
struct ShortNorm {
    node: NodeId,
    x: ValueId,
    output: ValueId,
    weight: Vec<f32>,
    epsilon: f32,
}

impl ShortNorm {
    fn of(graph: &Graph, id: NodeId, node: &Node) -> Result<ShortNorm, &'static str> {
        if node.int("axis").is_some_and(|axis| axis != -1) {
            return Err(AXIS);
        }
        let (Some(x), Some(weight), Some(output)) = (node.input(0), node.input(1), node.output(0)) else {
            return Err(WEIGHT);
        };
        let tensor = graph[weight].constant.as_ref().filter(|tensor| tensor.dtype == DType::F16);
        let tensor = tensor.filter(|tensor| tensor.shape.len() == 1).ok_or(WEIGHT)?;
        if tensor.elements() > LONGEST {
            return Err(LONG);
        }
        let weight = tensor.to_f32().ok().flatten().filter(|weight| !weight.is_empty()).ok_or(WEIGHT)?;
        let epsilon = node.float("epsilon").unwrap_or(1e-5);
        Ok(ShortNorm { node: id, x, output, weight, epsilon })
    }

    fn write_out(&self, graph: &mut Graph) {
        let d = self.weight.len() as f32;
        let weight: Vec<f32> = self.weight.iter().map(|weight| weight * d.sqrt()).collect();
        let least = ((d * self.epsilon).sqrt() / DIVISOR).max(LEAST);
        let mut r = Replacement::of(graph, self.node);
        let factor = r.scalar(DType::F16, 1.0 / DIVISOR);
        let x = r.op("Mul", &[self.x, factor], &[]);
        let axes = r.ints(&[-1]);
        let norm = r.op("ReduceL2", &[x, axes], &[("keepdims", Attribute::Int(1))]);
        let least = r.scalar(DType::F16, least);
        let norm = r.op("Max", &[norm, least], &[]);
        let x = r.op("Div", &[x, norm], &[]);
        let weight = r.constant(Tensor::from_f16(&[weight.len()], &weight));
        r.op_into("Mul", &[x, weight], &[], self.output);
        r.finish();
    }
}
