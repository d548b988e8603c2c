//! Slices that together are the whole of a value, as one Split.
//!
//! Before: Slice(x, 0..a), Slice(x, a..b), ... along one axis, covering it: `chunk` as the legacy exporter writes it.
//! After: one Split. It reads the value once where the Slices each run a kernel.
//!
//! Refused: more pieces than the shader of the smallest device writes in one go.

use std::collections::BTreeMap;

use super::{Outcome, Pass, PassError, Replacement, Settings, View, pieces::sliced};
use crate::onnx::{Attribute, Model, NodeId, ValueId};

pub const PASS: Pass = Pass {
    name: "merge_slices",
    what: "Slices that together are the whole of a value -> one Split",
    why: "each Slice is a kernel of its own",
    run,
};

/// Outputs of a Split: the smallest devices bind eight buffers to a shader, and one is its input.
pub const MAX_PIECES: usize = 7;

/// Slices of one value along one axis, in the order of their places: start, end, node, output.
pub struct Cut {
    pub of: ValueId,
    pub axis: usize,
    pub pieces: Vec<(usize, usize, NodeId, ValueId)>,
}

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    let view = View::of(model);
    let mut found = cuts(&view);
    found.retain(|cut| {
        let fits = cut.pieces.len() <= MAX_PIECES;
        if !fits {
            outcome
                .refuse(&view.graph[cut.of].name, "more pieces than a shader of the smallest devices writes");
        }
        fits
    });
    for cut in &found {
        merge(model, cut);
        outcome.applied += 1;
    }
    Ok(outcome)
}

/// All values that Slices cut up without a gap. Sizes of a Split are an input from opset 13 on.
pub fn cuts(view: &View<'_>) -> Vec<Cut> {
    let mut by_value: BTreeMap<(ValueId, usize), Vec<_>> = BTreeMap::new();
    let slices = if view.opset() >= 13 { view.nodes("Slice").collect() } else { Vec::new() };
    for (id, node) in slices {
        let (Some(piece), Some(output)) = (sliced(view, node, 1), node.output(0)) else { continue };
        by_value.entry((piece.of, piece.axis)).or_default().push((piece.start, piece.end, id, output));
    }
    let covers = |of: ValueId, axis: usize, pieces: &[(usize, usize, NodeId, ValueId)]| {
        let mut end = 0;
        let joined = pieces.iter().all(|piece| std::mem::replace(&mut end, piece.1) == piece.0);
        joined && pieces.len() > 1 && view.facts().fixed_dim(of, axis as i64) == Some(end)
    };
    let cuts = by_value.into_iter().filter_map(|((of, axis), mut pieces)| {
        pieces.sort();
        covers(of, axis, &pieces).then_some(Cut { of, axis, pieces })
    });
    cuts.collect()
}

/// Puts a Split in the place of the first Slice, and takes the others away.
pub fn merge(model: &mut Model, cut: &Cut) {
    let places: std::collections::HashSet<NodeId> = cut.pieces.iter().map(|piece| piece.2).collect();
    let Some(first) = model.graph.nodes().map(|(id, _)| id).find(|id| places.contains(id)) else { return };
    let mut new = Replacement::of(&mut model.graph, first);
    let sizes: Vec<i64> = cut.pieces.iter().map(|piece| (piece.1 - piece.0) as i64).collect();
    let sizes = new.ints(&sizes);
    let outputs: Vec<ValueId> = cut.pieces.iter().map(|piece| piece.3).collect();
    new.ops_into("", "Split", &[cut.of, sizes], &[("axis", Attribute::Int(cut.axis as i64))], &outputs);
    new.finish();
    model.graph.remove_nodes(&places);
}
