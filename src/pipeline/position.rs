//! Where tokens are: position ids, rotary tables and the text encoder's mask.
//!
//! The tables are constants of a request, so they are inputs of the graphs: no sine is left to a GPU's f16.

use crate::tensor::HostTensor;

/// A token's place in FLUX.2's joint sequence: time, row, column, index in the text.
pub type PositionId = [i64; 4];

/// What a masked key gets added to its score.
///
/// -2^15 is exact in f32, f16 and bf16, and the sum stays finite in f16 for every score above -32752, so that not
/// even a fully masked row gives NaN. The softmax weight is exactly 0 for every row that sees one key: e^-104 is
/// already 0 in f32, and scores after q/k norms lie within a few hundreds.
pub const MASKED: f32 = -32768.0;

/// Why no table can be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PositionError {
    #[error("ids have {ids} axes, the model's rotary axes are {axes:?}")]
    Axes { ids: usize, axes: Vec<usize> },
    #[error("a rotary axis has {0} dims; it needs a positive even number")]
    Odd(usize),
    #[error("rope theta is {0}; it must be finite and above 0")]
    Theta(f64),
}

/// How text tokens are numbered on the last axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TextIds {
    /// `(0, 0, 0, i)`: FLUX.2.
    #[default]
    Index,
    /// `(0, 0, 0, 0)`: FLUX.1, and a mistake easily made with FLUX.2.
    Zero,
}

/// Whether the text encoder's queries see the keys of padding tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PadKeys {
    /// The reference's behaviour.
    #[default]
    Hidden,
    /// Causal mask only. Changes every padding row, which the transformer reads: a negative control for parity tests.
    Visible,
}

/// Ids of `rows * columns` image tokens, row by row. `time` is 0 for the picture itself, [`reference_time`] for others.
pub fn image_ids(time: i64, rows: usize, columns: usize) -> Vec<PositionId> {
    let row = |r: usize| (0..columns).map(move |c| [time, r as i64, c as i64, 0]);
    (0..rows).flat_map(row).collect()
}

/// The time axis of reference image `k`, counted from 0.
pub fn reference_time(k: usize) -> i64 {
    10 + 10 * k as i64
}

/// Ids of `length` text tokens.
pub fn text_ids(length: usize, numbering: TextIds) -> Vec<PositionId> {
    let last = |i: usize| if numbering == TextIds::Index { i as i64 } else { 0 };
    (0..length).map(|i| [0, 0, 0, last(i)]).collect()
}

/// Rotary tables `(cos, sin)`, each `[tokens, sum(axes) / 2]` f32: one angle per pair of dims.
///
/// Axis `a` has `axes[a] / 2` angles `id[a] * theta^(-2j / axes[a])`, in f64; the axes lie side by side.
/// Source: diffusers' `Flux2PosEmbed`, whose tables repeat each angle for both dims of the interleaved pair.
pub fn rope_tables<const A: usize>(
    ids: &[[i64; A]],
    axes: &[usize],
    theta: f64,
) -> Result<(HostTensor, HostTensor), PositionError> {
    if axes.len() != A {
        return Err(PositionError::Axes { ids: A, axes: axes.to_vec() });
    }
    check_theta(theta)?;
    let mut frequencies = Vec::new();
    for (axis, dims) in axes.iter().enumerate() {
        check_dims(*dims)?;
        frequencies.extend((0..dims / 2).map(|j| (axis, theta.powf(-2.0 * j as f64 / *dims as f64))));
    }
    let angles = ids.iter().flat_map(|id| frequencies.iter().map(|(axis, f)| id[*axis] as f64 * f));
    Ok(cos_and_sin(&[ids.len(), frequencies.len()], angles))
}

/// Rotary tables `(cos, sin)` of a language model, each `[length, head_dim / 2]` f32, for split-half rotation.
///
/// Inverse frequencies and angles are rounded to f32 as in transformers' `Qwen3RotaryEmbedding`: at position 511 the
/// reference's own rounding is 3e-5, so exact angles would be further from it.
pub fn rope_tables_1d(
    length: usize,
    head_dim: usize,
    theta: f64,
) -> Result<(HostTensor, HostTensor), PositionError> {
    check_theta(theta)?;
    check_dims(head_dim)?;
    let inverse = |j: usize| {
        let exponent = (2 * j) as f32 / head_dim as f32;
        1.0 / theta.powf(f64::from(exponent)) as f32
    };
    let inverse: Vec<f32> = (0..head_dim / 2).map(inverse).collect();
    let angles = (0..length).flat_map(|p| inverse.iter().map(move |f| f64::from(p as f32 * f)));
    Ok(cos_and_sin(&[length, head_dim / 2], angles))
}

/// The text encoder's additive mask `[1, 1, L, L]` f32 for a 1/0 mask of `L` tokens: 0 where query `i` sees key `j`
/// (`j <= i`, and `j` no padding unless that is left visible), else [`MASKED`].
pub fn text_mask(attention_mask: &[i64], pad_keys: PadKeys) -> HostTensor {
    let length = attention_mask.len();
    let seen = |key: usize| pad_keys == PadKeys::Visible || attention_mask[key] != 0;
    let row = |query: usize| (0..length).map(move |key| if key <= query && seen(key) { 0.0 } else { MASKED });
    HostTensor::f32(&[1, 1, length, length], (0..length).flat_map(row).collect())
}

fn cos_and_sin(shape: &[usize], angles: impl Iterator<Item = f64>) -> (HostTensor, HostTensor) {
    let (cos, sin) = angles.map(|a| (a.cos() as f32, a.sin() as f32)).unzip();
    (HostTensor::f32(shape, cos), HostTensor::f32(shape, sin))
}

fn check_dims(dims: usize) -> Result<(), PositionError> {
    if dims == 0 || !dims.is_multiple_of(2) { Err(PositionError::Odd(dims)) } else { Ok(()) }
}

fn check_theta(theta: f64) -> Result<(), PositionError> {
    if theta.is_finite() && theta > 0.0 { Ok(()) } else { Err(PositionError::Theta(theta)) }
}
