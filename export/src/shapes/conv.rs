//! Convolutions.

use super::{
    Call, Dims, Fact, Row,
    call::{agree, product, unknown_dims},
    window::{Window, channels_last, spatial},
};
use crate::onnx::DType;

pub(super) const CONV: &[Row] = &[
    ("", "Conv", conv),
    ("", "ConvInteger", conv_integer),
    ("", "ConvTranspose", conv_transpose),
    ("", "QLinearConv", qlinear_conv),
    ("", "DeformConv", conv),
    ("", "Col2Im", col2im),
    ("com.ms.internal.nhwc", "Conv", |call| channels_last(call, conv)),
    ("com.ms.internal.nhwc", "ConvTranspose", |call| channels_last(call, conv_transpose)),
    ("com.ms.internal.nhwc", "QLinearConv", |call| channels_last(call, qlinear_conv)),
    ("com.microsoft", "FusedConv", conv),
    ("com.microsoft", "NhwcConv", |call| channels_last(call, conv)),
    ("com.microsoft", "NhwcFusedConv", |call| channels_last(call, conv)),
    ("com.microsoft", "QLinearConv", |call| match call.attr_int("channels_last", 0) {
        0 => qlinear_conv(call),
        _ => channels_last(call, qlinear_conv),
    }),
];

fn conv(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    convolution(call, 1, call.dtype(0))
}

fn conv_integer(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    convolution(call, 1, Some(DType::I32))
}

/// Inputs: x, its scale and zero point, w, its scale and zero point, scale and zero point of y, bias.
fn qlinear_conv(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    convolution(call, 3, call.dtype(7))
}

/// x [N, C, spatial...] and weights [M, C / group, kernel...] give [N, M, places...].
fn convolution(call: &Call<'_>, weights: usize, dtype: Option<DType>) -> Result<Vec<Fact>, String> {
    let Some((x, w)) = operands(call, weights)? else { return Ok(vec![Fact::partial(dtype, None)]) };
    let groups = groups(call)?;
    let wanted = product(&[w[1], Some(groups)])?;
    agree(x[1], wanted)
        .map_err(|problem| format!("channels of data and {groups} groups of weights: {problem}"))?;
    if let Some(maps) = w[0].filter(|maps| maps % groups != 0) {
        return Err(format!("{maps} maps are not divisible into {groups} groups"));
    }
    let places = Window::of(call, spatial(&w)?)?.places(spatial(&x)?)?;
    Ok(vec![Fact::partial(dtype, Some([vec![x[0], w[0]], places].concat()))])
}

/// x [N, C, spatial...] and weights [C, M / group, kernel...] give [N, M, larger spatial...].
fn conv_transpose(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let dtype = call.dtype(0);
    let Some((x, w)) = operands(call, 1)? else { return Ok(vec![Fact::partial(dtype, None)]) };
    agree(x[1], w[0]).map_err(|problem| format!("channels of data and weights: {problem}"))?;
    let maps = product(&[w[1], Some(groups(call)?)])?;
    let sizes = match call.attr_ints("output_shape") {
        Some(stated) => stated_sizes(stated, x.len() - 2)?,
        None => {
            let extra = output_padding(call, x.len() - 2)?;
            Window::of(call, spatial(&w)?)?.transposed(spatial(&x)?, &extra)?
        }
    };
    Ok(vec![Fact::partial(dtype, Some([vec![x[0], maps], sizes].concat()))])
}

/// Sizes of data and weights, which have the same rank; `None` if neither's is known.
fn operands(call: &Call<'_>, weights: usize) -> Result<Option<(Dims, Dims)>, String> {
    let (x, w) = (call.dims(0), call.dims(weights));
    let Some(rank) = x.or(w).map(<[_]>::len) else { return Ok(None) };
    let dims = |dims: Option<&[Option<usize>]>| dims.map_or_else(|| unknown_dims(rank), <[_]>::to_vec);
    let (x, w) = (dims(x), dims(w));
    if x.len() != w.len() || rank < 3 {
        return Err(format!("data of rank {} and weights of rank {}", x.len(), w.len()));
    }
    Ok(Some((x, w)))
}

fn groups(call: &Call<'_>) -> Result<usize, String> {
    let stated = call.attr_int("group", 1);
    let groups = usize::try_from(stated).ok().filter(|groups| *groups > 0);
    groups.ok_or_else(|| format!("{stated} groups"))
}

fn output_padding(call: &Call<'_>, axes: usize) -> Result<Vec<usize>, String> {
    let Some(stated) = call.attr_ints("output_padding") else { return Ok(vec![0; axes]) };
    let sizes: Option<Vec<usize>> = stated.iter().map(|size| usize::try_from(*size).ok()).collect();
    let sizes = sizes.filter(|sizes| sizes.len() == axes);
    sizes.ok_or_else(|| format!("output_padding {stated:?} for {axes} spatial axes"))
}

/// The attribute `output_shape`: sizes along the spatial axes.
fn stated_sizes(stated: &[i64], axes: usize) -> Result<Dims, String> {
    let sizes: Option<Dims> = stated.iter().map(|size| usize::try_from(*size).ok().map(Some)).collect();
    let sizes = sizes.filter(|sizes| sizes.len() == axes);
    sizes.ok_or_else(|| format!("output_shape {stated:?} for {axes} spatial axes"))
}

/// Columns [N, C * block, L], the sizes of an image and of a block give [N, C, image...].
fn col2im(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let dtype = call.dtype(0);
    let sizes = |input: usize| -> Result<Option<Dims>, String> {
        let size =
            |size: i64| usize::try_from(size).map(Some).map_err(|_| format!("input {input} has {size}"));
        call.ints(input).map(|values| values.into_iter().map(size).collect()).transpose()
    };
    let Some(image) = sizes(1)? else { return Ok(vec![Fact::partial(dtype, None)]) };
    let (batch, columns) = match call.dims(0) {
        Some([batch, columns, _]) => (*batch, *columns),
        Some(dims) => return Err(format!("columns of rank {}", dims.len())),
        None => (None, None),
    };
    let channels = match (columns, sizes(2)?.map(|block| product(&block)).transpose()?.flatten()) {
        (Some(columns), Some(block)) if block == 0 || columns % block != 0 => {
            return Err(format!("{columns} rows of columns for blocks of {block} elements"));
        }
        (Some(columns), Some(block)) => Some(columns / block),
        _ => None,
    };
    Ok(vec![Fact::partial(dtype, Some([vec![batch, channels], image].concat()))])
}
