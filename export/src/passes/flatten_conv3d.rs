//! Causal 3-D convolutions over a single frame.
//!
//! Before: `Conv(x [N, C, 1, H, W], W [O, C, kt, kh, kw])`, as a rule behind a Pad that puts `kt - 1` frames of zeros before
//! the one there is. After: Squeeze, a 2-D Conv with the one slice of the kernel that meets the frame, Unsqueeze. The rest
//! of the kernel only ever meets zeros.
//!
//! Refused: more frames than one or a number that is not known; padding that is not zeros, or not constant; a result of
//! several frames; automatic padding.

use super::{Outcome, Pass, PassError, Replacement, Settings, View};
use crate::{
    onnx::{Attribute, Model, Node, NodeId, Tensor, ValueId},
    quant,
};

pub const PASS: Pass = Pass {
    name: "flatten_conv3d",
    what: "Conv over [N,C,1,H,W] with a 3-D kernel -> Conv over [N,C,H,W] with its slice that meets the frame",
    why: "3-D convolutions have invalid shaders in f16, and most of their work is multiplying by zero",
    run,
};

struct Flat {
    node: NodeId,
    x: ValueId,
    weight: ValueId,
    /// The slice of the kernel that meets the frame.
    slice: usize,
    bias: Option<ValueId>,
    output: ValueId,
    attributes: Vec<(&'static str, Attribute)>,
}

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    let mut found = Vec::new();
    let view = View::of(model);
    for (id, node) in view.nodes("Conv") {
        match flat(&view, id, node) {
            Ok(Some(flat)) => found.push(flat),
            Ok(None) => {}
            Err(why) => outcome.refuse(view.graph.place(id), why),
        }
    }
    let opset = view.opset();
    for flat in found {
        let name = model.graph[flat.weight].name.clone();
        let Some(tensor) = model.graph[flat.weight].constant.clone() else { continue };
        let tensor = sliced(tensor, flat.slice)
            .map_err(|source| PassError::Constant { tensor: name.clone(), source: source.into() })?;
        let mut new = Replacement::of(&mut model.graph, flat.node);
        let weight = new.named_constant(&format!("{name}.frame"), tensor);
        let x = on_frame_axis(&mut new, opset, "Squeeze", flat.x, None);
        let inputs: Vec<ValueId> = [x, weight].into_iter().chain(flat.bias).collect();
        let y = new.op("Conv", &inputs, &flat.attributes);
        on_frame_axis(&mut new, opset, "Unsqueeze", y, Some(flat.output));
        new.finish();
        outcome.applied += 1;
    }
    Ok(outcome)
}

/// Squeeze or Unsqueeze of the frames' axis, whose number became an input with version 13.
fn on_frame_axis(
    new: &mut Replacement<'_>,
    opset: i64,
    op_type: &str,
    x: ValueId,
    output: Option<ValueId>,
) -> ValueId {
    let output = output.unwrap_or_else(|| new.value());
    if opset >= 13 {
        let axes = new.ints(&[2]);
        new.op_into(op_type, &[x, axes], &[], output);
    } else {
        new.op_into(op_type, &[x], &[("axes", Attribute::Ints(vec![2]))], output);
    }
    output
}

fn sliced(tensor: Tensor, slice: usize) -> Result<Tensor, quant::QuantError> {
    if tensor.shape.get(2) == Some(&1) {
        let shape =
            tensor.shape.iter().enumerate().filter(|(axis, _)| *axis != 2).map(|(_, size)| *size).collect();
        return Ok(Tensor { shape, ..tensor });
    }
    quant::select(tensor, 2, slice)
}

/// `None` for a convolution that is not 3-D.
fn flat(view: &View<'_>, id: NodeId, node: &Node) -> Result<Option<Flat>, &'static str> {
    let (Some(x), Some(weight), Some(output)) = (node.input(0), node.input(1), node.output(0)) else {
        return Ok(None);
    };
    if view.facts().rank(weight) != Some(5) {
        return Ok(None);
    }
    let kernel = &view.constant(weight).ok_or("its kernel is no constant")?.shape;
    if node.text("auto_pad").is_some_and(|pad| pad != "NOTSET") {
        return Err("its padding is automatic");
    }
    let own = pads(node.ints("pads").unwrap_or(&[0; 6]), 3).ok_or("its padding is not understood")?;
    // A Pad before it, unless it pads where the convolution does not.
    let padded = view.made_by(x, "Pad").and_then(|(_, pad)| padding(view, pad));
    let (x, before) = padded.unwrap_or((x, [[0; 2]; 3]));
    match view.facts().fixed_dim(x, 2) {
        Some(1) => {}
        Some(_) => return Err("it sees more than one frame"),
        None => return Err("the number of its frames is not known"),
    }
    let pads: Vec<[i64; 2]> = own.iter().zip(before).map(|(a, b)| [a[0] + b[0], a[1] + b[1]]).collect();
    let [[first, last], rows, columns] = pads[..] else { return Err("its padding is not understood") };
    let along = |name: &str, axis: usize| node.ints(name).map_or(Some(1), |list| list.get(axis).copied());
    if along("dilations", 0) != Some(1) {
        return Err("it skips frames");
    }
    let kernel_frames = kernel.get(2).copied().unwrap_or(0);
    let stride = along("strides", 0).unwrap_or(1).max(1);
    let last_start = 1 + first + last - kernel_frames as i64;
    let slice = usize::try_from(first).unwrap_or(usize::MAX);
    if !(0..stride).contains(&last_start) || slice >= kernel_frames {
        return Err("its result has several frames");
    }
    let mut attributes = vec![("pads", Attribute::Ints(vec![rows[0], columns[0], rows[1], columns[1]]))];
    attributes.extend(node.int("group").map(|group| ("group", Attribute::Int(group))));
    for name in ["strides", "dilations", "kernel_shape"] {
        if let Some(list) = node.ints(name) {
            let list = list.get(1..3).ok_or("its attributes are not those of a 3-D convolution")?;
            attributes.push((name, Attribute::Ints(list.to_vec())));
        }
    }
    Ok(Some(Flat { node: id, x, weight, slice, bias: node.input(2), output, attributes }))
}

/// What a Pad with constant zeros puts around [.., .., T, H, W], and its input.
fn padding(view: &View<'_>, pad: &Node) -> Option<(ValueId, [[i64; 2]; 3])> {
    let zeros = pad.text("mode").is_none_or(|mode| mode == "constant")
        && pad.input(2).is_none_or(|value| view.scalar(value) == Some(0.0))
        && pad.input(3).is_none();
    let amounts = view.ints(pad.input(1)?)?;
    let around = pads(&amounts, 5)?;
    let [[0, 0], [0, 0], frames, rows, columns] = around[..] else { return None };
    zeros.then_some((pad.input(0)?, [frames, rows, columns]))
}

/// Pads as pairs per axis: ONNX lists all starts, then all ends. Negative ones, which crop, are not taken.
fn pads(list: &[i64], axes: usize) -> Option<Vec<[i64; 2]>> {
    let small = |amount: &i64| (0..=i64::from(u16::MAX)).contains(amount);
    if list.len() != 2 * axes || !list.iter().all(small) {
        return None;
    }
    let (starts, ends) = list.split_at(axes);
    Some(starts.iter().zip(ends).map(|(start, end)| [*start, *end]).collect())
}
