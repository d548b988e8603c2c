//! Compares a bundle with reference tensors, boundary by boundary, and sees that the comparison would notice a fault.
//!
//! Two runs: in the first every boundary is compared and then replaced by the reference's tensor, so that a fault shows
//! where it is made and nowhere else; the second runs free, as a user's would, and its picture is compared. Then the recipe's
//! controls are planted, each in the component that must notice it.

mod alteration;
mod compare;
mod control;
mod judge;
mod oracle;
mod replay;
mod row;
mod sensitivity;
mod stored;
mod subject;
mod tally;

use std::{collections::BTreeMap, path::PathBuf};

use serde::Serialize;
use viaduct_export::{
    bundle::Bundle,
    gates::{Gates, Measure},
    recipe::RecipeError,
};

use self::{
    compare::Comparer,
    control::Controls,
    judge::{DRAWN, Judge},
    replay::{Recorder, Recording},
    sensitivity::{Ends, sense},
    subject::{Drawn, Subject},
};
pub use self::{
    control::{Planted, Verdict},
    oracle::{Oracle, OracleRequest},
    row::{Outcome, Row},
    sensitivity::{Band, Sensitivity},
    stored::{KeepError, keep, summaries},
    tally::Tally,
};
use crate::{
    npy::NpyError,
    pipeline::{
        event::{Event, Listener},
        image::to_unit,
        size::SizeError,
        text_to_image::PipelineError,
    },
    runtime::Executor,
};

#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    #[error(transparent)]
    Size(#[from] SizeError),
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error(transparent)]
    Npy(#[from] NpyError),
    #[error("{}: {problem}", path.display())]
    Oracle { path: PathBuf, problem: String },
    #[error("{key}: the bundle has {bundle}, the oracle {oracle}; export with --set {key}={oracle}")]
    Mismatch { key: &'static str, bundle: String, oracle: String },
    #[error("{}: the oracle took {oracle} steps, and this bundle takes {bundle}: its noise levels are fixed; make the reference with {bundle} steps", path.display())]
    Steps { path: PathBuf, oracle: usize, bundle: usize },
    #[error(
        "recipe '{recipe}' states no gates for profile '{profile}', so there is nothing to verify against; add [gates.{profile}] to a recipe and export with --recipe"
    )]
    NoGates { recipe: String, profile: String },
}

/// The bundle is not verified; exit code 3.
#[derive(Debug, thiserror::Error)]
pub enum BarsMissed {
    /// Some boundary is further from the reference than its bar.
    #[error("{missed} of {rows} bars are missed; the first is {first}: {value}, bar {bar}")]
    Missed { missed: usize, rows: usize, first: String, value: String, bar: String },
    /// A bar is not missed by a planted fault.
    #[error(
        "{green} of {controls} controls stay green: the gate has no teeth; the first is {first}, which should miss the bar of {misses}"
    )]
    Toothless { green: usize, controls: usize, first: String, misses: String },
}

/// What is asked of a bundle besides the comparison.
#[derive(Clone, Copy, Debug)]
pub struct VerifyOptions {
    /// Plants the recipe's controls.
    pub controls: bool,
    /// Disturbed prompts that are drawn for the model's own band.
    pub seeds: usize,
}

/// The comparison's result.
#[derive(Debug, Serialize)]
pub struct Report {
    pub profile: String,
    pub device: String,
    pub rows: Vec<Row>,
    /// Reference tensors that were not compared.
    pub not_compared: Vec<String>,
    pub controls: Vec<Planted>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sensitivity: Option<Sensitivity>,
    /// Whether the free picture is as near to the reference as the model's own pictures are to each other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub picture_within_band: Option<bool>,
    /// Nodes by execution provider, over the runs without a fault.
    pub nodes: BTreeMap<String, usize>,
}

impl Report {
    pub fn tally(&self) -> Tally {
        Tally::of(self.rows.iter().map(|row| row.outcome), &self.controls)
    }

