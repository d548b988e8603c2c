//! Operators that take parts of a tensor by place, or put parts there.

use super::{
    Call, Dims, Fact, Row,
    broadcast::rearranged,
    call::{Setting, agree, axes, axis, unknown_dims},
    elementwise::same,
};

pub(super) const INDEXING: &[Row] = &[
    ("", "Gather", gather),
    ("", "GatherElements", gather_elements),
    ("", "GatherND", gather_nd),
    ("", "Scatter", same),
    ("", "ScatterElements", same),
    ("", "ScatterND", same),
    ("", "Slice", slice),
];

/// A tensor of that type of whose shape only the rank is known, if that.
fn of_rank(call: &Call<'_>, rank: Option<usize>) -> Vec<Fact> {
    vec![Fact::partial(call.dtype(0), rank.map(unknown_dims))]
}

/// The first and the following places of a slice along one axis; `len` of them.
#[derive(Clone, Copy)]
struct Places {
    first: i128,
    step: i128,
    len: usize,
}

/// Bounds are attributes before version 10.
fn slice(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let input = call.required(0)?;
    let Some(dims) = &input.shape else { return Ok(of_rank(call, None)) };
    let bound = |index: usize, name: &str| -> Option<Vec<Option<i64>>> {
        match call.input(index) {
            Some(fact) => match (fact.partial_ints(), fact.shape.as_deref()) {
                (Some(values), _) => Some(values.to_vec()),
                (None, Some([Some(count)])) if *count <= dims.len() => Some(vec![None; *count]),
                _ => None,
            },
            None => Some(call.attr_ints(name)?.iter().copied().map(Some).collect()),
        }
    };
    let (starts, ends) = (bound(1, "starts"), bound(2, "ends"));
    let cut = match call.setting(3, "axes") {
        Setting::Known(list) => axes(&list, dims.len())?,
        Setting::Unknown => return Ok(of_rank(call, Some(dims.len()))),
        Setting::Absent => match starts.as_ref().or(ends.as_ref()) {
            Some(bounds) if bounds.len() <= dims.len() => (0..bounds.len()).collect(),
            Some(bounds) => return Err(format!("{} bounds for rank {}", bounds.len(), dims.len())),
            None => return Ok(of_rank(call, Some(dims.len()))),
        },
    };
    let of_cut = |bounds: Option<Vec<Option<i64>>>| bounds.unwrap_or_else(|| vec![None; cut.len()]);
    let steps = match call.input(4) {
        Some(_) => of_cut(bound(4, "steps")),
        None => vec![Some(1); cut.len()],
    };
    let (starts, ends) = (of_cut(starts), of_cut(ends));
    if [&starts, &ends, &steps].iter().any(|bounds| bounds.len() != cut.len()) {
        return Err(format!("{} starts, {} ends, {} steps", starts.len(), ends.len(), steps.len()));
    }
    let mut places: Vec<Option<Places>> =
        dims.iter().map(|size| size.map(|len| Places { first: 0, step: 1, len })).collect();
    for (at, axis) in cut.iter().enumerate() {
        if steps[at] == Some(0) {
            return Err("a step is 0".into());
        }
        let known = dims[*axis].zip(starts[at]).zip(ends[at]).zip(steps[at]);
        places[*axis] = known.map(|(((size, start), end), step)| along(size, start, end, step));
    }
    let shape: Dims = places.iter().map(|places| places.map(|places| places.len)).collect();
    let elements = places.into_iter().collect::<Option<Vec<Places>>>().and_then(|places| {
        let shape: Vec<usize> = places.iter().map(|places| places.len).collect();
        rearranged(input, &shape, |at| {
            let from = |(at, places): (&usize, &Places)| {
                usize::try_from(places.first + places.step * *at as i128).ok()
            };
            at.iter().zip(&places).map(from).collect()
        })
    });
    Ok(vec![Fact { elements, ..Fact::partial(input.dtype, Some(shape)) }])
}

/// Bounds count from the end where they are negative, and are clamped to what the direction can reach.
fn along(size: usize, start: i64, end: i64, step: i64) -> Places {
    let (size, step) = (size as i128, i128::from(step));
    let counted = |at: i64| if at < 0 { i128::from(at) + size } else { i128::from(at) };
    let (lowest, highest) = if step > 0 { (0, size) } else { (-1, size - 1) };
    let first = counted(start).clamp(lowest, highest);
    let distance = if step > 0 {
        counted(end).clamp(lowest, highest) - first
    } else {
        first - counted(end).clamp(lowest, highest)
    };
    // Going backwards, a start before the first element has nothing to take.
    let len = if distance <= 0 { 0 } else { (distance + step.abs() - 1) / step.abs() };
    Places { first, step, len: usize::try_from(len).unwrap_or_default() }
}

fn gather(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (data, indices) = (call.required(0)?, call.required(1)?);
    let (Some(from), Some(taken)) = (&data.shape, &indices.shape) else { return Ok(of_rank(call, None)) };
    let at = axis(call.attr_int("axis", 0), from.len())?;
    let output = Fact::partial(data.dtype, Some([&from[..at], taken, &from[at + 1..]].concat()));
    let elements = output.full_shape().zip(indices.full_shape()).zip(indices.partial_ints()).zip(from[at]);
    let elements = elements.and_then(|(((shape, taken), places), size)| {
        rearranged(data, &shape, |to| {
            let (before, rest) = to.split_at(at);
            let (index, after) = rest.split_at(taken.len());
            let index = index.iter().zip(&taken).fold(0, |place, (at, size)| place * size + at);
            let place = axis_place(places.get(index).copied()??, size)?;
            Some([before, &[place], after].concat())
        })
    });
    Ok(vec![Fact { elements, ..output }])
}

fn axis_place(index: i64, size: usize) -> Option<usize> {
    axis(index, size).ok()
}

fn gather_elements(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (data, indices) = (call.required(0)?, call.required(1)?);
    if data.rank().zip(indices.rank()).is_some_and(|(a, b)| a != b) {
        return Err("data and indices differ in rank".into());
    }
    Ok(vec![Fact::partial(data.dtype, indices.shape.clone())])
}

/// The last axis of the indices holds places in the data's axes that follow the batch axes.
fn gather_nd(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (data, indices) = (call.required(0)?, call.required(1)?);
    let (Some(from), Some(taken)) = (&data.shape, &indices.shape) else { return Ok(of_rank(call, None)) };
    let batch = usize::try_from(call.attr_int("batch_dims", 0)).map_err(|_| "batch_dims is negative")?;
    let Some((Some(depth), places)) = taken.split_last() else {
        return if taken.is_empty() {
            Err("the indices have rank 0".into())
        } else {
            Ok(of_rank(call, None))
        };
    };
    let rest = batch.checked_add(*depth).and_then(|start| from.get(start..));
    let rest = rest.ok_or_else(|| format!("indices of length {depth} into rank {}", from.len()))?;
    if batch > places.len() {
        return Err(format!("{batch} batch axes of indices of rank {}", taken.len()));
    }
    let mut shape = places.to_vec();
    for (own, other) in shape.iter_mut().zip(from).take(batch) {
        *own = agree(*own, *other)?;
    }
    shape.extend(rest);
    Ok(vec![Fact::partial(data.dtype, Some(shape))])
}
