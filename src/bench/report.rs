//! What was measured. As JSON it holds every number of the table, and what the numbers are of.

use serde::Serialize;

use super::{
    Measured,
    timed::{Opening, TimedPicture},
};
use crate::{
    pipeline::text_to_image::{TEXT_ENCODER, TRANSFORMER},
    plan::{PlannedStage, Settings},
    runtime::{Device, MemoryPeaks},
};

/// One command's measurements.
#[derive(Serialize)]
pub struct Report {
    /// The recipe's name and the profile.
    pub bundle: String,
    pub environment: Environment,
    /// The device's measured ceiling: see [`crate::tune::ceiling`].
    pub ceiling_tflops: f64,
    pub sizes: Vec<SizeReport>,
}

/// Where and when it was measured.
#[derive(Serialize)]
pub struct Environment {
    /// In UTC: `2026-11-30`.
    pub date: String,
    pub viaduct: String,
    pub onnx_runtime: String,
    pub webgpu_plugin: Option<String>,
    pub ep: String,
    pub adapter: String,
    /// Empty for the CPU provider.
    pub driver: String,
}

impl Environment {
    pub fn of(device: &Device) -> Environment {
        Environment {
            date: today(),
            viaduct: env!("CARGO_PKG_VERSION").to_owned(),
            onnx_runtime: device.ort_version.clone(),
            webgpu_plugin: device.plugin_version.clone(),
            ep: device.provider.to_string(),
            adapter: device.name.clone(),
            driver: device.driver.clone(),
        }
    }
}

/// Pictures of one size.
#[derive(Serialize)]
pub struct SizeReport {
    pub width: usize,
    pub height: usize,
    pub steps: usize,
    /// Warm pictures.
    pub runs: usize,
    /// Whether sessions stayed loaded from one picture to the next.
    pub kept_loaded: bool,
    /// The first picture.
    pub cold_seconds: PictureTimes,
    /// Medians of the others.
    pub warm_seconds: PictureTimes,
    /// All pictures in their order; the first is the cold one.
    pub pictures: Vec<PictureTimes>,
    pub stages: Vec<StageReport>,
    /// Of all pictures.
    pub peak: MemoryPeaks,
}

/// Seconds of one picture, or medians of several.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PictureTimes {
    /// To make sessions.
    pub loading: f64,
    /// Without loading, as everything below but the whole.
    pub text_encoder: f64,
    /// Of each step.
    pub steps: Vec<f64>,
    /// All stages after the transformer.
    pub decoder: f64,
    /// From the prompt to the last tensor, loading and the host's work included.
    pub whole: f64,
}

/// One stage of a picture.
#[derive(Serialize)]
pub struct StageReport {
    pub name: String,
    /// How the plan sets it.
    pub settings: Settings,
    /// Bytes that the plan predicts, of device and host.
    pub predicted: viaduct_export::memory::Predicted,
    /// To make the session for the first picture.
    pub load_seconds: f64,
    /// The first run, in which shaders are compiled.
    pub first_run_seconds: f64,
    /// The median run of the warm pictures.
    pub run_seconds: f64,
    pub runs_per_picture: usize,
    /// Floating-point operations of one run.
    pub flops: u64,
    /// 10^12 of them per second in the median run.
    pub tflops: f64,
}

impl SizeReport {
    pub(super) fn new(
        measured: Measured,
        kept_loaded: bool,
        stages: Vec<StageReport>,
        pictures: &[TimedPicture],
        peak: MemoryPeaks,
    ) -> SizeReport {
        let Measured { size, steps, runs } = measured;
        let pictures: Vec<_> = pictures.iter().map(PictureTimes::of).collect();
        SizeReport {
            width: size.width(),
            height: size.height(),
            steps,
            runs,
            kept_loaded,
            cold_seconds: pictures[0].clone(),
            warm_seconds: PictureTimes::medians(&pictures[1..]),
            pictures,
            stages,
            peak,
        }
    }
}

