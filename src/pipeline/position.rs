//! Where tokens are: position ids, rotary tables and the text encoder's mask.
//!
//! The tables are constants of a request, so they are inputs of the graphs: no sine is left to a GPU's f16.

pub use viaduct_export::arch::flux2::parameters::TextIds;

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

/// Whether the text encoder's queries see the keys of padding tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PadKeys {
    /// The reference's behaviour.
    #[default]
    Hidden,
    /// Causal mask only. Changes every padding row, which the transformer reads: a negative control for parity tests.
    Visible,
}

/// Ids of `rows * columns` image tokens, row by row. `time` is 0 for the picture itself, 10 for the first reference.
pub fn image_ids(time: i64, rows: usize, columns: usize) -> Vec<PositionId> {
    let row = |r: usize| (0..columns).map(move |c| [time, r as i64, c as i64, 0]);
    (0..rows).flat_map(row).collect()
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

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn ids_of_image_reference_and_text() {
        assert_eq!(
            image_ids(0, 2, 3),
            [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 2, 0]]
        );
        assert_eq!(image_ids(10, 1, 1), [[10, 0, 0, 0]]);
        assert_eq!(text_ids(3, TextIds::Index), [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2]]);
        assert_eq!(text_ids(2, TextIds::Zero), [[0; 4]; 2]);
    }

    #[test]
    fn axes_lie_side_by_side() {
        let (cos, sin) = rope_tables(&[[3, 0, 0, 0], [0, 0, 2, 5]], &[4, 2, 2, 6], 2000.0).unwrap();
        assert_eq!((&cos.shape[..], &sin.shape[..]), (&[2, 7][..], &[2, 7][..]));
        let angle = |position: f64, j: f64, dims: f64| position * 2000f64.powf(-2.0 * j / dims);
        let expected = [
            [3.0, angle(3.0, 1.0, 4.0), 0.0, 0.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 2.0, 5.0, angle(5.0, 1.0, 6.0), angle(5.0, 2.0, 6.0)],
        ];
        let expected = expected.as_flattened();
        assert_eq!(cos.to_f32(), expected.iter().map(|a| a.cos() as f32).collect::<Vec<_>>());
        assert_eq!(sin.to_f32(), expected.iter().map(|a| a.sin() as f32).collect::<Vec<_>>());
    }

    #[test]
    fn impossible_tables_are_refused() {
        let ids = [[0i64; 4]];
        let error = rope_tables(&ids, &[32, 32, 32], 2000.0).unwrap_err();
        assert_eq!(error.to_string(), "ids have 4 axes, the model's rotary axes are [32, 32, 32]");
        assert_eq!(rope_tables(&ids, &[2, 2, 3, 2], 2000.0), Err(PositionError::Odd(3)));
        assert_eq!(rope_tables(&ids, &[2, 2, 0, 2], 2000.0), Err(PositionError::Odd(0)));
        assert_eq!(rope_tables(&ids, &[2; 4], 0.0), Err(PositionError::Theta(0.0)));
        assert!(rope_tables_1d(4, 64, f64::NAN).is_err());
        assert_eq!(rope_tables_1d(4, 7, 1e6), Err(PositionError::Odd(7)));
    }

    /// From transformers' arithmetic in PyTorch at head_dim 128 and theta 1e6. Exact angles are 3e-5 away.
    #[test]
    fn one_axis_is_the_reference() {
        let (cos, sin) = rope_tables_1d(512, 128, 1e6).unwrap();
        assert_eq!(cos.shape, [512, 64]);
        let (cos, sin) = (cos.to_f32(), sin.to_f32());
        for (position, pair, c, s) in [
            (1, 0, 0.54030234, 0.84147096),
            (511, 0, -0.47167888, 0.8817704),
            (511, 1, -0.97210956, -0.23452727),
            (511, 5, -0.6517879, -0.7584013),
            (300, 20, -0.65321624, -0.7571714),
            (511, 63, 0.9999998, 0.00063411915),
        ] {
            let at = position * 64 + pair;
            assert!((cos[at] - c).abs() < 1e-7 && (sin[at] - s).abs() < 1e-7, "{position}, {pair}");
        }
    }

    #[test]
    fn mask_is_causal_and_hides_padding() {
        const M: f32 = MASKED;
        let mask = text_mask(&[1, 1, 0, 0], PadKeys::Hidden);
        assert_eq!(mask.shape, [1, 1, 4, 4]);
        #[rustfmt::skip]
        assert_eq!(mask.to_f32(), [
            0.0, M, M, M,
            0.0, 0.0, M, M,
            0.0, 0.0, M, M,
            0.0, 0.0, M, M,
        ]);
        let visible = text_mask(&[1, 1, 0, 0], PadKeys::Visible).to_f32();
        assert_eq!(visible, text_mask(&[1; 4], PadKeys::Hidden).to_f32());
        // Real rows do not depend on the choice, padding rows do.
        assert_eq!(visible[..8], mask.to_f32()[..8]);
        assert_ne!(visible[8..], mask.to_f32()[8..]);
    }

    #[test]
    fn masked_scores_are_finite_in_f16_and_weigh_nothing() {
        assert_eq!(f16::from_f32(MASKED).to_f32(), MASKED);
        assert!(f16::from_f32(MASKED - 30000.0).is_finite());
        assert_eq!((MASKED + 1000.0).exp(), 0.0);
    }
}
