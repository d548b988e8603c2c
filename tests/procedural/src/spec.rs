//! `checkpoint.json`: what a checkpoint looks like, short of its weights.
//!
//! Each `config` is the config.json of that component as diffusers or transformers would write it, except for what
//! the spec varies: the place of the text encoder's `rope_theta` and of the padding token's id.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    pub seed: u64,
    /// Of every floating-point tensor.
    pub dtype: Dtype,
    pub text_encoder: TextEncoder,
    pub transformer: Component,
    pub vae: Component,
    pub scheduler: Map<String, Value>,
    pub tokenizer: Tokenizer,
    /// Per component, FNV-1a-64 over name and bytes of every tensor in byte order of the names (16 hex digits).
    #[serde(default)]
    pub fingerprints: BTreeMap<String, String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    /// Name in a transformers config.
    pub fn torch_name(self) -> &'static str {
        match self {
            Dtype::F32 => "float32",
            Dtype::F16 => "float16",
            Dtype::Bf16 => "bfloat16",
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextEncoder {
    #[serde(default = "one")]
    pub shards: usize,
    pub rope_theta: f64,
    pub rope_spelling: RopeSpelling,
    pub config: Map<String, Value>,
}

/// Where config.json holds `rope_theta`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeSpelling {
    /// At the top (older writers; they also say `torch_dtype`).
    Top,
    /// In `rope_parameters` (newer writers; they say `dtype`).
    RopeParameters,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Component {
    /// Files the weights are spread over; with more than one there is an index.
    #[serde(default = "one")]
    pub shards: usize,
    pub config: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tokenizer {
    pub kind: TokenizerKind,
    pub pad: Pad,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TokenizerKind {
    /// Ids 0-255: the byte alphabet sorted by character, then the five special tokens.
    ByteLevel,
}

/// Which files tell the padding token.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pad {
    /// `pad_token_id` in text_encoder/config.json, and tokenizer_config.json.
    TextEncoder,
    /// Only tokenizer_config.json; text_encoder/config.json has null.
    Tokenizer,
}

fn one() -> usize {
    1
}
