//! What the user may choose about a rewrite.

use regex::Regex;

use crate::{quant::BlockFormat, shapes::Sizes};

/// Settings of all passes; each reads what concerns it.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Sizes of named dimensions that are bound for good.
    pub sizes: Sizes,
    pub linears: Linears,
    pub attention: AttentionForm,
}

/// Which matrix products are quantised, and how.
#[derive(Clone, Debug)]
pub struct Linears {
    /// The type of the scales follows the activations, whatever this says.
    pub format: BlockFormat,
    /// `accuracy_level` of MatMulNBits.
    pub accuracy_level: i64,
    /// Names of weights; all if there is none.
    pub include: Vec<Regex>,
    /// Names of weights that stay as they are.
    pub exclude: Vec<Regex>,
}

/// How attention is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionForm {
    /// com.microsoft MultiHeadAttention: what bundles carry, since the runner writes it out for devices where it is wrong.
    #[default]
    Fused,
    /// MatMul, Softmax and MatMul, in so many slices of the query rows: right on every device.
    Written { slices: usize },
}

impl Default for Linears {
    /// Eight bits in symmetric blocks of 32, what the fast kernels take.
    fn default() -> Linears {
        let format = BlockFormat { bits: 8, block: 32, symmetric: true, scale: crate::onnx::DType::F32 };
        Linears { format, accuracy_level: 4, include: Vec::new(), exclude: Vec::new() }
    }
}

impl Linears {
    /// Whether a weight of that name is to be quantised.
    pub fn takes(&self, weight: &str) -> bool {
        let any = |rules: &[Regex]| rules.iter().any(|rule| rule.is_match(weight));
        (self.include.is_empty() || any(&self.include)) && !any(&self.exclude)
    }
}
