//! The operators that generated graphs consist of. Each function adds one, or nothing where none of the values fits.

use viaduct_export::onnx::{Attribute, DType, Graph, Node, Tensor, ValueType};

use crate::{
    draft::{Draft, RUNS, Size, Value, every, fixed, int, ints},
    patterns,
};

pub type Operator = fn(&mut Draft) -> Option<()>;

/// Those that exporters use most are here several times.
pub const OPERATORS: &[Operator] = &[
    unary,
    unary,
    identity,
    cast,
    binary,
    binary,
    binary,
    with_scalar,
    with_scalar,
    reshape,
    reshape,
    reshape,
    transpose,
    transpose,
    squeeze,
    unsqueeze,
    slice,
    slice,
    concat,
    concat_many,
    split,
    split_many,
    gather,
    expand,
    matmul,
    matmul,
    gemm,
    product,
    reduce,
    softmax,
    compare,
    shape_list,
    shape_list,
    list_arithmetic,
    list_arithmetic,
    filled,
    range,
    twin,
    branch,
    tile,
    clip,
    conv,
    conv3d,
    resize,
    pad,
    cumulate,
    folded,
    patterns::attention,
    patterns::attention,
    patterns::fused_attention,
    patterns::rms_norm,
    patterns::layer_norm,
    patterns::group_norm,
    patterns::silu,
    patterns::swiglu,
    patterns::rope,
    patterns::gelu,
    patterns::gated_residual,
    patterns::mask,
    patterns::flattened_rows,
];

fn unary(d: &mut Draft) -> Option<()> {
    let x = d.float()?;
    let op = d
        .choices
        .of_list(&["Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Erf", "Exp", "Sin", "Cos", "Floor", "Softplus"]);
    d.same(op, &x, &[]).map(drop)
}

fn identity(d: &mut Draft) -> Option<()> {
    let x = d.pick(|_| true)?;
    match d.choices.below(4) {
        0 if x.is_float() => d.same("Dropout", &x, &[]),
        1 => d.same("Cast", &x, &[("to", int(i64::from(x.dtype.to_onnx())))]),
        2 => d.same("Transpose", &x, &[("perm", ints(&(0..x.rank() as i64).collect::<Vec<_>>()))]),
        _ => d.same("Identity", &x, &[]),
    }
    .map(drop)
}

pub fn cast_to(d: &mut Draft, x: &Value, to: DType) -> Option<Value> {
    d.one("Cast", &[&x.name], &[("to", int(i64::from(to.to_onnx())))], to, x.shape.clone())
}

/// The value as numbers that can be read back.
pub fn stretched(d: &mut Draft, x: &Value) -> Option<Value> {
    cast_to(d, x, DType::F32)
}

fn cast(d: &mut Draft) -> Option<()> {
    let x = d.pick(|_| true)?;
    let to = if x.dtype == DType::F32 { DType::F16 } else { DType::F32 };
    cast_to(d, &x, to).map(drop)
}

pub fn broadcast(a: &[Size], b: &[Size]) -> Option<Vec<Size>> {
    let rank = a.len().max(b.len());
    let at =
        |shape: &[Size], axis: usize| (axis + shape.len()).checked_sub(rank).map_or([1; RUNS], |i| shape[i]);
    let along = |axis| match (at(a, axis), at(b, axis)) {
        (a, b) if a == b => Some(a),
        (a, b) if a == [1; RUNS] => Some(b),
        (a, b) if b == [1; RUNS] => Some(a),
        _ => None,
    };
    (0..rank).map(along).collect()
}

fn binary(d: &mut Draft) -> Option<()> {
    let a = d.pick(|v| v.is_float() || v.dtype == DType::I64)?;
    let b = d.pick(|b| b.dtype == a.dtype && broadcast(&a.shape, &b.shape).is_some())?;
    let shape = broadcast(&a.shape, &b.shape)?;
    let op = d.choices.of_list(&["Add", "Mul", "Sub", "Max", "Min"]);
    let op = if a.is_float() || !op.starts_with('M') { op } else { "Mul" };
    let (a, b) = if d.choices.one_in(2) { (b, a) } else { (a, b) };
    d.one(op, &[&a.name, &b.name], &[], a.dtype, shape).map(drop)
}

