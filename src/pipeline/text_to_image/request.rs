//! What is to be drawn.

use serde::{Deserialize, Serialize};

use crate::{pipeline::size::Size, tensor::HostTensor};

/// What to draw.
#[derive(Clone)]
pub struct Request {
    pub prompt: String,
    pub negative: Option<Negative>,
    pub size: Size,
    pub steps: usize,
    pub noise: Noise,
}

/// What not to draw: each step's velocity is `negative + scale * (prompt's - negative)`, classifier-free guidance without a
/// rescaling of the norm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Negative {
    pub prompt: String,
    pub scale: f32,
}

/// The initial latents.
#[derive(Clone)]
pub enum Noise {
    /// As `torch.Generator("cpu").manual_seed(seed)` draws them.
    Seed(u64),
    /// [1, channels, rows, columns].
    Given(HostTensor),
}

impl Request {
    /// The prompt, and the negative one if there is one.
    pub fn prompts(&self) -> impl Iterator<Item = &str> {
        let negative = self.negative.as_ref().map(|negative| negative.prompt.as_str());
        [self.prompt.as_str()].into_iter().chain(negative)
    }
}
