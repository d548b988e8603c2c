//! Qwen-Image-2.1: a Qwen3-VL text stack, a transformer whose text never reads the picture, and a convolutional autoencoder
//! with an alpha channel.

pub mod parameters;

mod config;
mod modulation;
mod text_encoder;
mod transformer;
mod vae;

use std::path::Path;

use serde::Deserialize;

use self::{
    config::{Config, ModelIndex, TextConfig},
    parameters::{Graphs, MAX_TEXT_LENGTH, Parameters, Template},
    transformer::Transformer,
    vae::Decoder,
};
use super::{
    Authored, Authoring, CopiedFiles, CopiedFolder, MAX_STEPS, SizesError, SizesRequest, Source, StageGraph,
    TextRows,
    author::AuthorError,
    blocks::{image_decoder::COMPONENT, rope::Pairing},
    parameters::{Embedding, EmbeddingType, PARAMETERS, TimeOrder},
    settings::{CUTS, check_cuts},
    tokenizer::{AddedTokens, TOKENS},
};
use crate::{
    recipe::{CONFIGS, Precision, RecipeError, WeightFormat},
    shapes::Sizes,
    weights::{Checkpoint, WeightsError, read_json},
};

#[derive(Debug, thiserror::Error)]
pub enum QwenImageError {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Author(#[from] AuthorError),
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error("{place}: {problem}")]
    Config { place: String, problem: String },
    #[error("{key} = {value}: {problem}")]
    Setting { key: &'static str, value: String, problem: String },
}

/// Rotary base of the transformer's positions, which no config file states.
const ROPE_THETA: f64 = 10_000.0;
/// Width of the sinusoidal time embedding, which no config file states.
const TIME_CHANNELS: usize = 256;
/// Latent tokens per side come in pairs: the text encoder can see pictures, of which it merges patches two by two.
const TOKENS_PER_SIDE: usize = 2;
/// Pixels per side of a picture where none are asked for: diffusers' `output_resolution`.
const DEFAULT_SIDE: usize = 1024;

/// The free choices of the architecture that no config file states. Everything but the default is a planted fault for
/// tests: each must be noticed by `verify`.
#[derive(Clone, Debug, PartialEq)]
struct Constants {
    rope_pairing: Pairing,
    /// Whether rows and columns count from the picture's middle.
    centred: bool,
    /// The noise level that modulates the text's rows; none for the step's own.
    text_sigma: Option<f32>,
    causal_text: bool,
    /// Whether gates pass through tanh.
    bounded_gates: bool,
    /// Whether the weight of the text's first norm is its distance from 1.
    zero_centred_norm: bool,
    text_head_norms: bool,
    text_final_norm: bool,
    /// What takes the place of the text encoder's rotary base.
    text_theta: Option<f64>,
    /// Whether the decoder's shortcuts over time give the last of their two frames.
    last_copy: bool,
    /// How often latents are un-normalised.
    unnormalised: usize,
}

/// The faults that a test may plant in an export.
pub const FAULTS: &[&str] = &[
    "text_from_sigma",
    "bidirectional_text",
    "uncentred_grid",
    "no_tanh",
    "rope_half_split",
    "norm_not_zero_centred",
    "no_qk_norm",
    "theta_1e4",
    "final_norm",
    "vae_no_first_chunk",
    "vae_no_unnormalise",
    "vae_unnormalised_twice",
];

impl Constants {
    const QWEN: Constants = Constants {
        rope_pairing: Pairing::Interleaved,
        centred: true,
        text_sigma: Some(0.0),
        causal_text: true,
        bounded_gates: true,
        zero_centred_norm: true,
        text_head_norms: true,
        text_final_norm: false,
        text_theta: None,
        last_copy: true,
        unnormalised: 1,
    };

