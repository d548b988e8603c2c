//! The Qwen-Image-2.1 transformer. Its text rows attend to the text alone and are modulated by noise level 0 whatever the
//! step: their keys and values are computed once, by a graph of their own, and every step's graph has the picture's rows
//! alone. Source: specs of diffusers' QwenImage21Transformer2DModel.

use super::{Constants, QwenImageError, config::TransformerConfig, parameters::Graphs};
use crate::{
    arch::{
        author::Author,
        blocks::{
            attention::{Grouped, grouped_attention, in_attention_type, joint_attention},
            mlp::swiglu,
            norm::{adaptive_layer_norm, rms_norm, scaled_rms_norm},
            rope::rotate,
            stream::{add_branch, carry},
        },
    },
    onnx::{Attribute, DType, Dim, Model, ValueId},
    recipe::Precision,
    weights::Checkpoint,
};

/// Keys and values of a block.
type KeyValue = [ValueId; 2];

/// What the graphs are authored from.
pub struct Transformer<'a> {
    pub config: &'a TransformerConfig,
    pub weights: &'a Checkpoint,
    pub precision: &'a Precision,
    pub constants: &'a Constants,
}

/// Names of the inputs of a stream.
struct Names {
    rows: &'static str,
    modulation: &'static str,
    rope: [&'static str; 2],
}

const TEXT_ROWS: &str = "text_seq";

/// The text's own graph has plain names; beside the picture's, they say whose they are.
const PREFIX: (Names, &str) =
    (Names { rows: TEXT_ROWS, modulation: "mod", rope: ["rope_cos", "rope_sin"] }, "mask");
const TEXT: (Names, &str) = (
    Names { rows: TEXT_ROWS, modulation: "text_mod", rope: ["text_rope_cos", "text_rope_sin"] },
    "text_mask",
);
const IMAGE: Names = Names { rows: "image_seq", modulation: "mod", rope: ["rope_cos", "rope_sin"] };

/// What all blocks of the text's or of the picture's rows read.
struct Stream {
    rows: Dim,
    /// Scale (1 added) and gate of attention, then of the feed-forward.
    modulation: [ValueId; 4],
    cos: ValueId,
    sin: ValueId,
}

impl<'a> Transformer<'a> {
    /// The text's part. Inputs, f32: `prompt_embeds` [1,text_seq,hidden], `mod` [4,width] of noise level 0, `mask`
    /// [1,1,text_seq,text_seq] (causal, added to scores), `rope_cos`, `rope_sin` [text_seq, head_dim/2]. Outputs in the compute
    /// type: `k0`, `v0`, `k1`, ... [1,text_seq,width], keys normalised and rotated.
    pub fn prefix(&self) -> Result<Model, QwenImageError> {
        let mut a = Author::new("prefix", self.weights, self.precision);
        let keys = self.text_keys(&mut a, &PREFIX)?;
        for (block, pair) in keys.into_iter().enumerate() {
            for (name, value) in key_names(block).iter().zip(pair) {
                a.graph.output(value, name, &self.sequence(TEXT_ROWS));
            }
        }
        Ok(a.finish())
    }

    /// A step. Inputs: f32 `latents` [1,image_seq,channels], `mod` [4,width] and `mod_out` [1,width] of the step's noise level,
    /// `rope_cos`, `rope_sin` [image_seq, head_dim/2], and what `prefix` gives. Output: `pred`, the velocity,
    /// [1,image_seq,channels], f32. As a single graph it takes what `prefix` takes in place of what that gives, the names with
    /// `text_` before them. `prefix` lends its weights.
    pub fn step(&self, graphs: Graphs, prefix: Option<&Model>) -> Result<Model, QwenImageError> {
        let c = self.config;
        let mut a = Author::new("transformer", self.weights, self.precision).sharing(prefix);
        let dims = |channels| [Dim::Fixed(1), Dim::Symbol(IMAGE.rows.to_owned()), Dim::Fixed(channels)];
        let latents = a.graph.input("latents", DType::F32, &dims(c.in_channels));
        let stream = self.stream(&mut a, &IMAGE);
        let scale = a.graph.input("mod_out", DType::F32, &[Dim::Fixed(1), Dim::Fixed(c.width())]);
        let scale = a.graph.row(scale, 0);
        let text = match graphs {
            Graphs::Prefix => self.key_inputs(&mut a),
            Graphs::Single => self.text_keys(&mut a, &TEXT)?,
        };

        let x = a.to_compute(latents);
        let x = a.project(x, "img_in.weight", c.in_channels, c.width())?;
        let mut x = carry(&mut a, x);
        a.graph.label(x, "dit_x_in");
        for (block, text) in text.into_iter().enumerate() {
            x = self.image_block(&mut a, &stream, block, x, text)?;
            a.graph.label(x, &format!("dit_block{block}"));
        }
        let x = a.to_f32(x);
        let y = adaptive_layer_norm(&mut a, x, scale, None, c.eps);
        a.graph.label(y, "dit_norm_out");
        let y = a.to_compute(y);
        let y = a.project(y, "proj_out.weight", c.width(), c.outputs())?;
        let pred = a.to_f32(y);
        a.graph.output(pred, "pred", &dims(c.outputs()));
        Ok(a.finish())
    }

