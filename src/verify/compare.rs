//! One row per boundary: how far the tensor is from the reference's, and whether that is near enough.

use std::collections::BTreeSet;

use serde::Serialize;
use viaduct_export::recipe::Gates;

use super::{Oracle, VerifyError};
use crate::{
    pipeline::{image::psnr, probe::Probe},
    tensor::{HostTensor, Values},
};

/// Bars that hold for every profile, because the host computes these in f32: largest absolute difference.
const HOST_BARS: &[(&str, f64)] =
    &[("sigmas", 1e-6), ("rope_cos", 1e-6), ("rope_sin", 1e-6), ("noise_nchw", 0.0)];
/// Normals from one seed may differ in the last bits between the reference's own code paths.
const NOISE_BAR: f64 = 2e-6;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Passed,
    Missed,
}

/// The comparison of one boundary.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub name: String,
    /// `relative` (max|a-b| / max|b|), `absolute`, `exact` (differing values) or `psnr` (dB).
    pub measure: &'static str,
    pub value: f64,
    pub bar: f64,
    pub outcome: Outcome,
    /// 1 - cos of the angle to the reference, of a tensor that a graph computes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cosine_error: Option<f64>,
    /// Elements, or what else is worth saying.
    pub detail: String,
}

impl Row {
    /// Value and bar as one reads them.
    pub fn figures(&self) -> [String; 2] {
        match self.measure {
            "psnr" => [self.value, self.bar].map(|db| format!("{db:.1} dB")),
            "exact" => [format!("{} differ", self.value), "0 differ".to_owned()],
            _ => [format!("{:.2e}", self.value), format!("{:.0e}", self.bar)],
        }
    }
}

/// Compares every boundary with the oracle's tensor and lets the run go on with the latter.
pub struct Comparer<'a> {
    oracle: &'a Oracle,
    gates: &'a Gates,
    rows: Vec<Row>,
    seen: BTreeSet<String>,
    /// Which rows of the text are padding, once the mask has passed.
    padding: Vec<bool>,
    /// A probe cannot stop a run: a reference file that could not be read is reported at the end.
    failed: Option<VerifyError>,
}

