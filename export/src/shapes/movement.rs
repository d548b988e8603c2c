//! Operators that move elements without changing them: other shapes, parts, and copies of a tensor.

use super::{
    Call, Dims, Elements, Fact, Row,
    broadcast::{broadcast, rearranged, stretched},
    call::{Setting, agree, axes, axis, product, unknown_dims},
    elementwise::{same, same_type},
};
use crate::onnx::DType;

pub(super) const MOVEMENT: &[Row] = &[
    ("", "Concat", concat),
    ("", "DepthToSpace", depth_to_space),
    ("", "Expand", expand),
    ("", "Flatten", flatten),
    ("", "Identity", identity),
    ("", "Pad", pad),
    ("", "Reshape", reshape),
    ("", "ReverseSequence", same),
    ("", "Shape", shape),
    ("", "Size", size),
    ("", "SpaceToDepth", space_to_depth),
    ("", "Split", split),
    ("", "Squeeze", squeeze),
    ("", "Tile", tile),
    ("", "Transpose", transpose),
    ("", "Trilu", same),
    ("", "Unsqueeze", unsqueeze),
];

fn identity(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    Ok(vec![call.required(0)?.clone()])
}

fn number(size: &Option<usize>) -> Option<i64> {
    i64::try_from((*size)?).ok()
}

/// Since version 15 a range of axes can be asked for; it is clamped.
fn shape(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let Some(dims) = &call.required(0)?.shape else {
        return Ok(vec![Fact::partial(Some(DType::I64), Some(unknown_dims(1)))]);
    };
    let rank = dims.len();
    let clamp = |at: i64| {
        let counted = if at < 0 { at.saturating_add_unsigned(rank as u64) } else { at };
        usize::try_from(counted).unwrap_or(0).min(rank)
    };
    let (start, end) = (clamp(call.attr_int("start", 0)), call.node.int("end").map_or(rank, clamp));
    let sizes: Vec<_> = dims[start..end.max(start)].iter().map(number).collect();
    Ok(vec![Fact::with_elements(Some(DType::I64), &[sizes.len()], Some(Elements::Ints(sizes)))])
}

fn size(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let count = call.required(0)?.shape.as_deref().map(product).transpose()?.flatten();
    Ok(vec![Fact::with_elements(Some(DType::I64), &[], Some(Elements::Ints(vec![number(&count)])))])
}

/// The same elements under another shape.
fn reshaped(input: &Fact, shape: Option<Dims>) -> Vec<Fact> {
    let output = Fact::partial(input.dtype, shape);
    vec![match output.full_shape() {
        Some(shape) => Fact::with_elements(input.dtype, &shape, input.elements.clone()),
        None => output,
    }]
}

/// The sizes that an input asks for, as far as they are known; `None` if not even their number is.
fn wanted(call: &Call<'_>, index: usize) -> Result<Option<Vec<Option<i64>>>, String> {
    let input = call.required(index)?;
    if let Some(values) = input.partial_ints() {
        return Ok(Some(values.to_vec()));
    }
    match input.shape.as_deref() {
        Some([Some(count)]) if *count <= super::MAX_ELEMENTS => Ok(Some(vec![None; *count])),
        Some([_]) | None => Ok(None),
        Some(dims) => Err(format!("input {index} has rank {}, where a list is asked for", dims.len())),
    }
}

/// The shape is an attribute before version 5.
fn reshape(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let input = call.required(0)?;
    let wanted = match call.attr_ints("shape").filter(|_| call.opset < 5) {
        Some(shape) => Some(shape.iter().copied().map(Some).collect()),
        None => wanted(call, 1)?,
    };
    let Some(wanted) = wanted else { return Ok(vec![Fact::partial(input.dtype, None)]) };
    let zero_copies = call.attr_int("allowzero", 0) == 0;
    let shape = new_shape(input.shape.as_deref(), &wanted, zero_copies)?;
    Ok(reshaped(input, Some(shape)))
}

