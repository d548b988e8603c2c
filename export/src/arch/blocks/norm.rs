//! Normalisation layers. All statistics are computed in f32.

use super::mlp::silu;
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
    Ok(scaled_rms_norm(a, x, weight, eps))
}

/// RMSNorm over the last axis whose scale [width] is a value of the graph.
pub fn scaled_rms_norm(a: &mut Author<'_>, x: ValueId, scale: ValueId, eps: f32) -> ValueId {
    a.graph.op(
        "RMSNormalization",
        &[x, scale],
        &[("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(eps))],
    )
}

/// LayerNorm over the last axis whose scale and shift (0 if there is none) are values of the graph ([width] each): an
/// adaptive layer norm in one operator.
pub fn adaptive_layer_norm(
    a: &mut Author<'_>,
    x: ValueId,
    scale: ValueId,
    shift: Option<ValueId>,
    eps: f32,
) -> ValueId {
    let operands: Vec<ValueId> = [x, scale].into_iter().chain(shift).collect();
    a.graph.op(
        "LayerNormalization",
        &operands,
        &[("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(eps))],
    )
}

/// Group-norm settings of an autoencoder.
#[derive(Clone, Copy)]
pub struct Groups {
    pub count: usize,
    pub eps: f32,
}

/// GroupNorm of [1,C,H,W] over its channels, in f32.
pub fn group_norm(
    a: &mut Author<'_>,
    x: ValueId,
    prefix: &str,
    channels: usize,
    groups: Groups,
) -> Result<ValueId, AuthorError> {
    let affine = per_channel(a, prefix, channels)?;
    Ok(normalise(a, x, affine, channels, groups))
}

/// GroupNorm and SiLU in f32, the result in the compute type.
///
/// Where that is f16, groups are taken in a few parts, one after the other: f32 tensors of the whole size, of which several
/// wait for their commands to be submitted, would be most of the memory that a decoder takes.
pub fn group_norm_silu(
    a: &mut Author<'_>,
    x: ValueId,
    prefix: &str,
    channels: usize,
    groups: Groups,
) -> Result<ValueId, AuthorError> {
    const MOST_PARTS: usize = 4;
    let most = if a.compute() == DType::F16 { MOST_PARTS } else { 1 };
    let parts = (1..=most).rev().find(|parts| groups.count.is_multiple_of(*parts)).unwrap_or(1);
    let affine = per_channel(a, prefix, channels)?;
    if parts == 1 {
        return Ok(normalise_silu(a, x, affine, channels, groups));
    }
    let (width, groups) = (channels / parts, Groups { count: groups.count / parts, ..groups });
    let mut done = Vec::with_capacity(parts);
    for start in (0..channels as i64).step_by(width) {
        let end = start + width as i64;
        let x = a.graph.slice(x, 1, start, end);
        let affine = affine.map(|values| a.graph.slice(values, 0, start, end));
        done.push(normalise_silu(a, x, affine, width, groups));
    }
    Ok(a.graph.concat(&done, 1))
}

fn normalise_silu(
    a: &mut Author<'_>,
    x: ValueId,
    affine: [ValueId; 2],
    channels: usize,
    groups: Groups,
) -> ValueId {
    let y = normalise(a, x, affine, channels, groups);
    let y = silu(a, y);
    a.to_compute(y)
}

/// InstanceNormalization between two reshapes, scaled and shifted by f32 [C,1,1] each: no runtime has a GroupNorm kernel
/// for this device. The width keeps its place in both shapes, so that neither needs the picture's size.
fn normalise(
    a: &mut Author<'_>,
    x: ValueId,
    [weight, bias]: [ValueId; 2],
    channels: usize,
    Groups { count, eps }: Groups,
) -> ValueId {
    let x = a.to_f32(x);
    let grouped = a.graph.reshape(x, &[1, count as i64, -1, 0]);
    let ones = a.graph.small_constant(Tensor::from_f32(&[count], &vec![1.0; count]));
    let zeros = a.graph.small_constant(Tensor::from_f32(&[count], &vec![0.0; count]));
    let normed =
        a.graph.op("InstanceNormalization", &[grouped, ones, zeros], &[("epsilon", Attribute::Float(eps))]);
    let y = a.graph.reshape(normed, &[1, channels as i64, -1, 0]);
    let scaled = a.graph.mul(y, weight);
    a.graph.add(scaled, bias)
}

/// Weight and bias [C] of the checkpoint, as f32 [C,1,1].
fn per_channel(a: &mut Author<'_>, prefix: &str, channels: usize) -> Result<[ValueId; 2], AuthorError> {
    let mut constant = |part: &str| -> Result<ValueId, AuthorError> {
        let name = format!("{prefix}.{part}");
        let mut tensor = a.tensor(&name, &[channels], DType::F32)?;
        tensor.shape = vec![channels, 1, 1];
        Ok(a.graph.constant(&name, tensor))
    };
    Ok([constant("weight")?, constant("bias")?])
}
