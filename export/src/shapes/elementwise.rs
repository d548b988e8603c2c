//! Operators that make each element of one, two or more elements at the same place.

use super::{
    Call, Dims, Elements, Fact, Row,
    broadcast::{broadcast, stretched},
    fact::{fit, round},
};
use crate::onnx::DType;

pub(super) const ELEMENTWISE: &[Row] = &[
    // One input, its type.
    ("", "Abs", |call| map(call, Some(i64::checked_abs), Some(f64::abs))),
    ("", "Acos", same),
    ("", "Acosh", same),
    ("", "Asin", same),
    ("", "Asinh", same),
    ("", "Atan", same),
    ("", "Atanh", same),
    ("", "BitwiseNot", |call| map(call, Some(|a| Some(!a)), None)),
    ("", "Ceil", |call| map(call, None, Some(f64::ceil))),
    ("", "Celu", same),
    ("", "Clip", same),
    ("", "Cos", same),
    ("", "Cosh", same),
    ("", "Elu", same),
    ("", "Erf", same),
    ("", "Exp", same),
    ("", "Floor", |call| map(call, None, Some(f64::floor))),
    ("", "Gelu", same),
    ("", "HardSigmoid", same),
    ("", "HardSwish", same),
    ("", "LeakyRelu", same),
    ("", "Log", same),
    ("", "Mish", same),
    ("", "Neg", |call| map(call, Some(i64::checked_neg), Some(|a| -a))),
    ("", "Not", |call| map(call, Some(|a| Some(i64::from(a == 0))), None)),
    ("", "Reciprocal", |call| map(call, None, Some(f64::recip))),
    ("", "Relu", |call| map(call, Some(|a| Some(a.max(0))), Some(|a| number(a, 0.0, f64::max)))),
    ("", "Round", |call| map(call, None, Some(f64::round_ties_even))),
    ("", "Selu", same),
    ("", "Shrink", same),
    ("", "Sigmoid", same),
    ("", "Sign", |call| map(call, Some(|a| Some(a.signum())), None)),
    ("", "Sin", same),
    ("", "Sinh", same),
    ("", "Softplus", same),
    ("", "Softsign", same),
    ("", "Sqrt", |call| map(call, None, Some(f64::sqrt))),
    ("", "Swish", same),
    ("", "Tan", same),
    ("", "Tanh", same),
    ("", "ThresholdedRelu", same),
    // One input, another type.
    ("", "Cast", cast),
    ("", "CastLike", cast),
    ("", "IsInf", test),
    ("", "IsNaN", test),
    ("", "RegexFullMatch", test),
    ("", "Dropout", dropout),
    // Two inputs, their type.
    ("", "Add", |call| zip(call, Some(i64::checked_add), Some(|a, b| a + b))),
    ("", "BitShift", |call| zip(call, None, None)),
    ("", "BitwiseAnd", |call| zip(call, Some(|a, b| Some(a & b)), None)),
    ("", "BitwiseOr", |call| zip(call, Some(|a, b| Some(a | b)), None)),
    ("", "BitwiseXor", |call| zip(call, Some(|a, b| Some(a ^ b)), None)),
    ("", "Div", |call| zip(call, Some(i64::checked_div), Some(|a, b| a / b))),
    ("", "Mod", modulo),
    ("", "Mul", |call| zip(call, Some(i64::checked_mul), Some(|a, b| a * b))),
    ("", "PRelu", same),
    ("", "Pow", power),
    ("", "StringConcat", |call| zip(call, None, None)),
    ("", "Sub", |call| zip(call, Some(i64::checked_sub), Some(|a, b| a - b))),
    // Two inputs, a truth value.
    ("", "And", |call| compare(call, |a, b| a != 0 && b != 0, |_, _| false)),
    ("", "Equal", |call| compare(call, |a, b| a == b, |a, b| a == b)),
    ("", "Greater", |call| compare(call, |a, b| a > b, |a, b| a > b)),
    ("", "GreaterOrEqual", |call| compare(call, |a, b| a >= b, |a, b| a >= b)),
    ("", "Less", |call| compare(call, |a, b| a < b, |a, b| a < b)),
    ("", "LessOrEqual", |call| compare(call, |a, b| a <= b, |a, b| a <= b)),
    ("", "Or", |call| compare(call, |a, b| a != 0 || b != 0, |_, _| false)),
    ("", "Xor", |call| compare(call, |a, b| (a != 0) != (b != 0), |_, _| false)),
    // Any number of inputs.
    ("", "Max", |call| fold(call, Some(|a, b| Some(a.max(b))), Some(|a, b| number(a, b, f64::max)))),
    ("", "Mean", |call| fold(call, None, None)),
    ("", "Min", |call| fold(call, Some(|a, b| Some(a.min(b))), Some(|a, b| number(a, b, f64::min)))),
    ("", "Sum", |call| fold(call, Some(i64::checked_add), Some(|a, b| a + b))),
    ("", "Where", choose),
];

