//! Matrix products and what is built on them.

use std::collections::BTreeMap;

use super::{Call, Dims, Fact, Row, broadcast::broadcast, call::agree, elementwise::same_type};
use crate::onnx::DType;

pub(super) const PRODUCTS: &[Row] = &[
    ("", "Det", determinant),
    ("", "Einsum", einsum),
    ("", "Gemm", gemm),
    ("", "MatMul", matmul),
    ("", "MatMulInteger", matmul_integer),
    ("", "QLinearMatMul", qlinear_matmul),
];

fn matmul(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (a, b) = (call.required(0)?, call.required(1)?);
    let dtype = same_type(&[a, b])?;
    Ok(vec![Fact::partial(dtype, product_shape(a.shape.as_deref(), b.shape.as_deref())?)])
}

fn matmul_integer(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (a, b) = (call.required(0)?, call.required(1)?);
    Ok(vec![Fact::partial(Some(DType::I32), product_shape(a.shape.as_deref(), b.shape.as_deref())?)])
}

/// Inputs: a with scale and zero point, b likewise, scale and zero point of the output, which gives the type.
fn qlinear_matmul(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (a, b) = (call.required(0)?, call.required(3)?);
    Ok(vec![Fact::partial(call.dtype(7), product_shape(a.shape.as_deref(), b.shape.as_deref())?)])
}

/// Numpy's `matmul`: a vector is a row on the left and a column on the right, and its axis goes again.
pub(super) fn product_shape(
    a: Option<&[Option<usize>]>,
    b: Option<&[Option<usize>]>,
) -> Result<Option<Dims>, String> {
    let (Some(a), Some(b)) = (a, b) else { return Ok(None) };
    let (rows, a_inner, a_batch) = match a {
        [] => return Err("a scalar in a matrix product".into()),
        [inner] => (None, *inner, &a[..0]),
        [batch @ .., rows, inner] => (Some(*rows), *inner, batch),
    };
    let (columns, b_inner, b_batch) = match b {
        [] => return Err("a scalar in a matrix product".into()),
        [inner] => (None, *inner, &b[..0]),
        [batch @ .., inner, columns] => (Some(*columns), *inner, batch),
    };
    agree(a_inner, b_inner)?;
    let mut shape = broadcast([Some(a_batch), Some(b_batch)])?.unwrap_or_default();
    shape.extend(rows);
    shape.extend(columns);
    Ok(Some(shape))
}

fn gemm(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (a, b) = (call.required(0)?, call.required(1)?);
    let sides = |input: &Fact, transposed: bool| match input.shape.as_deref() {
        None => Ok([None, None]),
        Some([rows, columns]) if transposed => Ok([*columns, *rows]),
        Some([rows, columns]) => Ok([*rows, *columns]),
        Some(dims) => Err(format!("a matrix of rank {}", dims.len())),
    };
    let [rows, inner] = sides(a, call.attr_int("transA", 0) != 0)?;
    let [other, columns] = sides(b, call.attr_int("transB", 0) != 0)?;
    agree(inner, other)?;
    Ok(vec![Fact::partial(same_type(&[a, b])?, Some(vec![rows, columns]))])
}

fn determinant(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let input = call.required(0)?;
    let shape = match input.shape.as_deref() {
        None => None,
        Some([batch @ .., rows, columns]) => agree(*rows, *columns).map(|_| Some(batch.to_vec()))?,
        Some(dims) => return Err(format!("a matrix of rank {}", dims.len())),
    };
    Ok(vec![Fact::partial(input.dtype, shape)])
}

/// One axis of a term: a letter, or the axes that `...` stands for, counted from their end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Label {
    Rest(usize),
    Letter(char),
}

fn einsum(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let inputs: Vec<&Fact> = (0..call.inputs.len()).map(|i| call.required(i)).collect::<Result<_, _>>()?;
    let dtype = same_type(&inputs)?;
    let equation = call.attr_str("equation").ok_or("attribute 'equation' is missing")?;
    let equation: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (left, right) = match equation.split_once("->") {
        Some((left, right)) => (left, Some(right)),
        None => (equation.as_str(), None),
    };
    let terms: Vec<&str> = left.split(',').collect();
    if terms.len() != inputs.len() {
        return Err(format!("{} terms for {} inputs", terms.len(), inputs.len()));
    }
    let mut sizes = BTreeMap::<Label, (Option<usize>, usize)>::new();
    let mut rest = Some(0);
    for (term, input) in terms.iter().zip(&inputs) {
        let Some(dims) = &input.shape else {
            rest = rest.filter(|_| !term.contains("..."));
            let labels = if term.contains("...") { Vec::new() } else { labels(term, 0)? };
            labels.into_iter().for_each(|label| sizes.entry(label).or_insert((None, 0)).1 += 1);
            continue;
        };
        let letters = term.replace("...", "").chars().count();
        let hidden = dims.len().checked_sub(letters).filter(|hidden| *hidden == 0 || term.contains("..."));
        let hidden = hidden.ok_or_else(|| format!("term '{term}' for rank {}", dims.len()))?;
        rest = rest.map(|rest| rest.max(hidden));
        for (label, dim) in labels(term, hidden)?.into_iter().zip(dims) {
            let (size, uses) = sizes.entry(label).or_insert((Some(1), 0));
            *size = broadcast([Some(&[*size][..]), Some(&[*dim][..])])?.and_then(|dims| dims[0]);
            *uses += 1;
        }
    }
    let Some(rest) = rest else { return Ok(vec![Fact::partial(dtype, None)]) };
    let output: Vec<Label> = match right {
        Some(right) => labels(right, rest)?,
        // Without a right side: the hidden axes, then what is named once, in order.
        None => {
            let hidden = (0..rest).rev().map(Label::Rest);
            let once =
                sizes.iter().filter(|(label, (_, uses))| matches!(label, Label::Letter(_)) && *uses == 1);
            hidden.chain(once.map(|(label, _)| *label)).collect()
        }
    };
    let size = |label: &Label| match sizes.get(label) {
        Some((size, _)) => Ok(*size),
        None => Err(format!("'{equation}' asks for an axis that no input has")),
    };
    Ok(vec![Fact::partial(dtype, Some(output.iter().map(size).collect::<Result<_, _>>()?))])
}

fn labels(term: &str, hidden: usize) -> Result<Vec<Label>, String> {
    let letters = |text: &str| -> Result<Vec<Label>, String> {
        let letter = |c: char| match c.is_ascii_alphabetic() {
            true => Ok(Label::Letter(c)),
            false => Err(format!("'{c}' in a term")),
        };
        text.chars().map(letter).collect()
    };
    let Some((before, after)) = term.split_once("...") else { return letters(term) };
    let hidden = (0..hidden).rev().map(Label::Rest);
    Ok(letters(before)?.into_iter().chain(hidden).chain(letters(after)?).collect())
}
