//! What the runner must know about an exported FLUX.2 model besides its graphs; stored in `bundle.json`.

use serde::{Deserialize, Serialize};

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
pub struct Schedule {
    pub steps: usize,
}
