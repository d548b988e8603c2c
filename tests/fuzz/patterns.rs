//! What passes look for, and what almost looks like it: every part may be a little different, and be used elsewhere.

use viaduct_export::onnx::{Attribute, DType, Tensor};

use crate::{
    draft::{Draft, RUNS, Size, Value, fixed, int},
    operators::{
        broadcast, cast_to, concat_of, linear, reduce_over, reshape_to, slice_at, split_into, split_last,
        transpose_by,
    },
};

/// [B, S, C] with C of at least 4.
fn tokens(d: &mut Draft) -> Option<Value> {
    let wide = |size: &Size| fixed(size).is_some_and(|n| n >= 4 && n % 4 == 0);
    let full = |v: &Value| v.shape.iter().all(|size| size.iter().all(|n| *n > 0));
    d.pick(|v| v.is_float() && v.rank() == 3 && v.shape.last().is_some_and(wide) && full(v))
}

fn wide(d: &mut Draft) -> Option<Value> {
    let fits = |size: &Size| fixed(size).is_some_and(|n| n >= 2);
    d.pick(|v| {
        v.is_float()
            && v.rank() > 0
            && v.shape.last().is_some_and(fits)
            && v.shape.iter().all(|s| !s.contains(&0))
    })
}

fn binary(d: &mut Draft, op: &str, a: &Value, b: &Value) -> Option<Value> {
    let shape = broadcast(&a.shape, &b.shape)?;
    let operands = if d.choices.one_in(6) { [&b.name, &a.name] } else { [&a.name, &b.name] };
    d.one(op, &operands.map(String::as_str), &[], a.dtype, shape)
}

fn scaled(d: &mut Draft, op: &str, x: &Value, number: f32) -> Option<Value> {
    let c = d.floats(x.dtype, &[], &[number]);
    d.one(op, &[&x.name, &c], &[], x.dtype, x.shape.clone())
}

fn weighted(d: &mut Draft, op: &str, x: &Value) -> Option<Value> {
    let last = fixed(x.shape.last()?)?;
    let shape = match d.choices.below(8) {
        0 => vec![1],
        1 => vec![1; x.rank()],
        _ => vec![last],
    };
    let w = d.weight(x.dtype, &shape);
    let operands = if d.choices.one_in(3) { [&w, &x.name] } else { [&x.name, &w] };
    d.one(op, &operands.map(String::as_str), &[], x.dtype, x.shape.clone())
}

/// [B, S, C] -> [B, heads, S, C / heads]
fn heads(d: &mut Draft, x: &Value, count: usize) -> Option<Value> {
    let x = split_last(d, x, count)?;
    transpose_by(d, &x, &[0, 2, 1, 3])
}

/// 1 / sqrt(size), as a number or as the chain that torch writes.
fn scale(d: &mut Draft, x: &Value) -> Option<Value> {
    let size = fixed(x.shape.last()?)? as f32;
    match d.choices.below(4) {
        0 => scaled(d, "Mul", x, 1.0 / size.sqrt()),
        1 => scaled(d, "Div", x, size.sqrt()),
        2 => scaled(d, "Mul", x, size.powf(-0.25)),
        _ => {
            let last = x.rank() as i64 - 1;
            let all: Vec<[i64; RUNS]> = x.shape.iter().map(|size| size.map(|n| n as i64)).collect();
            let shape = d.list("Shape", &[&x.name], &[], all.clone(), false)?;
            let at = d.int(last);
            let dim =
                d.list("Gather", &[&shape.name, &at], &[("axis", int(0))], vec![all[last as usize]], true)?;
            let dim = cast_to(d, &dim, x.dtype)?;
            let root = d.same("Sqrt", &dim, &[])?;
            let one = d.floats(x.dtype, &[], &[1.0]);
            let scale = d.one("Div", &[&one, &root.name], &[], x.dtype, Vec::new())?;
            let scale = d.same("Sqrt", &scale, &[])?;
            binary(d, "Mul", x, &scale)
        }
    }
}

