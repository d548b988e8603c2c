//! Qwen-Image-2.1. Source of the order of operations: diffusers' QwenImage21Pipeline.
//!
//! Rows of text never read rows of the picture and are modulated at noise level 0, so that their keys and values are computed
//! once, by the prefix graph, and serve every step.

mod tokens;

use serde::Deserialize;
use viaduct_export::{
    arch::{
        SizesRequest, TextRows,
        parameters::{ChunkedAttention, DecoderChain},
        qwen_image::parameters::{Graphs, Parameters, PostStage},
    },
    bundle::{Bundle, MANIFEST},
    picture::SizeError,
    shapes::Sizes,
};

use self::tokens::TemplatedTokenizer;
use super::{
    embedding::gather_rows,
    image::check_finite,
    position::{PadKeys, rope_tables, rope_tables_1d, text_mask},
    probe::Probe,
    prompt::{EncodedPrompt, PromptError},
    run::Run,
    schedule::{Schedule, ScheduleError, time_embedding},
    size::Size,
    text_to_image::{
        ATTENTION, Conditions, Family, Inputs, PipelineError, Sampled, Strips, TEXT_ENCODER, TextToImage,
        shaped,
    },
};
use crate::tensor::HostTensor;

const MODULATION: &str = "modulation";
const PREFIX: &str = "prefix";

/// A Qwen-Image bundle's family.
pub struct QwenImage {
    parameters: Parameters,
    tokenizer: TemplatedTokenizer,
}

/// What depends on the noise level alone.
struct Modulation {
    /// [levels, 4, width]: the last is that of text rows.
    blocks: HostTensor,
    /// [levels, 1, width].
    output: HostTensor,
}

/// A prompt's rows as the transformer's text part takes them.
struct TextInputs<'a> {
    /// [1, rows, width].
    embeds: &'a HostTensor,
    rows: usize,
    /// [rows, pairs of dims].
    cos: HostTensor,
    sin: HostTensor,
}

impl TextInputs<'_> {
    /// The inputs of the graph that holds both parts.
    fn whole(self, text_mod: &HostTensor) -> Inputs {
        let inputs = [
            ("prompt_embeds", self.embeds.clone()),
            ("text_mod", text_mod.clone()),
            ("text_mask", causal(self.rows)),
            ("text_rope_cos", self.cos),
            ("text_rope_sin", self.sin),
        ];
        inputs.map(|(name, tensor)| (name.into(), tensor)).into()
    }
}

impl QwenImage {
    pub fn open(bundle: &Bundle) -> Result<QwenImage, PipelineError> {
        let parameters = bundle.parameters(|value| Parameters::deserialize(value))?;
        parameters.check().map_err(|problem| PipelineError::Parameters {
            manifest: bundle.folder.join(MANIFEST),
            problem,
        })?;
        let (template, length) = (parameters.text.template.clone(), parameters.text.length);
        let tokenizer = TemplatedTokenizer::load(&bundle.folder.join("tokenizer"), template, length)?;
        Ok(QwenImage { parameters, tokenizer })
    }

    fn post_stage(&self, name: &str) -> Option<&PostStage> {
        self.parameters.vae.post_stages.iter().find(|stage| stage.name == name)
    }

