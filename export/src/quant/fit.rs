//! Chooses the scales, zero points and codes of a block format so that the layer's outputs change little, where
//! [`super::quantize`] only rounds.
//!
//! - *Search*: each block takes the scale and zero point that make its weighted squared error smallest, out of a grid around
//!   those of rounding, and then of least squares over its codes. The weights are the mean squares of the inputs, where they
//!   are known, and else all the same.
//! - *Feedback* (GPTQ, Frantar et al. 2022): with `H` the sum of `x x^T` over the inputs and `d` a row's error, the outputs
//!   are off by `d H d^T`. With `H = R R^T`, `R` upper triangular, that is the sum of squares of `d R`, whose element i
//!   depends on the errors of columns 0 to i: column by column, each value is chosen to make up for the errors before it.
//!   Scales are searched for block by block, for the values that are to be rounded, each weighted with `R[i][i]^2`.
//!
//! `H` is kept in windows of columns (see [`Gram`]); across them nothing is made up for. A row of which rounding has the
//! smaller error in a window keeps it, so that no row is worse than rounded.
//!
//! Rows are independent of each other and each is worked on in one order: the bytes do not depend on the number of threads.
//! Besides the matrix itself and its statistics in f64, a task holds [`LANES`] rows, in f32.

use std::ops::RangeInclusive;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{
    Gram, QuantError, WINDOW,
    gram::Factor,
    nbits::{
        BlockFormat, INTEGERS, MAX_BLOCK, Quantized, Range, RowsMut, encode, in_tasks, not_finite,
        quantize_tensor, read_matrix, store_scale, widen_row,
    },
    pack::pack,
};
use crate::onnx::Tensor;

/// Rows of a task: as many as fill vector registers.
const LANES: usize = 16;
/// Shrunken and widened ranges that asymmetric scales are tried of, in steps of 1/40 of the range.
const RANGES: RangeInclusive<u8> = 22..=42;
/// The same for symmetric scales, whose sign is tried both ways.
const SYMMETRIC_RANGES: RangeInclusive<u8> = 24..=46;
const RANGE_STEPS: f32 = 40.0;
/// Rounds of least squares.
const REFINEMENTS: usize = 4;

/// How weights are fitted to their format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fit {
    /// Rounded, with the bytes of ONNX Runtime's own quantiser.
    #[default]
    Nearest,
    /// Scales and zero points are searched for; weighted where statistics of the inputs are given.
    Search,
    /// Errors are made up for; needs statistics of the inputs.
    Feedback,
}

impl Fit {
    pub fn is_nearest(&self) -> bool {
        *self == Fit::Nearest
    }
}

/// A fit with what it needs to know.
#[derive(Clone, Debug)]
pub enum Fitting {
    Nearest,
    Search(Option<Gram>),
    Feedback(Gram),
}

/// How far a layer's outputs are off, summed over all rows of inputs and outputs that its statistics have seen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Misfit {
    /// Squares of the outputs' errors.
    pub error: f64,
    /// Squares of the outputs.
    pub energy: f64,
}

impl Fitting {
    /// Refuses statistics of another number of inputs.
    pub(super) fn check(&self, k: usize) -> Result<(), QuantError> {
        self.gram().map_or(Ok(()), |gram| gram.check(k))
    }

    pub(super) fn release(&self) {
        self.gram().into_iter().for_each(Gram::release);
    }

    fn gram(&self) -> Option<&Gram> {
        match self {
            Fitting::Nearest | Fitting::Search(None) => None,
            Fitting::Search(Some(gram)) | Fitting::Feedback(gram) => Some(gram),
        }
    }

    /// Quantises an f32, f16 or bf16 matrix [N, K].
    pub fn quantize(&self, weights: &Tensor, format: &BlockFormat) -> Result<Quantized, QuantError> {
        match self {
            Fitting::Nearest => quantize_tensor(weights, format),
            Fitting::Search(gram) => search(weights, format, gram.as_ref()),
            Fitting::Feedback(gram) => {
                let (shape, bytes) = read_matrix(weights)?;
                gram.check(shape[1])?;
                Ok(feedback(weights, shape, &bytes, format, &gram.factors()?)?.0)
            }
        }
    }
}

