//! Pictures: from the decoder's output to a PNG that says how it was made, and back.

use std::io::Cursor;

use png::{BitDepth, ColorType, Decoder, Encoder, Transformations};

use crate::tensor::{HostTensor, Values};

/// The most pixels that we decode: 8192 x 8192, beyond every model's reach.
const MAX_PIXELS: u64 = 1 << 26;
/// A picture whose values deviate less than this from their mean (of values in -1..1) shows nothing.
const CONSTANT: f64 = 1e-4;
/// The most bytes that a compressed text in a PNG may unfold to.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// What is wrong with a tensor or with a PNG file.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("{}: {nan} NaN and {infinite} infinite values of {total}", at(stage, *step))]
    NotFinite { stage: String, step: Option<usize>, nan: usize, infinite: usize, total: usize },
    #[error("{}: all values are {value} (standard deviation {deviation:.1e})", at(stage, *step))]
    Constant { stage: String, step: Option<usize>, value: f32, deviation: f64 },
    #[error("an image has shape {0:?}, not [1, 3 or 4, height, width] with at least one pixel")]
    Shape(Vec<usize>),
    #[error("an image of {width} x {height} pixels is larger than 8192 x 8192 in all")]
    TooLarge { width: u32, height: u32 },
    #[error("cannot encode the PNG: {0}")]
    Encode(#[from] png::EncodingError),
    #[error("cannot decode the PNG: {0}")]
    Decode(#[from] png::DecodingError),
}

fn at(stage: &str, step: Option<usize>) -> String {
    step.map_or_else(|| stage.to_string(), |step| format!("{stage}, step {step}"))
}

/// Checks that a tensor has no NaN and no infinity; the error names `stage` and `step`.
pub fn check_finite(stage: &str, step: Option<usize>, tensor: &HostTensor) -> Result<(), ImageError> {
    let (nan, infinite) = match &tensor.values {
        Values::F32(v) => count_bad(v.iter().copied()),
        Values::F16(v) => count_bad(v.iter().map(|x| x.to_f32())),
        Values::I64(_) | Values::U8(_) => (0, 0),
    };
    if nan + infinite == 0 {
        return Ok(());
    }
    Err(ImageError::NotFinite { stage: stage.to_string(), step, nan, infinite, total: tensor.values.len() })
}

fn count_bad(values: impl Iterator<Item = f32>) -> (usize, usize) {
    values.fold((0, 0), |(nan, infinite), x| {
        (nan + usize::from(x.is_nan()), infinite + usize::from(x.is_infinite()))
    })
}

/// Checks that a tensor is finite and not all one value: black, white and grey pictures come from broken numbers.
pub fn check_varied(stage: &str, step: Option<usize>, tensor: &HostTensor) -> Result<(), ImageError> {
    check_finite(stage, step, tensor)?;
    let values = tensor.to_f32();
    let count = values.len().max(1) as f64;
    let mean = values.iter().map(|x| f64::from(*x)).sum::<f64>() / count;
    let deviation = (values.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / count).sqrt();
    if deviation < CONSTANT {
        return Err(ImageError::Constant { stage: stage.to_string(), step, value: mean as f32, deviation });
    }
    Ok(())
}

/// Eight-bit pixels, row by row, channels together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    pub width: u32,
    pub height: u32,
    /// 3 (RGB) or 4 (RGBA).
    pub channels: u8,
    pub pixels: Vec<u8>,
}

