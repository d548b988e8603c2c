//! The FLUX.2 autoencoder's decoder in stages: everything before the middle attention, the attention over a chunk of
//! query rows, and what follows it, cut so that the largest activations stand alone. Source: diffusers'
//! AutoencoderKLFlux2 and Decoder.

use std::ops::Range;

use super::{Flux2Error, config::VaeConfig, statistics::channel_statistics};
use crate::{
    arch::{
        StageGraph,
        author::{Author, Linear},
        blocks::{
            image_decoder::{ATTENTION_STAGE, COMPONENT, POST_STAGE, attention, blocks_of_stages, map},
            norm::{Groups, group_norm},
            resnet::{conv, norm_silu_conv, resnet_block, upsample_nearest},
        },
    },
    onnx::{Attribute, DType, Dim, Model, ValueId},
    recipe::Precision,
    weights::Checkpoint,
};

/// Group-norm epsilon of diffusers' autoencoder blocks.
const EPS: f32 = 1e-6;
const ATTENTION: &str = "decoder.mid_block.attentions.0";

/// What all stages share.
struct Decoder<'a> {
    config: &'a VaeConfig,
    weights: &'a Checkpoint,
    precision: &'a Precision,
    groups: Groups,
}

/// Authors all stages in the order in which they run; a new one begins before each up block in `cuts`, with the upsampling
/// of the block before.
pub fn author(
    config: &VaeConfig,
    cuts: &[usize],
    weights: &Checkpoint,
    precision: &Precision,
) -> Result<Vec<StageGraph>, Flux2Error> {
    let groups = Groups { count: config.norm_num_groups, eps: EPS };
    let decoder = Decoder { config, weights, precision, groups };
    let levels = config.decoder_channels().len();
    let post = blocks_of_stages(levels, cuts).into_iter().enumerate().map(|(i, blocks)| {
        let name = format!("{POST_STAGE}{i}");
        Ok(StageGraph::new(&name, COMPONENT, decoder.post(&name, blocks)?))
    });
    let mut stages = vec![StageGraph::new("vae_pre", COMPONENT, decoder.pre()?)];
    if config.mid_block_add_attention {
        let attention = attention(decoder.author(ATTENTION_STAGE), decoder.middle());
        stages.push(StageGraph::new(ATTENTION_STAGE, COMPONENT, attention));
    }
    stages.extend(post.collect::<Result<Vec<_>, Flux2Error>>()?);
    Ok(stages)
}

/// Name of what a stage hands over that ends with an up block: the output of its resnets, before its upsampling.
fn handed_over(level: usize) -> String {
    format!("vae_up{level}_res")
}