type Ints1 = Option<fn(i64) -> Option<i64>>;
type Floats1 = Option<fn(f64) -> f64>;
type Ints2 = Option<fn(i64, i64) -> Option<i64>>;
type Floats2 = Option<fn(f64, f64) -> f64>;

/// Type and shape of the first input; contents are not followed.
pub(super) fn same(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    Ok(vec![call.same_as(0)?])
}

fn map(call: &Call<'_>, ints: Ints1, floats: Floats1) -> Result<Vec<Fact>, String> {
    let input = call.required(0)?;
    let elements = input.dtype.zip(input.elements.as_ref()).and_then(|(dtype, elements)| match elements {
        Elements::Ints(values) => {
            let ints = ints?;
            Some(Elements::Ints(values.iter().map(|a| fit(dtype, ints((*a)?)?)).collect()))
        }
        Elements::Floats(values) => {
            let floats = floats?;
            Some(Elements::Floats(values.iter().map(|a| round(dtype, floats((*a)?))).collect()))
        }
    });
    Ok(vec![Fact { elements, ..call.same_as(0)? }])
}

fn test(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    Ok(vec![Fact { dtype: Some(DType::Bool), ..call.same_as(0)? }])
}

/// The mask is of the data's type in versions before 10.
fn dropout(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let output = call.same_as(0)?;
    let mask = if call.opset < 10 { output.dtype } else { Some(DType::Bool) };
    Ok(vec![output.clone(), Fact { dtype: mask, ..output }])
}

/// Type from attribute `to`, or from the second input.
fn cast(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let to = call.attr_dtype("to").or_else(|| call.dtype(1));
    let input = call.required(0)?;
    let elements = to.zip(input.elements.as_ref()).and_then(|(to, elements)| converted(elements, to));
    Ok(vec![Fact { dtype: to, elements, ..call.same_as(0)? }])
}

/// Elements in another type. What that type cannot hold is not defined, so it is not known.
fn converted(elements: &Elements, to: DType) -> Option<Elements> {
    // Larger integers would be rounded twice.
    const EXACT: u64 = 1 << f64::MANTISSA_DIGITS;
    to.size()?;
    Some(match elements {
        Elements::Ints(values) if to.is_float() => {
            let exact = |value: &i64| value.unsigned_abs() <= EXACT;
            Elements::Floats(values.iter().map(|v| round(to, v.filter(exact)? as f64)).collect())
        }
        Elements::Floats(values) if to.is_float() => {
            Elements::Floats(values.iter().map(|v| round(to, (*v)?)).collect())
        }
        Elements::Ints(values) if to == DType::Bool => {
            Elements::Ints(values.iter().map(|v| Some(i64::from((*v)? != 0))).collect())
        }
        Elements::Floats(values) if to == DType::Bool => {
            Elements::Ints(values.iter().map(|v| Some(i64::from((*v)? != 0.0))).collect())
        }
        Elements::Ints(values) => Elements::Ints(values.iter().map(|v| fit(to, (*v)?)).collect()),
        Elements::Floats(values) => {
            let inside = |value: &f64| value.abs() < i64::MAX as f64;
            Elements::Ints(values.iter().map(|v| fit(to, v.filter(inside)?.trunc() as i64)).collect())
        }
    })
}

fn zip(call: &Call<'_>, ints: Ints2, floats: Floats2) -> Result<Vec<Fact>, String> {
    let (a, b) = (call.required(0)?, call.required(1)?);
    let dtype = same_type(&[a, b])?;
    pairwise(call, a, b, dtype, ints, floats).map(|fact| vec![fact])
}

fn pairwise(
    call: &Call<'_>,
    a: &Fact,
    b: &Fact,
    dtype: Option<DType>,
    ints: Ints2,
    floats: Floats2,
) -> Result<Fact, String> {
    let shape = common_shape(call, &[a, b])?;
    let elements = dtype.and_then(|dtype| match paired(call, a, b, &shape)? {
        (Elements::Ints(a), Elements::Ints(b)) => {
            let ints = ints?;
            let pairs = a.into_iter().zip(b);
            Some(Elements::Ints(pairs.map(|(a, b)| fit(dtype, ints(a?, b?)?)).collect()))
        }
        (Elements::Floats(a), Elements::Floats(b)) => {
            let floats = floats?;
            let pairs = a.into_iter().zip(b);
            Some(Elements::Floats(pairs.map(|(a, b)| round(dtype, floats(a?, b?))).collect()))
        }
        _ => None,
    });
    Ok(Fact { elements, ..Fact::partial(dtype, shape) })
}