pub fn attention(d: &mut Draft) -> Option<()> {
    let x = tokens(d)?;
    let other = if d.choices.one_in(3) {
        tokens(d).filter(|o| o.shape[0] == x.shape[0] && o.dtype == x.dtype).unwrap_or(x.clone())
    } else {
        x.clone()
    };
    let count = d.choices.of_list(&[2, 4, 1]);
    let q = linear(d, &x, 8)?;
    let k = linear(d, &other, 8)?;
    let v = linear(d, &other, 8)?;
    let (mut q, k, v) = (heads(d, &q, count)?, heads(d, &k, count)?, heads(d, &v, count)?);
    let early = d.choices.one_in(2);
    if early {
        q = scale(d, &q)?;
    }
    let mut turned = transpose_by(d, &k, &[0, 1, 3, 2])?;
    if early && d.choices.one_in(2) {
        turned = scaled(d, "Mul", &turned, 0.7)?;
    }
    let shape = vec![q.shape[0], q.shape[1], q.shape[2], k.shape[2]];
    let mut scores = d.one("MatMul", &[&q.name, &turned.name], &[], q.dtype, shape)?;
    if !early && !d.choices.one_in(5) {
        scores = scaled(d, "Mul", &scores, 0.35)?;
    }
    if d.choices.one_in(3) {
        scores = masked(d, &scores)?;
    }
    let axis = if d.choices.one_in(8) { 2 } else { [-1, 3][d.choices.below(2)] };
    let axis = if d.opset < 13 { 3 } else { axis };
    let mut weights = d.same("Softmax", &scores, &[("axis", int(axis))])?;
    if d.choices.one_in(4) {
        let nan = d.one("IsNaN", &[&weights.name], &[], DType::Bool, weights.shape.clone())?;
        let zero = d.floats(weights.dtype, &[], &[0.0]);
        weights =
            d.one("Where", &[&nan.name, &zero, &weights.name], &[], weights.dtype, weights.shape.clone())?;
    }
    let y = d.one("MatMul", &[&weights.name, &v.name], &[], v.dtype, q.shape.clone())?;
    let y = transpose_by(d, &y, &[0, 2, 1, 3])?;
    let computed = d.choices.one_in(2);
    reshape_to(d, &y, &[vec![0], vec![1], vec![2, 3]], computed).map(drop)
}

/// Adds a mask of 0 and a low number, constant or computed.
fn masked(d: &mut Draft, scores: &Value) -> Option<Value> {
    let low = d.choices.of_list(&[f32::NEG_INFINITY, -3.4e38, -1e4]);
    let holds = d.one("Less", &[&scores.name, &scores.name], &[], DType::Bool, scores.shape.clone())?;
    let holds = if d.choices.one_in(2) { holds } else { d.same("Not", &holds, &[])? };
    let (zero, low) = (d.floats(scores.dtype, &[], &[0.0]), d.floats(scores.dtype, &[], &[low]));
    let operands = if d.choices.one_in(2) { [&holds.name, &zero, &low] } else { [&holds.name, &low, &zero] };
    let mask = d.one("Where", &operands.map(String::as_str), &[], scores.dtype, scores.shape.clone())?;
    binary(d, "Add", scores, &mask)
}

/// Where over a triangle of positions.
pub fn mask(d: &mut Draft) -> Option<()> {
    let scores =
        d.pick(|v| v.dtype == DType::F32 && v.rank() >= 2 && v.shape.iter().all(|s| !s.contains(&0)))?;
    let row = scores.shape.last().and_then(fixed)?;
    let bits: Vec<u8> = (0..row).map(|at| u8::from(at * 2 >= row)).collect();
    let holds = d.constant(Tensor::inline(DType::Bool, &[row], bits));
    let low = d.floats(DType::F32, &[], &[f32::NEG_INFINITY]);
    let operands =
        if d.choices.one_in(4) { [&holds, &low, &scores.name] } else { [&holds, &scores.name, &low] };
    let masked = d.one("Where", &operands.map(String::as_str), &[], DType::F32, scores.shape.clone())?;
    let last = masked.rank() as i64 - 1;
    d.same("Softmax", &masked, &[("axis", int(last))]).map(drop)
}

