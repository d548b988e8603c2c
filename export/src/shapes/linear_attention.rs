//! Linear attention and the causal convolutions before it: operators that carry a state from call to call.

use super::{
    Call, Dims, Fact, Row,
    attention::share,
    call::{agree, product, unknown_dims},
};
use crate::onnx::DType;

pub(super) const LINEAR_ATTENTION: &[Row] = &[
    ("", "LinearAttention", linear_attention),
    ("", "CausalConvWithState", causal_conv),
    ("com.microsoft", "LinearAttention", linear_attention),
    ("com.microsoft", "LinearAttentionGate", linear_attention_gate),
    ("com.microsoft", "GatedDeltaNet", gated_delta_net),
    ("com.microsoft", "CausalConvWithState", causal_conv),
    ("com.microsoft", "VarlenCausalConvWithState", causal_conv_of_varying_length),
];

/// Query, key and value [B, T, heads * size] give [B, T, heads * value size] and the state
/// [B, key heads, key size, value size], which has one more axis in front where a window of states is kept.
fn linear_attention(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (query_heads, key_heads) = (count(call, "q_num_heads")?, count(call, "kv_num_heads")?);
    let [query, key, value] = [rows(call, 0)?, rows(call, 1)?, rows(call, 2)?];
    let size = agree(share(query[2], Some(query_heads))?, share(key[2], Some(key_heads))?)
        .map_err(|problem| format!("heads of query and key: {problem}"))?;
    let value_size = share(value[2], Some(key_heads))?;
    let batch = agree(agree(query[0], key[0])?, value[0])?;
    let length = agree(agree(query[1], key[1])?, value[1])?;
    let row = product(&[Some(query_heads.max(key_heads)), value_size])?;
    let window = positive(call, "state_window")?.map(Some);
    let state = window.into_iter().chain([batch, Some(key_heads), size, value_size]).collect();
    Ok(vec![
        Fact::partial(call.dtype(0), Some(vec![batch, length, row])),
        Fact::partial(call.dtype(3).or(call.dtype(0)), Some(state)),
    ])
}

/// a and b [B, T, heads] give the decay and the update rate.
fn linear_attention_gate(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let a = call.same_as(0)?;
    let beta = if call.input(3).is_some() { call.same_as(3)? } else { a.clone() };
    Ok(vec![a, beta])
}

/// Query, key and value [tokens..., heads, size] with a state [B, value heads, value size, key size].
fn gated_delta_net(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let state = call.dims(6).map_or_else(|| unknown_dims(4), <[_]>::to_vec);
    let &[batch, heads, value_size, size] = &state[..] else {
        return Err(format!("a state of rank {}", state.len()));
    };
    let (result, key_heads) = match (call.dims(0), call.dims(1), call.dims(2)) {
        // Packed: tokens, and a row of two times the key heads and the value heads.
        (Some([tokens, row]), None, None) => {
            let values = product(&[heads, value_size])?;
            let keys =
                row.zip(values).map(|(row, values)| row.checked_sub(values).ok_or("rows are too short"));
            let key_heads = share(keys.transpose()?, product(&[size, Some(2)])?)?;
            (Some(vec![*tokens, heads, value_size]), key_heads)
        }
        (_, key, Some(value)) => {
            (Some(value.to_vec()), key.and_then(|key| key.len().checked_sub(2).and_then(|at| key[at])))
        }
        _ => (None, None),
    };
    let mut facts =
        vec![Fact::partial(call.dtype(0), result), Fact::partial(Some(DType::F32), Some(state.clone()))];
    if let Some(capacity) = positive(call, "state_update_capacity")? {
        let parts = [heads, product(&[key_heads, size])?, product(&[heads, value_size])?];
        let sum = parts.into_iter().try_fold(0usize, |sum, part| sum.checked_add(part?));
        let row = product(&[Some(capacity), sum])?;
        facts.push(Fact::partial(Some(DType::F32), Some(vec![batch, row])));
    }
    Ok(facts)
}

/// Input [B, channels, spatial...] and weights [channels, 1, kernel...] give a result of the input's shape and, along
/// one spatial axis, the state [B, channels, (kernel - 1) * dilation].
fn causal_conv(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let y = call.same_as(0)?;
    let dtype = call.dtype(3).or(y.dtype);
    if call.attr_int("ndim", 1) != 1 {
        let state = if call.input(3).is_some() { call.same_as(3)? } else { Fact::partial(dtype, None) };
        return Ok(vec![y, state]);
    }
    let Some(x) = &y.shape else { return Ok(vec![y, Fact::partial(dtype, None)]) };
    if x.len() < 3 {
        return Err(format!("an input of rank {}", x.len()));
    }
    let mut state = x.clone();
    let channels_last = call.attr_int("channels_last", 0) != 0;
    state[if channels_last { 1 } else { 2 }] = state_length(call)?;
    if !channels_last {
        agree(x[1], channels(call)).map_err(|problem| format!("channels of input and weights: {problem}"))?;
    }
    let window = positive(call, "state_window")?.map(Some);
    let state = window.into_iter().chain(state).collect();
    Ok(vec![y, Fact::partial(dtype, Some(state))])
}

/// Input [tokens, channels] with the sequences one after another, and a state per sequence.
fn causal_conv_of_varying_length(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let state = call.dims(4).map_or_else(|| unknown_dims(3), <[_]>::to_vec);
    let &[batch, stated, length] = &state[..] else { return Err(format!("a state of rank {}", state.len())) };
    let channels =
        agree(stated, channels(call)).map_err(|problem| format!("channels of the state: {problem}"))?;
    let length =
        agree(length, state_length(call)?).map_err(|problem| format!("length of the state: {problem}"))?;
    let mut facts = vec![call.same_as(0)?, Fact::partial(call.dtype(4), Some(vec![batch, channels, length]))];
    if let Some(capacity) = positive(call, "state_update_capacity")? {
        facts.push(Fact::partial(call.dtype(0), Some(vec![batch, Some(capacity), channels])));
    }
    Ok(facts)
}

fn channels(call: &Call<'_>) -> Option<usize> {
    call.dims(1).and_then(|dims| dims.first().copied()).flatten()
}

fn state_length(call: &Call<'_>) -> Result<Option<usize>, String> {
    let Some(kernel) = call.dims(1).and_then(|dims| dims.get(2).copied()).flatten() else { return Ok(None) };
    let before = kernel.checked_sub(1).ok_or("a kernel has size 0")?;
    product(&[Some(before), Some(positive(call, "dilation")?.unwrap_or(1))])
}

/// Three sizes: batch, length, row.
fn rows(call: &Call<'_>, input: usize) -> Result<Dims, String> {
    let dims = call.dims(input).map_or_else(|| unknown_dims(3), <[_]>::to_vec);
    if dims.len() == 3 { Ok(dims) } else { Err(format!("input {input} has rank {}", dims.len())) }
}

fn count(call: &Call<'_>, name: &str) -> Result<usize, String> {
    positive(call, name)?.ok_or_else(|| format!("{name} is missing"))
}

/// An attribute that counts something; `None` if it is absent or zero.
fn positive(call: &Call<'_>, name: &str) -> Result<Option<usize>, String> {
    let stated = call.attr_int(name, 0);
    let value = usize::try_from(stated).map_err(|_| format!("{name} is {stated}"))?;
    Ok(Some(value).filter(|value| *value > 0))
}