/// Arithmetic with a constant: a scalar, a list of one, or one number per channel.
fn with_scalar(d: &mut Draft) -> Option<()> {
    let x = d.float()?;
    let number = d.choices.of_list(&[1.0, 0.0, -1.0, 2.0, 0.5, -0.0, 1e-6, 8.0]);
    let last = x.shape.last().and_then(fixed).filter(|size| *size > 0);
    let shape: Vec<usize> = match (d.choices.below(4), last) {
        (0, Some(last)) => vec![last],
        (1, _) if x.rank() > 0 => vec![1],
        (2, _) if x.rank() > 0 => vec![1; x.rank()],
        _ => Vec::new(),
    };
    let c = d.floats(x.dtype, &shape, &vec![number; shape.iter().product()]);
    let op = d.choices.of_list(&["Add", "Mul", "Sub", "Div", "Pow"]);
    let op = match op {
        "Div" if number.abs() < 0.1 => "Mul",
        "Pow" if number != 2.0 && number != 1.0 => "Add",
        op => op,
    };
    let operands =
        if d.choices.one_in(3) && !matches!(op, "Div" | "Pow") { [&c, &x.name] } else { [&x.name, &c] };
    d.one(op, &operands.map(String::as_str), &[], x.dtype, x.shape.clone()).map(drop)
}

/// The value under a shape given by axes of its own, joined or not: a constant where that is possible, else computed.
pub fn reshape_to(d: &mut Draft, x: &Value, groups: &[Vec<usize>], computed: bool) -> Option<Value> {
    let size = |group: &Vec<usize>| {
        group.iter().fold([1; RUNS], |n: Size, axis| std::array::from_fn(|run| n[run] * x.shape[*axis][run]))
    };
    let shape: Vec<Size> = groups.iter().map(size).collect();
    let zero = x.shape.iter().any(|size| size.contains(&0));
    let mut open = false;
    let mut list = Vec::new();
    for (at, size) in shape.iter().enumerate() {
        let same = x.shape.get(at) == Some(size);
        match fixed(size) {
            Some(0) => return None,
            Some(size) => list.push(size as i64),
            None if same => list.push(0),
            None if !open && !zero => {
                open = true;
                list.push(-1);
            }
            None => return reshape_by_list(d, x, groups, shape),
        }
    }
    if computed {
        return reshape_by_list(d, x, groups, shape);
    }
    if d.choices.one_in(4) && !open && !zero && !list.is_empty() {
        let at = d.choices.below(list.len());
        list[at] = -1;
    }
    let to = d.ints(&list);
    d.one("Reshape", &[&x.name, &to], &[], x.dtype, shape)
}

/// Shape, Gather, Mul, Unsqueeze, Concat, Reshape: what exporters make of a shape that depends on an input.
fn reshape_by_list(d: &mut Draft, x: &Value, groups: &[Vec<usize>], shape: Vec<Size>) -> Option<Value> {
    let mut parts = Vec::new();
    for group in groups {
        let mut size: Option<Value> = None;
        for axis in group {
            let dim = dim_of(d, x, *axis)?;
            size = match size {
                None => Some(dim),
                Some(size) => {
                    let ints = std::array::from_fn(|run| {
                        size.ints.as_ref().unwrap()[0][run] * dim.ints.as_ref().unwrap()[0][run]
                    });
                    Some(d.list("Mul", &[&size.name, &dim.name], &[], vec![ints], true)?)
                }
            };
        }
        parts.push(match size {
            Some(size) => as_list(d, &size)?,
            None => {
                let name = d.ints(&[1]);
                Value { name, dtype: DType::I64, shape: every(&[1]), ints: Some(vec![[1; RUNS]]) }
            }
        });
    }
    if parts.is_empty() {
        return None;
    }
    let names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
    let all = parts.iter().flat_map(|part| part.ints.clone().unwrap()).collect();
    let list = d.list("Concat", &names, &[("axis", int(0))], all, false)?;
    if x.shape.iter().any(|size| size.contains(&0)) {
        return None;
    }
    d.one("Reshape", &[&x.name, &list.name], &[], x.dtype, shape)
}

/// The size along an axis, read at run time, as a scalar.
pub fn dim_of(d: &mut Draft, x: &Value, axis: usize) -> Option<Value> {
    let all: Vec<[i64; RUNS]> = x.shape.iter().map(|size| size.map(|n| n as i64)).collect();
    let shape = d.list("Shape", &[&x.name], &[], all.clone(), false)?;
    let at = if d.choices.one_in(4) { axis as i64 - x.rank() as i64 } else { axis as i64 };
    let index = d.int(at);
    d.list("Gather", &[&shape.name, &index], &[("axis", int(0))], vec![all[axis]], true)
}

pub fn as_list(d: &mut Draft, scalar: &Value) -> Option<Value> {
    let ints = scalar.ints.clone()?;
    if d.opset < 13 {
        return d.list("Unsqueeze", &[&scalar.name], &[("axes", self::ints(&[0]))], ints, false);
    }
    let axes = d.ints(&[0]);
    d.list("Unsqueeze", &[&scalar.name, &axes], &[], ints, false)
}

