//! Memory of a stage, known before it runs: a pure function of graph, sizes and device.

mod cache;
mod hazards;
mod host;
mod kernels;
mod limits;
mod liveness;
mod planned;
mod program;
mod quadratic;
mod weights;

pub use cache::PENDING_DISPATCHES;
pub use hazards::{Hazard, hazards};
pub use limits::{Excess, Limit, excesses};
pub use quadratic::{Quadratic, quadratic, symbols};

use crate::{
    device::{DeviceProfile, Provider},
    onnx::{Graph, Model, Node, ValueId},
    shapes::{Shapes, Sizes},
};
use cache::{Policy, Pool};
use program::Program;

/// A tensor and where in the execution it appears.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct TensorUse {
    pub name: String,
    /// The node that makes it, and its operator; empty for inputs and weights.
    pub node: String,
    pub op_type: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: u64,
}

impl TensorUse {
    /// A value that the node makes; none while type or shape is not known.
    fn of(graph: &Graph, shapes: &Shapes, id: ValueId, node: Option<&Node>) -> Option<TensorUse> {
        let fact = shapes.fact(id);
        Some(TensorUse {
            name: graph[id].name.clone(),
            node: node.map(|node| node.name.clone()).unwrap_or_default(),
            op_type: node.map(|node| node.op_type.clone()).unwrap_or_default(),
            dtype: fact.dtype?.name(),
            shape: fact.full_shape()?,
            bytes: fact.bytes()?,
        })
    }
}

/// One node in execution order.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Moment {
    pub node: String,
    pub op_type: String,
    /// Bytes of all activations (inputs and outputs of the graph included) that are alive while the node runs.
    pub live: u64,
    /// Bytes of buffers that the provider holds then, its cache of free ones included.
    pub held: u64,
}

/// Bytes of a stage, and what they consist of.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct StageMemory {
    /// Bytes of all weights as they lie in files.
    pub weights_disk: u64,
    /// Bytes that the device holds of them.
    pub weights_uploaded: u64,
    /// In execution order.
    pub timeline: Vec<Moment>,
    /// Index into `timeline` of the first moment with the most live bytes; none for an empty graph.
    pub peak: Option<usize>,
    /// The ten largest activations, largest first.
    pub largest: Vec<TensorUse>,
    /// Operators whose outputs' sizes are unknown, with how many such outputs. They are in no sum.
    pub unknown: std::collections::BTreeMap<String, usize>,
    /// What the process of the stage is predicted to take at its peak, on host and device.
    pub predicted: Predicted,
}

/// Predicted peak of the process that runs a stage. With unified memory the sum counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Predicted {
    /// Bytes of the device's memory.
    pub device: u64,
    /// Bytes of host memory besides.
    pub host: u64,
}

impl Predicted {
    pub fn total(self) -> u64 {
        self.device.saturating_add(self.host)
    }
}

/// How many of the largest activations are listed.
const LARGEST: usize = 10;

/// Analyses one lowered graph. Tensors of unknown size are listed and in no sum. `pending_dispatches` is what WebGPU is
/// told ([`PENDING_DISPATCHES`]); the CPU provider has none.
pub fn analyse(
    model: &Model,
    sizes: &Sizes,
    device: &DeviceProfile,
    pending_dispatches: u32,
) -> (StageMemory, Shapes) {
    let shapes = crate::shapes::infer(model, sizes, &Default::default());
    let graph = &model.graph;
    let program = Program::of(model, &shapes, device.provider);
    let policy = match device.provider {
        Provider::WebGpu => Policy::Kept { pending_dispatches },
        Provider::Cpu => Policy::Immediate,
    };
    let timeline = liveness::timeline(graph, &program, Pool::new(policy));
    let weights_uploaded = weights::held(graph, &shapes, &program, device.provider);
    let held = timeline.iter().map(|moment| moment.held).max().unwrap_or(0);
    let memory = StageMemory {
        weights_disk: weights::on_disk(graph),
        weights_uploaded,
        peak: peak(&timeline),
        largest: largest(graph, &shapes),
        unknown: shapes.unknown(graph),
        predicted: Predicted {
            device: weights_uploaded.saturating_add(held),
            host: host::bytes(graph, &shapes, device.provider, held),
        },
        timeline,
    };
    (memory, shapes)
}

/// The first moment with the most live bytes.
fn peak(timeline: &[Moment]) -> Option<usize> {
    let most = timeline.iter().map(|moment| moment.live).max()?;
    timeline.iter().position(|moment| moment.live == most)
}

fn largest(graph: &Graph, shapes: &Shapes) -> Vec<TensorUse> {
    let made =
        graph.nodes().flat_map(|(_, node)| node.outputs.iter().flatten().map(move |id| (Some(node), *id)));
    let given = graph.inputs.iter().map(|id| (None, *id));
    let mut uses: Vec<TensorUse> =
        given.chain(made).filter_map(|(node, id)| TensorUse::of(graph, shapes, id, node)).collect();
    uses.sort_by_key(|tensor| std::cmp::Reverse(tensor.bytes));
    uses.truncate(LARGEST);
    uses
}