/// `[1, 88, ?, -1]`
fn in_words(wanted: &[Option<i64>]) -> String {
    let sizes: Vec<String> =
        wanted.iter().map(|size| size.map_or("?".to_owned(), |size| size.to_string())).collect();
    format!("[{}]", sizes.join(", "))
}

/// 0 copies the input's size at the same place; -1, once, takes what is left.
fn new_shape(
    input: Option<&[Option<usize>]>,
    wanted: &[Option<i64>],
    zero_copies: bool,
) -> Result<Dims, String> {
    if wanted.iter().filter(|size| **size == Some(-1)).count() > 1 {
        return Err("more than one size is -1".into());
    }
    let copied = |at: usize| zero_copies && wanted[at] == Some(0);
    let along = |(at, size): (usize, &Option<i64>)| match (size, input) {
        (Some(0), Some(input)) if zero_copies => input
            .get(at)
            .copied()
            .ok_or_else(|| format!("size {at} is copied, but the input has rank {}", input.len())),
        (Some(0), None) if zero_copies => Ok(None),
        (Some(-1) | None, _) => Ok(None),
        (Some(size), _) => usize::try_from(*size).map(Some).map_err(|_| format!("size {at} is {size}")),
    };
    let mut shape: Dims = wanted.iter().enumerate().map(along).collect::<Result<_, _>>()?;
    let Some(input) = input else { return Ok(shape) };
    let rest = |dims: &[Option<usize>]| -> Dims {
        let kept = dims.iter().enumerate().filter(|(at, _)| *at >= wanted.len() || !copied(*at));
        kept.map(|(_, size)| *size).collect()
    };
    // Copied sizes are the same on both sides, so they need not be known; a zero among them leaves -1 undefined.
    let zero = |(at, size): (usize, &Option<usize>)| copied(at) && *size == Some(0);
    let undefined = shape.iter().enumerate().any(zero);
    let open: Vec<usize> = (0..wanted.len()).filter(|at| !copied(*at) && shape[*at].is_none()).collect();
    let total = product(&rest(input))?;
    match (&open[..], total) {
        _ if undefined => {}
        (&[], Some(total)) if product(&rest(&shape))?.is_some_and(|new| new != total) => {
            return Err(format!("{total} elements do not make a shape {}", in_words(wanted)));
        }
        (&[open], Some(total)) => {
            // A size that is not known is what is left, too, whether it says so or is -1.
            shape[open] = Some(1);
            let others = product(&rest(&shape))?.filter(|others| *others > 0);
            if others.is_some_and(|others| total % others != 0) {
                return Err(format!("{total} elements do not make a shape {}", in_words(wanted)));
            }
            shape[open] = others.map(|others| total / others);
        }
        _ => {}
    }
    Ok(shape)
}

fn flatten(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let input = call.required(0)?;
    let Some(dims) = &input.shape else {
        return Ok(vec![Fact::partial(input.dtype, Some(unknown_dims(2)))]);
    };
    let at = match call.attr_int("axis", 1) {
        end if end == dims.len() as i64 => dims.len(),
        at => axis(at, dims.len())?,
    };
    Ok(reshaped(input, Some(vec![product(&dims[..at])?, product(&dims[at..])?])))
}

/// Axes are an attribute before version 13. Without any, all sizes that are 1 go.
fn squeeze(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let input = call.required(0)?;
    let Some(dims) = &input.shape else { return Ok(reshaped(input, None)) };
    let gone = match call.setting(1, "axes") {
        Setting::Known(list) => axes(&list, dims.len())?,
        Setting::Absent if dims.iter().all(Option::is_some) => {
            (0..dims.len()).filter(|at| dims[*at] == Some(1)).collect()
        }
        Setting::Absent | Setting::Unknown => return Ok(reshaped(input, None)),
    };
    if let Some(at) = gone.iter().find(|at| dims[**at].is_some_and(|size| size != 1)) {
        return Err(format!("axis {at} of size {:?} cannot be squeezed", dims[*at]));
    }
    let kept = (0..dims.len()).filter(|at| !gone.contains(at)).map(|at| dims[at]);
    Ok(reshaped(input, Some(kept.collect())))
}

