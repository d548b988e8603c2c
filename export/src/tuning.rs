//! Which of several right forms of a graph is the fastest on a device. `viaduct doctor --tune` measures it.

use std::{fmt, ops::RangeInclusive};

use serde::{Deserialize, Serialize};

use crate::{bytes::ByteSize, memory::PENDING_DISPATCHES};

/// WebGPU promises that a binding may cover this many bytes: the largest score tensor of attention on a device that was not
/// measured.
pub const PROMISED_BINDING: u64 = 128 << 20;

/// Lengths of sequences that a tuning distinguishes.
const MOST_LENGTHS: usize = 64;
/// Smaller score tensors would cut long sequences into thousands of slices.
const LEAST_SCORES: u64 = 1 << 20;
/// What the WebGPU provider accepts.
const DISPATCHES: RangeInclusive<u32> = 1..=4096;

/// What was measured on a device, or what is taken where nothing was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuning {
    /// Whether the fused attention operator computes right. Where it was not tried, it counts as wrong.
    pub fused_attention: bool,
    /// The fastest form of attention for sequences of some lengths, the shortest first; none where nothing was measured.
    pub attention: Vec<TunedAttention>,
    /// Dispatches that WebGPU records before it submits them, where memory allows.
    pub pending_dispatches: u32,
    /// The fewest rows of a sequence for which the norm of an attention's heads is written out, where memory allows; none
    /// where the operator is always as fast. See [`crate::passes::HeadNorm`].
    #[serde(default)]
    pub written_head_norms: Option<usize>,
}

/// What is fastest for sequences of about this many rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedAttention {
    pub rows: usize,
    pub form: AttentionForm,
}

/// How attention without a mask is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum AttentionForm {
    /// com.microsoft MultiHeadAttention, which never holds the scores.
    Fused,
    /// MatMul, Softmax and MatMul, in slices of the query rows: no score tensor is larger than this.
    Written { score_bytes: u64 },
}

impl Default for Tuning {
    /// A WebGPU device that was not measured.
    fn default() -> Tuning {
        Tuning {
            fused_attention: false,
            attention: Vec::new(),
            pending_dispatches: PENDING_DISPATCHES,
            written_head_norms: None,
        }
    }
}

impl Tuning {
    /// A device whose fused attention is right, and the fastest at all lengths.
    pub fn fused() -> Tuning {
        Tuning { fused_attention: true, ..Tuning::default() }.always(AttentionForm::Fused)
    }

    /// A device where attention is fastest when it is written out with scores of so many bytes at all lengths.
    pub fn written(score_bytes: u64) -> Tuning {
        Tuning::default().always(AttentionForm::Written { score_bytes })
    }

    /// The same with one form of attention for all lengths.
    pub fn always(&self, form: AttentionForm) -> Tuning {
        Tuning { attention: vec![TunedAttention { rows: 1, form }], ..self.clone() }
    }

    /// What of it no measurement gives: it may come from a file.
    pub fn check(&self) -> Result<(), &'static str> {
        let bytes = self.attention.iter().map(|tuned| tuned.form.score_bytes());
        if self.attention.len() > MOST_LENGTHS {
            Err("attention has too many lengths")
        } else if self.attention.iter().any(|tuned| tuned.rows == 0) {
            Err("attention has a length of 0 rows")
        } else if bytes.into_iter().any(|bytes| bytes < LEAST_SCORES) {
            Err("attention has score_bytes below 1048576")
        } else if self.written_head_norms == Some(0) {
            Err("written_head_norms is 0 rows")
        } else if !DISPATCHES.contains(&self.pending_dispatches) {
            Err("pending_dispatches is none of 1 to 4096")
        } else {
            Ok(())
        }
    }

    /// The form of attention for a sequence of so many rows: that of the measured length which is nearest as a ratio. The
    /// fused operator is never the answer where it is not right.
    pub fn attention_at(&self, rows: usize) -> AttentionForm {
        let distance = |tuned: &&TunedAttention| {
            let (rows, measured) = (rows.max(1) as f64, tuned.rows.max(1) as f64);
            (rows / measured).ln().abs()
        };
        let nearest = self.attention.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)));
        match nearest.map(|tuned| tuned.form) {
            Some(AttentionForm::Fused) if !self.fused_attention => AttentionForm::default(),
            Some(form) => form,
            None => AttentionForm::default(),
        }
    }
}

impl fmt::Display for AttentionForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttentionForm::Fused => write!(f, "fused"),
            AttentionForm::Written { score_bytes: u64::MAX } => write!(f, "written out whole"),
            AttentionForm::Written { score_bytes } => {
                write!(f, "written out, scores up to {}", ByteSize(*score_bytes))
            }
        }
    }
}

impl Default for AttentionForm {
    /// What is right everywhere and fits every binding.
    fn default() -> AttentionForm {
        AttentionForm::Written { score_bytes: PROMISED_BINDING }
    }
}

impl AttentionForm {
    /// The largest score tensor where attention is written out, for those with a mask among them.
    pub fn score_bytes(self) -> u64 {
        match self {
            AttentionForm::Written { score_bytes } => score_bytes,
            AttentionForm::Fused => PROMISED_BINDING,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_measured_length_decides() {
        let written = |score_bytes| AttentionForm::Written { score_bytes };
        let attention = vec![
            TunedAttention { rows: 1024, form: AttentionForm::Fused },
            TunedAttention { rows: 4096, form: written(1 << 30) },
        ];
        let tuning = Tuning { fused_attention: true, attention, ..Tuning::default() };
        assert_eq!(tuning.attention_at(1), AttentionForm::Fused);
        assert_eq!(tuning.attention_at(2000), AttentionForm::Fused);
        assert_eq!(tuning.attention_at(2100), written(1 << 30));
        assert_eq!(tuning.attention_at(usize::MAX), written(1 << 30));
        let wrong = Tuning { fused_attention: false, ..tuning };
        assert_eq!(wrong.attention_at(1), AttentionForm::default());
        assert_eq!(Tuning::default().attention_at(5), AttentionForm::default());
        assert_eq!(Tuning::fused().attention_at(5), AttentionForm::Fused);
    }

    #[test]
    fn what_nobody_measures_is_refused() {
        assert_eq!(
            [Tuning::default(), Tuning::fused(), Tuning::written(u64::MAX)].map(|t| t.check()),
            [Ok(()); 3]
        );
        let of = |rows| TunedAttention { rows, form: AttentionForm::Fused };
        for bad in [
            Tuning { pending_dispatches: 0, ..Tuning::default() },
            Tuning { pending_dispatches: 4097, ..Tuning::default() },
            Tuning::written(0),
            Tuning { attention: vec![of(0)], ..Tuning::default() },
            Tuning { written_head_norms: Some(0), ..Tuning::default() },
            Tuning { attention: vec![of(1); 65], ..Tuning::default() },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
