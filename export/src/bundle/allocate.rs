//! Which weights get more bits, where a bundle may be larger than its profile makes it.
//!
//! Every weight that the profile quantises has, at the bits that it has, an error: that of its layer's outputs as a share of
//! them, by the statistics of its inputs, after fitting; times its sensitivity, which is what such an error was seen to do to
//! the model's result. The bits of the weight that loses most error for the bytes are raised, and so on until nothing fits.

use std::collections::{BTreeMap, HashSet};

use regex::escape;

use super::ExportError;
use crate::{
    arch::{StageGraph, author::whole_weight},
    onnx::{Bytes, Compute, Model},
    quant::{BlockFormat, Fitting, QuantizeCompute, misfit},
    recipe::{Precision, Rule, WeightFormat},
    weights::Calibration,
};

/// How much smaller the error is with 8 bits than with 4: the square of the number of steps.
const EIGHT_BITS: f64 = (255.0 / 15.0) * (255.0 / 15.0);

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
        Some((more.saturating_sub(*bytes), error - less))
    }
}

/// The profile with rules for single weights, so that its bundle takes at most `target` bytes. `stages` are authored by
/// the profile; `bundle_bytes` counts the bytes of a profile's bundle.
pub(super) fn allocate(
    (name, profile): (&str, &Precision),
    stages: &[StageGraph],
    calibration: &Calibration,
    target: u64,
    bundle_bytes: impl Fn(&Precision) -> Result<u64, ExportError>,
) -> Result<Precision, ExportError> {
    let least = bundle_bytes(profile)?;
    let mut room = target.checked_sub(least).ok_or_else(|| ExportError::TargetTooSmall {
        target,
        least,
        profile: name.to_owned(),
    })?;
    let candidates = candidates(stages, calibration)?;
    // What files pad between weights, and what the rules take in the manifest, shows only in the whole bundle.
    while room > 0 {
        let raised = with_rules(profile, &raise(candidates.clone(), room));
        match bundle_bytes(&raised)?.saturating_sub(target) {
            0 => return Ok(raised),
            over => room = room.saturating_sub(over),
        }
    }
    Ok(profile.clone())
}

/// Raises bits as long as there is room.
fn raise(mut candidates: Vec<Candidate>, mut room: u64) -> Vec<Candidate> {
    // Of equals the first by name: candidates come sorted.
    while let Some((index, bytes)) = best(&candidates, room) {
        candidates[index].chosen += 1;
        room -= bytes;
    }
    candidates
}

/// The profile with a rule for each weight that is raised.
fn with_rules(profile: &Precision, candidates: &[Candidate]) -> Precision {
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
    profile
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
fn candidates(stages: &[StageGraph], calibration: &Calibration) -> Result<Vec<Candidate>, ExportError> {
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
            let choices = choices(
                &quantized.weights.shape,
                &quantized.format,
                share * calibration.sensitivity_of(name)?,
            );
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

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(weight: &str, bytes: [u64; 3], error: f64) -> Candidate {
        let formats = [WeightFormat::Q4, WeightFormat::Q8, WeightFormat::F16];
        let errors = [error, error / EIGHT_BITS, 0.0];
        let choices = (0..3).map(|i| (formats[i], bytes[i], errors[i])).collect();
        Candidate { weight: weight.to_owned(), choices, chosen: 0 }
    }

    #[test]
    fn the_most_error_for_the_bytes_goes_first_and_the_rest_is_filled_up() {
        let candidates = || {
            let large = candidate("large", [1000, 2000, 4000], 1.0);
            vec![large, candidate("small", [10, 20, 40], 0.5), candidate("tiny", [2, 4, 8], 1e-6)]
        };
        let chosen = |room| raise(candidates(), room).iter().map(|c| c.chosen).collect::<Vec<_>>();
        assert_eq!(chosen(1), [0, 0, 0]);
        assert_eq!(chosen(9), [0, 0, 2]);
        assert_eq!(chosen(10), [0, 1, 0]);
        assert_eq!(chosen(1011), [1, 1, 0]);
        assert_eq!(chosen(1012), [1, 1, 1]);
        assert_eq!(chosen(u64::MAX), [2, 2, 2]);
    }
}
