//! Pools: windows of which one element is left.

use super::{
    Call, Dims, Fact, Row,
    call::{agree, unknown_dims},
    window::{Window, channels_last, spatial},
};
use crate::onnx::DType;

pub(super) const POOL: &[Row] = &[
    ("", "AveragePool", pool),
    ("", "LpPool", pool),
    ("", "MaxPool", pool),
    ("", "GlobalAveragePool", global_pool),
    ("", "GlobalLpPool", global_pool),
    ("", "GlobalMaxPool", global_pool),
    ("", "MaxUnpool", max_unpool),
    ("", "RoiAlign", roi_align),
    ("", "MaxRoiPool", max_roi_pool),
    ("com.ms.internal.nhwc", "AveragePool", |call| channels_last(call, pool)),
    ("com.ms.internal.nhwc", "LpPool", |call| channels_last(call, pool)),
    ("com.ms.internal.nhwc", "MaxPool", |call| channels_last(call, max_pool_nhwc)),
    ("com.ms.internal.nhwc", "GlobalAveragePool", |call| channels_last(call, global_pool)),
    ("com.ms.internal.nhwc", "GlobalLpPool", |call| channels_last(call, global_pool)),
    ("com.ms.internal.nhwc", "GlobalMaxPool", |call| channels_last(call, global_pool)),
    ("com.microsoft", "NhwcMaxPool", |call| channels_last(call, max_pool_nhwc)),
    ("com.microsoft", "QLinearAveragePool", |call| by_layout(call, pool)),
    ("com.microsoft", "QLinearGlobalAveragePool", |call| by_layout(call, global_pool)),
];

/// x [N, C, spatial...] gives [N, C, places...], and for MaxPool the places of the maxima, of the same shape.
fn pool(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    call.attr_ints("kernel_shape").ok_or("kernel_shape is missing")?;
    let Some(x) = call.dims(0) else { return Ok(both(call, None)) };
    let window = Window::of(call, &unknown_dims(spatial(x)?.len()))?;
    Ok(both(call, Some([x[..2].to_vec(), window.places(spatial(x)?)?].concat())))
}

fn both(call: &Call<'_>, shape: Option<Dims>) -> Vec<Fact> {
    vec![Fact::partial(call.dtype(0), shape.clone()), Fact::partial(Some(DType::I64), shape)]
}

/// Channels-last nodes have the pooled values only.
fn max_pool_nhwc(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    pool(call).map(|facts| facts.into_iter().take(1).collect())
}

fn by_layout(
    call: &Call<'_>,
    rule: impl Fn(&Call<'_>) -> Result<Vec<Fact>, String>,
) -> Result<Vec<Fact>, String> {
    match call.attr_int("channels_last", 0) {
        0 => rule(call),
        _ => channels_last(call, rule),
    }
}

fn global_pool(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let mut y = call.same_as(0)?;
    if let Some(dims) = &mut y.shape {
        spatial(dims)?;
        dims[2..].fill(Some(1));
    }
    Ok(vec![y])
}

/// The inverse of MaxPool; its third input states the sizes, which the window alone does not determine.
fn max_unpool(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let dtype = call.dtype(0);
    let Some(x) = call.dims(0) else { return Ok(vec![Fact::partial(dtype, None)]) };
    let axes = spatial(x)?.len();
    let shape = match call.input(2) {
        None => {
            let window = Window::of(call, &unknown_dims(axes))?;
            [x[..2].to_vec(), window.transposed(&x[2..], &vec![0; axes])?].concat()
        }
        Some(sizes) => match sizes.ints() {
            Some(sizes) if sizes.len() != x.len() => {
                return Err(format!("output_shape {sizes:?} for a tensor of rank {}", x.len()));
            }
            Some(sizes) => sizes.iter().map(|size| usize::try_from(*size).ok()).collect(),
            None => unknown_dims(x.len()),
        },
    };
    Ok(vec![Fact::partial(dtype, Some(shape))])
}

/// x [N, C, H, W] and regions [R, 4] give [R, C, output_height, output_width].
fn roi_align(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let size = |name| positive(name, call.attr_int(name, 1));
    regions(call, size("output_height")?, size("output_width")?)
}

/// x [N, C, H, W] and regions [R, 5] give [R, C, pooled...].
fn max_roi_pool(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    match call.attr_ints("pooled_shape") {
        Some([height, width]) => {
            regions(call, positive("pooled_shape", *height)?, positive("pooled_shape", *width)?)
        }
        other => Err(format!("pooled_shape is {other:?}")),
    }
}

fn regions(call: &Call<'_>, height: usize, width: usize) -> Result<Vec<Fact>, String> {
    let x = call.dims(0).map_or_else(|| unknown_dims(4), <[_]>::to_vec);
    if x.len() != 4 {
        return Err(format!("regions of a tensor of rank {}", x.len()));
    }
    let count = |input: usize| call.dims(input).and_then(|dims| dims.first().copied()).flatten();
    let count = agree(count(1), count(2)).map_err(|problem| format!("number of regions: {problem}"))?;
    Ok(vec![Fact::partial(call.dtype(0), Some(vec![count, x[1], Some(height), Some(width)]))])
}

fn positive(name: &str, value: i64) -> Result<usize, String> {
    usize::try_from(value).ok().filter(|size| *size > 0).ok_or_else(|| format!("{name} is {value}"))
}
