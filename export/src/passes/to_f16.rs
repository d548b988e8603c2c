//! Computes in f16 what can be, and stores weights in f16.
//!
//! Before: a graph in f32. After: the operators of [`HALVED`] read and give f16; norms, powers, roots, exponentials, sines
//! and what leads to nothing but them stay f32, with a Cast on the way. So does all that leads to angles alone. Graph inputs and outputs keep their types. Weights
//! are cast when they are written. Constants of at most 64 KiB are looked at before: numbers far below zero that are added or
//! chosen (masks of -3.4e38) are limited to f16's range, and infinities stay; what has larger numbers stays f32. A larger
//! weight beyond f16's range is found, and named, when it is written.
//!
//! Refused: operators in f32 of which no f16 kernel is known; weights that f16 cannot hold; operands of unknown type; a
//! model whose nodes have bodies.

use std::collections::{HashMap, HashSet};

use super::{Outcome, Pass, PassError, Replacement, Settings, View};
use crate::{
    onnx::{Attribute, ComputeError, DType, Graph, Model, Node, NodeId, Tensor, ValueId},
    quant::{self, F16_MAX},
};

pub const PASS: Pass = Pass {
    name: "to_f16",
    what: "operators in f32 -> f16, but for norms, roots, exponentials, sines; weights in f16",
    why: "half the memory for weights and activations, and the faster arithmetic on most GPUs",
    run,
};

/// Least normal f16.
const F16_LEAST: f32 = 6.103_515_6e-5;
/// Constants of so many elements are numbers rather than weights.
const FEW: usize = 16;
/// Constants of at most so many bytes are looked at; larger ones are weights, cast when written.
const SMALL: usize = 1 << 16;

/// Operators that compute elements one by one, or move them: what leads to nothing but f32 stays f32, too.
const PLAIN: &[&str] = &[
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Neg",
    "Abs",
    "Min",
    "Max",
    "Clip",
    "Where",
    "Reshape",
    "Transpose",
    "Concat",
    "Split",
    "Slice",
    "Gather",
    "Expand",
    "Tile",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Identity",
    "Cast",
];

/// Further operators that compute in f16.
const HALVED: &[&str] = &[
    "MatMul",
    "Gemm",
    "MatMulNBits",
    "MultiHeadAttention",
    "RotaryEmbedding",
    "Conv",
    "ConvTranspose",
    "Sigmoid",
    "Tanh",
    "Relu",
    "LeakyRelu",
    "Gelu",
    "QuickGelu",
    "Erf",
    "Softmax",
    "Pad",
    "Resize",
    "DepthToSpace",
    "SpaceToDepth",
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "Einsum",
    "Dropout",
    "ReduceMax",
];

/// Operators that stay f32 on purpose: their intermediate results leave f16's range, or its precision is too little.
const FULL: &[&str] = &[
    "LayerNormalization",
    "SimplifiedLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "RMSNormalization",
    "InstanceNormalization",
    "GroupNormalization",
    "GroupNorm",
    "Pow",
    "ReduceMean",
    "ReduceSum",
    "ReduceSumSquare",
    "ReduceL2",
    "Sqrt",
    "Reciprocal",
    "Exp",
    "Log",
    "Softplus",
    "Sin",
    "Cos",
    "Range",
    "CumSum",
    "Mod",
    "Floor",
    "Ceil",
    "Round",
    "RandomNormal",
    "RandomNormalLike",
];

/// Operands that stay f32 in a node that computes in f16: operator, operand.
const FULL_OPERANDS: &[(&str, usize)] = &[("Resize", 1), ("Resize", 2)];

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    if model.graph.nodes().any(|(_, node)| node.subgraphs().next().is_some()) {
        outcome.refuse(model.graph.name.clone(), "nodes have bodies, whose types would have to follow");
        return Ok(outcome);
    }
    let view = View::of(model);
    let types: HashMap<ValueId, DType> =
        view.graph.values().filter_map(|(id, _)| Some((id, view.facts().dtype(id)?))).collect();
    let halved = halved(&view, &types, &mut outcome);
    if halved.is_empty() {
        return Ok(outcome);
    }
    let order: Vec<NodeId> = view.graph.nodes().map(|(id, _)| id).collect();
    let mut rewriter = Rewriter { graph: &mut model.graph, before: types, twins: Twins::default() };
    for id in order {
        rewriter.node(id, halved.contains(&id))?;
    }
    outcome.applied = halved.len();
    Ok(outcome)
}

