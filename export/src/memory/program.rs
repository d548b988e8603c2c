//! What a provider does with a graph: steps over buffers, in execution order.
//!
//! The graph that ONNX Runtime runs is not the graph of the file. What changes the set of tensors is repeated here:
//! constants are folded, SiLU becomes one kernel, convolutions work in a layout of their own, views share a buffer.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{
    cache::{Policy, Pool},
    kernels::{self, Kernel, Layout},
    liveness,
    planned::Planned,
    weights,
};
use crate::{
    device::Provider,
    onnx::{Graph, Node, NodeId, ValueId},
    shapes::Shapes,
};

/// Index into [`Program::buffers`].
pub(super) type BufferId = usize;

/// One kernel.
#[derive(Debug)]
pub(super) struct Step {
    /// The graph's node that it belongs to: index into the moments.
    pub moment: usize,
    pub reads: Vec<BufferId>,
    pub makes: Vec<BufferId>,
    /// Shaders that are dispatched, which decides when buffers return to the provider's cache.
    pub dispatches: u32,
}

#[derive(Debug, Default)]
pub(super) struct Program {
    /// Bytes of every buffer of inputs and activations.
    pub buffers: Vec<u64>,
    pub inputs: Vec<BufferId>,
    pub outputs: Vec<BufferId>,
    pub steps: Vec<Step>,
    /// Nodes that run, in order. Views are among them; folded nodes are not.
    pub moments: Vec<NodeId>,
    /// Constants that are held while the session lives: initializers that a running node reads, and folded results.
    pub weights: Vec<ValueId>,
    /// Bytes of those in the bodies of nodes.
    pub body_weights: u64,
    /// What is computed when the session is made.
    pub folded: Vec<ValueId>,
}

/// A provider, and how it keeps free buffers.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub provider: Provider,
    pub policy: Policy,
}

struct Writer<'g> {
    graph: &'g Graph,
    shapes: &'g Shapes,
    /// What is known while no size is bound; nothing of some bodies.
    unbound: Option<&'g Shapes>,
    planned: Planned,
    place: Place,
    /// What nodes read besides their inputs: values that their bodies name.
    captured: HashMap<NodeId, Vec<ValueId>>,
    /// How many nodes read a value; a graph output counts as one more.
    readers: HashMap<ValueId, usize>,
    last_reader: HashMap<ValueId, NodeId>,
    outputs: HashSet<ValueId>,
    /// Where a value lies. Constants and values of unknown size are nowhere.
    places: HashMap<ValueId, BufferId>,
    /// Reads of each buffer that are still to come.
    uses: Vec<usize>,
    constants: BTreeMap<ValueId, bool>,
    program: Program,
}

impl Program {
    /// `unbound` is what is known about the graph while no size is bound; nothing of some bodies.
    pub fn of(graph: &Graph, shapes: &Shapes, unbound: Option<&Shapes>, place: Place) -> Program {
        let captured = captured(graph);
        let mut readers: HashMap<ValueId, usize> = HashMap::new();
        let mut last_reader = HashMap::new();
        for (node_id, node) in graph.nodes() {
            for id in node.inputs.iter().flatten().chain(captured.get(&node_id).into_iter().flatten()) {
                *readers.entry(*id).or_default() += 1;
                last_reader.insert(*id, node_id);
            }
        }
        for id in &graph.outputs {
            *readers.entry(*id).or_default() += 1;
        }
        let constants = graph.values().filter(|(_, value)| value.constant.is_some());
        let mut writer = Writer {
            graph,
            shapes,
            unbound,
            planned: Planned::of(graph, unbound),
            place,
            captured,
            readers,
            last_reader,
            outputs: graph.outputs.iter().copied().collect(),
            places: HashMap::new(),
            uses: Vec::new(),
            constants: constants.map(|(id, _)| (id, false)).collect(),
            program: Program::default(),
        };
        for id in &graph.inputs {
            if !writer.constants.contains_key(id) {
                let buffer = writer.allocate(*id);
                // The caller keeps its inputs.
                buffer.iter().for_each(|buffer| writer.uses[*buffer] += 1);
                writer.program.inputs.extend(buffer);
            }
        }
        for (id, node) in graph.nodes() {
            writer.node(id, node);
        }
        writer.finish()
    }

    /// For every buffer the last step that uses it; inputs and outputs outlive the run.
    pub fn last_uses(&self) -> Vec<usize> {
        let mut last = vec![0; self.buffers.len()];
        for (index, step) in self.steps.iter().enumerate() {
            for buffer in step.reads.iter().chain(&step.makes) {
                last[*buffer] = index;
            }
        }
        for buffer in self.inputs.iter().chain(&self.outputs) {
            last[*buffer] = usize::MAX;
        }
        last
    }
}

