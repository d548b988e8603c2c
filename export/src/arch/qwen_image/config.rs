//! The checkpoint's own config files: every dimension comes from here.

use std::path::Path;

use serde::{Deserialize, de::IgnoredAny};

use super::{QwenImageError, parameters::MAX_SHIFT_TOKENS};
use crate::{
    arch::{
        MAX_STEPS, Source,
        settings::{is_base, is_epsilon},
    },
    recipe::{CONFIGS, Recipe},
    weights::read_json,
};

/// The most layers of one kind; a graph of more could not be built in memory.
const MAX_LAYERS: usize = 1024;
/// The most channels of a level of the autoencoder.
const MAX_CHANNELS: usize = 1 << 16;

/// The largest statistic of a latent channel that makes sense.
const MAX_STATISTIC: f32 = 1e6;

/// The text stack of a Qwen3-VL model: `text_config` of `text_encoder/config.json`, or the file itself.
#[derive(Clone, Debug, Deserialize)]
pub struct TextConfig {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub vocab_size: usize,
    pub rms_norm_eps: f32,
    /// Older spelling; newer files keep it under `rope_parameters`.
    pub rope_theta: Option<f64>,
    pub rope_parameters: Option<Rope>,
    pub rope_scaling: Option<Rope>,
    pub hidden_act: Option<String>,
    #[serde(default)]
    pub attention_bias: bool,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Rope {
    pub rope_theta: Option<f64>,
    #[serde(alias = "type")]
    pub rope_type: Option<String>,
}

/// `text_encoder/config.json`, as far as it tells where the text stack's values are.
#[derive(Deserialize)]
struct TextFile {
    text_config: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct NestedTextConfig {
    text_config: TextConfig,
}

impl TextConfig {
    fn read(file: &Path) -> Result<TextConfig, QwenImageError> {
        Ok(match read_json::<TextFile>(file)?.text_config {
            Some(IgnoredAny) => read_json::<NestedTextConfig>(file)?.text_config,
            None => read_json(file)?,
        })
    }

    fn ropes(&self) -> impl Iterator<Item = &Rope> {
        self.rope_parameters.iter().chain(&self.rope_scaling)
    }

    pub fn rope_theta(&self) -> Option<f64> {
        self.rope_theta.or_else(|| self.ropes().find_map(|rope| rope.rope_theta))
    }

    /// Of text alone, all axes of a multimodal position are the token's index.
    fn has_plain_rope(&self) -> bool {
        let kinds = self.ropes().filter_map(|rope| rope.rope_type.as_deref());
        kinds.into_iter().all(|kind| kind == "default" || kind == "mrope")
    }
}

/// `transformer/config.json` of a QwenImage21Transformer2DModel.
#[derive(Clone, Debug, Deserialize)]
pub struct TransformerConfig {
    pub in_channels: usize,
    pub out_channels: Option<usize>,
    pub num_layers: usize,
    pub attention_head_dim: usize,
    pub num_attention_heads: usize,
    pub context_in_dim: usize,
    pub mlp_ratio: f64,
    pub axes_dims_rope: Vec<usize>,
    pub eps: f32,
    #[serde(default)]
    pub causal_condition: bool,
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

/// `vae/config.json` of an AutoencoderKLQwenImage21.
#[derive(Clone, Debug, Deserialize)]
pub struct VaeConfig {
    pub base_dim: usize,
    pub decoder_base_dim: Option<usize>,
    pub z_dim: usize,
    pub dim_mult: Vec<usize>,
    pub num_res_blocks: usize,
    /// The checkpoints' spelling.
    pub temperal_downsample: Vec<bool>,
    pub latents_mean: Vec<f32>,
    pub latents_std: Vec<f32>,
    #[serde(default)]
    pub attn_scales: Vec<f64>,
    #[serde(default)]
    pub is_residual: bool,
    #[serde(default = "four")]
    pub out_channels: usize,
    pub patch_size: Option<usize>,
}

impl VaeConfig {
    /// Channels of the middle block, then of what each up block gives.
    pub fn decoder_channels(&self) -> Vec<usize> {
        let base = self.decoder_base_dim.unwrap_or(self.base_dim);
        let multiples = self.dim_mult.last().into_iter().chain(self.dim_mult.iter().rev());
        multiples.map(|multiple| base.saturating_mul(*multiple)).collect()
    }

