//! FLUX.2 Klein: prompt to picture. Stages run one after the other, each alone on the device.
//!
//! Source of the order of operations: diffusers' Flux2KleinPipeline. Bundles come in two forms, graphs that were authored
//! here and graphs that others exported; what the forms do differently is behind one interface, [`Graphs`].

mod authored;
mod decoder;
mod imported;
mod opened;

use std::{collections::BTreeMap, path::PathBuf, slice, time::Instant};

use viaduct_export::{
    arch::flux2::form::Form,
    bundle::{Bundle, BundleError, MANIFEST, Stages},
    shapes::Sizes,
};

use self::{authored::Authored, decoder::ATTENTION, imported::Imported, opened::Opened};
use super::{
    embedding::EmbeddingError,
    event::Event,
    image::{ImageError, check_finite, check_varied},
    noise::{LatentError, draw_latents, pack_latents},
    position::{PositionError, PositionId},
    prompt::{EncodedPrompt, PromptEncoder, PromptError},
    run::{Run, Watch},
    run_folder::RunFolder,
    schedule::{Schedule, ScheduleError},
    size::Size,
};
use crate::{
    plan::Plan,
    runtime::{Binding, Executor, Placement, Provider, RuntimeError, TensorView},
    tensor::HostTensor,
};

/// Stages that bundles of both forms have.
pub const TEXT_ENCODER: &str = "text_encoder";
pub const TRANSFORMER: &str = "transformer";
/// The family whose bundles this pipeline runs.
const FAMILY: &str = "flux2";

