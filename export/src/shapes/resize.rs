//! Resizing, sampling and cropping of images.

use super::{
    Call, Dims, Elements, Fact, Row,
    call::{agree, axes, unknown_dims},
    window::channels_last,
};
use crate::onnx::{Attribute, DType};

pub(super) const RESIZE: &[Row] = &[
    ("", "Resize", resize),
    ("", "Upsample", upsample),
    ("", "GridSample", grid_sample),
    ("", "AffineGrid", affine_grid),
    ("", "CenterCropPad", center_crop_pad),
    ("", "ImageDecoder", image_decoder),
    ("com.ms.internal.nhwc", "GridSample", |call| channels_last(call, grid_sample)),
    ("com.microsoft", "GridSample", grid_sample),
];

/// Opset 10 has data and scales; later ones data, region of interest, scales and sizes, of which one of the last two
/// is absent or empty.
fn resize(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let dtype = call.dtype(0);
    if call.opset < 11 {
        return scaled(call, call.input(1));
    }
    let Some(x) = call.dims(0) else { return Ok(vec![Fact::partial(dtype, None)]) };
    let given = |input| call.input(input).filter(|fact| fact.full_shape() != Some(vec![0]));
    match (given(2), given(3)) {
        (Some(scales), None) => scaled(call, Some(scales)),
        (None, Some(sizes)) => Ok(vec![Fact::partial(dtype, Some(to_sizes(call, x, sizes.partial_ints())?))]),
        (None, None) => Err("neither scales nor sizes are given".to_owned()),
        // Of an input of unknown length it is not known whether it counts.
        (Some(_), Some(_)) => Ok(vec![Fact::partial(dtype, Some(unknown_dims(x.len())))]),
    }
}

fn upsample(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    if call.opset >= 9 {
        return scaled(call, call.input(1));
    }
    let scales = match call.node.attribute("scales") {
        Some(Attribute::Floats(scales)) => scales.iter().map(|scale| f64::from(*scale)).collect(),
        // The first version has two scales for two spatial axes.
        _ => vec![1.0, 1.0, stated_scale(call, "height_scale")?, stated_scale(call, "width_scale")?],
    };
    let elements = Elements::Floats(scales.iter().copied().map(Some).collect());
    scaled(call, Some(&Fact::with_elements(Some(DType::F32), &[scales.len()], Some(elements))))
}

fn stated_scale(call: &Call<'_>, name: &str) -> Result<f64, String> {
    call.node.float(name).map(f64::from).ok_or_else(|| format!("{name} is missing"))
}

fn scaled(call: &Call<'_>, scales: Option<&Fact>) -> Result<Vec<Fact>, String> {
    let dtype = call.dtype(0);
    let Some(x) = call.dims(0) else { return Ok(vec![Fact::partial(dtype, None)]) };
    let at = resized_axes(call, x.len())?;
    let mut dims = x.to_vec();
    match scales.and_then(Fact::floats) {
        None => at.iter().for_each(|axis| dims[*axis] = None),
        Some(scales) if scales.len() != at.len() => {
            return Err(format!("{} scales for {} axes", scales.len(), at.len()));
        }
        Some(scales) => {
            for (axis, scale) in at.iter().zip(scales) {
                dims[*axis] = x[*axis].map(|size| size_scaled(size, scale)).transpose()?;
            }
        }
    }
    Ok(vec![Fact::partial(dtype, Some(dims))])
}

/// Scales and sizes are multiplied as 32-bit floats, as runtimes do it.
fn size_scaled(size: usize, scale: f64) -> Result<usize, String> {
    whole(size as f32 * scale as f32).ok_or_else(|| format!("a size of {size} is scaled by {scale}"))
}

/// A size that a computation gives, without its fraction.
fn whole(size: f32) -> Option<usize> {
    // Beyond 2^48 a product of floats is no size that any tensor has.
    (0.0..=(1u64 << 48) as f32).contains(&size).then_some(size as usize)
}