impl Decoder<'_> {
    /// Channels of the middle block.
    fn middle(&self) -> usize {
        *self.config.decoder_channels().last().unwrap_or(&0)
    }

    fn author(&self, name: &str) -> Author<'_> {
        Author::new(name, self.weights, self.precision)
    }

    /// Input: `latents` [1, 4*latent_channels, latent_height, latent_width], f32, as the sampler leaves them. Outputs:
    /// `residual` [1,C,h,w] and, where the middle block attends, f32 `q` (scaled) and `v` [1,h,w,C], `kt` [1,C,h,w];
    /// h and w are twice the latents'.
    fn pre(&self) -> Result<Model, Flux2Error> {
        let (c, middle) = (self.config, self.middle());
        let mut a = self.author("vae_pre");
        let packed = 4 * c.latent_channels;
        let latents = a.graph.input("latents", DType::F32, &map(packed, ["latent_height", "latent_width"]));
        let x = self.unnormalise(&mut a, latents, packed)?;
        let blocks = [("blocksize", Attribute::Int(2)), ("mode", Attribute::String(b"CRD".to_vec()))];
        let mut x = a.graph.op("DepthToSpace", &[x], &blocks);
        a.graph.label(x, "vae_in");
        if c.use_post_quant_conv {
            x = conv(&mut a, x, "post_quant_conv", (c.latent_channels, c.latent_channels), 1)?;
            a.graph.label(x, "vae_post_quant");
        }
        let x = conv(&mut a, x, "decoder.conv_in", (c.latent_channels, middle), 3)?;
        a.graph.label(x, "vae_conv_in");
        let x = resnet_block(&mut a, x, "decoder.mid_block.resnets.0", (middle, middle), self.groups)?;
        if c.mid_block_add_attention {
            self.query_key_value(&mut a, x)?;
        }
        a.graph.output(x, "vae_mid_res0", &map(middle, ["mid_height", "mid_width"]));
        Ok(a.finish())
    }

    /// `x * sqrt(running_var + eps) + running_mean` per packed channel: the batch norm's statistics take the place of
    /// a scaling factor.
    fn unnormalise(&self, a: &mut Author<'_>, x: ValueId, channels: usize) -> Result<ValueId, Flux2Error> {
        let [mean, variance] = ["bn.running_mean", "bn.running_var"]
            .map(|statistic| a.tensor(statistic, &[channels], DType::F32));
        let [mean, deviation] = channel_statistics(mean?, variance?, self.config.batch_norm_eps);
        let deviation = a.graph.small_constant(deviation);
        let mean = a.graph.small_constant(mean);
        let scaled = a.graph.mul(x, deviation);
        Ok(a.graph.add(scaled, mean))
    }

    /// Query, transposed key and value in f32: scores over thousands of pixels need it, and chunks keep them small.
    fn query_key_value(&self, a: &mut Author<'_>, x: ValueId) -> Result<(), Flux2Error> {
        let (channels, places) = (self.middle(), ["mid_height", "mid_width"]);
        let y = group_norm(a, x, &format!("{ATTENTION}.group_norm"), channels, self.groups)?;
        let y = a.graph.transpose(y, &[0, 2, 3, 1]);
        let rows = {
            let [batch, c, h, w] = map(channels, places);
            [batch, h, w, c]
        };
        let q = self.attention_linear(a, y, "to_q")?;
        let scale = a.graph.scalar(DType::F32, 1.0 / (channels as f32).sqrt());
        let q = a.graph.mul(q, scale);
        a.graph.output(q, "q", &rows);
        let k = self.attention_linear(a, y, "to_k")?;
        let kt = a.graph.transpose(k, &[0, 3, 1, 2]);
        a.graph.output(kt, "kt", &map(channels, places));
        let v = self.attention_linear(a, y, "to_v")?;
        a.graph.output(v, "v", &rows);
        Ok(())
    }

    fn attention_linear(&self, a: &mut Author<'_>, x: ValueId, name: &str) -> Result<ValueId, Flux2Error> {
        let channels = self.middle();
        let (weight, bias) = (format!("{ATTENTION}.{name}.weight"), format!("{ATTENTION}.{name}.bias"));
        Ok(a.linear(x, &Linear { weight: &weight, bias: Some(&bias), inputs: channels, outputs: channels })?)
    }

    /// The resnets of up blocks `start..end`, each after the upsampling of the block before: after the rest of the middle
    /// block if they are the first, and before the output convolution if they are the last. The first takes
    /// `vae_mid_res0` and `attn` [1,h,w,C] f32, the others the output of the stage before, not yet upsampled: a quarter of
    /// what it will be. The last gives `image_raw` [1,3,H,W] f32 in [-1, 1].
    fn post(&self, name: &str, blocks: Range<usize>) -> Result<Model, Flux2Error> {
        let Range { start, end } = blocks;
        let levels = self.config.decoder_channels().len();
        let mut a = self.author(name);
        let mut x = match start {
            0 => self.middle_rest(&mut a)?,
            _ => {
                let dtype = a.compute();
                a.graph.input(&handed_over(start - 1), dtype, &self.level_map(start - 1))
            }
        };
        for level in start..end {
            if level > 0 {
                x = self.upsample(&mut a, x, level - 1)?;
                a.graph.label(x, &format!("vae_up{}", level - 1));
            }
            x = self.up_resnets(&mut a, x, level)?;
        }
        if end < levels {
            a.graph.output(x, &handed_over(end - 1), &self.level_map(end - 1));
        } else {
            a.graph.label(x, &format!("vae_up{}", levels - 1));
            self.output(&mut a, x)?;
        }
        Ok(a.finish())
    }

    fn middle_rest(&self, a: &mut Author<'_>) -> Result<ValueId, Flux2Error> {
        let channels = self.middle();
        let dims = map(channels, ["mid_height", "mid_width"]);
        let dtype = a.compute();
        let mut x = a.graph.input("vae_mid_res0", dtype, &dims);
        if self.config.mid_block_add_attention {
            let [batch, c, h, w] = dims;
            let attended = a.graph.input("attn", DType::F32, &[batch, h, w, c]);
            let y = self.attention_linear(a, attended, "to_out.0")?;
            let y = a.graph.transpose(y, &[0, 3, 1, 2]);
            let y = a.to_compute(y);
            x = a.graph.add(x, y);
            a.graph.label(x, "vae_mid_attn");
        }
        let x = resnet_block(a, x, "decoder.mid_block.resnets.1", (channels, channels), self.groups)?;
        a.graph.label(x, "vae_mid");
        Ok(x)
    }

    /// Output channels of an up block: the decoder's levels from the lowest resolution up.
    fn level_channels(&self, level: usize) -> usize {
        let channels = self.config.decoder_channels();
        channels[channels.len() - 1 - level]
    }

    /// Dimensions of what an up block's resnets give, which have the sides of what the block before gives. Each size has
    /// symbols of its own: one name must mean one size in a graph.
    fn level_map(&self, level: usize) -> [Dim; 4] {
        let place = level.checked_sub(1).map_or("mid".to_owned(), |before| format!("up{before}"));
        let [height, width] = ["height", "width"].map(|side| format!("{place}_{side}"));
        map(self.level_channels(level), [&height, &width])
    }

    fn up_resnets(&self, a: &mut Author<'_>, mut x: ValueId, level: usize) -> Result<ValueId, Flux2Error> {
        let outputs = self.level_channels(level);
        let mut inputs = if level == 0 { self.middle() } else { self.level_channels(level - 1) };
        for layer in 0..=self.config.layers_per_block {
            let prefix = format!("decoder.up_blocks.{level}.resnets.{layer}");
            x = resnet_block(a, x, &prefix, (inputs, outputs), self.groups)?;
            inputs = outputs;
        }
        Ok(x)
    }

    /// The end of every up block but the last.
    fn upsample(&self, a: &mut Author<'_>, x: ValueId, level: usize) -> Result<ValueId, Flux2Error> {
        let channels = self.level_channels(level);
        let doubled = upsample_nearest(a, x);
        let prefix = format!("decoder.up_blocks.{level}.upsamplers.0.conv");
        Ok(conv(a, doubled, &prefix, (channels, channels), 3)?)
    }

    fn output(&self, a: &mut Author<'_>, x: ValueId) -> Result<(), Flux2Error> {
        let channels = self.config.decoder_channels()[0];
        let sizes = (channels, self.config.out_channels);
        let x = norm_silu_conv(a, x, ["decoder.conv_norm_out", "decoder.conv_out"], sizes, self.groups)?;
        let image = a.to_f32(x);
        a.graph.output(image, "image_raw", &map(self.config.out_channels, ["image_height", "image_width"]));
        Ok(())
    }
}
