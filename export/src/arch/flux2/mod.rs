//! FLUX.2 Klein: a Qwen3 text encoder, a transformer with joint attention, and a convolutional autoencoder.

pub mod form;
pub mod imported;
pub mod parameters;

mod config;
mod modulation;
mod statistics;
mod text_encoder;
pub mod tokenizer;
mod transformer;
mod vae;

use std::path::Path;

use serde::Deserialize;

use self::{
    config::{Config, TextConfig},
    form::Form,
    parameters::{MAX_TEXT_LENGTH, Parameters, TextIds},
};
use super::{
    Authored, Authoring, CopiedFolder, MAX_STEPS, SizesError, SizesRequest, StageGraph, TextRows,
    author::AuthorError,
    blocks::{
        image_decoder::{ATTENTION_STAGE, COMPONENT, POST_STAGE},
        rope::Pairing,
    },
    parameters::{Embedding, EmbeddingType, PARAMETERS, TimeOrder},
    settings::{CUTS, check_cuts},
};
use crate::{
    recipe::{CONFIGS, Compute, RecipeError},
    shapes::Sizes,
    weights::WeightsError,
};

#[derive(Debug, thiserror::Error)]
pub enum Flux2Error {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Author(#[from] AuthorError),
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error("{place}: {problem}")]
    Config { place: String, problem: String },
    #[error("{key} = {}: {problem}", listed(value))]
    Setting { key: &'static str, value: Vec<usize>, problem: String },
}

/// Numbers as `--set` takes them.
fn listed(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// The free choices of the architecture that no config file states. Everything but the default is a planted fault
/// for tests: each must be noticed by `verify`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Constants {
    rope_pairing: Pairing,
    /// Whether the first half of a gated projection is the SiLU gate.
    gate_first: bool,
    /// Whether the checkpoint's norm_out rows are scale, then shift (diffusers) or the reverse (BFL).
    norm_out_scale_first: bool,
    time_order: TimeOrder,
    text_ids: TextIds,
    mask_padding: bool,
}

/// The faults that a test may plant in an export.
pub const FAULTS: &[&str] = &[
    "rope_half_split",
    "swiglu_swapped",
    "norm_out_swapped",
    "time_sin_first",
    "text_ids_zero",
    "no_pad_mask",
];

impl Constants {
    const KLEIN: Constants = Constants {
        rope_pairing: Pairing::Interleaved,
        gate_first: true,
        norm_out_scale_first: true,
        time_order: TimeOrder::CosFirst,
        text_ids: TextIds::Index,
        mask_padding: true,
    };

    fn with_fault(fault: Option<&str>) -> Constants {
        let klein = Constants::KLEIN;
        match fault {
            Some("rope_half_split") => Constants { rope_pairing: Pairing::HalfSplit, ..klein },
            Some("swiglu_swapped") => Constants { gate_first: false, ..klein },
            Some("norm_out_swapped") => Constants { norm_out_scale_first: false, ..klein },
            Some("time_sin_first") => Constants { time_order: TimeOrder::SinFirst, ..klein },
            Some("text_ids_zero") => Constants { text_ids: TextIds::Zero, ..klein },
            Some("no_pad_mask") => Constants { mask_padding: false, ..klein },
            _ => klein,
        }
    }
}

/// `[text_encoder]` of the recipe.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TextSection {
    taps: Vec<usize>,
    pub length: usize,
}

/// `[vae_decoder]` of the recipe.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VaeSection {
    pub cuts: Vec<usize>,
    pub attention_rows: usize,
}

/// Sizes of all symbols, from a bundle's parameters: the family's [`super::Architecture::sizes`].
pub fn sizes(parameters: &serde_json::Value, request: &SizesRequest) -> Result<Sizes, SizesError> {
    let form = checked(parameters)?;
    let size = form.size(request.width, request.height)?;
    if request.steps == 0 || request.steps > MAX_STEPS {
        return Err(SizesError::Steps { steps: request.steps });
    }
    Ok(form.sizes(size, request.steps, request.halvings))
}