/// How far the outputs are off with weights in a format that are fitted with feedback.
pub fn misfit(weights: &Tensor, format: &BlockFormat, gram: &Gram) -> Result<Misfit, QuantError> {
    let ([n, k], bytes) = read_matrix(weights)?;
    gram.check(k)?;
    let factors = gram.factors()?;
    let (_, errors) = feedback(weights, [n, k], &bytes, format, &factors)?;
    let energy = |first: usize| {
        let lanes = Lanes::read(weights, &bytes, [first, LANES.min(n - first)], k, format);
        let windows = factors.iter().zip(lanes.values.chunks(WINDOW));
        windows.flat_map(|(factor, values)| cost(factor, values)).sum::<f64>()
    };
    let energies: Vec<f64> = (0..n).into_par_iter().step_by(LANES).map(energy).collect();
    Ok(Misfit { error: errors.iter().sum(), energy: energies.iter().sum() })
}

fn search(weights: &Tensor, format: &BlockFormat, gram: Option<&Gram>) -> Result<Quantized, QuantError> {
    let ([n, k], bytes) = read_matrix(weights)?;
    let padded = format.blocks(k) * format.block;
    let mut counts = match gram {
        Some(gram) => {
            gram.check(k)?;
            gram.diagonal()?
        }
        None => vec![1.0; k],
    };
    // What pads the last block is never multiplied.
    counts.resize(padded, 0.0);
    let task = |first: usize, mut rows: RowsMut<'_>| {
        let mut values = vec![0.0; padded];
        let mut row = FittedRow::new(format, k);
        for (lane, number) in (first..n.min(first + LANES)).enumerate() {
            widen_row(weights.dtype, &bytes, number, &mut values[..k]);
            let blocks = values.chunks_exact(format.block).zip(counts.chunks_exact(format.block));
            for (block, (values, counts)) in blocks.enumerate() {
                let place = Place { row: number, block };
                let scale = best_scale(values, counts, nearest_scale(values, place, format)?, format);
                row.scales[block] = scale;
                let codes = &mut row.codes[block * format.block..][..format.block];
                encode(values, scale.step, scale.zero_point, format.max(), codes);
            }
            row.store(&mut rows, lane);
        }
        Ok(())
    };
    Ok(in_tasks([n, k], format, LANES, task)?.0)
}

/// The matrix, and how far the outputs of each task's rows are off; the factors are those of its inputs.
fn feedback(
    weights: &Tensor,
    [n, k]: [usize; 2],
    bytes: &[u8],
    format: &BlockFormat,
    factors: &[Factor],
) -> Result<(Quantized, Vec<f64>), QuantError> {
    format.check()?;
    let task = |first: usize, mut rows: RowsMut<'_>| {
        let count = LANES.min(n - first);
        let mut lanes = Lanes::read(weights, bytes, [first, count], k, format);
        let mut error = 0.0;
        for (index, factor) in factors.iter().enumerate() {
            error += lanes.fit(factor, index * WINDOW, first, format)?;
        }
        for (lane, row) in lanes.rows[..count].iter().enumerate() {
            row.store(&mut rows, lane);
        }
        Ok(error)
    };
    in_tasks([n, k], format, LANES, task)
}

/// Scale and zero point of a block.
#[derive(Clone, Copy, Debug)]
struct Scale {
    /// As it is stored.
    step: f32,
    zero_point: u8,
}

impl Scale {
    fn reciprocal(&self) -> f32 {
        if self.step == 0.0 { 0.0 } else { 1.0 / self.step }
    }

    /// `None` for a scale that its type does not hold.
    fn stored(step: f32, zero_point: u8, format: &BlockFormat) -> Option<Scale> {
        let step = store_scale(step, format.scale, &mut [0; 4][..format.scale_bytes()]);
        step.is_finite().then_some(Scale { step, zero_point })
    }
}

/// A row that is being fitted.
struct FittedRow<'f> {
    format: &'f BlockFormat,
    columns: usize,
    /// Of whole blocks.
    codes: Vec<u8>,
    scales: Vec<Scale>,
}

