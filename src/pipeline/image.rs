//! Pictures: from the decoder's output to a PNG that says how it was made, and back.

use std::{fmt, io::Cursor, ops::Range, str::FromStr};

use png::{BitDepth, ColorType, Decoder, Encoder, Transformations};

use super::text_to_image::Negative;
use crate::tensor::{HostTensor, Values};

/// The most pixels that we decode: 8192 x 8192, beyond every model's reach.
const MAX_PIXELS: u64 = 1 << 26;
/// A picture whose values deviate less than this from their mean (of values in -1..1) shows nothing.
const CONSTANT: f64 = 1e-4;
/// The most bytes that a compressed text in a PNG may unfold to.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// What to do about numbers that no graph of ours should give.
const DAMAGED: &str = "`viaduct inspect --hashes` tells whether the bundle is damaged";

/// What is wrong with a tensor or with a PNG file.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("the picture's texts are longer than {MAX_TEXT_BYTES} bytes")]
    TextTooLong,
    #[error("{}: {nan} NaN and {infinite} infinite values of {total}; {DAMAGED}", at(stage, *step))]
    NotFinite { stage: String, step: Option<usize>, nan: usize, infinite: usize, total: usize },
    #[error("{}: the same everywhere, {value} on average (standard deviation {deviation:.1e})", at(stage, *step))]
    Constant { stage: String, step: Option<usize>, value: f32, deviation: f64 },
    #[error("an image has shape {0:?}, not [1, 3 or 4, height, width] with at least one pixel")]
    Shape(Vec<usize>),
    #[error("'{0}' is no colour; write #rrggbb, white, black or grey")]
    Colour(String),
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

/// Checks that a tensor is finite and not the same everywhere: black, white and plainly coloured pictures come from broken
/// numbers. A picture [1,C,H,W] is looked at colour by colour, anything else as a whole.
pub fn check_varied(stage: &str, step: Option<usize>, tensor: &HostTensor) -> Result<(), ImageError> {
    check_finite(stage, step, tensor)?;
    let count = tensor.values.len();
    let plane = match tensor.shape[..] {
        [_, _, height, width] if height * width > 1 => height * width,
        _ => count.max(1),
    };
    let planes =
        (0..count).step_by(plane).map(|start| spread(&tensor.values, start..count.min(start + plane)));
    let deviation = planes.map(|(_, deviation)| deviation).fold(0.0, f64::max);
    if deviation < CONSTANT {
        let value = spread(&tensor.values, 0..count).0 as f32;
        return Err(ImageError::Constant { stage: stage.to_string(), step, value, deviation });
    }
    Ok(())
}

/// Mean and standard deviation of some of the values.
fn spread(values: &Values, range: Range<usize>) -> (f64, f64) {
    let count = range.len().max(1) as f64;
    let values = range.map(|index| f64::from(values.f32_at(index)));
    let mean = values.clone().sum::<f64>() / count;
    let square = values.map(|x| (x - mean).powi(2)).sum::<f64>() / count;
    (mean, square.sqrt())
}

/// A decoder's value in -1..1, beyond which it is cut, as a colour in 0..1.
fn colour(x: f32) -> f32 {
    (x / 2.0 + 0.5).clamp(0.0, 1.0)
}

/// A picture as the decoder leaves it, in 0..1: the reference's `image_01`.
pub fn to_unit(image: &HostTensor) -> HostTensor {
    HostTensor::f32(&image.shape, image.to_f32().into_iter().map(colour).collect())
}

/// Red, green, blue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Colour(pub [u8; 3]);

impl fmt::Display for Colour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Colour([red, green, blue]) = self;
        write!(f, "#{red:02x}{green:02x}{blue:02x}")
    }
}

impl FromStr for Colour {
    type Err = ImageError;

