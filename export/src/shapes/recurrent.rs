//! Recurrent networks.

use super::{
    Call, Fact, Row,
    call::{agree, unknown_dims},
};

pub(super) const RECURRENT: &[Row] =
    &[("", "RNN", recurrent), ("", "GRU", recurrent), ("", "LSTM", recurrent)];

/// Input [S, B, I] and recurrence weights [directions, gates, H] give all states [S, directions, B, H], the last state
/// [directions, B, H] and, for LSTM, the last cell of the same shape. Layout 1 has the batch first.
fn recurrent(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let sizes = |input: usize| {
        let dims = call.dims(input).map_or_else(|| unknown_dims(3), <[_]>::to_vec);
        <[Option<usize>; 3]>::try_from(dims).map_err(|dims| format!("input {input} has rank {}", dims.len()))
    };
    let [first, second, _] = sizes(0)?;
    let [weights, _, row] = sizes(2)?;
    let directions = match call.attr_str("direction").unwrap_or("forward") {
        "bidirectional" => 2,
        "forward" | "reverse" => 1,
        other => return Err(format!("direction '{other}' is unknown")),
    };
    let directions = agree(Some(directions), weights).map_err(|problem| format!("directions: {problem}"))?;
    let stated = call.node.int("hidden_size").and_then(|size| usize::try_from(size).ok());
    let hidden = agree(stated, row).map_err(|problem| format!("hidden size: {problem}"))?;
    let (all, last) = if call.attr_int("layout", 0) == 0 {
        (vec![first, directions, second, hidden], vec![directions, second, hidden])
    } else {
        (vec![first, second, directions, hidden], vec![first, directions, hidden])
    };
    let fact = |shape| Fact::partial(call.dtype(0), Some(shape));
    Ok(vec![fact(all), fact(last.clone()), fact(last)])
}