/// The picture that a bundle's parameters name: the family's [`super::Architecture::usual`].
pub fn usual(parameters: &serde_json::Value) -> Result<SizesRequest, SizesError> {
    let form = checked(parameters)?;
    let [width, height] = form.default_size();
    Ok(SizesRequest {
        width,
        height,
        steps: form.steps(),
        halvings: 0,
        text: TextRows::all(form.text_length()),
    })
}

fn checked(parameters: &serde_json::Value) -> Result<Form, SizesError> {
    const FAMILY: &str = "flux2";
    let form = Form::read(parameters).map_err(|source| SizesError::Unreadable { family: FAMILY, source })?;
    form.check().map_err(|problem| SizesError::Parameters { family: FAMILY, problem })?;
    Ok(form)
}

/// Whether a folder holds this family in diffusers layout.
pub fn detects(root: &Path) -> bool {
    let config = std::fs::read_to_string(root.join("transformer/config.json")).unwrap_or_default();
    config.contains("Flux2Transformer2DModel")
}

/// What configs and recipe say, checked against each other.
struct Settings {
    config: Config,
    text: TextSection,
    vae: VaeSection,
    schedule: parameters::Schedule,
}

impl Settings {
    fn of(request: &Authoring<'_>) -> Result<Settings, Flux2Error> {
        let recipe = request.recipe;
        let config = Config::of(request.source, recipe)?;
        recipe.check_sections(&["text_encoder", "schedule", "vae_decoder", CONFIGS])?;
        let text: TextSection = recipe.section("text_encoder")?;
        let vae: VaeSection = recipe.section("vae_decoder")?;
        let schedule: parameters::Schedule = recipe.section("schedule")?;
        check_settings(&config, &text, &vae, &schedule)?;
        Ok(Settings { config, text, vae, schedule })
    }
}

/// Authors every stage of a checkpoint in diffusers layout.
pub fn author(request: &Authoring<'_>) -> Result<Authored, Flux2Error> {
    let settings = Settings::of(request)?;
    let Settings { config, text, .. } = &settings;
    let constants = Constants::with_fault(request.fault);
    let profile = request.profile;

    let weights = request.weights("text_encoder")?;
    let shape = text_encoder::Shape { taps: &text.taps, length: text.length };
    let precision = profile.component("text_encoder");
    let encoder = text_encoder::author(&config.text, &shape, &weights, &precision)?;
    let embedding = embedding(&config.text, precision.compute);
    let table =
        embedding.table(&weights, &format!("{}embed_tokens.weight", text_encoder::key_prefix(&weights)))?;

    let weights = request.weights("transformer")?;
    let precision = profile.component("transformer");
    let modulation = modulation::author(&config.transformer, &weights, &precision, &constants)?;
    let transformer =
        transformer::author(&config.transformer, text.length, &weights, &precision, &constants)?;

    let mut stages = vec![
        StageGraph::new("text_encoder", "text_encoder", encoder),
        StageGraph::new("modulation", "transformer", modulation),
        StageGraph::new("transformer", "transformer", transformer),
    ];
    let decoder = decoder_stages(request, config, &settings.vae.cuts)?;
    let parameters = parameters(settings, &constants, embedding, &decoder)?;
    stages.extend(decoder);
    let copied_folders = vec![CopiedFolder::whole("tokenizer")];
    Ok(Authored { stages, raw_files: vec![table], copied_folders, parameters })
}

/// The decoder alone: the family's [`super::Architecture::author_decoder`].
pub fn author_decoder(request: &Authoring<'_>, cuts: &[usize]) -> Result<Authored, Flux2Error> {
    let settings = Settings::of(request)?;
    let stages = decoder_stages(request, &settings.config, cuts)?;
    let precision = request.profile.component("text_encoder");
    let embedding = embedding(&settings.config.text, precision.compute);
    let parameters = parameters(settings, &Constants::with_fault(request.fault), embedding, &stages)?;
    Ok(Authored { stages, raw_files: Vec::new(), copied_folders: Vec::new(), parameters })
}

