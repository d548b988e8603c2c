//! Sums of products of the columns of a value, over all its rows and all runs.

use std::io::{self, Write};

use rayon::prelude::*;
use viaduct_export::quant::WINDOW;

/// Rows of the sums that one task adds to, while it reads a row of the value once.
const TASK: usize = 8;

/// The sum of `x x^T` over rows `x`, in windows of columns, as [`viaduct_export::quant::Gram`] describes it.
pub struct Sums {
    width: usize,
    /// [width, min(width, WINDOW)]. Of each row only the columns from the first row of its task on are kept up.
    sums: Vec<f32>,
}

impl Sums {
    /// Bytes of the sums of so many columns; `None` for more than can be.
    pub fn bytes(width: usize) -> Option<u64> {
        (width as u64).checked_mul(width.min(WINDOW) as u64)?.checked_mul(4)
    }

    /// `width` is not 0.
    pub fn new(width: usize) -> Sums {
        Sums { width, sums: vec![0.0; width * width.min(WINDOW)] }
    }

    pub fn width(&self) -> usize {
        self.width
    }

    /// Whether all that was added was finite, and its squares, too.
    pub fn are_finite(&self) -> bool {
        let window = self.width.min(WINDOW);
        (0..self.width).all(|i| self.sums[i * window + i % WINDOW].is_finite())
    }

    /// Adds rows of `width` values.
    pub fn add(&mut self, rows: &[f32]) {
        let (width, window) = (self.width, self.width.min(WINDOW));
        // A window is a whole number of tasks, so that none lies in two.
        self.sums.par_chunks_mut(TASK * window).enumerate().for_each(|(task, sums)| {
            let first = task * TASK;
            let end = width.min((first / WINDOW + 1) * WINDOW);
            for row in rows.chunks_exact(width) {
                let columns = &row[first..end];
                for (i, sums) in sums.chunks_exact_mut(window).enumerate() {
                    let (factor, sums) = (row[first + i], &mut sums[first % WINDOW..]);
                    for (sum, column) in sums.iter_mut().zip(columns) {
                        *sum += factor * column;
                    }
                }
            }
        });
    }

    /// Writes the sums as little-endian f32.
    pub fn write(mut self, out: &mut dyn Write) -> io::Result<()> {
        let window = self.width.min(WINDOW);
        for i in 0..self.width {
            let (start, column) = (i - i % WINDOW, i % WINDOW);
            for j in 0..column {
                self.sums[i * window + j] = self.sums[(start + j) * window + column];
            }
        }
        let bytes: Vec<u8> = self.sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        out.write_all(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_the_products_in_each_window() {
        for width in [1, 5, 16, WINDOW + 3] {
            let rows = 3;
            let values: Vec<f32> = (0..rows * width).map(|i| (i * 7 % 11) as f32 - 5.0).collect();
            let mut sums = Sums::new(width);
            values.chunks(width).for_each(|row| sums.add(row));
            let mut bytes = Vec::new();
            sums.write(&mut bytes).unwrap();
            let found: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            let window = width.min(WINDOW);
            for i in 0..width {
                let start = i - i % WINDOW;
                for j in 0..window {
                    let product = |row: usize| values[row * width + i] * values[row * width + start + j];
                    let expected = if start + j < width { (0..rows).map(product).sum() } else { 0.0 };
                    assert_eq!(found[i * window + j], expected, "{width}: {i}, {j}");
                }
            }
        }
    }
}