    /// An error if any row misses its bar, or any control does not.
    pub fn check(&self) -> Result<(), BarsMissed> {
        let mut missed = self.rows.iter().filter(|row| row.outcome == Outcome::Missed);
        if let Some(first) = missed.next() {
            let [value, bar] = first.figures();
            let (rows, first) = (self.rows.len(), first.name.clone());
            return Err(BarsMissed::Missed { missed: 1 + missed.count(), rows, first, value, bar });
        }
        let mut green = self.controls.iter().filter(|control| control.verdict == Verdict::Green);
        let Some(first) = green.next() else { return Ok(()) };
        let (controls, misses) = (self.controls.len(), first.misses.clone());
        let first = first.name.clone();
        Err(BarsMissed::Toothless { green: 1 + green.count(), controls, first, misses })
    }

    /// Judges the free picture by the model's own band. A picture that misses its bar within the band tells nothing that the model
    /// does not do by itself; this counts only where nothing else is wrong, because a fault may widen the band, and shows in
    /// the boundaries then.
    fn judge_by_band(&mut self) {
        let Some(sensitivity) = &self.sensitivity else { return };
        let is_drawn = |row: &Row| row.name == DRAWN && row.measure == Measure::Psnr;
        let others = self.rows.iter().filter(|row| !is_drawn(row));
        let alone = others.clone().all(|row| row.outcome == Outcome::Passed);
        let Some(picture) = self.rows.iter_mut().find(|row| is_drawn(row)) else { return };
        let within = picture.value >= sensitivity.image_db.worst;
        self.picture_within_band = Some(within);
        if within && alone && picture.outcome == Outcome::Missed {
            picture.outcome = Outcome::WithinBand;
        }
    }
}

/// Runs a bundle on an oracle's request and compares every boundary.
pub fn verify(
    bundle: &Bundle,
    oracle: &Oracle,
    options: VerifyOptions,
    executor: &mut dyn Executor,
    listener: &mut dyn Listener,
) -> Result<Report, VerifyError> {
    let subject = Subject::open(bundle, oracle)?;
    let gates = gates(bundle)?;
    let mut comparer = Comparer::new(oracle, Judge::new(oracle, gates)?);
    let Drawn { image, mut nodes } = subject.draw(executor, &mut comparer, listener)?;
    comparer.decoded(&image)?;

    let mut recorder = Recorder { executor, recording: Recording::default() };
    let mut ends = Ends::of(subject.request.steps);
    let drawn = subject.draw(&mut recorder, &mut ends, listener)?;
    let Recorder { executor, recording } = recorder;
    for (provider, count) in drawn.nodes {
        *nodes.entry(provider).or_default() += count;
    }
    let free = to_unit(&drawn.image);
    comparer.drawn(&free);
    if let Some(noise) = subject.noise_of_seed() {
        comparer.noise(&noise, &oracle.noise(subject.request.size)?);
    }
    let judge = comparer.judge.clone();
    let (rows, not_compared) = comparer.finish()?;

    let sensitivity = sense(options.seeds, (&free, &ends), (&subject, &recording), executor, listener)?;
    let mut planted = Vec::new();
    let controls = Controls { subject: &subject, judge: &judge, recording: &recording };
    for (name, control) in bundle.manifest.recipe.controls.iter().filter(|_| options.controls) {
        listener.on_event(Event::note(format!("control {name}")));
        planted.push(controls.plant(name, control, executor, listener)?);
    }
    let mut report = Report {
        profile: bundle.manifest.profile.clone(),
        device: executor.device().to_string(),
        rows,
        not_compared,
        controls: planted,
        sensitivity,
        picture_within_band: None,
        nodes,
    };
    report.judge_by_band();
    Ok(report)
}

fn gates(bundle: &Bundle) -> Result<&Gates, VerifyError> {
    let (recipe, profile) = (&bundle.manifest.recipe, &bundle.manifest.profile);
    let gates = recipe.gates.get(profile);
    gates.ok_or_else(|| VerifyError::NoGates { recipe: recipe.name.clone(), profile: profile.clone() })
}