    /// Rows of a value as wide as the model.
    fn sequence(&self, rows: &str) -> [Dim; 3] {
        [Dim::Fixed(1), Dim::Symbol(rows.to_owned()), Dim::Fixed(self.config.width())]
    }

    fn stream(&self, a: &mut Author<'_>, names: &Names) -> Stream {
        let rows = Dim::Symbol(names.rows.to_owned());
        let vectors = [Dim::Fixed(4), Dim::Fixed(self.config.width())];
        let modulation = a.graph.input(names.modulation, DType::F32, &vectors);
        let table = [rows.clone(), Dim::Fixed(self.config.attention_head_dim / 2)];
        let [cos, sin] = names.rope.map(|name| a.graph.input(name, DType::F32, &table));
        Stream {
            rows,
            modulation: [0, 1, 2, 3].map(|index| a.graph.row(modulation, index)),
            cos: a.to_compute(cos),
            sin: a.to_compute(sin),
        }
    }

    fn key_inputs(&self, a: &mut Author<'_>) -> Vec<KeyValue> {
        let dtype = a.compute();
        let dims = self.sequence(TEXT_ROWS);
        let blocks = 0..self.config.num_layers;
        blocks.map(|block| key_names(block).map(|name| a.graph.input(&name, dtype, &dims))).collect()
    }

    /// Keys and values of the text's rows for every block. The last block computes no more than these.
    fn text_keys(
        &self,
        a: &mut Author<'_>,
        (names, mask): &(Names, &str),
    ) -> Result<Vec<KeyValue>, QwenImageError> {
        let c = self.config;
        let dims = [Dim::Fixed(1), Dim::Symbol(names.rows.to_owned()), Dim::Fixed(c.context_in_dim)];
        let text = a.graph.input("prompt_embeds", DType::F32, &dims);
        let stream = self.stream(a, names);
        let square = [Dim::Fixed(1), Dim::Fixed(1), stream.rows.clone(), stream.rows.clone()];
        let mut mask = a.graph.input(mask, DType::F32, &square);
        if !self.constants.causal_text {
            let nothing = a.graph.scalar(DType::F32, 0.0);
            mask = a.graph.mul(mask, nothing);
        }
        let mut x = self.embed_text(a, text)?;
        let mut keys = Vec::with_capacity(c.num_layers);
        for block in 0..c.num_layers {
            let y = self.modulated(a, x, stream.modulation[0]);
            let own = self.key_value(a, &stream, block, y)?;
            keys.push(own);
            if block + 1 < c.num_layers {
                let q = self.query(a, &stream, block, y)?;
                let attended = self.text_attention(a, &stream, [q, own[0], own[1]], mask);
                x = self.rest_of_block(a, &stream, block, x, attended)?;
                a.graph.label(x, &format!("dit_text_block{block}"));
            }
        }
        Ok(keys)
    }

    /// A norm whose weight is its distance from 1, and two linears.
    fn embed_text(&self, a: &mut Author<'_>, text: ValueId) -> Result<ValueId, QwenImageError> {
        let (c, width) = (self.config, self.config.width());
        let mut scale = a.weight("txt_in.text_norm.weight", &[c.context_in_dim], DType::F32)?;
        if self.constants.zero_centred_norm {
            let one = a.graph.scalar(DType::F32, 1.0);
            scale = a.graph.add(scale, one);
        }
        let x = scaled_rms_norm(a, text, scale, c.eps);
        let x = a.to_compute(x);
        let x = a.project(x, "txt_in.in_layer.weight", c.context_in_dim, width)?;
        let x = a.to_f32(x);
        let x = a.graph.op("Gelu", &[x], &[("approximate", Attribute::String(b"tanh".to_vec()))]);
        let x = a.to_compute(x);
        let x = a.project(x, "txt_in.out_layer.weight", width, width)?;
        let x = carry(a, x);
        a.graph.label(x, "dit_ctx_in");
        Ok(x)
    }