/// Axes are an attribute before version 13.
fn unsqueeze(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let input = call.required(0)?;
    let Some(dims) = &input.shape else { return Ok(reshaped(input, None)) };
    let list = match call.setting(1, "axes") {
        Setting::Known(list) => list,
        Setting::Unknown => return Ok(reshaped(input, None)),
        Setting::Absent => return Err("axes are missing".into()),
    };
    let rank = dims.len() + list.len();
    let new = axes(&list, rank)?;
    let mut is_new = vec![false; rank];
    new.iter().for_each(|at| is_new[*at] = true);
    let mut old = dims.iter();
    let size = |is_new: bool| if is_new { Some(1) } else { *old.next().unwrap_or(&None) };
    Ok(reshaped(input, Some(is_new.into_iter().map(size).collect())))
}

fn transpose(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let input = call.required(0)?;
    let Some(dims) = &input.shape else { return Ok(reshaped(input, None)) };
    let order = match call.attr_ints("perm") {
        Some(perm) if perm.len() == dims.len() => axes(perm, dims.len())?,
        Some(perm) => return Err(format!("perm {perm:?} for rank {}", dims.len())),
        None => (0..dims.len()).rev().collect(),
    };
    let output = Fact::partial(input.dtype, Some(order.iter().map(|at| dims[*at]).collect()));
    let elements = output.full_shape().and_then(|shape| {
        rearranged(input, &shape, |at| {
            let mut from = vec![0; at.len()];
            order.iter().zip(at).for_each(|(axis, at)| from[*axis] = *at);
            Some(from)
        })
    });
    Ok(vec![Fact { elements, ..output }])
}

fn concat(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let inputs: Vec<&Fact> = (0..call.inputs.len()).map(|i| call.required(i)).collect::<Result<_, _>>()?;
    let dtype = same_type(&inputs)?;
    let Some(rank) = inputs.iter().find_map(|input| input.rank()) else {
        return Ok(vec![Fact::partial(dtype, None)]);
    };
    let at = axis(call.attr_int("axis", 1), rank)?;
    let mut joined = unknown_dims(rank);
    let mut length = Some(0usize);
    for input in &inputs {
        let Some(dims) = &input.shape else {
            length = None;
            continue;
        };
        if dims.len() != rank {
            return Err(format!("ranks {rank} and {} are joined", dims.len()));
        }
        for (other, size) in dims.iter().enumerate().filter(|(other, _)| *other != at) {
            joined[other] = agree(joined[other], *size)?;
        }
        length = match (length, dims[at]) {
            (Some(sum), Some(size)) => Some(sum.checked_add(size).ok_or("the joined axis is too long")?),
            _ => None,
        };
    }
    joined[at] = length;
    let output = Fact::partial(dtype, Some(joined));
    // Along the first axis, what is joined lies one behind the other.
    let elements = output.full_shape().filter(|_| at == 0).and_then(|shape| {
        let few = super::fact::count(&shape)? <= super::MAX_ELEMENTS;
        let contents: Option<Vec<Elements>> =
            inputs.iter().filter(|_| few).map(|input| input.contents()).collect();
        chained(contents?)
    });
    Ok(vec![Fact { elements, ..output }])
}

fn chained(parts: Vec<Elements>) -> Option<Elements> {
    let mut parts = parts.into_iter();
    let mut all = parts.next()?;
    for part in parts {
        match (&mut all, part) {
            (Elements::Ints(all), Elements::Ints(part)) => all.extend(part),
            (Elements::Floats(all), Elements::Floats(part)) => all.extend(part),
            _ => return None,
        }
    }
    Some(all)
}