    fn with_fault(fault: Option<&str>) -> Constants {
        let qwen = Constants::QWEN;
        match fault {
            Some("text_from_sigma") => Constants { text_sigma: None, ..qwen },
            Some("bidirectional_text") => Constants { causal_text: false, ..qwen },
            Some("uncentred_grid") => Constants { centred: false, ..qwen },
            Some("no_tanh") => Constants { bounded_gates: false, ..qwen },
            Some("rope_half_split") => Constants { rope_pairing: Pairing::HalfSplit, ..qwen },
            Some("norm_not_zero_centred") => Constants { zero_centred_norm: false, ..qwen },
            Some("no_qk_norm") => Constants { text_head_norms: false, ..qwen },
            Some("theta_1e4") => Constants { text_theta: Some(1e4), ..qwen },
            Some("final_norm") => Constants { text_final_norm: true, ..qwen },
            Some("vae_no_first_chunk") => Constants { last_copy: false, ..qwen },
            Some("vae_no_unnormalise") => Constants { unnormalised: 0, ..qwen },
            Some("vae_unnormalised_twice") => Constants { unnormalised: 2, ..qwen },
            _ => qwen,
        }
    }
}

/// `[text_encoder]` of the recipe.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TextSection {
    length: usize,
    system: String,
    before: String,
    after: String,
}

/// `[transformer]` of the recipe.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TransformerSection {
    graphs: String,
}

/// `[schedule]` of the recipe.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ScheduleSection {
    steps: usize,
}

/// `[vae_decoder]` of the recipe.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VaeSection {
    cuts: Vec<usize>,
    attention_rows: usize,
}

/// Sizes of all symbols, from a bundle's parameters: the family's [`super::Architecture::sizes`].
pub fn sizes(parameters: &serde_json::Value, request: &SizesRequest) -> Result<Sizes, SizesError> {
    let parameters = checked(parameters)?;
    let size = parameters.size(request.width, request.height)?;
    if request.steps == 0 || request.steps > MAX_STEPS {
        return Err(SizesError::Steps { steps: request.steps });
    }
    let TextRows { encoded, read } = request.text;
    let most = parameters.text.length;
    if read == 0 || read > encoded || encoded > most {
        return Err(SizesError::Text { encoded, read, most });
    }
    Ok(parameters.sizes(size, request))
}

/// The picture that a bundle's parameters name: the family's [`super::Architecture::usual`].
pub fn usual(parameters: &serde_json::Value) -> Result<SizesRequest, SizesError> {
    let parameters = checked(parameters)?;
    Ok(SizesRequest {
        width: parameters.vae.default_side,
        height: parameters.vae.default_side,
        steps: parameters.schedule.default_steps(),
        halvings: 0,
        text: TextRows::all(parameters.text.length),
    })
}

fn checked(parameters: &serde_json::Value) -> Result<Parameters, SizesError> {
    const FAMILY: &str = "qwen-image";
    let parameters = Parameters::deserialize(parameters)
        .map_err(|source| SizesError::Unreadable { family: FAMILY, source })?;
    parameters.check().map_err(|problem| SizesError::Parameters { family: FAMILY, problem })?;
    Ok(parameters)
}

/// Whether a folder holds this family in diffusers layout.
pub fn detects(root: &Path) -> bool {
    let config = std::fs::read_to_string(root.join("transformer/config.json")).unwrap_or_default();
    config.contains("QwenImage21Transformer2DModel")
}

/// Turbo's, where the checkpoint has noise levels of its own.
pub fn default_recipe(root: &Path) -> &'static str {
    let index = read_json::<ModelIndex>(&root.join("model_index.json")).unwrap_or_default();
    if index.sample_sigmas.is_some() { "qwen-image-2.1-turbo" } else { "qwen-image-2.1" }
}

/// What configs and recipe say, checked against each other.
struct Settings {
    config: Config,
    text: TextSection,
    graphs: Graphs,
    vae: VaeSection,
    steps: usize,
}

impl Settings {
    fn of(request: &Authoring<'_>) -> Result<Settings, QwenImageError> {
        let recipe = request.recipe;
        let config = Config::of(request.source, recipe)?;
        recipe.check_sections(&["text_encoder", "transformer", "schedule", "vae_decoder", CONFIGS])?;
        let text: TextSection = recipe.section("text_encoder")?;
        let TransformerSection { graphs } = recipe.section("transformer")?;
        let vae: VaeSection = recipe.section("vae_decoder")?;
        let ScheduleSection { steps } = recipe.section("schedule")?;
        let settings = [
            ("text_encoder.length", text.length, MAX_TEXT_LENGTH),
            ("vae_decoder.attention_rows", vae.attention_rows, 1 << 24),
            ("schedule.steps", steps, MAX_STEPS),
        ];
        if let Some((key, value, most)) =
            settings.into_iter().find(|(_, value, most)| !(1..=*most).contains(value))
        {
            return Err(QwenImageError::Setting {
                key,
                value: value.to_string(),
                problem: format!("expected 1 to {most}"),
            });
        }
        check_cuts(&vae.cuts, config.vae.dim_mult.len()).map_err(|(value, problem)| {
            QwenImageError::Setting { key: CUTS, value: value.to_string(), problem }
        })?;
        let graphs = Graphs::named(&graphs).ok_or_else(|| {
            let (key, problem) = ("transformer.graphs", "expected prefix or single".to_owned());
            QwenImageError::Setting { key, value: graphs, problem }
        })?;
        Ok(Settings { config, text, graphs, vae, steps })
    }
}