fn odd_axis(d: &mut Draft, x: &Value) -> usize {
    if d.choices.one_in(8) { d.choices.below(x.rank()) } else { x.rank() - 1 }
}

pub fn rms_norm(d: &mut Draft) -> Option<()> {
    let x = wide(d)?;
    let through =
        if x.dtype == DType::F16 && d.choices.one_in(2) { cast_to(d, &x, DType::F32)? } else { x.clone() };
    let square = if d.choices.one_in(2) {
        scaled(d, "Pow", &through, 2.0)?
    } else {
        binary(d, "Mul", &through, &through)?
    };
    let axis = odd_axis(d, &square);
    let mean = reduce_over(d, "ReduceMean", &square, axis, true)?;
    let sum = scaled(d, "Add", &mean, 1e-5)?;
    let root = d.same("Sqrt", &sum, &[])?;
    let normed = match d.choices.below(3) {
        0 => binary_in_order(d, "Div", &through, &root)?,
        1 => {
            let inverse = d.same("Reciprocal", &root, &[])?;
            binary(d, "Mul", &through, &inverse)?
        }
        _ => {
            let one = d.floats(root.dtype, &[], &[1.0]);
            let inverse = d.one("Div", &[&one, &root.name], &[], root.dtype, root.shape.clone())?;
            binary(d, "Mul", &through, &inverse)?
        }
    };
    let normed =
        if normed.dtype == x.dtype || d.choices.one_in(3) { normed } else { cast_to(d, &normed, x.dtype)? };
    weighted(d, "Mul", &normed).map(drop)
}

fn binary_in_order(d: &mut Draft, op: &str, a: &Value, b: &Value) -> Option<Value> {
    d.one(op, &[&a.name, &b.name], &[], a.dtype, broadcast(&a.shape, &b.shape)?)
}

pub fn layer_norm(d: &mut Draft) -> Option<()> {
    let x = wide(d)?;
    if d.opset >= 17 && d.choices.one_in(3) {
        let last = fixed(x.shape.last()?)?;
        let (scale, bias) = (d.weight(x.dtype, &[last]), d.weight(x.dtype, &[last]));
        let inputs = [x.name.as_str(), &scale, &bias];
        let used = if d.choices.one_in(2) { 2 } else { 3 };
        return d
            .one("LayerNormalization", &inputs[..used], &[("axis", int(-1))], x.dtype, x.shape.clone())
            .map(drop);
    }
    let axis = odd_axis(d, &x);
    let mean = reduce_over(d, "ReduceMean", &x, axis, true)?;
    let centred = binary_in_order(d, "Sub", &x, &mean)?;
    let square = if d.choices.one_in(2) {
        scaled(d, "Pow", &centred, 2.0)?
    } else {
        binary(d, "Mul", &centred, &centred)?
    };
    let variance = reduce_over(d, "ReduceMean", &square, axis, true)?;
    let sum = scaled(d, "Add", &variance, 1e-5)?;
    let root = d.same("Sqrt", &sum, &[])?;
    let normed = binary_in_order(d, "Div", &centred, &root)?;
    let normed = if d.choices.one_in(4) { normed } else { weighted(d, "Mul", &normed)? };
    if !d.choices.one_in(4) {
        weighted(d, "Add", &normed)?;
    }
    Some(())
}

