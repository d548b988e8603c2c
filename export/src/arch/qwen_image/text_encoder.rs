//! The text stack of Qwen3-VL, without its last norm: the transformer was trained on the stream itself. Source: specs of
//! transformers' Qwen3VLTextModel and of diffusers' QwenImage21Pipeline.

use super::{Constants, QwenImageError, config::TextConfig};
use crate::{
    arch::{
        author::Author,
        blocks::{
            decoder_layer::{DecoderLayer, Positions},
            norm::rms_norm,
            stream::carry,
        },
    },
    onnx::{DType, Dim, Model},
    recipe::Precision,
    weights::Checkpoint,
};

/// Inputs: `inputs_embeds` [1,encoded_seq,hidden], `mask` [1,1,encoded_seq,encoded_seq] (added to scores), `rope_cos`,
/// `rope_sin` [encoded_seq, head_dim/2]. Output: `hidden` [1,encoded_seq,hidden], the residual stream. All f32.
pub fn author(
    config: &TextConfig,
    weights: &Checkpoint,
    precision: &Precision,
    constants: &Constants,
) -> Result<Model, QwenImageError> {
    let mut a = Author::new("text_encoder", weights, precision);
    let rows = Dim::Symbol("encoded_seq".to_owned());
    let stream = [Dim::Fixed(1), rows.clone(), Dim::Fixed(config.hidden_size)];
    let x = a.graph.input("inputs_embeds", DType::F32, &stream);
    let mask = a.graph.input("mask", DType::F32, &[Dim::Fixed(1), Dim::Fixed(1), rows.clone(), rows.clone()]);
    let table = [rows.clone(), Dim::Fixed(config.head_dim / 2)];
    let [cos, sin] = ["rope_cos", "rope_sin"].map(|name| a.graph.input(name, DType::F32, &table));
    a.widen_when_run(cos);
    let positions = Positions { mask: a.to_compute(mask), cos: a.to_compute(cos), sin: a.to_compute(sin) };
    let decoder = DecoderLayer {
        hidden: config.hidden_size,
        intermediate: config.intermediate_size,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        eps: config.rms_norm_eps,
        attention_bias: config.attention_bias,
        head_norms: constants.text_head_norms,
        rows,
    };
    let mut x = carry(&mut a, x);
    for layer in 0..config.num_hidden_layers {
        x = decoder.author(&mut a, &format!("layers.{layer}."), x, &positions)?;
    }
    let mut hidden = a.to_f32(x);
    if constants.text_final_norm {
        hidden = rms_norm(&mut a, hidden, "norm.weight", config.hidden_size, config.rms_norm_eps)?;
    }
    a.graph.output(hidden, "hidden", &stream);
    Ok(a.finish())
}
