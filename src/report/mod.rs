//! What a model will need, found out without running it: sizes to shapes, shapes to bytes, and bytes to a plan.

mod chart;
mod cuts;
mod subject;
mod table;

use serde::Serialize;
use viaduct_export::{
    arch::SizesRequest,
    device::DeviceProfile,
    memory::{Excess, Hazard, Moment, Quadratic, StageMemory, excesses, hazards, quadratic, symbols},
    onnx::Model,
    shapes::Sizes,
};

use crate::{
    plan::{Budget, Overlap, Plan, Settings, analyse_stage},
    runtime::Attention,
};

pub(crate) use self::table::aligned;
pub use self::{
    chart::{MAX_STAGES, chart},
    cuts::{CutsError, DecoderCuts, compare_cuts},
    subject::Subject,
    table::table,
};

/// What is known of a model on one device. As JSON: docs/report.md.
#[derive(Serialize)]
pub struct Report {
    /// What was looked at: the recipe's name and the profile, or the file of a single graph.
    pub name: String,
    /// None for a single graph.
    pub picture: Option<Picture>,
    pub device: DeviceProfile,
    pub budget: Option<u64>,
    /// Why stages are not set as they usually are: a line for each.
    pub choices: Vec<String>,
    pub chain: Chain,
    /// In the order in which they run.
    pub stages: Vec<StageReport>,
    /// The image decoder cut in other places; of a model that is not exported yet.
    pub decoder_cuts: Vec<DecoderCuts>,
}

/// What is to be drawn.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Picture {
    pub width: usize,
    pub height: usize,
    pub steps: usize,
}

impl From<SizesRequest> for Picture {
    fn from(request: SizesRequest) -> Picture {
        let SizesRequest { width, height, steps, .. } = request;
        Picture { width, height, steps }
    }
}

/// All stages, of which one at a time computes.
#[derive(Serialize)]
pub struct Chain {
    /// The stage with the largest predicted peak.
    pub largest: String,
    /// Bytes of that peak.
    pub peak: u64,
    pub weights_disk: u64,
    pub weights_uploaded: u64,
    /// Whether the peak is below the device's memory.
    pub fits_device: bool,
    /// Whether all sessions fit the budget beside each other; none without a budget.
    pub may_stay_loaded: Option<bool>,
    /// What is loaded beside each stage, because the next component is opened ahead; none without a budget.
    pub overlap: Option<Overlap>,
    /// Bytes of the largest peak with all that is loaded beside; none without a budget.
    pub overlap_peak: Option<u64>,
    /// Whether every tensor's size is known; where not, every sum is too small.
    pub complete: bool,
}

/// One graph.
#[derive(Serialize)]
pub struct StageReport {
    pub name: String,
    /// Sizes of the graph's symbols.
    pub sizes: Sizes,
    /// How the plan sets the stage.
    pub settings: Settings,
    /// Symbols that have no size. What depends on them is unknown.
    pub unbound: Vec<String>,
    /// How the graph was fitted to the device.
    pub attention: Vec<AttentionForm>,
    /// Why it was not.
    pub not_lowered: Option<String>,
    #[serde(flatten)]
    pub memory: StageMemory,
    /// Bytes of the predicted peak that count: of host and device where they share one memory, else the device's.
    pub peak_bytes: u64,
    pub quadratic: Vec<Quadratic>,
    pub limits: Vec<Excess>,
    pub hazards: Vec<Hazard>,
    /// Nodes that contradict their operator's definition under these sizes.
    pub conflicts: Vec<String>,
}

#[derive(Serialize)]
pub struct AttentionForm {
    pub node: String,
    /// Slices of the queries; none for the fused operator.
    pub slices: Option<usize>,
    pub score_bytes: u64,
}

impl StageReport {
    /// Fits the graph to the device under the settings and analyses it. The sizes may be those of other graphs, too.
    pub fn new(
        name: &str,
        mut model: Model,
        sizes: &Sizes,
        device: &DeviceProfile,
        settings: Settings,
    ) -> StageReport {
        let (lowered, memory, shapes) = analyse_stage(&mut model, sizes, device, &settings);
        let (lowered, not_lowered) = match lowered {
            Ok(lowered) => (lowered, None),
            Err(error) => (Default::default(), Some(error.to_string())),
        };
        let (bound, unbound): (Vec<_>, Vec<_>) =
            symbols(&model.graph).into_iter().partition(|symbol| sizes.contains_key(symbol));
        StageReport {
            name: name.to_owned(),
            sizes: bound.into_iter().map(|symbol| (symbol.clone(), sizes[&symbol])).collect(),
            settings,
            unbound,
            attention: lowered.attention.into_iter().map(AttentionForm::from).collect(),
            not_lowered,
            peak_bytes: Budget::asked(device, None).counted(memory.predicted),
            quadratic: quadratic(&model, &shapes, sizes),
            limits: excesses(&model.graph, &shapes, device),
            hazards: hazards(&model.graph, &shapes),
            conflicts: shapes.conflicts.iter().map(ToString::to_string).collect(),
            memory,
        }
    }

    /// The moment with the most live activations.
    pub fn peak_moment(&self) -> Option<&Moment> {
        self.memory.timeline.get(self.memory.peak?)
    }

    pub fn complete(&self) -> bool {
        self.memory.is_complete()
    }
}

impl From<Attention> for AttentionForm {
    fn from(attention: Attention) -> AttentionForm {
        let Attention { node, chunks, score_bytes } = attention;
        AttentionForm { node, slices: chunks, score_bytes }
    }
}

impl Report {
    pub fn new(
        name: String,
        picture: Option<Picture>,
        device: DeviceProfile,
        budget: Option<u64>,
        plan: &Plan,
        stages: Vec<StageReport>,
    ) -> Report {
        let largest = stages.iter().rev().max_by_key(|stage| stage.peak_bytes);
        let sum = |bytes: fn(&StageMemory) -> u64| {
            stages.iter().fold(0u64, |sum, stage| sum.saturating_add(bytes(&stage.memory)))
        };
        let chain = Chain {
            largest: largest.map(|stage| stage.name.clone()).unwrap_or_default(),
            peak: largest.map_or(0, |stage| stage.peak_bytes),
            weights_disk: sum(|memory| memory.weights_disk),
            weights_uploaded: sum(|memory| memory.weights_uploaded),
            fits_device: stages.iter().all(|stage| stage.peak_bytes <= device.memory),
            may_stay_loaded: budget.map(|_| plan.may_stay_loaded),
            overlap: budget.map(|_| plan.overlap.clone()),
            overlap_peak: budget.and_then(|_| Some(plan.budget.counted(plan.peak()?.1))),
            complete: stages.iter().all(StageReport::complete),
        };
        let choices = plan.choices();
        Report { name, picture, device, budget, choices, chain, stages, decoder_cuts: Vec::new() }
    }

    /// The stage with the largest peak.
    pub fn largest(&self) -> Option<&StageReport> {
        self.stages.iter().find(|stage| stage.name == self.chain.largest)
    }
}

/// `[1,2,3]`
fn dims(shape: &[usize]) -> String {
    let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
    format!("[{}]", sizes.join(","))
}