fn reshape(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| v.rank() > 0 && v.dtype != DType::Bool)?;
    let last = x.rank() - 1;
    let computed = d.choices.one_in(2);
    match d.choices.below(4) {
        0 => {
            reshape_to(d, &x, &[(0..x.rank()).collect()], computed)?;
        }
        1 if last > 0 => {
            let at = d.choices.below(last);
            let mut groups: Vec<Vec<usize>> = (0..x.rank()).map(|axis| vec![axis]).collect();
            let joined = groups.remove(at + 1);
            groups[at].extend(joined);
            reshape_to(d, &x, &groups, computed)?;
        }
        2 => {
            let mut groups: Vec<Vec<usize>> = (0..x.rank()).map(|axis| vec![axis]).collect();
            groups.insert(d.choices.below(x.rank() + 1), Vec::new());
            reshape_to(d, &x, &groups, computed)?;
        }
        _ => {
            let factor = d.choices.of_list(&[2, 4]);
            split_last(d, &x, factor)?;
        }
    }
    Some(())
}

/// [.., N] -> [.., factor, N / factor]
pub fn split_last(d: &mut Draft, x: &Value, factor: usize) -> Option<Value> {
    let last = x.rank().checked_sub(1)?;
    let size = fixed(&x.shape[last]).filter(|size| *size > 0 && size % factor == 0)?;
    let mut shape = x.shape.clone();
    shape[last] = [factor; RUNS];
    shape.push([size / factor; RUNS]);
    let zero = x.shape.iter().any(|size| size.contains(&0));
    let mut list: Vec<i64> =
        x.shape[..last].iter().map(|size| fixed(size).map_or(0, |size| size as i64)).collect();
    list.push(factor as i64);
    list.push(if d.choices.one_in(2) && !zero { -1 } else { (size / factor) as i64 });
    let to = d.ints(&list);
    d.one("Reshape", &[&x.name, &to], &[], x.dtype, shape)
}

pub fn transpose_by(d: &mut Draft, x: &Value, perm: &[usize]) -> Option<Value> {
    let shape = perm.iter().map(|axis| x.shape[*axis]).collect();
    let perm: Vec<i64> = perm.iter().map(|axis| *axis as i64).collect();
    d.one("Transpose", &[&x.name], &[("perm", ints(&perm))], x.dtype, shape)
}

fn transpose(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| v.rank() > 1)?;
    let mut perm: Vec<usize> = (0..x.rank()).collect();
    for axis in 0..x.rank() {
        let other = d.choices.below(x.rank());
        perm.swap(axis, other);
    }
    transpose_by(d, &x, &perm).map(drop)
}

/// Squeeze and Unsqueeze, whose axes became an input with version 13.
fn by_axes(d: &mut Draft, op: &str, x: &Value, axes: &[i64], shape: Vec<Size>) -> Option<Value> {
    if d.opset < 13 {
        return d.one(op, &[&x.name], &[("axes", ints(axes))], x.dtype, shape);
    }
    let axes = d.ints(axes);
    d.one(op, &[&x.name, &axes], &[], x.dtype, shape)
}

fn squeeze(d: &mut Draft) -> Option<()> {
    let one = |v: &Value| v.shape.iter().position(|size| *size == [1; RUNS]);
    let x = d.pick(|v| one(v).is_some())?;
    let axis = one(&x)?;
    let mut shape = x.shape.clone();
    shape.remove(axis);
    let named = if d.choices.one_in(3) { axis as i64 - x.rank() as i64 } else { axis as i64 };
    by_axes(d, "Squeeze", &x, &[named], shape).map(drop)
}

pub fn unsqueeze_at(d: &mut Draft, x: &Value, axis: usize) -> Option<Value> {
    let mut shape = x.shape.clone();
    shape.insert(axis, [1; RUNS]);
    by_axes(d, "Unsqueeze", x, &[axis as i64], shape)
}

fn unsqueeze(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| v.rank() < 5)?;
    let axis = d.choices.below(x.rank() + 1);
    unsqueeze_at(d, &x, axis).map(drop)
}

/// `x[start..end:step]` along an axis, as Python counts.
pub fn slice_at(d: &mut Draft, x: &Value, axis: usize, start: i64, end: i64, step: i64) -> Option<Value> {
    let len = |size: usize| {
        let n = size as i64;
        let count =
            |at: i64, low: i64, high: i64| (if at < 0 { at.saturating_add(n) } else { at }).clamp(low, high);
        let (start, end) = if step > 0 {
            (count(start, 0, n), count(end, 0, n))
        } else {
            (count(start, 0, n - 1), count(end, -1, n - 1))
        };
        usize::try_from(((end - start) + step - step.signum()) / step).unwrap_or(0)
    };
    let mut shape = x.shape.clone();
    shape[axis] = x.shape[axis].map(len);
    let (starts, ends) = (d.ints(&[start]), d.ints(&[end]));
    let named = if d.choices.one_in(3) { axis as i64 - x.rank() as i64 } else { axis as i64 };
    let axes = d.ints(&[named]);
    let steps = if step == 1 { String::new() } else { d.ints(&[step]) };
    let inputs = [x.name.as_str(), &starts, &ends, &axes, &steps];
    let used = if step == 1 { &inputs[..4] } else { &inputs[..] };
    d.one("Slice", used, &[], x.dtype, shape)
}

