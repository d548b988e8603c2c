//! The checkpoint's own config files: every dimension comes from here.

use std::path::Path;

use serde::Deserialize;

use super::Flux2Error;
use crate::{
    arch::{
        Source,
        settings::{is_base, is_epsilon},
    },
    recipe::{CONFIGS, Recipe},
    weights::read_json,
};

/// The most layers of one kind; a graph of more could not be built in memory.
const MAX_LAYERS: usize = 1024;
/// The most channels of a level of the autoencoder.
const MAX_CHANNELS: usize = 1 << 16;

/// `text_encoder/config.json` of a Qwen3 model.
#[derive(Clone, Debug, Deserialize)]
pub struct TextConfig {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub vocab_size: usize,
    pub rms_norm_eps: f32,
    /// Older spelling; newer files keep it under `rope_parameters`.
    pub rope_theta: Option<f64>,
    pub rope_parameters: Option<RopeParameters>,
    pub rope_scaling: Option<serde_json::Value>,
    pub hidden_act: Option<String>,
    #[serde(default)]
    pub attention_bias: bool,
    pub pad_token_id: Option<i64>,
    #[serde(default)]
    pub use_sliding_window: bool,
    /// Kind of attention per layer, in newer files.
    pub layer_types: Option<Vec<String>>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct RopeParameters {
    pub rope_theta: Option<f64>,
    pub rope_type: Option<String>,
}

impl TextConfig {
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    pub fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    pub fn rope_theta(&self) -> Option<f64> {
        self.rope_theta.or_else(|| self.rope_parameters.as_ref()?.rope_theta)
    }
}

/// `transformer/config.json` of a Flux2Transformer2DModel.
#[derive(Clone, Debug, Deserialize)]
pub struct TransformerConfig {
    pub in_channels: usize,
    pub out_channels: Option<usize>,
    pub num_layers: usize,
    pub num_single_layers: usize,
    pub attention_head_dim: usize,
    pub num_attention_heads: usize,
    pub joint_attention_dim: usize,
    pub timestep_guidance_channels: usize,
    pub mlp_ratio: f64,
    pub axes_dims_rope: Vec<usize>,
    pub rope_theta: f64,
    pub eps: f32,
    #[serde(default)]
    pub guidance_embeds: bool,
    #[serde(default = "one")]
    pub patch_size: usize,
}

impl TransformerConfig {
    pub fn width(&self) -> usize {
        self.num_attention_heads.saturating_mul(self.attention_head_dim)
    }

    /// Width of the feed-forward's gated half.
    pub fn mlp_width(&self) -> usize {
        (self.width() as f64 * self.mlp_ratio) as usize
    }

    pub fn outputs(&self) -> usize {
        self.out_channels.unwrap_or(self.in_channels)
    }
}

/// `vae/config.json` of an AutoencoderKLFlux2.
#[derive(Clone, Debug, Deserialize)]
pub struct VaeConfig {
    pub block_out_channels: Vec<usize>,
    /// The small decoder has its own widths.
    pub decoder_block_out_channels: Option<Vec<usize>>,
    pub layers_per_block: usize,
    pub latent_channels: usize,
    pub norm_num_groups: usize,
    #[serde(default = "three")]
    pub out_channels: usize,
    #[serde(default = "two_by_two")]
    pub patch_size: Vec<usize>,
    #[serde(default = "batch_norm_eps")]
    pub batch_norm_eps: f64,
    /// Side of the pictures that it was trained on, in pixels.
    pub sample_size: Option<usize>,
    #[serde(default = "yes")]
    pub mid_block_add_attention: bool,
    #[serde(default = "yes")]
    pub use_post_quant_conv: bool,
    #[serde(default = "silu")]
    pub act_fn: String,
}

fn one() -> usize {
    1
}
fn three() -> usize {
    3
}
fn two_by_two() -> Vec<usize> {
    vec![2, 2]
}
fn batch_norm_eps() -> f64 {
    1e-4
}
fn yes() -> bool {
    true
}
fn silu() -> String {
    "silu".to_owned()
}

impl VaeConfig {
    /// Output channels of the decoder's levels, lowest resolution last.
    pub fn decoder_channels(&self) -> &[usize] {
        self.decoder_block_out_channels.as_deref().unwrap_or(&self.block_out_channels)
    }

