//! Numpy's rule of how shapes stretch to each other, and tensors whose elements are another's, rearranged.

use super::{Dims, Elements, Fact, MAX_ELEMENTS, fact::count};

/// The common shape. `Ok(None)` if a rank is not known; `Err` if two sizes do not go together.
pub(super) fn broadcast<'a>(
    shapes: impl IntoIterator<Item = Option<&'a [Option<usize>]>>,
) -> Result<Option<Dims>, String> {
    let mut common = Some(Dims::new());
    for shape in shapes {
        common = match (common, shape) {
            (Some(common), Some(shape)) => Some(pair(&common, shape)?),
            _ => None,
        };
    }
    Ok(common)
}

fn pair(a: &[Option<usize>], b: &[Option<usize>]) -> Result<Dims, String> {
    let rank = a.len().max(b.len());
    let size = |dims: &[Option<usize>], axis: usize| match (axis + dims.len()).checked_sub(rank) {
        Some(axis) => dims[axis],
        None => Some(1),
    };
    (0..rank).map(|axis| stretch(size(a, axis), size(b, axis))).collect()
}

/// A size that is not known is 1 or the other one, so the other decides unless it is 1.
fn stretch(a: Option<usize>, b: Option<usize>) -> Result<Option<usize>, String> {
    match (a, b) {
        (Some(1), other) | (other, Some(1)) => Ok(other),
        (Some(a), Some(b)) if a != b => Err(format!("sizes {a} and {b} do not broadcast")),
        (a, b) => Ok(a.or(b)),
    }
}

/// The elements of a tensor of `shape`, each taken from where `source` says: coordinates there to coordinates in
/// `input`, or none if that place is not known. `None` if the input's contents are not known, or if there are too many.
pub(super) fn rearranged(
    input: &Fact,
    shape: &[usize],
    source: impl Fn(&[usize]) -> Option<Vec<usize>>,
) -> Option<Elements> {
    let elements = input.elements.as_ref()?;
    let from = input.full_shape()?;
    let total = count(shape).filter(|count| *count <= MAX_ELEMENTS)?;
    let mut places = Vec::with_capacity(total);
    let mut at = vec![0; shape.len()];
    for _ in 0..total {
        places.push(source(&at).and_then(|at| place(&at, &from)));
        advance(&mut at, shape);
    }
    Some(elements.pick(&places))
}

/// The elements that a tensor has when it is stretched to `shape`.
pub(super) fn stretched(input: &Fact, shape: &[usize]) -> Option<Elements> {
    let from = input.full_shape()?;
    if from == shape {
        return input.elements.clone();
    }
    let lead = shape.len().checked_sub(from.len())?;
    rearranged(input, shape, |at| {
        Some(at[lead..].iter().zip(&from).map(|(at, size)| if *size == 1 { 0 } else { *at }).collect())
    })
}

/// Where coordinates lie in a row-major tensor; `None` if they lie outside.
fn place(at: &[usize], shape: &[usize]) -> Option<usize> {
    let inside = at.len() == shape.len() && at.iter().zip(shape).all(|(at, size)| at < size);
    inside.then(|| at.iter().zip(shape).fold(0, |place, (at, size)| place * size + at))
}

/// The next coordinates in row-major order.
fn advance(at: &mut [usize], shape: &[usize]) {
    for (at, size) in at.iter_mut().zip(shape).rev() {
        *at += 1;
        if *at < *size {
            return;
        }
        *at = 0;
    }
}