fn slice(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| v.rank() > 0 && v.dtype != DType::Bool)?;
    let axis = d.choices.below(x.rank());
    let start = d.choices.of_list(&[0, 0, 1, -1, -2, 2]);
    let end = d.choices.of_list(&[i64::MAX, 1, 2, -1, i64::MAX, 1000]);
    let step = d.choices.of_list(&[1, 1, 1, 2]);
    if d.choices.one_in(6) && x.shape[axis].iter().all(|n| *n > 0) {
        return slice_at(d, &x, axis, -1, i64::MIN, -1).map(drop);
    }
    slice_at(d, &x, axis, start, end, step).map(drop)
}

pub fn concat_of(d: &mut Draft, parts: &[Value], axis: usize) -> Option<Value> {
    let first = parts.first()?;
    let mut shape = first.shape.clone();
    shape[axis] = std::array::from_fn(|run| parts.iter().map(|part| part.shape[axis][run]).sum());
    let names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
    let axis = if d.choices.one_in(2) { axis as i64 - first.rank() as i64 } else { axis as i64 };
    d.one("Concat", &names, &[("axis", int(axis))], first.dtype, shape)
}

fn concat_up_to(d: &mut Draft, most: usize) -> Option<()> {
    let x = d.pick(|v| v.rank() > 0)?;
    let axis = d.choices.below(x.rank());
    let fits = |v: &Value| {
        v.dtype == x.dtype
            && v.rank() == x.rank()
            && (0..x.rank()).all(|other| other == axis || v.shape[other] == x.shape[other])
    };
    let count = 1 + d.choices.below(most);
    let parts: Vec<Value> = (0..count).filter_map(|_| d.pick(fits)).collect();
    concat_of(d, &parts, axis).map(drop)
}

fn concat(d: &mut Draft) -> Option<()> {
    concat_up_to(d, 3)
}

fn concat_many(d: &mut Draft) -> Option<()> {
    concat_up_to(d, 20)
}

pub fn split_into(d: &mut Draft, x: &Value, axis: usize, parts: usize) -> Option<Vec<Value>> {
    let size = fixed(&x.shape[axis]).filter(|size| size % parts == 0)? / parts;
    let mut shape = x.shape.clone();
    shape[axis] = [size; RUNS];
    let outputs = vec![(x.dtype, shape); parts];
    let axis = ("axis", int(axis as i64));
    let sizes = vec![size as i64; parts];
    if d.opset < 13 {
        return d.node("Split", &[&x.name], &[axis, ("split", ints(&sizes))], &outputs);
    }
    if d.opset >= 18 && d.choices.one_in(2) {
        return d.node("Split", &[&x.name], &[axis, ("num_outputs", int(parts as i64))], &outputs);
    }
    let sizes = d.ints(&sizes);
    d.node("Split", &[&x.name, &sizes], &[axis], &outputs)
}

fn split(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| v.rank() > 0 && v.dtype != DType::Bool)?;
    let axis = d.choices.below(x.rank());
    let parts = d.choices.of_list(&[1, 2, 3, 4]);
    split_into(d, &x, axis, parts).map(drop)
}

fn split_many(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| v.is_float() && v.shape.iter().any(|size| fixed(size).is_some_and(|n| n >= 16)))?;
    let axis = x.shape.iter().position(|size| fixed(size).is_some_and(|n| n >= 16))?;
    let parts = fixed(&x.shape[axis])?;
    split_into(d, &x, axis, if parts % 16 == 0 { 16 } else { parts }).map(drop)
}

fn gather(d: &mut Draft) -> Option<()> {
    let least = |size: &Size| *size.iter().min().unwrap_or(&0) as i64;
    let x = d.pick(|v| v.shape.iter().any(|size| least(size) > 0))?;
    let axes: Vec<usize> = (0..x.rank()).filter(|axis| least(&x.shape[*axis]) > 0).collect();
    let axis = d.choices.of_list(&axes);
    let len = least(&x.shape[axis]);
    let index = |d: &mut Draft| {
        let at = d.choices.below(len as usize) as i64;
        if d.choices.one_in(3) { at - len } else { at }
    };
    let mut shape = x.shape.clone();
    let fits = fixed(&x.shape[axis]).is_some();
    let indices = if d.choices.one_in(2) {
        shape.remove(axis);
        let at = index(d);
        d.int(if fits { at } else { at.max(0) })
    } else {
        let count = 1 + d.choices.below(3);
        let list: Vec<i64> =
            (0..count).map(|_| index(d)).map(|at| if fits { at } else { at.max(0) }).collect();
        shape[axis] = [count; RUNS];
        d.ints(&list)
    };
    d.one("Gather", &[&x.name, &indices], &[("axis", int(axis as i64))], x.dtype, shape).map(drop)
}

