//! Rotary position embedding as one operator.
//!
//! Before: x * cos + rotated(x) * sin with full tables, where rotated(x) negates and swaps the parts of each pair: either
//! neighbours (Reshape [.., d/2, 2], the two lanes, Neg, stack, Reshape) or halves (Slice, Neg, Concat).
//! After: com.microsoft RotaryEmbedding with tables [rows, d/2]: one kernel instead of about eight. Values are [batch,
//! heads, rows, d], or [batch, rows, heads, d] between two Reshapes, as the tables' shape tells.
//!
//! Refused: tables whose columns are not provably equal in pairs, tables that differ from item to item of a batch, values
//! that are not four-dimensional, and a head of a size that is not constant.

use std::collections::HashMap;

use super::{
    Outcome, Pass, PassError, Replacement, Settings, View,
    half_table::{Half, Halver, Made, Pairing},
    pieces::{Piece, axis_of, piece, sliced},
};
use crate::onnx::{Attribute, Model, Node, NodeId, ValueId};

pub const PASS: Pass = Pass {
    name: "fuse_rope",
    what: "x * cos + rotated(x) * sin -> com.microsoft RotaryEmbedding with tables of half the width",
    why: "about eight kernels, each a pass over all queries or keys, instead of one",
    run,
};

/// A rotation to be.
struct Rotation {
    root: NodeId,
    x: ValueId,
    output: ValueId,
    pairing: Pairing,
    /// Heads, if they come after the rows.
    heads: Option<i64>,
    half_width: i64,
    cos: Table,
    sin: Table,
}

/// The half of a full table, and whether it has the two dimensions that the operator wants.
struct Table {
    full: ValueId,
    half: Half,
    flat: bool,
}

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    let view = View::of(model);
    let mut found = Vec::new();
    let mut sources: HashMap<NodeId, Node> = HashMap::new();
    for (root, add) in view.nodes("Add") {
        let Some(pattern) = pattern(&view, add) else { continue };
        match rotation(&view, root, add, &pattern) {
            Ok(rotation) => {
                let mut nodes = Vec::new();
                rotation.cos.half.nodes(&mut nodes);
                rotation.sin.half.nodes(&mut nodes);
                sources.extend(nodes.into_iter().map(|id| (id, view.graph[id].clone())));
                found.push(rotation);
            }
            Err(why) => outcome.refuse(view.graph.place(root), why),
        }
    }
    let mut tables = Tables::default();
    for rotation in &found {
        if rotation.write(Replacement::of(&mut model.graph, rotation.root), &mut tables, &sources) {
            outcome.applied += 1;
        }
    }
    if outcome.applied > 0 {
        model.import("com.microsoft", 1);
    }
    Ok(outcome)
}

/// `x * cos + rotated(x) * sin`.
struct Pattern {
    x: ValueId,
    cos: ValueId,
    sin: ValueId,
    pairing: Pairing,
}

fn pattern(view: &View<'_>, add: &Node) -> Option<Pattern> {
    let factors = |value| view.made_by(value, "Mul").map(|(_, mul)| view.operands(mul)).unwrap_or_default();
    for (straight, turned) in view.operands(add) {
        for (turned, sin) in factors(turned) {
            let Some((source, pairing)) = rotated(view, turned) else { continue };
            let plain =
                factors(straight).into_iter().find(|(x, _)| *x == source || uncast(view, *x) == Some(source));
            if let Some((x, cos)) = plain {
                return Some(Pattern { x, cos, sin, pairing });
            }
        }
    }
    None
}

/// The input of a Cast.
fn uncast(view: &View<'_>, value: ValueId) -> Option<ValueId> {
    view.made_by(value, "Cast")?.1.input(0)
}

/// The value whose pairs are swapped, the new first one negated.
fn rotated(view: &View<'_>, value: ValueId) -> Option<(ValueId, Pairing)> {
    let value = uncast(view, value).unwrap_or(value);
    match view.made_by(value, "Reshape") {
        Some((_, reshape)) => Some((interleaved(view, value, reshape.input(0)?)?, Pairing::Interleaved)),
        None => Some((half_split(view, value)?, Pairing::HalfSplit)),
    }
}

/// The two operands of a Concat along the last axis, the first without its Neg.
fn negated_and_not(view: &View<'_>, value: ValueId) -> Option<(ValueId, ValueId)> {
    let (_, concat) = view.made_by(value, "Concat")?;
    let [Some(first), Some(second)] = concat.inputs[..] else { return None };
    let last = axis_of(view, value, concat.int("axis")?)? + 1 == view.facts().rank(value)?;
    last.then_some((first, second))
}

