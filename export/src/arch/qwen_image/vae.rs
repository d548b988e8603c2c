//! The Qwen-Image-2.1 autoencoder's decoder for one frame, in stages: everything before the middle attention, the attention
//! over a chunk of query rows, and what follows it. Of a single frame a causal 3-D convolution sees one slice: all are plain
//! 2-D convolutions here. Source: specs of diffusers' AutoencoderKLQwenImage21.

use std::ops::Range;

use super::{Constants, QwenImageError, config::VaeConfig, parameters::PostStage};
use crate::{
    arch::{
        StageGraph,
        author::{Author, in_tensor},
        blocks::{
            image_decoder::{ATTENTION_STAGE, COMPONENT, POST_STAGE, attention, blocks_of_stages, map},
            mlp::silu,
            norm::scaled_rms_norm,
            resnet::{conv_of, upsample_nearest},
        },
    },
    onnx::{Attribute, DType, Dim, Model, Tensor, ValueId},
    quant,
    recipe::Precision,
    weights::Checkpoint,
};

const MIDDLE: &str = "decoder.mid_block";
const ATTENTION: &str = "decoder.mid_block.attentions.0";
/// The square of the least length of a pixel's channels that a norm divides by.
const LEAST_SQUARES: f32 = 1e-24;

/// What all stages share.
pub struct Decoder<'a> {
    pub config: &'a VaeConfig,
    pub weights: &'a Checkpoint,
    pub precision: &'a Precision,
    pub constants: &'a Constants,
}

/// Sides of the latents and of the middle block.
const LATENT: [&str; 2] = ["latent_height", "latent_width"];

/// Name of what an up block gives.
fn level_name(level: usize) -> String {
    format!("vae_up{level}")
}

/// The stages behind the middle block. The first takes what the attention gives, too, and goes in one piece.
pub fn post_stages(config: &VaeConfig, cuts: &[usize]) -> Vec<PostStage> {
    let levels = config.dim_mult.len();
    let stage = |(i, blocks): (usize, Range<usize>)| PostStage {
        name: format!("{POST_STAGE}{i}"),
        scale: 1 << blocks.start,
        growth: 1 << (blocks.end.min(levels - 1) - blocks.start),
        halo: (blocks.start > 0).then(|| halo(config, &blocks)),
    };
    blocks_of_stages(levels, cuts).into_iter().enumerate().map(stage).collect()
}

/// Rows of the blocks' input on either side that a row of the output depends on: one for each convolution of three rows, at
/// the resolution that it works at.
fn halo(config: &VaeConfig, blocks: &Range<usize>) -> usize {
    let levels = config.dim_mult.len();
    let finest = 1 << (blocks.end.min(levels - 1) - blocks.start);
    let resnets = 2 * (config.num_res_blocks + 1);
    let of_level = |level: usize| {
        let rows = finest >> (level - blocks.start);
        let upsampling = if level + 1 < levels { rows / 2 } else { rows };
        resnets * rows + upsampling
    };
    blocks.clone().map(of_level).sum::<usize>().div_ceil(finest)
}

