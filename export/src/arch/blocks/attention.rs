//! Attention in the two forms that bundles carry: joint attention as one operator, which the runner lowers per
//! device, and masked grouped-query attention, written out.

use crate::{
    arch::author::Author,
    onnx::{Attribute, DType, Dim, ValueId},
    recipe::AttentionMath,
};

/// Softmax(q k^T / sqrt(d)) v without a mask, in the type of attention. The shapes [1, rows, heads*d] of q and of k and v
/// are recorded in the graph: from them the runner computes how large the scores would be. The result has the type of q.
pub fn joint_attention(
    a: &mut Author<'_>,
    qkv: [ValueId; 3],
    [queries, keys]: [&[Dim; 3]; 2],
    heads: usize,
) -> ValueId {
    let like = a.graph.dtype(qkv[0]);
    let qkv = in_attention_type(a, qkv);
    for (value, shape) in qkv.into_iter().zip([queries, keys, keys]) {
        a.graph.record_shape(value, shape);
    }
    let y = a.graph.contrib("MultiHeadAttention", &qkv, &[("num_heads", Attribute::Int(heads as i64))]);
    a.graph.cast(y, like)
}

/// The operands in the type in which attention multiplies and sums.
pub fn in_attention_type(a: &mut Author<'_>, qkv: [ValueId; 3]) -> [ValueId; 3] {
    let math = match a.precision.attention {
        AttentionMath::Compute => a.graph.dtype(qkv[0]),
        AttentionMath::F32 => DType::F32,
    };
    qkv.map(|value| a.graph.cast(value, math))
}

/// Sizes of grouped-query attention.
pub struct Grouped<'d> {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub rows: &'d Dim,
}

/// A number of rows in the shape of a Reshape: itself, or what a Reshape takes for one that is not known.
pub fn reshaped_rows(rows: &Dim, unknown: i64) -> i64 {
    match rows {
        Dim::Fixed(rows) => *rows as i64,
        _ => unknown,
    }
}

/// Masked attention where `heads / kv_heads` query heads share one key and value head. q is [1, rows, heads*d], k and
/// v [1, rows, kv_heads*d], `mask` [1,1,rows,rows] is added to the scores. The query heads of a group are laid below
/// each other, so that keys and values need no repetition.
pub fn grouped_attention(
    a: &mut Author<'_>,
    [q, k, v]: [ValueId; 3],
    mask: ValueId,
    sizes: &Grouped<'_>,
) -> ValueId {
    let Grouped { heads, kv_heads, head_dim, rows } = *sizes;
    let [heads, kv_heads, head_dim] = [heads, kv_heads, head_dim].map(|n| n as i64);
    // Where rows are at the same place as before, and where they are what is left.
    let [rows, rest] = [0, -1].map(|unknown| reshaped_rows(rows, unknown));
    let dtype = a.graph.dtype(q);
    let scale = a.graph.scalar(dtype, 1.0 / (head_dim as f32).sqrt());
    let q = a.graph.mul(q, scale);
    let q = a.graph.reshape(q, &[1, rows, heads, head_dim]);
    let q = a.graph.transpose(q, &[0, 2, 1, 3]);
    let q = a.graph.reshape(q, &[1, kv_heads, -1, head_dim]);
    let k = a.graph.reshape(k, &[1, rows, kv_heads, head_dim]);
    let k = a.graph.transpose(k, &[0, 2, 3, 1]);
    let v = a.graph.reshape(v, &[1, rows, kv_heads, head_dim]);
    let v = a.graph.transpose(v, &[0, 2, 1, 3]);
    let scores = a.graph.matmul(q, k);
    let scores = a.graph.reshape(scores, &[1, heads, rest, rows]);
    let scores = a.graph.add(scores, mask);
    let weights = a.graph.op("Softmax", &[scores], &[("axis", Attribute::Int(-1))]);
    let weights = a.graph.reshape(weights, &[1, kv_heads, -1, rows]);
    let y = a.graph.matmul(weights, v);
    let y = a.graph.reshape(y, &[1, heads, rest, head_dim]);
    let y = a.graph.transpose(y, &[0, 2, 1, 3]);
    a.graph.reshape(y, &[1, rows, heads * head_dim])
}
