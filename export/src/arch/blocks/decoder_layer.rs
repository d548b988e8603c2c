//! The decoder layer of Qwen3's text models: grouped-query attention with normalised heads, and a gated feed-forward.
//! Source: specs of transformers' Qwen3Model, which Qwen3-VL's text stack is but for its positions.

use super::{
    attention::{Grouped, grouped_attention, reshaped_rows},
    mlp::swiglu,
    norm::rms_norm,
    rope::{Pairing, rotate},
    stream::add_branch,
};
use crate::{
    arch::author::{Author, AuthorError, Linear},
    onnx::{Dim, ValueId},
};

/// Sizes of a layer.
pub struct DecoderLayer {
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub eps: f32,
    pub attention_bias: bool,
    /// Whether queries and keys are normalised (they are; a test plants the other value).
    pub head_norms: bool,
    pub rows: Dim,
}

/// What every layer reads: `mask` [1,1,rows,rows], added to scores, and the rotary tables [rows, head_dim/2].
pub struct Positions {
    pub mask: ValueId,
    pub cos: ValueId,
    pub sin: ValueId,
}

impl DecoderLayer {
    /// The residual stream [1,rows,hidden] after the layer whose weights begin with `prefix`.
    pub fn author(
        &self,
        a: &mut Author<'_>,
        prefix: &str,
        x: ValueId,
        positions: &Positions,
    ) -> Result<ValueId, AuthorError> {
        let (hidden, intermediate) = (self.hidden, self.intermediate);
        let y = self.stream_norm(a, x, &format!("{prefix}input_layernorm.weight"))?;
        let attended = self.attention(a, &format!("{prefix}self_attn."), y, positions)?;
        let x = add_branch(a, x, attended, None);
        let y = self.stream_norm(a, x, &format!("{prefix}post_attention_layernorm.weight"))?;
        let gate = a.project(y, &format!("{prefix}mlp.gate_proj.weight"), hidden, intermediate)?;
        let up = a.project(y, &format!("{prefix}mlp.up_proj.weight"), hidden, intermediate)?;
        let y = swiglu(a, gate, up);
        let y = a.project(y, &format!("{prefix}mlp.down_proj.weight"), intermediate, hidden)?;
        Ok(add_branch(a, x, y, None))
    }

    /// RMSNorm of the stream in f32, then the compute type.
    fn stream_norm(&self, a: &mut Author<'_>, x: ValueId, weight: &str) -> Result<ValueId, AuthorError> {
        let x = a.to_f32(x);
        let y = rms_norm(a, x, weight, self.hidden, self.eps)?;
        Ok(a.to_compute(y))
    }

    fn attention(
        &self,
        a: &mut Author<'_>,
        prefix: &str,
        x: ValueId,
        positions: &Positions,
    ) -> Result<ValueId, AuthorError> {
        let (heads, kv_heads, d) = (self.heads, self.kv_heads, self.head_dim);
        let project = |a: &mut Author<'_>, x, name: &str, inputs, outputs| {
            let bias = format!("{prefix}{name}.bias");
            let bias = self.attention_bias.then_some(bias.as_str());
            a.linear(x, &Linear { weight: &format!("{prefix}{name}.weight"), bias, inputs, outputs })
        };
        let q = project(a, x, "q_proj", self.hidden, heads * d)?;
        let k = project(a, x, "k_proj", self.hidden, kv_heads * d)?;
        let v = project(a, x, "v_proj", self.hidden, kv_heads * d)?;
        let q = self.head_norm(a, q, &format!("{prefix}q_norm.weight"), heads)?;
        let q = rotate(a, q, positions.cos, positions.sin, heads, Pairing::HalfSplit);
        let k = self.head_norm(a, k, &format!("{prefix}k_norm.weight"), kv_heads)?;
        let k = rotate(a, k, positions.cos, positions.sin, kv_heads, Pairing::HalfSplit);
        let sizes = Grouped { heads, kv_heads, head_dim: d, rows: &self.rows };
        let y = grouped_attention(a, [q, k, v], positions.mask, &sizes);
        project(a, y, "o_proj", heads * d, self.hidden)
    }

    fn head_norm(
        &self,
        a: &mut Author<'_>,
        x: ValueId,
        weight: &str,
        heads: usize,
    ) -> Result<ValueId, AuthorError> {
        if !self.head_norms {
            return Ok(x);
        }
        let (rows, d) = (reshaped_rows(&self.rows, 0), self.head_dim);
        let x = a.graph.reshape(x, &[1, rows, heads as i64, d as i64]);
        let x = rms_norm(a, x, weight, d, self.eps)?;
        Ok(a.graph.reshape(x, &[1, rows, (heads * d) as i64]))
    }
}