fn decoder_stages(
    request: &Authoring<'_>,
    config: &Config,
    cuts: &[usize],
) -> Result<Vec<StageGraph>, Flux2Error> {
    let weights = request.weights("vae")?;
    vae::author(&config.vae, cuts, &weights, &request.profile.component(COMPONENT))
}

/// What `bundle.json` holds of a model with these stages of the decoder.
fn parameters(
    settings: Settings,
    constants: &Constants,
    embedding: Embedding,
    decoder: &[StageGraph],
) -> Result<serde_json::Value, Flux2Error> {
    let Settings { config, text, vae, schedule } = settings;
    let attends = decoder.iter().any(|stage| stage.name == ATTENTION_STAGE);
    let attention_rows = attends.then_some(vae.attention_rows);
    let names = decoder.iter().map(|stage| stage.name.clone());
    let post_stages = names.filter(|name| name.starts_with(POST_STAGE)).collect();
    let parameters = Parameters {
        text: parameters::Text {
            length: text.length,
            pad_id: config.pad_id,
            taps: text.taps,
            head_dim: config.text.head_dim(),
            rope_theta: config.text.rope_theta().unwrap_or_default(),
            mask_padding: constants.mask_padding,
            embedding,
        },
        transformer: parameters::Transformer {
            channels: config.transformer.in_channels,
            blocks: [config.transformer.num_layers, config.transformer.num_single_layers],
            width: config.transformer.width(),
            axes: config.transformer.axes_dims_rope,
            rope_theta: config.transformer.rope_theta,
            time_channels: config.transformer.timestep_guidance_channels,
            time_order: constants.time_order,
            text_ids: constants.text_ids,
        },
        vae: parameters::Vae {
            pixels_per_token: 2 * config.vae.downscale(),
            downscale: config.vae.downscale(),
            default_side: default_side(&config.vae),
            attention_rows,
            post_stages,
        },
        schedule,
    };
    parameters.check().map_err(|problem| Flux2Error::Config { place: PARAMETERS.to_owned(), problem })?;
    Ok(serde_json::to_value(parameters).unwrap_or_default())
}

/// The checkpoint's own picture size, cut to what the model can draw.
fn default_side(vae: &config::VaeConfig) -> usize {
    let multiple = 2 * vae.downscale();
    (vae.sample_size.unwrap_or(1024).clamp(multiple, 4096) / multiple) * multiple
}

fn embedding(config: &TextConfig, compute: Compute) -> Embedding {
    let dtype = match compute {
        Compute::F32 => EmbeddingType::F32,
        Compute::F16 => EmbeddingType::F16,
    };
    Embedding::new(dtype, config.vocab_size, config.hidden_size)
}

fn check_settings(
    config: &Config,
    text: &TextSection,
    vae: &VaeSection,
    schedule: &parameters::Schedule,
) -> Result<(), Flux2Error> {
    let setting =
        |key, value: &[usize], problem: String| Flux2Error::Setting { key, value: value.to_vec(), problem };
    let layers = config.text.num_hidden_layers;
    if text.taps.is_empty() || text.taps.iter().any(|tap| *tap > layers) {
        let problem = format!("taps are layer counts from 0 to the text encoder's {layers}, at least one");
        return Err(setting("text_encoder.taps", &text.taps, problem));
    }
    let (width, expected) =
        (text.taps.len() * config.text.hidden_size, config.transformer.joint_attention_dim);
    if width != expected {
        let problem = format!(
            "{} taps of hidden size {} make {width} columns, but the transformer's joint_attention_dim is {expected}",
            text.taps.len(),
            config.text.hidden_size
        );
        return Err(setting("text_encoder.taps", &text.taps, problem));
    }
    for (key, value, limit) in [
        ("text_encoder.length", text.length, MAX_TEXT_LENGTH),
        ("vae_decoder.attention_rows", vae.attention_rows, 1 << 24),
        ("schedule.steps", schedule.steps, MAX_STEPS),
    ] {
        if value == 0 || value > limit {
            return Err(setting(key, &[value], format!("expected 1 to {limit}")));
        }
    }
    check_cuts(&vae.cuts, config.vae.decoder_channels().len())
        .map_err(|(cut, problem)| setting(CUTS, &[cut], problem))
}