    /// Pixels per latent pixel, per side.
    pub fn downscale(&self) -> usize {
        1 << (self.block_out_channels.len() - 1)
    }
}

/// The three configs of a checkpoint in diffusers layout.
#[derive(Clone, Debug)]
pub struct Config {
    pub text: TextConfig,
    pub transformer: TransformerConfig,
    pub vae: VaeConfig,
    /// The tokenizer's padding id: config.json's, or the id of tokenizer_config.json's `pad_token`.
    pub pad_id: i64,
}

/// `[configs]` of a recipe: what the config files of its checkpoint say.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Configs {
    text_encoder: TextConfig,
    transformer: TransformerConfig,
    vae: VaeConfig,
}

/// What the configs of the components are called in messages.
struct Places {
    text: String,
    transformer: String,
    vae: String,
}

impl Config {
    /// The configs of what is to be authored, checked.
    pub fn of(source: Source<'_>, recipe: &Recipe) -> Result<Config, Flux2Error> {
        match source {
            Source::Checkpoint(root) | Source::ConfigFiles(root) => Config::read(root),
            Source::Recipe => Config::from_recipe(recipe),
        }
    }

    fn read(root: &Path) -> Result<Config, Flux2Error> {
        let [text_file, transformer, vae] =
            ["text_encoder", "transformer", "vae"].map(|component| root.join(component).join("config.json"));
        let text: TextConfig = read_json(&text_file)?;
        let pad_id = match text.pad_token_id {
            Some(id) => id,
            None => super::tokenizer::pad_id(&root.join("tokenizer"))?,
        };
        let config = Config { text, transformer: read_json(&transformer)?, vae: read_json(&vae)?, pad_id };
        let [text, transformer, vae] = [text_file, transformer, vae].map(|file| file.display().to_string());
        config.check(&Places { text, transformer, vae })?;
        Ok(config)
    }

    fn from_recipe(recipe: &Recipe) -> Result<Config, Flux2Error> {
        let Configs { text_encoder: text, transformer, vae } = recipe.section(CONFIGS)?;
        let place = |component: &str| format!("recipe '{}' [{CONFIGS}.{component}]", recipe.name);
        let places =
            Places { text: place("text_encoder"), transformer: place("transformer"), vae: place("vae") };
        // A recipe has no tokenizer to ask.
        let pad_id =
            text.pad_token_id.ok_or_else(|| refuse(&places.text, "pad_token_id is missing".to_owned()))?;
        let config = Config { text, transformer, vae, pad_id };
        config.check(&places)?;
        Ok(config)
    }

