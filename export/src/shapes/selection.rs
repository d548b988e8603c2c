//! Operators that select: how much they give depends on contents, and is known only where those are.

use super::{Call, Dims, Elements, Fact, Row, call::axis};
use crate::onnx::DType;

pub(super) const SELECTION: &[Row] = &[
    ("", "Compress", compress),
    ("", "NonMaxSuppression", |_| Ok(vec![Fact::partial(Some(DType::I64), Some(vec![None, Some(3)]))])),
    ("", "NonZero", non_zero),
    ("", "Unique", unique),
    ("com.microsoft", "Unique", unique_flat),
];

/// Slices along an axis, or elements of the flattened tensor, whose condition holds. The condition may be shorter than
/// the axis.
fn compress(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let count = call.ints(1).map(|condition| condition.iter().filter(|value| **value != 0).count());
    let mut y = call.same_as(0)?;
    match call.node.int("axis") {
        None => y.shape = Some(vec![count]),
        Some(along) => {
            if let Some(dims) = &mut y.shape {
                let at = axis(along, dims.len())?;
                dims[at] = count;
            }
        }
    }
    Ok(vec![y])
}

/// The coordinates of the elements that are not zero: [rank, count].
fn non_zero(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let Some(rank) = call.required(0)?.rank() else {
        return Ok(vec![Fact::partial(Some(DType::I64), Some(vec![None, None]))]);
    };
    let Some((places, shape)) = places(call).filter(|_| rank > 0) else {
        // Of a scalar, versions of the definition differ in the number of coordinates.
        let rows = Some(rank).filter(|rank| *rank > 0);
        return Ok(vec![Fact::partial(Some(DType::I64), Some(vec![rows, None]))]);
    };
    let strides: Vec<usize> = (1..=rank)
        .map(|axis| shape[axis..].iter().fold(1, |stride: usize, size| stride.saturating_mul(*size)))
        .collect();
    let coordinates = strides
        .iter()
        .zip(&shape)
        .flat_map(|(stride, size)| places.iter().map(move |place| i64::try_from(place / stride % size).ok()));
    let elements = Elements::Ints(coordinates.collect());
    Ok(vec![Fact::with_elements(Some(DType::I64), &[rank, places.len()], Some(elements))])
}

/// The places of the elements that are not zero, and the tensor's shape, if all elements are known.
fn places(call: &Call<'_>) -> Option<(Vec<usize>, Vec<usize>)> {
    let input = call.input(0)?;
    let set: Vec<bool> = match input.elements.as_ref()? {
        Elements::Ints(values) => values.iter().map(|value| value.map(|v| v != 0)).collect::<Option<_>>()?,
        Elements::Floats(values) => {
            values.iter().map(|value| value.map(|v| v != 0.0)).collect::<Option<_>>()?
        }
    };
    Some(((0..set.len()).filter(|place| set[*place]).collect(), input.full_shape()?))
}

/// The distinct elements or slices, and for them the first index, for the input the index of its like, and the counts.
fn unique(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let mut y = call.same_as(0)?;
    let inverse = match (call.node.int("axis"), &mut y.shape) {
        (None, shape) => {
            let count = shape.as_deref().map(super::call::product).transpose()?.flatten();
            *shape = Some(vec![None]);
            count
        }
        (Some(_), None) => None,
        (Some(along), Some(dims)) => {
            let at = axis(along, dims.len())?;
            std::mem::take(&mut dims[at])
        }
    };
    let indices = |shape: Dims| Fact::partial(Some(DType::I64), Some(shape));
    Ok(vec![y, indices(vec![None]), indices(vec![inverse]), indices(vec![None])])
}

/// The distinct elements of a list, for each element of the list the index of its like, and the counts.
fn unique_flat(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let indices = |shape: Option<Dims>| Fact::partial(Some(DType::I64), shape);
    let input = call.same_as(0)?;
    let y = Fact::partial(input.dtype, Some(vec![None]));
    Ok(vec![y, indices(input.shape), indices(Some(vec![None]))])
}