impl Decoder<'_> {
    /// Authors all stages in the order in which they run; a new one begins before each up block in `cuts`.
    pub fn stages(&self, cuts: &[usize]) -> Result<Vec<StageGraph>, QwenImageError> {
        let post = post_stages(self.config, cuts).into_iter().zip(blocks_of_stages(self.levels(), cuts));
        let post = post
            .map(|(stage, blocks)| Ok(StageGraph::new(&stage.name, COMPONENT, self.post(&stage, blocks)?)));
        let mut stages = vec![
            StageGraph::new("vae_pre", COMPONENT, self.pre()?),
            StageGraph::new(
                ATTENTION_STAGE,
                COMPONENT,
                attention(self.author(ATTENTION_STAGE), self.middle()),
            ),
        ];
        stages.extend(post.collect::<Result<Vec<_>, QwenImageError>>()?);
        Ok(stages)
    }

    /// Number of up blocks.
    fn levels(&self) -> usize {
        self.config.dim_mult.len()
    }

    /// Channels of the middle block.
    fn middle(&self) -> usize {
        self.config.decoder_channels()[0]
    }

    /// Channels that an up block takes and gives.
    fn level_channels(&self, level: usize) -> (usize, usize) {
        let channels = self.config.decoder_channels();
        (channels[level], channels[level + 1])
    }

    fn author(&self, name: &str) -> Author<'_> {
        Author::new(name, self.weights, self.precision)
    }

    /// Input: `latents` [1,z,latent_height,latent_width], f32, as the sampler leaves them. Outputs: `vae_mid_res0`
    /// [1,C,h,w], and f32 `q` (scaled) and `v` [1,h,w,C], `kt` [1,C,h,w].
    fn pre(&self) -> Result<Model, QwenImageError> {
        let (z, middle) = (self.config.z_dim, self.middle());
        let mut a = self.author("vae_pre");
        let latents = a.graph.input("latents", DType::F32, &map(z, LATENT));
        let x = (0..self.constants.unnormalised).fold(latents, |x, _| self.unnormalise(&mut a, x));
        if x != latents {
            a.graph.label(x, "vae_in");
        }
        let x = self.conv(&mut a, x, "post_quant_conv", (z, z), 1)?;
        a.graph.label(x, "vae_post_quant");
        let x = self.conv(&mut a, x, "decoder.conv_in", (z, middle), 3)?;
        a.graph.label(x, "vae_conv_in");
        let x = self.resnet(&mut a, x, &format!("{MIDDLE}.resnets.0"), (middle, middle))?;
        self.query_key_value(&mut a, x)?;
        a.graph.output(x, "vae_mid_res0", &map(middle, LATENT));
        Ok(a.finish())
    }

    /// `x * std + mean` per channel.
    fn unnormalise(&self, a: &mut Author<'_>, x: ValueId) -> ValueId {
        let per_channel = |values: &[f32]| Tensor::from_f32(&[values.len(), 1, 1], values);
        let deviation = a.graph.small_constant(per_channel(&self.config.latents_std));
        let mean = a.graph.small_constant(per_channel(&self.config.latents_mean));
        let scaled = a.graph.mul(x, deviation);
        a.graph.add(scaled, mean)
    }

    /// Query, transposed key and value in f32: scores over thousands of pixels need it, and chunks keep them small.
    fn query_key_value(&self, a: &mut Author<'_>, x: ValueId) -> Result<(), QwenImageError> {
        let channels = self.middle();
        let y = self.norm(a, x, &format!("{ATTENTION}.norm"), channels)?;
        let y = self.conv(a, y, &format!("{ATTENTION}.to_qkv"), (channels, 3 * channels), 1)?;
        let y = a.to_f32(y);
        let [q, kt, v] = a.graph.split(y, 1, [channels; 3]);
        let scale = a.graph.scalar(DType::F32, 1.0 / (channels as f32).sqrt());
        let q = a.graph.mul(q, scale);
        let rows = {
            let [batch, c, h, w] = map(channels, LATENT);
            [batch, h, w, c]
        };
        for (name, value) in [("q", q), ("v", v)] {
            let value = a.graph.transpose(value, &[0, 2, 3, 1]);
            a.graph.output(value, name, &rows);
        }
        a.graph.output(kt, "kt", &map(channels, LATENT));
        Ok(())
    }

    /// Up blocks `start..end`, after the rest of the middle block if they are the first, and before the output convolution
    /// if they are the last. The first takes `vae_mid_res0` and `attn` [1,h,w,C] f32, the others the output of the stage
    /// before. The last gives `image_raw` [1,channels,H,W] f32 in [-1, 1].
    fn post(&self, stage: &PostStage, blocks: Range<usize>) -> Result<Model, QwenImageError> {
        let Range { start, end } = blocks;
        let mut a = self.author(&stage.name);
        let [rows, out] = stage.row_symbols();
        let mut x = match start.checked_sub(1) {
            None => self.middle_rest(&mut a)?,
            Some(before) => {
                let (dtype, mut dims) = (a.compute(), self.level_map(before));
                dims[2] = Dim::Symbol(rows);
                a.graph.input(&level_name(before), dtype, &dims)
            }
        };
        let out_rows = |dims: [Dim; 4]| {
            let [batch, channels, height, width] = dims;
            [batch, channels, if start > 0 { Dim::Symbol(out) } else { height }, width]
        };
        for level in start..end {
            x = self.up_block(&mut a, x, level)?;
            if level + 1 < end {
                a.graph.label(x, &level_name(level));
            }
        }
        if end < self.levels() {
            a.graph.output(x, &level_name(end - 1), &out_rows(self.level_map(end - 1)));
        } else {
            a.graph.label(x, &level_name(end - 1));
            let dims = out_rows(map(self.config.out_channels, ["image_height", "image_width"]));
            self.output(&mut a, x, &dims)?;
        }
        Ok(a.finish())
    }

    fn middle_rest(&self, a: &mut Author<'_>) -> Result<ValueId, QwenImageError> {
        let channels = self.middle();
        let dims = map(channels, LATENT);
        let dtype = a.compute();
        let x = a.graph.input("vae_mid_res0", dtype, &dims);
        let [batch, c, h, w] = dims;
        let attended = a.graph.input("attn", DType::F32, &[batch, h, w, c]);
        let y = a.graph.transpose(attended, &[0, 3, 1, 2]);
        let y = self.conv(a, y, &format!("{ATTENTION}.proj"), (channels, channels), 1)?;
        let x = a.graph.add(x, y);
        a.graph.label(x, "vae_mid_attn");
        let x = self.resnet(a, x, &format!("{MIDDLE}.resnets.1"), (channels, channels))?;
        a.graph.label(x, "vae_mid");
        Ok(x)
    }

    /// Dimensions of what an up block gives. Each size has symbols of its own: one name must mean one size in a graph.
    fn level_map(&self, level: usize) -> [Dim; 4] {
        let [height, width] = ["height", "width"].map(|side| format!("up{level}_{side}"));
        map(self.level_channels(level).1, [&height, &width])
    }

    /// Resnets; then, in all blocks but the last, a doubling of the sides and the block's input beside it.
    fn up_block(&self, a: &mut Author<'_>, input: ValueId, level: usize) -> Result<ValueId, QwenImageError> {
        let (mut inputs, outputs) = self.level_channels(level);
        let prefix = format!("decoder.up_blocks.{level}");
        let mut x = input;
        for layer in 0..=self.config.num_res_blocks {
            x = self.resnet(a, x, &format!("{prefix}.resnets.{layer}"), (inputs, outputs))?;
            inputs = outputs;
        }
        if level + 1 == self.levels() {
            return Ok(x);
        }
        let x = upsample_nearest(a, x);
        let x = self.conv(a, x, &format!("{prefix}.upsampler.resample.1"), (outputs, outputs), 3)?;
        let shortcut = self.shortcut(a, input, level);
        Ok(a.graph.add(x, shortcut))
    }

    /// The block's input with doubled sides: of each output channel's source channels, the one that the reference's
    /// repetition and rearrangement puts at each of the four places that a pixel becomes.
    fn shortcut(&self, a: &mut Author<'_>, x: ValueId, level: usize) -> ValueId {
        let (inputs, outputs) = self.level_channels(level);
        let sources = self.shortcut_sources(level);
        let all_equal = |places: usize| sources.chunks(places).all(|own| own.iter().all(|s| *s == own[0]));
        if all_equal(4) {
            let x = channels(a, x, sources.iter().copied().step_by(4), inputs);
            return upsample_nearest(a, x);
        }
        if all_equal(2) {
            // The two rows that a row becomes come from two channels, and the columns are doubled.
            let x = channels(a, x, sources.iter().copied().step_by(2), inputs);
            let x = a.graph.reshape(x, &[outputs as i64, 2, -1, 0]);
            let x = a.graph.transpose(x, &[0, 2, 1, 3]);
            let x = a.graph.reshape(x, &[1, outputs as i64, -1, 0]);
            return a.graph.resize_nearest(x, &[1.0, 1.0, 1.0, 2.0]);
        }
        let x = channels(a, x, sources.iter().copied(), inputs);
        let attributes = [("blocksize", Attribute::Int(2)), ("mode", Attribute::String(b"CRD".to_vec()))];
        a.graph.op("DepthToSpace", &[x], &attributes)
    }

    /// For each output channel of a shortcut, the input channels of the places (0,0), (0,1), (1,0), (1,1). Where time is
    /// doubled, too, a single frame is the last of the two.
    fn shortcut_sources(&self, level: usize) -> Vec<usize> {
        let (inputs, outputs) = self.level_channels(level);
        let temporal = self.config.temperal_downsample.iter().rev().nth(level).copied().unwrap_or(false);
        let copies = if temporal { 2 } else { 1 };
        let copy = if self.constants.last_copy { copies - 1 } else { 0 };
        let repeats = (outputs * copies * 4 / inputs).max(1);
        let places = (0..outputs).flat_map(|channel| (0..4).map(move |place| (channel, place)));
        places.map(|(channel, place)| ((channel * copies + copy) * 4 + place) / repeats).collect()
    }

    /// Norm, SiLU, convolution, twice, plus the (projected) input.
    fn resnet(
        &self,
        a: &mut Author<'_>,
        x: ValueId,
        prefix: &str,
        (inputs, outputs): (usize, usize),
    ) -> Result<ValueId, QwenImageError> {
        let y = self.norm_silu(a, x, &format!("{prefix}.norm1"), inputs)?;
        let y = self.conv(a, y, &format!("{prefix}.conv1"), (inputs, outputs), 3)?;
        let y = self.norm_silu(a, y, &format!("{prefix}.norm2"), outputs)?;
        let y = self.conv(a, y, &format!("{prefix}.conv2"), (outputs, outputs), 3)?;
        let shortcut = match inputs == outputs {
            true => x,
            false => self.conv(a, x, &format!("{prefix}.conv_shortcut"), (inputs, outputs), 1)?,
        };
        Ok(a.graph.add(shortcut, y))
    }

    fn norm_silu(
        &self,
        a: &mut Author<'_>,
        x: ValueId,
        prefix: &str,
        channels: usize,
    ) -> Result<ValueId, QwenImageError> {
        let y = self.norm(a, x, prefix, channels)?;
        Ok(silu(a, y))
    }

    /// RMSNorm over a pixel's channels with the checkpoint's `gamma`, in f32. The reference divides by their length, or by
    /// 1e-12 if that is less. Channels are last in between, as they are in the kernels before and after: the transpositions
    /// cancel theirs.
    fn norm(
        &self,
        a: &mut Author<'_>,
        x: ValueId,
        prefix: &str,
        channels: usize,
    ) -> Result<ValueId, QwenImageError> {
        let x = a.to_f32(x);
        let x = a.graph.transpose(x, &[0, 2, 3, 1]);
        let scale = self.gamma(a, &format!("{prefix}.gamma"), channels)?;
        let y = scaled_rms_norm(a, x, scale, LEAST_SQUARES / channels as f32);
        Ok(a.graph.transpose(y, &[0, 3, 1, 2]))
    }

    /// A norm's weight, f32 [C]; in the checkpoint it has further axes of one.
    fn gamma(&self, a: &mut Author<'_>, name: &str, channels: usize) -> Result<ValueId, QwenImageError> {
        let found = self.weights.find(name).map(|found| found.shape.to_vec());
        let flat = |shape: &Vec<usize>| shape.iter().skip(1).all(|size| *size == 1);
        let shape = found.filter(|shape| shape.first() == Some(&channels) && flat(shape));
        let mut gamma = a.tensor(name, &shape.unwrap_or(vec![channels, 1, 1]), DType::F32)?;
        gamma.shape = vec![channels];
        Ok(a.graph.constant(name, gamma))
    }

    /// [`conv`](crate::arch::blocks::resnet::conv) with a kernel that may be one over time.
    fn conv(
        &self,
        a: &mut Author<'_>,
        x: ValueId,
        prefix: &str,
        (inputs, outputs): (usize, usize),
        kernel: usize,
    ) -> Result<ValueId, QwenImageError> {
        let x = a.to_compute(x);
        let name = format!("{prefix}.weight");
        let weight = self.kernel(&name, &[outputs, inputs, kernel, kernel])?;
        let weight = in_tensor(&name, quant::cast(weight, a.compute()))?;
        let weight = a.graph.constant(&name, weight);
        Ok(conv_of(a, x, prefix, weight, outputs, kernel)?)
    }

    /// A convolution's kernel; of one over time, the slice that the present frame meets, which is the last.
    fn kernel(&self, name: &str, shape: &[usize; 4]) -> Result<Tensor, QwenImageError> {
        let found = self.weights.find(name).map(|found| found.shape.to_vec());
        let [outputs, inputs, height, width] = *shape;
        match found.as_deref() {
            Some(&[_, _, frames, _, _]) if frames > 0 => {
                let whole = self.weights.tensor(name, &[outputs, inputs, frames, height, width])?;
                Ok(in_tensor(name, quant::select(whole, 2, frames - 1))?)
            }
            _ => Ok(self.weights.tensor(name, shape)?),
        }
    }

    fn output(&self, a: &mut Author<'_>, x: ValueId, dims: &[Dim; 4]) -> Result<(), QwenImageError> {
        let (_, inputs) = self.level_channels(self.levels() - 1);
        let outputs = self.config.out_channels;
        let x = self.norm_silu(a, x, "decoder.norm_out", inputs)?;
        let x = self.conv(a, x, "decoder.conv_out", (inputs, outputs), 3)?;
        let x = a.to_f32(x);
        let [low, high] = [-1.0, 1.0].map(|bound| a.graph.scalar(DType::F32, bound));
        let image = a.graph.op("Clip", &[x, low, high], &[]);
        a.graph.output(image, "image_raw", dims);
        Ok(())
    }
}

/// Channels of [1,C,H,W] by their indices: the value itself if it has just these.
fn channels(a: &mut Author<'_>, x: ValueId, indices: impl Iterator<Item = usize>, count: usize) -> ValueId {
    let indices: Vec<i64> = indices.map(|index| index as i64).collect();
    if indices.iter().copied().eq(0..count as i64) {
        return x;
    }
    let indices = a.graph.ints(&indices);
    a.graph.op("Gather", &[x, indices], &[("axis", Attribute::Int(1))])
}
