//! Attention, its caches, and rotary position embeddings.

use super::{
    Call, Dims, Fact, Row,
    call::{agree, product, unknown_dims},
};
use crate::onnx::DType;

pub(super) const ATTENTION: &[Row] = &[
    ("", "Attention", attention),
    ("", "RotaryEmbedding", same),
    ("", "TensorScatter", same),
    ("com.microsoft", "Attention", |call| attention_with_projection(call, 1, 4, call.dtype(0))),
    ("com.microsoft", "QAttention", |call| attention_with_projection(call, 1, 8, call.dtype(3))),
    ("com.microsoft", "MultiHeadAttention", multi_head_attention),
    ("com.microsoft", "GroupQueryAttention", group_query_attention),
    ("com.microsoft", "SparseAttention", sparse_attention),
    ("com.microsoft", "PackedAttention", |call| {
        attention_with_projection(call, 1, usize::MAX, call.dtype(0))
    }),
    ("com.microsoft", "PackedMultiHeadAttention", packed_multi_head_attention),
    ("com.microsoft", "PagedAttention", paged_attention),
    ("com.microsoft", "RotaryEmbedding", same),
    ("com.microsoft", "MRotaryEmbedding", same),
    ("com.microsoft", "GemmaRotaryEmbedding", |call| Ok(vec![call.same_as(1)?, call.same_as(3)?])),
];

fn same(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    Ok(vec![call.same_as(0)?])
}

/// The four sizes of a tensor of heads.
#[derive(Clone, Copy)]
struct Heads {
    batch: Option<usize>,
    heads: Option<usize>,
    length: Option<usize>,
    size: Option<usize>,
}

impl Heads {
    /// Heads that lie side by side, [batch, length, heads * size], or as an axis, [batch, heads, length, size].
    fn of(dims: Option<&[Option<usize>]>, heads: Option<usize>) -> Result<Heads, String> {
        Ok(match dims {
            None => Heads { batch: None, heads, length: None, size: None },
            Some(&[batch, length, row]) => Heads { batch, heads, length, size: share(row, heads)? },
            Some(&[batch, stated, length, size]) => {
                Heads { batch, heads: agree(stated, heads)?, length, size }
            }
            Some(dims) => return Err(format!("heads in a tensor of rank {}", dims.len())),
        })
    }

    /// [batch, heads, length, size].
    fn dims(self) -> Dims {
        vec![self.batch, self.heads, self.length, self.size]
    }

    fn row(self) -> Result<Option<usize>, String> {
        product(&[self.heads, self.size])
    }
}

/// The part of each of `count` heads in a row.
pub(super) fn share(row: Option<usize>, count: Option<usize>) -> Result<Option<usize>, String> {
    match (row, count) {
        (Some(row), Some(count)) if count == 0 || row % count != 0 => {
            Err(format!("rows of {row} for {count} heads"))
        }
        (row, count) => Ok(row.zip(count).map(|(row, count)| row / count)),
    }
}

/// A number of heads; `None` where the node does not state it.
fn heads(call: &Call<'_>, name: &str) -> Result<Option<usize>, String> {
    let Some(stated) = call.node.int(name).filter(|stated| *stated != 0) else { return Ok(None) };
    usize::try_from(stated).map(Some).map_err(|_| format!("{name} is {stated}"))
}

fn sum(sizes: [Option<usize>; 2]) -> Result<Option<usize>, String> {
    let [Some(a), Some(b)] = sizes else { return Ok(None) };
    a.checked_add(b).map(Some).ok_or_else(|| format!("{a} and {b} add up to too many"))
}

fn size_at(call: &Call<'_>, input: usize, axis: usize) -> Option<usize> {
    call.dims(input).and_then(|dims| dims.get(axis).copied()).flatten()
}