fn expand(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| v.rank() < 5 && v.dtype != DType::Bool)?;
    if d.choices.one_in(2) {
        let lead = d.choices.of_list(&[1, 2, 3]);
        let to: Vec<i64> = [lead].into_iter().chain(vec![1; x.rank()]).collect();
        let to = d.ints(&to);
        let shape = [[lead as usize; RUNS]].into_iter().chain(x.shape.clone()).collect();
        return d.one("Expand", &[&x.name, &to], &[], x.dtype, shape).map(drop);
    }
    let like = d.pick(|v| v.ints.is_none() && broadcast(&x.shape, &v.shape).is_some_and(|s| s == v.shape))?;
    let all = like.shape.iter().map(|size| size.map(|n| n as i64)).collect();
    let to = d.list("Shape", &[&like.name], &[], all, false)?;
    d.one("Expand", &[&x.name, &to.name], &[], x.dtype, like.shape).map(drop)
}

fn matmul(d: &mut Draft) -> Option<()> {
    let x =
        d.pick(|v| v.is_float() && v.rank() > 1 && v.shape.last().and_then(fixed).is_some_and(|k| k > 0))?;
    let columns = d.choices.of_list(&[4, 8, 32, 1]);
    linear(d, &x, columns).map(drop)
}

/// x · W, W stored this way or that way round, with a bias or without.
pub fn linear(d: &mut Draft, x: &Value, columns: usize) -> Option<Value> {
    let last = x.rank().checked_sub(1)?;
    let k = fixed(&x.shape[last]).filter(|k| *k > 0)?;
    let w = if d.choices.one_in(3) {
        let w = d.weight(x.dtype, &[columns, k]);
        d.one("Transpose", &[&w], &[("perm", ints(&[1, 0]))], x.dtype, every(&[k, columns]))?.name
    } else {
        d.weight(x.dtype, &[k, columns])
    };
    let mut shape = x.shape.clone();
    shape[last] = [columns; RUNS];
    let y = d.one("MatMul", &[&x.name, &w], &[], x.dtype, shape.clone())?;
    if !d.choices.one_in(3) {
        return Some(y);
    }
    let bias = d.weight(x.dtype, &[columns]);
    let operands = if d.choices.one_in(2) { [&y.name, &bias] } else { [&bias, &y.name] };
    d.one("Add", &operands.map(String::as_str), &[], x.dtype, shape)
}

fn gemm(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| v.is_float() && v.rank() == 2 && fixed(&v.shape[1]).is_some_and(|k| k > 0))?;
    let (k, n) = (fixed(&x.shape[1])?, d.choices.of_list(&[4, 8, 32]));
    let turned = d.choices.one_in(2);
    let w = d.weight(x.dtype, &if turned { [n, k] } else { [k, n] });
    let shape: Vec<usize> = match d.choices.below(3) {
        0 => vec![n],
        1 => vec![1, n],
        _ => Vec::new(),
    };
    let bias = if d.choices.one_in(3) { String::new() } else { d.weight(x.dtype, &shape) };
    let inputs = [x.name.as_str(), &w, &bias];
    let mut attributes = vec![("transB", int(i64::from(turned)))];
    if d.choices.one_in(3) {
        attributes.push(("alpha", Attribute::Float(0.5)));
        attributes.push(("beta", Attribute::Float(2.0)));
    }
    let used = if bias.is_empty() { 2 } else { 3 };
    d.one("Gemm", &inputs[..used], &attributes, x.dtype, vec![x.shape[0], [n; RUNS]]).map(drop)
}

/// The product of two values that are no constants.
fn product(d: &mut Draft) -> Option<()> {
    let a = d.pick(|v| v.is_float() && v.rank() > 1)?;
    let inner = a.shape[a.rank() - 1];
    let fits = |b: &Value| {
        b.dtype == a.dtype
            && b.rank() == a.rank()
            && b.shape[b.rank() - 2] == inner
            && b.shape[..b.rank() - 2] == a.shape[..a.rank() - 2]
    };
    let b = d.pick(fits)?;
    let mut shape = a.shape.clone();
    shape[a.rank() - 1] = b.shape[b.rank() - 1];
    d.one("MatMul", &[&a.name, &b.name], &[], a.dtype, shape).map(drop)
}

pub fn reduce_over(d: &mut Draft, op: &str, x: &Value, axis: usize, keep: bool) -> Option<Value> {
    let mut shape = x.shape.clone();
    if keep {
        shape[axis] = [1; RUNS]
    } else {
        shape.remove(axis);
    }
    let named = if d.choices.one_in(2) { axis as i64 - x.rank() as i64 } else { axis as i64 };
    let keep = ("keepdims", int(i64::from(keep)));
    let since = if op == "ReduceSum" { 13 } else { 18 };
    if d.opset < since {
        return d.one(op, &[&x.name], &[("axes", ints(&[named])), keep], x.dtype, shape);
    }
    let axes = d.ints(&[named]);
    d.one(op, &[&x.name, &axes], &[keep], x.dtype, shape)
}