impl<'a> Comparer<'a> {
    pub fn new(oracle: &'a Oracle, gates: &'a Gates) -> Comparer<'a> {
        Comparer { oracle, gates, rows: Vec::new(), seen: BTreeSet::new(), padding: Vec::new(), failed: None }
    }

    /// The rows, and the names of reference tensors that nothing was compared with.
    pub fn finish(self) -> Result<(Vec<Row>, Vec<String>), VerifyError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        if !self.seen.iter().any(|name| is_computed(name)) {
            let problem =
                "no tensor of the model is among the reference tensors, so nothing was verified".to_owned();
            return Err(VerifyError::Oracle { path: self.oracle.folder().to_owned(), problem });
        }
        let unseen = self.oracle.names.iter().filter(|name| !self.seen.contains(*name));
        Ok((self.rows, unseen.cloned().collect()))
    }

    /// Compares the picture (0..1) that the decoder makes of the reference's latents.
    pub fn forced_picture(&mut self, image: &HostTensor) -> Result<(), VerifyError> {
        if let Some(reference) = self.oracle.tensor("image_01")? {
            self.relative("image_01 (reference latents)", image, &reference);
        }
        Ok(())
    }

    /// Compares the picture (0..1) of a free run, by PSNR with peak 1.
    pub fn free_picture(&mut self, image: &HostTensor) -> Result<(), VerifyError> {
        let Some(reference) = self.oracle.tensor("image_01")? else { return Ok(()) };
        self.seen.insert("image_01".to_owned());
        let db = psnr(image, &reference).unwrap_or(f64::NEG_INFINITY);
        let bar = self.gates.image_db;
        let detail = format!("largest difference {:.5} of 1", largest_difference(image, &reference));
        let outcome = if db >= bar { Outcome::Passed } else { Outcome::Missed };
        // An exact picture has no finite PSNR, and JSON has no infinity.
        let value = db.clamp(-999.0, 999.0);
        self.rows.push(Row {
            name: "image_01".to_owned(),
            measure: "psnr",
            value,
            bar,
            outcome,
            cosine_error: None,
            detail,
        });
        Ok(())
    }

    /// Compares noise drawn from the oracle's seed.
    pub fn noise(&mut self, drawn: &HostTensor, reference: &HostTensor) {
        self.absolute("noise from the seed", drawn, reference, NOISE_BAR);
    }

    fn compare(&mut self, name: &str, tensor: &HostTensor, reference: &HostTensor) {
        if let (Values::I64(a), Values::I64(b)) = (&tensor.values, &reference.values) {
            let differing =
                a.iter().zip(b.iter()).filter(|(a, b)| a != b).count() + a.len().abs_diff(b.len());
            self.push(name, "exact", differing as f64, 0.0, format!("{} values", a.len()));
        } else if let Some((_, bar)) = HOST_BARS.iter().find(|bar| bar.0 == name) {
            self.absolute(name, tensor, reference, *bar);
        } else if name == "prompt_embeds" {
            self.text_rows(name, tensor, reference);
        } else {
            self.relative(name, tensor, reference);
        }
    }

    fn absolute(&mut self, name: &str, tensor: &HostTensor, reference: &HostTensor, bar: f64) {
        let value = largest_difference(tensor, reference);
        self.push(name, "absolute", value, bar, format!("{:?}", reference.shape));
    }

    fn relative(&mut self, name: &str, tensor: &HostTensor, reference: &HostTensor) {
        let value = largest_difference(tensor, reference) / largest(&reference.to_f32());
        self.push(name, "relative", value, self.bar(name), format!("{:?}", reference.shape));
        if let Some(row) = self.rows.last_mut() {
            row.cosine_error = cosine_error(&tensor.to_f32(), &reference.to_f32());
        }
    }

    /// Text rows one by one, each against its own largest value, real and padding rows apart: padding rows are seen by
    /// the transformer too, and a fault there hides behind the much larger real rows.
    fn text_rows(&mut self, name: &str, tensor: &HostTensor, reference: &HostTensor) {
        if tensor.shape != reference.shape || self.padding.is_empty() {
            return self.relative(name, tensor, reference);
        }
        let (a, b) = (tensor.to_f32(), reference.to_f32());
        let width = b.len() / self.padding.len();
        let rows = a.chunks_exact(width).zip(b.chunks_exact(width));
        let errors: Vec<f64> = rows.map(|(a, b)| worst(a, b) / largest(b)).collect();
        for (class, wanted) in [("real rows", false), ("padding rows", true)] {
            let rows = errors.iter().zip(&self.padding).filter(|(_, padding)| **padding == wanted);
            let Some(worst) = rows.clone().map(|(error, _)| *error).reduce(nan_max) else { continue };
            let detail = format!("the worst of {} rows", rows.count());
            let of_class = |values: &[f32]| -> Vec<f32> {
                let rows = values.chunks_exact(width).zip(&self.padding);
                rows.filter(|(_, padding)| **padding == wanted).flat_map(|(row, _)| row).copied().collect()
            };
            let cosine_error = cosine_error(&of_class(&a), &of_class(&b));
            self.push(&format!("{name} ({class})"), "relative", worst, self.bar(name), detail);
            if let Some(row) = self.rows.last_mut() {
                row.cosine_error = cosine_error;
            }
        }
    }

    fn bar(&self, name: &str) -> f64 {
        let own = self.gates.tensors.iter().find(|(prefix, _)| name.starts_with(prefix.as_str()));
        own.map_or(self.gates.tensor, |(_, bar)| *bar)
    }

    fn push(&mut self, name: &str, measure: &'static str, value: f64, bar: f64, detail: String) {
        // Written so that NaN misses.
        let outcome = if value <= bar { Outcome::Passed } else { Outcome::Missed };
        let name = name.to_owned();
        self.rows.push(Row { name, measure, value, bar, outcome, cosine_error: None, detail });
    }
}

impl Probe for Comparer<'_> {
    fn internals(&self) -> bool {
        true
    }

    fn boundary(&mut self, name: &str, tensor: HostTensor) -> HostTensor {
        let reference = match self.oracle.tensor(name) {
            Ok(Some(reference)) => reference,
            Ok(None) => return tensor,
            Err(error) => {
                self.failed.get_or_insert(error);
                return tensor;
            }
        };
        self.seen.insert(name.to_owned());
        self.compare(name, &tensor, &reference);
        if let (Values::I64(mask), "attention_mask", true) =
            (&reference.values, name, reference.shape == tensor.shape)
        {
            self.padding = mask.iter().map(|m| *m == 0).collect();
        }
        forced(tensor, reference)
    }
}

/// Whether a boundary is computed by a graph, and not by the host.
fn is_computed(name: &str) -> bool {
    let graphs = ["prompt_embeds", "dit_", "pred_step", "vae_", "image_"];
    graphs.iter().any(|graph| name.starts_with(graph))
}

/// The reference in the tensor's element type; the tensor itself if the shapes differ.
fn forced(tensor: HostTensor, reference: HostTensor) -> HostTensor {
    if tensor.shape != reference.shape {
        return tensor;
    }
    match (&tensor.values, &reference.values) {
        (Values::F16(_), Values::F32(values)) => {
            let values = values.iter().map(|x| half::f16::from_f32(*x)).collect();
            HostTensor::new(&reference.shape, Values::F16(values))
        }
        (Values::F32(_), Values::F32(_)) | (Values::I64(_), Values::I64(_)) => reference,
        _ => tensor,
    }
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

/// `None` for shapes that do not belong together, and where a side is zero.
fn cosine_error(a: &[f32], b: &[f32]) -> Option<f64> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let lengths = (dot(a, a) * dot(b, b)).sqrt();
    (a.len() == b.len() && lengths > 0.0).then(|| 1.0 - dot(a, b) / lengths)
}

fn worst(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, nan_max)
}

/// The larger of two, NaN if either is: a comparison with NaN must not vanish.
fn nan_max(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}
