//! Position arithmetic in f32, no more and no less.
//!
//! Before: angles in f64 (Cast to double -> Mul frequencies -> Cos, Sin -> Cast back), as the dynamo exporter writes FLUX;
//! or in f16, where a position above 2048 is not even an integer.
//! After: the same nodes in f32. Constants are rounded once, from what they are. What a cast to f16 had cut off before the
//! angles is taken from before that cast, where it is there.
//!
//! Refused: f64 values that the graph takes or gives, that bodies of If and Loop use, or that an operator outside plain
//! arithmetic makes.

use std::collections::{HashMap, HashSet};

use super::{Outcome, Pass, PassError, Replacement, Settings, View};
use crate::onnx::{Attribute, DType, Model, Node, NodeId, Tensor, ValueId, ValueType};

pub const PASS: Pass = Pass {
    name: "keep_rope_f32",
    what: "f64 arithmetic, and sines and cosines of f16 angles -> f32",
    why: "GPUs have no kernels for f64, and f16 does not hold positions and angles",
    run,
};

/// Operators whose floating-point operands all have the type of the result, so that all can change together.
const ARITHMETIC: &[&str] = &[
    "Abs",
    "Add",
    "Concat",
    "Cos",
    "Div",
    "Einsum",
    "Exp",
    "Expand",
    "Flatten",
    "Floor",
    "Gather",
    "GatherElements",
    "Identity",
    "Log",
    "MatMul",
    "Max",
    "Min",
    "Mul",
    "Neg",
    "Pad",
    "Pow",
    "Range",
    "Reciprocal",
    "ReduceMean",
    "ReduceSum",
    "Reshape",
    "Sin",
    "Slice",
    "Split",
    "Sqrt",
    "Squeeze",
    "Sub",
    "Sum",
    "Tile",
    "Transpose",
    "Unsqueeze",
    "Where",
];

/// Constants up to this size are converted here and now.
const MAX_CONSTANT: usize = 1 << 20;

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    narrow_doubles(model, &mut outcome);
    widen_angles(model, &mut outcome);
    Ok(outcome)
}

/// Values of f64 that nodes connect, and those nodes.
#[derive(Default)]
struct Region {
    values: HashSet<ValueId>,
    nodes: HashSet<NodeId>,
}

fn narrow_doubles(model: &mut Model, outcome: &mut Outcome) {
    let view = View::of(model);
    if !view.graph.values().any(|(id, _)| view.facts().dtype(id) == Some(DType::F64)) {
        return;
    }
    let mut constants = HashMap::new();
    let mut narrowed = Region::default();
    for region in regions(&view) {
        match narrowed_constants(&view, &region) {
            Ok(tensors) => {
                constants.extend(tensors);
                narrowed.values.extend(region.values);
                narrowed.nodes.extend(region.nodes);
                outcome.applied += 1;
            }
            Err((place, why)) => outcome.refuse(place, why),
        }
    }
    let double = i64::from(DType::F64.to_onnx());
    for id in narrowed.nodes {
        for (name, value) in &mut model.graph[id].attributes {
            match value {
                Attribute::Int(to) if name == "to" && *to == double => *to = i64::from(DType::F32.to_onnx()),
                Attribute::Tensor(tensor) if tensor.dtype == DType::F64 => {
                    if let Some(narrow) = narrow(tensor) {
                        *tensor = narrow;
                    }
                }
                _ => {}
            }
        }
    }
    for id in narrowed.values {
        let value = &mut model.graph[id];
        if let Some(tensor) = constants.remove(&id) {
            value.constant = Some(tensor);
        }
        if let Some(ValueType::Tensor { dtype, .. }) = &mut value.ty {
            *dtype = DType::F32;
        }
    }
}

/// Whether a node turns f64 into integers, which f32 would change.
fn gives_integers(view: &View<'_>, node: NodeId) -> bool {
    let is_integer = |output: &ValueId| {
        view.facts().dtype(*output).is_some_and(|dtype| dtype.is_integer() && dtype != DType::Bool)
    };
    view.graph[node].is("Cast") && view.graph[node].outputs.iter().flatten().any(is_integer)
}

/// The f64 values of a graph, in connected regions.
fn regions(view: &View<'_>) -> Vec<Region> {
    let is_double = |value: &ValueId| view.facts().dtype(*value) == Some(DType::F64);
    let mut seen: HashSet<ValueId> = HashSet::new();
    let mut regions = Vec::new();
    for (start, _) in view.graph.values().filter(|(id, _)| is_double(id)) {
        let mut region = Region::default();
        let mut open = vec![start];
        while let Some(value) = open.pop() {
            if !seen.insert(value) {
                continue;
            }
            region.values.insert(value);
            let nodes =
                view.producer(value).map(|(id, _)| id).into_iter().chain(view.uses(value).iter().copied());
            for id in nodes.filter(|id| region.nodes.insert(*id)).collect::<Vec<_>>() {
                let node = &view.graph[id];
                open.extend(
                    node.inputs.iter().chain(&node.outputs).flatten().filter(|value| is_double(value)),
                );
            }
        }
        if !region.values.is_empty() {
            regions.push(region);
        }
    }
    regions
}

