//! Classical machine learning and text: the operators whose sizes follow from their inputs' and attributes.

use super::{Call, Fact, Row};
use crate::onnx::{Attribute, DType};

pub(super) const ML: &[Row] = &[
    ("", "TfIdfVectorizer", tf_idf),
    ("ai.onnx.ml", "ArrayFeatureExtractor", array_feature_extractor),
    ("ai.onnx.ml", "Binarizer", |call| Ok(vec![call.same_as(0)?])),
    ("ai.onnx.ml", "LabelEncoder", label_encoder),
    ("ai.onnx.ml", "TreeEnsemble", tree_ensemble),
];

/// One count for each entry of the vocabulary, per row.
fn tf_idf(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let mut y = call.same_as(0)?;
    let indexes = call.attr_ints("ngram_indexes").unwrap_or_default();
    let width = indexes.iter().max().and_then(|last| usize::try_from(last.checked_add(1)?).ok());
    if let Some(dims) = &mut y.shape {
        match dims.len() {
            1 => dims[0] = width,
            2 => dims[1] = width,
            rank => return Err(format!("text of rank {rank}")),
        }
    }
    Ok(vec![Fact::partial(Some(DType::F32), y.shape)])
}

/// The elements of each row at the given places.
fn array_feature_extractor(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let mut y = call.same_as(0)?;
    if let Some(dims) = &mut y.shape {
        let count = call.required(1)?.shape.as_deref().map(super::call::product).transpose()?.flatten();
        match dims.len() {
            0 => return Err("a scalar has no rows".to_owned()),
            1 => *dims = vec![Some(1), count],
            rank => dims[rank - 1] = count,
        }
    }
    Ok(vec![y])
}

/// The type is that of the values that stand for the keys.
fn label_encoder(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let dtype = match call.node.attribute("values_tensor") {
        Some(Attribute::Tensor(values)) => Some(values.dtype),
        _ if call.node.attribute("values_int64s").is_some() => Some(DType::I64),
        _ if call.node.attribute("values_floats").is_some() => Some(DType::F32),
        _ if call.node.attribute("values_strings").is_some() => Some(DType::STRING),
        _ => None,
    };
    Ok(vec![Fact::partial(dtype, call.same_as(0)?.shape)])
}

/// Rows [N, features] give [N, targets].
fn tree_ensemble(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let rows = match call.dims(0) {
        None => None,
        Some(&[rows, _]) => rows,
        Some(dims) => return Err(format!("features of rank {}", dims.len())),
    };
    let targets = call.node.int("n_targets").and_then(|targets| usize::try_from(targets).ok());
    Ok(vec![Fact::partial(call.dtype(0), Some(vec![rows, targets]))])
}
