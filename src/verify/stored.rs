//! What a bundle's manifest keeps of a report: one result for each device and reference.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use viaduct_export::{
    bundle::{Bundle, StoreError},
    gates::Measure,
};

use super::{
    Oracle, Planted, Report, Tally, VerifyError, judge::DRAWN, row::Outcome, sensitivity::Sensitivity,
};
use crate::runtime::Device;

/// Why a report was not stored.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    #[error(transparent)]
    Oracle(#[from] VerifyError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("it cannot be written as JSON: {0}")]
    Json(#[from] serde_json::Error),
}

/// One result.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    /// Version of this program.
    viaduct: String,
    provider: String,
    device: String,
    driver: String,
    onnxruntime: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    webgpu_plugin: Option<String>,
    oracle: Reference,
    rows: Vec<StoredRow>,
    controls: Vec<Planted>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sensitivity: Option<Sensitivity>,
}

/// Which reference tensors.
#[derive(Debug, Serialize, Deserialize)]
struct Reference {
    /// The folder's last two names, for people.
    name: String,
    sha256: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct StoredRow {
    name: String,
    measure: Measure,
    /// None for what is not finite, which JSON cannot say.
    value: Option<f64>,
    bar: f64,
    outcome: Outcome,
}

/// Keeps a report in the bundle's manifest, in the place of an earlier one of the same device and reference.
pub fn keep(bundle: &Bundle, oracle: &Oracle, device: &Device, report: &Report) -> Result<(), KeepError> {
    let row = |row: &super::Row| StoredRow {
        name: row.name.clone(),
        measure: row.measure,
        value: Some(row.value),
        bar: row.bar,
        outcome: row.outcome,
    };
    let stored = serde_json::to_value(Stored {
        viaduct: env!("CARGO_PKG_VERSION").to_owned(),
        provider: device.provider.to_string(),
        device: device.name.clone(),
        driver: device.driver.clone(),
        onnxruntime: device.ort_version.clone(),
        webgpu_plugin: device.plugin_version.clone(),
        oracle: Reference { name: oracle.name(), sha256: oracle.sha256()? },
        rows: report.rows.iter().map(row).collect(),
        controls: report.controls.clone(),
        sensitivity: report.sensitivity.clone(),
    })?;
    let same = |other: &Value| {
        let is = |path| stored.pointer(path) == other.pointer(path);
        ["/provider", "/device", "/oracle/sha256"].into_iter().all(is)
    };
    Ok(bundle.store_verified(stored.clone(), same)?)
}

/// A line for each result of a manifest.
pub fn summaries(verified: &[Value]) -> Vec<String> {
    let summary = |value: &Value| match Stored::deserialize(value) {
        Ok(stored) => stored.summary(),
        Err(_) => "a result in a form that this version does not read".to_owned(),
    };
    verified.iter().map(summary).collect()
}

impl Stored {
    fn summary(&self) -> String {
        let tally = Tally::of(self.rows.iter().map(|row| row.outcome), &self.controls);
        let drawn = self.rows.iter().find(|row| row.name == DRAWN && row.measure == Measure::Psnr);
        let picture = drawn.and_then(|row| row.value).map(|db| format!(", picture {db:.1} dB"));
        format!(
            "{tally}{}; {} on {}, reference {}",
            picture.unwrap_or_default(),
            self.provider,
            self.device,
            self.oracle.name
        )
    }
}
