//! Operators that make one element of all along some axes, or rank, sum up and weigh elements along one.

use super::{
    Call, Elements, Fact, Row,
    call::{Setting, axes, axis, unknown_dims},
    elementwise::same,
    fact::{count, fit},
};
use crate::onnx::DType;

pub(super) const REDUCTION: &[Row] = &[
    ("", "ArgMax", arg),
    ("", "ArgMin", arg),
    ("", "CumProd", same),
    ("", "CumSum", same),
    ("", "Hardmax", same),
    ("", "LogSoftmax", same),
    ("", "ReduceL1", |call| reduce(call, None)),
    ("", "ReduceL2", |call| reduce(call, None)),
    ("", "ReduceLogSum", |call| reduce(call, None)),
    ("", "ReduceLogSumExp", |call| reduce(call, None)),
    ("", "ReduceMax", |call| reduce(call, Some(|all| all.iter().copied().max()))),
    ("", "ReduceMean", |call| reduce(call, None)),
    ("", "ReduceMin", |call| reduce(call, Some(|all| all.iter().copied().min()))),
    ("", "ReduceProd", |call| {
        reduce(call, Some(|all| all.iter().try_fold(1, |a: i64, b| a.checked_mul(*b))))
    }),
    ("", "ReduceSum", |call| reduce(call, Some(|all| all.iter().try_fold(0, |a: i64, b| a.checked_add(*b))))),
    ("", "ReduceSumSquare", |call| reduce(call, None)),
    ("", "Softmax", same),
    ("", "TopK", top),
];

/// One value of all elements.
type Fold = fn(&[i64]) -> Option<i64>;

/// Axes are an attribute before version 13 (sum) or 18 (the others). None at all means all of them, unless an
/// attribute says that nothing is to be reduced then. Contents are followed where one element is made of all.
fn reduce(call: &Call<'_>, all: Option<Fold>) -> Result<Vec<Fact>, String> {
    let input = call.required(0)?;
    let keep = keeps_dims(call)?;
    let Some(dims) = &input.shape else { return Ok(vec![Fact::partial(input.dtype, None)]) };
    let every = || (0..dims.len()).collect();
    let nothing = call.attr_int("noop_with_empty_axes", 0) != 0;
    let reduced: Vec<usize> = match call.setting(1, "axes") {
        Setting::Known(list) if list.is_empty() && !nothing => every(),
        Setting::Known(list) => axes(&list, dims.len())?,
        Setting::Absent if nothing => Vec::new(),
        Setting::Absent => every(),
        Setting::Unknown => {
            let rank = keep.then_some(dims.len());
            return Ok(vec![Fact::partial(input.dtype, rank.map(unknown_dims))]);
        }
    };
    let size = |at: usize| match reduced.contains(&at) {
        true => keep.then_some(Some(1)),
        false => Some(dims[at]),
    };
    let output = Fact::partial(input.dtype, Some((0..dims.len()).filter_map(size).collect()));
    let one = output.full_shape().is_some_and(|shape| count(&shape) == Some(1));
    let value = || fit(input.dtype?, all?(&input.ints()?)?);
    let elements = value().filter(|_| one && reduced.len() == dims.len());
    Ok(vec![Fact { elements: elements.map(|value| Elements::Ints(vec![Some(value)])), ..output }])
}

/// What other numbers mean is not defined, and runtimes differ.
fn keeps_dims(call: &Call<'_>) -> Result<bool, String> {
    match call.attr_int("keepdims", 1) {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(format!("keepdims is {other}, neither 0 nor 1")),
    }
}

fn arg(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let dtype = Some(DType::I64);
    let Some(mut dims) = call.required(0)?.shape.clone() else { return Ok(vec![Fact::partial(dtype, None)]) };
    let at = axis(call.attr_int("axis", 0), dims.len())?;
    match keeps_dims(call)? {
        false => drop(dims.remove(at)),
        true => dims[at] = Some(1),
    }
    Ok(vec![Fact::partial(dtype, Some(dims))])
}

/// How many is an attribute before version 10.
fn top(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let input = call.required(0)?;
    let shape = match input.shape.clone() {
        None => None,
        Some(mut dims) => {
            let at = axis(call.attr_int("axis", -1), dims.len())?;
            let wanted = if call.opset < 10 { call.node.int("k") } else { call.int(1) };
            let wanted = wanted.map(usize::try_from).transpose().map_err(|_| "k is negative")?;
            if wanted.zip(dims[at]).is_some_and(|(wanted, size)| wanted > size) {
                return Err(format!("the top {wanted:?} of {:?}", dims[at]));
            }
            dims[at] = wanted;
            Some(dims)
        }
    };
    Ok(vec![Fact::partial(input.dtype, shape.clone()), Fact::partial(Some(DType::I64), shape)])
}
