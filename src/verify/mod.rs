//! Compares a bundle with reference tensors, boundary by boundary.
//!
//! Two runs: in the first every boundary is compared and then replaced by the reference's tensor, so that a fault shows
//! where it is made and nowhere else; the second runs free, as a user's would, and its picture is compared.

mod compare;
mod oracle;

use std::path::PathBuf;

use serde::Serialize;
use viaduct_export::{
    bundle::Bundle,
    recipe::{Gates, RecipeError},
};

use self::compare::Comparer;
pub use self::{
    compare::{Outcome, Row},
    oracle::{Oracle, OracleRequest},
};
use crate::{
    npy::NpyError,
    pipeline::{
        event::Listener,
        image::to_unit,
        noise::draw_latents,
        probe::NoProbe,
        run::{Run, Watch},
        run_folder::RunFolder,
        size::SizeError,
        text_to_image::{Noise, PipelineError, Request, TextToImage},
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
    #[error(
        "recipe '{recipe}' states no gates for profile '{profile}', so there is nothing to verify against"
    )]
    NoGates { recipe: String, profile: String },
}

/// Some boundary is further from the reference than its bar; exit code 3.
#[derive(Debug, thiserror::Error)]
#[error("{missed} of {rows} boundaries miss their bar; the first is {first}: {value}, bar {bar}")]
pub struct BarsMissed {
    pub missed: usize,
    pub rows: usize,
    pub first: String,
    pub value: String,
    pub bar: String,
}

/// The comparison's result.
#[derive(Debug, Serialize)]
pub struct Report {
    pub profile: String,
    pub device: String,
    pub rows: Vec<Row>,
    /// Reference tensors that were not compared.
    pub not_compared: Vec<String>,
    /// Nodes by execution provider, over both runs.
    pub nodes: std::collections::BTreeMap<String, usize>,
}

impl Report {
    /// An error if any row misses its bar.
    pub fn check(&self) -> Result<(), BarsMissed> {
        let mut missed = self.rows.iter().filter(|row| row.outcome == Outcome::Missed);
        let Some(first) = missed.next() else { return Ok(()) };
        let [value, bar] = first.figures();
        let name = first.name.clone();
        Err(BarsMissed { missed: 1 + missed.count(), rows: self.rows.len(), first: name, value, bar })
    }
}

/// Runs a bundle on an oracle's request and compares every boundary.
pub fn verify(
    bundle: &Bundle,
    oracle: &Oracle,
    executor: &mut dyn Executor,
    listener: &mut dyn Listener,
) -> Result<Report, VerifyError> {
    let pipeline = TextToImage::open(bundle)?;
    let gates = gates(bundle)?;
    check_settings(&pipeline, oracle)?;
    let request = request(&pipeline, oracle)?;

    let mut comparer = Comparer::new(oracle, &gates);
    let mut run =
        Run { executor, plan: None, watch: Watch::new(listener, &mut comparer), folder: RunFolder::none() };
    let forced = pipeline.draw(&request, &mut run)?;
    let mut nodes = run.watch.nodes;
    if !oracle.names.contains("image_raw") {
        comparer.forced_picture(&to_unit(&forced))?;
    }

    let mut nothing = NoProbe;
    let mut run =
        Run { executor, plan: None, watch: Watch::new(listener, &mut nothing), folder: RunFolder::none() };
    let free = to_unit(&pipeline.draw(&request, &mut run)?);
    for (provider, count) in run.watch.nodes {
        *nodes.entry(provider).or_default() += count;
    }
    comparer.free_picture(&free)?;
    compare_seed(&pipeline, oracle, &request, &mut comparer)?;
    let (rows, not_compared) = comparer.finish()?;
    let device = executor.device().to_string();
    Ok(Report { profile: bundle.manifest.profile.clone(), device, rows, not_compared, nodes })
}

fn gates(bundle: &Bundle) -> Result<Gates, VerifyError> {
    let (recipe, profile) = (&bundle.manifest.recipe, &bundle.manifest.profile);
    let gates = recipe.gates.get(profile).cloned();
    gates.ok_or_else(|| VerifyError::NoGates { recipe: recipe.name.clone(), profile: profile.clone() })
}

fn check_settings(pipeline: &TextToImage<'_>, oracle: &Oracle) -> Result<(), VerifyError> {
    let list = |taps: &[usize]| taps.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let stated = [
        ("text_encoder.length", oracle.request.text_length.map(|n| n.to_string())),
        ("text_encoder.taps", oracle.request.taps.as_deref().map(list)),
    ];
    for (key, bundle) in pipeline.family().settings() {
        let oracle = stated.iter().find(|(known, _)| *known == key).and_then(|(_, oracle)| oracle.clone());
        if let Some(oracle) = oracle.filter(|oracle| *oracle != bundle) {
            return Err(VerifyError::Mismatch { key, bundle, oracle });
        }
    }
    Ok(())
}

fn request(pipeline: &TextToImage<'_>, oracle: &Oracle) -> Result<Request, VerifyError> {
    let asked = &oracle.request;
    let size = pipeline.family().size(asked.width, asked.height)?;
    Ok(Request {
        prompt: asked.prompt.clone(),
        negative: None,
        size,
        steps: asked.steps,
        noise: Noise::Given(oracle.noise(size)?),
    })
}

/// The oracle's seed must give the oracle's noise.
fn compare_seed(
    pipeline: &TextToImage<'_>,
    oracle: &Oracle,
    request: &Request,
    comparer: &mut Comparer<'_>,
) -> Result<(), VerifyError> {
    let Some(seed) = oracle.request.seed else { return Ok(()) };
    let [rows, columns] = request.size.grid();
    let noise = draw_latents(seed, pipeline.family().channels(), rows, columns);
    comparer.noise(&noise, &oracle.noise(request.size)?);
    Ok(())
}
