//! Attention operators written out.
//!
//! Before: com.microsoft MultiHeadAttention over q, k and v [1, rows, heads * d], with or without attention_bias.
//! After: softmax(scale * q k^T + bias) v in MatMul and Softmax, whole or in slices of the query rows, so that scores
//! [heads, rows, rows] never exist as a whole.
//!
//! The operator is wrong on some adapters, and slow on others. The runner writes bundles' attention out with the code
//! below, as the device needs it; the pass is for graphs that other programs run. Nothing is done unless the written form
//! is asked for. Refused: what the constants below say.

use std::ops::Range;

use super::{AttentionForm, Outcome, Pass, PassError, Replacement, Settings, View};
use crate::onnx::{Attribute, DType, Graph, Model, Node, NodeId, ValueId};

pub const PASS: Pass = Pass {
    name: "decompose_attention",
    what: "MultiHeadAttention -> MatMul, Softmax, MatMul, in slices if wanted",
    why: "the operator is wrong on some adapters and slow on others",
    run,
};

/// Slices of one attention. Each is a handful of nodes; no picture that a device can hold needs as many.
pub const MAX_SLICES: usize = 1 << 12;
/// Operands of one Concat. Each takes a storage buffer, and adapters have as few as ten.
const CONCAT_OPERANDS: usize = 8;

const INPUTS: &str =
    "only q, k, v, attention_bias and one output are supported: no projection bias, padding mask or cache";
const HEADS: &str = "num_heads is missing";
const CAUSAL: &str = "it is causal";
const RANK: &str = "q, k and v are not [batch, rows, columns]";
const TYPE: &str = "the element type of q is not known to be f32 or f16";
const WIDTH: &str = "the width of a head is not known";
const ROWS: &str = "slices need a fixed number of rows";
const SLICES: &str = "its sizes are absurd: thousands of slices would be needed";
const GROUPED: &str = "GroupQueryAttention masks by lengths that only the run knows";

/// A com.microsoft MultiHeadAttention that can be written out.
#[derive(Clone, Debug)]
pub struct MultiHead {
    pub q: ValueId,
    pub k: ValueId,
    pub v: ValueId,
    /// [1, 1 or heads, rows, keys], added to the scores.
    pub bias: Option<ValueId>,
    pub output: ValueId,
    pub heads: i64,
    scale: Option<f32>,
}

/// How an attention is written out.
#[derive(Clone, Debug)]
pub struct Written {
    /// f32 or f16.
    pub dtype: DType,
    pub scale: f32,
    /// The query rows of each slice; at most one to leave them whole.
    pub slices: Vec<Range<usize>>,
}

impl MultiHead {
    /// The node, if it has no more than what can be written out. `Err` says what it has.
    pub fn of(node: &Node) -> Result<MultiHead, &'static str> {
        let [Some(q), Some(k), Some(v)] = [0, 1, 2].map(|i| node.input(i)) else { return Err(INPUTS) };
        let extra = node.inputs.iter().enumerate().any(|(i, input)| i > 2 && i != 5 && input.is_some());
        let (Some(output), 1) = (node.output(0), node.outputs.iter().flatten().count()) else {
            return Err(INPUTS);
        };
        if extra {
            return Err(INPUTS);
        }
        if node.int("unidirectional").is_some_and(|causal| causal != 0) {
            return Err(CAUSAL);
        }
        let heads = node.int("num_heads").filter(|heads| *heads > 0).ok_or(HEADS)?;
        let scale = node.float("scale").filter(|scale| *scale != 0.0);
        Ok(MultiHead { q, k, v, bias: node.input(5), output, heads, scale })
    }

    /// The scale, which follows from the columns of q unless it is stated.
    pub fn scale(&self, columns: impl FnOnce() -> Option<usize>) -> Option<f32> {
        self.scale.or_else(|| Some(1.0 / (columns()? as f32 / self.heads as f32).sqrt()))
    }

    /// Replaces the node by softmax(scale * q k^T + bias) v.
    pub fn write_out(&self, graph: &mut Graph, node: NodeId, written: &Written) {
        let mut r = Replacement::of(graph, node);
        let scale = r.scalar(written.dtype, written.scale);
        let q = r.op("Mul", &[self.q, scale], &[]);
        let q = split(&mut r, q, self.heads, [0, 2, 1, 3]);
        let k = split(&mut r, self.k, self.heads, [0, 2, 3, 1]);
        let v = split(&mut r, self.v, self.heads, [0, 2, 1, 3]);
        let mut parts = Vec::new();
        match &written.slices[..] {
            [] | [_] => parts.push(attend(&mut r, q, k, v, self.bias)),
            slices => {
                for slice in slices {
                    let q = rows(&mut r, q, slice);
                    let bias = self.bias.map(|bias| rows(&mut r, bias, slice));
                    parts.push(attend(&mut r, q, k, v, bias));
                }
            }
        }
        let y = concat_rows(&mut r, parts);
        let y = r.op("Transpose", &[y], &[("perm", Attribute::Ints(vec![0, 2, 1, 3]))]);
        let shape = r.ints(&[0, 0, -1]);
        r.op_into("Reshape", &[y, shape], &[], self.output);
        r.finish();
    }
}

