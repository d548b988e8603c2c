//! Operators that make tensors of attributes, sizes, and chance.

use super::{
    Call, Dims, Elements, Fact, MAX_ELEMENTS, Row,
    call::unknown_dims,
    elementwise::same_type,
    fact::{count, round},
};
use crate::onnx::{Attribute, DType};

pub(super) const CREATION: &[Row] = &[
    ("", "Bernoulli", like),
    ("", "Constant", constant),
    ("", "ConstantOfShape", constant_of_shape),
    ("", "EyeLike", like),
    ("", "Multinomial", multinomial),
    ("", "OneHot", one_hot),
    ("", "RandomNormal", random),
    ("", "RandomNormalLike", like),
    ("", "RandomUniform", random),
    ("", "RandomUniformLike", like),
    ("", "Range", range),
];

fn constant(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let known = |attribute: &(String, Attribute)| fact_of(&attribute.0, &attribute.1);
    let fact = call.node.attributes.iter().find_map(known);
    fact.map(|fact| vec![fact]).ok_or_else(|| "no attribute says its value".into())
}

fn fact_of(name: &str, attribute: &Attribute) -> Option<Fact> {
    let ints = |values: &[i64]| Some(Elements::Ints(values.iter().copied().map(Some).collect()));
    let floats =
        |values: &[f32]| Some(Elements::Floats(values.iter().map(|v| Some(f64::from(*v))).collect()));
    let (int, float, string) = (Some(DType::I64), Some(DType::F32), Some(DType::STRING));
    Some(match (name, attribute) {
        ("value", Attribute::Tensor(tensor)) => Fact::of_tensor(tensor),
        ("value_int", Attribute::Int(value)) => Fact::with_elements(int, &[], ints(&[*value])),
        ("value_ints", Attribute::Ints(values)) => Fact::with_elements(int, &[values.len()], ints(values)),
        ("value_float", Attribute::Float(value)) => Fact::with_elements(float, &[], floats(&[*value])),
        ("value_floats", Attribute::Floats(values)) => {
            Fact::with_elements(float, &[values.len()], floats(values))
        }
        ("value_string", Attribute::String(_)) => Fact::of(string, &[]),
        ("value_strings", Attribute::Strings(values)) => Fact::of(string, &[values.len()]),
        ("sparse_value", Attribute::Other(proto)) => {
            let sparse = proto.sparse_tensor.as_ref()?;
            let number = sparse.values.as_ref()?.data_type.filter(|number| *number > 0);
            let dims = sparse.dims.iter().map(|dim| usize::try_from(*dim).ok());
            Fact::partial(number.map(DType::from_onnx), Some(dims.collect()))
        }
        _ => return None,
    })
}

fn constant_of_shape(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (dtype, value) = match call.node.attribute("value") {
        Some(Attribute::Tensor(tensor)) => (Some(tensor.dtype), Elements::of(tensor)),
        Some(_) => (None, None),
        None => (Some(DType::F32), Some(Elements::Floats(vec![Some(0.0)]))),
    };
    let input = call.required(0)?;
    let Some(sizes) = input.partial_ints() else {
        // A list that is not known still says how many sizes there are.
        let rank = match input.shape.as_deref() {
            Some([Some(rank)]) if *rank <= MAX_ELEMENTS => Some(*rank),
            _ => None,
        };
        return Ok(vec![Fact::partial(dtype, rank.map(unknown_dims))]);
    };
    let size = |size: &Option<i64>| size.map(usize::try_from).transpose();
    let dims: Dims =
        sizes.iter().map(size).collect::<Result<_, _>>().map_err(|_| format!("sizes {sizes:?}"))?;
    let output = Fact::partial(dtype, Some(dims));
    let elements = output.full_shape().zip(value).and_then(|(shape, value)| {
        let count = count(&shape).filter(|count| *count <= MAX_ELEMENTS)?;
        Some(value.pick(&vec![Some(0); count]))
    });
    Ok(vec![Fact { elements, ..output }])
}