fn reduce(d: &mut Draft) -> Option<()> {
    let x =
        d.pick(|v| v.is_float() && v.rank() > 0 && v.shape.iter().all(|size| size.iter().all(|n| *n > 0)))?;
    let op = d.choices.of_list(&["ReduceMean", "ReduceSum", "ReduceMax"]);
    let axis = d.choices.below(x.rank());
    let keep = d.choices.one_in(2);
    reduce_over(d, op, &x, axis, keep).map(drop)
}

fn softmax(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| v.is_float() && v.rank() > 0)?;
    // Before version 13 all axes behind the given one were taken together.
    let axis = if d.opset < 13 || d.choices.one_in(2) { x.rank() - 1 } else { d.choices.below(x.rank()) };
    d.same("Softmax", &x, &[("axis", int(axis as i64))]).map(drop)
}

fn compare(d: &mut Draft) -> Option<()> {
    let a = d.float()?;
    let zero = d.floats(a.dtype, &[], &[0.0]);
    let op = d.choices.of_list(&["Greater", "Less"]);
    let holds = d.one(op, &[&a.name, &zero], &[], DType::Bool, a.shape.clone())?;
    let b = d.pick(|b| {
        b.dtype == a.dtype && broadcast(&a.shape, &b.shape).is_some_and(|shape| shape == a.shape)
    })?;
    let operands =
        if d.choices.one_in(2) { [&holds.name, &a.name, &b.name] } else { [&holds.name, &b.name, &a.name] };
    d.one("Where", &operands.map(String::as_str), &[], a.dtype, a.shape.clone()).map(drop)
}

/// The sizes of a value as a list, or one of them.
fn shape_list(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| v.rank() > 0 && v.ints.is_none())?;
    if d.opset >= 15 && d.choices.one_in(4) {
        let start = d.choices.below(x.rank());
        let all = x.shape[start..].iter().map(|size| size.map(|n| n as i64)).collect();
        return d.list("Shape", &[&x.name], &[("start", int(start as i64))], all, false).map(drop);
    }
    let axis = d.choices.below(x.rank());
    let dim = dim_of(d, &x, axis)?;
    if d.choices.one_in(2) {
        as_list(d, &dim)?;
    }
    Some(())
}

fn list_arithmetic(d: &mut Draft) -> Option<()> {
    let small =
        |v: &Value| v.ints.as_ref().is_some_and(|ints| ints.iter().flatten().all(|n| n.abs() < 1 << 20));
    let a = d.pick(small)?;
    let own = a.ints.clone()?;
    if d.choices.one_in(3) && a.rank() == 1 {
        let b = d.pick(|v| small(v) && v.rank() == 1)?;
        let all = own.into_iter().chain(b.ints.clone()?).collect();
        return d.list("Concat", &[&a.name, &b.name], &[("axis", int(0))], all, false).map(drop);
    }
    let number = d.choices.of_list(&[1, 2, 0, 3, 16, -1]);
    let op = d.choices.of_list(&["Add", "Mul", "Div", "Sub"]);
    if op == "Div" && number <= 0 {
        return None;
    }
    let compute = |n: i64| match op {
        "Add" => n + number,
        "Mul" => n * number,
        "Div" => n / number,
        _ => n - number,
    };
    let ints = own.iter().map(|ints| ints.map(compute)).collect();
    let c = d.int(number);
    d.list(op, &[&a.name, &c], &[], ints, a.rank() == 0).map(drop)
}

/// A list that can be a shape.
fn shape_of(value: &Value) -> Option<Vec<Size>> {
    let ints = value.ints.as_ref().filter(|ints| value.rank() == 1 && ints.len() <= 4)?;
    let sizes = |n: &[i64; RUNS]| n.iter().all(|n| (0..64).contains(n)).then(|| n.map(|n| n as usize));
    ints.iter().map(sizes).collect()
}

fn filled(d: &mut Draft) -> Option<()> {
    let list = d.pick(|v| shape_of(v).is_some())?;
    let value = Tensor::from_f32(&[1], &[d.choices.of_list(&[0.0, 1.0, 0.5])]);
    d.one(
        "ConstantOfShape",
        &[&list.name],
        &[("value", Attribute::Tensor(value))],
        DType::F32,
        shape_of(&list)?,
    )
    .map(drop)
}

