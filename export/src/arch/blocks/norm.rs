//! Normalisation layers. All statistics are computed in f32.

use crate::{
    arch::author::{Author, AuthorError},
    onnx::{Attribute, DType, Tensor, ValueId},
};

/// RMSNorm over the last axis with a weight of the checkpoint; the result has the type of `x`.
pub fn rms_norm(
    a: &mut Author<'_>,
    x: ValueId,
    weight: &str,
    width: usize,
    eps: f32,
) -> Result<ValueId, AuthorError> {
    let weight = a.weight(weight, &[width], a.graph.dtype(x))?;
    Ok(a.graph.op(
        "RMSNormalization",
        &[x, weight],
        &[("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(eps))],
    ))
}

/// LayerNorm over the last axis whose scale and shift are values of the graph ([width] each): an adaptive layer norm
/// in one operator.
pub fn adaptive_layer_norm(
    a: &mut Author<'_>,
    x: ValueId,
    scale: ValueId,
    shift: ValueId,
    eps: f32,
) -> ValueId {
    a.graph.op(
        "LayerNormalization",
        &[x, scale, shift],
        &[("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(eps))],
    )
}

/// GroupNorm over [1,C,H,W] in f32, as InstanceNormalization between two reshapes: no runtime has a GroupNorm kernel
/// for this device. The width keeps its place in both shapes, so that neither needs the picture's size.
pub fn group_norm(
    a: &mut Author<'_>,
    x: ValueId,
    prefix: &str,
    channels: usize,
    groups: usize,
    eps: f32,
) -> Result<ValueId, AuthorError> {
    let x = a.to_f32(x);
    let grouped = a.graph.reshape(x, &[1, groups as i64, -1, 0]);
    let ones = a.graph.small_constant(Tensor::from_f32(&[groups], &vec![1.0; groups]));
    let zeros = a.graph.small_constant(Tensor::from_f32(&[groups], &vec![0.0; groups]));
    let normed =
        a.graph.op("InstanceNormalization", &[grouped, ones, zeros], &[("epsilon", Attribute::Float(eps))]);
    let y = a.graph.reshape(normed, &[1, channels as i64, -1, 0]);
    let weight = per_channel(a, &format!("{prefix}.weight"), channels)?;
    let bias = per_channel(a, &format!("{prefix}.bias"), channels)?;
    let scaled = a.graph.mul(y, weight);
    Ok(a.graph.add(scaled, bias))
}

/// A [C] weight of the checkpoint as f32 [C,1,1].
fn per_channel(a: &mut Author<'_>, name: &str, channels: usize) -> Result<ValueId, AuthorError> {
    let mut tensor = a.tensor(name, &[channels], DType::F32)?;
    tensor.shape = vec![channels, 1, 1];
    Ok(a.graph.constant(name, tensor))
}