    fn text_attention(
        &self,
        a: &mut Author<'_>,
        stream: &Stream,
        qkv: [ValueId; 3],
        mask: ValueId,
    ) -> ValueId {
        let (heads, head_dim) = (self.config.num_attention_heads, self.config.attention_head_dim);
        let like = a.graph.dtype(qkv[0]);
        let qkv = in_attention_type(a, qkv);
        let mask = if a.graph.dtype(qkv[0]) == DType::F32 { mask } else { a.to_compute(mask) };
        let sizes = Grouped { heads, kv_heads: heads, head_dim, rows: &stream.rows };
        let y = grouped_attention(a, qkv, mask, &sizes);
        a.graph.cast(y, like)
    }

    /// A block of the picture's rows, which attend to the text's, too.
    fn image_block(
        &self,
        a: &mut Author<'_>,
        stream: &Stream,
        block: usize,
        x: ValueId,
        text: KeyValue,
    ) -> Result<ValueId, QwenImageError> {
        let y = self.modulated(a, x, stream.modulation[0]);
        let q = self.query(a, stream, block, y)?;
        let own = self.key_value(a, stream, block, y)?;
        let [k, v] = [0, 1].map(|part| a.graph.concat(&[text[part], own[part]], 1));
        let [queries, keys] = [IMAGE.rows, "joint_seq"].map(|rows| self.sequence(rows));
        let heads = self.config.num_attention_heads;
        let attended = joint_attention(a, [q, k, v], [&queries, &keys], heads);
        self.rest_of_block(a, stream, block, x, attended)
    }

    /// LayerNorm, scaled, in the compute type.
    fn modulated(&self, a: &mut Author<'_>, x: ValueId, scale: ValueId) -> ValueId {
        let x = a.to_f32(x);
        let y = adaptive_layer_norm(a, x, scale, None, self.config.eps);
        a.to_compute(y)
    }

    fn query(
        &self,
        a: &mut Author<'_>,
        stream: &Stream,
        block: usize,
        y: ValueId,
    ) -> Result<ValueId, QwenImageError> {
        let width = self.config.width();
        let q = a.project(y, &weight(block, "attn.to_q"), width, width)?;
        self.normalise_and_rotate(a, stream, q, &weight(block, "attn.norm_q"))
    }

    fn key_value(
        &self,
        a: &mut Author<'_>,
        stream: &Stream,
        block: usize,
        y: ValueId,
    ) -> Result<KeyValue, QwenImageError> {
        let width = self.config.width();
        let k = a.project(y, &weight(block, "attn.to_k"), width, width)?;
        let k = self.normalise_and_rotate(a, stream, k, &weight(block, "attn.norm_k"))?;
        let v = a.project(y, &weight(block, "attn.to_v"), width, width)?;
        Ok([k, v])
    }

    /// RMSNorm of each head of [1, rows, heads*d], and its rotation.
    fn normalise_and_rotate(
        &self,
        a: &mut Author<'_>,
        stream: &Stream,
        x: ValueId,
        norm: &str,
    ) -> Result<ValueId, QwenImageError> {
        let (heads, d) = (self.config.num_attention_heads, self.config.attention_head_dim);
        let x = a.graph.reshape(x, &[0, 0, heads as i64, d as i64]);
        let x = rms_norm(a, x, norm, d, self.config.eps)?;
        let x = a.graph.reshape(x, &[0, 0, (heads * d) as i64]);
        Ok(rotate(a, x, stream.cos, stream.sin, heads, self.constants.rope_pairing))
    }

    /// What comes after the attention of a block: its projection, and the feed-forward.
    fn rest_of_block(
        &self,
        a: &mut Author<'_>,
        stream: &Stream,
        block: usize,
        x: ValueId,
        attended: ValueId,
    ) -> Result<ValueId, QwenImageError> {
        let (width, inner) = (self.config.width(), self.config.mlp_width());
        let [_, attention_gate, scale, gate] = stream.modulation;
        let branch = a.project(attended, &weight(block, "attn.to_out.0"), width, width)?;
        let x = add_branch(a, x, branch, Some(attention_gate));
        let y = self.modulated(a, x, scale);
        let gated = a.project(y, &weight(block, "img_mlp.gate_layer"), width, inner)?;
        let up = a.project(y, &weight(block, "img_mlp.proj"), width, inner)?;
        let y = swiglu(a, gated, up);
        let branch = a.project(y, &weight(block, "img_mlp.out"), inner, width)?;
        Ok(add_branch(a, x, branch, Some(gate)))
    }
}

fn weight(block: usize, layer: &str) -> String {
    format!("transformer_blocks.{block}.{layer}.weight")
}

/// Names of a block's keys and values between the graphs.
fn key_names(block: usize) -> [String; 2] {
    [format!("k{block}"), format!("v{block}")]
}
