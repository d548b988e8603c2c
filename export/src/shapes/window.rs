//! Windows that slide over the spatial axes of a tensor [N, C, spatial...]: what convolutions and pools have in common.

use super::{Call, Dims, Fact};

/// Attributes of a window. Every list has one entry per spatial axis.
pub(super) struct Window {
    pub kernel: Dims,
    pub strides: Vec<usize>,
    dilations: Vec<usize>,
    padding: Padding,
    ceil: bool,
}

enum Padding {
    /// Elements before and after each axis, negative where they are cut off.
    Explicit(Vec<(i64, i64)>),
    /// As much as makes one output element per stride.
    Same,
}

impl Window {
    /// Reads a node's attributes. `kernel` counts where the node has no `kernel_shape`.
    pub fn of(call: &Call<'_>, kernel: &[Option<usize>]) -> Result<Window, String> {
        let axes = kernel.len();
        let kernel = match call.attr_ints("kernel_shape") {
            None => kernel.to_vec(),
            Some(stated) => {
                let stated = positive("kernel_shape", stated, axes)?;
                let both = stated.into_iter().map(Some).zip(kernel.iter().copied());
                both.map(|(a, b)| super::call::agree(a, b)).collect::<Result<_, _>>()?
            }
        };
        let ones = |name| match call.attr_ints(name) {
            Some(stated) => positive(name, stated, axes),
            None => Ok(vec![1; axes]),
        };
        let padding = match call.attr_str("auto_pad").unwrap_or("NOTSET") {
            "" | "NOTSET" => Padding::Explicit(pads(call, axes)?),
            "VALID" => Padding::Explicit(vec![(0, 0); axes]),
            "SAME_UPPER" | "SAME_LOWER" => Padding::Same,
            other => return Err(format!("auto_pad '{other}' is unknown")),
        };
        let ceil = call.attr_int("ceil_mode", 0) != 0;
        Ok(Window { kernel, strides: ones("strides")?, dilations: ones("dilations")?, padding, ceil })
    }

    /// How many places the window takes along each axis of an input of these sizes.
    pub fn places(&self, input: &[Option<usize>]) -> Result<Dims, String> {
        input.iter().enumerate().map(|(axis, size)| self.places_along(axis, *size)).collect()
    }

    fn places_along(&self, axis: usize, size: Option<usize>) -> Result<Option<usize>, String> {
        let (Some(size), stride) = (size, self.strides[axis]) else { return Ok(None) };
        let Padding::Explicit(pads) = &self.padding else {
            // Runtimes do not pad for the dilation, as the definition has it.
            return Ok((self.dilations[axis] == 1).then(|| size.div_ceil(stride)));
        };
        let Some(span) = self.span(axis)? else { return Ok(None) };
        let (before, after) = pads[axis];
        let overflow = || format!("padding {before} and {after} is out of range");
        let led = size.checked_add_signed(before as isize).ok_or_else(overflow)?;
        let padded = led.checked_add_signed(after as isize).ok_or_else(overflow)?;
        let room = padded.checked_sub(span);
        let room =
            room.ok_or_else(|| format!("a window of {span} does not fit into {padded} along axis {axis}"))?;
        if !self.ceil {
            return Ok(Some(room / stride + 1));
        }
        let places = room.div_ceil(stride) + 1;
        // A window that would begin behind the input and the padding before it is left out.
        let begins = (places - 1).checked_mul(stride).ok_or("a stride is out of range")?;
        Ok(Some(if begins >= led { places - 1 } else { places }))
    }

    /// Elements from the first to the last one that the kernel touches.
    fn span(&self, axis: usize) -> Result<Option<usize>, String> {
        let Some(kernel) = self.kernel[axis] else { return Ok(None) };
        let kernel = kernel.checked_sub(1).ok_or("a kernel has size 0")?;
        let span = kernel.checked_mul(self.dilations[axis]).and_then(|span| span.checked_add(1));
        span.map(Some).ok_or_else(|| format!("a dilation of {} is out of range", self.dilations[axis]))
    }

    /// The sizes whose windows give an input of these sizes: what a transposed convolution makes.
    /// `extra` elements are appended to each axis.
    pub fn transposed(&self, input: &[Option<usize>], extra: &[usize]) -> Result<Dims, String> {
        let along = |(axis, size): (usize, &Option<usize>)| match (size, self.span(axis)?) {
            (Some(size), Some(span)) => self.transposed_along(axis, *size, span, extra[axis]),
            _ => Ok(None),
        };
        input.iter().enumerate().map(along).collect()
    }

    fn transposed_along(
        &self,
        axis: usize,
        size: usize,
        span: usize,
        extra: usize,
    ) -> Result<Option<usize>, String> {
        let stride = self.strides[axis];
        let range = || format!("{size} times a stride of {stride} is out of range");
        let begin = size.saturating_sub(1).checked_mul(stride).ok_or_else(range)?;
        let full = begin.checked_add(span).and_then(|full| full.checked_add(extra)).ok_or_else(range)?;
        let Padding::Explicit(pads) = &self.padding else {
            let same = size.checked_mul(stride).ok_or_else(range)?;
            // Where the window leaves gaps, definition and implementations differ.
            return Ok((full >= same).then_some(same));
        };
        let cut = i128::from(pads[axis].0) + i128::from(pads[axis].1);
        let left = usize::try_from(full as i128 - cut);
        left.map(Some).map_err(|_| format!("padding of {cut} leaves nothing of {full} along axis {axis}"))
    }
}

/// A tensor's sizes along its spatial axes.
pub(super) fn spatial(dims: &[Option<usize>]) -> Result<&[Option<usize>], String> {
    dims.get(2..).ok_or_else(|| format!("rank {}, where batch and channels take two axes", dims.len()))
}

fn pads(call: &Call<'_>, axes: usize) -> Result<Vec<(i64, i64)>, String> {
    let Some(stated) = call.attr_ints("pads") else { return Ok(vec![(0, 0); axes]) };
    if stated.len() != 2 * axes {
        return Err(format!("{} pads for {axes} spatial axes", stated.len()));
    }
    Ok((0..axes).map(|axis| (stated[axis], stated[axes + axis])).collect())
}

/// A list attribute with one positive number per spatial axis.
fn positive(name: &str, values: &[i64], axes: usize) -> Result<Vec<usize>, String> {
    if values.len() != axes {
        return Err(format!("{name} has {} entries for {axes} spatial axes", values.len()));
    }
    let value = |value: &i64| match usize::try_from(*value) {
        Ok(value) if value > 0 => Ok(value),
        _ => Err(format!("{name} has the entry {value}")),
    };
    values.iter().map(value).collect()
}

/// Runs a rule for channels-first tensors on a node whose first input and output have their channels last.
pub(super) fn channels_last(
    call: &Call<'_>,
    rule: impl Fn(&Call<'_>) -> Result<Vec<Fact>, String>,
) -> Result<Vec<Fact>, String> {
    let mut first = call.same_as(0)?;
    if let Some(dims) = first.shape.as_mut().filter(|dims| dims.len() > 2) {
        dims[1..].rotate_right(1);
    }
    let mut inputs = call.inputs.clone();
    inputs[0] = Some(&first);
    let mut facts = rule(&Call { node: call.node, inputs, opset: call.opset, scope: call.scope })?;
    if let Some(dims) = facts.first_mut().and_then(|fact| fact.shape.as_mut()).filter(|dims| dims.len() > 2) {
        dims[1..].rotate_left(1);
    }
    Ok(facts)
}