    /// Modulations of all steps, and of the level of the text.
    fn modulate(
        &self,
        pipeline: &TextToImage<'_>,
        Sampled { schedule, sizes, .. }: &Sampled<'_>,
        run: &mut Run<'_>,
    ) -> Result<Modulation, PipelineError> {
        let transformer = &self.parameters.transformer;
        let steps = &schedule.sigmas()[..schedule.steps()];
        let text = transformer.text_sigma.unwrap_or(steps[0]);
        let levels: Vec<f32> = steps.iter().copied().chain([text]).collect();
        let (channels, order, width) = (transformer.time_channels, transformer.time_order, transformer.width);
        let times = levels.iter().flat_map(|sigma| time_embedding(*sigma, channels, order)).collect();
        let times = HostTensor::f32(&[levels.len(), channels], times);
        let mut stage = pipeline.stage(MODULATION, sizes, run.executor, run.plan, &mut run.watch)?;
        let mut tensors = stage.run(&[("time_embedding", &times)], &["mod", "mod_out"])?;
        stage.close(run.plan, &mut run.watch)?;
        let output = shaped(MODULATION, "mod_out", tensors.remove(1), &[levels.len(), 1, width])?;
        let blocks = shaped(MODULATION, "mod", tensors.remove(0), &[levels.len(), 4, width])?;
        check_finite(MODULATION, None, &blocks)?;
        Ok(Modulation { blocks, output })
    }

    /// What the transformer takes of each prompt; `text_mod` is what modulates rows of text.
    fn of_prompts(
        &self,
        pipeline: &TextToImage<'_>,
        sampled: &Sampled<'_>,
        (embeds, text_mod): (&[HostTensor], &HostTensor),
        run: &mut Run<'_>,
    ) -> Result<Vec<Inputs>, PipelineError> {
        let mut texts = Vec::with_capacity(embeds.len());
        let mut inputs = Vec::with_capacity(embeds.len());
        for embeds in embeds {
            let rows = embeds.shape.get(1).copied().unwrap_or(0);
            let [[cos, sin], [image_cos, image_sin]] = self.tables(rows, sampled.size, run.watch.probe)?;
            inputs.push(vec![("rope_cos".into(), image_cos), ("rope_sin".into(), image_sin)]);
            texts.push(TextInputs { embeds, rows, cos, sin });
        }
        let texts = match self.parameters.transformer.graphs {
            Graphs::Single => texts.into_iter().map(|text| text.whole(text_mod)).collect(),
            Graphs::Prefix => self.keys_and_values(pipeline, sampled, (texts, text_mod), run)?,
        };
        for (inputs, text) in inputs.iter_mut().zip(texts) {
            inputs.extend(text);
        }
        Ok(inputs)
    }

    /// Keys and values of each prompt's rows, block by block, from the prefix graph. It runs over the rows of the longest
    /// prompt: no row reads a later one.
    fn keys_and_values(
        &self,
        pipeline: &TextToImage<'_>,
        Sampled { sizes, .. }: &Sampled<'_>,
        (texts, text_mod): (Vec<TextInputs<'_>>, &HostTensor),
        run: &mut Run<'_>,
    ) -> Result<Vec<Inputs>, PipelineError> {
        let (layers, width) = (self.parameters.transformer.layers, self.parameters.transformer.width);
        let rows = sizes.get("text_seq").copied().unwrap_or(0);
        let mut stage = pipeline.stage(PREFIX, sizes, run.executor, run.plan, &mut run.watch)?;
        stage.bind("mod", text_mod)?;
        stage.bind("mask", &causal(rows))?;
        let names: Vec<String> =
            (0..layers).flat_map(|layer| [format!("k{layer}"), format!("v{layer}")]).collect();
        let outputs: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut all = Vec::with_capacity(texts.len());
        for TextInputs { embeds, rows: own, cos, sin } in texts {
            let [embeds, cos, sin] = [embeds.clone(), cos, sin].map(|tensor| with_rows(tensor, rows));
            let inputs = [("prompt_embeds", &embeds), ("rope_cos", &cos), ("rope_sin", &sin)];
            let mut inputs_of_step = Inputs::with_capacity(names.len());
            for (name, tensor) in names.iter().zip(stage.run(&inputs, &outputs)?) {
                let tensor = shaped(PREFIX, name, tensor, &[1, rows, width])?;
                check_finite(PREFIX, None, &tensor)?;
                inputs_of_step.push((name.clone().into(), with_rows(tensor, own)));
            }
            all.push(inputs_of_step);
        }
        stage.close(run.plan, &mut run.watch)?;
        Ok(all)
    }

    /// Rotary tables (cosine, sine) of the text's rows and of the picture's.
    fn tables(
        &self,
        rows: usize,
        size: Size,
        probe: &mut dyn Probe,
    ) -> Result<[[HostTensor; 2]; 2], PipelineError> {
        let transformer = &self.parameters.transformer;
        let text: Vec<[i64; 3]> = (0..rows as i64).map(|i| [i; 3]).collect();
        let [height, width] = size.grid().map(|side| side as i64);
        let middle = |side: i64| if transformer.centred { side - side / 2 } else { 0 };
        let place = |y: i64| (0..width).map(move |x| [rows as i64, y - middle(height), x - middle(width)]);
        let image: Vec<[i64; 3]> = (0..height).flat_map(place).collect();
        let mut tables = |ids: &[[i64; 3]], names: [&str; 2]| -> Result<[HostTensor; 2], PipelineError> {
            let (cos, sin) = rope_tables(ids, &transformer.axes, transformer.rope_theta)?;
            // References have a batch axis.
            let mut see = |name, table: HostTensor| {
                let shape = table.shape.clone();
                let seen = probe.boundary(name, table.reshaped(&[&[1], &shape[..]].concat()));
                seen.reshaped(&shape)
            };
            Ok([see(names[0], cos), see(names[1], sin)])
        };
        Ok([tables(&text, ["txt_cos", "txt_sin"])?, tables(&image, ["img_cos", "img_sin"])?])
    }
}

impl Family for QwenImage {
    /// Sides are cut to multiples of 32 pixels.
    fn size(&self, width: usize, height: usize) -> Result<Size, SizeError> {
        self.parameters.size(width, height)
    }