impl Written {
    /// Ranges of at most `step` rows that cover all of them.
    pub fn slices(rows: usize, step: usize) -> Vec<Range<usize>> {
        let step = step.max(1);
        (0..rows).step_by(step).map(|start| start..rows.min(start.saturating_add(step))).collect()
    }
}

fn split(r: &mut Replacement<'_>, x: ValueId, heads: i64, perm: [i64; 4]) -> ValueId {
    let shape = r.ints(&[0, 0, heads, -1]);
    let x = r.op("Reshape", &[x, shape], &[]);
    r.op("Transpose", &[x], &[("perm", Attribute::Ints(perm.to_vec()))])
}

/// Rows of a value [1, heads, rows, d].
fn rows(r: &mut Replacement<'_>, x: ValueId, range: &Range<usize>) -> ValueId {
    let bounds = [range.start as i64, range.end as i64, 2].map(|number| r.ints(&[number]));
    r.op("Slice", &[x, bounds[0], bounds[1], bounds[2]], &[])
}

fn attend(r: &mut Replacement<'_>, q: ValueId, k: ValueId, v: ValueId, bias: Option<ValueId>) -> ValueId {
    let mut scores = r.op("MatMul", &[q, k], &[]);
    if let Some(bias) = bias {
        scores = r.op("Add", &[scores, bias], &[]);
    }
    let weights = r.op("Softmax", &[scores], &[("axis", Attribute::Int(-1))]);
    r.op("MatMul", &[weights, v], &[])
}

/// One value of all rows, by a tree of Concats. `parts` has at least one.
fn concat_rows(r: &mut Replacement<'_>, mut parts: Vec<ValueId>) -> ValueId {
    while parts.len() > 1 {
        let join = |part: &[ValueId]| match part {
            [one] => *one,
            several => r.op("Concat", several, &[("axis", Attribute::Int(2))]),
        };
        parts = parts.chunks(CONCAT_OPERANDS).map(join).collect();
    }
    parts[0]
}

fn run(model: &mut Model, settings: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    let AttentionForm::Written { slices } = settings.attention else { return Ok(outcome) };
    let view = View::of(model);
    let mut found = Vec::new();
    for (id, node) in view.graph.nodes() {
        let plan = if node.is_contrib("MultiHeadAttention") {
            MultiHead::of(node).and_then(|attention| Ok((id, written(&view, &attention, slices)?, attention)))
        } else if node.is_contrib("GroupQueryAttention") {
            Err(GROUPED)
        } else {
            continue;
        };
        match plan {
            Ok(plan) => found.push(plan),
            Err(why) => outcome.refuse(view.graph.place(id), why),
        }
    }
    for (id, written, attention) in &found {
        attention.write_out(&mut model.graph, *id, written);
        outcome.applied += 1;
    }
    Ok(outcome)
}

fn written(view: &View<'_>, attention: &MultiHead, slices: usize) -> Result<Written, &'static str> {
    let facts = view.facts();
    if [attention.q, attention.k, attention.v].iter().any(|value| facts.rank(*value) != Some(3)) {
        return Err(RANK);
    }
    let dtype = facts.dtype(attention.q).filter(|t| matches!(t, DType::F32 | DType::F16)).ok_or(TYPE)?;
    let scale = attention.scale(|| facts.fixed_dim(attention.q, 2)).ok_or(WIDTH)?;
    let slices = match slices {
        0 | 1 => Vec::new(),
        MAX_SLICES.. => return Err(SLICES),
        count => {
            let rows = facts.fixed_dim(attention.q, 1).ok_or(ROWS)?;
            Written::slices(rows, rows.div_ceil(count))
        }
    };
    Ok(Written { dtype, scale, slices })
}