/// The nodes that are to compute in f16 and do not yet.
fn halved(view: &View<'_>, types: &HashMap<ValueId, DType>, outcome: &mut Outcome) -> HashSet<NodeId> {
    let is_f32 = |value: &ValueId| types.get(value) == Some(&DType::F32);
    let nodes: Vec<(NodeId, &Node)> = view.graph.nodes().collect();
    let (mut halved, mut angles) = (HashSet::new(), HashSet::new());
    for (id, node) in nodes.into_iter().rev() {
        if !node.outputs.iter().flatten().any(is_f32) {
            continue;
        }
        let op = node.op_type.as_str();
        if is_angle(view, node, &angles) {
            angles.insert(id);
            continue;
        }
        if leaves_f16(view, node) {
            continue;
        }
        let plain = PLAIN.contains(&op);
        if !plain && !HALVED.contains(&op) {
            if !FULL.contains(&op) && op != "ConstantOfShape" {
                outcome.refuse(view.graph.place(id), format!("no f16 kernel is known of {op}"));
            }
            continue;
        }
        // Casts between floats are there for a reason, and those of this pass must stay.
        let of_float = |value: ValueId| !matches!(types.get(&value), Some(t) if t.is_integer());
        if op == "Cast" && node.input(0).is_none_or(of_float) {
            continue;
        }
        if !plain && has_weight_beyond_f16(view, node) {
            outcome.refuse(view.graph.place(id), "a weight has numbers that f16 cannot hold");
            continue;
        }
        let mut values = node.inputs.iter().chain(&node.outputs).flatten();
        if !values.all(|value| types.contains_key(value)) {
            outcome.refuse(view.graph.place(id), "the types of its operands are not known");
            continue;
        }
        let wants_half = |output: &ValueId| {
            view.graph.outputs.contains(output) || view.uses(*output).iter().any(|user| halved.contains(user))
        };
        if !plain || node.outputs.iter().flatten().any(wants_half) {
            halved.insert(id);
        }
    }
    halved
}

/// Whether a node has a small constant that f16 cannot hold (numbers far below zero are masks, and limited), or divides by
/// something computed, which may be as small as the constant that keeps it from zero.
fn leaves_f16(view: &View<'_>, node: &Node) -> bool {
    let divides = node.is("Div") && node.input(1).is_some_and(|by| view.constant(by).is_none());
    let beyond = |values: &[f32]| {
        let least = if values.len() <= FEW { F16_LEAST } else { 0.0 };
        let leaves = |value: &f32| *value > F16_MAX || (*value != 0.0 && value.abs() < least);
        values.iter().any(|value| value.is_finite() && leaves(value))
    };
    divides || constants(view, node).any(|values| beyond(&values))
}

/// Limited to f16's range, a weight would be another.
fn has_weight_beyond_f16(view: &View<'_>, node: &Node) -> bool {
    constants(view, node).flatten().any(|value| value.is_finite() && value.abs() > F16_MAX)
}

/// The node's small constants of floats.
fn constants<'a>(view: &'a View<'_>, node: &'a Node) -> impl Iterator<Item = Vec<f32>> + 'a {
    let tensors = node.inputs.iter().flatten().filter_map(|input| view.constant(*input));
    tensors.filter(|tensor| is_small(tensor)).filter_map(|tensor| tensor.to_f32().ok().flatten())
}

fn is_small(tensor: &Tensor) -> bool {
    tensor.bytes.reads().is_some_and(|read| read.max(tensor.bytes.len()) <= SMALL)
}

