//! Parts of a value along one axis, however a graph cuts them out.

use super::View;
use crate::onnx::{Node, ValueId};

/// Elements `start..end` of `of` along `axis`, every one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub of: ValueId,
    pub axis: usize,
    pub start: usize,
    pub end: usize,
}

/// The part that the value is, if a Slice or a Split made it and its bounds are constant.
pub fn piece(view: &View<'_>, value: ValueId) -> Option<Piece> {
    let (_, node) = view.producer(value)?;
    if node.is("Slice") { sliced(view, node, 1) } else { split(view, node, value) }
}

/// What a Slice along one axis takes with that step; `end` is that of the range.
pub fn sliced(view: &View<'_>, node: &Node, step: i64) -> Option<Piece> {
    let of = node.input(0).filter(|_| node.is("Slice"))?;
    let one = |input: usize, name: &str| match node.input(input) {
        Some(value) => <[i64; 1]>::try_from(view.ints(value)?).ok().map(|[one]| one),
        None => <[i64; 1]>::try_from(node.ints(name)?).ok().map(|[one]| one),
    };
    let axis = match (node.input(3), node.ints("axes")) {
        (None, None) => 0,
        _ => axis_of(view, of, one(3, "axes")?)?,
    };
    let found = if node.input(4).is_some() { one(4, "")? } else { 1 };
    let size = i64::try_from(view.facts().fixed_dim(of, i64::try_from(axis).ok()?)?).ok()?;
    let bound = |value: i64| if value < 0 { value.saturating_add(size).max(0) } else { value.min(size) };
    let (start, end) = (bound(one(1, "starts")?), bound(one(2, "ends")?));
    let range = (usize::try_from(start).ok()?, usize::try_from(end).ok()?);
    (found == step && range.0 < range.1).then_some(Piece { of, axis, start: range.0, end: range.1 })
}

fn split(view: &View<'_>, node: &Node, value: ValueId) -> Option<Piece> {
    let of = node.input(0).filter(|_| node.is("Split"))?;
    let axis = axis_of(view, of, node.int("axis").unwrap_or(0))?;
    let mut start = 0usize;
    for output in &node.outputs {
        let end = start.checked_add(view.facts().fixed_dim((*output)?, i64::try_from(axis).ok()?)?)?;
        if *output == Some(value) {
            return Some(Piece { of, axis, start, end });
        }
        start = end;
    }
    None
}

/// The axis, counted from the front.
pub fn axis_of(view: &View<'_>, value: ValueId, axis: i64) -> Option<usize> {
    let rank = i64::try_from(view.facts().rank(value)?).ok()?;
    let axis = if axis < 0 { axis.checked_add(rank)? } else { axis };
    usize::try_from(axis).ok().filter(|_| axis < rank)
}