impl PictureTimes {
    fn of(picture: &TimedPicture) -> PictureTimes {
        let after = picture.openings.iter().rposition(|opening| opening.stage == TRANSFORMER);
        let after = after.map_or(0, |last| last + 1);
        let work = |opening: &Opening| opening.uploads + opening.runs.iter().sum::<f64>();
        PictureTimes {
            loading: picture.openings.iter().map(|opening| opening.load).sum(),
            text_encoder: picture.of(TEXT_ENCODER).map(work).sum(),
            steps: picture.runs(TRANSFORMER).collect(),
            decoder: picture.openings[after..].iter().map(work).sum(),
            whole: picture.whole,
        }
    }

    fn medians(pictures: &[PictureTimes]) -> PictureTimes {
        let of = |part: &dyn Fn(&PictureTimes) -> f64| median(pictures.iter().map(part).collect());
        let steps = pictures.iter().map(|picture| picture.steps.len()).min().unwrap_or(0);
        PictureTimes {
            loading: of(&|picture| picture.loading),
            text_encoder: of(&|picture| picture.text_encoder),
            steps: (0..steps).map(|step| of(&|picture| picture.steps[step])).collect(),
            decoder: of(&|picture| picture.decoder),
            whole: of(&|picture| picture.whole),
        }
    }
}

impl StageReport {
    pub(super) fn new(planned: &PlannedStage, flops: u64, pictures: &[TimedPicture]) -> StageReport {
        let PlannedStage { name, settings, predicted, .. } = planned;
        let (cold, warm) = (&pictures[0], &pictures[1..]);
        let run_seconds = median(warm.iter().flat_map(|picture| picture.runs(name)).collect());
        StageReport {
            name: name.clone(),
            settings: *settings,
            predicted: *predicted,
            load_seconds: cold.of(name).map(|opening| opening.load).sum(),
            first_run_seconds: cold.runs(name).next().unwrap_or(0.0),
            run_seconds,
            runs_per_picture: cold.runs(name).count(),
            flops,
            tflops: if run_seconds > 0.0 { flops as f64 / run_seconds / 1e12 } else { 0.0 },
        }
    }
}

/// The middle value, or the mean of the two in the middle; 0 of nothing.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        count if count % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

/// The date in UTC, after the algorithm of Howard Hinnant's `civil_from_days`.
fn today() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    date_of(now.map_or(0, |since| since.as_secs() / 86_400))
}

/// `1970-01-01` for 0. The year begins in March, so that the leap day is its last.
fn date_of(days: u64) -> String {
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(vec![]), 0.0);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn dates() {
        for (days, date) in
            [(0, "1970-01-01"), (59, "1970-03-01"), (11_016, "2000-02-29"), (20_787, "2026-11-30")]
        {
            assert_eq!(date_of(days), date);
        }
    }

    #[test]
    fn a_picture_is_the_sum_of_its_parts() {
        let opening = |stage: &str, runs: &[f64]| Opening {
            stage: stage.to_owned(),
            load: 1.0,
            uploads: 0.5,
            runs: runs.to_vec(),
        };
        let openings = vec![
            opening(TEXT_ENCODER, &[2.0]),
            opening("modulation", &[3.0]),
            opening(TRANSFORMER, &[4.0, 5.0]),
            opening("vae_pre", &[6.0]),
            opening("vae_attention", &[7.0, 7.0]),
        ];
        let times = PictureTimes::of(&TimedPicture { openings, whole: 50.0 });
        let expected = PictureTimes {
            loading: 5.0,
            text_encoder: 2.5,
            steps: vec![4.0, 5.0],
            decoder: 21.0,
            whole: 50.0,
        };
        assert_eq!(times, expected);
        let slower = PictureTimes { steps: vec![6.0, 6.0], ..expected.clone() };
        assert_eq!(PictureTimes::medians(&[expected, slower]).steps, [5.0, 5.5]);
    }
}