/// Reshape, InstanceNormalization, Reshape, and a scale per channel.
pub fn group_norm(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| {
        v.dtype == DType::F32
            && v.rank() == 4
            && fixed(&v.shape[1]).is_some_and(|c| c >= 2 && c % 2 == 0)
            && v.shape.iter().all(|s| !s.contains(&0))
    })?;
    let channels = fixed(&x.shape[1])?;
    let list = d.ints(&[0, 2, -1]);
    let inner = std::array::from_fn(|run| channels / 2 * x.shape[2][run] * x.shape[3][run]);
    let grouped = d.one("Reshape", &[&x.name, &list], &[], x.dtype, vec![x.shape[0], [2; RUNS], inner])?;
    let (scale, bias) = (d.floats(x.dtype, &[2], &[1.0; 2]), d.floats(x.dtype, &[2], &[0.0; 2]));
    let normed = d.same_of("InstanceNormalization", &[&grouped.name, &scale, &bias], &grouped)?;
    let all = x.shape.iter().map(|size| size.map(|n| n as i64)).collect();
    let shape = d.list("Shape", &[&x.name], &[], all, false)?;
    let back = d.one("Reshape", &[&normed.name, &shape.name], &[], x.dtype, x.shape.clone())?;
    let weight = d.weight(x.dtype, &[channels, 1, 1]);
    let scaled = d.same_of("Mul", &[&back.name, &weight], &back)?;
    let bias = d.weight(x.dtype, &[channels, 1, 1]);
    d.same_of("Add", &[&scaled.name, &bias], &scaled).map(drop)
}

pub fn silu(d: &mut Draft) -> Option<()> {
    let x = d.float()?;
    if d.choices.one_in(2) {
        let turned = d.same("Neg", &x, &[])?;
        let power = d.same("Exp", &turned, &[])?;
        let sum = scaled(d, "Add", &power, 1.0)?;
        if d.choices.one_in(2) {
            return binary_in_order(d, "Div", &x, &sum).map(drop);
        }
        let gate = d.same("Reciprocal", &sum, &[])?;
        return binary(d, "Mul", &x, &gate).map(drop);
    }
    let gate = d.same("Sigmoid", &x, &[])?;
    let by = if d.choices.one_in(5) { d.pick(|v| v.dtype == x.dtype && v.shape == x.shape)? } else { x };
    binary(d, "Mul", &by, &gate).map(drop)
}

pub fn swiglu(d: &mut Draft) -> Option<()> {
    let x = wide(d)?;
    let last = x.rank() - 1;
    let parts = split_into(d, &x, last, 2)?;
    let (a, b) = if d.choices.one_in(3) { (&parts[1], &parts[0]) } else { (&parts[0], &parts[1]) };
    let gate = d.same("Sigmoid", a, &[])?;
    let silu = binary(d, "Mul", a, &gate)?;
    binary(d, "Mul", &silu, b).map(drop)
}

pub fn rope(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| {
        v.is_float()
            && v.rank() == 4
            && v.shape.iter().all(|s| !s.contains(&0))
            && fixed(&v.shape[3]).is_some_and(|n| n % 2 == 0 && n > 0)
            && fixed(&v.shape[2]).is_some()
    })?;
    let (rows, size) = (fixed(&x.shape[2])?, fixed(&x.shape[3])?);
    let half = (size / 2) as i64;
    let (cos, sin) = (table(d, x.dtype, rows, size)?, table(d, x.dtype, rows, size)?);
    let first = slice_at(d, &x, 3, 0, half, 1)?;
    let second = slice_at(d, &x, 3, half, i64::MAX, 1)?;
    let (first, second) = if d.choices.one_in(6) { (second, first) } else { (first, second) };
    let turned = d.same("Neg", &second, &[])?;
    let turned = concat_of(d, &[turned, first], 3)?;
    let a = d.same_of("Mul", &[&x.name, &cos], &x)?;
    let b = d.same_of("Mul", &[&turned.name, &sin], &x)?;
    binary(d, "Add", &a, &b).map(drop)
}

/// A table of angles' sines or cosines, as a rule the same in both halves.
fn table(d: &mut Draft, dtype: DType, rows: usize, size: usize) -> Option<String> {
    if d.choices.one_in(6) {
        return Some(d.weight(dtype, &[rows, size]));
    }
    let (name, shape) = (d.weight(dtype, &[rows, size / 2]), crate::draft::every(&[rows, size / 2]));
    let half = Value { name, dtype, shape, ints: None };
    Some(concat_of(d, &[half.clone(), half], 1)?.name)
}