/// The constants of a region in f32, if all of it can be.
fn narrowed_constants(
    view: &View<'_>,
    region: &Region,
) -> Result<HashMap<ValueId, Tensor>, (String, &'static str)> {
    let captured = view.graph.captured();
    let mut constants = HashMap::new();
    for value in &region.values {
        let refuse = |why| Err((view.graph[*value].name.clone(), why));
        if view.graph.inputs.contains(value) || view.graph.outputs.contains(value) {
            return refuse("a graph input or output is f64");
        }
        if captured.contains(value) {
            return refuse("the body of an If or a Loop uses it");
        }
        if view.uses(*value).iter().any(|user| gives_integers(view, *user)) {
            return refuse("integers are made of it");
        }
        match (&view.graph[*value].constant, view.producer(*value)) {
            (Some(tensor), _) => match narrow(tensor) {
                Some(tensor) => drop(constants.insert(*value, tensor)),
                None => return refuse("an f64 constant is too large, or its data is absent"),
            },
            (None, None) => return refuse("nothing defines it"),
            (None, Some(_)) => {}
        }
    }
    let unknown = |id: &&NodeId| {
        let node = &view.graph[**id];
        let plain = ARITHMETIC.iter().any(|op| node.is(op))
            || ["Cast", "Constant", "ConstantOfShape"].iter().any(|op| node.is(op));
        let large = |tensor: &Tensor| tensor.dtype == DType::F64 && narrow(tensor).is_none();
        let odd = node.attributes.iter().any(|(name, value)| match value {
            Attribute::Tensor(tensor) => large(tensor),
            Attribute::Int(_) | Attribute::Ints(_) | Attribute::String(_) => false,
            _ => name != "beta" && name != "alpha",
        });
        !plain || odd
    };
    match region.nodes.iter().find(unknown) {
        Some(id) => Err((view.graph[*id].name.clone(), "an operator on f64 is more than plain arithmetic")),
        None => Ok(constants),
    }
}

/// An f64 tensor in f32.
fn narrow(tensor: &Tensor) -> Option<Tensor> {
    let len = tensor.dtype.byte_len(&tensor.shape)?;
    if tensor.dtype != DType::F64 || len > MAX_CONSTANT || tensor.bytes.len() != len {
        return None;
    }
    let bytes = tensor.bytes.read().ok()?;
    let values: Vec<f32> =
        bytes.chunks_exact(8).filter_map(|b| Some(f64::from_le_bytes(b.try_into().ok()?) as f32)).collect();
    Some(Tensor::from_f32(&tensor.shape, &values))
}

/// How to have an f16 value in f32.
enum Wide {
    /// A value before it was cast to f16.
    Before(ValueId),
    /// The f16 value, cast.
    Cast(ValueId),
    Node {
        node: Box<Node>,
        inputs: Vec<Wide>,
    },
    /// An operand that is not floating-point.
    Same(ValueId),
}

/// Nodes that are looked at for one angle.
const MAX_NODES: usize = 64;

fn widen_angles(model: &mut Model, outcome: &mut Outcome) {
    let view = View::of(model);
    let is_angle = |node: &Node| node.is("Sin") || node.is("Cos");
    let mut found = Vec::new();
    for (root, node) in view.graph.nodes().filter(|(_, node)| is_angle(node)) {
        let (Some(angle), Some(output)) = (node.input(0), node.output(0)) else { continue };
        let is_narrow = |value: &ValueId| view.facts().dtype(*value) == Some(DType::F16);
        let before_cast = || view.made_by(angle, "Cast")?.1.input(0);
        let Some(narrow) = Some(angle).filter(is_narrow).or_else(|| before_cast().filter(is_narrow)) else {
            continue;
        };
        let mut nodes_left = MAX_NODES;
        let wide = wide(&view, narrow, &mut nodes_left);
        // An f16 value that is cast before the sine is as wide as it gets.
        if narrow == angle || !matches!(wide, Wide::Cast(_)) {
            found.push((root, node.op_type.clone(), wide, output, narrow == angle));
        }
    }
    for (root, op, angle, output, is_narrow) in found {
        let mut new = Replacement::of(&mut model.graph, root);
        let angle = write(&mut new, &angle);
        if is_narrow {
            let result = new.op(&op, &[angle], &[]);
            new.cast_into(result, DType::F16, output);
        } else {
            new.op_into(&op, &[angle], &[], output);
        }
        new.finish();
        outcome.applied += 1;
    }
}

fn wide(view: &View<'_>, value: ValueId, nodes_left: &mut usize) -> Wide {
    let facts = view.facts();
    if facts.dtype(value) != Some(DType::F16) {
        return Wide::Same(value);
    }
    let Some((_, node)) = view.producer(value) else { return Wide::Cast(value) };
    if node.is("Cast") {
        return node.input(0).map_or(Wide::Cast(value), Wide::Before);
    }
    let plain = ARITHMETIC.iter().any(|op| node.is(op)) && node.outputs.len() == 1;
    if !plain || *nodes_left == 0 || node.inputs.iter().any(Option::is_none) {
        return Wide::Cast(value);
    }
    *nodes_left -= 1;
    let inputs = node.inputs.iter().flatten().map(|input| wide(view, *input, nodes_left)).collect();
    Wide::Node { node: Box::new(node.clone()), inputs }
}

fn write(new: &mut Replacement<'_>, wide: &Wide) -> ValueId {
    match wide {
        Wide::Same(value) => *value,
        Wide::Before(value) | Wide::Cast(value) => new.cast(*value, DType::F32),
        Wide::Node { node, inputs } => {
            let inputs: Vec<ValueId> = inputs.iter().map(|input| write(new, input)).collect();
            let attributes: Vec<(&str, Attribute)> =
                node.attributes.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
            new.op(&node.op_type, &inputs, &attributes)
        }
    }
}