fn half_split(view: &View<'_>, value: ValueId) -> Option<ValueId> {
    let (negated, first) = negated_and_not(view, value)?;
    let (_, neg) = view.made_by(negated, "Neg")?;
    let (second, first) = (piece(view, neg.input(0)?)?, piece(view, first)?);
    let width = view.facts().fixed_dim(value, -1)?;
    let last = first.axis + 1 == view.facts().rank(value)? && second.axis == first.axis;
    let halves =
        first.start == 0 && first.end == second.start && second.end == width && first.end == width / 2;
    let whole =
        first.of == second.of && view.facts().fixed_dim(first.of, -1) == Some(width) && width % 2 == 0;
    (last && halves && whole).then_some(first.of)
}

fn interleaved(view: &View<'_>, value: ValueId, stack: ValueId) -> Option<ValueId> {
    let (negated, even) = negated_and_not(view, stack)?;
    let odd = match view.made_by(negated, "Neg") {
        Some((_, neg)) => neg.input(0)?,
        None => unsqueezed(view, negated).and_then(|negated| view.made_by(negated, "Neg"))?.1.input(0)?,
    };
    let facts = view.facts();
    let (x, lane_of_odd) = lane(view, odd)?;
    let whole = lane_of_odd == 1 && lane(view, even)? == (x, 0) && facts.same_shape(x, value);
    let stacked = facts.rank(stack)? == facts.rank(x)? + 1 && facts.fixed_dim(stack, -1)? == 2;
    (whole && stacked).then_some(x)
}

/// What a value was before an Unsqueeze or Squeeze of its last axis.
fn unsqueezed(view: &View<'_>, value: ValueId) -> Option<ValueId> {
    let (_, node) = view.producer(value)?;
    (node.is("Unsqueeze") || node.is("Squeeze")).then(|| node.input(0)).flatten()
}

/// The value of which this holds every second element along the last axis, and which: 0 or 1.
fn lane(view: &View<'_>, value: ValueId) -> Option<(ValueId, usize)> {
    let mut value = value;
    for _ in 0..3 {
        if let Some(found) = picked(view, value) {
            return Some(found);
        }
        value = unsqueezed(view, value)?;
    }
    None
}

fn picked(view: &View<'_>, value: ValueId) -> Option<(ValueId, usize)> {
    let facts = view.facts();
    let (_, node) = view.producer(value)?;
    if let Some(every_second) = sliced(view, node, 2) {
        let Piece { of, axis, start, end } = every_second;
        let width = facts.fixed_dim(of, -1)?;
        let last = axis + 1 == facts.rank(of)? && width % 2 == 0;
        return (last && start < 2 && end + 1 >= width).then_some((of, start));
    }
    let (pairs, axis, lane) = if node.is("Gather") {
        let lane = usize::try_from(view.ints(node.input(1)?)?.first().copied()?).ok()?;
        let single = facts.fixed_shape(node.input(1)?)?.iter().all(|n| *n == 1);
        let of = node.input(0)?;
        (of, axis_of(view, of, node.int("axis").unwrap_or(0))?, single.then_some(lane)?)
    } else {
        let Piece { of, axis, start, end } = piece(view, value)?;
        (of, axis, (end == start + 1).then_some(start)?)
    };
    let (_, reshape) = view.made_by(pairs, "Reshape")?;
    let x = reshape.input(0)?;
    let rank = facts.rank(x)?;
    let rows = (0..i64::try_from(rank).ok()? - 1)
        .all(|axis| facts.sizes(x, axis).is_some_and(|sizes| Some(sizes) == facts.sizes(pairs, axis)));
    let pairs_of_x = facts.rank(pairs)? == rank + 1
        && facts.fixed_dim(pairs, -1)? == 2
        && facts.fixed_dim(pairs, -2)?.checked_mul(2)? == facts.fixed_dim(x, -1)?;
    (rows && pairs_of_x && axis == rank && lane < 2).then_some((x, lane))
}