/// com.microsoft MultiHeadAttention.
pub fn fused_attention(d: &mut Draft) -> Option<()> {
    let x = tokens(d).filter(|x| x.dtype == DType::F32)?;
    let (q, k, v) = (linear(d, &x, 8)?, linear(d, &x, 8)?, linear(d, &x, 8)?);
    let heads = d.choices.of_list(&[1, 2, 4]);
    let mut attributes = vec![("num_heads", int(heads))];
    if d.choices.one_in(2) {
        attributes.push(("scale", Attribute::Float(0.3)));
    }
    d.one("ms.MultiHeadAttention", &[&q.name, &k.name, &v.name], &attributes, q.dtype, q.shape.clone())
        .map(drop)
}

pub fn gelu(d: &mut Draft) -> Option<()> {
    let x = d.float()?;
    let inner = scaled(d, "Div", &x, std::f32::consts::SQRT_2)?;
    let erf = d.same("Erf", &inner, &[])?;
    let sum = scaled(d, "Add", &erf, 1.0)?;
    let product = binary(d, "Mul", &x, &sum)?;
    scaled(d, "Mul", &product, 0.5).map(drop)
}

/// x + gate * f(x · (1 + scale) + shift)
pub fn gated_residual(d: &mut Draft) -> Option<()> {
    let x = tokens(d)?;
    let last = fixed(&x.shape[2])?;
    let parts = d.weight(x.dtype, &[1, 1, 3 * last]);
    let parts =
        Value { name: parts, dtype: x.dtype, shape: crate::draft::every(&[1, 1, 3 * last]), ints: None };
    let parts = split_into(d, &parts, 2, 3)?;
    let scale = scaled(d, "Add", &parts[0], 1.0)?;
    let y = binary(d, "Mul", &x, &scale)?;
    let y = binary(d, "Add", &y, &parts[1])?;
    let y = linear(d, &y, last)?;
    let y = binary(d, "Mul", &parts[2], &y)?;
    binary(d, "Add", &x, &y).map(drop)
}

/// [1, C, H, W] -> [1, H * W, C] -> attention -> [1, C, H, W], whose sizes are read at run time.
pub fn flattened_rows(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| {
        v.dtype == DType::F32
            && v.rank() == 4
            && fixed(&v.shape[1]).is_some_and(|c| c >= 2)
            && v.shape.iter().all(|s| !s.contains(&0))
    })?;
    let c = fixed(&x.shape[1])?;
    let flat = reshape_to(d, &x, &[vec![0], vec![1], vec![2, 3]], true)?;
    let rows = transpose_by(d, &flat, &[0, 2, 1])?;
    let (q, k) = (linear(d, &rows, c)?, linear(d, &rows, c)?);
    let turned = transpose_by(d, &k, &[0, 2, 1])?;
    let shape = vec![q.shape[0], q.shape[1], k.shape[1]];
    let scores = d.one("MatMul", &[&q.name, &turned.name], &[], q.dtype, shape)?;
    let weights = d.same("Softmax", &scores, &[("axis", int(2))])?;
    let y = d.one("MatMul", &[&weights.name, &rows.name], &[], q.dtype, rows.shape.clone())?;
    let y = if d.choices.one_in(3) { d.same("Relu", &y, &[])? } else { y };
    let y = transpose_by(d, &y, &[0, 2, 1])?;
    let all = x.shape.iter().map(|size| size.map(|n| n as i64)).collect();
    let shape = d.list("Shape", &[&x.name], &[], all, false)?;
    let back = d.one("Reshape", &[&y.name, &shape.name], &[], x.dtype, x.shape.clone())?;
    binary(d, "Add", &back, &x).map(drop)
}

impl Draft {
    /// A node of several operands with a result like one of them.
    fn same_of(&mut self, op: &str, inputs: &[&str], like: &Value) -> Option<Value> {
        let none: &[(&str, Attribute)] = &[];
        self.one(op, inputs, none, like.dtype, like.shape.clone())
    }
}
