//! Sequences whose tensors are known one by one, and optional values.

use super::{
    Call, Dims, Elements, Fact, MAX_ELEMENTS, Row,
    call::{agree, axis},
    control::join,
};
use crate::onnx::DType;

pub(super) const SEQUENCE: &[Row] = &[
    ("", "SequenceEmpty", |call| {
        Ok(vec![sequence(call.attr_dtype("dtype").or(Some(DType::F32)), Vec::new())])
    }),
    ("", "SequenceConstruct", construct),
    ("", "SequenceAt", at),
    ("", "SequenceErase", erase),
    ("", "SequenceInsert", insert),
    ("", "SequenceLength", length),
    ("", "SplitToSequence", split),
    ("", "ConcatFromSequence", concat),
    ("", "Optional", |call| Ok(vec![call.input(0).cloned().unwrap_or_default()])),
    ("", "OptionalGetElement", |call| Ok(vec![call.required(0)?.clone()])),
    ("", "OptionalHasElement", |_| Ok(vec![Fact::of(Some(DType::Bool), &[])])),
];

/// Long sequences are not followed.
fn sequence(dtype: Option<DType>, items: Vec<Fact>) -> Fact {
    let items = Some(items).filter(|items| items.len() <= MAX_ELEMENTS);
    Fact { dtype, items, ..Fact::default() }
}

/// Type and sizes of an input that is put into a sequence.
fn tensor(call: &Call<'_>, index: usize) -> Result<Fact, String> {
    match call.required(index)?.items {
        Some(_) => Err(format!("input {index} is a sequence")),
        None => call.same_as(index),
    }
}

fn construct(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let items = (0..call.inputs.len()).map(|index| tensor(call, index)).collect::<Result<_, _>>()?;
    Ok(vec![sequence(call.dtype(0), items)])
}

/// The tensors of a sequence and, if it is known, the place that another input names in it.
fn items<'a>(
    call: &Call<'a>,
    position: usize,
    ends: usize,
) -> Result<(Option<&'a [Fact]>, Option<usize>), String> {
    let items = call.required(0)?.items.as_deref();
    let place = match (items, call.input(position).is_some()) {
        (Some(items), true) => call.int(position).map(|at| axis(at, items.len() + ends)).transpose(),
        (Some(items), false) => Ok((items.len() + ends).checked_sub(1)),
        (None, _) => Ok(None),
    };
    Ok((items, place.map_err(|_| "the position lies outside of the sequence")?))
}

fn at(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    Ok(vec![match items(call, 1, 0)? {
        (Some(items), Some(place)) => items[place].clone(),
        (Some([first, others @ ..]), None) => others.iter().fold(first.clone(), |a, b| join(&a, b)),
        _ => Fact::partial(call.dtype(0), None),
    }])
}

fn erase(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (Some(items), Some(place)) = items(call, 1, 0)? else { return Ok(vec![unfollowed(call)]) };
    Ok(vec![sequence(call.dtype(0), [&items[..place], &items[place + 1..]].concat())])
}

fn insert(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (Some(items), Some(place)) = items(call, 2, 1)? else { return Ok(vec![unfollowed(call)]) };
    let new = tensor(call, 1)?;
    let dtype = call.dtype(0).or(new.dtype);
    Ok(vec![sequence(dtype, [&items[..place], &[new], &items[place..]].concat())])
}

/// A sequence of which only the type of its elements is known.
fn unfollowed(call: &Call<'_>) -> Fact {
    Fact::partial(call.dtype(0), None)
}

fn length(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let count = call.required(0)?.items.as_ref().and_then(|items| i64::try_from(items.len()).ok());
    let elements = count.map(|count| Elements::Ints(vec![Some(count)]));
    Ok(vec![Fact::with_elements(Some(DType::I64), &[], elements)])
}

/// Parts of the stated lengths, or of one length, the last one being what is left. Without a statement every part is
/// one slice, without its axis if `keepdims` is 0.
fn split(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let input = call.same_as(0)?;
    let Some(dims) = &input.shape else { return Ok(vec![unfollowed(call)]) };
    let along = axis(call.attr_int("axis", 0), dims.len())?;
    let Some(size) = dims[along] else { return Ok(vec![unfollowed(call)]) };
    let lengths = match call.input(1) {
        None => parts(size, 1),
        Some(stated) => match (stated.ints(), stated.rank()) {
            (Some(lengths), Some(1)) => stated_parts(&lengths, size)?,
            (Some(length), _) => match usize::try_from(length[0]) {
                Ok(length) if length > 0 => parts(size, length),
                _ => return Err(format!("parts of {}", length[0])),
            },
            (None, _) => None,
        },
    };
    let Some(lengths) = lengths else { return Ok(vec![unfollowed(call)]) };
    let squeezed = call.input(1).is_none() && call.attr_int("keepdims", 1) == 0;
    let part = |length: usize| {
        let mut dims: Dims = dims.clone();
        if squeezed {
            dims.remove(along);
        } else {
            dims[along] = Some(length);
        }
        Fact::partial(input.dtype, Some(dims))
    };
    Ok(vec![sequence(input.dtype, lengths.into_iter().map(part).collect())])
}

/// A size cut into equal parts and a rest; `None` if they are too many to follow.
fn parts(size: usize, length: usize) -> Option<Vec<usize>> {
    let count = size.div_ceil(length);
    (count <= MAX_ELEMENTS).then(|| (0..count).map(|part| length.min(size - part * length)).collect())
}

fn stated_parts(lengths: &[i64], size: usize) -> Result<Option<Vec<usize>>, String> {
    let lengths: Option<Vec<usize>> = lengths.iter().map(|length| usize::try_from(*length).ok()).collect();
    let lengths = lengths.ok_or("a part has a negative length")?;
    let sum = lengths.iter().try_fold(0usize, |sum, length| sum.checked_add(*length));
    if sum != Some(size) {
        return Err(format!("parts {lengths:?} of an axis of {size}"));
    }
    Ok(Some(lengths))
}

fn concat(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let dtype = call.dtype(0);
    let unknown = || Ok(vec![Fact::partial(dtype, None)]);
    let Some([first, others @ ..]) = call.required(0)?.items.as_deref() else { return unknown() };
    let along = call.node.int("axis").ok_or("axis is missing")?;
    let stacks = call.attr_int("new_axis", 0) != 0;
    let Some(mut dims) = first.shape.clone() else { return unknown() };
    let at = axis(along, dims.len() + usize::from(stacks))?;
    for item in others {
        let Some(other) = &item.shape else { return unknown() };
        if other.len() != dims.len() {
            return Err(format!("tensors of rank {} and {}", dims.len(), other.len()));
        }
        for (axis, (dim, other)) in dims.iter_mut().zip(other).enumerate() {
            *dim = match dim.zip(*other) {
                Some((a, b)) if axis == at && !stacks => {
                    Some(a.checked_add(b).ok_or("sizes add up to too many")?)
                }
                _ if axis == at && !stacks => None,
                _ => agree(*dim, *other)?,
            };
        }
    }
    if stacks {
        dims.insert(at, Some(1 + others.len()));
    }
    Ok(vec![Fact::partial(dtype, Some(dims))])
}