    /// Pixels per latent pixel, per side: every up block but the last doubles it.
    pub fn downscale(&self) -> usize {
        1 << (self.dim_mult.len() - 1)
    }
}

/// `scheduler/scheduler_config.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct SchedulerConfig {
    pub base_image_seq_len: usize,
    pub max_image_seq_len: usize,
    pub base_shift: f64,
    pub max_shift: f64,
    pub shift_terminal: Option<f64>,
    #[serde(default)]
    pub use_dynamic_shifting: bool,
    pub time_shift_type: Option<String>,
}

/// `model_index.json`: what tells Turbo from the base model.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct ModelIndex {
    pub sample_sigmas: Option<Vec<f32>>,
}

fn one() -> usize {
    1
}
fn four() -> usize {
    4
}

/// The configs of a checkpoint; those of a recipe's `[configs]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    #[serde(rename = "text_encoder")]
    pub text: TextConfig,
    pub transformer: TransformerConfig,
    pub vae: VaeConfig,
    pub scheduler: SchedulerConfig,
    #[serde(default)]
    pub model_index: ModelIndex,
}

/// What the configs are called in messages.
struct Places {
    text: String,
    transformer: String,
    vae: String,
    scheduler: String,
    model_index: String,
}

impl Config {
    /// The configs of what is to be authored, checked.
    pub fn of(source: Source<'_>, recipe: &Recipe) -> Result<Config, QwenImageError> {
        match source {
            Source::Checkpoint(root) | Source::ConfigFiles(root) => Config::read(root),
            Source::Recipe => {
                let config: Config = recipe.section(CONFIGS)?;
                let place = |part: &str| format!("recipe '{}' [{CONFIGS}.{part}]", recipe.name);
                config.check(&Places {
                    text: place("text_encoder"),
                    transformer: place("transformer"),
                    vae: place("vae"),
                    scheduler: place("scheduler"),
                    model_index: place("model_index"),
                })?;
                Ok(config)
            }
        }
    }

    fn read(root: &Path) -> Result<Config, QwenImageError> {
        let [text, transformer, vae] =
            ["text_encoder", "transformer", "vae"].map(|component| root.join(component).join("config.json"));
        let scheduler = root.join("scheduler/scheduler_config.json");
        let model_index = root.join("model_index.json");
        let config = Config {
            text: TextConfig::read(&text)?,
            transformer: read_json(&transformer)?,
            vae: read_json(&vae)?,
            scheduler: read_json(&scheduler)?,
            model_index: read_json(&model_index)?,
        };
        let [text, transformer, vae, scheduler, model_index] =
            [text, transformer, vae, scheduler, model_index].map(|file| file.display().to_string());
        config.check(&Places { text, transformer, vae, scheduler, model_index })?;
        Ok(config)
    }

    /// Every relation between the numbers that authoring relies on.
    fn check(&self, places: &Places) -> Result<(), QwenImageError> {
        self.check_sizes(places)?;
        let (t, d, v, s) = (&self.text, &self.transformer, &self.vae, &self.scheduler);
        let Places { text, transformer, vae, scheduler, model_index } = places;
        let channels = v.decoder_channels();
        let rules = [
            (text, t.rope_theta().is_some(), "rope_theta is neither at the top nor under rope_parameters"),
            (text, t.rope_theta().is_some_and(is_base), "rope_theta is not a finite number above 0"),
            (text, is_epsilon(t.rms_norm_eps.into()), "rms_norm_eps is not above 0 and at most 1"),
            (transformer, is_epsilon(d.eps.into()), "eps is not above 0 and at most 1"),
            (text, t.head_dim % 2 == 0, "head_dim is odd"),
            (
                text,
                t.num_attention_heads % t.num_key_value_heads == 0,
                "num_key_value_heads does not divide the heads",
            ),
            (text, t.hidden_act.as_deref().unwrap_or("silu") == "silu", "hidden_act is not silu"),
            (text, t.has_plain_rope(), "scaled rotary embeddings are not supported"),
            (transformer, d.causal_condition, "causal_condition is not true"),
            (transformer, d.patch_size == 1, "patch_size is not 1"),
            (
                transformer,
                d.axes_dims_rope.len() == 3
                    && d.axes_dims_rope.iter().all(|axis| *axis > 0 && axis % 2 == 0)
                    && d.axes_dims_rope.iter().try_fold(0usize, |sum, axis| sum.checked_add(*axis))
                        == Some(d.attention_head_dim),
                "axes_dims_rope is not three even numbers from 2 (frame, row, column) that add up to attention_head_dim",
            ),
            (transformer, d.outputs() == d.in_channels, "out_channels differs from in_channels"),
            (
                transformer,
                d.context_in_dim == t.hidden_size,
                "context_in_dim is not the text encoder's hidden_size",
            ),
            (vae, v.z_dim == d.in_channels, "z_dim is not the transformer's in_channels"),
            (vae, v.is_residual, "is_residual is not true"),
            (vae, v.attn_scales.is_empty(), "attn_scales is not empty"),
            (vae, v.patch_size.is_none(), "patch_size is not null"),
            (
                vae,
                [&v.latents_mean, &v.latents_std].iter().all(|statistic| {
                    statistic.len() == v.z_dim && statistic.iter().all(|value| value.is_finite())
                }),
                "latents_mean and latents_std are not one finite number per latent channel",
            ),
            (
                vae,
                v.latents_std.iter().all(|deviation| *deviation > 0.0 && *deviation <= MAX_STATISTIC)
                    && v.latents_mean.iter().all(|mean| mean.abs() <= MAX_STATISTIC),
                "latents_std has a number that is not above 0, or it or latents_mean has one beyond a million",
            ),
            (
                vae,
                v.temperal_downsample.len() + 1 == v.dim_mult.len(),
                "temperal_downsample has not one value per level but the last",
            ),
            (
                vae,
                channels.iter().all(|count| (1..=MAX_CHANNELS).contains(count)),
                "a level of the decoder has no or more than 65536 channels",
            ),
            (
                vae,
                // All rules are evaluated: the one before does not keep zeros from this one.
                channels.windows(2).all(|pair| pair[0] > 0 && pair[1].saturating_mul(4) % pair[0] == 0),
                "an up block has more than four times the channels that it gives",
            ),
            (
                scheduler,
                s.use_dynamic_shifting || self.model_index.sample_sigmas.is_some(),
                "use_dynamic_shifting is false, and model_index.json has no sample_sigmas",
            ),
            (
                scheduler,
                s.time_shift_type.as_deref().unwrap_or("exponential") == "exponential",
                "time_shift_type is not exponential",
            ),
            (
                scheduler,
                s.max_image_seq_len > s.base_image_seq_len && s.max_image_seq_len <= MAX_SHIFT_TOKENS,
                "max_image_seq_len is not above base_image_seq_len and at most 2^30",
            ),
            (scheduler, is_shift(s.base_shift), "base_shift is not a number from -100 to 100"),
            (scheduler, is_shift(s.max_shift), "max_shift is not a number from -100 to 100"),
            (
                scheduler,
                s.shift_terminal.is_none_or(|terminal| (0.0..1.0).contains(&terminal)),
                "shift_terminal is not a number from 0 to less than 1",
            ),
            (
                model_index,
                self.model_index.sample_sigmas.as_deref().is_none_or(is_grid),
                "sample_sigmas are not falling numbers from at most 1 to above 0",
            ),
        ];
        rules.into_iter().find(|rule| !rule.1).map_or(Ok(()), |rule| Err(refuse(rule.0, rule.2.to_owned())))
    }

