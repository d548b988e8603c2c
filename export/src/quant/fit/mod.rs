//! Chooses the scales, zero points and codes of a block format so that the layer's outputs change little, where
//! [`super::quantize`] only rounds: [`search`] looks for scales, [`feedback`] also makes up for errors.
//!
//! Rows are independent of each other and each is worked on in one order: the bytes do not depend on the number of threads.

mod feedback;
mod row;
mod scale;
mod search;

use serde::{Deserialize, Serialize};

pub use self::feedback::misfit;
use self::{feedback::feedback, search::search};
use super::{
    Gram, QuantError,
    nbits::{BlockFormat, Quantized, quantize_tensor},
};
use crate::onnx::Tensor;

/// Rows of a task: as many as fill vector registers.
const LANES: usize = 16;

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

    /// The statistics that it reads.
    pub(super) fn sums(&self) -> Option<&Tensor> {
        self.gram().map(Gram::sums)
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
            Fitting::Feedback(gram) => feedback(weights, format, gram),
        }
    }
}