fn to_sizes(call: &Call<'_>, x: &[Option<usize>], sizes: Option<&[Option<i64>]>) -> Result<Dims, String> {
    let at = resized_axes(call, x.len())?;
    let mut dims = x.to_vec();
    let Some(sizes) = sizes else {
        at.iter().for_each(|axis| dims[*axis] = None);
        return Ok(dims);
    };
    if sizes.len() != at.len() {
        return Err(format!("{} sizes for {} axes", sizes.len(), at.len()));
    }
    let size = |size: i64| usize::try_from(size).map_err(|_| format!("a size of {size}"));
    let sizes: Dims = sizes.iter().map(|s| s.map(size).transpose()).collect::<Result<_, _>>()?;
    let policy = call.attr_str("keep_aspect_ratio_policy").unwrap_or("stretch");
    if policy == "stretch" {
        at.iter().zip(sizes).for_each(|(axis, size)| dims[*axis] = size);
        return Ok(dims);
    }
    let ratio = |(axis, size): (&usize, &Option<usize>)| Some((*size)? as f32 / x[*axis]? as f32);
    let ratios: Option<Vec<f32>> = at.iter().zip(&sizes).map(ratio).collect();
    let scale = ratios.map(|ratios| match policy {
        "not_larger" => Ok(ratios.into_iter().fold(f32::INFINITY, f32::min)),
        "not_smaller" => Ok(ratios.into_iter().fold(0.0, f32::max)),
        other => Err(format!("keep_aspect_ratio_policy '{other}' is unknown")),
    });
    let scale = scale.transpose()?;
    for axis in at {
        dims[axis] = x[axis].zip(scale).and_then(|(size, scale)| whole((size as f32 * scale).round()));
    }
    Ok(dims)
}

fn resized_axes(call: &Call<'_>, rank: usize) -> Result<Vec<usize>, String> {
    call.attr_ints("axes").map_or_else(|| Ok((0..rank).collect()), |list| axes(list, rank))
}

/// x [N, C, spatial...] and a grid [N, places..., spatial axes] give [N, C, places...].
fn grid_sample(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let (x, grid) = (call.dims(0), call.dims(1));
    let Some(rank) = x.or(grid).map(<[_]>::len) else { return Ok(vec![Fact::partial(call.dtype(0), None)]) };
    let dims = |dims: Option<&[Option<usize>]>| dims.map_or_else(|| unknown_dims(rank), <[_]>::to_vec);
    let (x, grid) = (dims(x), dims(grid));
    if x.len() != grid.len() || rank < 3 {
        return Err(format!("data of rank {} and a grid of rank {}", x.len(), grid.len()));
    }
    agree(grid[rank - 1], Some(rank - 2)).map_err(|problem| format!("coordinates of the grid: {problem}"))?;
    let batch = agree(x[0], grid[0]).map_err(|problem| format!("batch of data and grid: {problem}"))?;
    let shape = [&[batch, x[1]], &grid[1..rank - 1]].concat();
    Ok(vec![Fact::partial(call.dtype(0), Some(shape))])
}

/// Transformations and the sizes [N, C, spatial...] of the image that they act on give [N, spatial..., spatial axes].
fn affine_grid(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let dtype = call.dtype(0);
    let Some(sizes) = call.required(1)?.partial_ints() else { return Ok(vec![Fact::partial(dtype, None)]) };
    if !(4..=5).contains(&sizes.len()) {
        return Err(format!("{} sizes of an image", sizes.len()));
    }
    let size = |size: &Option<i64>| size.and_then(|size| usize::try_from(size).ok());
    let places = sizes[2..].iter().map(size);
    let shape = [size(&sizes[0])].into_iter().chain(places).chain([Some(sizes.len() - 2)]).collect();
    Ok(vec![Fact::partial(dtype, Some(shape))])
}

fn center_crop_pad(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let mut y = call.same_as(0)?;
    if let Some(dims) = &mut y.shape {
        *dims = to_sizes(call, dims, call.required(1)?.partial_ints())?;
    }
    Ok(vec![y])
}

fn image_decoder(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let channels = match call.attr_str("pixel_format").unwrap_or("RGB") {
        "Grayscale" => 1,
        _ => 3,
    };
    Ok(vec![Fact::partial(Some(DType::U8), Some(vec![None, None, Some(channels)]))])
}