fn compare(
    call: &Call<'_>,
    ints: fn(i64, i64) -> bool,
    floats: fn(f64, f64) -> bool,
) -> Result<Vec<Fact>, String> {
    let (a, b) = (call.required(0)?, call.required(1)?);
    same_type(&[a, b])?;
    let shape = common_shape(call, &[a, b])?;
    let truth = |value: bool| Some(i64::from(value));
    let elements = paired(call, a, b, &shape).and_then(|pair| match pair {
        (Elements::Ints(a), Elements::Ints(b)) => {
            Some(a.into_iter().zip(b).map(|(a, b)| truth(ints(a?, b?))).collect())
        }
        (Elements::Floats(a), Elements::Floats(b)) => {
            Some(a.into_iter().zip(b).map(|(a, b)| truth(floats(a?, b?))).collect())
        }
        _ => None,
    });
    Ok(vec![Fact { elements: elements.map(Elements::Ints), ..Fact::partial(Some(DType::Bool), shape) }])
}

/// With `fmod` the result has the sign of the dividend, without it that of the divisor.
fn modulo(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    if call.attr_int("fmod", 0) != 0 {
        return zip(call, Some(i64::checked_rem), Some(|a, b| a % b));
    }
    let floored = |a: i64, b: i64| {
        let rest = a.checked_rem(b)?;
        Some(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest })
    };
    zip(call, Some(floored), None)
}

/// The exponent may have another type.
fn power(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (base, exponent) = (call.required(0)?, call.required(1)?);
    let power = |a: i64, b: i64| a.checked_pow(u32::try_from(b).ok()?);
    pairwise(call, base, exponent, base.dtype, Some(power), None).map(|fact| vec![fact])
}

/// Whatever is not a number makes the result not a number.
fn number(a: f64, b: f64, choose: fn(f64, f64) -> f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { choose(a, b) }
}

fn fold(call: &Call<'_>, ints: Ints2, floats: Floats2) -> Result<Vec<Fact>, String> {
    let mut folded = call.required(0)?.clone();
    if ints.is_none() {
        folded.elements = None;
    }
    for index in 1..call.inputs.len() {
        let next = call.required(index)?;
        let dtype = same_type(&[&folded, next])?;
        folded = pairwise(call, &folded, next, dtype, ints, floats)?;
    }
    Ok(vec![folded])
}

fn choose(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let [condition, yes, no] = [call.required(0)?, call.required(1)?, call.required(2)?];
    let dtype = same_type(&[yes, no])?;
    let shape = broadcast([condition, yes, no].map(|input| input.shape.as_deref()))?;
    let elements = || {
        let full: Vec<usize> = shape.as_ref()?.iter().copied().collect::<Option<_>>()?;
        let contents = |fact: &Fact| stretched(&Fact { elements: fact.contents(), ..fact.clone() }, &full);
        let Elements::Ints(chosen) = contents(condition)? else { return None };
        Some(match (contents(yes)?, contents(no)?) {
            (Elements::Ints(yes), Elements::Ints(no)) => Elements::Ints(chosen_of(&chosen, &yes, &no)),
            (Elements::Floats(yes), Elements::Floats(no)) => Elements::Floats(chosen_of(&chosen, &yes, &no)),
            _ => return None,
        })
    };
    Ok(vec![Fact { elements: elements(), ..Fact::partial(dtype, shape.clone()) }])
}

fn chosen_of<T: Copy + PartialEq>(
    chosen: &[Option<i64>],
    yes: &[Option<T>],
    no: &[Option<T>],
) -> Vec<Option<T>> {
    let of = |((condition, yes), no): ((&Option<i64>, &Option<T>), &Option<T>)| match condition {
        Some(0) => *no,
        Some(_) => *yes,
        None => yes.filter(|_| yes == no),
    };
    chosen.iter().zip(yes).zip(no).map(of).collect()
}

/// The elements of both at the places of their common shape.
fn paired(call: &Call<'_>, a: &Fact, b: &Fact, shape: &Option<Dims>) -> Option<(Elements, Elements)> {
    if call.opset < 7 && a.shape != b.shape {
        return None;
    }
    let full: Vec<usize> = shape.as_ref()?.iter().copied().collect::<Option<_>>()?;
    Some((stretched(a, &full)?, stretched(b, &full)?))
}

/// Before version 7 (8 for variadic operators) the second input was stretched to the first, along an axis that an
/// attribute names.
fn common_shape(call: &Call<'_>, inputs: &[&Fact]) -> Result<Option<Dims>, String> {
    if call.opset < 7 {
        return Ok(inputs[0].shape.clone());
    }
    broadcast(inputs.iter().map(|input| input.shape.as_deref()))
}

/// The type that all have; unknown if none is known.
pub(super) fn same_type(inputs: &[&Fact]) -> Result<Option<DType>, String> {
    let mut types = inputs.iter().filter_map(|input| input.dtype);
    let first = types.next();
    match types.find(|dtype| Some(*dtype) != first) {
        Some(other) => Err(format!("types {:?} and {other:?} should be equal", first.unwrap_or(other))),
        None => Ok(first),
    }
}