/// Inputs: query, key, value, mask, past key, past value. Outputs: the result in the query's form, the keys and the
/// values with the past ones before them, and the scores.
fn attention(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let key_heads = heads(call, "kv_num_heads")?;
    let query = Heads::of(call.dims(0), heads(call, "q_num_heads")?)?;
    let (mut key, mut value) = (Heads::of(call.dims(1), key_heads)?, Heads::of(call.dims(2), key_heads)?);
    (key.batch, value.batch) = (agree(query.batch, key.batch)?, agree(query.batch, value.batch)?);
    agree(query.size, key.size).map_err(|problem| format!("heads of query and key: {problem}"))?;
    let length = agree(key.length, value.length).map_err(|problem| format!("keys and values: {problem}"))?;
    let past = if call.input(4).is_some() { size_at(call, 4, 2) } else { Some(0) };
    let total = sum([past, length])?;
    (key.length, value.length) = (total, total);
    let result = Heads { size: value.size, ..query };
    let shape = match call.dims(0).map(<[_]>::len) {
        None => None,
        Some(3) => Some(vec![query.batch, query.length, result.row()?]),
        Some(_) => Some(result.dims()),
    };
    let scores = Heads { size: total, ..query };
    Ok(vec![
        Fact::partial(call.dtype(0), shape),
        Fact::partial(call.dtype(1), Some(key.dims())),
        Fact::partial(call.dtype(2), Some(value.dims())),
        Fact::partial(call.dtype(0), Some(scores.dims())),
    ])
}

/// Input [batch..., input row] and weights [input row, query + key + value rows] give [batch..., value row], and the
/// keys and values [2, batch, heads, length, size] with the past ones before them.
fn attention_with_projection(
    call: &Call<'_>,
    weights: usize,
    past: usize,
    dtype: Option<DType>,
) -> Result<Vec<Fact>, String> {
    let row = match call.attr_ints("qkv_hidden_sizes") {
        Some([_, _, row]) => Some(usize::try_from(*row).map_err(|_| format!("values of {row}"))?),
        Some(sizes) => return Err(format!("qkv_hidden_sizes has {} entries", sizes.len())),
        None => share(size_at(call, weights, 1), Some(3))?,
    };
    let mut shape = call.same_as(0)?.shape;
    if let Some(last) = shape.as_mut().and_then(|dims| dims.last_mut()) {
        agree(*last, size_at(call, weights, 0))
            .map_err(|problem| format!("rows of input and weights: {problem}"))?;
        *last = row;
    }
    let y = Fact::partial(dtype, shape);
    let count = heads(call, "num_heads")?;
    let length = match call.input(past) {
        None => size_at(call, 0, 1),
        Some(_) if call.attr_int("past_present_share_buffer", 0) != 0 => size_at(call, past, 3),
        Some(_) => sum([size_at(call, past, 3), size_at(call, 0, 1)])?,
    };
    let present = vec![Some(2), size_at(call, 0, 0), count, length, share(row, count)?];
    Ok(vec![y, Fact::partial(dtype, Some(present))])
}

/// Query [B, S, N * H] with key and value in the same form, as heads [B, N, L, H], or packed into the query
/// [B, S, N, 3, H] or the key [B, L, N, 2, H]. Outputs: result, present key, present value, scores.
fn multi_head_attention(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let count = heads(call, "num_heads")?;
    let packed =
        |dims: &[Option<usize>]| Heads { batch: dims[0], heads: dims[2], length: dims[1], size: dims[4] };
    let query = match call.dims(0) {
        Some(dims) if dims.len() == 5 => packed(dims),
        dims => Heads::of(dims, count)?,
    };
    let (key, value) = match (call.dims(0), call.dims(1)) {
        (Some(dims), _) if dims.len() == 5 => (query, query),
        (_, Some(dims)) if dims.len() == 5 => (packed(dims), packed(dims)),
        (_, key) => (Heads::of(key, count)?, Heads::of(call.dims(2), count)?),
    };
    agree(query.size, key.size).map_err(|problem| format!("heads of query and key: {problem}"))?;
    let new = agree(key.length, value.length).map_err(|problem| format!("keys and values: {problem}"))?;
    let shared = call.input(8).is_some();
    let total = match call.input(6) {
        None => new,
        Some(_) if shared => size_at(call, 6, 2),
        Some(_) => sum([size_at(call, 6, 2), new])?,
    };
    let dtype = call.dtype(0);
    let present = |of: Heads| Heads { batch: query.batch, length: total, ..of }.dims();
    let result = Heads { size: value.size, ..query };
    let shape = vec![query.batch, query.length, result.row()?];
    // With a shared buffer the scores cover what is filled of it, which only its contents tell.
    let scores = Heads { size: total.filter(|_| !shared), ..query };
    Ok(vec![
        Fact::partial(dtype, Some(shape)),
        Fact::partial(dtype, Some(present(key))),
        Fact::partial(dtype, Some(present(value))),
        // The graph chooses the type of the scores.
        Fact::partial(None, Some(scores.dims())),
    ])
}