/// Whether a node leads to nothing but sines and cosines, whose angles f16 cannot tell apart.
fn is_angle(view: &View<'_>, node: &Node, angles: &HashSet<NodeId>) -> bool {
    let takes_angles = |user: &NodeId| {
        let user_node = &view.graph[*user];
        user_node.is("Sin") || user_node.is("Cos") || angles.contains(user)
    };
    node.outputs.iter().flatten().all(|output| {
        let users = view.uses(*output);
        !users.is_empty() && users.iter().all(takes_angles) && !view.graph.outputs.contains(output)
    })
}

/// Gives nodes operands of the type that they compute in, in execution order.
struct Rewriter<'g> {
    graph: &'g mut Graph,
    /// What values were.
    before: HashMap<ValueId, DType>,
    twins: Twins,
}

/// What values have become.
#[derive(Default)]
struct Twins {
    /// Values that are f16 now and were f32.
    halved: HashSet<ValueId>,
    /// The same value in the type that it does not have.
    other: HashMap<ValueId, ValueId>,
}

impl Rewriter<'_> {
    fn node(&mut self, id: NodeId, half: bool) -> Result<(), PassError> {
        let mut node = self.graph[id].clone();
        let takes_any = !half && reads_any(&node);
        let op_type = node.op_type.clone();
        let mut new = Replacement::of(self.graph, id);
        for (place, input) in node.inputs.iter_mut().enumerate() {
            let Some(value) = *input else { continue };
            let full = !half || FULL_OPERANDS.contains(&(op_type.as_str(), place));
            let was_f32 = self.before.get(&value) == Some(&DType::F32);
            let is_right = full != self.twins.halved.contains(&value) || takes_any;
            if was_f32 && !is_right {
                *input = Some(self.twins.of(&mut new, value)?);
            }
        }
        let mut given_out = Vec::new();
        for output in node.outputs.iter_mut().flatten().filter(|_| half) {
            if self.before.get(output) != Some(&DType::F32) {
                continue;
            }
            if new.graph().outputs.contains(output) {
                let twin = new.value();
                self.twins.other.insert(*output, twin);
                given_out.push((twin, *output));
                *output = twin;
            } else {
                self.twins.halved.insert(*output);
            }
            new.retype(*output, DType::F16);
        }
        if half {
            cast_to_f16(&mut node);
        }
        new.push(node);
        for (twin, output) in given_out {
            new.cast_into(twin, DType::F32, output);
        }
        new.finish();
        Ok(())
    }
}

impl Twins {
    /// The value in the other float type, by a Cast before the node that asks for it first.
    fn of(&mut self, new: &mut Replacement<'_>, value: ValueId) -> Result<ValueId, PassError> {
        if let Some(twin) = self.other.get(&value) {
            return Ok(*twin);
        }
        let dtype = if self.halved.contains(&value) { DType::F32 } else { DType::F16 };
        let name = new.graph()[value].name.clone();
        let tensor = new.graph()[value].constant.clone().filter(|_| !new.graph().inputs.contains(&value));
        let twin = match tensor {
            Some(tensor) => {
                let failed = |source| PassError::Constant { tensor: name.clone(), source };
                new.named_constant(&format!("{name}.f16"), half_tensor(tensor).map_err(failed)?)
            }
            None => new.cast(value, dtype),
        };
        self.other.insert(value, twin);
        Ok(twin)
    }
}

/// Operators that stay f32 and yet take f16.
fn reads_any(node: &Node) -> bool {
    ["Cast", "Shape", "Size", "IsNaN", "IsInf"].iter().any(|op| node.is(op))
}

/// A Cast of integers gives f16 instead of f32.
fn cast_to_f16(node: &mut Node) {
    if node.is("Cast") {
        node.attributes.retain(|(name, _)| name != "to");
        node.attributes.push(("to".to_owned(), Attribute::Int(i64::from(DType::F16.to_onnx()))));
    }
}

fn half_tensor(tensor: Tensor) -> Result<Tensor, ComputeError> {
    if is_small(&tensor)
        && let Some(values) = tensor.to_f32()?
    {
        let limited = |v: &f32| if v.is_finite() { v.clamp(-F16_MAX, F16_MAX) } else { *v };
        return Ok(Tensor::from_f16(&tensor.shape, &values.iter().map(limited).collect::<Vec<_>>()));
    }
    Ok(quant::cast(tensor, DType::F16)?)
}
