//! FLUX.2 Klein: prompt to picture. Stages run one after the other, each alone on the device.
//!
//! Source of the order of operations: diffusers' Flux2KleinPipeline.

use std::{path::PathBuf, time::Instant};

use viaduct_export::{
    arch::flux2::parameters::Parameters,
    bundle::{Bundle, BundleError, MANIFEST},
    shapes::Sizes,
};

use super::{
    embedding::{EmbeddingError, gather_rows},
    event::Event,
    image::{ImageError, check_finite, check_varied},
    noise::{LatentError, draw_latents, pack_latents, unpack_latents},
    position::{
        PadKeys, PositionError, PositionId, image_ids, rope_tables, rope_tables_1d, text_ids, text_mask,
    },
    probe::Probe,
    prompt::{EncodedPrompt, PromptEncoder, PromptError},
    run::{Run, Watch, close},
    schedule::{Schedule, ScheduleError, time_embedding},
    size::Size,
};
use crate::{
    plan::Plan,
    runtime::{Binding, Executor, RuntimeError, Session},
    tensor::{HostTensor, Values},
};

/// The family whose bundles this pipeline runs.
const FAMILY: &str = "flux2";
/// The stage of the VAE's attention, which runs once per chunk of query rows.
const ATTENTION: &str = "vae_attention";

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
pub enum Noise {
    /// As `torch.Generator("cpu").manual_seed(seed)` draws them.
    Seed(u64),
    /// [1, channels, rows, columns].
    Given(HostTensor),
}

/// Modulation tensors of all steps: name of the transformer's input, and [steps, count, width].
type Modulations = Vec<(&'static str, HostTensor)>;

/// Outputs of `vae_pre` that the middle block's attention takes.
const ATTENTION_INPUTS: [&str; 3] = ["q", "kt", "v"];

const MODULATIONS: [&str; 4] = ["mod_img", "mod_txt", "mod_single", "mod_out"];

/// A FLUX.2 bundle ready to draw.
pub struct Flux2<'a> {
    bundle: &'a Bundle,
    parameters: Parameters,
    prompts: PromptEncoder,
}

/// The picture half decoded: what the decoder's remaining stages need.
struct Decoding {
    /// How many of the stages after the middle block are done.
    done: usize,
    /// [1,C,h,w]; what the next stage calls it is the name of the last stage's output.
    x: HostTensor,
    /// The attention's result [1,h,w,C], until the first stage has added it.
    attended: Option<HostTensor>,
}

