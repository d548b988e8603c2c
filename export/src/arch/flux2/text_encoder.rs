//! The Qwen3 text encoder up to its last tap. Source: specs of transformers' Qwen3Model; taps as in Flux2KleinPipeline.

use super::{Flux2Error, config::TextConfig};
use crate::{
    arch::{
        author::{Author, Linear},
        blocks::{
            attention::{Grouped, grouped_attention},
            mlp::swiglu,
            norm::rms_norm,
            rope::{Pairing, rotate},
            stream::{add_branch, carry},
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

/// What every layer reads.
struct Shared {
    mask: ValueId,
    cos: ValueId,
    sin: ValueId,
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
    let shared = Shared { mask: a.to_compute(mask), cos: a.to_compute(cos), sin: a.to_compute(sin) };
    let last = shape.taps.iter().copied().max().unwrap_or(0);
    let mut states = vec![x];
    x = carry(&mut a, x);
    for layer in 0..last {
        x = decoder_layer(&mut a, config, &format!("{prefix}layers.{layer}."), x, &shared, shape.length)?;
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
    match weights.find("model.embed_tokens.weight") {
        Some(_) => "model.",
        None if weights.find("embed_tokens.weight").is_some() => "",
        None => "model.",
    }
}

fn decoder_layer(
    a: &mut Author<'_>,
    c: &TextConfig,
    prefix: &str,
    x: ValueId,
    shared: &Shared,
    rows: usize,
) -> Result<ValueId, Flux2Error> {
    let hidden = c.hidden_size;
    let y = stream_norm(a, x, &format!("{prefix}input_layernorm.weight"), hidden, c.rms_norm_eps)?;
    let attended = self_attention(a, c, &format!("{prefix}self_attn."), y, shared, rows)?;
    let x = add_branch(a, x, attended, None);
    let y = stream_norm(a, x, &format!("{prefix}post_attention_layernorm.weight"), hidden, c.rms_norm_eps)?;
    let gate = a.project(y, &format!("{prefix}mlp.gate_proj.weight"), hidden, c.intermediate_size)?;
    let up = a.project(y, &format!("{prefix}mlp.up_proj.weight"), hidden, c.intermediate_size)?;
    let y = swiglu(a, gate, up);
    let y = a.project(y, &format!("{prefix}mlp.down_proj.weight"), c.intermediate_size, hidden)?;
    Ok(add_branch(a, x, y, None))
}

/// RMSNorm of the stream in f32, then the compute type.
fn stream_norm(
    a: &mut Author<'_>,
    x: ValueId,
    weight: &str,
    width: usize,
    eps: f32,
) -> Result<ValueId, Flux2Error> {
    let x = a.to_f32(x);
    let y = rms_norm(a, x, weight, width, eps)?;
    Ok(a.to_compute(y))
}

fn self_attention(
    a: &mut Author<'_>,
    c: &TextConfig,
    prefix: &str,
    x: ValueId,
    shared: &Shared,
    rows: usize,
) -> Result<ValueId, Flux2Error> {
    let (heads, kv_heads, d) = (c.num_attention_heads, c.kv_heads(), c.head_dim());
    let project = |a: &mut Author<'_>, x, name: &str, inputs, outputs| {
        let bias = format!("{prefix}{name}.bias");
        let bias = c.attention_bias.then_some(bias.as_str());
        a.linear(x, &Linear { weight: &format!("{prefix}{name}.weight"), bias, inputs, outputs })
    };
    let q = project(a, x, "q_proj", c.hidden_size, heads * d)?;
    let k = project(a, x, "k_proj", c.hidden_size, kv_heads * d)?;
    let v = project(a, x, "v_proj", c.hidden_size, kv_heads * d)?;
    let norm_rotate = |a: &mut Author<'_>, x, norm: &str, heads: usize| -> Result<ValueId, Flux2Error> {
        let x = a.graph.reshape(x, &[1, rows as i64, heads as i64, d as i64]);
        let x = rms_norm(a, x, &format!("{prefix}{norm}.weight"), d, c.rms_norm_eps)?;
        let x = a.graph.reshape(x, &[1, rows as i64, (heads * d) as i64]);
        Ok(rotate(a, x, shared.cos, shared.sin, heads, Pairing::HalfSplit))
    };
    let q = norm_rotate(a, q, "q_norm", heads)?;
    let k = norm_rotate(a, k, "k_norm", kv_heads)?;
    let y = grouped_attention(a, [q, k, v], shared.mask, &Grouped { heads, kv_heads, head_dim: d, rows });
    Ok(project(a, y, "o_proj", heads * d, c.hidden_size)?)
}