    fn default_size(&self) -> [usize; 2] {
        [self.parameters.vae.default_side; 2]
    }

    fn steps(&self, asked: Option<usize>) -> usize {
        match &self.parameters.schedule.sigmas {
            Some(levels) => levels.len(),
            None => asked.unwrap_or(self.parameters.schedule.steps),
        }
    }

    fn channels(&self) -> usize {
        self.parameters.transformer.channels
    }

    fn takes_negative(&self) -> bool {
        true
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    fn decoder(&self) -> DecoderChain {
        let rows = self.parameters.vae.attention_rows;
        let attention = ChunkedAttention { rows, fixed: false, q_factor: 1.0 };
        DecoderChain { first: ["vae_pre", "vae_mid_res0"], attention: Some(attention) }
    }

    fn post_stages(&self) -> Vec<&str> {
        self.parameters.vae.post_stages.iter().map(|stage| stage.name.as_str()).collect()
    }

    fn sizes(&self, size: Size, request: &SizesRequest) -> Sizes {
        self.parameters.sizes(size, request)
    }

    fn chunk_symbols(&self, stage: &str) -> Vec<String> {
        let strips = self.post_stage(stage).filter(|stage| stage.halo.is_some());
        match strips {
            Some(stage) => stage.row_symbols().to_vec(),
            None if stage == ATTENTION => vec!["chunk_rows".to_owned()],
            None => Vec::new(),
        }
    }

    fn strips(&self, stage: &str, sizes: &Sizes) -> Option<Strips> {
        let stage = self.post_stage(stage)?;
        let [rows, _] = stage.row_symbols();
        Some(Strips { rows: *sizes.get(&rows)?, halo: stage.halo?, growth: stage.growth })
    }

    fn schedule(&self, size: Size, steps: usize) -> Result<Schedule, ScheduleError> {
        match &self.parameters.schedule.sigmas {
            Some(levels) => Schedule::fixed(levels),
            None => Schedule::stretched(size.tokens(), steps, &self.parameters.schedule.shift),
        }
    }

    fn text_length(&self) -> usize {
        self.parameters.text.length
    }

    fn tokenize(&self, prompt: &str) -> Result<EncodedPrompt, PromptError> {
        self.tokenizer.encode(prompt)
    }

    fn text_rows(&self, prompt: &EncodedPrompt) -> TextRows {
        TextRows { encoded: prompt.tokens, read: prompt.tokens - self.tokenizer.system_tokens() }
    }

    fn output_behind<'n>(&self, input: &'n str) -> &'n str {
        match input {
            "prompt_embeds" => "hidden",
            "text_mod" => "mod",
            own => own,
        }
    }