impl<'a> Flux2<'a> {
    pub fn open(bundle: &'a Bundle) -> Result<Flux2<'a>, Flux2Error> {
        if bundle.manifest.family != FAMILY {
            return Err(Flux2Error::Family(bundle.manifest.family.clone()));
        }
        let parameters: Parameters = bundle.parameters()?;
        parameters
            .check()
            .map_err(|problem| Flux2Error::Parameters { manifest: bundle.folder.join(MANIFEST), problem })?;
        let prompts = PromptEncoder::load(&bundle.folder.join("tokenizer"))?;
        Ok(Flux2 { bundle, parameters, prompts })
    }

    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Sizes of all stages' symbols, with the plan's chunks.
    fn sizes(&self, size: Size, steps: usize, plan: Option<&Plan>) -> Sizes {
        let halvings = plan.map_or(0, |plan| plan.settings(ATTENTION).halvings);
        self.parameters.sizes(size, steps, halvings)
    }

    /// Draws one picture: [1,3,H,W] in -1..1, as the decoder leaves it.
    pub fn draw(&self, request: &Request, run: &mut Run<'_>) -> Result<HostTensor, Flux2Error> {
        let prompt = self.tokenize(&request.prompt, run)?;
        let decoding = match self.kept_decoding(request.size, run)? {
            Some(decoding) => decoding,
            None => {
                let latents = self.sample(request, &prompt, run)?;
                self.decode_middle(&latents, request.size, run)?
            }
        };
        self.decode(decoding, request.size, run)
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
        let embeds = self.encode(prompt, run)?;
        let schedule = Schedule::flux2(request.size.tokens(), request.steps)?;
        let sigmas = HostTensor::f32(&[request.steps + 1], schedule.sigmas().to_vec());
        run.watch.boundary("sigmas", sigmas);
        let modulations = self.modulate(&schedule, run)?;
        let (done, latents) = match begun {
            Some(begun) => begun,
            None => {
                let noise = run.watch.boundary("noise_nchw", self.noise(request)?);
                (0, pack_latents(&noise)?)
            }
        };
        self.denoise(request.size, &schedule, &modulations, &embeds, (done, latents), run)
    }

    /// The latents after the last step that an earlier attempt finished, and how many steps that are.
    fn kept_latents(&self, request: &Request, run: &mut Run<'_>) -> Option<(usize, HostTensor)> {
        let shape = [1, request.size.tokens(), self.parameters.transformer.channels];
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
        let text = &self.parameters.text;
        let pad = u32::try_from(text.pad_id).map_err(|_| Flux2Error::PadId(text.pad_id))?;
        let mut encoded = self.prompts.encode(prompt, text.length, pad)?;
        if encoded.truncated > 0 {
            let EncodedPrompt { tokens, truncated, .. } = encoded;
            run.watch.listener.on_event(Event::warning(format!(
                "the prompt is cut: {tokens} tokens are kept, {truncated} at its end are lost (this model reads {})",
                text.length
            )));
        }
        encoded.ids = run.watch.boundary("input_ids", encoded.ids);
        encoded.mask = run.watch.boundary("attention_mask", encoded.mask);
        Ok(encoded)
    }

    /// [1, text length, joint width]; rows of padding included, because the transformer attends to them.
    fn encode(&self, prompt: &EncodedPrompt, run: &mut Run<'_>) -> Result<HostTensor, Flux2Error> {
        if let Some(embeds) = run.kept("prompt_embeds") {
            run.resume("text_encoder".to_owned());
            return Ok(embeds);
        }
        let text = &self.parameters.text;
        let path = self.bundle.path(&text.embedding.file)?;
        let embeds = gather_rows(&path, &text.embedding, &prompt.ids)?;
        let pad_keys = if text.mask_padding { PadKeys::Hidden } else { PadKeys::Visible };
        let Values::I64(mask) = &prompt.mask.values else {
            unreachable!("the prompt encoder makes an i64 mask")
        };
        let mask = text_mask(mask, pad_keys);
        let (cos, sin) = rope_tables_1d(text.length, text.head_dim, text.rope_theta)?;
        let mut stage = self.stage("text_encoder", &Sizes::new(), run.executor, run.plan, &mut run.watch)?;
        let inputs = [("inputs_embeds", &embeds), ("mask", &mask), ("rope_cos", &cos), ("rope_sin", &sin)];
        let embeds = stage.run(&inputs, &["prompt_embeds"])?.remove(0);
        close(stage, run.plan, &mut run.watch)?;
        check_finite("text_encoder", None, &embeds)?;
        run.keep(&[("prompt_embeds", &embeds)], &[]);
        Ok(run.watch.boundary("prompt_embeds", embeds))
    }

    /// Everything that depends on the step alone, for all steps in one run.
    fn modulate(&self, schedule: &Schedule, run: &mut Run<'_>) -> Result<Modulations, Flux2Error> {
        let transformer = &self.parameters.transformer;
        let channels = transformer.time_channels;
        let steps = &schedule.sigmas()[..schedule.steps()];
        let times = steps.iter().flat_map(|s| time_embedding(*s, channels, transformer.time_order)).collect();
        let times = HostTensor::f32(&[steps.len(), channels], times);
        let sizes = Sizes::from([("steps".to_owned(), steps.len())]);
        let mut stage = self.stage("modulation", &sizes, run.executor, run.plan, &mut run.watch)?;
        let outputs = ["dit_temb", MODULATIONS[0], MODULATIONS[1], MODULATIONS[2], MODULATIONS[3]];
        let mut tensors = stage.run(&[("time_embedding", &times)], &outputs)?;
        close(stage, run.plan, &mut run.watch)?;
        for (name, tensor) in outputs.iter().zip(&tensors) {
            if tensor.shape.first() != Some(&times.shape[0]) {
                return Err(misshapen("modulation", name, format!("{} rows", times.shape[0]), tensor));
            }
        }
        let width = self.parameters.transformer.width;
        let temb = shaped("modulation", outputs[0], tensors.remove(0), &[times.shape[0], width])?;
        check_finite("modulation", None, &temb)?;
        run.watch.boundary("dit_temb", temb.row(0).reshaped(&[1, width]));
        Ok(MODULATIONS.into_iter().zip(tensors).collect())
    }

    /// Goes on with the latents after so many steps.
    fn denoise(
        &self,
        size: Size,
        schedule: &Schedule,
        modulations: &Modulations,
        embeds: &HostTensor,
        (done, mut latents): (usize, HostTensor),
        run: &mut Run<'_>,
    ) -> Result<HostTensor, Flux2Error> {
        let (cos, sin) = self.joint_tables(size, run.watch.probe)?;
        let sizes = self.sizes(size, schedule.steps(), run.plan);
        let mut stage = self.stage("transformer", &sizes, run.executor, run.plan, &mut run.watch)?;
        let exposed = self.exposed(&*stage)?;
        // What stays the same over the steps is uploaded once.
        for (name, tensor) in [("prompt_embeds", embeds), ("rope_cos", &cos), ("rope_sin", &sin)] {
            stage.bind(name, tensor)?;
        }
        let count = schedule.steps();
        for step in done..count {
            let started = Instant::now();
            let rows: Vec<(&str, HostTensor)> = modulations.iter().map(|(n, t)| (*n, t.row(step))).collect();
            let mut inputs = vec![("latents", &latents)];
            inputs.extend(rows.iter().map(|(name, row)| (*name, row)));
            let wanted = if step == 0 { &exposed[..] } else { &[] };
            let velocity = run_and_probe(&mut *stage, &inputs, "pred", wanted, &mut run.watch)?;
            check_finite("transformer", Some(step), &velocity)?;
            let velocity = run.watch.boundary(&format!("pred_step{step}"), velocity);
            schedule.euler_step(step, &mut latents, &velocity)?;
            latents = run.watch.boundary(&latents_after(step), latents);
            let seconds = started.elapsed().as_secs_f64();
            run.watch.listener.on_event(Event::Step { index: step + 1, count, seconds });
            if step + 1 < count {
                run.folder.keep(
                    &[(latents_after(step).as_str(), &latents)],
                    &["prompt_embeds"],
                    run.watch.listener,
                );
            }
        }
        close(stage, run.plan, &mut run.watch)?;
        check_varied("transformer", Some(count - 1), &latents)?;
        run.keep(&[(latents_after(count - 1).as_str(), &latents)], &[]);
        Ok(latents)
    }

    fn noise(&self, request: &Request) -> Result<HostTensor, Flux2Error> {
        let channels = self.parameters.transformer.channels;
        let [rows, columns] = request.size.grid();
        match &request.noise {
            Noise::Seed(seed) => Ok(draw_latents(*seed, channels, rows, columns)),
            Noise::Given(noise) => {
                let expected = vec![1, channels, rows, columns];
                if noise.shape != expected {
                    let found = noise.shape.clone();
                    return Err(Flux2Error::Noise { found, expected, size: request.size });
                }
                Ok(HostTensor::f32(&expected, noise.to_f32()))
            }
        }
    }

    /// Rotary tables of the joint sequence, text rows first: [tokens, head_dim / 2].
    fn joint_tables(
        &self,
        size: Size,
        probe: &mut dyn Probe,
    ) -> Result<(HostTensor, HostTensor), Flux2Error> {
        let transformer = &self.parameters.transformer;
        let [rows, columns] = size.grid();
        let mut ids = text_ids(self.parameters.text.length, transformer.text_ids);
        let image = image_ids(0, rows, columns);
        if probe.internals() {
            probe.boundary("txt_ids", id_tensor(&ids));
            probe.boundary("img_ids", id_tensor(&image));
        }
        ids.extend(image);
        let (cos, sin) = rope_tables(&ids, &transformer.axes, transformer.rope_theta)?;
        if probe.internals() {
            probe.boundary("rope_cos", cos.each_twice());
            probe.boundary("rope_sin", sin.each_twice());
        }
        Ok((cos, sin))
    }

    /// The decoder's stages after the middle block: to the picture [1,3,H,W] in -1..1.
    fn decode(&self, decoding: Decoding, size: Size, run: &mut Run<'_>) -> Result<HostTensor, Flux2Error> {
        let Decoding { done, mut x, mut attended } = decoding;
        let sizes = self.sizes(size, self.parameters.schedule.steps, run.plan);
        let stages = &self.parameters.vae.post_stages;
        let mut input = match done {
            0 => "vae_mid_res0".to_owned(),
            _ => self.output_of(&stages[done - 1])?,
        };
        for (index, name) in stages.iter().enumerate().skip(done) {
            let mut stage = self.stage(name, &sizes, run.executor, run.plan, &mut run.watch)?;
            let exposed = self.exposed(&*stage)?;
            let output = stage.outputs().into_iter().next().unwrap_or_default();
            let mut inputs = vec![(input.as_str(), &x)];
            inputs.extend(attended.as_ref().map(|attended| ("attn", attended)));
            x = run_and_probe(&mut *stage, &inputs, &output, &exposed, &mut run.watch)?;
            close(stage, run.plan, &mut run.watch)?;
            check_finite(name, None, &x)?;
            if index + 1 < stages.len() {
                run.keep(&[(name.as_str(), &x)], &[]);
            }
            x = run.watch.boundary(&output, x);
            attended = None;
            input = output;
        }
        if x.shape.get(2..) != Some(&[size.height(), size.width()]) {
            return Err(Flux2Error::Picture { found: x.shape, size });
        }
        check_varied("vae", None, &x)?;
        if let Some(last) = stages.last() {
            run.keep(&[(last.as_str(), &x)], &[]);
        }
        Ok(x)
    }

    /// The name that the manifest gives a stage's output, which is the next one's input.
    fn output_of(&self, stage: &str) -> Result<String, Flux2Error> {
        let outputs = &self.bundle.stage(stage)?.outputs;
        Ok(outputs.first().map(|port| port.name.clone()).unwrap_or_default())
    }

    /// The furthest state of the decoder that an earlier attempt kept.
    fn kept_decoding(&self, size: Size, run: &mut Run<'_>) -> Result<Option<Decoding>, Flux2Error> {
        let vae = &self.parameters.vae;
        for (index, name) in vae.post_stages.iter().enumerate().rev() {
            if let Some(x) = run.kept(name) {
                run.resume(name.clone());
                return Ok(Some(Decoding { done: index + 1, x, attended: None }));
            }
        }
        let Some(x) = run.kept("vae_mid_res0") else { return Ok(None) };
        let sizes = self.sizes(size, self.parameters.schedule.steps, run.plan);
        let Some(rows) = sizes.get("chunk_rows") else {
            run.resume("vae_pre".to_owned());
            return Ok(Some(Decoding { done: 0, x, attended: None }));
        };
        if let Some(attended) = run.kept(ATTENTION) {
            run.resume(ATTENTION.to_owned());
            return Ok(Some(Decoding { done: 0, x, attended: Some(attended) }));
        }
        let [Some(q), Some(kt), Some(v)] = ATTENTION_INPUTS.map(|name| run.kept(name)) else {
            return Ok(None);
        };
        run.resume("vae_pre".to_owned());
        Ok(Some(Decoding { done: 0, x, attended: Some(self.attend([q, kt, v], *rows, &sizes, run)?) }))
    }

    /// Everything before the first up block, from latents [1, tokens, channels].
    fn decode_middle(
        &self,
        latents: &HostTensor,
        size: Size,
        run: &mut Run<'_>,
    ) -> Result<Decoding, Flux2Error> {
        let [rows, columns] = size.grid();
        let latents = unpack_latents(latents, rows, columns)?;
        let sizes = self.sizes(size, self.parameters.schedule.steps, run.plan);
        let mut stage = self.stage("vae_pre", &sizes, run.executor, run.plan, &mut run.watch)?;
        let exposed = self.exposed(&*stage)?;
        let mut names = vec!["vae_mid_res0"];
        if sizes.contains_key("chunk_rows") {
            names.extend(ATTENTION_INPUTS);
        }
        let own = names.len();
        names.extend(exposed.iter().map(String::as_str));
        let mut tensors = stage.run(&[("latents", &latents)], &names)?;
        close(stage, run.plan, &mut run.watch)?;
        for (name, tensor) in exposed.iter().zip(tensors.split_off(own)) {
            run.watch.boundary(name, tensor);
        }
        let x = run.watch.boundary("vae_mid_res0", tensors.remove(0));
        check_finite("vae_pre", None, &x)?;
        let state = [("vae_mid_res0", &x)].into_iter().chain(ATTENTION_INPUTS.into_iter().zip(&tensors));
        run.keep(&state.collect::<Vec<_>>(), &[]);
        let attended = match (sizes.get("chunk_rows"), <[HostTensor; 3]>::try_from(tensors)) {
            (Some(chunk), Ok(inputs)) => Some(self.attend(inputs, *chunk, &sizes, run)?),
            _ => None,
        };
        Ok(Decoding { done: 0, x, attended })
    }

    /// The middle block's attention, a chunk of query rows at a time. `q` and `v` are [1,h,w,C], `kt` [1,C,h,w].
    fn attend(
        &self,
        [q, kt, v]: [HostTensor; 3],
        chunk: usize,
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<HostTensor, Flux2Error> {
        let shape = q.shape.clone();
        let (&[1, height, width, channels], false) = (&shape[..], shape.contains(&0)) else {
            return Err(misshapen("vae_pre", "q", "[1, height, width, channels]".to_owned(), &q));
        };
        let kt = shaped("vae_pre", "kt", kt, &[1, channels, height, width])?;
        let v = shaped("vae_pre", "v", v, &shape)?;
        let rows = height * width;
        let (kt, v) = (kt.reshaped(&[1, channels, rows]), v.reshaped(&[1, rows, channels]));
        let mut stage = self.stage(ATTENTION, sizes, run.executor, run.plan, &mut run.watch)?;
        stage.bind("kt", &kt)?;
        stage.bind("v", &v)?;
        let queries = q.into_f32();
        let mut attended = Vec::with_capacity(queries.len());
        for part in queries.chunks(chunk * channels) {
            let part = HostTensor::f32(&[1, part.len() / channels, channels], part.to_vec());
            let result = stage.run(&[("q_chunk", &part)], &["attn_chunk"])?.remove(0);
            attended.extend(shaped(ATTENTION, "attn_chunk", result, &part.shape)?.into_f32());
        }
        close(stage, run.plan, &mut run.watch)?;
        let attended = HostTensor::f32(&shape, attended);
        run.keep(&[(ATTENTION, &attended)], &["vae_mid_res0"]);
        Ok(attended)
    }

    /// Opens a stage and says so; the values of its graph that have a reference name are exposed if the probe asks.
    fn stage<'r>(
        &self,
        name: &str,
        sizes: &Sizes,
        executor: &'r mut dyn Executor,
        plan: Option<&Plan>,
        watch: &mut Watch<'_>,
    ) -> Result<Box<dyn Session + 'r>, Flux2Error> {
        let stages = &self.bundle.manifest.stages;
        let index = stages.iter().position(|stage| stage.name == name).map_or(0, |i| i + 1);
        watch.listener.on_event(Event::Stage { name: name.to_owned(), index, count: stages.len() });
        let settings = plan.map(|plan| plan.settings(name)).unwrap_or_default();
        let binding = Binding {
            sizes,
            exposed: if watch.probe.internals() { &["dit_", "vae_"] } else { &[] },
            score_limit: settings.score_limit(),
            pending_dispatches: settings.pending_dispatches,
            planned: plan.and_then(|plan| plan.bytes(name)),
        };
        let stage = executor.open_stage(self.bundle, name, &binding)?;
        for (provider, count) in stage.nodes() {
            *watch.nodes.entry(provider.clone()).or_default() += count;
        }
        Ok(stage)
    }

    /// Names of a stage's exposed values: outputs that the bundle does not list.
    fn exposed(&self, stage: &dyn Session) -> Result<Vec<String>, Flux2Error> {
        let listed = &self.bundle.stage(stage.name())?.outputs;
        let names = stage.outputs().into_iter();
        Ok(names.filter(|name| !listed.iter().any(|port| port.name == *name)).collect())
    }
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

/// Runs a stage for one output and hands the exposed values to the probe, which only looks at them.
fn run_and_probe(
    stage: &mut dyn Session,
    inputs: &[(&str, &HostTensor)],
    output: &str,
    exposed: &[String],
    watch: &mut Watch<'_>,
) -> Result<HostTensor, Flux2Error> {
    let mut names = vec![output];
    names.extend(exposed.iter().map(String::as_str));
    let mut tensors = stage.run(inputs, &names)?;
    let result = tensors.remove(0);
    for (name, tensor) in exposed.iter().zip(tensors) {
        watch.boundary(name, tensor);
    }
    Ok(result)
}