impl Picture {
    /// The decoder's output `[1, 3 or 4, H, W]` in -1..1 (beyond is cut): `round(255 * clamp(x / 2 + 0.5))`, ties to
    /// even, as diffusers does. NaN becomes 0; run [`check_varied`] before.
    pub fn from_tensor(image: &HostTensor) -> Result<Picture, ImageError> {
        let wrong = || ImageError::Shape(image.shape.clone());
        let [1, channels @ (3 | 4), height, width] = image.shape[..] else { return Err(wrong()) };
        let area = height * width;
        let (Ok(w), Ok(h), 1..) = (u32::try_from(width), u32::try_from(height), area) else {
            return Err(wrong());
        };
        let planes = image.to_f32();
        let byte = |x: f32| ((x / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8;
        let pixel = |i: usize| planes[i..].iter().step_by(area).map(|x| byte(*x));
        let pixels = (0..area).flat_map(pixel).collect();
        Ok(Picture { width: w, height: h, channels: channels as u8, pixels })
    }

    /// The colours as `[1, 3, H, W]` f32 in 0..1; transparency is dropped.
    pub fn to_tensor(&self) -> HostTensor {
        let channels = usize::from(self.channels);
        let plane = |c: usize| self.pixels[c..].iter().step_by(channels).map(|b| f32::from(*b) / 255.0);
        HostTensor::f32(&[1, 3, self.height as usize, self.width as usize], (0..3).flat_map(plane).collect())
    }

    /// The picture as a PNG file with `texts` (keyword, text) in it.
    pub fn to_png(&self, texts: &[(String, String)]) -> Result<Vec<u8>, ImageError> {
        let mut bytes = Vec::new();
        let mut encoder = Encoder::new(&mut bytes, self.width, self.height);
        encoder.set_color(if self.channels == 4 { ColorType::Rgba } else { ColorType::Rgb });
        encoder.set_depth(BitDepth::Eight);
        for (keyword, text) in texts {
            // tEXt is Latin-1; whatever is beyond ASCII goes into iTXt, which is UTF-8. A NUL would end either.
            let text = text.replace('\0', "\u{fffd}");
            if text.is_ascii() {
                encoder.add_text_chunk(keyword.clone(), text)?;
            } else {
                encoder.add_itxt_chunk(keyword.clone(), text)?;
            }
        }
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&self.pixels)?;
        writer.finish()?;
        Ok(bytes)
    }

    /// Decodes a PNG of any colour type; palettes and greys become RGB, 16 bits become 8.
    pub fn from_png(bytes: &[u8]) -> Result<Picture, ImageError> {
        let mut decoder = Decoder::new(Cursor::new(bytes));
        decoder.set_transformations(Transformations::EXPAND | Transformations::STRIP_16);
        decoder.set_ignore_text_chunk(true);
        let (width, height) = decoder.read_header_info()?.size();
        if u64::from(width) * u64::from(height) > MAX_PIXELS {
            return Err(ImageError::TooLarge { width, height });
        }
        let mut reader = decoder.read_info()?;
        let size = reader.output_buffer_size().ok_or(ImageError::TooLarge { width, height })?;
        let mut pixels = vec![0; size];
        let color = reader.next_frame(&mut pixels)?.color_type;
        let (channels, pixels) = match color {
            ColorType::Grayscale => (3, pixels.iter().flat_map(|g| [*g; 3]).collect()),
            ColorType::GrayscaleAlpha => {
                (4, pixels.as_chunks::<2>().0.iter().flat_map(|[g, a]| [*g, *g, *g, *a]).collect())
            }
            ColorType::Rgba => (4, pixels),
            // EXPAND leaves no palette.
            ColorType::Rgb | ColorType::Indexed => (3, pixels),
        };
        Ok(Picture { width, height, channels, pixels })
    }
}

/// How a picture was made, as its PNG tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provenance {
    pub prompt: String,
    pub seed: u64,
    pub steps: usize,
    pub width: usize,
    pub height: usize,
    /// The bundle's name.
    pub bundle: String,
    /// The program's name and version.
    pub generator: String,
    pub version: String,
}

impl Provenance {
    /// The texts for [`Picture::to_png`]. `Software` is the keyword that the PNG specification has for it.
    pub fn texts(&self) -> Vec<(String, String)> {
        [
            ("Software", self.generator.clone()),
            ("prompt", self.prompt.clone()),
            ("seed", self.seed.to_string()),
            ("steps", self.steps.to_string()),
            ("size", format!("{}x{}", self.width, self.height)),
            ("bundle", self.bundle.clone()),
            ("version", self.version.clone()),
        ]
        .map(|(keyword, text)| (keyword.to_string(), text))
        .to_vec()
    }
}

/// All texts (keyword, text) of a PNG, from before and after the pixels.
pub fn png_texts(bytes: &[u8]) -> Result<Vec<(String, String)>, ImageError> {
    let mut reader = Decoder::new(Cursor::new(bytes)).read_info()?;
    reader.finish()?;
    let info = reader.info();
    let mut texts: Vec<(String, String)> = Vec::new();
    for chunk in &info.uncompressed_latin1_text {
        texts.push((chunk.keyword.clone(), chunk.text.clone()));
    }
    for mut chunk in info.compressed_latin1_text.iter().cloned() {
        chunk.decompress_text_with_limit(MAX_TEXT_BYTES)?;
        texts.push((chunk.keyword.clone(), chunk.get_text()?));
    }
    for mut chunk in info.utf8_text.iter().cloned() {
        chunk.decompress_text_with_limit(MAX_TEXT_BYTES)?;
        texts.push((chunk.keyword.clone(), chunk.get_text()?));
    }
    Ok(texts)
}

/// Peak signal-to-noise ratio in dB for values with peak 1; infinite for equal ones. `None` if the shapes differ.
pub fn psnr(a: &HostTensor, b: &HostTensor) -> Option<f64> {
    if a.shape != b.shape {
        return None;
    }
    let squares = a.to_f32().iter().zip(b.to_f32()).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
    Some(-10.0 * (squares / a.values.len() as f64).log10())
}