    /// `#rrggbb` or `#rgb`, the sign may be missing; `white`, `black` or `grey`.
    fn from_str(text: &str) -> Result<Colour, ImageError> {
        const NAMED: [(&str, [u8; 3]); 4] =
            [("white", [255; 3]), ("black", [0; 3]), ("grey", [128; 3]), ("gray", [128; 3])];
        if let Some((_, colour)) = NAMED.iter().find(|(name, _)| text.eq_ignore_ascii_case(name)) {
            return Ok(Colour(*colour));
        }
        let wrong = || ImageError::Colour(text.to_owned());
        let digits: Vec<u8> = text.strip_prefix('#').unwrap_or(text).chars().map_while(hex_digit).collect();
        let colour = match (&digits[..], text.trim_start_matches('#').chars().count()) {
            ([r, g, b], 3) => [r * 17, g * 17, b * 17],
            ([r0, r1, g0, g1, b0, b1], 6) => [r0 * 16 + r1, g0 * 16 + g1, b0 * 16 + b1],
            _ => return Err(wrong()),
        };
        Ok(Colour(colour))
    }
}

fn hex_digit(digit: char) -> Option<u8> {
    digit.to_digit(16).map(|value| value as u8)
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
        let byte = |x: f32| (colour(x) * 255.0).round_ties_even() as u8;
        let mut pixels = Vec::with_capacity(image.values.len());
        for place in 0..area {
            let places = (0..channels).map(|channel| channel * area + place);
            pixels.extend(places.map(|index| byte(image.values.f32_at(index))));
        }
        Ok(Picture { width: w, height: h, channels: channels as u8, pixels })
    }

    /// The picture before a background, where it is transparent: straight alpha, rounded to the nearest.
    pub fn on_background(self, background: Colour) -> Picture {
        if self.channels != 4 {
            return self;
        }
        let over = |own: u8, behind: u8, alpha: u8| {
            let sum = u32::from(own) * u32::from(alpha) + u32::from(behind) * (255 - u32::from(alpha));
            ((sum + 127) / 255) as u8
        };
        let pixel = |[r, g, b, alpha]: &[u8; 4]| {
            let Colour([red, green, blue]) = background;
            [over(*r, red, *alpha), over(*g, green, *alpha), over(*b, blue, *alpha)]
        };
        let pixels = self.pixels.as_chunks::<4>().0.iter().flat_map(pixel).collect();
        Picture { channels: 3, pixels, ..self }
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
        // A file whose end is missing is refused, even if all pixels are there.
        reader.finish()?;
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
#[derive(Clone, Debug, PartialEq)]
pub struct Provenance {
    pub prompt: String,
    pub negative: Option<Negative>,
    /// Absent when the noise came from a file.
    pub seed: Option<u64>,
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
        let negative = self.negative.as_ref();
        let negative =
            negative.map(|own| [("negative", own.prompt.clone()), ("guidance", own.scale.to_string())]);
        let texts = [
            ("Software", self.generator.clone()),
            ("prompt", self.prompt.clone()),
            ("seed", self.seed.map_or("none, the noise was given".to_owned(), |seed| seed.to_string())),
            ("steps", self.steps.to_string()),
            ("size", format!("{}x{}", self.width, self.height)),
            ("bundle", self.bundle.clone()),
            ("version", self.version.clone()),
        ];
        let texts = texts.into_iter().chain(negative.into_iter().flatten());
        texts.map(|(keyword, text)| (keyword.to_string(), text)).collect()
    }
}

