//! The Qwen3 text encoder up to its last tap. Source: specs of transformers' Qwen3Model; taps as in Flux2KleinPipeline.

use super::{Flux2Error, config::TextConfig};
use crate::{
    arch::{
        author::Author,
        blocks::{
            decoder_layer::{DecoderLayer, Positions},
            norm::rms_norm,
            stream::carry,
        },
    },
    onnx::{DType, Dim, Model, ValueId},
    recipe::Precision,
    weights::Checkpoint,
};

/// Taps and text length of a recipe.
pub struct Shape<'a> {
    pub taps: &'a [usize],
    pub length: usize,
}

/// Inputs: `inputs_embeds` [1,L,hidden], `mask` [1,1,L,L] (added to scores), `rope_cos`, `rope_sin` [L, head_dim/2].
/// Output: `prompt_embeds` [1,L,taps*hidden]. All f32.
pub fn author(
    config: &TextConfig,
    shape: &Shape<'_>,
    weights: &Checkpoint,
    precision: &Precision,
) -> Result<Model, Flux2Error> {
    let mut a = Author::new("text_encoder", weights, precision);
    let prefix = key_prefix(weights);
    let length = Dim::Fixed(shape.length);
    let mut x = a.graph.input(
        "inputs_embeds",
        DType::F32,
        &[Dim::Fixed(1), length.clone(), Dim::Fixed(config.hidden_size)],
    );
    let mask =
        a.graph.input("mask", DType::F32, &[Dim::Fixed(1), Dim::Fixed(1), length.clone(), length.clone()]);
    let table = [length.clone(), Dim::Fixed(config.head_dim() / 2)];
    let [cos, sin] = ["rope_cos", "rope_sin"].map(|name| a.graph.input(name, DType::F32, &table));
    let positions = Positions { mask: a.to_compute(mask), cos: a.to_compute(cos), sin: a.to_compute(sin) };
    let decoder = DecoderLayer {
        hidden: config.hidden_size,
        intermediate: config.intermediate_size,
        heads: config.num_attention_heads,
        kv_heads: config.kv_heads(),
        head_dim: config.head_dim(),
        eps: config.rms_norm_eps,
        attention_bias: config.attention_bias,
        head_norms: true,
        rows: length.clone(),
    };
    let last = shape.taps.iter().copied().max().unwrap_or(0);
    let mut states = vec![x];
    x = carry(&mut a, x);
    for layer in 0..last {
        x = decoder.author(&mut a, &format!("{prefix}layers.{layer}."), x, &positions)?;
        states.push(x);
    }
    if last == config.num_hidden_layers {
        // In transformers the last hidden state is the one after the final norm.
        states[last] =
            rms_norm(&mut a, x, &format!("{prefix}norm.weight"), config.hidden_size, config.rms_norm_eps)?;
    }
    let taps: Vec<ValueId> = shape.taps.iter().map(|tap| states[*tap]).collect();
    let taps: Vec<ValueId> = taps.into_iter().map(|tap| a.to_f32(tap)).collect();
    let embeds = a.graph.concat(&taps, -1);
    let width = Dim::Fixed(shape.taps.len() * config.hidden_size);
    a.graph.output(embeds, "prompt_embeds", &[Dim::Fixed(1), length, width]);
    Ok(a.finish())
}

/// Checkpoints of the whole language model say `model.layers.0…`, those of the bare encoder `layers.0…`.
pub fn key_prefix(weights: &Checkpoint) -> &'static str {
    let is_bare = !weights.lists("model.embed_tokens.weight") && weights.lists("embed_tokens.weight");
    if is_bare { "" } else { "model." }
}
