//! Normalizations, and the fused activations and sums that ONNX Runtime puts around them.

use super::{
    Call, Fact, Row,
    call::{agree, axis},
    window::channels_last,
};
use crate::onnx::DType;

pub(super) const NORM: &[Row] = &[
    ("", "BatchNormalization", batch_norm),
    ("", "InstanceNormalization", same),
    ("", "GroupNormalization", same),
    ("", "LayerNormalization", layer_norm),
    ("", "LRN", same),
    ("", "LpNormalization", same),
    ("", "MeanVarianceNormalization", same),
    ("", "RMSNormalization", rms_norm),
    // ONNX Runtime writes this operator of its own into the standard domain.
    ("", "SimplifiedLayerNormalization", simplified_layer_norm),
    ("com.ms.internal.nhwc", "BatchNormalization", |call| channels_last(call, batch_norm)),
    ("com.ms.internal.nhwc", "InstanceNormalization", same),
    ("com.ms.internal.nhwc", "LRN", same),
    ("com.microsoft", "SimplifiedLayerNormalization", simplified_layer_norm),
    ("com.microsoft", "SkipLayerNormalization", skip_layer_norm),
    ("com.microsoft", "SkipSimplifiedLayerNormalization", skip_layer_norm),
    ("com.microsoft", "GroupNorm", same),
    ("com.microsoft", "SkipGroupNorm", twice_the_same),
    ("com.microsoft", "GatedRMSNorm", same),
    ("com.microsoft", "BranchwiseRMSNorm", same),
    ("com.microsoft", "BiasAdd", same),
    ("com.microsoft", "BiasGelu", same),
    ("com.microsoft", "BiasSoftmax", same),
    ("com.microsoft", "BiasSplitGelu", bias_split_gelu),
    ("com.microsoft", "EngramGate", twice_the_same),
    ("com.microsoft", "FastGelu", same),
    ("com.microsoft", "GatedAdd", same),
    ("com.microsoft", "Gelu", same),
    ("com.microsoft", "QuickGelu", same),
    ("com.microsoft", "ScaledSiLU", same),
    ("com.microsoft", "HyperConnectionPostMix", same),
];

fn same(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    Ok(vec![call.same_as(0)?])
}

fn twice_the_same(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    Ok(vec![call.same_as(0)?; 2])
}

/// The statistics that follow the result have one element per channel: four of them up to opset 13, two after it.
fn batch_norm(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let y = call.same_as(0)?;
    let mut channels = match &y.shape {
        Some(dims) => *dims.get(1).ok_or("a tensor without channels")?,
        None => None,
    };
    for input in 1..5 {
        if let Some([size]) = call.dims(input) {
            channels =
                agree(channels, *size).map_err(|problem| format!("channels of input {input}: {problem}"))?;
        }
    }
    let statistic = Fact::partial(call.dtype(3), Some(vec![channels]));
    let count = if call.opset < 14 { 4 } else { 2 };
    Ok([vec![y], vec![statistic; count]].concat())
}

/// The result, and mean and inverse deviation with sizes of 1 along the axes that are normalized.
fn layer_norm(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let statistic = statistic(call, call.attr_dtype("stash_type").unwrap_or(DType::F32))?;
    Ok(vec![normalized(call)?, statistic.clone(), statistic])
}

fn rms_norm(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    Ok(vec![normalized(call)?])
}

/// The result has the type of the weights, which may differ from the input's.
fn simplified_layer_norm(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let y = Fact { dtype: call.dtype(1), ..normalized(call)? };
    Ok(vec![y, statistic(call, call.attr_dtype("stash_type").unwrap_or(DType::F32))?])
}

/// The result, mean and inverse deviation of each row, and the sum that was normalized.
fn skip_layer_norm(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let statistic = statistic(call, DType::F32)?;
    Ok(vec![normalized(call)?, statistic.clone(), statistic, call.same_as(0)?])
}

/// Type and shape of the first input, along whose last axis all weights lie.
fn normalized(call: &Call<'_>) -> Result<Fact, String> {
    let mut y = call.same_as(0)?;
    if let Some(last) = y.shape.as_mut().and_then(|dims| dims.last_mut()) {
        for input in 1..call.inputs.len() {
            if let Some(size) = call.dims(input).and_then(|dims| *dims.last()?).filter(|size| *size != 1) {
                *last = agree(*last, Some(size))
                    .map_err(|problem| format!("rows of input {input}: {problem}"))?;
            }
        }
    }
    Ok(y)
}

fn statistic(call: &Call<'_>, dtype: DType) -> Result<Fact, String> {
    let mut shape = call.same_as(0)?.shape;
    if let Some(dims) = &mut shape {
        let first = axis(call.attr_int("axis", -1), dims.len())?;
        dims[first..].fill(Some(1));
    }
    Ok(Fact::partial(Some(dtype), shape))
}

/// One half of each row gates the other.
fn bias_split_gelu(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let mut y = call.same_as(0)?;
    if let Some(last) = y.shape.as_mut().and_then(|dims| dims.last_mut()) {
        *last = match *last {
            Some(size) if size % 2 != 0 => return Err(format!("rows of {size} are halved")),
            size => size.map(|size| size / 2),
        };
    }
    Ok(vec![y])
}