/// The heads of a query [B, S, row], into which key and value may be packed, and those of the key.
fn grouped_heads(call: &Call<'_>) -> Result<(Heads, Heads), String> {
    let (count, key_count) = (heads(call, "num_heads")?, heads(call, "kv_num_heads")?);
    let query = call.dims(0).map_or_else(|| unknown_dims(3), <[_]>::to_vec);
    let &[batch, length, row] = &query[..] else {
        return Err(format!("a query of rank {}", query.len()));
    };
    let in_row = match call.input(1) {
        Some(_) => count,
        None => sum([count, product(&[key_count, Some(2)])?])?,
    };
    let size = share(row, in_row)?;
    let key = Heads::of(call.dims(1), key_count)?;
    let size = agree(size, key.size).map_err(|problem| format!("heads of query and key: {problem}"))?;
    let query = Heads { batch, heads: count, length, size };
    Ok((query, Heads { batch, heads: key_count, length: key.length.or(length), size }))
}

/// Inputs: query, key, value, past key, past value, lengths, total length. The caches that come out are as long as
/// the total length and no shorter than those that went in, whether or not they share a buffer.
fn group_query_attention(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (query, key) = grouped_heads(call)?;
    let total = call.int(6).and_then(|total| usize::try_from(total).ok());
    let cache = |past: usize| -> Result<Fact, String> {
        let Some(fact) = call.input(past) else {
            return Ok(Fact::partial(call.dtype(0), Some(Heads { length: total, ..key }.dims())));
        };
        let mut dims = fact.shape.clone().unwrap_or_else(|| vec![key.batch, key.heads, None, None]);
        if dims.len() != 4 {
            return Err(format!("a cache of rank {}", dims.len()));
        }
        if call.attr_int("sliding_window_cache", 0) == 0 {
            dims[2] = dims[2].zip(total).map(|(past, total)| past.max(total));
        }
        Ok(Fact::partial(fact.dtype, Some(dims)))
    };
    let scores = Heads { size: total, ..query };
    let result = Fact::partial(call.dtype(0), Some(vec![query.batch, query.length, query.row()?]));
    Ok(vec![result, cache(3)?, cache(4)?, Fact::partial(call.dtype(0), Some(scores.dims()))])
}

/// The caches are updated in place.
fn sparse_attention(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (query, _) = grouped_heads(call)?;
    let result = Fact::partial(call.dtype(0), Some(vec![query.batch, query.length, query.row()?]));
    Ok(vec![result, call.same_as(3)?, call.same_as(4)?])
}

/// Query [tokens, row] or [tokens, heads, 3, size] gives [tokens, value row].
fn packed_multi_head_attention(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let shape = match call.dims(0) {
        None => vec![None, size_at(call, 2, 1)],
        Some(&[tokens, _]) => vec![tokens, size_at(call, 2, 1)],
        Some(&[tokens, heads, _, size]) => vec![tokens, product(&[heads, size])?],
        Some(dims) => return Err(format!("a query of rank {}", dims.len())),
    };
    Ok(vec![Fact::partial(call.dtype(0), Some(shape))])
}

/// Query [tokens, row], into which key and value may be packed; the caches are updated in place.
fn paged_attention(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (count, key_count) = (heads(call, "num_heads")?, heads(call, "kv_num_heads")?);
    let (tokens, row) = match call.dims(0) {
        None => (None, None),
        Some(&[tokens, row]) => (tokens, row),
        Some(dims) => return Err(format!("a query of rank {}", dims.len())),
    };
    let in_row = match call.input(1) {
        Some(_) => count,
        None => sum([count, product(&[key_count, Some(2)])?])?,
    };
    let size = match heads(call, "v_head_size")? {
        Some(size) => Some(size),
        None => share(row, in_row)?,
    };
    let mut facts = vec![Fact::partial(call.dtype(0), Some(vec![tokens, product(&[count, size])?]))];
    for cache in [3, 4] {
        facts.push(if call.input(cache).is_some() { call.same_as(cache)? } else { Fact::default() });
    }
    Ok(facts)
}
