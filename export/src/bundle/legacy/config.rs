//! `flux2-config.json`: its keys, their defaults and their bounds.

use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;
use serde_json::Value;

use super::{LegacyError, value};
use crate::{
    arch::flux2::imported::{
        Imported, MAX_ATTENTION_ROWS, Settings,
        contract::{Role, fixed_size},
    },
    onnx::Model,
};

/// More stages has no decoder.
const MAX_STAGES: usize = 64;

#[derive(Deserialize)]
pub(super) struct Config {
    pub text_seq_len: Option<usize>,
    pub context_dim: Option<usize>,
    pub latent_channels: Option<usize>,
    pub latent_downsample: Option<usize>,
    pub num_steps: Option<usize>,
    pub default_width: Option<usize>,
    pub default_height: Option<usize>,
    pub context_clip: Option<f32>,
    pub zero_padded_context: Option<bool>,
    pub model_name: Option<String>,
    pub model_variant: Option<String>,
    #[serde(default)]
    pub vae_decoder_post_stage_keys: Vec<String>,
    pub models: BTreeMap<String, Entry>,
}

/// One graph.
#[derive(Deserialize)]
pub(super) struct Entry {
    pub file: String,
    pub manifest: Option<String>,
    #[serde(default)]
    pub inputs: Value,
    #[serde(default)]
    pub outputs: Value,
    pub chunk_size: Option<usize>,
    pub head_dim: Option<usize>,
    pub residual_input: Option<String>,
    pub attn_input: Option<String>,
}

/// Keys of the stages after the attention, in order.
pub(super) fn post_stage_keys(config: &Config) -> Vec<String> {
    match config.vae_decoder_post_stage_keys.is_empty() {
        true => vec!["vae_decoder_post".to_owned()],
        false => config.vae_decoder_post_stage_keys.clone(),
    }
}

/// Keys of the graphs in the order in which they run. A decoder in stages is taken before one that is whole.
pub(super) fn parts(config: &Config, path: &Path) -> Result<Vec<(String, Role)>, LegacyError> {
    let mut parts: Vec<(String, Role)> =
        [("text_encoder", Role::TextEncoder), ("transformer", Role::Transformer)]
            .map(|(key, role)| (key.to_owned(), role))
            .into();
    if config.models.contains_key("vae_decoder_pre") {
        parts.push(("vae_decoder_pre".to_owned(), Role::DecoderStart));
        parts.push(("vae_decoder_attn_chunk".to_owned(), Role::Attention));
        let keys = post_stage_keys(config);
        if keys.len() > MAX_STAGES {
            let problem = format!("{} stages; at most {MAX_STAGES} are read", keys.len());
            return Err(value(path, "vae_decoder_post_stage_keys", problem));
        }
        let count = keys.len();
        let role = |index| Role::DecoderEnd { index, last: index + 1 == count };
        parts.extend(keys.into_iter().enumerate().map(|(index, key)| (key, role(index))));
    } else {
        parts.push(("vae_decoder".to_owned(), Role::Decoder));
    }
    match parts.iter().find(|(key, _)| !config.models.contains_key(key)) {
        Some((key, _)) => Err(value(path, &format!("models.{key}"), "there is no such entry")),
        None => Ok(parts),
    }
}

/// Names of inputs or outputs as the config has them: a list of names or of objects with a `name`, or an object by name.
pub(super) fn listed(value: &Value) -> Vec<&str> {
    match value {
        Value::Array(items) => {
            items.iter().filter_map(|item| item.as_str().or_else(|| item.get("name")?.as_str())).collect()
        }
        // An object has no order of its own, but names are all that is asked for then.
        Value::Object(entries) => entries.keys().map(String::as_str).collect(),
        _ => Vec::new(),
    }
}

/// What the graphs do not tell, with the defaults of the layout's engine.
pub(super) fn settings(config: &Config, pad_id: i64, path: &Path) -> Result<Settings, LegacyError> {
    let chunk = config.models.get("vae_decoder_attn_chunk").and_then(|chunk| chunk.chunk_size);
    let settings = Settings {
        text_length: config.text_seq_len.unwrap_or(512),
        pad_id,
        clip: config.context_clip.unwrap_or(0.0),
        zero_padding: config.zero_padded_context.unwrap_or(false),
        attention_rows: chunk.unwrap_or(1024),
        default_size: [config.default_width.unwrap_or(256), config.default_height.unwrap_or(256)],
        pixels_per_token: config.latent_downsample.unwrap_or(16),
        steps: config.num_steps.unwrap_or(4),
    };
    let [width, height] = settings.default_size;
    for (key, number, most) in [
        ("text_seq_len", settings.text_length, 1 << 13),
        ("models.vae_decoder_attn_chunk.chunk_size", settings.attention_rows, MAX_ATTENTION_ROWS),
        ("default_width", width, 1 << 14),
        ("default_height", height, 1 << 14),
        ("latent_downsample", settings.pixels_per_token, 1 << 10),
        ("num_steps", settings.steps, 1000),
    ] {
        if number == 0 || number > most {
            return Err(value(path, key, format!("{number}; expected 1 to {most}")));
        }
    }
    if !settings.clip.is_finite() || settings.clip < 0.0 {
        return Err(value(path, "context_clip", format!("{}; expected a number from 0", settings.clip)));
    }
    Ok(settings)
}

/// What the config says of the graphs must be so.
pub(super) fn check_dimensions(
    config: &Config,
    graphs: &[(Role, Model, String)],
    parameters: &Imported,
    path: &Path,
) -> Result<(), LegacyError> {
    let of = |role: Role, name: &str, axis| {
        let (_, model, _) = graphs.iter().find(|(of, ..)| *of == role)?;
        fixed_size(&model.graph, name, axis)
    };
    let chunk = config.models.get("vae_decoder_attn_chunk").and_then(|chunk| chunk.chunk_size);
    let rows = parameters.vae.attention.as_ref().map(|attention| attention.rows);
    for (key, stated, found) in [
        ("text_seq_len", config.text_seq_len, of(Role::TextEncoder, "input_ids", 1)),
        ("context_dim", config.context_dim, of(Role::Transformer, "prompt_embeds", 2)),
        ("latent_channels", config.latent_channels, Some(parameters.transformer.channels)),
        ("latent_downsample", config.latent_downsample, Some(parameters.vae.pixels_per_token)),
        ("models.vae_decoder_attn_chunk.chunk_size", chunk, rows),
    ] {
        if let (Some(stated), Some(found)) = (stated, found)
            && stated != found
        {
            return Err(value(path, key, format!("{stated}, but the graphs have {found}")));
        }
    }
    Ok(())
}

/// `name variant`, as far as the config has them; else the folder's name.
pub(super) fn model_name(config: &Config, folder: &Path) -> String {
    const LONGEST: usize = 100;
    let parts: Vec<&str> =
        [&config.model_name, &config.model_variant].into_iter().flatten().map(String::as_str).collect();
    let name: String = parts.join(" ").chars().filter(|c| !c.is_control()).take(LONGEST).collect();
    match name.trim() {
        "" => folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        name => name.to_owned(),
    }
}
