//! What the runner must know about an exported Qwen-Image-2.1 model besides its graphs; stored in `bundle.json`.

use serde::{Deserialize, Serialize};

use crate::{
    arch::{
        SizesRequest,
        parameters::{Embedding, TimeOrder},
    },
    picture::{Size, SizeError},
    shapes::Sizes,
};

/// Parameters of a Qwen-Image-2.1 bundle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parameters {
    pub text: Text,
    pub transformer: Transformer,
    pub vae: Vae,
    pub schedule: Schedule,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Text {
    /// The most tokens of a prompt with all that is around it. Shorter ones are not filled up.
    pub length: usize,
    pub template: Template,
    pub head_dim: usize,
    pub rope_theta: f64,
    pub embedding: Embedding,
}

/// The text around a prompt, tokenised in one piece with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Template {
    /// Encoded, and not passed on: the transformer reads what comes after its tokens.
    pub system: String,
    pub before: String,
    pub after: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transformer {
    /// Channels of a latent token.
    pub channels: usize,
    pub layers: usize,
    pub width: usize,
    /// Rotary dimensions of the axes frame, row, column.
    pub axes: Vec<usize>,
    pub rope_theta: f64,
    /// Width of the sinusoidal time embedding.
    pub time_channels: usize,
    pub time_order: TimeOrder,
    pub graphs: Graphs,
    /// Whether rows and columns count from the picture's middle (they do; the other value is a test's planted fault).
    pub centred: bool,
    /// The noise level that modulates text rows: 0, whatever the step (none, which is the step's, is a planted fault).
    pub text_sigma: Option<f32>,
}

/// How the transformer is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Graphs {
    /// `prefix` computes keys and values of the text once, `transformer` the rows of the picture at each step.
    Prefix,
    /// `transformer` computes both at each step.
    Single,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vae {
    /// Pixels per latent token, per side: those of a pixel of the middle block, too.
    pub pixels_per_token: usize,
    /// Sides of a picture are cut to multiples of this.
    pub multiple: usize,
    /// Width and height of a picture when none are asked for.
    pub default_side: usize,
    /// Query rows per run of the attention stage.
    pub attention_rows: usize,
    /// Names of the stages after the attention, in order.
    pub post_stages: Vec<String>,
}

/// The noise levels of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// Steps when none are asked for.
    pub steps: usize,
    /// The levels themselves, without the last 0, taken as they are at every size and number of steps (Turbo).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sigmas: Option<Vec<f32>>,
    pub shift: Shift,
}

/// A shift of the noise levels that grows with the picture, and a stretch that ends them above 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shift {
    pub base_tokens: usize,
    pub max_tokens: usize,
    pub base: f64,
    pub max: f64,
    /// The last level before 0; none where levels are not stretched.
    pub terminal: Option<f64>,
}

impl Parameters {
    /// What the pipeline computes with before a graph could object.
    pub fn check(&self) -> Result<(), String> {
        Ok(())
    }

    /// The picture that is drawn where so many pixels are asked for.
    pub fn size(&self, width: usize, height: usize) -> Result<Size, SizeError> {
        Size::floored(width, height, self.vae.multiple, self.vae.pixels_per_token)
    }

    /// Sizes of all symbols of all stages.
    pub fn sizes(&self, size: Size, request: &SizesRequest) -> Sizes {
        Sizes::from([
            ("image_seq".to_owned(), size.tokens()),
            ("encoded_seq".to_owned(), request.text.encoded),
        ])
    }
}
