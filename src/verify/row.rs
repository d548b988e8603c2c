//! One row of the report: a boundary, how far it is from the reference's, and whether that is near enough.

use serde::{Deserialize, Serialize};
use viaduct_export::gates::Measure;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Passed,
    Missed,
    /// A free picture that misses its bar, but is as near to the reference as the model's own pictures are to each other.
    WithinBand,
}

/// The comparison of one boundary.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub name: String,
    pub measure: Measure,
    pub value: f64,
    pub bar: f64,
    pub outcome: Outcome,
    /// 1 - cos of the angle to the reference, of a whole tensor that a graph computes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cosine_error: Option<f64>,
    /// Elements, or what else is worth saying.
    pub detail: String,
}

impl Row {
    /// A row that has not been told more than its numbers.
    pub fn new(name: &str, measure: Measure, value: f64, bar: f64, detail: String) -> Row {
        // Written so that NaN misses.
        let reached = if measure == Measure::Psnr { value >= bar } else { value <= bar };
        let outcome = if reached { Outcome::Passed } else { Outcome::Missed };
        Row { name: name.to_owned(), measure, value, bar, outcome, cosine_error: None, detail }
    }

    /// Value and bar as one reads them.
    pub fn figures(&self) -> [String; 2] {
        figures(self.measure, self.value, self.bar)
    }
}

/// Value and bar of a measure as one reads them.
pub fn figures(measure: Measure, value: f64, bar: f64) -> [String; 2] {
    match measure {
        Measure::Psnr => [value, bar].map(|db| format!("{db:.1} dB")),
        Measure::Exact => [format!("{value} differ"), "0 differ".to_owned()],
        _ => [format!("{value:.2e}"), format!("{bar:e}")],
    }
}
