//! What the user may choose about a rewrite.

use regex::Regex;

use crate::shapes::Sizes;

/// Settings of all passes; each reads what concerns it.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Sizes of named dimensions that are bound for good.
    pub sizes: Sizes,
    pub linears: Linears,
    pub attention: AttentionForm,
    pub split: Splitting,
}

/// Where a model is cut into parts.
#[derive(Clone, Debug, Default)]
pub struct Splitting {
    /// Names of values: a cut comes behind what each of them depends on.
    pub at: Vec<String>,
    /// Bytes that no part exceeds: of weights and live values in general, of what WebGPU is predicted to take for stages of
    /// an image decoder.
    pub max_bytes: Option<u64>,
    /// Sizes of named dimensions for which bytes are counted. They stay open.
    pub sizes: Sizes,
    /// Up blocks of an image decoder that begin a stage of their own, counted from 0.
    pub cuts: Vec<usize>,
    /// Query rows per run of a stage of attention; open if not given.
    pub chunk_rows: Option<usize>,
}

/// Which matrix products are quantised, and how.
#[derive(Clone, Debug)]
pub struct Linears {
    /// Values along the rows that share a scale: 16, 32, 64, 128 or 256.
    pub block: usize,
    /// Four-bit blocks without zero points; blocks of eight bits never have them.
    pub symmetric: bool,
    /// `accuracy_level` of MatMulNBits.
    pub accuracy_level: i64,
    /// Names of weights or their nodes; all if there is none.
    pub include: Vec<Regex>,
    /// Names of weights or their nodes that have a number of bits of their own, or stay as they are. The first one that
    /// matches counts.
    pub rules: Vec<(Regex, Option<u8>)>,
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
    /// Blocks of 32, what the fast kernels take.
    fn default() -> Linears {
        Linears { block: 32, symmetric: false, accuracy_level: 4, include: Vec::new(), rules: Vec::new() }
    }
}

impl Linears {
    /// Bits of a weight that has these names, where no rule is about it `usual`; none if it is to stay as it is.
    pub fn bits(&self, names: &[&str], usual: u8) -> Option<u8> {
        let matches = |pattern: &Regex| names.iter().any(|name| pattern.is_match(name));
        if !self.include.is_empty() && !self.include.iter().any(matches) {
            return None;
        }
        self.rules.iter().find(|(pattern, _)| matches(pattern)).map_or(Some(usual), |(_, bits)| *bits)
    }
}
