//! What `verify` holds a bundle to, as data of a recipe: bars, and faults that must miss them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The bars of one profile.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gates {
    /// Largest relative error (max|a-b| / max|b|) of a boundary tensor.
    pub tensor: f64,
    /// Smallest PSNR of the final image to the reference, dB.
    pub image_db: f64,
    /// Largest relative error by boundary name, where it differs from `tensor`.
    #[serde(default)]
    pub tensors: BTreeMap<String, f64>,
    /// Not judged where they are missing, as in bundles of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text_encoder: Option<TextBars>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transformer: Option<TransformerBars>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vae_decoder: Option<DecoderBars>,
}

/// Largest cosine error (1 - cos) of a single row of the encoded prompt.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextBars {
    pub real_rows: f64,
    pub padding_rows: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransformerBars {
    /// Largest cosine error of a step's velocity, given the reference's latents.
    pub velocity: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecoderBars {
    /// Smallest PSNR of the picture that the decoder makes of the reference's latents, dB.
    pub image_db: f64,
}

impl Gates {
    /// Refuses what is no bar.
    pub(crate) fn check(&self) -> Result<(), String> {
        let text = self.text_encoder.iter().flat_map(|bars| [bars.real_rows, bars.padding_rows]);
        let components = text
            .chain(self.transformer.iter().map(|bars| bars.velocity))
            .chain(self.vae_decoder.iter().map(|bars| bars.image_db));
        let mut bars = self.tensors.values().copied().chain([self.tensor, self.image_db]).chain(components);
        match bars.find(|bar| !bar.is_finite() || *bar < 0.0) {
            Some(bar) => Err(format!("{bar} is no bar; bars are finite and not negative")),
            None => Ok(()),
        }
    }
}

/// How a boundary is compared with the reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Measure {
    /// max|a-b| / max|b|
    Relative,
    /// max|a-b|
    Absolute,
    /// Differing values.
    Exact,
    /// 1 - cos of the angle to the reference; of text the worst row's.
    Cosine,
    /// Peak signal-to-noise ratio with peak 1, dB.
    Psnr,
}

impl Measure {
    pub fn name(self) -> &'static str {
        match self {
            Measure::Relative => "relative",
            Measure::Absolute => "absolute",
            Measure::Exact => "exact",
            Measure::Cosine => "cosine",
            Measure::Psnr => "psnr",
        }
    }
}

/// A fault that `verify` plants: a bar that it does not miss has no teeth.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Control {
    /// The boundary that is altered, by the name of its reference file. `{last}` and `{previous}` are the last step and the one
    /// before it, here and in `how`.
    pub alters: String,
    pub how: Alteration,
    /// The row of the report whose bar must be missed, and by which measure.
    pub misses: String,
    pub measure: Measure,
    /// Profiles whose quantisation moves that row by as much, so that nobody could tell the fault from it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub except: Vec<String>,
}

impl Control {
    /// The control in a run of so many steps.
    pub fn at(&self, steps: usize) -> Control {
        let step = |name: &str| {
            let numbered = |name: String, place, back| match steps.checked_sub(back) {
                Some(step) => name.replace(place, &step.to_string()),
                None => name,
            };
            numbered(numbered(name.to_owned(), "{last}", 1), "{previous}", 2)
        };
        let how = match &self.how {
            Alteration::Replace(name) => Alteration::Replace(step(name)),
            Alteration::Repeat(name) => Alteration::Repeat(step(name)),
            Alteration::Undo(name) => Alteration::Undo(step(name)),
            how => how.clone(),
        };
        Control { alters: step(&self.alters), how, ..self.clone() }
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        match self.alters.is_empty() || self.misses.is_empty() {
            true => Err("`alters` and `misses` name boundaries".to_owned()),
            false => Ok(()),
        }
    }
}

/// What is done to a boundary tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Alteration {
    /// Every value becomes 0.
    Zeros,
    /// Every value becomes 1.
    Ones,
    /// The rows of padding become 0.
    ZeroPadding,
    /// Everything moves on by one along an axis.
    Roll(usize),
    /// Two columns, places in the last axis, take each other's.
    Swap([usize; 2]),
    /// Another reference tensor of the same shape takes its place.
    Replace(String),
    /// The scale and shift of each channel that lead to another reference tensor are applied once more.
    Repeat(String),
    /// They are undone.
    Undo(String),
}
