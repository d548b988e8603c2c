//! Branches and loops. What differs between branches or from one turn to the next is not known.

use super::{Call, Dims, Elements, Fact, Row, call::axis};
use crate::onnx::{DType, Graph};

pub(super) const CONTROL: &[Row] = &[("", "If", branch), ("", "Loop", repeat), ("", "Scan", scan)];

/// A branch that contradicts itself under the given sizes cannot be the one that is taken, unless both do.
fn branch(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (then, other) = (call.attr_graph("then_branch")?, call.attr_graph("else_branch")?);
    if then.outputs.len() != other.outputs.len() {
        return Err(format!("branches with {} and {} outputs", then.outputs.len(), other.outputs.len()));
    }
    match call.int(0) {
        Some(0) => call.body(other, &[]),
        Some(_) => call.body(then, &[]),
        None => match (call.body(then, &[]), call.body(other, &[])) {
            (Ok(a), Ok(b)) => Ok(join_all(&a, &b)),
            (a, b) => a.or(b),
        },
    }
}

/// Inputs: the number of turns, the condition, then the carried values. The body takes the turn, the condition and
/// the carried values, and gives the condition, the carried values and a slice of each scanned output.
fn repeat(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let body = call.attr_graph("body")?;
    let initial: Vec<Fact> = given(call, 2..call.inputs.len());
    let known = |input: usize| call.input(input).is_some().then(|| call.int(input));
    let turn = [Fact::of(Some(DType::I64), &[]), holding()];
    let never = known(1) == Some(Some(0)) || known(0).flatten().is_some_and(|turns| turns <= 0);
    if never {
        // The body still tells type and rank of what is scanned.
        let outputs = call.body(body, &[&turn[..], &initial].concat()).unwrap_or_default();
        let slices = outputs.get(1 + initial.len()..).unwrap_or_default();
        let scanned: Vec<Fact> =
            slices.iter().map(|slice| stacked(slice, 0, Some(0))).collect::<Result<_, _>>()?;
        return Ok([initial, scanned].concat());
    }
    if let Some(finished) = unrolled(call, body, &initial)? {
        return Ok(finished);
    }
    let (carried, outputs) = settle(call, body, &turn, initial, &[], 1)?;
    // The stated number of turns is run only if the condition holds at the start and after every turn.
    let holds = |condition: Option<Option<i64>>| condition.is_none_or(|value| value.is_some_and(|v| v != 0));
    let stays = outputs.first().and_then(Fact::ints).is_some_and(|condition| condition == [1]);
    let turns =
        known(0).flatten().filter(|_| holds(known(1)) && stays).and_then(|turns| usize::try_from(turns).ok());
    let slices = outputs.get(1 + carried.len()..).unwrap_or_default();
    let scanned: Vec<Fact> = slices.iter().map(|slice| stacked(slice, 0, turns)).collect::<Result<_, _>>()?;
    Ok([carried, scanned].concat())
}

/// Follows a loop turn by turn, if it is known of every turn whether it is run, and if they are few.
fn unrolled(call: &Call<'_>, body: &Graph, initial: &[Fact]) -> Result<Option<Vec<Fact>>, String> {
    const MAX_TURNS: i64 = 64;
    let stated = call.input(1).is_some();
    let mut holds = if stated { call.int(1) } else { Some(1) };
    let limit = if call.input(0).is_some() { call.int(0) } else { Some(i64::MAX) };
    let Some(limit) = limit else { return Ok(None) };
    let (mut carried, mut scanned) = (initial.to_vec(), Vec::new());
    for turn in 0..=MAX_TURNS {
        if turn >= limit || (stated && holds == Some(0)) {
            return Ok(Some([carried, stack(&scanned)?].concat()));
        }
        // Without a condition at the start, implementations differ in whether the body's counts.
        if turn == MAX_TURNS || holds.is_none_or(|holds| holds == 0) {
            break;
        }
        let number = Some(Elements::Ints(vec![Some(turn)]));
        let lead = [Fact::with_elements(Some(DType::I64), &[], number), holding()];
        let mut outputs = call.body(body, &[&lead[..], &carried].concat())?;
        if outputs.len() <= carried.len() {
            return Err(format!("{} values are carried, the body gives fewer", carried.len()));
        }
        scanned.push(outputs.split_off(1 + carried.len()));
        holds = outputs[0].ints().and_then(|holds| holds.first().copied());
        carried = outputs.split_off(1);
    }
    Ok(None)
}

/// The condition as a body sees it, which would not run otherwise.
fn holding() -> Fact {
    Fact::with_elements(Some(DType::Bool), &[], Some(Elements::Ints(vec![Some(1)])))
}

/// The slices of each turn, along a new first axis.
fn stack(turns: &[Vec<Fact>]) -> Result<Vec<Fact>, String> {
    let joined = turns.iter().cloned().reduce(|a, b| join_all(&a, &b)).unwrap_or_default();
    joined.iter().map(|slice| stacked(slice, 0, Some(turns.len()))).collect()
}

