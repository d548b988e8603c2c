//! Measures a boundary against the reference's tensor and holds it to the bars.

use viaduct_export::{
    gates::{Gates, Measure},
    onnx::DType,
};

use super::{Oracle, VerifyError, row::Row};
use crate::{
    pipeline::image::psnr,
    tensor::{HostTensor, Sums, Values},
};

/// The picture that the decoder makes of the reference's latents.
pub const DECODED: &str = "image_01 (reference latents)";
/// The picture of a free run.
pub const DRAWN: &str = "image_01";
/// Which tokens of the text are padding.
pub const MASK: &str = "attention_mask";
/// Rows of the text, each of which is judged by itself: the encoded prompt, and all of what the text encoder gives.
const TEXTS: [&str; 2] = [TEXT, "enc_hidden_full"];
/// The encoded prompt.
pub const TEXT: &str = "prompt_embeds";
/// How the names of velocities begin.
pub const VELOCITY: &str = "pred_step";

/// Bars that hold for every profile, because the host computes these in f32: largest absolute difference.
const HOST_BARS: &[(&str, f64)] = &[
    ("sigmas", 1e-6),
    ("timesteps", 1e-6),
    ("rope_cos", 1e-6),
    ("rope_sin", 1e-6),
    ("txt_cos", 1e-6),
    ("txt_sin", 1e-6),
    ("img_cos", 1e-6),
    ("img_sin", 1e-6),
    ("noise_nchw", 0.0),
    ("noise_packed", 0.0),
];
/// Normals from one seed may differ in the last bits between the reference's own code paths.
const NOISE_BAR: f64 = 2e-6;
/// An exact picture has no finite PSNR, and JSON has no infinity.
const EXACT_DB: f64 = 999.0;

/// The bars, and what of the request they need.
#[derive(Clone)]
pub struct Judge<'a> {
    gates: &'a Gates,
    /// The reference's picture in 0..1.
    picture: Option<HostTensor>,
    /// Which rows of the text are padding, once the mask has passed; none where there is no mask.
    padding: Vec<bool>,
}

