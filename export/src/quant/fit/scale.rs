//! The scale and zero point of a block that make its weighted squared error smallest: out of a grid around those of rounding, and
//! then of least squares over its codes.

use std::ops::RangeInclusive;

use crate::quant::{
    QuantError,
    nbits::{BlockFormat, INTEGERS, Range, not_finite, store_scale},
};

/// Shrunken and widened ranges that asymmetric scales are tried of, in steps of 1/40 of the range.
const RANGES: RangeInclusive<u8> = 22..=42;
/// The same for symmetric scales, whose sign is tried both ways.
const SYMMETRIC_RANGES: RangeInclusive<u8> = 24..=46;
const RANGE_STEPS: f32 = 40.0;
/// Rounds of least squares.
const REFINEMENTS: usize = 4;

/// Scale and zero point of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// As it is stored.
    pub step: f32,
    pub zero_point: u8,
}

impl Scale {
    pub fn reciprocal(&self) -> f32 {
        if self.step == 0.0 { 0.0 } else { 1.0 / self.step }
    }

    /// `None` for a scale that its type does not hold.
    fn stored(step: f32, zero_point: u8, format: &BlockFormat) -> Option<Scale> {
        let step = store_scale(step, format.scale, &mut [0; 4][..format.scale_bytes()]);
        step.is_finite().then_some(Scale { step, zero_point })
    }
}

/// A block of a matrix, for messages.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub row: usize,
    pub block: usize,
}

/// The scale of rounding to nearest.
pub(super) fn nearest_scale(values: &[f32], place: Place, format: &BlockFormat) -> Result<Scale, QuantError> {
    let Place { row, block } = place;
    let range = Range::of(values).ok_or_else(|| not_finite(row, block * format.block, values))?;
    let (scale, zero_point) = range.scale_and_zero_point(format);
    Scale::stored(scale, zero_point, format).ok_or(QuantError::ScaleOverflow {
        row,
        block,
        scale,
        dtype: format.scale,
    })
}

/// The best scale of a block whose values count so much, beginning with that of rounding.
pub(super) fn best_scale(values: &[f32], counts: &[f32], nearest: Scale, format: &BlockFormat) -> Scale {
    let Some(range) = Range::of(values) else { return nearest };
    let mut best = (error(values, counts, nearest, format), nearest);
    for (step, zero_point) in grid(&range, format) {
        keep_better(&mut best, values, counts, Scale::stored(step, zero_point, format), format);
    }
    for _ in 0..REFINEMENTS {
        let (before, scale) = best;
        let Some(step) = least_squares(values, counts, scale, format) else { break };
        keep_better(&mut best, values, counts, Scale::stored(step, scale.zero_point, format), format);
        if best.0 == before {
            break;
        }
    }
    best.1
}

/// Steps and zero points around those of rounding.
fn grid(range: &Range, format: &BlockFormat) -> Vec<(f32, u8)> {
    let part = |part: u8| f32::from(part) / RANGE_STEPS;
    if format.symmetric {
        let step = range.lo.abs().max(range.hi.abs()) / f32::from(format.mid());
        let steps = SYMMETRIC_RANGES.map(|range| step * part(range));
        return steps.flat_map(|step| [(step, format.mid()), (-step, format.mid())]).collect();
    }
    let (lo, hi, max) = (range.lo.min(0.0), range.hi.max(0.0), f32::from(format.max()));
    let centred = |range: u8| {
        let step = (hi - lo) * part(range) / max;
        let centre = if step == 0.0 { 0.0 } else { -lo * part(range) / step };
        let centre = centre.round().clamp(0.0, max) as u8;
        let zero_points = centre.saturating_sub(1)..=centre.saturating_add(1).min(format.max());
        zero_points.map(move |zero_point| (step, zero_point))
    };
    RANGES.flat_map(centred).collect()
}

/// Takes a scale that is better than the best so far; that one's error comes with it.
fn keep_better(
    best: &mut (f32, Scale),
    values: &[f32],
    counts: &[f32],
    scale: Option<Scale>,
    format: &BlockFormat,
) {
    let Some(scale) = scale else { return };
    let found = error(values, counts, scale, format);
    if found < best.0 {
        *best = (found, scale);
    }
}

/// The step that fits the codes of a block best; `None` where there is none.
fn least_squares(values: &[f32], counts: &[f32], scale: Scale, format: &BlockFormat) -> Option<f32> {
    let (reciprocal, zero_point, max) =
        (scale.reciprocal(), f32::from(scale.zero_point), f32::from(format.max()));
    let (mut product, mut square) = (0.0f64, 0.0f64);
    for (value, count) in values.iter().zip(counts) {
        let level = f64::from(rounded(value * reciprocal + zero_point, max) - zero_point);
        product += f64::from(*count) * f64::from(*value) * level;
        square += f64::from(*count) * level * level;
    }
    (square > 0.0).then(|| (product / square) as f32)
}

/// Weighted squared error of a block.
fn error(values: &[f32], counts: &[f32], scale: Scale, format: &BlockFormat) -> f32 {
    const LANES: usize = 8;
    let (reciprocal, zero_point, max) =
        (scale.reciprocal(), f32::from(scale.zero_point), f32::from(format.max()));
    let mut sums = [0.0f32; LANES];
    for (values, counts) in values.as_chunks::<LANES>().0.iter().zip(counts.as_chunks::<LANES>().0) {
        for i in 0..LANES {
            let level = rounded(values[i] * reciprocal + zero_point, max) - zero_point;
            let off = values[i] - level * scale.step;
            sums[i] += counts[i] * off * off;
        }
    }
    sums.iter().sum()
}

/// The code of a level, as a number. Of two codes that are as near it takes the even one.
pub(super) fn rounded(level: f32, max: f32) -> f32 {
    // Also sends what is not a number to 0.
    let level = if level > 0.0 { level } else { 0.0 };
    let level = if level < max { level } else { max };
    (level + INTEGERS) - INTEGERS
}