/// Inputs: the carried values, then the scanned ones, of which the body takes a slice each.
fn scan(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    if call.opset < 9 {
        // The first version has a batch axis and a length per sequence.
        return Ok(Vec::new());
    }
    let body = call.attr_graph("body")?;
    let scanned = usize::try_from(call.attr_int("num_scan_inputs", 0)).ok();
    let carried = scanned.and_then(|scanned| call.inputs.len().checked_sub(scanned));
    let carried =
        carried.ok_or_else(|| format!("{} inputs, of which more are scanned", call.inputs.len()))?;
    let (mut turns, mut slices) = (None, Vec::new());
    for (index, mut input) in given(call, carried..call.inputs.len()).into_iter().enumerate() {
        if let Some(dims) = &mut input.shape {
            let at = axis(listed(call, "scan_input_axes", index), dims.len())?;
            let length = dims.remove(at);
            turns =
                super::call::agree(turns, length).map_err(|problem| format!("scanned axes: {problem}"))?;
        }
        slices.push(Fact::partial(input.dtype, input.shape));
    }
    let (carried, outputs) = settle(call, body, &[], given(call, 0..carried), &slices, 0)?;
    let slices = outputs.get(carried.len()..).unwrap_or_default().iter().enumerate();
    let scanned = slices.map(|(index, slice)| stacked(slice, listed(call, "scan_output_axes", index), turns));
    let scanned: Vec<Fact> = scanned.collect::<Result<_, _>>()?;
    Ok([carried, scanned].concat())
}

/// An entry of a list of axes, 0 where it is absent.
fn listed(call: &Call<'_>, name: &str, index: usize) -> i64 {
    call.attr_ints(name).and_then(|axes| axes.get(index).copied()).unwrap_or(0)
}

fn given(call: &Call<'_>, range: std::ops::Range<usize>) -> Vec<Fact> {
    range.map(|index| call.input(index).cloned().unwrap_or_default()).collect()
}

/// Runs a body until what it carries no longer changes: each turn forgets what differs from the turn before, so there
/// is an end. Returns the carried values, and all outputs of the body, of which `lead` come before the carried ones.
fn settle(
    call: &Call<'_>,
    body: &Graph,
    before: &[Fact],
    initial: Vec<Fact>,
    after: &[Fact],
    lead: usize,
) -> Result<(Vec<Fact>, Vec<Fact>), String> {
    let mut carried = initial;
    loop {
        let outputs = call.body(body, &[before, &carried, after].concat())?;
        let next = outputs.get(lead..lead + carried.len());
        let next =
            next.ok_or_else(|| format!("{} values are carried, the body gives fewer", carried.len()))?;
        let joined = join_all(&carried, next);
        if joined == carried {
            return Ok((carried, outputs));
        }
        carried = joined;
    }
}

/// Slices of which there are `count`, along a new axis.
fn stacked(slice: &Fact, at: i64, count: Option<usize>) -> Result<Fact, String> {
    let mut shape = slice.shape.clone();
    if let Some(dims) = &mut shape {
        dims.insert(axis(at, dims.len() + 1)?, count);
    }
    Ok(Fact::partial(slice.dtype, shape))
}

fn join_all(a: &[Fact], b: &[Fact]) -> Vec<Fact> {
    a.iter().zip(b).map(|(a, b)| join(a, b)).collect()
}

/// What is known about a value that is one or the other.
pub(super) fn join(a: &Fact, b: &Fact) -> Fact {
    let shape = a.shape.as_ref().zip(b.shape.as_ref()).filter(|(a, b)| a.len() == b.len());
    let shape: Option<Dims> =
        shape.map(|(a, b)| a.iter().zip(b).map(|(a, b)| a.filter(|_| a == b)).collect());
    let full = shape.as_ref().is_some_and(|dims| !dims.contains(&None));
    let elements = a.elements.as_ref().zip(b.elements.as_ref()).filter(|_| full);
    let items = a.items.as_ref().zip(b.items.as_ref()).filter(|(a, b)| a.len() == b.len());
    Fact {
        dtype: a.dtype.filter(|_| a.dtype == b.dtype),
        shape,
        elements: elements.and_then(|(a, b)| join_elements(a, b)),
        items: items.map(|(a, b)| join_all(a, b)),
    }
}

fn join_elements(a: &Elements, b: &Elements) -> Option<Elements> {
    match (a, b) {
        (Elements::Ints(a), Elements::Ints(b)) => Some(Elements::Ints(in_both(a, b))),
        (Elements::Floats(a), Elements::Floats(b)) => Some(Elements::Floats(in_both(a, b))),
        _ => None,
    }
}

fn in_both<T: Copy + PartialEq>(a: &[Option<T>], b: &[Option<T>]) -> Vec<Option<T>> {
    a.iter().zip(b).map(|(a, b)| a.filter(|_| a == b)).collect()
}
