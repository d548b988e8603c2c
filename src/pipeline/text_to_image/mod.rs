//! Prompt to picture. Stages run one after the other, each alone on the device. What families do differently is behind one
//! interface, [`Family`].

mod decoder;
mod denoise;
mod error;
mod family;
mod opened;
mod request;
mod strips;

use std::collections::BTreeMap;

use viaduct_export::{
    arch::{SizesRequest, TextRows},
    bundle::{Bundle, Stages},
    shapes::Sizes,
};

use self::denoise::{Sampling, denoise_one, own_prompts};
pub use self::{
    decoder::ATTENTION,
    error::{PipelineError, misshapen, shaped},
    family::{Conditions, Family, Inputs, Sampled},
    opened::Opened,
    request::{Negative, Noise, Request},
    strips::Strips,
};
use super::{
    event::Event,
    image::{check_finite, check_varied},
    noise::{draw_latents, pack_latents},
    prompt::EncodedPrompt,
    run::{Run, Watch},
    run_folder::RunFolder,
    schedule::{MAX_STEPS, ScheduleError},
    size::Size,
};
use crate::{
    plan::Plan,
    runtime::{Binding, Executor, Provider},
    tensor::HostTensor,
};

/// Stages that bundles of all families have.
pub const TEXT_ENCODER: &str = "text_encoder";
pub const TRANSFORMER: &str = "transformer";

/// Prompts that are encoded.
struct Encoded {
    embeds: Vec<HostTensor>,
    /// Which of them each text is: for every picture its prompt, and its negative one if there is one.
    places: Vec<usize>,
    /// Of the longest.
    rows: TextRows,
}

/// A bundle ready to draw.
pub struct TextToImage<'a> {
    bundle: &'a Bundle,
    family: Box<dyn Family>,
}