/// Of every node with bodies the values that these name.
fn captured(graph: &Graph) -> HashMap<NodeId, Vec<ValueId>> {
    let captured = graph.nodes().filter_map(|(id, node)| {
        let named: HashSet<ValueId> = graph.captured_by(node).collect();
        (!named.is_empty()).then(|| (id, named.into_iter().collect()))
    });
    captured.collect()
}

impl Writer<'_> {
    fn node(&mut self, id: NodeId, node: &Node) {
        if self.folds(node) {
            for output in node.outputs.iter().flatten() {
                self.constants.insert(*output, false);
                self.program.folded.push(*output);
            }
            return;
        }
        let captured = self.captured.get(&id).into_iter().flatten();
        for input in node.inputs.iter().flatten().chain(captured) {
            if let Some(used) = self.constants.get_mut(input) {
                *used = true;
            }
        }
        self.program.moments.push(id);
        let kernel = kernels::of(self.place.provider, node);
        match kernel.layout {
            _ if kernel.view && self.view(node) => {}
            Layout::Own => self.convolution(node, &kernel),
            Layout::Plain if self.gate(node).is_some() => {}
            Layout::Plain => self.plain(id, node, &kernel),
        }
        for buffer in self.reads(id, node) {
            self.uses[buffer] -= 1;
        }
    }

    /// Nodes over constants alone run once, when the session is made, but not those with bodies:
    /// core/optimizer/constant_folding.cc.
    fn folds(&self, node: &Node) -> bool {
        node.inputs.iter().flatten().all(|id| self.constants.contains_key(id))
            && node.subgraphs().next().is_none()
            && !kernels::is_random(node)
    }

    /// A view shares its input's buffer, unless it makes an output of the graph, which is allocated on its own.
    fn view(&mut self, node: &Node) -> bool {
        let ([Some(input), ..], [Some(output), ..]) = (&node.inputs[..], &node.outputs[..]) else {
            return false;
        };
        if self.outputs.contains(output) || self.constants.contains_key(input) {
            return false;
        }
        if let Some(place) = self.places.get(input).copied() {
            self.share(*output, place);
        }
        true
    }

    /// Where `node` is the Sigmoid of `x * Sigmoid(x)` and nothing else reads it: core/optimizer/quick_gelu_fusion.cc
    /// makes one kernel of both, so that the gate is never a tensor. Its multiplication follows as a plain step.
    fn gate(&self, node: &Node) -> Option<()> {
        let ("Sigmoid", [Some(x)], [Some(gate)]) = (&node.op_type[..], &node.inputs[..], &node.outputs[..])
        else {
            return None;
        };
        let reader = &self.graph[*self.last_reader.get(gate)?];
        let once = self.readers.get(gate) == Some(&1);
        let product = reader.op_type == "Mul" && reader.inputs.contains(&Some(*x));
        (once && product).then_some(())
    }

    fn plain(&mut self, id: NodeId, node: &Node, kernel: &Kernel) {
        let reads = self.reads(id, node);
        let makes = match self.overwritten(node, kernel) {
            Some((output, place)) => {
                self.share(output, place);
                Vec::new()
            }
            None => node.outputs.iter().flatten().filter_map(|id| self.allocate(*id)).collect(),
        };
        let shape = |id: &Option<ValueId>| id.and_then(|id| self.shapes.shape(id));
        let shapes: Vec<_> = node.inputs.iter().map(shape).collect();
        let temporary = (kernel.temporary)(node, &shapes).saturating_add(self.bodies(id, node));
        self.step(reads, makes, temporary, kernel.dispatches);
    }

    /// Bytes that the bodies of a node hold besides its outputs. Of an If, one branch runs, and what it makes are the
    /// node's outputs. A loop holds what one turn does, and the slices of its scanned outputs until they are joined.
    fn bodies(&mut self, id: NodeId, node: &Node) -> u64 {
        let (mut most, mut weights) = (0, 0u64);
        for (index, body) in node.subgraphs().enumerate() {
            let Some(shapes) = self.shapes.body(id, index) else { continue };
            let unbound = self.unbound.and_then(|unbound| unbound.body(id, index));
            let program = Program::of(body, shapes, unbound, self.place);
            weights = weights.saturating_add(weights::held(body, shapes, &program, self.place.provider));
            let timeline = liveness::timeline(body, &program, Pool::new(self.place.policy));
            most = timeline.iter().map(|moment| moment.held).fold(most, u64::max);
        }
        self.program.body_weights = self.program.body_weights.saturating_add(weights);
        match node.op_type.as_str() {
            "If" => most.saturating_sub(self.bytes(&node.outputs)),
            "Loop" => {
                let carried = node.inputs.len().saturating_sub(2);
                most.saturating_add(self.bytes(node.outputs.get(carried..).unwrap_or_default()))
            }
            _ => most,
        }
    }

    fn bytes(&self, values: &[Option<ValueId>]) -> u64 {
        let facts = values.iter().flatten().map(|id| self.shapes.fact(*id));
        let bytes = facts.filter_map(|fact| kernels::held_bytes(self.place.provider, fact));
        bytes.fold(0, u64::saturating_add)
    }

    /// The only output and the buffer of an input that it takes over: its last read is this one, it is no input of the
    /// graph, and the output is none of its outputs.
    fn overwritten(&self, node: &Node, kernel: &Kernel) -> Option<(ValueId, BufferId)> {
        let [Some(output)] = node.outputs[..] else { return None };
        if self.outputs.contains(&output) {
            return None;
        }
        let candidates =
            kernel.in_place.iter().filter_map(|index| node.inputs.get(*index).copied().flatten());
        candidates
            .filter(|input| self.planned.same(*input, output))
            .filter_map(|input| self.places.get(&input).copied())
            .find(|place| self.uses[*place] == 1)
            .map(|place| (output, place))
    }

    /// A kernel in a layout of its own: the first input is laid out anew before it and the output after it.
    fn convolution(&mut self, node: &Node, kernel: &Kernel) {
        let ([Some(input), rest @ ..], [Some(output), ..]) = (&node.inputs[..], &node.outputs[..]) else {
            return;
        };
        let source: Vec<BufferId> = self.places.get(input).copied().into_iter().collect();
        let laid_out = self.laid_out(*input);
        self.step(source, laid_out.clone(), 0, 1);
        let result = self.laid_out(*output);
        let mut reads = laid_out;
        reads.extend(rest.iter().flatten().filter_map(|id| self.places.get(id)));
        self.step(reads, result.clone(), 0, kernel.dispatches);
        let makes = self.allocate(*output).into_iter().collect();
        self.step(result, makes, 0, 1);
    }

    /// A buffer for the value in the provider's own layout.
    fn laid_out(&mut self, id: ValueId) -> Vec<BufferId> {
        let bytes = self.shapes.bytes(id).zip(self.shapes.shape(id));
        let bytes = bytes.map(|(bytes, shape)| kernels::laid_out_bytes(self.place.provider, bytes, &shape));
        bytes.map(|bytes| self.buffer(bytes)).into_iter().collect()
    }

    fn reads(&self, id: NodeId, node: &Node) -> Vec<BufferId> {
        let captured = self.captured.get(&id).into_iter().flatten();
        let read = node.inputs.iter().flatten().chain(captured);
        read.filter_map(|id| self.places.get(id)).copied().collect()
    }

    fn step(&mut self, reads: Vec<BufferId>, mut makes: Vec<BufferId>, temporary: u64, dispatches: u32) {
        if temporary > 0 {
            makes.push(self.buffer(temporary));
        }
        let moment = self.program.moments.len() - 1;
        self.program.steps.push(Step { moment, reads, makes, dispatches });
    }

    fn buffer(&mut self, bytes: u64) -> BufferId {
        self.program.buffers.push(bytes);
        self.uses.push(0);
        self.program.buffers.len() - 1
    }

    /// A buffer for a value whose size is known.
    fn allocate(&mut self, id: ValueId) -> Option<BufferId> {
        let bytes = kernels::held_bytes(self.place.provider, self.shapes.fact(id))?;
        let buffer = self.buffer(bytes);
        self.share(id, buffer);
        Some(buffer)
    }

    /// Puts a value into a buffer.
    fn share(&mut self, id: ValueId, buffer: BufferId) {
        self.uses[buffer] += self.readers.get(&id).copied().unwrap_or(0);
        self.places.insert(id, buffer);
    }

    fn finish(mut self) -> Program {
        self.program.outputs =
            self.graph.outputs.iter().filter_map(|id| self.places.get(id)).copied().collect();
        self.program.weights =
            self.constants.into_iter().filter(|(_, used)| *used).map(|(id, _)| id).collect();
        self.program
    }
}
