//! Gathers that take all there is, in order, as a Reshape.
//!
//! Before: GatherND(mask, [[0, 0], [0, 1], ...]), as the dynamo exporter indexes a mask with broadcast ranges; Gather(x,
//! [0, 1, ...]) along the first axis.
//! After: Reshape to the shape of the result. GatherND has no kernel for masks on WebGPU, and a Reshape copies nothing.
//! Nothing is refused: indices that leave something out or swap it are no such gather.

use super::{Outcome, Pass, PassError, Replacement, Settings, View};
use crate::onnx::{DType, Model, Node, NodeId, ValueId};

pub const PASS: Pass = Pass {
    name: "gather_all",
    what: "Gather and GatherND of everything in order -> Reshape",
    why: "it moves nothing, and GatherND of masks runs on the CPU",
    run,
};

/// Indices are read up to this size.
const MAX_INDICES: usize = 1 << 20;

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let view = View::of(model);
    let found: Vec<(NodeId, ValueId, ValueId, Vec<i64>)> = view
        .graph
        .nodes()
        .filter_map(|(id, node)| {
            let shape = taken_whole(&view, node)?;
            Some((id, node.input(0)?, node.output(0)?, shape))
        })
        .collect();
    for (root, x, output, shape) in &found {
        let mut new = Replacement::of(&mut model.graph, *root);
        let shape = new.ints(shape);
        new.op_into("Reshape", &[*x, shape], &[], *output);
        new.finish();
    }
    Ok(Outcome::applied(found.len()))
}

/// The shape of the result, if the node gives all elements in their order.
fn taken_whole(view: &View<'_>, node: &Node) -> Option<Vec<i64>> {
    let facts = view.facts();
    let (x, output) = (node.input(0)?, node.output(0)?);
    let shape = facts.fixed_shape(x)?;
    // An index is a row of `depth` numbers, one for each leading axis.
    let depth = if node.is("Gather") && node.int("axis").unwrap_or(0) == 0 {
        1
    } else if node.is("GatherND") && node.int("batch_dims").unwrap_or(0) == 0 {
        facts.fixed_dim(node.input(1)?, -1)?
    } else {
        return None;
    };
    let leading = shape.get(..depth).filter(|leading| !leading.is_empty() && !leading.contains(&0))?;
    let indices = view.constant(node.input(1)?).filter(|indices| indices.bytes.len() <= MAX_INDICES)?;
    let count = leading.iter().try_fold(1usize, |n, size| n.checked_mul(*size))?;
    if indices.dtype != DType::I64 || indices.bytes.len() != count.checked_mul(8 * depth)? {
        return None;
    }
    let bytes = indices.bytes.read().ok()?;
    let in_order = bytes.chunks_exact(8 * depth).enumerate().all(|(mut place, index)| {
        let mut digits = index.chunks_exact(8).rev().zip(leading.iter().rev());
        digits.all(|(digit, size)| {
            let wanted = place % size;
            place /= size;
            digit.try_into().ok().map(i64::from_le_bytes) == i64::try_from(wanted).ok()
        })
    });
    let result = facts.fixed_shape(output).filter(|shape| !shape.contains(&0))?;
    let result: Option<Vec<i64>> = result.into_iter().map(|size| i64::try_from(size).ok()).collect();
    result.filter(|_| in_order)
}