fn range(d: &mut Draft) -> Option<()> {
    let end = d.pick(|v| {
        v.rank() == 0 && v.ints.as_ref().is_some_and(|n| n[0].iter().all(|n| (0..64).contains(n)))
    })?;
    let (zero, one) = (d.int(0), d.int(1));
    let len = end.ints.as_ref()?[0].map(|n| n as usize);
    d.one("Range", &[&zero, &end.name, &one], &[], DType::I64, vec![len]).map(drop)
}

/// A node once more.
fn twin(d: &mut Draft) -> Option<()> {
    let nodes: Vec<Node> = d.graph.nodes().map(|(_, node)| node.clone()).collect();
    let at = d.choices.below(nodes.len());
    let mut node = nodes.get(at)?.clone();
    if node.op_type == "Constant" || node.op_type == "Dropout" {
        return None;
    }
    for output in &mut node.outputs {
        let Some(id) = output else { continue };
        let value = d.values.iter().find(|value| value.name == d.graph[*id].name)?.clone();
        let name = d.name("v");
        *output = Some(d.graph.value(&name));
        d.values.push(Value { name, ..value });
    }
    node.name = d.name("n");
    d.graph.add_node(node);
    Some(())
}

/// An If both of whose branches use a value from outside.
fn branch(d: &mut Draft) -> Option<()> {
    let x = d.float()?;
    // Constant conditions are not for ONNX Runtime: it loses the values that the bodies use.
    let open =
        |v: &Value| v.rank() == 0 && v.ints.as_ref().is_some_and(|n| n[0].iter().any(|i| *i != n[0][0]));
    let size = d.pick(open)?;
    let two = d.int(2);
    let holds = d.one("Equal", &[&size.name, &two], &[], DType::Bool, Vec::new())?.name;
    let weight = d.weight(x.dtype, &[]);
    let ops = ["Relu", "Neg"];
    let bodies: Vec<Attribute> =
        ops.iter().map(|op| Attribute::Graph(Box::new(body(d, op, &x, &weight)))).collect();
    let attributes = [("then_branch", bodies[0].clone()), ("else_branch", bodies[1].clone())];
    d.one("If", &[&holds], &attributes, x.dtype, x.shape.clone()).map(drop)
}

fn body(d: &mut Draft, op: &str, x: &Value, weight: &str) -> Graph {
    let mut graph = Graph::new(op);
    let (middle, out) = (d.name("b"), d.name("b"));
    let ids = [x.name.as_str(), weight, &middle, &out].map(|name| graph.value(name));
    graph.add_node(Node {
        op_type: op.to_owned(),
        inputs: vec![Some(ids[0])],
        outputs: vec![Some(ids[2])],
        ..Node::default()
    });
    graph.add_node(Node {
        op_type: "Mul".to_owned(),
        inputs: vec![Some(ids[2]), Some(ids[1])],
        outputs: vec![Some(ids[3])],
        ..Node::default()
    });
    graph[ids[3]].ty = Some(ValueType::Tensor { dtype: x.dtype, shape: None });
    graph.outputs.push(ids[3]);
    graph
}

fn tile(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| v.is_float() && v.rank() > 0)?;
    let repeats: Vec<usize> = (0..x.rank()).map(|_| d.choices.of_list(&[1, 1, 2])).collect();
    let shape = x.shape.iter().zip(&repeats).map(|(size, by)| size.map(|n| n * by)).collect();
    let list = d.ints(&repeats.iter().map(|n| *n as i64).collect::<Vec<_>>());
    d.one("Tile", &[&x.name, &list], &[], x.dtype, shape).map(drop)
}

fn clip(d: &mut Draft) -> Option<()> {
    let x = d.float()?;
    let (low, high) = (d.floats(x.dtype, &[], &[-0.5]), d.floats(x.dtype, &[], &[0.5]));
    let inputs = [x.name.as_str(), if d.choices.one_in(3) { "" } else { &low }, &high];
    let used = if d.choices.one_in(3) { 1 } else { 3 };
    d.one("Clip", &inputs[..used], &[], x.dtype, x.shape.clone()).map(drop)
}

fn conv(d: &mut Draft) -> Option<()> {
    let full = |size: &Size| size.iter().all(|n| *n > 2);
    let x = d.pick(|v| {
        v.dtype == DType::F32
            && v.rank() == 4
            && fixed(&v.shape[1]).is_some_and(|c| c > 0)
            && full(&v.shape[2])
            && full(&v.shape[3])
    })?;
    let (c, o) = (fixed(&x.shape[1])?, 4);
    let w = d.weight(x.dtype, &[o, c, 3, 3]);
    let bias = d.weight(x.dtype, &[o]);
    let shape = vec![x.shape[0], [o; RUNS], x.shape[2], x.shape[3]];
    d.one("Conv", &[&x.name, &w, &bias], &[("pads", ints(&[1, 1, 1, 1]))], x.dtype, shape).map(drop)
}

