//! Fourier transforms, windows and filters of signals.

use super::{
    Call, Dims, Fact, Row,
    call::{Setting, axis},
};
use crate::onnx::DType;

pub(super) const SIGNAL: &[Row] = &[
    ("", "DFT", dft),
    ("", "STFT", stft),
    ("", "BlackmanWindow", window),
    ("", "HannWindow", window),
    ("", "HammingWindow", window),
    ("", "MelWeightMatrix", mel_weights),
];

/// A size that an input of one element holds; `None` if it is not known.
fn size(call: &Call<'_>, input: usize) -> Result<Option<usize>, String> {
    let value = call.int(input);
    value.map(|value| usize::try_from(value).map_err(|_| format!("input {input} is {value}"))).transpose()
}

/// Frequencies of a transform; half of them suffice for a real signal.
fn frequencies(length: Option<usize>, onesided: bool) -> Option<usize> {
    length.map(|length| if onesided { length / 2 + 1 } else { length })
}

/// Signals [B, length..., 1 or 2] give [B, frequencies..., 2] along one axis.
fn dft(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let mut y = call.same_as(0)?;
    let onesided = call.attr_int("onesided", 0) != 0;
    let along = match call.opset {
        ..20 => Some(call.attr_int("axis", 1)),
        _ => match call.setting(2, "") {
            Setting::Absent => Some(-2),
            Setting::Unknown => None,
            Setting::Known(_) => call.int(2),
        },
    };
    let Some(dims) = &mut y.shape else { return Ok(vec![y]) };
    let last = dims.len().checked_sub(1).ok_or("a signal without axes")?;
    // The inverse of half a spectrum is a real signal, whose length the spectrum does not tell.
    let real = onesided && call.attr_int("inverse", 0) != 0;
    match along {
        None => dims[..last].fill(None),
        Some(along) => {
            let at = axis(along, dims.len())?;
            if at == last {
                return Err("the axis of the transform is that of the complex parts".to_owned());
            }
            let length = if call.input(1).is_some() { size(call, 1)? } else { dims[at].filter(|_| !real) };
            dims[at] = frequencies(length, onesided && !real);
        }
    }
    dims[last] = if real { None } else { Some(2) };
    Ok(vec![y])
}

/// A signal [B, length, 1 or 2] or [B, length], a step, a window and the frame's length give
/// [B, frames, frequencies, 2].
fn stft(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let signal = call.dims(0);
    if let Some(dims) = signal.filter(|dims| !(2..=3).contains(&dims.len())) {
        return Err(format!("a signal of rank {}", dims.len()));
    }
    let at = |index: usize| signal.and_then(|dims| dims[index]);
    let window = call.dims(2).and_then(|dims| dims.first().copied()).flatten();
    let length = if call.input(3).is_some() { size(call, 3)? } else { window };
    let frames = match (at(1), length, size(call, 1)?) {
        (_, _, Some(0)) => return Err("frames with a step of 0".to_owned()),
        (Some(signal), Some(length), Some(step)) => {
            let room = signal.checked_sub(length);
            let room = room.ok_or_else(|| format!("a signal of {signal} for frames of {length}"))?;
            (room / step).checked_add(1)
        }
        _ => None,
    };
    let onesided = call.attr_int("onesided", 1) != 0;
    let shape: Dims = vec![at(0), frames, frequencies(length, onesided), Some(2)];
    Ok(vec![Fact::partial(call.dtype(0), Some(shape))])
}

fn window(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let dtype = call.attr_dtype("output_datatype").unwrap_or(DType::F32);
    Ok(vec![Fact::partial(Some(dtype), Some(vec![size(call, 0)?]))])
}

/// Inputs: number of bands, length of the transform. The result is [frequencies, bands].
fn mel_weights(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let dtype = call.attr_dtype("output_datatype").unwrap_or(DType::F32);
    let shape = vec![frequencies(size(call, 1)?, true), size(call, 0)?];
    Ok(vec![Fact::partial(Some(dtype), Some(shape))])
}