/// Authors every stage of a checkpoint in diffusers layout.
pub fn author(request: &Authoring<'_>) -> Result<Authored, QwenImageError> {
    let settings = Settings::of(request)?;
    let constants = Constants::with_fault(request.fault);
    let config = &settings.config;
    let tokenizer = tokenizer_folder(request.source, &settings.text)?;

    let weights = text_weights(request)?;
    let precision = request.profile.component("text_encoder");
    let encoder = text_encoder::author(&config.text, &weights, &precision, &constants)?;
    let embedding = embedding(&config.text, &precision);
    let table = embedding.table(&weights, EMBEDDING_TABLE)?;
    let mut stages = vec![StageGraph::new("text_encoder", "text_encoder", encoder)];
    stages.extend(transformer_stages(request, &settings, &constants)?);
    stages.extend(decoder_stages(request, &settings, &constants)?);
    let parameters = parameters(settings, &constants, embedding)?;
    Ok(Authored { stages, raw_files: vec![table], copied_folders: vec![tokenizer], parameters })
}

/// The decoder alone: the family's [`super::Architecture::author_decoder`].
pub fn author_decoder(request: &Authoring<'_>, cuts: &[usize]) -> Result<Authored, QwenImageError> {
    let constants = Constants::with_fault(request.fault);
    let mut settings = Settings::of(request)?;
    settings.vae.cuts = cuts.to_vec();
    let stages = decoder_stages(request, &settings, &constants)?;
    let embedding = embedding(&settings.config.text, &request.profile.component("text_encoder"));
    let parameters = parameters(settings, &constants, embedding)?;
    Ok(Authored { stages, raw_files: Vec::new(), copied_folders: Vec::new(), parameters })
}

/// Weights of the text stack by their names in it. The whole language model has other names before them, and weights
/// that are not asked for.
fn text_weights(request: &Authoring<'_>) -> Result<Checkpoint, QwenImageError> {
    const PREFIXES: [&str; 3] = ["model.language_model.", "language_model.", "model."];
    Ok(request.weights("text_encoder")?.without_prefix(&PREFIXES, EMBEDDING_TABLE))
}

/// Weights of the transformer by their names in diffusers. Some files have others before them, or the two linears of a gated
/// feed-forward as one.
fn transformer_weights(request: &Authoring<'_>, layers: usize) -> Result<Checkpoint, QwenImageError> {
    const PREFIXES: [&str; 2] = ["model.diffusion_model.", "transformer."];
    let mut weights = request.weights("transformer")?.without_prefix(&PREFIXES, "img_in.weight");
    for block in 0..layers {
        let name = |layer: &str| format!("transformer_blocks.{block}.img_mlp.{layer}.weight");
        weights.with_halves(&name("gate_up"), [&name("gate_layer"), &name("proj")]);
    }
    Ok(weights)
}

fn transformer_stages(
    request: &Authoring<'_>,
    settings: &Settings,
    constants: &Constants,
) -> Result<Vec<StageGraph>, QwenImageError> {
    const COMPONENT: &str = "transformer";
    let config = &settings.config.transformer;
    let weights = transformer_weights(request, config.num_layers)?;
    let precision = request.profile.component(COMPONENT);
    let modulation = modulation::author(config, &weights, &precision, constants)?;
    let transformer = Transformer { config, weights: &weights, precision: &precision, constants };
    let prefix = match settings.graphs {
        Graphs::Prefix => Some(transformer.prefix()?),
        Graphs::Single => None,
    };
    let step = transformer.step(settings.graphs, prefix.as_ref())?;
    let mut stages = vec![StageGraph::new("modulation", COMPONENT, modulation)];
    stages.extend(prefix.map(|prefix| StageGraph::new("prefix", COMPONENT, prefix)));
    stages.push(StageGraph::new("transformer", COMPONENT, step));
    Ok(stages)
}