    fn check_sizes(&self, places: &Places) -> Result<(), QwenImageError> {
        let (t, d, v) = (&self.text, &self.transformer, &self.vae);
        let Places { text, transformer, vae, .. } = places;
        let any = 1 << 24;
        let sizes = [
            (text, "hidden_size", t.hidden_size, any),
            (text, "intermediate_size", t.intermediate_size, any),
            (text, "num_hidden_layers", t.num_hidden_layers, MAX_LAYERS),
            (text, "num_attention_heads", t.num_attention_heads, any),
            (text, "num_key_value_heads", t.num_key_value_heads, any),
            (text, "head_dim", t.head_dim, any),
            (text, "vocab_size", t.vocab_size, any),
            (text, "heads x head_dim", t.num_attention_heads.saturating_mul(t.head_dim), any),
            (transformer, "in_channels", d.in_channels, any),
            (transformer, "num_layers", d.num_layers, MAX_LAYERS),
            (transformer, "attention_head_dim", d.attention_head_dim, any),
            (transformer, "num_attention_heads", d.num_attention_heads, any),
            (transformer, "heads x attention_head_dim", d.width(), any),
            (transformer, "mlp_ratio x width", d.mlp_width(), any),
            (vae, "z_dim", v.z_dim, MAX_CHANNELS),
            (vae, "num_res_blocks", v.num_res_blocks, MAX_LAYERS),
            (vae, "out_channels", v.out_channels, MAX_CHANNELS),
            (vae, "dim_mult's length", v.dim_mult.len(), 8),
        ];
        let bad = sizes.iter().find(|(_, _, size, most)| *size == 0 || size > most);
        bad.map_or(Ok(()), |(place, key, size, most)| {
            Err(refuse(place, format!("{key} is {size}; expected 1 to {most}")))
        })
    }
}

/// Whether a shift of the noise levels leaves them numbers.
pub fn is_shift(shift: f64) -> bool {
    (-100.0..=100.0).contains(&shift)
}

/// Whether noise levels can be a schedule without its last 0.
pub fn is_grid(sigmas: &[f32]) -> bool {
    let falls = sigmas.windows(2).all(|pair| pair[1] < pair[0]);
    let bounded = sigmas.iter().all(|sigma| *sigma > 0.0 && *sigma <= 1.0);
    falls && bounded && (1..=MAX_STEPS).contains(&sigmas.len())
}

fn refuse(place: &str, problem: String) -> QwenImageError {
    QwenImageError::Config { place: place.to_owned(), problem }
}