/// The lengths are an attribute before version 13; since 18 there may be a number of parts instead.
fn split(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let input = call.required(0)?;
    let parts = call.node.outputs.len();
    let Some(dims) = &input.shape else { return Ok(vec![Fact::partial(input.dtype, None); parts]) };
    let at = axis(call.attr_int("axis", 0), dims.len())?;
    let lengths = match call.setting(1, "split") {
        Setting::Known(lengths) => stated_lengths(&lengths, dims[at], parts)?,
        Setting::Unknown => vec![None; parts],
        Setting::Absent => equal_lengths(call, dims[at], parts)?,
    };
    let mut start = Some(0usize);
    let mut facts = Vec::with_capacity(parts);
    for length in lengths {
        let mut part = dims.clone();
        part[at] = length;
        let output = Fact::partial(input.dtype, Some(part));
        let elements = output.full_shape().zip(start).and_then(|(shape, start)| {
            rearranged(input, &shape, |from| {
                let mut from = from.to_vec();
                from[at] = from[at].checked_add(start)?;
                Some(from)
            })
        });
        facts.push(Fact { elements, ..output });
        start = start.zip(length).and_then(|(start, length)| start.checked_add(length));
    }
    Ok(facts)
}

fn stated_lengths(lengths: &[i64], size: Option<usize>, parts: usize) -> Result<Dims, String> {
    let known: Result<Dims, _> = lengths.iter().map(|length| usize::try_from(*length).map(Some)).collect();
    let known = known.map_err(|_| format!("lengths {lengths:?}"))?;
    let sum = known.iter().try_fold(0usize, |sum, length| sum.checked_add((*length)?));
    if known.len() != parts || sum.is_none() || size.is_some_and(|size| Some(size) != sum) {
        return Err(format!("lengths {lengths:?} of {parts} parts of {size:?}"));
    }
    Ok(known)
}

/// The last part is smaller where the size cannot be divided.
fn equal_lengths(call: &Call<'_>, size: Option<usize>, parts: usize) -> Result<Dims, String> {
    if call.node.int("num_outputs").is_some_and(|stated| stated != parts as i64) {
        return Err(format!("num_outputs is not {parts}"));
    }
    let Some(size) = size else { return Ok(vec![None; parts]) };
    let length = size.div_ceil(parts.max(1));
    let last = (parts.saturating_sub(1)).checked_mul(length).and_then(|others| size.checked_sub(others));
    let last = last.ok_or_else(|| format!("{size} cannot be split into {parts} parts"))?;
    if call.opset < 18 && last != length {
        return Err(format!("{size} cannot be split into {parts} equal parts"));
    }
    let mut lengths = vec![Some(length); parts];
    if let Some(end) = lengths.last_mut() {
        *end = Some(last);
    }
    Ok(lengths)
}

fn expand(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let input = call.required(0)?;
    let Some(wanted) = wanted(call, 1)? else { return Ok(reshaped(input, None)) };
    let size = |size: Option<i64>| match size {
        Some(size) => usize::try_from(size).map(Some).map_err(|_| format!("expanded to {size}")),
        None => Ok(None),
    };
    let wanted: Dims = wanted.into_iter().map(size).collect::<Result<_, _>>()?;
    let output = Fact::partial(input.dtype, broadcast([input.shape.as_deref(), Some(&wanted)])?);
    let elements = output.full_shape().and_then(|shape| stretched(input, &shape));
    Ok(vec![Fact { elements, ..output }])
}