/// The shape of the input; the type of an attribute or else of the input.
fn like(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let output = call.same_as(0)?;
    Ok(vec![Fact { dtype: call.attr_dtype("dtype").or(output.dtype), ..output }])
}

fn random(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let dtype = call.attr_dtype("dtype").unwrap_or(DType::F32);
    let sizes = call.attr_ints("shape").ok_or("attribute 'shape' is missing")?;
    let shape: Result<Vec<usize>, _> = sizes.iter().map(|size| usize::try_from(*size)).collect();
    Ok(vec![Fact::of(Some(dtype), &shape.map_err(|_| format!("sizes {sizes:?}"))?)])
}

fn multinomial(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let batch = match call.required(0)?.shape.as_deref() {
        None => None,
        Some([batch, _]) => *batch,
        Some(dims) => return Err(format!("rank {}", dims.len())),
    };
    let samples = usize::try_from(call.attr_int("sample_size", 1)).map_err(|_| "sample_size is negative")?;
    let dtype = call.attr_dtype("dtype").unwrap_or(DType::I32);
    Ok(vec![Fact::partial(Some(dtype), Some(vec![batch, Some(samples)]))])
}

fn one_hot(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (indices, depth) = (call.required(0)?, call.required(1)?);
    let dtype = call.required(2)?.dtype;
    let Some(dims) = &indices.shape else { return Ok(vec![Fact::partial(dtype, None)]) };
    let at = super::call::axis(call.attr_int("axis", -1), dims.len() + 1)?;
    let depth = match (depth.ints().as_deref(), depth.floats().as_deref()) {
        (Some([depth]), _) => Some(usize::try_from(*depth).map_err(|_| format!("depth {depth}"))?),
        (_, Some([depth])) if (0.0..u32::MAX.into()).contains(depth) => Some(*depth as usize),
        _ => None,
    };
    let mut dims = dims.clone();
    dims.insert(at, depth);
    Ok(vec![Fact::partial(dtype, Some(dims))])
}

fn range(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let inputs = [call.required(0)?, call.required(1)?, call.required(2)?];
    let dtype = same_type(&inputs)?;
    let unknown = vec![Fact::partial(dtype, Some(unknown_dims(1)))];
    if let [Some(start), Some(limit), Some(step)] = [call.int(0), call.int(1), call.int(2)] {
        let Some(count) = int_count(start, limit, step)? else { return Ok(unknown) };
        let value = |at: usize| start.checked_add(step.checked_mul(i64::try_from(at).ok()?)?);
        let elements = (count <= MAX_ELEMENTS).then(|| Elements::Ints((0..count).map(value).collect()));
        return Ok(vec![Fact::with_elements(dtype, &[count], elements)]);
    }
    let floats = inputs.map(|input| match input.floats().as_deref() {
        Some([value]) => Some(*value),
        _ => None,
    });
    let (Some(dtype), [Some(start), Some(limit), Some(step)]) = (dtype.filter(|d| d.is_float()), floats)
    else {
        return Ok(unknown);
    };
    if step == 0.0 {
        return Err("a step of 0".into());
    }
    // Implementations differ in where they round. Where that decides, the length is not known.
    let rounded = round(dtype, limit - start).map(|distance| (distance / step).ceil());
    let exact = ((limit - start) / step).ceil();
    let count = rounded.filter(|count| *count == exact && *count < u32::MAX.into());
    Ok(count.map_or(unknown, |count| vec![Fact::of(Some(dtype), &[count.max(0.0) as usize])]))
}

/// Elements of a range of integers; `None` if there are too many to count.
fn int_count(start: i64, limit: i64, step: i64) -> Result<Option<usize>, String> {
    let (distance, step) = (i128::from(limit) - i128::from(start), i128::from(step));
    if step == 0 {
        return Err("a step of 0".into());
    }
    let count = if step > 0 { (distance + step - 1) / step } else { (distance + step + 1) / step };
    Ok(usize::try_from(count.max(0)).ok())
}