/// A causal convolution over the one frame that there is.
fn conv3d(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| {
        v.dtype == DType::F32
            && v.rank() == 4
            && fixed(&v.shape[1]).is_some_and(|c| c > 0)
            && v.shape.iter().all(|s| s.iter().all(|n| *n > 0))
    })?;
    let c = fixed(&x.shape[1])?;
    let x = unsqueeze_at(d, &x, 2)?;
    let w = d.weight(x.dtype, &[4, c, 3, 3, 3]);
    let frames = d.choices.of_list(&[[2, 0], [1, 1], [0, 2], [2, 2]]);
    let mut shape =
        vec![x.shape[0], [4; RUNS], [(frames[0] + frames[1] - 1) as usize; RUNS], x.shape[3], x.shape[4]];
    if d.choices.one_in(2) {
        let pads = d.ints(&[0, 0, frames[0], 1, 1, 0, 0, frames[1], 1, 1]);
        let mut padded = x.shape.clone();
        padded[2] = [(1 + frames[0] + frames[1]) as usize; RUNS];
        for size in &mut padded[3..] {
            *size = size.map(|n| n + 2);
        }
        let x = d.one("Pad", &[&x.name, &pads], &[], x.dtype, padded)?;
        return d.one("Conv", &[&x.name, &w], &[], x.dtype, shape).map(drop);
    }
    let pads = ints(&[frames[0], 1, 1, frames[1], 1, 1]);
    let mut attributes = vec![("pads", pads)];
    if d.choices.one_in(4) {
        attributes.push(("strides", ints(&[2, 1, 1])));
        shape[2] = shape[2].map(|n| n.div_ceil(2));
    }
    d.one("Conv", &[&x.name, &w], &attributes, x.dtype, shape).map(drop)
}

fn resize(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| {
        v.dtype == DType::F32 && v.rank() == 4 && v.shape.iter().all(|s| s.iter().all(|n| *n > 0))
    })?;
    let scales = d.constant(Tensor::from_f32(&[4], &[1.0, 1.0, 2.0, 2.0]));
    let text = |text: &str| Attribute::String(text.as_bytes().to_vec());
    let attributes = [
        ("mode", text("nearest")),
        ("coordinate_transformation_mode", text("asymmetric")),
        ("nearest_mode", text("floor")),
    ];
    let double = |size: Size| size.map(|n| 2 * n);
    let shape = vec![x.shape[0], x.shape[1], double(x.shape[2]), double(x.shape[3])];
    // Before version 13 the region may not be left out.
    let region = if d.opset < 13 { d.constant(Tensor::from_f32(&[0], &[])) } else { String::new() };
    d.one("Resize", &[&x.name, &region, &scales], &attributes, x.dtype, shape).map(drop)
}

fn pad(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| {
        v.dtype == DType::F32 && v.rank() > 0 && v.shape.iter().all(|s| s.iter().all(|n| *n > 0))
    })?;
    let amount = d.choices.of_list(&[0, 1]);
    let mut pads = vec![0; 2 * x.rank()];
    pads[2 * x.rank() - 1] = amount;
    let mut shape = x.shape.clone();
    let last = x.rank() - 1;
    shape[last] = shape[last].map(|n| n + amount as usize);
    let pads = d.ints(&pads);
    d.one("Pad", &[&x.name, &pads], &[], x.dtype, shape).map(drop)
}

fn cumulate(d: &mut Draft) -> Option<()> {
    let x = d.pick(|v| v.dtype == DType::F32 && v.rank() > 0)?;
    let axis = d.choices.below(x.rank()) as i64;
    let axis = d.int(axis);
    d.one("CumSum", &[&x.name, &axis], &[], x.dtype, x.shape.clone()).map(drop)
}

/// Something computed of constants alone.
fn folded(d: &mut Draft) -> Option<()> {
    let dtype = d.choices.of_list(&[DType::F32, DType::F32, DType::F16]);
    let (a, b) = (d.weight(dtype, &[4, 8]), d.weight(dtype, &[8]));
    let op = d.choices.of_list(&["Add", "Mul", "Div", "Sub"]);
    let x = d.one(op, &[&a, &b], &[], dtype, every(&[4, 8]))?;
    let x = match d.choices.below(6) {
        0 => transpose_by(d, &x, &[1, 0])?,
        1 => slice_at(d, &x, 1, 1, -1, 2)?,
        2 => concat_of(d, &[x.clone(), x.clone()], 0)?,
        3 => split_last(d, &x, 2)?,
        4 => cast_to(d, &x, if dtype == DType::F32 { DType::F16 } else { DType::F32 })?,
        _ => d.same("Neg", &x, &[])?,
    };
    if d.choices.one_in(2) {
        let index = d.ints(&[1, 0, -1]);
        let mut shape = x.shape.clone();
        shape[0] = [3; RUNS];
        d.one("Gather", &[&x.name, &index], &[], x.dtype, shape)?;
    }
    Some(())
}