/// All texts (keyword, text) of a PNG, from before and after the pixels.
pub fn png_texts(bytes: &[u8]) -> Result<Vec<(String, String)>, ImageError> {
    let mut reader = Decoder::new(Cursor::new(bytes)).read_info()?;
    reader.finish()?;
    let info = reader.info();
    let mut texts: Vec<(String, String)> = Vec::new();
    // What many small chunks unpack to counts, too.
    let mut room = MAX_TEXT_BYTES;
    let mut take = |text: String| {
        room = room.checked_sub(text.len()).ok_or(ImageError::TextTooLong)?;
        Ok::<String, ImageError>(text)
    };
    for chunk in &info.uncompressed_latin1_text {
        texts.push((chunk.keyword.clone(), take(chunk.text.clone())?));
    }
    for mut chunk in info.compressed_latin1_text.iter().cloned() {
        chunk.decompress_text_with_limit(MAX_TEXT_BYTES)?;
        texts.push((chunk.keyword.clone(), take(chunk.get_text()?)?));
    }
    for mut chunk in info.utf8_text.iter().cloned() {
        chunk.decompress_text_with_limit(MAX_TEXT_BYTES)?;
        texts.push((chunk.keyword.clone(), take(chunk.get_text()?)?));
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

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    fn provenance() -> Provenance {
        Provenance {
            prompt: "un café\nby the sea".to_string(),
            negative: None,
            seed: Some(u64::MAX),
            steps: 4,
            width: 2,
            height: 1,
            bundle: "klein-emoji".to_string(),
            generator: "viaduct".to_string(),
            version: "0.1.0".to_string(),
        }
    }

    fn rgb() -> Picture {
        Picture { width: 2, height: 1, channels: 3, pixels: vec![0, 128, 255, 1, 2, 3] }
    }

    #[test]
    fn broken_numbers_are_named() {
        let mut values = vec![0.5; 6];
        let tensor = |v: &[f32]| HostTensor::f32(&[6], v.to_vec());
        assert!(check_finite("sampler", Some(2), &tensor(&values)).is_ok());
        values[1] = f32::NAN;
        values[2] = f32::INFINITY;
        values[3] = f32::NEG_INFINITY;
        let error = check_finite("sampler", Some(2), &tensor(&values)).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("sampler, step 2: 1 NaN and 2 infinite values of 6; {DAMAGED}")
        );
        let half = HostTensor::new(&[1], Values::F16(vec![f16::NAN].into()));
        let error = check_varied("decoder", None, &half).unwrap_err();
        assert_eq!(error.to_string(), format!("decoder: 1 NaN and 0 infinite values of 1; {DAMAGED}"));
        assert!(check_finite("ids", None, &HostTensor::i64(&[1], vec![7])).is_ok());
    }

    #[test]
    fn constant_pictures_are_refused() {
        for value in [-1.0, 0.0, 1.0, 3e38] {
            let error = check_varied("decoder", None, &HostTensor::f32(&[1, 3, 2, 2], vec![value; 12]));
            assert!(matches!(error, Err(ImageError::Constant { .. })), "{value}");
        }
        // One colour that is no grey is as broken; a picture of one place is only that.
        let green: Vec<f32> = (0..12).map(|i| if i / 4 == 1 { 0.5 } else { -0.5 }).collect();
        for (shape, broken) in [([1, 3, 2, 2], true), ([1, 12, 1, 1], false)] {
            let result = check_varied("decoder", None, &HostTensor::f32(&shape, green.clone()));
            assert_eq!(result.is_err(), broken, "{shape:?}");
        }
        let mut values = vec![0.25; 12];
        values[3] = 0.26;
        assert!(check_varied("decoder", None, &HostTensor::f32(&[1, 3, 2, 2], values)).is_ok());
    }

    #[test]
    fn values_are_cut_and_rounded() {
        let values = vec![-7.0, -1.0, 0.0, 0.999, 1.0, 7.0];
        let picture = Picture::from_tensor(&HostTensor::f32(&[1, 3, 1, 2], values)).unwrap();
        // 127.5 is a tie and goes to the even 128.
        assert_eq!(picture.pixels, [0, 128, 255, 0, 255, 255]);
        assert_eq!((picture.width, picture.height, picture.channels), (2, 1, 3));
        for shape in [&[1, 2, 1, 3][..], &[2, 3, 1, 1], &[3, 1, 2], &[1, 3, 0, 2]] {
            let count = shape.iter().product();
            let error = Picture::from_tensor(&HostTensor::f32(shape, vec![0.0; count])).unwrap_err();
            assert!(matches!(error, ImageError::Shape(_)), "{shape:?}");
        }
    }

    #[test]
    fn a_png_tells_how_it_was_made() {
        let texts = provenance().texts();
        let png = rgb().to_png(&texts).unwrap();
        assert_eq!(Picture::from_png(&png).unwrap(), rgb());
        let mut found = png_texts(&png).unwrap();
        let mut expected = texts;
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
        assert!(expected.contains(&("size".to_string(), "2x1".to_string())));

        let nul = rgb().to_png(&[("prompt".to_string(), "a\0b".to_string())]).unwrap();
        assert_eq!(png_texts(&nul).unwrap()[0].1, "a\u{fffd}b");
        assert!(rgb().to_png(&[("k".repeat(80), String::new())]).is_err());
    }

    #[test]
    fn alpha_survives_and_is_dropped_in_the_tensor() {
        let picture = Picture { width: 1, height: 2, channels: 4, pixels: vec![255, 0, 51, 7, 1, 2, 3, 4] };
        let back = Picture::from_png(&picture.to_png(&[]).unwrap()).unwrap();
        assert_eq!(back, picture);
        let tensor = back.to_tensor();
        assert_eq!(tensor.shape, [1, 3, 2, 1]);
        assert_eq!(tensor.to_f32()[..5], [1.0, 1.0 / 255.0, 0.0, 2.0 / 255.0, 0.2]);
    }

    #[test]
    fn every_colour_type_becomes_rgb() {
        let encode = |color, depth, data: &[u8]| {
            let mut bytes = Vec::new();
            let mut encoder = Encoder::new(&mut bytes, 1, 1);
            encoder.set_color(color);
            encoder.set_depth(depth);
            encoder.set_palette(vec![9, 8, 7]);
            encoder.write_header().unwrap().write_image_data(data).unwrap();
            Picture::from_png(&bytes).unwrap().pixels
        };
        assert_eq!(encode(ColorType::Grayscale, BitDepth::Eight, &[5]), [5, 5, 5]);
        assert_eq!(encode(ColorType::Grayscale, BitDepth::One, &[0x80]), [255, 255, 255]);
        assert_eq!(encode(ColorType::GrayscaleAlpha, BitDepth::Eight, &[5, 6]), [5, 5, 5, 6]);
        assert_eq!(encode(ColorType::Indexed, BitDepth::Eight, &[0]), [9, 8, 7]);
        assert_eq!(encode(ColorType::Rgb, BitDepth::Sixteen, &[1, 99, 2, 99, 3, 99]), [1, 2, 3]);
    }

    #[test]
    fn damaged_files_are_refused() {
        let png = rgb().to_png(&provenance().texts()).unwrap();
        for end in 0..png.len() {
            assert!(Picture::from_png(&png[..end]).is_err(), "cut at {end}");
            assert!(png_texts(&png[..end]).is_err(), "cut at {end}");
        }
        for at in 8..png.len() {
            let mut flipped = png.clone();
            flipped[at] ^= 0x55;
            let _ = (Picture::from_png(&flipped), png_texts(&flipped));
        }
        let mut huge = png;
        huge[16..24].copy_from_slice(&[0, 1, 0, 0, 0, 1, 0, 0]);
        let crc = crc32(&huge[12..29]).to_be_bytes();
        huge[29..33].copy_from_slice(&crc);
        assert!(matches!(Picture::from_png(&huge), Err(ImageError::TooLarge { width: 65536, .. })));
    }

    fn crc32(bytes: &[u8]) -> u32 {
        let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
        !bytes.iter().fold(!0, |crc, b| (0..8).fold(crc ^ u32::from(*b), step))
    }

    #[test]
    fn psnr_has_peak_one() {
        let a = HostTensor::f32(&[2], vec![0.0, 1.0]);
        let b = HostTensor::f32(&[2], vec![0.1, 0.9]);
        assert!((psnr(&a, &b).unwrap() - 20.0).abs() < 1e-5);
        assert_eq!(psnr(&a, &a), Some(f64::INFINITY));
        assert_eq!(psnr(&a, &a.clone().reshaped(&[1, 2])), None);
    }

    #[test]
    fn colours_are_read() {
        for (text, colour) in [("white", [255; 3]), ("#0a0B0c", [10, 11, 12]), ("f80", [255, 136, 0])] {
            assert_eq!(text.parse::<Colour>().unwrap(), Colour(colour), "{text}");
            assert_eq!(Colour(colour).to_string().parse::<Colour>().unwrap(), Colour(colour));
        }
        for text in ["", "#", "12345", "#1234567", "##123", "ünlü", "#ggg", "purpleish"] {
            assert!(text.parse::<Colour>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_transparent_shows_the_background() {
        let pixels = vec![200, 100, 0, 255, 200, 100, 0, 0, 200, 100, 0, 128];
        let picture = Picture { width: 3, height: 1, channels: 4, pixels };
        let over = picture.on_background(Colour([0, 100, 255]));
        assert_eq!((over.channels, &over.pixels[..]), (3, &[200, 100, 0, 0, 100, 255, 100, 100, 127][..]));
        assert_eq!(over.clone().on_background(Colour([9; 3])), over);
    }
}
