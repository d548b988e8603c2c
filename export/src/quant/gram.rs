//! What is known of the inputs of a linear layer: the sum of `x x^T` over the rows that it has seen, from which follows what an
//! error of its weights does to its outputs.
//!
//! Kept in windows of columns: pairs of columns in different windows are left out, so that a layer of 12288 inputs has 12
//! matrices of 1024 x 1024 and not one of 12288 x 12288.

use rayon::prelude::*;

use super::QuantError;
use crate::onnx::{Bytes, DType, Tensor, tensor::widen};

/// Columns of a window; a multiple of every block.
pub const WINDOW: usize = 1024;
/// Share of the mean diagonal that is added to the diagonal: what is seen of few inputs is believed less, and a few rows of
/// huge values, as language models have them, do not decide everything. docs/quality.md compares shares.
pub const DAMPING: f64 = 0.3;

/// The sums of a layer with K inputs: F32 [K, min(K, [`WINDOW`])]. Row i holds the products of input i with those of its
/// window; what of a row is beyond K is 0.
#[derive(Clone, Debug)]
pub struct Gram(Tensor);

/// One window's sums `H`, damped, as `H = R R^T` with an upper triangular `R`.
pub(super) struct Factor {
    /// `R[i][i]^2`: what the square of an error of column i costs once the columns after it have made up for it.
    pub costs: Vec<f32>,
    /// Row i holds `R[j][i] / R[i][i]` for the columns j before i: how column i makes up for their errors.
    feedback: Vec<f32>,
}

impl Gram {
    /// Checks type and shape.
    pub fn new(sums: Tensor) -> Result<Gram, QuantError> {
        let expected = "[K, min(K, 1024)] in f32";
        match sums.shape[..] {
            [k, width] if sums.dtype == DType::F32 && width == k.min(WINDOW) => Ok(Gram(sums)),
            _ => Err(QuantError::Shape { found: sums.shape, expected }),
        }
    }

    /// Inputs of the layer.
    pub fn inputs(&self) -> usize {
        self.0.shape[0]
    }

    /// Refuses another number of inputs.
    pub(super) fn check(&self, k: usize) -> Result<(), QuantError> {
        match self.inputs() {
            inputs if inputs == k => Ok(()),
            found => Err(QuantError::Inputs { expected: k, found }),
        }
    }

    /// As they were given.
    pub(super) fn sums(&self) -> &Tensor {
        &self.0
    }

    /// How much each input counts: the mean diagonal's share is added, so that none counts nothing.
    pub(super) fn diagonal(&self) -> Result<Vec<f32>, QuantError> {
        let windows = self.windows()?;
        Ok(windows.iter().flat_map(|h| h.damped_diagonal()).map(|d| d as f32).collect())
    }

    /// The factor of each window.
    pub(super) fn factors(&self) -> Result<Vec<Factor>, QuantError> {
        let factors = self.windows()?.into_par_iter().map(Window::factor);
        let all: Option<Vec<Factor>> = factors.collect();
        all.ok_or_else(|| self.unsound("they are of no positive definite matrix"))
    }

    fn unsound(&self, problem: &'static str) -> QuantError {
        let file = match &self.0.bytes {
            Bytes::Mapped { file, .. } => Some(file.path.clone()),
            _ => None,
        };
        QuantError::Statistics { file, problem }
    }

    fn windows(&self) -> Result<Vec<Window>, QuantError> {
        let bytes = self.0.bytes.read().map_err(QuantError::Source)?;
        let sums = widen(DType::F32, &bytes).unwrap_or_default();
        let (k, width) = (self.inputs(), self.inputs().min(WINDOW));
        if sums.len() != k * width {
            return Err(QuantError::Length { expected: k * width * 4, found: bytes.len() });
        }
        if k == 0 {
            return Ok(Vec::new());
        }
        let window = |rows: &[f32]| {
            let size = rows.len() / width;
            let sums = rows.chunks_exact(width).flat_map(|row| &row[..size]).map(|x| f64::from(*x)).collect();
            Window { size, sums }
        };
        let windows: Vec<Window> = sums.chunks(width * WINDOW).map(window).collect();
        let sound = windows.iter().all(Window::is_sound);
        if sound { Ok(windows) } else { Err(self.unsound("they are no sums of squares")) }
    }
}

/// The sums of one window, [size, size].
struct Window {
    size: usize,
    sums: Vec<f64>,
}

impl Window {
    fn is_sound(&self) -> bool {
        let diagonal = self.sums.iter().step_by(self.size + 1);
        self.sums.iter().all(|x| x.is_finite()) && diagonal.clone().all(|x| *x >= 0.0)
    }

    fn damped_diagonal(&self) -> impl Iterator<Item = f64> {
        let diagonal = self.sums.iter().step_by(self.size + 1);
        let mean = diagonal.clone().sum::<f64>() / self.size as f64;
        // Of inputs that were never anything but zero, each counts the same.
        let damping = if mean > 0.0 { mean * DAMPING } else { 1.0 };
        diagonal.map(move |d| d + damping)
    }

    /// Cholesky's factorisation from the last column to the first, row by row of `R`'s tails; none of a matrix that is not
    /// positive definite.
    fn factor(mut self) -> Option<Factor> {
        let n = self.size;
        let diagonal: Vec<f64> = self.damped_diagonal().collect();
        for (j, d) in diagonal.into_iter().enumerate() {
            self.sums[j * n + j] = d;
        }
        let r = &mut self.sums;
        for j in (0..n).rev() {
            let (above, row) = r.split_at_mut(j * n);
            let tail = &row[j + 1..n];
            let pivot = row[j] - dot(tail, tail);
            if pivot.is_nan() || pivot <= 0.0 {
                return None;
            }
            let root = pivot.sqrt();
            for above in above.chunks_exact_mut(n) {
                above[j] = (above[j] - dot(&above[j + 1..], tail)) / root;
            }
            row[j] = root;
        }
        let costs = (0..n).map(|i| (r[i * n + i] * r[i * n + i]) as f32).collect();
        let mut feedback = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..i {
                feedback[i * n + j] = (r[j * n + i] / r[i * n + i]) as f32;
            }
        }
        Some(Factor { costs, feedback })
    }
}

impl Factor {
    /// How column i makes up for the errors of the columns before it.
    pub fn feedback(&self, i: usize) -> &[f32] {
        &self.feedback[i * self.costs.len()..][..i]
    }
}

/// Summed in lanes, whose order no thread changes.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    const LANES: usize = 8;
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f64>()
}
