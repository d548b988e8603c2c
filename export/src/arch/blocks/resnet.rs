//! Convolutions and residual blocks of image autoencoders, on [1,C,H,W].

use super::norm::{Groups, group_norm_silu};
use crate::{
    arch::author::{Author, AuthorError},
    onnx::{Attribute, ValueId},
};

/// A convolution of the checkpoint with stride 1 and "same" padding; `kernel` is odd.
pub fn conv(
    a: &mut Author<'_>,
    x: ValueId,
    prefix: &str,
    (inputs, outputs): (usize, usize),
    kernel: usize,
) -> Result<ValueId, AuthorError> {
    let x = a.to_compute(x);
    let weight = a.weight(&format!("{prefix}.weight"), &[outputs, inputs, kernel, kernel], a.compute())?;
    conv_of(a, x, prefix, weight, outputs, kernel)
}

/// [`conv`] with a weight [outputs, inputs, kernel, kernel] that the graph has already; it and `x` are of the compute type.
pub fn conv_of(
    a: &mut Author<'_>,
    x: ValueId,
    prefix: &str,
    weight: ValueId,
    outputs: usize,
    kernel: usize,
) -> Result<ValueId, AuthorError> {
    let bias = a.weight(&format!("{prefix}.bias"), &[outputs], a.compute())?;
    let (pad, kernel) = ((kernel / 2) as i64, kernel as i64);
    let attributes =
        [("kernel_shape", Attribute::Ints(vec![kernel; 2])), ("pads", Attribute::Ints(vec![pad; 4]))];
    Ok(a.graph.op("Conv", &[x, weight, bias], &attributes))
}

/// GroupNorm, SiLU, conv, twice, plus the (projected) input: diffusers' ResnetBlock2D without a time embedding.
pub fn resnet_block(
    a: &mut Author<'_>,
    x: ValueId,
    prefix: &str,
    (inputs, outputs): (usize, usize),
    groups: Groups,
) -> Result<ValueId, AuthorError> {
    let y = norm_silu_conv(
        a,
        x,
        [&format!("{prefix}.norm1"), &format!("{prefix}.conv1")],
        (inputs, outputs),
        groups,
    )?;
    let y = norm_silu_conv(
        a,
        y,
        [&format!("{prefix}.norm2"), &format!("{prefix}.conv2")],
        (outputs, outputs),
        groups,
    )?;
    let shortcut = match inputs == outputs {
        true => a.graph.cast(x, a.compute()),
        false => conv(a, x, &format!("{prefix}.conv_shortcut"), (inputs, outputs), 1)?,
    };
    Ok(a.graph.add(shortcut, y))
}

/// GroupNorm, SiLU (both in f32), 3x3 convolution.
pub fn norm_silu_conv(
    a: &mut Author<'_>,
    x: ValueId,
    [norm, conv_prefix]: [&str; 2],
    (inputs, outputs): (usize, usize),
    groups: Groups,
) -> Result<ValueId, AuthorError> {
    let y = group_norm_silu(a, x, norm, inputs, groups)?;
    conv(a, y, conv_prefix, (inputs, outputs), 3)
}

/// Nearest-neighbour doubling of height and width.
pub fn upsample_nearest(a: &mut Author<'_>, x: ValueId) -> ValueId {
    a.graph.resize_nearest(x, &[1.0, 1.0, 2.0, 2.0])
}
