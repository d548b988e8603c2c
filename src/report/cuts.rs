//! The image decoder cut into more or fewer stages, compared before it is exported.

use serde::Serialize;
use viaduct_export::{
    arch::{SizesError, SizesRequest},
    bundle::{BundleError, ExportError, Outline},
};

use crate::plan::{Budget, PlannedModel};

/// The recipe's value that says before which up blocks a new stage begins.
const CUTS: [&str; 2] = ["vae_decoder", "cuts"];
/// No decoder has more up blocks; a family leaves out those that are not there.
const MOST_UP_BLOCKS: usize = 32;

/// Why cuts cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum CutsError {
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error(transparent)]
    Sizes(#[from] SizesError),
}

/// One way to cut the image decoder.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DecoderCuts {
    /// Up blocks before which a new stage begins.
    pub cuts: Vec<usize>,
    /// Whether the recipe says so.
    pub own: bool,
    /// How many stages the decoder has then.
    pub stages: usize,
    /// The stage with the largest peak.
    pub largest: String,
    /// Bytes of that peak, counted as a stage's.
    pub peak: u64,
    /// Whether every stage of the decoder fits the budget, if there is one.
    pub fits: bool,
}

impl DecoderCuts {
    /// `1,2,3`
    pub fn in_words(&self) -> String {
        match self.cuts.is_empty() {
            true => "none".to_owned(),
            false => self.listed(),
        }
    }

    /// What the export is told: `vae_decoder.cuts=1,2,3`, or nothing after the sign.
    pub fn setting(&self) -> String {
        format!("{}={}", CUTS.join("."), self.listed())
    }

    fn listed(&self) -> String {
        self.cuts.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
    }
}

/// Plans the decoder with the recipe's own cuts, with none, and with all that there are, on the model's device.
pub fn compare_cuts(
    outline: &Outline,
    model: &PlannedModel<'_>,
    picture: &SizesRequest,
    budget: Budget,
) -> Result<Vec<DecoderCuts>, CutsError> {
    let every: Vec<usize> = (1..MOST_UP_BLOCKS).collect();
    let stages = |cuts: &[usize]| Ok::<_, CutsError>(outline.decoder(cuts)?.stages.len());
    let possible = stages(&every)?.saturating_sub(stages(&[])?);
    let all: Vec<usize> = (1..=possible).collect();
    let own: Vec<usize> = all.iter().copied().filter(|cut| own_cuts(outline).contains(cut)).collect();
    let mut candidates = vec![own.clone(), Vec::new(), all];
    candidates.sort_by_key(Vec::len);
    candidates.dedup();
    let plan = |cuts: Vec<usize>| {
        // Its symbols are those of its cuts, and the sizes must be, too.
        let decoder = outline.decoder(&cuts)?;
        let decoder = PlannedModel::new(&decoder, model.device().clone(), budget)?;
        let plan = decoder.plan(picture)?;
        let largest = plan.largest();
        Ok(DecoderCuts {
            own: cuts == own,
            stages: plan.stages.len(),
            largest: largest.map(|stage| stage.name.clone()).unwrap_or_default(),
            peak: largest.map_or(0, |stage| budget.counted(stage.predicted)),
            fits: plan.offender().is_none(),
            cuts,
        })
    };
    candidates.into_iter().map(plan).collect()
}

fn own_cuts(outline: &Outline) -> Vec<usize> {
    let [section, key] = CUTS;
    let cuts = outline.recipe.sections.get(section).and_then(|section| section.get(key)?.as_array());
    cuts.into_iter().flatten().filter_map(|cut| usize::try_from(cut.as_integer()?).ok()).collect()
}

/// The cuts with the smallest peak that fit the budget where the recipe's own do not. Fewer may do it: a stage's input lies
/// on the host and on the device.
pub fn remedy(compared: &[DecoderCuts]) -> Option<&DecoderCuts> {
    let own_fit = compared.iter().any(|cuts| cuts.own && cuts.fits);
    compared.iter().filter(|cuts| cuts.fits && !own_fit).min_by_key(|cuts| cuts.peak)
}