#[derive(Debug, thiserror::Error)]
pub enum Flux2Error {
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Prompt(#[from] PromptError),
    #[error(transparent)]
    Embedding(#[from] EmbeddingError),
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    #[error(transparent)]
    Position(#[from] PositionError),
    #[error(transparent)]
    Latent(#[from] LatentError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("the noise has shape {found:?}, but {size} needs {expected:?}")]
    Noise { found: Vec<usize>, expected: Vec<usize>, size: Size },
    #[error("{}: parameters: {problem}", manifest.display())]
    Parameters { manifest: PathBuf, problem: String },
    #[error("the bundle is of family '{0}', and only '{FAMILY}' can be drawn")]
    Family(String),
    #[error(
        "the decoder drew {found:?} for a picture of {size}; the bundle's parameters do not fit its graphs"
    )]
    Picture { found: Vec<usize>, size: Size },
    #[error("the padding token's id {0} is not a token id")]
    PadId(i64),
}

/// What to draw.
pub struct Request {
    pub prompt: String,
    pub size: Size,
    pub steps: usize,
    pub noise: Noise,
}

/// The initial latents.
#[derive(Clone)]
pub enum Noise {
    /// As `torch.Generator("cpu").manual_seed(seed)` draws them.
    Seed(u64),
    /// [1, channels, rows, columns].
    Given(HostTensor),
}

/// Inputs of a graph by name.
type Inputs = Vec<(&'static str, HostTensor)>;

/// What the transformer takes besides the latents.
struct Conditions {
    /// The same in every step: uploaded once.
    constant: Inputs,
    /// Of each step.
    steps: Vec<Inputs>,
}

/// A picture that the transformer works on.
struct Sampling {
    /// The encoded prompt.
    embeds: HostTensor,
    /// After how many steps the latents are.
    done: usize,
    /// [1, tokens, channels].
    latents: HostTensor,
}

/// How graphs of one form are fed. All else of a picture is the same for both.
trait Graphs {
    /// Runs the text encoder on each prompt, in one session: [1, text length, width], rows of padding included, because the
    /// transformer attends to them.
    fn encode(
        &self,
        flux2: &Flux2<'_>,
        prompts: &[EncodedPrompt],
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, Flux2Error>;

    /// Everything that the transformer takes besides the latents and the encoded prompt.
    fn conditions(
        &self,
        flux2: &Flux2<'_>,
        size: Size,
        schedule: &Schedule,
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<Conditions, Flux2Error>;
}

/// A FLUX.2 bundle ready to draw.
pub struct Flux2<'a> {
    bundle: &'a Bundle,
    form: Form,
    graphs: Box<dyn Graphs>,
    prompts: PromptEncoder,
}

impl<'a> Flux2<'a> {
    pub fn open(bundle: &'a Bundle) -> Result<Flux2<'a>, Flux2Error> {
        if bundle.manifest.family != FAMILY {
            return Err(Flux2Error::Family(bundle.manifest.family.clone()));
        }
        let form = bundle.parameters(Form::read)?;
        form.check()
            .map_err(|problem| Flux2Error::Parameters { manifest: bundle.folder.join(MANIFEST), problem })?;
        let graphs: Box<dyn Graphs> = match &form {
            Form::Authored(parameters) => Box::new(Authored(parameters.clone())),
            Form::Imported(parameters) => Box::new(Imported(parameters.clone())),
        };
        let prompts = PromptEncoder::load(&bundle.folder.join("tokenizer"))?;
        Ok(Flux2 { bundle, form, graphs, prompts })
    }

    pub fn form(&self) -> &Form {
        &self.form
    }

    /// Sizes of all stages' symbols, with the plan's chunks.
    fn sizes(&self, size: Size, steps: usize, plan: Option<&Plan>) -> Sizes {
        let halvings = plan.map_or(0, |plan| plan.settings(ATTENTION).halvings);
        self.form.sizes(size, steps, halvings)
    }

    /// Refuses a request that no run can fulfil.
    pub fn check(&self, request: &Request) -> Result<(), Flux2Error> {
        let Noise::Given(noise) = &request.noise else { return Ok(()) };
        let expected = self.noise_shape(request.size);
        if noise.shape != expected {
            let found = noise.shape.clone();
            return Err(Flux2Error::Noise { found, expected: expected.to_vec(), size: request.size });
        }
        Ok(())
    }

    /// Draws one picture: [1,3,H,W] in -1..1, as the decoder leaves it.
    pub fn draw(&self, request: &Request, run: &mut Run<'_>) -> Result<HostTensor, Flux2Error> {
        self.check(request)?;
        let prompt = self.tokenize(&request.prompt, run)?;
        let decoding = match self.kept_decoding(request, run)? {
            Some(decoding) => decoding,
            None => {
                let latents = self.sample(request, &prompt, run)?;
                self.decode_middle(&latents, request, run)?
            }
        };
        self.decode(decoding, request, run)
    }

    /// Draws several pictures with fewer sessions than one after the other takes: all prompts are encoded before the
    /// transformer opens, and all latents decoded after it has closed. Neighbours of the same prompt, and those of the
    /// same size and steps, share what they can. The decoder draws picture by picture, because what passes between its
    /// stages is large. `drawn` gets each picture's index and its tensor as [`Flux2::draw`] returns it. Nothing is kept
    /// on disk.
    pub fn draw_batch<E: From<Flux2Error>>(
        &self,
        requests: &[Request],
        run: &mut Run<'_>,
        drawn: &mut dyn FnMut(usize, HostTensor) -> Result<(), E>,
    ) -> Result<(), E> {
        requests.iter().try_for_each(|request| self.check(request))?;
        run.folder = RunFolder::none();
        let mut latents = self.sample_batch(requests, run)?.into_iter();
        for (index, (request, latents)) in requests.iter().zip(&mut latents).enumerate() {
            let decoding = self.decode_middle(&latents, request, run)?;
            // Let go of before the next is decoded.
            drop(latents);
            drawn(index, self.decode(decoding, request, run)?)?;
        }
        Ok(())
    }

    /// The request's prompt [1, text length, joint width] as the transformer reads it.
    pub fn encode_prompt(&self, request: &Request, run: &mut Run<'_>) -> Result<HostTensor, Flux2Error> {
        self.check(request)?;
        let prompt = self.tokenize(&request.prompt, run)?;
        let sizes = self.sizes(request.size, request.steps, run.plan);
        Ok(self.encode(slice::from_ref(&prompt), &sizes, run)?.remove(0))
    }

    /// The final latents of one picture [1, tokens, channels], which are not decoded; `embeds` as
    /// [`Flux2::encode_prompt`] gives them.
    pub fn latents(
        &self,
        request: &Request,
        embeds: HostTensor,
        run: &mut Run<'_>,
    ) -> Result<HostTensor, Flux2Error> {
        self.check(request)?;
        let picture = self.begin(request, embeds, run)?;
        Ok(self.denoise(request.size, request.steps, vec![picture], run)?.remove(0))
    }

    /// The final latents of several pictures, each [1, tokens, channels], which are not decoded; otherwise as
    /// [`Flux2::draw_batch`].
    pub fn latents_of_all(
        &self,
        requests: &[Request],
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, Flux2Error> {
        requests.iter().try_for_each(|request| self.check(request))?;
        run.folder = RunFolder::none();
        self.sample_batch(requests, run)
    }

    /// The prompts of all pictures, encoded: the text encoder alone runs.
    pub fn embeds_of_all(
        &self,
        requests: &[Request],
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, Flux2Error> {
        requests.iter().try_for_each(|request| self.check(request))?;
        run.folder = RunFolder::none();
        self.encode_batch(requests, run)
    }

    /// The encoded prompt of each picture.
    fn encode_batch(&self, requests: &[Request], run: &mut Run<'_>) -> Result<Vec<HostTensor>, Flux2Error> {
        let same_prompt: Vec<_> = requests.chunk_by(|a, b| a.prompt == b.prompt).collect();
        let prompts = same_prompt.iter().map(|requests| self.tokenize(&requests[0].prompt, run));
        let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
        let sizes = requests.first().map(|request| self.sizes(request.size, request.steps, run.plan));
        let encoded = self.encode(&prompts, &sizes.unwrap_or_default(), run)?.into_iter().zip(same_prompt);
        Ok(encoded.flat_map(|(embeds, requests)| vec![embeds; requests.len()]).collect())
    }

    /// The final latents of all pictures.
    fn sample_batch(&self, requests: &[Request], run: &mut Run<'_>) -> Result<Vec<HostTensor>, Flux2Error> {
        let mut embeds = self.encode_batch(requests, run)?.into_iter();
        let mut latents = Vec::with_capacity(requests.len());
        for alike in requests.chunk_by(|a, b| (a.size, a.steps) == (b.size, b.steps)) {
            let begin = |(request, embeds)| self.begin(request, embeds, run);
            let begun = alike.iter().zip(&mut embeds).map(begin).collect::<Result<Vec<_>, _>>()?;
            latents.extend(self.denoise(alike[0].size, alike[0].steps, begun, run)?);
        }
        Ok(latents)
    }

    /// The final latents [1, tokens, channels].
    fn sample(
        &self,
        request: &Request,
        prompt: &EncodedPrompt,
        run: &mut Run<'_>,
    ) -> Result<HostTensor, Flux2Error> {
        let begun = match self.kept_latents(request, run) {
            Some((done, latents)) if done == request.steps => return Ok(latents),
            begun => begun,
        };
        let sizes = self.sizes(request.size, request.steps, run.plan);
        let embeds = self.encode(slice::from_ref(prompt), &sizes, run)?.remove(0);
        let picture = match begun {
            Some((done, latents)) => Sampling { embeds, done, latents },
            None => self.begin(request, embeds, run)?,
        };
        Ok(self.denoise(request.size, request.steps, vec![picture], run)?.remove(0))
    }

    /// The picture before its first step.
    fn begin(
        &self,
        request: &Request,
        embeds: HostTensor,
        run: &mut Run<'_>,
    ) -> Result<Sampling, Flux2Error> {
        let noise = run.watch.boundary("noise_nchw", self.noise(request));
        Ok(Sampling { embeds, done: 0, latents: pack_latents(&noise)? })
    }

    /// The latents after the last step that an earlier attempt finished, and how many steps that are.
    fn kept_latents(&self, request: &Request, run: &mut Run<'_>) -> Option<(usize, HostTensor)> {
        let shape = [1, request.size.tokens(), self.form.channels()];
        let steps = (0..request.steps).rev();
        let (step, latents) =
            steps.filter_map(|step| Some((step, run.kept(&latents_after(step))?))).next()?;
        if latents.shape != shape {
            return None;
        }
        run.resume(format!("step {}/{}", step + 1, request.steps));
        Some((step + 1, latents))
    }

    fn tokenize(&self, prompt: &str, run: &mut Run<'_>) -> Result<EncodedPrompt, Flux2Error> {
        let (length, pad_id) = (self.form.text_length(), self.form.pad_id());
        let pad = u32::try_from(pad_id).map_err(|_| Flux2Error::PadId(pad_id))?;
        let mut encoded = self.prompts.encode(prompt, length, pad)?;
        if encoded.truncated > 0 {
            let EncodedPrompt { tokens, truncated, .. } = encoded;
            run.watch.listener.on_event(Event::warning(format!(
                "the prompt is cut: {tokens} tokens are kept, {truncated} at its end are lost (this model reads {length})"
            )));
        }
        encoded.ids = run.watch.boundary("input_ids", encoded.ids);
        encoded.mask = run.watch.boundary("attention_mask", encoded.mask);
        Ok(encoded)
    }

    /// Each is [1, text length, joint width]; rows of padding included, because the transformer attends to them.
    fn encode(
        &self,
        prompts: &[EncodedPrompt],
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, Flux2Error> {
        if let Some(embeds) = run.kept("prompt_embeds") {
            run.resume(TEXT_ENCODER.to_owned());
            return Ok(vec![embeds]);
        }
        let mut all = self.graphs.encode(self, prompts, sizes, run)?;
        for embeds in &mut all {
            check_finite(TEXT_ENCODER, None, embeds)?;
            run.keep(&[("prompt_embeds", embeds)], &[]);
            *embeds = run.watch.boundary("prompt_embeds", embeds.clone());
        }
        Ok(all)
    }

    /// The remaining steps of all pictures, in one session.
    fn denoise(
        &self,
        size: Size,
        steps: usize,
        pictures: Vec<Sampling>,
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, Flux2Error> {
        let schedule = Schedule::flux2(size.tokens(), steps)?;
        run.watch.boundary("sigmas", HostTensor::f32(&[steps + 1], schedule.sigmas().to_vec()));
        let sizes = self.sizes(size, steps, run.plan);
        let conditions = self.graphs.conditions(self, size, &schedule, &sizes, run)?;
        let (executor, folder) = (&mut *run.executor, &mut run.folder);
        let mut stage = self.stage(TRANSFORMER, &sizes, executor, run.plan, &mut run.watch)?;
        for (name, tensor) in &conditions.constant {
            stage.bind(name, tensor)?;
        }
        let step = |picture| denoise_one(picture, &schedule, &conditions, &mut stage, &mut run.watch, folder);
        let latents = pictures.into_iter().map(step).collect::<Result<Vec<_>, _>>()?;
        stage.close(run.plan, &mut run.watch)?;
        for latents in &latents {
            check_varied(TRANSFORMER, Some(steps - 1), latents)?;
            run.keep(&[(latents_after(steps - 1).as_str(), latents)], &[]);
        }
        Ok(latents)
    }

    fn noise(&self, request: &Request) -> HostTensor {
        let [_, channels, rows, columns] = self.noise_shape(request.size);
        match &request.noise {
            Noise::Seed(seed) => draw_latents(*seed, channels, rows, columns),
            Noise::Given(noise) => HostTensor::f32(&noise.shape, noise.to_f32()),
        }
    }

    fn noise_shape(&self, size: Size) -> [usize; 4] {
        let [rows, columns] = size.grid();
        [1, self.form.channels(), rows, columns]
    }

    /// Opens a stage and says so; the values of its graph that have a reference name are exposed if the probe asks. All
    /// stages of a picture are given the same sizes, so that those that come next can be opened ahead.
    fn stage<'r>(
        &'r self,
        name: &str,
        sizes: &Sizes,
        executor: &'r mut dyn Executor,
        plan: Option<&Plan>,
        watch: &mut Watch<'_>,
    ) -> Result<Opened<'r>, Flux2Error> {
        let stages = &self.bundle.manifest.stages;
        let index = stages.iter().position(|stage| stage.name == name).map_or(0, |i| i + 1);
        watch.listener.on_event(Event::Stage { name: name.to_owned(), index, count: stages.len() });
        let settings = plan.map(|plan| plan.settings(name)).unwrap_or_default();
        // Names in graphs of others are no reference's.
        let internals = watch.probe.internals() && !self.bundle.is_imported();
        let binding = Binding {
            sizes,
            exposed: if internals { &["dit_", "vae_"] } else { &[] },
            scaled: &[],
            settings,
            planned: plan.and_then(|plan| plan.bytes(name)),
            ahead: &plan.map(|plan| plan.opened_ahead(name)).unwrap_or_default(),
        };
        let described = self.bundle.stage(name)?;
        let provider = executor.device().provider;
        let session = executor.open_stage(self.bundle, name, &binding)?;
        self.note_nodes(name, session.nodes(), provider, watch);
        Ok(Opened { session, described })
    }

    /// Adds up the nodes of each provider. Graphs of others may leave nodes to the CPU, which is worth a warning.
    fn note_nodes(
        &self,
        stage: &str,
        nodes: &BTreeMap<String, usize>,
        provider: Provider,
        watch: &mut Watch<'_>,
    ) {
        for (provider, count) in nodes {
            *watch.nodes.entry(provider.clone()).or_default() += count;
        }
        let on_cpu = nodes.get("CPUExecutionProvider").copied().unwrap_or(0);
        if provider == Provider::WebGpu && on_cpu > 0 {
            let message = format!(
                "{on_cpu} nodes of {stage} run on the CPU, each with a way from the device and back; `viaduct inspect` says what a re-export would gain"
            );
            watch.listener.on_event(Event::warning(message));
        }
    }
}

/// The remaining steps of one picture in the transformer's open session.
fn denoise_one(
    picture: Sampling,
    schedule: &Schedule,
    conditions: &Conditions,
    stage: &mut Opened<'_>,
    watch: &mut Watch<'_>,
    folder: &mut RunFolder,
) -> Result<HostTensor, Flux2Error> {
    let Sampling { embeds, done, mut latents } = picture;
    stage.bind("prompt_embeds", &embeds)?;
    let (exposed, count) = (stage.exposed(), schedule.steps());
    for step in done..count {
        let started = Instant::now();
        let mut inputs = vec![("latents", TensorView::Host(&latents))];
        inputs.extend(conditions.steps[step].iter().map(|(name, tensor)| (*name, tensor.into())));
        let wanted = if step == 0 { &exposed[..] } else { &[] };
        let velocity = stage.run_and_probe(&inputs, ("pred", Placement::Host), wanted, watch)?;
        let velocity = velocity.into_host()?.widened();
        check_finite(TRANSFORMER, Some(step), &velocity)?;
        let velocity = watch.boundary(&format!("pred_step{step}"), velocity);
        schedule.euler_step(step, &mut latents, &velocity)?;
        latents = watch.boundary(&latents_after(step), latents);
        let seconds = started.elapsed().as_secs_f64();
        watch.listener.on_event(Event::Step { index: step + 1, count, seconds });
        if step + 1 < count {
            check_finite(TRANSFORMER, Some(step), &latents)?;
            folder.keep(&[(latents_after(step).as_str(), &latents)], &["prompt_embeds"], watch.listener);
        }
    }
    Ok(latents)
}

/// The reference's name of the latents after a step, counted from 0.
fn latents_after(step: usize) -> String {
    format!("latents_step{step}")
}

/// Position ids as [1, tokens, 4].
fn id_tensor(ids: &[PositionId]) -> HostTensor {
    HostTensor::i64(&[1, ids.len(), 4], ids.iter().flatten().copied().collect())
}

/// A stage's output, whose shape the host relies on: a graph need not be the one that the manifest describes.
fn shaped(stage: &str, name: &str, tensor: HostTensor, shape: &[usize]) -> Result<HostTensor, Flux2Error> {
    if tensor.shape == shape {
        Ok(tensor)
    } else {
        Err(misshapen(stage, name, format!("{shape:?}"), &tensor))
    }
}

fn misshapen(stage: &str, name: &str, expected: String, tensor: &HostTensor) -> Flux2Error {
    let (stage, tensor, got) = (stage.to_owned(), name.to_owned(), format!("{:?}", tensor.shape));
    RuntimeError::BadTensor { stage, tensor, expected, got }.into()
}
