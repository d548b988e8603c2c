//! What the runner must know about an exported FLUX.2 model besides its graphs; stored in `bundle.json`.

use serde::{Deserialize, Serialize};

/// The most rows that a text may have: its mask is quadratic.
pub const MAX_TEXT_LENGTH: usize = 1 << 13;

/// Parameters of a FLUX.2 bundle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parameters {
    pub text: Text,
    pub transformer: Transformer,
    pub vae: Vae,
    pub schedule: Schedule,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Text {
    /// Rows after padding.
    pub length: usize,
    pub pad_id: i64,
    pub taps: Vec<usize>,
    pub head_dim: usize,
    pub rope_theta: f64,
    /// Whether keys of padding rows are masked (they are; the other value is a test's planted fault).
    pub mask_padding: bool,
    pub embedding: Embedding,
}

/// A row-major table [rows, width] in a file of the bundle, read row by row on the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Embedding {
    pub file: String,
    pub dtype: EmbeddingType,
    pub rows: usize,
    pub width: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EmbeddingType {
    F32,
    F16,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transformer {
    /// Channels of a packed latent token.
    pub channels: usize,
    /// Blocks with two streams, blocks with one.
    pub blocks: [usize; 2],
    pub width: usize,
    /// Rotary dimensions of the axes time, row, column, text position.
    pub axes: Vec<usize>,
    pub rope_theta: f64,
    /// Width of the sinusoidal time embedding.
    pub time_channels: usize,
    pub time_order: TimeOrder,
    pub text_ids: TextIds,
}

/// Which half of the time embedding comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeOrder {
    /// FLUX.2 (`flip_sin_to_cos`).
    CosFirst,
    SinFirst,
}

/// The last coordinate of a text token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextIds {
    /// `(0, 0, 0, i)`: FLUX.2.
    Index,
    /// `(0, 0, 0, 0)`: FLUX.1, and a mistake easily made with FLUX.2.
    Zero,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vae {
    /// Pixels per latent token, per side.
    pub pixels_per_token: usize,
    /// Pixels per pixel of the middle block, per side.
    pub downscale: usize,
    /// Width and height of a picture when none are asked for: the size that the checkpoint states.
    pub default_side: usize,
    /// Query rows per run of the attention stage; `None` when the middle block has no attention.
    pub attention_rows: Option<usize>,
    /// Names of the stages after the attention, in order.
    pub post_stages: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    pub steps: usize,
}

impl Parameters {
    /// What the pipeline computes with before a graph could object: a manifest need not come from our exporter.
    pub fn check(&self) -> Result<(), String> {
        let (text, transformer, vae) = (&self.text, &self.transformer, &self.vae);
        let numbers = [
            ("text.length", text.length, MAX_TEXT_LENGTH),
            ("text.head_dim", text.head_dim, 1 << 16),
            ("transformer.channels", transformer.channels, 1 << 16),
            ("transformer.width", transformer.width, 1 << 24),
            ("transformer.time_channels", transformer.time_channels, 1 << 16),
            ("vae.pixels_per_token", vae.pixels_per_token, 1 << 10),
            ("vae.downscale", vae.downscale, 1 << 10),
            ("vae.default_side", vae.default_side, 1 << 14),
            ("vae.attention_rows", vae.attention_rows.unwrap_or(1), 1 << 24),
            ("schedule.steps", self.schedule.steps, 1000),
        ];
        if let Some((key, value, most)) = numbers.iter().find(|(_, value, most)| *value == 0 || value > most)
        {
            return Err(format!("{key} is {value}; expected 1 to {most}"));
        }
        if let Some(axis) = transformer.axes.iter().find(|axis| **axis > 1 << 16) {
            return Err(format!("an axis of transformer.axes is {axis}"));
        }
        if !vae.pixels_per_token.is_multiple_of(vae.downscale) {
            let (pixels, downscale) = (vae.pixels_per_token, vae.downscale);
            return Err(format!("vae.pixels_per_token {pixels} is no multiple of vae.downscale {downscale}"));
        }
        Ok(())
    }
}