    /// All prompts are filled up to the longest, behind their last token, which changes nothing: no row reads a later one.
    fn encode(
        &self,
        pipeline: &TextToImage<'_>,
        prompts: &[EncodedPrompt],
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, PipelineError> {
        let text = &self.parameters.text;
        let (path, width) = (pipeline.bundle().path(&text.embedding.file)?, text.embedding.width);
        let rows = sizes.get("encoded_seq").copied().unwrap_or(0);
        let (cos, sin) = rope_tables_1d(rows, text.head_dim, text.rope_theta)?;
        let mask = causal(rows);
        let mut stage = pipeline.stage(TEXT_ENCODER, sizes, run.executor, run.plan, &mut run.watch)?;
        for (name, tensor) in [("mask", &mask), ("rope_cos", &cos), ("rope_sin", &sin)] {
            stage.bind(name, tensor)?;
        }
        let mut all = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let embeds = with_rows(gather_rows(&path, &text.embedding, &prompt.ids)?, rows);
            let hidden = stage.run(&[("inputs_embeds", &embeds)], &["hidden"])?.remove(0);
            let hidden = shaped(TEXT_ENCODER, "hidden", hidden, &[1, rows, width])?;
            let hidden = run.watch.boundary("enc_hidden_full", with_rows(hidden, prompt.tokens));
            all.push(without_rows(&hidden, self.tokenizer.system_tokens()));
        }
        stage.close(run.plan, &mut run.watch)?;
        Ok(all)
    }

    fn conditions(
        &self,
        pipeline: &TextToImage<'_>,
        sampled: &Sampled<'_>,
        embeds: &[HostTensor],
        run: &mut Run<'_>,
    ) -> Result<Conditions, PipelineError> {
        let Modulation { blocks, output } = self.modulate(pipeline, sampled, run)?;
        let steps = sampled.schedule.steps();
        let of_step = |step| vec![("mod".into(), blocks.row(step)), ("mod_out".into(), output.row(step))];
        let prompts = self.of_prompts(pipeline, sampled, (embeds, &blocks.row(steps)), run)?;
        Ok(Conditions { constant: Vec::new(), prompts, steps: (0..steps).map(of_step).collect() })
    }
}

/// The mask of text rows, each of which reads itself and those before it: [1, 1, rows, rows].
fn causal(rows: usize) -> HostTensor {
    text_mask(&vec![1; rows], PadKeys::Visible)
}

/// The axis of rows of [1, rows, width] or [rows, width].
fn rows_axis(tensor: &HostTensor) -> usize {
    tensor.shape.len().saturating_sub(2)
}

/// Cut after so many rows, or filled up to them with zeros.
fn with_rows(tensor: HostTensor, rows: usize) -> HostTensor {
    let mut shape = tensor.shape.clone();
    let axis = rows_axis(&tensor);
    let (own, width) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    if rows == own {
        return tensor;
    }
    shape[axis] = rows;
    if rows < own {
        return HostTensor::new(&shape, tensor.values.slice(0..rows * width));
    }
    let mut values = tensor.to_f32();
    values.resize(rows * width, 0.0);
    HostTensor::f32(&shape, values)
}

/// Without the first rows.
fn without_rows(tensor: &HostTensor, first: usize) -> HostTensor {
    let mut shape = tensor.shape.clone();
    let axis = rows_axis(tensor);
    let width: usize = shape[axis + 1..].iter().product();
    shape[axis] -= first;
    HostTensor::new(&shape, tensor.values.slice(first * width..tensor.values.len()))
}
