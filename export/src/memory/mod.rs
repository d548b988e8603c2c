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
mod scratch;
mod weights;

pub use cache::PENDING_DISPATCHES;
pub use hazards::{Hazard, hazards};
pub use limits::{Excess, Limit, excesses};
pub use quadratic::{Quadratic, quadratic, symbols};

use std::collections::BTreeMap;

use crate::{
    device::{DeviceProfile, Provider},
    onnx::{Graph, Model, Node, ValueId},
    shapes::{Shapes, Sizes},
};
use cache::{Policy, Pool};
use program::{Place, Program};

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
            bytes: fact.footprint()?,
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
    pub unknown: BTreeMap<String, usize>,
    /// Operators that take scratch memory of unknown size, with how many there are. It is in no sum.
    pub unknown_scratch: BTreeMap<String, usize>,
    /// What the process of the stage is predicted to take at its peak, on host and device.
    pub predicted: Predicted,
}

impl StageMemory {
    /// Whether the sums hold everything that is known to take memory.
    pub fn is_complete(&self) -> bool {
        self.unknown.is_empty() && self.unknown_scratch.is_empty()
    }
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
    let unbound = crate::shapes::infer(model, &Default::default(), &Default::default());
    let graph = &model.graph;
    let policy = match device.provider {
        Provider::WebGpu => Policy::Kept { pending_dispatches },
        Provider::Cpu => Policy::Immediate,
    };
    let place = Place { provider: device.provider, policy };
    let program = Program::of(graph, &shapes, Some(&unbound), place);
    let timeline = liveness::timeline(graph, &program, Pool::new(policy));
    let weights_uploaded = weights::held(graph, &shapes, &program, device.provider);
    let held = timeline.iter().map(|moment| moment.held).max().unwrap_or(0);
    let running = weights_uploaded.saturating_add(held);
    let on_device = match device.provider {
        Provider::WebGpu => running,
        Provider::Cpu => running.max(weights::loading(graph, &shapes, &program)),
    };
    let memory = StageMemory {
        weights_disk: weights::on_disk(graph),
        weights_uploaded,
        peak: peak(&timeline),
        largest: largest(graph, &shapes),
        unknown: shapes.unknown(graph),
        unknown_scratch: unknown_scratch(graph, device.provider),
        predicted: Predicted {
            device: on_device,
            // What a session took while it was made is free again when it runs.
            host: host::bytes(graph, &shapes, device.provider, on_device - weights_uploaded)
                .max(host::creation(&shapes, &program, device, on_device)),
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

fn unknown_scratch(graph: &Graph, provider: Provider) -> BTreeMap<String, usize> {
    let mut unknown = BTreeMap::new();
    for (_, node) in graph.nodes() {
        if kernels::has_unknown_scratch(provider, node) {
            *unknown.entry(node.op_type.clone()).or_default() += 1;
        }
        for (op, count) in node.subgraphs().flat_map(|body| unknown_scratch(body, provider)) {
            *unknown.entry(op).or_default() += count;
        }
    }
    unknown
}

fn largest(graph: &Graph, shapes: &Shapes) -> Vec<TensorUse> {
    let made =
        graph.nodes().flat_map(|(_, node)| node.outputs.iter().flatten().map(move |id| (Some(node), *id)));
    let given = graph.inputs.iter().map(|id| (None, *id));
    let own = given.chain(made).filter_map(|(node, id)| TensorUse::of(graph, shapes, id, node));
    let bodies = graph.nodes().flat_map(|(id, node)| {
        let bodies = node.subgraphs().enumerate();
        bodies.filter_map(move |(place, body)| Some(largest(body, shapes.body(id, place)?))).flatten()
    });
    let mut uses: Vec<TensorUse> = own.chain(bodies).collect();
    uses.sort_by_key(|tensor| std::cmp::Reverse(tensor.bytes));
    uses.truncate(LARGEST);
    uses
}