fn decoder_stages(
    request: &Authoring<'_>,
    settings: &Settings,
    constants: &Constants,
) -> Result<Vec<StageGraph>, QwenImageError> {
    let weights = request.weights("vae")?;
    let precision = request.profile.component(COMPONENT);
    let decoder =
        Decoder { config: &settings.config.vae, weights: &weights, precision: &precision, constants };
    decoder.stages(&settings.vae.cuts)
}

const EMBEDDING_TABLE: &str = "embed_tokens.weight";

fn embedding(config: &TextConfig, precision: &Precision) -> Embedding {
    let dtype = match precision.weights {
        WeightFormat::F32 => EmbeddingType::F32,
        _ => EmbeddingType::F16,
    };
    Embedding::new(dtype, config.vocab_size, config.hidden_size)
}

/// Published checkpoints have the tokenizer in a processor's folder. The tokens of the template must be tokens of it: cut to
/// pieces they would be words of the prompt.
fn tokenizer_folder(source: Source<'_>, text: &TextSection) -> Result<CopiedFolder, QwenImageError> {
    const PROCESSOR: &str = "processor";
    let folder = |from: &str| CopiedFolder {
        from: from.to_owned(),
        to: "tokenizer".to_owned(),
        files: CopiedFiles::Tokenizer,
    };
    let Source::Checkpoint(root) = source else { return Ok(folder(PROCESSOR)) };
    let has_own = root.join(PROCESSOR).join(TOKENS).exists() || !root.join("tokenizer").join(TOKENS).exists();
    let from = if has_own { PROCESSOR } else { "tokenizer" };
    let known = AddedTokens::read(&root.join(from))?;
    let texts = [&text.system, &text.before, &text.after];
    match texts.into_iter().flat_map(|text| special_tokens(text)).find(|token| known.id(token).is_none()) {
        None => Ok(folder(from)),
        Some(token) => Err(QwenImageError::Config {
            place: root.join(from).join(TOKENS).display().to_string(),
            problem: format!("the template's token '{token}' is not among added_tokens"),
        }),
    }
}

/// What of a text is spelt as a special token: `<|name|>`.
fn special_tokens(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices("<|").filter_map(|(start, _)| {
        let end = text[start..].find("|>")?;
        Some(&text[start..start + end + 2])
    })
}

/// What `bundle.json` holds.
fn parameters(
    settings: Settings,
    constants: &Constants,
    embedding: Embedding,
) -> Result<serde_json::Value, QwenImageError> {
    let Settings { config, text, graphs, vae, steps } = settings;
    let Config { text: encoder, transformer, vae: decoder, scheduler, model_index } = config;
    let TextSection { length, system, before, after } = text;
    let pixels_per_token = decoder.downscale();
    let post_stages = vae::post_stages(&decoder, &vae.cuts);
    let parameters = Parameters {
        text: parameters::Text {
            length,
            template: Template { system, before, after },
            head_dim: encoder.head_dim,
            rope_theta: constants.text_theta.or(encoder.rope_theta()).unwrap_or_default(),
            embedding,
        },
        transformer: parameters::Transformer {
            channels: transformer.in_channels,
            layers: transformer.num_layers,
            width: transformer.width(),
            axes: transformer.axes_dims_rope,
            rope_theta: ROPE_THETA,
            time_channels: TIME_CHANNELS,
            time_order: TimeOrder::CosFirst,
            graphs,
            centred: constants.centred,
            text_sigma: constants.text_sigma,
        },
        vae: parameters::Vae {
            pixels_per_token,
            multiple: TOKENS_PER_SIDE * pixels_per_token,
            default_side: DEFAULT_SIDE,
            attention_rows: vae.attention_rows,
            post_stages,
        },
        schedule: parameters::Schedule {
            steps,
            sigmas: model_index.sample_sigmas,
            shift: parameters::Shift {
                base_tokens: scheduler.base_image_seq_len,
                max_tokens: scheduler.max_image_seq_len,
                base: scheduler.base_shift,
                max: scheduler.max_shift,
                terminal: scheduler.shift_terminal,
            },
        },
    };
    parameters.check().map_err(|problem| QwenImageError::Config { place: PARAMETERS.to_owned(), problem })?;
    Ok(serde_json::to_value(parameters).unwrap_or_default())
}