impl<'a> TextToImage<'a> {
    pub fn open(bundle: &'a Bundle) -> Result<TextToImage<'a>, PipelineError> {
        let name = &bundle.manifest.family;
        let Some((_, open)) = family::FAMILIES.iter().find(|(known, _)| known == name) else {
            let known: Vec<&str> = family::FAMILIES.iter().map(|family| family.0).collect();
            return Err(PipelineError::Family { family: name.clone(), known: known.join(", ") });
        };
        Ok(TextToImage { bundle, family: open(bundle)? })
    }

    pub fn bundle(&self) -> &Bundle {
        self.bundle
    }

    pub fn family(&self) -> &dyn Family {
        &*self.family
    }

    /// What a plan needs to know of the pictures, which are of one size: the longest prompt counts.
    pub fn asked(&self, requests: &[Request]) -> Result<SizesRequest, PipelineError> {
        let mut text = TextRows::all(0);
        for prompt in requests.iter().flat_map(Request::prompts) {
            text = text.at_least(self.family.text_rows(&self.family.tokenize(prompt)?));
        }
        let (size, steps) =
            requests.first().map_or(([0, 0], 0), |r| ([r.size.width(), r.size.height()], r.steps));
        Ok(SizesRequest { width: size[0], height: size[1], steps, halvings: 0, text })
    }

    /// Rows that the transformer's attention goes over.
    pub fn attended_rows(&self, request: &Request) -> Result<usize, PipelineError> {
        Ok(self.asked(std::slice::from_ref(request))?.text.read + request.size.tokens())
    }

    /// Sizes of all stages' symbols, with the plan's chunks.
    fn sizes(&self, request: &Request, text: TextRows, plan: Option<&Plan>) -> Sizes {
        let Request { size, steps, .. } = *request;
        let (width, height) = (size.width(), size.height());
        let halved =
            |halvings| self.family.sizes(size, &SizesRequest { width, height, steps, halvings, text });
        let mut sizes = halved(0);
        for stage in plan.iter().flat_map(|plan| &plan.stages).filter(|stage| stage.settings.halvings > 0) {
            let mut own = halved(stage.settings.halvings);
            for symbol in self.family.chunk_symbols(&stage.name) {
                sizes.extend(own.remove_entry(&symbol));
            }
        }
        sizes
    }

    /// Refuses a request that no run can fulfil.
    pub fn check(&self, request: &Request) -> Result<(), PipelineError> {
        let asked = request.steps;
        if !(1..=MAX_STEPS).contains(&asked) {
            return Err(ScheduleError::Steps(asked).into());
        }
        let taken = self.family.steps(Some(asked));
        if taken != asked {
            return Err(PipelineError::Steps { asked, taken });
        }
        if request.negative.is_some() && !self.family.takes_negative() {
            return Err(PipelineError::Negative);
        }
        let Noise::Given(noise) = &request.noise else { return Ok(()) };
        let expected = self.noise_shape(request.size);
        if noise.shape != expected {
            let found = noise.shape.clone();
            return Err(PipelineError::Noise { found, expected: expected.to_vec(), size: request.size });
        }
        Ok(())
    }

    /// Draws one picture: [1, 3 or 4, H, W] in -1..1, as the decoder leaves it.
    pub fn draw(&self, request: &Request, run: &mut Run<'_>) -> Result<HostTensor, PipelineError> {
        self.check(request)?;
        let prompts = self.tokenize(request, run)?;
        let sizes = self.sizes(request, self.text_rows(&prompts), run.plan);
        let picture = (request.size, &sizes);
        let decoding = match self.kept_decoding(&sizes, run)? {
            Some(decoding) => decoding,
            None => {
                let latents = self.sample(request, &prompts, &sizes, run)?;
                self.decode_middle(&latents, picture, run)?
            }
        };
        self.decode(decoding, picture, run)
    }

    /// Draws several pictures with fewer sessions than one after the other takes: all prompts are encoded before the
    /// transformer opens, and all latents decoded after it has closed. Neighbours of the same prompt, and those of the
    /// same size and steps, share what they can. The decoder draws picture by picture, because what passes between its
    /// stages is large. `drawn` gets each picture's index and its tensor as [`TextToImage::draw`] returns it. Nothing is
    /// kept on disk.
    pub fn draw_batch<E: From<PipelineError>>(
        &self,
        requests: &[Request],
        run: &mut Run<'_>,
        drawn: &mut dyn FnMut(usize, HostTensor) -> Result<(), E>,
    ) -> Result<(), E> {
        let (text, latents) = self.sample_batch(requests, run)?;
        let mut latents = latents.into_iter();
        for (index, (request, latents)) in requests.iter().zip(&mut latents).enumerate() {
            let sizes = self.sizes(request, text, run.plan);
            let picture = (request.size, &sizes);
            let decoding = self.decode_middle(&latents, picture, run)?;
            // Let go of before the next is decoded.
            drop(latents);
            drawn(index, self.decode(decoding, picture, run)?)?;
        }
        Ok(())
    }

    /// The request's prompt [1, rows, width] as the transformer reads it.
    pub fn encode_prompt(&self, request: &Request, run: &mut Run<'_>) -> Result<HostTensor, PipelineError> {
        self.check(request)?;
        let prompt = self.tokenize_one(&request.prompt, "", run)?;
        let sizes = self.sizes(request, self.family.text_rows(&prompt), run.plan);
        Ok(self.encode(&[prompt], &EMBEDS[..1], &sizes, run)?.remove(0))
    }

    /// The final latents of one picture [1, tokens, channels], which are not decoded; `embeds` as
    /// [`TextToImage::encode_prompt`] gives them.
    pub fn latents(
        &self,
        request: &Request,
        embeds: HostTensor,
        run: &mut Run<'_>,
    ) -> Result<HostTensor, PipelineError> {
        self.check(request)?;
        let sizes =
            self.sizes(request, self.family.text_rows(&self.family.tokenize(&request.prompt)?), run.plan);
        let picture = self.begin(request, [0, 0], run)?;
        Ok(self.denoise(request, &[embeds], vec![picture], &sizes, run)?.remove(0))
    }

    /// The final latents of several pictures, each [1, tokens, channels], which are not decoded; otherwise as
    /// [`TextToImage::draw_batch`].
    pub fn latents_of_all(
        &self,
        requests: &[Request],
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, PipelineError> {
        Ok(self.sample_batch(requests, run)?.1)
    }

    /// The prompts of all pictures, encoded: the text encoder alone runs.
    pub fn embeds_of_all(
        &self,
        requests: &[Request],
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, PipelineError> {
        requests.iter().try_for_each(|request| self.check(request))?;
        run.folder = RunFolder::none();
        Ok(self.encode_batch(requests, run)?.embeds)
    }

    /// The prompts of all pictures. Neighbours of the same text are encoded once.
    fn encode_batch(&self, requests: &[Request], run: &mut Run<'_>) -> Result<Encoded, PipelineError> {
        let Some(first) = requests.first() else {
            return Ok(Encoded { embeds: Vec::new(), places: Vec::new(), rows: TextRows::all(0) });
        };
        let texts: Vec<&str> = requests.iter().flat_map(Request::prompts).collect();
        let alike: Vec<&[&str]> = texts.chunk_by(|a, b| a == b).collect();
        let prompts = alike.iter().map(|texts| self.tokenize_one(texts[0], "", run));
        let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
        let rows = self.text_rows(&prompts);
        let names = vec![EMBEDS[0]; prompts.len()];
        let embeds = self.encode(&prompts, &names, &self.sizes(first, rows, run.plan), run)?;
        let places = alike.iter().enumerate().flat_map(|(place, texts)| vec![place; texts.len()]);
        Ok(Encoded { embeds, places: places.collect(), rows })
    }

    /// Rows of the longest prompt, and the final latents of all pictures.
    fn sample_batch(
        &self,
        requests: &[Request],
        run: &mut Run<'_>,
    ) -> Result<(TextRows, Vec<HostTensor>), PipelineError> {
        requests.iter().try_for_each(|request| self.check(request))?;
        run.folder = RunFolder::none();
        let Encoded { embeds, places, rows } = self.encode_batch(requests, run)?;
        let mut places = places.into_iter();
        let mut latents = Vec::with_capacity(requests.len());
        for alike in requests.chunk_by(|a, b| (a.size, a.steps) == (b.size, b.steps)) {
            let mut begun = Vec::with_capacity(alike.len());
            for request in alike {
                let mut place = || places.next().unwrap_or_default();
                let prompt = place();
                let negative = request.negative.as_ref().map_or(prompt, |_| place());
                begun.push(self.begin(request, [prompt, negative], run)?);
            }
            let (own, begun) = own_prompts(&embeds, begun);
            let sizes = self.sizes(&alike[0], rows, run.plan);
            latents.extend(self.denoise(&alike[0], &own, begun, &sizes, run)?);
        }
        Ok((rows, latents))
    }

    /// The final latents [1, tokens, channels].
    fn sample(
        &self,
        request: &Request,
        prompts: &[EncodedPrompt],
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<HostTensor, PipelineError> {
        let begun = match self.kept_latents(request, run) {
            Some((done, latents)) if done == request.steps => return Ok(latents),
            begun => begun,
        };
        let embeds = self.encode(prompts, &EMBEDS[..prompts.len()], sizes, run)?;
        let last = embeds.len() - 1;
        let picture = match begun {
            Some((done, latents)) => Sampling { done, ..Sampling::first(request, [0, last], latents) },
            None => self.begin(request, [0, last], run)?,
        };
        Ok(self.denoise(request, &embeds, vec![picture], sizes, run)?.remove(0))
    }

    /// The picture before its first step, whose prompt and negative prompt are at these places.
    fn begin(
        &self,
        request: &Request,
        places: [usize; 2],
        run: &mut Run<'_>,
    ) -> Result<Sampling, PipelineError> {
        let noise = run.watch.boundary("noise_nchw", self.noise(request));
        let latents = run.watch.boundary("noise_packed", pack_latents(&noise)?);
        Ok(Sampling::first(request, places, latents))
    }

    /// The latents after the last step that an earlier attempt finished, and how many steps that are.
    fn kept_latents(&self, request: &Request, run: &mut Run<'_>) -> Option<(usize, HostTensor)> {
        let shape = [1, request.size.tokens(), self.family.channels()];
        let steps = (0..request.steps).rev();
        let (step, latents) =
            steps.filter_map(|step| Some((step, run.kept(&latents_after(step))?))).next()?;
        if latents.shape != shape {
            return None;
        }
        run.resume(format!("step {}/{}", step + 1, request.steps));
        Some((step + 1, latents))
    }

    /// The prompt, and the negative one if there is one.
    fn tokenize(&self, request: &Request, run: &mut Run<'_>) -> Result<Vec<EncodedPrompt>, PipelineError> {
        let prompt = self.tokenize_one(&request.prompt, "", run)?;
        let negative = request.negative.as_ref();
        let negative = negative.map(|negative| self.tokenize_one(&negative.prompt, NEGATIVE, run));
        Ok([prompt].into_iter().chain(negative.transpose()?).collect())
    }

    /// `which` begins the names of its tensors.
    fn tokenize_one(
        &self,
        prompt: &str,
        which: &str,
        run: &mut Run<'_>,
    ) -> Result<EncodedPrompt, PipelineError> {
        let mut encoded = self.family.tokenize(prompt)?;
        if encoded.truncated > 0 {
            let (EncodedPrompt { tokens, truncated, .. }, length) = (&encoded, self.family.text_length());
            run.watch.listener.on_event(Event::warning(format!(
                "the prompt is cut: {tokens} tokens are kept, {truncated} at its end are lost (this model reads {length})"
            )));
        }
        encoded.ids = run.watch.boundary(&format!("{which}input_ids"), encoded.ids);
        encoded.mask = run.watch.boundary(&format!("{which}attention_mask"), encoded.mask);
        Ok(encoded)
    }

    /// Of the longest prompt.
    fn text_rows(&self, prompts: &[EncodedPrompt]) -> TextRows {
        let rows = prompts.iter().map(|prompt| self.family.text_rows(prompt));
        rows.fold(TextRows::all(0), TextRows::at_least)
    }

    /// Each is [1, rows, width], as the transformer reads it; `names` are theirs, in the folder and for the probe.
    fn encode(
        &self,
        prompts: &[EncodedPrompt],
        names: &[&str],
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, PipelineError> {
        if let Some(embeds) = names.iter().map(|name| run.kept(name)).collect() {
            run.resume(TEXT_ENCODER.to_owned());
            return Ok(embeds);
        }
        let all = self.family.encode(self, prompts, sizes, run)?;
        all.iter().try_for_each(|embeds| check_finite(TEXT_ENCODER, None, embeds))?;
        let named: Vec<_> = names.iter().copied().zip(&all).collect();
        run.keep(&named, &[]);
        Ok(names.iter().zip(all).map(|(name, embeds)| run.watch.boundary(name, embeds)).collect())
    }

    /// The remaining steps of all pictures, which are of the request's size and steps, in one session.
    fn denoise(
        &self,
        request: &Request,
        embeds: &[HostTensor],
        pictures: Vec<Sampling>,
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, PipelineError> {
        let Request { size, steps, .. } = *request;
        let schedule = self.family.schedule(size, steps)?;
        let sigmas = HostTensor::f32(&[steps + 1], schedule.sigmas().to_vec());
        let schedule = schedule.with_sigmas(&run.watch.boundary("sigmas", sigmas));
        run.watch.probe.shown("timesteps", HostTensor::f32(&[steps], schedule.timesteps()));
        let sampled = Sampled { size, schedule: &schedule, sizes };
        let conditions = self.family.conditions(self, &sampled, embeds, run)?;
        let (executor, folder) = (&mut *run.executor, &mut run.folder);
        let mut stage = self.stage(TRANSFORMER, sizes, executor, run.plan, &mut run.watch)?;
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
        [1, self.family.channels(), rows, columns]
    }

    /// Opens a stage and says so; the values of its graph that have a reference name are exposed if the probe asks. All
    /// stages of a picture are given the same sizes, so that those that come next can be opened ahead.
    pub fn stage<'r>(
        &'r self,
        name: &str,
        sizes: &Sizes,
        executor: &'r mut dyn Executor,
        plan: Option<&Plan>,
        watch: &mut Watch<'_>,
    ) -> Result<Opened<'r>, PipelineError> {
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

/// The names under which encoded prompts are kept: the prompt's, and that of the negative one.
const EMBEDS: [&str; 2] = ["prompt_embeds", "negative_prompt_embeds"];
/// Begins the names of a negative prompt's tensors.
const NEGATIVE: &str = "negative_";

/// The reference's name of the latents after a step, counted from 0.
fn latents_after(step: usize) -> String {
    format!("latents_step{step}")
}
