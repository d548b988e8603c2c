//! What a model family does its own way. All else of a picture is the same for all families.

use std::borrow::Cow;

use viaduct_export::{
    arch::{SizesRequest, TextRows, parameters::DecoderChain},
    bundle::Bundle,
    picture::SizeError,
    shapes::Sizes,
};

use super::{PipelineError, Strips, TextToImage};
use crate::{
    pipeline::{
        flux2::Flux2,
        prompt::{EncodedPrompt, PromptError},
        qwen_image::QwenImage,
        run::Run,
        schedule::{Schedule, ScheduleError},
        size::Size,
    },
    tensor::HostTensor,
};

/// Opens a bundle's family.
type Open = fn(&Bundle) -> Result<Box<dyn Family>, PipelineError>;

/// The families, by the name in a bundle's manifest.
pub(super) const FAMILIES: &[(&str, Open)] = &[
    ("flux2", |bundle| Ok(Box::new(Flux2::open(bundle)?))),
    ("qwen-image", |bundle| Ok(Box::new(QwenImage::open(bundle)?))),
];

/// Inputs of a graph by name.
pub type Inputs = Vec<(Cow<'static, str>, HostTensor)>;

/// What the transformer takes besides the latents.
pub struct Conditions {
    /// The same for all prompts in every step: uploaded once.
    pub constant: Inputs,
    /// Of each encoded prompt.
    pub prompts: Vec<Inputs>,
    /// Of each step.
    pub steps: Vec<Inputs>,
}

/// Pictures that go through the transformer's session together.
pub struct Sampled<'a> {
    pub size: Size,
    pub schedule: &'a Schedule,
    pub sizes: &'a Sizes,
}

/// How a family's bundles draw.
pub trait Family {
    /// The size of a picture, if the graphs can draw it; some families draw a little less than is asked for.
    fn size(&self, width: usize, height: usize) -> Result<Size, SizeError>;

    /// Width and height of a picture when none are asked for.
    fn default_size(&self) -> [usize; 2];

    /// Steps of a picture, when so many are asked for or none; some models have one number alone.
    fn steps(&self, asked: Option<usize>) -> usize;

    /// Channels of a latent token.
    fn channels(&self) -> usize;

    /// Whether a second prompt can say what not to draw.
    fn takes_negative(&self) -> bool;

    /// Values of the recipe that a reference run must have been made with, too.
    fn settings(&self) -> Vec<(&'static str, String)>;

    fn decoder(&self) -> DecoderChain;

    /// The decoder's stages after its middle, in order.
    fn post_stages(&self) -> Vec<&str>;

    /// Sizes of all stages' symbols.
    fn sizes(&self, size: Size, request: &SizesRequest) -> Sizes;

    /// The symbols that say how much of its work a stage does at a time; nothing for one that does all at once.
    fn chunk_symbols(&self, stage: &str) -> Vec<String>;

    /// How a stage of the decoder may go over its input in strips; nothing for one that has to see all of it.
    fn strips(&self, stage: &str, sizes: &Sizes) -> Option<Strips>;

    fn schedule(&self, size: Size, steps: usize) -> Result<Schedule, ScheduleError>;

    /// The most tokens of a prompt with all that is around it.
    fn text_length(&self) -> usize;

    fn tokenize(&self, prompt: &str) -> Result<EncodedPrompt, PromptError>;

    /// Rows that a prompt takes.
    fn text_rows(&self, prompt: &EncodedPrompt) -> TextRows;

    /// The stage output that a later stage's input of this name is made of, where the names differ.
    fn output_behind<'n>(&self, input: &'n str) -> &'n str {
        input
    }

    /// Runs the text encoder on each prompt, in one session: [1, rows that the transformer reads, width].
    fn encode(
        &self,
        pipeline: &TextToImage<'_>,
        prompts: &[EncodedPrompt],
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, PipelineError>;

    /// Everything that the transformer takes besides the latents, for prompts that are encoded.
    fn conditions(
        &self,
        pipeline: &TextToImage<'_>,
        sampled: &Sampled<'_>,
        embeds: &[HostTensor],
        run: &mut Run<'_>,
    ) -> Result<Conditions, PipelineError>;
}
