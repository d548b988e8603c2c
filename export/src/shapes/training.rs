//! Losses and optimizers of training graphs.

use super::{Call, Fact, Row, call::agree};

pub(super) const TRAINING: &[Row] = &[
    ("", "NegativeLogLikelihoodLoss", loss),
    ("", "SoftmaxCrossEntropyLoss", loss),
    ("ai.onnx.preview.training", "Adagrad", |call| optimizer(call, 3, &[0, 2])),
    ("ai.onnx.preview.training", "Adam", |call| optimizer(call, 4, &[0, 2, 3])),
    ("ai.onnx.preview.training", "Momentum", |call| optimizer(call, 3, &[0, 2])),
];

/// Scores [N, classes, places...] and labels [N, places...] give a scalar or, unreduced, one loss per label. The
/// logarithms of the probabilities, which follow, have the scores' shape.
fn loss(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let scores = call.same_as(0)?;
    let mut places = call.required(1)?.shape.clone();
    if let Some(dims) = &scores.shape {
        let (batch, rest) =
            (dims.first().ok_or("scores without a batch")?, dims.get(2..).ok_or("scores without classes")?);
        let of_scores = [&[*batch], rest].concat();
        let labels = places.unwrap_or_else(|| of_scores.clone());
        if labels.len() != of_scores.len() {
            return Err(format!("scores of rank {} and labels of rank {}", dims.len(), labels.len()));
        }
        let both = labels.into_iter().zip(of_scores).map(|(label, score)| agree(label, score));
        places =
            Some(both.collect::<Result<_, _>>().map_err(|problem| format!("scores and labels: {problem}"))?);
    }
    let reduced = call.attr_str("reduction").unwrap_or("mean") != "none";
    let loss = Fact::partial(scores.dtype, if reduced { Some(Vec::new()) } else { places });
    Ok(vec![loss, scores])
}

/// After rate and step the inputs come in `groups` of one tensor per parameter each; `updated` groups come out again.
fn optimizer(call: &Call<'_>, groups: usize, updated: &[usize]) -> Result<Vec<Fact>, String> {
    let tensors = call.inputs.len().checked_sub(2).filter(|count| count % groups == 0);
    let tensors = tensors.ok_or_else(|| format!("{} inputs for groups of {groups}", call.inputs.len()))?;
    let parameters = tensors / groups;
    let of_group = |group: usize| (0..parameters).map(move |index| 2 + group * parameters + index);
    updated.iter().copied().flat_map(of_group).map(|index| call.same_as(index)).collect()
}