impl<'a> Judge<'a> {
    pub fn new(oracle: &Oracle, gates: &'a Gates) -> Result<Judge<'a>, VerifyError> {
        Ok(Judge { gates, picture: oracle.tensor(DRAWN)?, padding: Vec::new() })
    }

    /// Which rows of the text are padding, by the mask.
    pub fn see_mask(&mut self, mask: &HostTensor) {
        if let Values::I64(mask) = &mask.values {
            self.padding = mask.iter().map(|m| *m == 0).collect();
        }
    }

    pub fn padding(&self) -> &[bool] {
        &self.padding
    }

    /// The rows of one boundary.
    pub fn rows(&self, name: &str, tensor: &HostTensor, reference: &HostTensor) -> Vec<Row> {
        if let Values::I64(ids) = &tensor.values {
            vec![exact(name, ids, &tensor.shape, reference)]
        } else if let Some((_, bar)) = HOST_BARS.iter().find(|bar| bar.0 == name) {
            vec![absolute(name, tensor, reference, *bar)]
        } else if TEXTS.contains(&name) && tensor.shape == reference.shape {
            self.text_rows(name, tensor, reference)
        } else {
            let (a, b) = (tensor.to_f32(), reference.to_f32());
            let same_shape = tensor.shape == reference.shape;
            let (apart, error) = match same_shape {
                true => (worst(&a, &b), Sums::of(&a, &b).cosine_error()),
                false => (f64::INFINITY, f64::NAN),
            };
            let detail = format!("{:?}", reference.shape);
            let mut rows = vec![Row {
                cosine_error: same_shape.then_some(error),
                ..self.relative(name, apart / largest(&b), detail.clone())
            }];
            if let Some(bars) = self.gates.transformer.as_ref().filter(|_| name.starts_with(VELOCITY)) {
                rows.push(Row::new(name, Measure::Cosine, error, bars.velocity, detail));
            }
            rows
        }
    }

    /// Noise drawn from the oracle's seed.
    pub fn noise(&self, drawn: &HostTensor, reference: &HostTensor) -> Row {
        absolute("noise from the seed", drawn, reference, NOISE_BAR)
    }

    /// The picture (0..1) that the decoder makes of the reference's latents.
    pub fn decoded(&self, image: &HostTensor) -> Option<Row> {
        self.picture_row(DECODED, image, self.gates.vae_decoder.as_ref()?.image_db)
    }

    /// The picture (0..1) of a free run.
    pub fn drawn(&self, image: &HostTensor) -> Option<Row> {
        self.picture_row(DRAWN, image, self.gates.image_db)
    }

    /// Text rows one by one, each against its own largest value and by its own angle, real and padding rows apart: padding
    /// rows are seen by the transformer too, and a fault there hides behind the much larger real rows.
    fn text_rows(&self, name: &str, tensor: &HostTensor, reference: &HostTensor) -> Vec<Row> {
        let (a, b) = (tensor.to_f32(), reference.to_f32());
        let width = reference.shape.last().copied().unwrap_or(1).max(1);
        let pairs: Vec<(&[f32], &[f32])> = a.chunks_exact(width).zip(b.chunks_exact(width)).collect();
        let bars = self.gates.text_encoder.as_ref();
        let classes = [
            ("real rows", false, bars.map(|bars| bars.real_rows)),
            ("padding rows", true, bars.map(|bars| bars.padding_rows)),
        ];
        let mut rows = Vec::new();
        for (class, wanted, bar) in classes {
            let is_padding = |row: usize| self.padding.get(row).copied().unwrap_or(false);
            let own = pairs.iter().enumerate().filter(|(row, _)| is_padding(*row) == wanted);
            let own: Vec<(&[f32], &[f32])> = own.map(|(_, pair)| *pair).collect();
            let Some(relative) = own.iter().map(|(a, b)| worst(a, b) / largest(b)).reduce(nan_max) else {
                continue;
            };
            let sums: Vec<Sums> = own.iter().map(|(a, b)| Sums::of(a, b)).collect();
            let mut total = Sums::default();
            sums.iter().for_each(|row| total.include(row));
            let (name, detail) = (format!("{name} ({class})"), format!("the worst of {} rows", own.len()));
            rows.push(Row {
                cosine_error: Some(total.cosine_error()),
                ..self.relative(&name, relative, detail.clone())
            });
            if let Some(bar) = bar {
                let error = sums.iter().map(Sums::cosine_error).fold(0.0, nan_max);
                rows.push(Row::new(&name, Measure::Cosine, error, bar, detail));
            }
        }
        rows
    }

    fn relative(&self, name: &str, value: f64, detail: String) -> Row {
        let own = self.gates.tensors.iter().filter(|(prefix, _)| name.starts_with(prefix.as_str()));
        let own = own.max_by_key(|(prefix, _)| prefix.len());
        Row::new(name, Measure::Relative, value, own.map_or(self.gates.tensor, |(_, bar)| *bar), detail)
    }

    fn picture_row(&self, name: &str, image: &HostTensor, bar: f64) -> Option<Row> {
        let reference = self.picture.as_ref()?;
        let detail = format!("largest difference {:.5} of 1", largest_difference(image, reference));
        Some(Row::new(name, Measure::Psnr, picture_db(image, reference), bar, detail))
    }
}

/// PSNR with peak 1 of pictures in 0..1, within what JSON can say.
pub fn picture_db(image: &HostTensor, reference: &HostTensor) -> f64 {
    psnr(image, reference).unwrap_or(f64::NEG_INFINITY).clamp(-EXACT_DB, EXACT_DB)
}

/// Whole numbers, which are the reference's or not; all of them differ from one of another kind or shape.
fn exact(name: &str, ids: &[i64], shape: &[usize], reference: &HostTensor) -> Row {
    let is_whole = matches!(reference.values, Values::I64(_) | Values::U8(_));
    let (differing, detail) = match reference.as_type(DType::I64).values {
        Values::I64(other) if is_whole && reference.shape == shape => {
            let differing = ids.iter().zip(other.iter()).filter(|(a, b)| a != b).count();
            (differing, format!("{} values", ids.len()))
        }
        _ => {
            let (dtype, other) = (reference.values.dtype().name(), &reference.shape);
            (ids.len().max(1), format!("i64 {shape:?}, but the reference is {dtype} {other:?}"))
        }
    };
    Row::new(name, Measure::Exact, differing as f64, 0.0, detail)
}

fn absolute(name: &str, tensor: &HostTensor, reference: &HostTensor, bar: f64) -> Row {
    let value = largest_difference(tensor, reference);
    Row::new(name, Measure::Absolute, value, bar, format!("{:?}", reference.shape))
}

fn largest(values: &[f32]) -> f64 {
    f64::from(values.iter().fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs())))
}

/// Largest absolute difference; infinite for shapes that do not belong together.
fn largest_difference(a: &HostTensor, b: &HostTensor) -> f64 {
    if a.shape != b.shape {
        return f64::INFINITY;
    }
    worst(&a.to_f32(), &b.to_f32())
}

fn worst(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, nan_max)
}

/// The larger of two, NaN if either is: a comparison with NaN must not vanish.
fn nan_max(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}
