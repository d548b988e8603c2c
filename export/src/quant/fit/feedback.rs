//! Feedback (GPTQ, Frantar et al. 2022): with `H` the sum of `x x^T` over the inputs and `d` a row's error, the outputs are off
//! by `d H d^T`. With `H = R R^T`, `R` upper triangular, that is the sum of squares of `d R`, whose element i depends on the
//! errors of columns 0 to i: column by column, each value is chosen to make up for the errors before it. Scales are searched
//! for block by block, for the values that are to be rounded, each weighted with `R[i][i]^2`.
//!
//! `H` is kept in windows of columns (see [`Gram`]); across them nothing is made up for. A row of which rounding has the
//! smaller error in a window keeps it, so that no row is worse than rounded.
//!
//! Besides the matrix itself and its statistics in f64, a task holds [`LANES`] rows, in f32.

use rayon::prelude::*;

use super::{
    LANES, Misfit,
    row::FittedRow,
    scale::{Place, Scale, best_scale, nearest_scale, rounded},
};
use crate::{
    onnx::Tensor,
    quant::{
        Gram, QuantError, WINDOW,
        gram::Factor,
        nbits::{BlockFormat, MAX_BLOCK, Quantized, RowsMut, encode, in_tasks, read_matrix, widen_row},
    },
};

/// A matrix [N, K] whose columns make up for each other's errors.
pub(super) fn feedback(weights: &Tensor, format: &BlockFormat, gram: &Gram) -> Result<Quantized, QuantError> {
    let (shape, bytes) = read_matrix(weights)?;
    gram.check(shape[1])?;
    Ok(fitted(weights, shape, &bytes, format, &gram.factors()?)?.0)
}

/// How far the outputs are off with weights in a format that are fitted with feedback.
pub fn misfit(weights: &Tensor, format: &BlockFormat, gram: &Gram) -> Result<Misfit, QuantError> {
    let ([n, k], bytes) = read_matrix(weights)?;
    gram.check(k)?;
    let factors = gram.factors()?;
    let (_, errors) = fitted(weights, [n, k], &bytes, format, &factors)?;
    let energy = |first: usize| {
        let lanes = Lanes::read(weights, &bytes, [first, LANES.min(n - first)], k, format);
        let windows = factors.iter().zip(lanes.values.chunks(WINDOW));
        windows.flat_map(|(factor, values)| cost(factor, values)).sum::<f64>()
    };
    let energies: Vec<f64> = (0..n).into_par_iter().step_by(LANES).map(energy).collect();
    Ok(Misfit { error: errors.iter().sum(), energy: energies.iter().sum() })
}

/// The matrix, and how far the outputs of each task's rows are off; the factors are those of its inputs.
fn fitted(
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