impl<'f> FittedRow<'f> {
    fn new(format: &'f BlockFormat, columns: usize) -> FittedRow<'f> {
        let blocks = format.blocks(columns);
        let scales = vec![Scale { step: 0.0, zero_point: format.mid() }; blocks];
        FittedRow { format, columns, codes: vec![0; blocks * format.block], scales }
    }

    /// Packs the row into its place among the rows of a task.
    fn store(&self, rows: &mut RowsMut<'_>, index: usize) {
        let FittedRow { format, columns: k, .. } = *self;
        let mut codes = self.codes.clone();
        codes[k..].fill(0);
        pack(&codes, format.bits, &mut rows.codes[index * format.row_bytes(k)..][..format.row_bytes(k)]);
        let scales = &mut rows.scales[index * format.scales_len(1, k)..][..format.scales_len(1, k)];
        for (scale, bytes) in self.scales.iter().zip(scales.chunks_exact_mut(format.scale_bytes())) {
            store_scale(scale.step, format.scale, bytes);
        }
        if !format.symmetric {
            let mut zero_points: Vec<u8> = self.scales.iter().map(|scale| scale.zero_point).collect();
            zero_points.resize(self.scales.len().next_multiple_of(format.per_byte()), format.mid());
            let bytes = zero_points.len() / format.per_byte();
            pack(&zero_points, format.bits, &mut rows.zero_points[index * bytes..][..bytes]);
        }
    }
}

/// A block of a matrix, for messages.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    block: usize,
}

