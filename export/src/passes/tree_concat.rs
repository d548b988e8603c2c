//! Concat and Split with more operands than a shader may bind buffers.
//!
//! Before: a Concat of 20 values, a Split into 20. After: Concats of at most 8, and of their results; Splits into at most
//! 8 groups, and of each group. WebGPU promises 8 storage buffers per shader, and adapters have as few as 10.
//!
//! Refused: a Split whose parts' sizes are computed at run time or follow from a size that is not known.

use super::{Outcome, Pass, PassError, Replacement, Settings, View};
use crate::onnx::{Attribute, Model, NodeId, ValueId};

/// Operands besides the one that all of them come from or go to.
const MOST: usize = 8;

pub const PASS: Pass = Pass {
    name: "tree_concat",
    what: "Concat of, or Split into, more than 8 -> a tree of Concats or Splits of at most 8",
    why: "each operand takes a storage buffer, and adapters have as few as ten: the node fails at run time",
    run,
};

enum Wide {
    Concat { inputs: Vec<ValueId>, output: ValueId },
    Split { input: ValueId, outputs: Vec<ValueId>, sizes: Vec<i64> },
}

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    for (id, axis, wide) in wide(&View::of(model), &mut outcome) {
        let opset = model.opset("").unwrap_or(0);
        let mut new = Replacement::of(&mut model.graph, id);
        match wide {
            Wide::Concat { inputs, output } => concat(&mut new, axis, inputs, output),
            Wide::Split { input, outputs, sizes } => split(&mut new, axis, opset, input, &outputs, &sizes),
        }
        new.finish();
        outcome.applied += 1;
    }
    Ok(outcome)
}

fn wide(view: &View<'_>, outcome: &mut Outcome) -> Vec<(NodeId, i64, Wide)> {
    let mut found = Vec::new();
    for (id, node) in view.graph.nodes() {
        let (inputs, outputs): (Option<Vec<_>>, Option<Vec<_>>) =
            (node.inputs.iter().copied().collect(), node.outputs.iter().copied().collect());
        let (Some(inputs), Some(outputs)) = (inputs, outputs) else { continue };
        if let (true, Some(axis), [output]) = (node.is("Concat"), node.int("axis"), &outputs[..]) {
            if inputs.len() > MOST {
                found.push((id, axis, Wide::Concat { inputs, output: *output }));
            }
        } else if let (true, [input, ..]) = (node.is("Split") && outputs.len() > MOST, &inputs[..]) {
            let axis = node.int("axis").unwrap_or(0);
            let given = inputs.get(1).and_then(|sizes| view.ints(*sizes));
            let given = given.or_else(|| node.ints("split").map(<[i64]>::to_vec));
            let fixed = |output: &ValueId| view.facts().fixed_dim(*output, axis).map(|size| size as i64);
            let sizes = given.or_else(|| outputs.iter().map(fixed).collect());
            match sizes.filter(|sizes| sizes.len() == outputs.len() && sizes.iter().all(|size| *size >= 0)) {
                Some(sizes) => found.push((id, axis, Wide::Split { input: *input, outputs, sizes })),
                None => outcome.refuse(view.graph.place(id), "the sizes of its parts are not known"),
            }
        }
    }
    found
}

fn concat(new: &mut Replacement<'_>, axis: i64, mut parts: Vec<ValueId>, output: ValueId) {
    let axis = [("axis", Attribute::Int(axis))];
    while parts.len() > MOST {
        let join = |part: &[ValueId]| match part {
            [one] => *one,
            several => new.op("Concat", several, &axis),
        };
        parts = parts.chunks(MOST).map(join).collect();
    }
    new.op_into("Concat", &parts, &axis, output);
}

fn split(
    new: &mut Replacement<'_>,
    axis: i64,
    opset: i64,
    input: ValueId,
    outputs: &[ValueId],
    sizes: &[i64],
) {
    if outputs.len() <= MOST {
        return split_once(new, axis, opset, input, outputs, sizes);
    }
    let most = outputs.len().div_ceil(MOST);
    let groups: Vec<i64> = sizes
        .chunks(most)
        .map(|group| group.iter().fold(0, |sum: i64, size| sum.saturating_add(*size)))
        .collect();
    // A group of one is that output itself.
    let parts: Vec<ValueId> = outputs
        .chunks(most)
        .map(|group| match group {
            [one] => *one,
            _ => new.value(),
        })
        .collect();
    split_once(new, axis, opset, input, &parts, &groups);
    for ((part, outputs), sizes) in parts.iter().zip(outputs.chunks(most)).zip(sizes.chunks(most)) {
        if outputs.len() > 1 {
            split(new, axis, opset, *part, outputs, sizes);
        }
    }
}

fn split_once(
    new: &mut Replacement<'_>,
    axis: i64,
    opset: i64,
    input: ValueId,
    outputs: &[ValueId],
    sizes: &[i64],
) {
    let axis = ("axis", Attribute::Int(axis));
    // The sizes became an input with version 13.
    if opset >= 13 {
        let sizes = new.ints(sizes);
        new.ops_into("", "Split", &[input, sizes], &[axis], outputs);
    } else {
        new.ops_into("", "Split", &[input], &[axis, ("split", Attribute::Ints(sizes.to_vec()))], outputs);
    }
}
