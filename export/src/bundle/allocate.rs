//! Which weights get more bits, where a bundle may be larger than its profile makes it.
//!
//! Every weight that the profile quantises has, at the bits that it has, an error: that of its layer's outputs as a share of
//! them, by the statistics of its inputs, after fitting. The bits of the weight that loses most error for the bytes are raised, and so on
//! until nothing fits.

use std::collections::{BTreeMap, HashSet};

use regex::escape;

use super::ExportError;
use crate::{
    arch::{StageGraph, author::whole_weight},
    onnx::{Bytes, Compute, Model},
    quant::{BlockFormat, Fitting, QuantizeCompute, misfit},
    recipe::{Precision, Rule, WeightFormat},
};

/// How much smaller the error is with 8 bits than with 4: the square of the number of steps.
const EIGHT_BITS: f64 = (255.0 / 15.0) * (255.0 / 15.0);

/// Between two weights in a file, at most.
const PADDING: u64 = 4096;

/// A weight that may get more bits.
#[derive(Clone, Debug)]
struct Candidate {
    weight: String,
    /// What it can be stored in, from the smallest on: bytes and error.
    choices: Vec<(WeightFormat, u64, f64)>,
    chosen: usize,
}

impl Candidate {
    /// Bytes that the next choice takes beside those of this one, and the error that it takes away.
    fn next(&self) -> Option<(u64, f64)> {
        let ((_, bytes, error), (_, more, less)) =
            (self.choices.get(self.chosen)?, self.choices.get(self.chosen + 1)?);
        Some((more.saturating_sub(*bytes) + PADDING, error - less))
    }
}

/// The profile with rules for single weights, so that its bundle, which takes `bytes` as it is, takes at most `target`.
/// `stages` are authored by the profile.
pub(super) fn allocate(
    profile: &Precision,
    stages: &[StageGraph],
    bytes: u64,
    target: u64,
) -> Result<Precision, ExportError> {
    let mut room = target.checked_sub(bytes).ok_or(ExportError::TargetTooSmall { target, least: bytes })?;
    let mut candidates = candidates(stages)?;
    // Of equals the first by name: candidates come sorted.
    while let Some((index, bytes)) = best(&candidates, room) {
        candidates[index].chosen += 1;
        room -= bytes;
    }
    let raised = candidates.iter().filter(|candidate| candidate.chosen > 0);
    let rules: Vec<Rule> = raised
        .map(|candidate| Rule {
            pattern: format!("^{}$", escape(&candidate.weight)),
            weights: candidate.choices[candidate.chosen].0,
        })
        .collect();
    let mut profile = profile.clone();
    for own in profile.components.values_mut().filter_map(|component| component.rules.as_mut()) {
        own.splice(0..0, rules.iter().cloned());
    }
    profile.rules.splice(0..0, rules);
    Ok(profile)
}

/// The candidate whose next choice takes away most error for its bytes, of those that fit.
fn best(candidates: &[Candidate], room: u64) -> Option<(usize, u64)> {
    let next = candidates.iter().enumerate().filter_map(|(index, candidate)| {
        let (bytes, gain) = candidate.next()?;
        (bytes <= room).then(|| (index, bytes, gain / bytes.max(1) as f64))
    });
    let best = next.reduce(|best, other| if other.2 > best.2 { other } else { best });
    best.map(|(index, bytes, _)| (index, bytes))
}

/// Every weight that feedback fits, by name. The parts of one weight share its bits.
fn candidates(stages: &[StageGraph]) -> Result<Vec<Candidate>, ExportError> {
    let mut candidates: BTreeMap<String, Candidate> = BTreeMap::new();
    // Stages may share a weight, which is stored once.
    let mut seen = HashSet::new();
    for stage in stages {
        for (name, quantized) in quantized(&stage.model) {
            let Fitting::Feedback(gram) = &quantized.fitting else { continue };
            if !seen.insert(std::ptr::from_ref(quantized)) {
                continue;
            }
            let misfit = misfit(&quantized.weights, &quantized.format, gram)
                .map_err(|source| ExportError::Sensitivity { weight: name.to_owned(), source })?;
            quantized.release();
            let share = if misfit.energy > 0.0 { misfit.error / misfit.energy } else { 0.0 };
            let weight = whole_weight(name).to_owned();
            let choices = choices(&quantized.weights.shape, &quantized.format, share);
            let empty = Candidate { weight: weight.clone(), choices: Vec::new(), chosen: 0 };
            let candidate = candidates.entry(weight).or_insert(empty);
            match candidate.choices.is_empty() {
                true => candidate.choices = choices,
                false => {
                    for (sum, part) in candidate.choices.iter_mut().zip(choices) {
                        sum.1 += part.1;
                        sum.2 += part.2;
                    }
                }
            }
        }
    }
    Ok(candidates.into_values().collect())
}

/// The formats of a weight [N, K] whose outputs' error has that share in the format it has.
fn choices(shape: &[usize], format: &BlockFormat, share: f64) -> Vec<(WeightFormat, u64, f64)> {
    let [n, k] = shape else { return Vec::new() };
    let quantized = |bits| BlockFormat { bits, ..*format }.total_len(*n, *k) as u64;
    let half = (WeightFormat::F16, 2 * (n * k) as u64, 0.0);
    match format.bits {
        4 => {
            let eight = (WeightFormat::Q8, quantized(8), share / EIGHT_BITS);
            vec![(WeightFormat::Q4, quantized(4), share), eight, half]
        }
        _ => vec![(WeightFormat::Q8, quantized(format.bits), share), half],
    }
}

/// The quantised weights of a graph that are still to be computed, by the name of their codes without its end.
fn quantized(model: &Model) -> impl Iterator<Item = (&str, &QuantizeCompute)> {
    model.graph.values().filter_map(|(_, value)| {
        let Bytes::Computed { source, part: 0, .. } = &value.constant.as_ref()?.bytes else { return None };
        let quantized = source.as_any()?.downcast_ref::<QuantizeCompute>()?;
        Some((value.name.strip_suffix(".codes")?, quantized))
    })
}