/// The scale of rounding to nearest.
fn nearest_scale(values: &[f32], place: Place, format: &BlockFormat) -> Result<Scale, QuantError> {
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
fn best_scale(values: &[f32], counts: &[f32], nearest: Scale, format: &BlockFormat) -> Scale {
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
fn rounded(level: f32, max: f32) -> f32 {
    // Also sends what is not a number to 0.
    let level = if level > 0.0 { level } else { 0.0 };
    let level = if level < max { level } else { max };
    (level + INTEGERS) - INTEGERS
}

/// As many rows as fill a vector register, column by column.
struct Lanes<'f> {
    /// The weights; lanes without a row hold zeros.
    values: Vec<[f32; LANES]>,
    /// What is lost of them.
    errors: Vec<[f32; LANES]>,
    rows: Vec<FittedRow<'f>>,
}

impl<'f> Lanes<'f> {
    fn new(format: &'f BlockFormat, columns: usize) -> Lanes<'f> {
        let rows = (0..LANES).map(|_| FittedRow::new(format, columns)).collect();
        Lanes { values: vec![[0.0; LANES]; columns], errors: vec![[0.0; LANES]; columns], rows }
    }

    /// So many rows from the first on.
    fn read(
        weights: &Tensor,
        bytes: &[u8],
        [first, count]: [usize; 2],
        columns: usize,
        format: &'f BlockFormat,
    ) -> Lanes<'f> {
        let mut lanes = Lanes::new(format, columns);
        let mut row = vec![0.0; columns];
        for lane in 0..count {
            widen_row(weights.dtype, bytes, first + lane, &mut row);
            lanes.values.iter_mut().zip(&row).for_each(|(column, value)| column[lane] = *value);
        }
        lanes
    }

    /// Fits the columns of a window, which begins at `start`; `first` is the first row's number. How far the outputs are off.
    fn fit(
        &mut self,
        factor: &Factor,
        start: usize,
        first: usize,
        format: &BlockFormat,
    ) -> Result<f64, QuantError> {
        let columns = factor.costs.len();
        let mut fitted = [0.0f64; LANES];
        for block in (0..columns).step_by(format.block) {
            let costs = self.fit_block(factor, start, block, first, format)?;
            fitted.iter_mut().zip(costs).for_each(|(sum, cost)| *sum += cost);
        }
        let plain = self.rounding(start, columns, first, format)?;
        let rounded = cost(factor, &plain.errors);
        for lane in 0..LANES {
            if rounded[lane] < fitted[lane] {
                fitted[lane] = rounded[lane];
                let row = &mut self.rows[lane];
                let (codes, scales) = &plain.rows[lane];
                row.codes[start..][..codes.len()].copy_from_slice(codes);
                row.scales[start / format.block..][..scales.len()].copy_from_slice(scales);
            }
        }
        Ok(fitted.iter().sum())
    }

    /// Fits the block that begins `block` columns into the window. The cost of each row.
    fn fit_block(
        &mut self,
        factor: &Factor,
        start: usize,
        block: usize,
        first: usize,
        format: &BlockFormat,
    ) -> Result<[f64; LANES], QuantError> {
        let size = format.block.min(factor.costs.len() - block);
        let number = (start + block) / format.block;
        let (values, errors) = (&self.values[start..], &mut self.errors[start..]);
        let mut targets = [[0.0f32; LANES]; MAX_BLOCK];
        for (i, target) in targets[..size].iter_mut().enumerate() {
            let made_up = weighted_sum(&factor.feedback(block + i)[..block], &errors[..block]);
            for lane in 0..LANES {
                target[lane] = values[block + i][lane] + made_up[lane];
            }
        }
        let (mut reciprocals, mut steps, mut zero_points) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
        let mut counts = [0.0; MAX_BLOCK];
        counts[..size].copy_from_slice(&factor.costs[block..][..size]);
        for lane in 0..LANES {
            let mut values = [0.0; MAX_BLOCK];
            values.iter_mut().zip(&targets[..size]).for_each(|(value, target)| *value = target[lane]);
            let (values, counts) = (&values[..format.block], &counts[..format.block]);
            let place = Place { row: first + lane, block: number };
            let scale = best_scale(values, counts, nearest_scale(values, place, format)?, format);
            self.rows[lane].scales[number] = scale;
            (reciprocals[lane], steps[lane]) = (scale.reciprocal(), scale.step);
            zero_points[lane] = f32::from(scale.zero_point);
        }
        let max = f32::from(format.max());
        let mut costs = [0.0f64; LANES];
        for (i, target) in targets[..size].iter().enumerate() {
            let column = block + i;
            let made_up = weighted_sum(&factor.feedback(column)[block..], &errors[block..column]);
            for lane in 0..LANES {
                let target = target[lane] + made_up[lane];
                let code = rounded(target * reciprocals[lane] + zero_points[lane], max);
                let value = (code - zero_points[lane]) * steps[lane];
                errors[column][lane] = values[column][lane] - value;
                self.rows[lane].codes[start + column] = code as u8;
                let off = f64::from(target - value);
                costs[lane] += f64::from(factor.costs[column]) * off * off;
            }
        }
        Ok(costs)
    }

    /// The columns of a window as rounding has them.
    fn rounding(
        &self,
        start: usize,
        columns: usize,
        first: usize,
        format: &BlockFormat,
    ) -> Result<Rounding, QuantError> {
        let mut rounding = Rounding { errors: vec![[0.0; LANES]; columns], rows: Vec::new() };
        let padded = format.blocks(columns) * format.block;
        let mut values = vec![0.0; padded];
        for lane in 0..LANES {
            let row = &self.values[start..][..columns];
            values.iter_mut().zip(row).for_each(|(value, row)| *value = row[lane]);
            let (mut codes, mut scales) = (vec![0; padded], Vec::new());
            let blocks = values.chunks_exact(format.block).zip(codes.chunks_exact_mut(format.block));
            for (block, (values, codes)) in blocks.enumerate() {
                let place = Place { row: first + lane, block: start / format.block + block };
                let scale = nearest_scale(values, place, format)?;
                encode(values, scale.step, scale.zero_point, format.max(), codes);
                scales.push(scale);
            }
            for (column, error) in rounding.errors.iter_mut().enumerate() {
                let scale = scales[column / format.block];
                let level = f32::from(codes[column]) - f32::from(scale.zero_point);
                error[lane] = values[column] - level * scale.step;
            }
            rounding.rows.push((codes, scales));
        }
        Ok(rounding)
    }
}

/// A window's columns rounded to nearest.
struct Rounding {
    errors: Vec<[f32; LANES]>,
    /// Codes and scales, lane by lane.
    rows: Vec<(Vec<u8>, Vec<Scale>)>,
}

/// `d H d^T` of each lane's row `d`.
fn cost(factor: &Factor, rows: &[[f32; LANES]]) -> [f64; LANES] {
    let mut costs = [0.0f64; LANES];
    for (i, row) in rows.iter().enumerate() {
        let before = weighted_sum(factor.feedback(i), &rows[..i]);
        for lane in 0..LANES {
            let sum = f64::from(row[lane] + before[lane]);
            costs[lane] += f64::from(factor.costs[i]) * sum * sum;
        }
    }
    costs
}

/// The sum of rows, each weighted.
fn weighted_sum(weights: &[f32], rows: &[[f32; LANES]]) -> [f32; LANES] {
    let mut sum = [0.0; LANES];
    for (weight, row) in weights.iter().zip(rows) {
        for lane in 0..LANES {
            sum[lane] += weight * row[lane];
        }
    }
    sum
}
