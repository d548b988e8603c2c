//! FLUX.2 Klein. Source of the order of operations: diffusers' Flux2KleinPipeline. Bundles come in two forms, graphs that were
//! authored here and graphs that others exported; what the forms do differently is behind one interface, [`Graphs`].

mod authored;
mod imported;

use viaduct_export::{
    arch::{SizesRequest, TextRows, flux2::form::Form, parameters::DecoderChain},
    bundle::{Bundle, MANIFEST},
    picture::SizeError,
    shapes::Sizes,
};

use self::{authored::Authored, imported::Imported};
use super::{
    position::PositionId,
    prompt::{EncodedPrompt, PromptEncoder, PromptError},
    run::Run,
    schedule::{Schedule, ScheduleError},
    size::Size,
    text_to_image::{ATTENTION, Conditions, Family, Inputs, PipelineError, Sampled, Strips, TextToImage},
};
use crate::tensor::HostTensor;

/// How graphs of one form are fed: see [`Family`].
trait Graphs {
    fn encode(
        &self,
        pipeline: &TextToImage<'_>,
        prompts: &[EncodedPrompt],
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, PipelineError>;

    fn conditions(
        &self,
        pipeline: &TextToImage<'_>,
        sampled: &Sampled<'_>,
        embeds: &[HostTensor],
        run: &mut Run<'_>,
    ) -> Result<Conditions, PipelineError>;
}

/// A FLUX.2 bundle's family.
pub struct Flux2 {
    form: Form,
    graphs: Box<dyn Graphs>,
    prompts: PromptEncoder,
    /// The padding token.
    pad: u32,
}

impl Flux2 {
    pub fn open(bundle: &Bundle) -> Result<Flux2, PipelineError> {
        let form = bundle.parameters(Form::read)?;
        let wrong = |problem| PipelineError::Parameters { manifest: bundle.folder.join(MANIFEST), problem };
        form.check().map_err(wrong)?;
        let graphs: Box<dyn Graphs> = match &form {
            Form::Authored(parameters) => Box::new(Authored(parameters.clone())),
            Form::Imported(parameters) => Box::new(Imported(parameters.clone())),
        };
        let pad_id = form.pad_id();
        let pad = u32::try_from(pad_id)
            .map_err(|_| wrong(format!("the padding token's id {pad_id} is not a token id")))?;
        let prompts = PromptEncoder::load(&bundle.folder.join("tokenizer"))?;
        Ok(Flux2 { form, graphs, prompts, pad })
    }
}

impl Family for Flux2 {
    fn size(&self, width: usize, height: usize) -> Result<Size, SizeError> {
        self.form.size(width, height)
    }

    fn default_size(&self) -> [usize; 2] {
        self.form.default_size()
    }

    fn steps(&self, asked: Option<usize>) -> usize {
        asked.unwrap_or(self.form.steps())
    }

    fn channels(&self) -> usize {
        self.form.channels()
    }

    fn takes_negative(&self) -> bool {
        false
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let taps =
            self.form.taps().map(|taps| taps.iter().map(usize::to_string).collect::<Vec<_>>().join(","));
        let length = ("text_encoder.length", self.form.text_length().to_string());
        [length].into_iter().chain(taps.map(|taps| ("text_encoder.taps", taps))).collect()
    }

    fn decoder(&self) -> DecoderChain {
        self.form.decoder()
    }

    fn post_stages(&self) -> Vec<&str> {
        self.form.post_stages()
    }

    fn sizes(&self, size: Size, request: &SizesRequest) -> Sizes {
        self.form.sizes(size, request.steps, request.halvings)
    }

    fn chunk_symbols(&self, stage: &str) -> Vec<String> {
        if stage == ATTENTION { vec!["chunk_rows".to_owned()] } else { Vec::new() }
    }

    /// Its norms go over the whole picture.
    fn strips(&self, _stage: &str, _sizes: &Sizes) -> Option<Strips> {
        None
    }

    fn schedule(&self, size: Size, steps: usize) -> Result<Schedule, ScheduleError> {
        Schedule::flux2(size.tokens(), steps)
    }

    fn text_length(&self) -> usize {
        self.form.text_length()
    }

    fn tokenize(&self, prompt: &str) -> Result<EncodedPrompt, PromptError> {
        self.prompts.encode(prompt, self.form.text_length(), self.pad)
    }

    /// Rows of padding are read, too.
    fn text_rows(&self, _prompt: &EncodedPrompt) -> TextRows {
        TextRows::all(self.form.text_length())
    }

    fn encode(
        &self,
        pipeline: &TextToImage<'_>,
        prompts: &[EncodedPrompt],
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, PipelineError> {
        self.graphs.encode(pipeline, prompts, sizes, run)
    }

    fn conditions(
        &self,
        pipeline: &TextToImage<'_>,
        sampled: &Sampled<'_>,
        embeds: &[HostTensor],
        run: &mut Run<'_>,
    ) -> Result<Conditions, PipelineError> {
        self.graphs.conditions(pipeline, sampled, embeds, run)
    }
}

/// Position ids as [1, tokens, 4].
fn id_tensor(ids: &[PositionId]) -> HostTensor {
    HostTensor::i64(&[1, ids.len(), 4], ids.iter().flatten().copied().collect())
}

/// What the transformer takes of a prompt.
fn prompt_inputs(embeds: &HostTensor) -> Inputs {
    vec![("prompt_embeds".into(), embeds.clone())]
}