    /// Every relation between the numbers that authoring relies on.
    fn check(&self, places: &Places) -> Result<(), Flux2Error> {
        let (t, d, v) = (&self.text, &self.transformer, &self.vae);
        let Places { text, transformer, vae } = places;
        let sizes = |place: &str, sizes: &[(&str, usize)]| {
            let bad = sizes.iter().find(|s| s.1 == 0 || s.1 > 1 << 24);
            bad.map_or(Ok(()), |s| Err(refuse(place, format!("{} is {}", s.0, s.1))))
        };
        sizes(
            text,
            &[
                ("hidden_size", t.hidden_size),
                ("intermediate_size", t.intermediate_size),
                ("num_hidden_layers", t.num_hidden_layers),
                ("num_attention_heads", t.num_attention_heads),
                ("num_key_value_heads", t.kv_heads()),
                ("head_dim", t.head_dim()),
                ("vocab_size", t.vocab_size),
                ("heads x head_dim", t.num_attention_heads.saturating_mul(t.head_dim())),
            ],
        )?;
        sizes(
            transformer,
            &[
                ("in_channels", d.in_channels),
                ("out_channels", d.outputs()),
                ("attention_head_dim", d.attention_head_dim),
                ("num_attention_heads", d.num_attention_heads),
                ("heads x attention_head_dim", d.width()),
                ("joint_attention_dim", d.joint_attention_dim),
                ("timestep_guidance_channels", d.timestep_guidance_channels),
                ("mlp_ratio x width", d.mlp_width()),
            ],
        )?;
        sizes(
            vae,
            &[
                ("layers_per_block", v.layers_per_block),
                ("latent_channels", v.latent_channels),
                ("norm_num_groups", v.norm_num_groups),
                ("out_channels", v.out_channels),
                ("block_out_channels' length", v.block_out_channels.len()),
            ],
        )?;
        let repeated = [
            (text, "num_hidden_layers", t.num_hidden_layers),
            (transformer, "num_layers", d.num_layers),
            (transformer, "num_single_layers", d.num_single_layers),
            (vae, "layers_per_block", v.layers_per_block),
        ];
        if let Some((place, key, count)) = repeated.into_iter().find(|(_, _, count)| *count > MAX_LAYERS) {
            return Err(refuse(place, format!("{key} is {count}; the most is {MAX_LAYERS}")));
        }
        let rules = [
            (text, t.rope_theta().is_some(), "rope_theta is neither at the top nor under rope_parameters"),
            (text, t.rope_theta().is_some_and(is_base), "rope_theta is not a finite number above 0"),
            (text, is_epsilon(t.rms_norm_eps.into()), "rms_norm_eps is not above 0 and at most 1"),
            (transformer, is_base(d.rope_theta), "rope_theta is not a finite number above 0"),
            (transformer, is_epsilon(d.eps.into()), "eps is not above 0 and at most 1"),
            (vae, is_epsilon(v.batch_norm_eps), "batch_norm_eps is not above 0 and at most 1"),
            (text, t.head_dim() % 2 == 0, "head_dim is odd"),
            (
                text,
                t.num_attention_heads % t.kv_heads() == 0,
                "num_key_value_heads does not divide the heads",
            ),
            (text, t.hidden_act.as_deref().unwrap_or("silu") == "silu", "hidden_act is not silu"),
            (text, full_attention(t), "sliding-window attention is not supported"),
            (text, plain_rope(t), "scaled rotary embeddings are not supported"),
            (transformer, !d.guidance_embeds, "guidance_embeds (FLUX.2 dev) is not supported, only Klein is"),
            (transformer, d.patch_size == 1, "patch_size is not 1"),
            (transformer, d.timestep_guidance_channels % 2 == 0, "timestep_guidance_channels is odd"),
            (
                transformer,
                sum(&d.axes_dims_rope) == Some(d.attention_head_dim),
                "axes_dims_rope does not add up to attention_head_dim",
            ),
            (
                transformer,
                d.axes_dims_rope.len() == 4 && d.axes_dims_rope.iter().all(|a| *a > 0 && a % 2 == 0),
                "axes_dims_rope is not four even numbers from 2 (time, row, column, text position)",
            ),
            (transformer, d.outputs() == d.in_channels, "out_channels differs from in_channels"),
            (vae, v.patch_size == [2, 2], "patch_size is not [2, 2]"),
            (
                vae,
                v.latent_channels * 4 == d.in_channels,
                "latent_channels x 4 is not the transformer's in_channels",
            ),
            (vae, v.act_fn == "silu", "act_fn is not silu"),
            (vae, v.block_out_channels.len() <= 8, "block_out_channels has more than 8 levels"),
            (
                vae,
                v.decoder_channels().len() == v.block_out_channels.len(),
                "decoder_block_out_channels and block_out_channels differ in length",
            ),
            (
                vae,
                v.decoder_channels().iter().all(|c| *c > 0 && c % v.norm_num_groups == 0),
                "norm_num_groups does not divide the decoder's channels",
            ),
            (
                vae,
                v.decoder_channels().iter().all(|c| *c <= MAX_CHANNELS),
                "a level of the decoder has more than 65536 channels",
            ),
        ];
        rules.into_iter().find(|rule| !rule.1).map_or(Ok(()), |rule| Err(refuse(rule.0, rule.2.to_owned())))
    }
}

fn full_attention(t: &TextConfig) -> bool {
    !t.use_sliding_window && t.layer_types.iter().flatten().all(|kind| kind == "full_attention")
}

fn plain_rope(t: &TextConfig) -> bool {
    let kind = t.rope_parameters.as_ref().and_then(|r| r.rope_type.as_deref()).unwrap_or("default");
    kind == "default" && t.rope_scaling.as_ref().is_none_or(serde_json::Value::is_null)
}

fn sum(sizes: &[usize]) -> Option<usize> {
    sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size))
}

fn refuse(place: &str, problem: String) -> Flux2Error {
    Flux2Error::Config { place: place.to_owned(), problem }
}