fn rotation(view: &View<'_>, root: NodeId, add: &Node, pattern: &Pattern) -> Result<Rotation, &'static str> {
    let facts = view.facts();
    let Pattern { x, cos, sin, pairing } = *pattern;
    let output = add.output(0).ok_or("the sum has no output")?;
    if facts.rank(x) != Some(4) || !facts.same_shape(x, output) {
        return Err("the value is not four-dimensional");
    }
    let width = facts.fixed_dim(x, -1).filter(|width| *width >= 2 && width % 2 == 0);
    let half_width =
        width.and_then(|width| i64::try_from(width / 2).ok()).ok_or("the size of a head is not constant")?;
    let rows = [cos, sin].map(|table| rows_axis(view, table, x));
    let (Some(axis), true) = (rows[0], rows[0] == rows[1]) else {
        return Err("the tables are not one row of angles per row of the value");
    };
    let heads = facts.fixed_dim(x, 2).and_then(|heads| i64::try_from(heads).ok());
    let heads = match (axis, heads) {
        (1, None) => return Err("the number of heads is not constant"),
        (1, heads) => heads,
        _ => None,
    };
    let table = |full| {
        let unwrapped = without_unit_axes(view, full);
        let mut half = Halver::new(view, pairing).half(unwrapped)?;
        let mut flat = facts.rank(unwrapped) == Some(2);
        if let Half::Constant(tensor) = &mut half {
            let columns = usize::try_from(half_width).ok()?;
            tensor.shape = vec![tensor.elements().checked_div(columns)?, columns];
            flat = true;
        }
        Some(Table { full, half, flat })
    };
    let (Some(cos), Some(sin)) = (table(cos), table(sin)) else {
        return Err("the columns of a table are not provably equal in pairs");
    };
    Ok(Rotation { root, x, output, pairing, heads, half_width, cos, sin })
}

/// The axis of `x` [., ., ., d] that a table has a row for: 1 or 2. Its other axes are 1.
fn rows_axis(view: &View<'_>, table: ValueId, x: ValueId) -> Option<usize> {
    let facts = view.facts();
    let rank = facts.rank(table).filter(|rank| *rank <= 4)?;
    let missing = 4 - rank;
    let size = |axis: usize| match axis.checked_sub(missing) {
        None => Some(1),
        Some(axis) => facts.fixed_dim(table, axis as i64),
    };
    let like_x = |axis: usize| {
        let table_axis = axis.checked_sub(missing)?;
        facts
            .sizes(table, table_axis as i64)
            .filter(|sizes| facts.sizes(x, axis as i64).as_ref() == Some(sizes))
    };
    let whole = facts.fixed_dim(table, -1).is_some() && facts.fixed_dim(table, -1) == facts.fixed_dim(x, -1);
    if !whole || size(0) != Some(1) || facts.dtype(table) != facts.dtype(x) {
        return None;
    }
    [(2, 1), (1, 2)]
        .into_iter()
        .find_map(|(rows, other)| (size(other) == Some(1) && like_x(rows).is_some()).then_some(rows))
}

/// The value before Unsqueezes and Casts to the type it has, as long as that has two dimensions or more.
fn without_unit_axes(view: &View<'_>, table: ValueId) -> ValueId {
    let facts = view.facts();
    let inner = |value: ValueId| {
        let (_, node) = view.producer(value)?;
        let input = node.input(0)?;
        let same = facts.dtype(input) == facts.dtype(value)
            && facts.fixed_dim(input, -1) == facts.fixed_dim(value, -1);
        let plain = node.is("Unsqueeze") || node.is("Cast");
        (plain && same && facts.rank(input)? >= 2).then_some(input)
    };
    std::iter::successors(Some(table), |value| inner(*value)).take(8).last().unwrap_or(table)
}

/// Half tables that were written, by full table.
#[derive(Default)]
struct Tables {
    halves: Made,
    by_full: HashMap<(ValueId, Pairing), ValueId>,
}

impl Rotation {
    fn write(&self, mut new: Replacement<'_>, tables: &mut Tables, sources: &HashMap<NodeId, Node>) -> bool {
        let mut table = |new: &mut Replacement<'_>, table: &Table| {
            let key = (table.full, self.pairing);
            if let Some(made) = tables.by_full.get(&key) {
                return Some(*made);
            }
            let mut half = tables.halves.make(new, &table.half, self.pairing, sources)?;
            if !table.flat {
                let shape = new.ints(&[-1, self.half_width]);
                half = new.op("Reshape", &[half, shape], &[]);
            }
            tables.by_full.insert(key, half);
            Some(half)
        };
        let (Some(cos), Some(sin)) = (table(&mut new, &self.cos), table(&mut new, &self.sin)) else {
            return false;
        };
        let offset = new.ints(&[0]);
        let interleaved = Attribute::Int(i64::from(self.pairing == Pairing::Interleaved));
        match self.heads {
            None => {
                let attributes = [("interleaved", interleaved)];
                let inputs = [self.x, offset, cos, sin];
                new.ops_into("com.microsoft", "RotaryEmbedding", &inputs, &attributes, &[self.output]);
            }
            Some(heads) => {
                let rows = new.ints(&[0, 0, -1]);
                let x = new.op("Reshape", &[self.x, rows], &[]);
                let attributes = [("interleaved", interleaved), ("num_heads", Attribute::Int(heads))];
                let y = new.contrib("RotaryEmbedding", &[x, offset, cos, sin], &attributes);
                let shape = new.ints(&[0, 0, heads, 2 * self.half_width]);
                new.op_into("Reshape", &[y, shape], &[], self.output);
            }
        }
        new.finish();
        true
    }
}
