//! What a bundle or a model will need, found out without running it: sizes to shapes, shapes to bytes and findings.

mod chart;
mod sizes;
mod table;

use std::collections::BTreeMap;

use serde::Serialize;
use viaduct_export::{
    bundle::Bundle,
    bytes::ByteSize,
    device::DeviceProfile,
    memory::{
        BufferCache, Excess, Hazard, Moment, Quadratic, StageMemory, analyse, excesses, hazards, quadratic,
        symbols,
    },
    onnx::Model,
    shapes::Sizes,
};

use crate::runtime::{Attention, lower};

pub use self::{
    chart::{MAX_STAGES, chart},
    sizes::{Drawn, SizesError, bundle_sizes},
    table::table,
};

/// What is known of a bundle or a model on one device. As JSON: docs/report.md.
#[derive(Serialize)]
pub struct Report {
    /// What was looked at: the bundle's name and profile, or the model's file.
    pub name: String,
    /// Width, height and steps of the picture; none for a model.
    pub picture: Option<Drawn>,
    pub device: DeviceProfile,
    pub budget: Option<u64>,
    pub chain: Chain,
    /// In the order in which they run.
    pub stages: Vec<StageReport>,
}

/// All stages, of which one at a time has a session.
#[derive(Serialize)]
pub struct Chain {
    /// The stage with the largest predicted peak.
    pub largest: String,
    /// Bytes of that peak, on host and device.
    pub peak: u64,
    pub weights_disk: u64,
    pub weights_uploaded: u64,
    /// Whether the peak is below the device's memory.
    pub fits_device: bool,
    /// Whether every tensor's size is known; where not, every sum is too small.
    pub complete: bool,
}

/// One graph.
#[derive(Serialize)]
pub struct StageReport {
    pub name: String,
    /// Sizes of the graph's symbols.
    pub sizes: Sizes,
    /// Symbols that have no size. What depends on them is unknown.
    pub unbound: Vec<String>,
    /// How the graph was fitted to the device.
    pub attention: Vec<AttentionForm>,
    /// Why it was not.
    pub not_lowered: Option<String>,
    #[serde(flatten)]
    pub memory: StageMemory,
    /// Bytes of the predicted peak, on host and device.
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

/// A stage that needs more than there is.
#[derive(Debug, thiserror::Error)]
#[error(
    "stage {stage} needs {}{} (device {}, host {}), more than the budget of {}{}",
    if *complete { "" } else { "at least " }, ByteSize(device.saturating_add(*host)), ByteSize(*device), ByteSize(*host),
    ByteSize(*budget), tensor.as_deref().map(|tensor| format!("; its largest tensor is {tensor}")).unwrap_or_default()
)]
pub struct OverBudget {
    pub stage: String,
    pub device: u64,
    pub host: u64,
    pub budget: u64,
    /// Name, shape, type and size of the largest tensor.
    pub tensor: Option<String>,
    pub complete: bool,
}

impl StageReport {
    /// Fits the graph to the device and analyses it. The sizes may be those of other graphs, too.
    pub fn new(name: &str, mut model: Model, sizes: &Sizes, device: &DeviceProfile) -> StageReport {
        let lowered = lower(&mut model, device, sizes, &[]);
        let (lowered, not_lowered) = match lowered {
            Ok(lowered) => (lowered, None),
            Err(error) => (Default::default(), Some(error.to_string())),
        };
        let (memory, shapes) = analyse(&model, sizes, device, BufferCache::default());
        let (bound, unbound): (Vec<_>, Vec<_>) =
            symbols(&model.graph).into_iter().partition(|symbol| sizes.contains_key(symbol));
        let conflict = |conflict: &viaduct_export::shapes::Conflict| {
            format!("{} {}: {}", conflict.op_type, conflict.node, conflict.problem)
        };
        StageReport {
            name: name.to_owned(),
            sizes: bound.into_iter().map(|symbol| (symbol.clone(), sizes[&symbol])).collect(),
            unbound,
            attention: lowered.attention.into_iter().map(AttentionForm::from).collect(),
            not_lowered,
            peak_bytes: memory.predicted.device.saturating_add(memory.predicted.host),
            quadratic: quadratic(&model, &shapes, sizes),
            limits: excesses(&model.graph, &shapes, device),
            hazards: hazards(&model.graph, &shapes),
            conflicts: shapes.conflicts.iter().map(conflict).collect(),
            memory,
        }
    }

    /// The moment with the most live activations.
    pub fn peak_moment(&self) -> Option<&Moment> {
        self.memory.timeline.get(self.memory.peak?)
    }

    pub fn complete(&self) -> bool {
        self.memory.unknown.is_empty()
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
        picture: Option<Drawn>,
        device: DeviceProfile,
        budget: Option<u64>,
        stages: Vec<StageReport>,
    ) -> Report {
        let largest = stages.iter().rev().max_by_key(|stage| stage.peak_bytes);
        let sum = |bytes: fn(&StageMemory) -> u64| {
            stages.iter().fold(0u64, |sum, stage| sum.saturating_add(bytes(&stage.memory)))
        };
        let fits = |stage: &StageReport| {
            let needed = if device.unified_memory { stage.peak_bytes } else { stage.memory.predicted.device };
            needed <= device.memory
        };
        let chain = Chain {
            largest: largest.map(|stage| stage.name.clone()).unwrap_or_default(),
            peak: largest.map_or(0, |stage| stage.peak_bytes),
            weights_disk: sum(|memory| memory.weights_disk),
            weights_uploaded: sum(|memory| memory.weights_uploaded),
            fits_device: stages.iter().all(fits),
            complete: stages.iter().all(StageReport::complete),
        };
        Report { name, picture, device, budget, chain, stages }
    }

    /// The stage with the largest peak.
    pub fn largest(&self) -> Option<&StageReport> {
        self.stages.iter().find(|stage| stage.name == self.chain.largest)
    }

    /// Refuses if the largest stage does not fit the budget.
    pub fn check_budget(&self) -> Result<(), OverBudget> {
        let (Some(budget), Some(stage)) = (self.budget, self.largest()) else { return Ok(()) };
        if stage.peak_bytes <= budget {
            return Ok(());
        }
        let predicted = stage.memory.predicted;
        let tensor = stage.memory.largest.first();
        Err(OverBudget {
            stage: stage.name.clone(),
            device: predicted.device,
            host: predicted.host,
            budget,
            tensor: tensor
                .map(|t| format!("{} {} {}, {}", t.name, dims(&t.shape), t.dtype, ByteSize(t.bytes))),
            complete: stage.complete(),
        })
    }
}

/// `[1,2,3]`
fn dims(shape: &[usize]) -> String {
    let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
    format!("[{}]", sizes.join(","))
}

/// Symbols of all graphs of a bundle, as its manifest lists them, with the stages that have them.
pub fn bundle_symbols(bundle: &Bundle) -> BTreeMap<String, Vec<String>> {
    use viaduct_export::bundle::PortDim;
    let mut symbols: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for stage in &bundle.manifest.stages {
        for dim in stage.inputs.iter().flat_map(|port| &port.dims) {
            if let PortDim::Symbol(name) = dim {
                let stages = symbols.entry(name.clone()).or_default();
                if stages.last() != Some(&stage.name) {
                    stages.push(stage.name.clone());
                }
            }
        }
    }
    symbols
}