/// The first version took a count and an axis, as inputs.
fn tile(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let input = call.required(0)?;
    let Some(dims) = &input.shape else { return Ok(reshaped(input, None)) };
    let repeats = wanted(call, 1)?.filter(|_| call.opset >= 6);
    let Some(repeats) = repeats else {
        return Ok(vec![Fact::partial(input.dtype, Some(unknown_dims(dims.len())))]);
    };
    if repeats.len() != dims.len() {
        return Err(format!("{} repeats for rank {}", repeats.len(), dims.len()));
    }
    let along = |(size, repeat): (&Option<usize>, Option<i64>)| match repeat.map(usize::try_from) {
        Some(Err(_)) => Err(format!("repeated {repeat:?} times")),
        Some(Ok(repeat)) => product(&[*size, Some(repeat)]),
        None => product(&[*size, None]),
    };
    let tiled: Dims = dims.iter().zip(repeats).map(along).collect::<Result<_, _>>()?;
    let output = Fact::partial(input.dtype, Some(tiled));
    let elements = output.full_shape().and_then(|shape| {
        let from = input.full_shape()?;
        rearranged(input, &shape, |at| at.iter().zip(&from).map(|(at, size)| at.checked_rem(*size)).collect())
    });
    Ok(vec![Fact { elements, ..output }])
}

/// Pads are an attribute before version 11 (`paddings` in the first); since 18 they may be for some axes only.
fn pad(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let input = call.required(0)?;
    let Some(dims) = &input.shape else { return Ok(reshaped(input, None)) };
    let unknown = || Ok(vec![Fact::partial(input.dtype, Some(unknown_dims(dims.len())))]);
    let name = if call.opset < 2 { "paddings" } else { "pads" };
    let attribute = call.attr_ints(name).filter(|_| call.opset < 11);
    let pads = match attribute {
        Some(pads) => pads.iter().copied().map(Some).collect(),
        None => match wanted(call, 1)? {
            Some(pads) => pads,
            None => return unknown(),
        },
    };
    let padded = match call.input(3) {
        Some(axes_input) => match axes_input.ints() {
            Some(list) => axes(&list, dims.len())?,
            None => return unknown(),
        },
        None => (0..dims.len()).collect(),
    };
    if pads.len() != 2 * padded.len() {
        return Err(format!("{} pads for {} axes", pads.len(), padded.len()));
    }
    let mut output = dims.clone();
    for (at, axis) in padded.iter().enumerate() {
        let (before, after) = (pads[at], pads[at + padded.len()]);
        output[*axis] = match (dims[*axis], before, after) {
            (Some(size), Some(before), Some(after)) => {
                let sum = size as i128 + i128::from(before) + i128::from(after);
                Some(usize::try_from(sum).map_err(|_| format!("padding makes axis {axis} {sum} long"))?)
            }
            _ => None,
        };
    }
    Ok(vec![Fact::partial(input.dtype, Some(output))])
}

/// The side of a block.
fn block(call: &Call<'_>) -> Result<usize, String> {
    let block = usize::try_from(call.attr_int("blocksize", 0)).ok().filter(|block| *block > 0);
    block.ok_or_else(|| "blocksize is not positive".into())
}

/// Batch, channels, height, width.
fn image(call: &Call<'_>) -> Result<[Option<usize>; 4], String> {
    let Some(dims) = &call.required(0)?.shape else { return Ok([None; 4]) };
    dims.as_slice().try_into().map_err(|_| format!("rank {} instead of 4", dims.len()))
}

fn divided(size: Option<usize>, by: Option<usize>) -> Result<Option<usize>, String> {
    match (size, by) {
        (Some(size), Some(by)) if by == 0 || size % by != 0 => Err(format!("{size} is no multiple of {by}")),
        (size, by) => Ok(size.zip(by).map(|(size, by)| size / by)),
    }
}

fn depth_to_space(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let ([batch, channels, height, width], block) = (image(call)?, Some(block(call)?));
    let channels = divided(channels, product(&[block, block])?)?;
    let dims = vec![batch, channels, product(&[height, block])?, product(&[width, block])?];
    Ok(vec![Fact::partial(call.dtype(0), Some(dims))])
}

fn space_to_depth(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let ([batch, channels, height, width], block) = (image(call)?, Some(block(call)?));
    let channels = product(&[channels, block, block])?;
    let dims = vec![batch, channels, divided(height, block)?, divided(width, block)?];
    Ok(vec![Fact::partial(call.dtype(0), Some(dims))])
}
