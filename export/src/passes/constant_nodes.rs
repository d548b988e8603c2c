//! Nodes that compute something of constants alone.

use std::collections::{HashMap, HashSet};

use super::{
    View,
    expression::{Action, Expression, Operand, Operation, row_major, stretch},
};
use crate::{
    onnx::{Bytes, ComputeError, DType, Node, NodeId, Tensor, ValueId},
    quant,
};

/// Bytes that a node may leave behind although no constant of that size goes. Expressions of so many bytes are
/// computed at once.
const SMALL: usize = 8 << 10;

/// The nodes of a graph that an [`Expression`] can stand for.
pub struct ConstantNodes<'a> {
    view: &'a View<'a>,
    steps: HashMap<NodeId, Step>,
    /// Constants made so far.
    made: HashMap<ValueId, Tensor>,
}

/// An operation with the values that it takes.
struct Step {
    action: Action,
    operands: Vec<ValueId>,
    dtype: DType,
    shape: Vec<usize>,
}

/// Type and shape of what is constant.
type Known = HashMap<ValueId, (DType, Vec<usize>)>;

impl<'a> ConstantNodes<'a> {
    pub fn of(view: &'a View<'a>) -> ConstantNodes<'a> {
        let constants = view.graph.values().filter_map(|(id, _)| Some((id, view.constant(id)?)));
        let mut known: Known =
            constants.map(|(id, tensor)| (id, (tensor.dtype, tensor.shape.clone()))).collect();
        let mut steps = HashMap::new();
        for (id, node) in view.graph.nodes() {
            let [Some(output)] = node.outputs[..] else { continue };
            let Some(step) = step(view, node, &known) else { continue };
            known.insert(output, (step.dtype, step.shape.clone()));
            steps.insert(id, step);
        }
        ConstantNodes { view, steps, made: HashMap::new() }
    }

    pub fn has(&self, node: NodeId) -> bool {
        self.steps.contains_key(&node)
    }

    /// Whether the value is only an operand of another of these nodes, once.
    pub fn is_operand(&self, value: ValueId) -> bool {
        let user = self.view.sole_use(value).and_then(|(id, _)| self.steps.get(&id));
        user.is_some_and(|step| step.operands.iter().filter(|operand| **operand == value).count() == 1)
    }

    /// The node's result; `None` if it is larger than the constants that go with it, or depends on such a one.
    pub fn tensor(&mut self, root: NodeId) -> Option<Result<Tensor, ComputeError>> {
        let nodes = self.nodes_of(root);
        let mut leaves: Vec<(ValueId, Tensor)> = Vec::new();
        let mut operations = Vec::new();
        let mut results: HashMap<ValueId, usize> = HashMap::new();
        for id in nodes.iter().rev() {
            let step = self.steps.get(id)?;
            let mut operands = Vec::new();
            for value in &step.operands {
                operands.push(match results.get(value) {
                    Some(result) => Operand::Result(*result),
                    None => Operand::Leaf(self.leaf(&mut leaves, *value)?),
                });
            }
            results.insert(self.view.graph[*id].output(0)?, operations.len());
            let (action, dtype, shape) = (step.action.clone(), step.dtype, step.shape.clone());
            operations.push(Operation { action, operands, dtype, shape });
        }
        self.worth_it(&nodes, &leaves, &operations)?;
        let tensor =
            stored(Expression { leaves: leaves.into_iter().map(|leaf| leaf.1).collect(), operations })?;
        if let Ok(tensor) = &tensor {
            self.made.insert(self.view.graph[root].output(0)?, tensor.clone());
        }
        Some(tensor)
    }

    /// The node and those that make its operands, users before makers. They form a tree: others' operands are its leaves.
    fn nodes_of(&self, root: NodeId) -> Vec<NodeId> {
        let mut nodes = vec![root];
        let mut next = 0;
        while let Some(step) = nodes.get(next).and_then(|id| self.steps.get(id)) {
            let inner = step.operands.iter().filter(|operand| self.is_operand(**operand));
            nodes.extend(inner.filter_map(|operand| Some(self.view.producer(*operand)?.0)));
            next += 1;
        }
        nodes
    }

    fn leaf(&self, leaves: &mut Vec<(ValueId, Tensor)>, value: ValueId) -> Option<usize> {
        if let Some(at) = leaves.iter().position(|leaf| leaf.0 == value) {
            return Some(at);
        }
        let tensor = self.view.constant(value).or_else(|| self.made.get(&value))?;
        leaves.push((value, tensor.clone()));
        Some(leaves.len() - 1)
    }

    /// Nothing if the file would grow, if steps in between are much larger than what they are made of, or if a constant
    /// that stays would be computed twice.
    fn worth_it(
        &self,
        nodes: &[NodeId],
        leaves: &[(ValueId, Tensor)],
        operations: &[Operation],
    ) -> Option<()> {
        let nodes: HashSet<NodeId> = nodes.iter().copied().collect();
        let goes = |value: ValueId| {
            self.view.constant(value).is_some()
                && !self.view.graph.outputs.contains(&value)
                && self.view.uses(value).iter().all(|user| nodes.contains(user))
        };
        let (mut all, mut gone) = (0usize, 0usize);
        for (value, tensor) in leaves {
            all = all.checked_add(tensor.bytes.len())?;
            if goes(*value) {
                gone += tensor.bytes.len();
            } else if matches!(tensor.bytes, Bytes::Computed { .. }) {
                return None;
            }
        }
        let sizes: Option<Vec<usize>> =
            operations.iter().map(|operation| operation.dtype.byte_len(&operation.shape)).collect();
        let sizes = sizes?;
        let fits = sizes.iter().all(|size| *size <= all.saturating_add(SMALL));
        (fits && *sizes.last()? <= gone.max(SMALL)).then_some(())
    }
}

/// The expression's tensor in its cheapest form.
fn stored(expression: Expression) -> Option<Result<Tensor, ComputeError>> {
    let last = expression.operations.last()?;
    if let (true, [leaf]) = (expression.relabels(), &expression.leaves[..]) {
        return Some(Ok(Tensor { shape: last.shape.clone(), ..leaf.clone() }));
    }
    let in_memory = |leaf: &Tensor| matches!(leaf.bytes, Bytes::Inline(_) | Bytes::Mapped { .. });
    let small = expression.bytes() <= SMALL && expression.leaves.iter().all(in_memory);
    if let ([leaf], [operation]) = (&expression.leaves[..], &expression.operations[..])
        && !small
        && leaf.shape.len() == 2
        && matches!(&operation.action, Action::Rearrange { strides, .. } if strides[..] == [1, leaf.shape[1] as isize])
        && operation.shape[..] == [leaf.shape[1], leaf.shape[0]]
        && let Ok(tensor) = quant::transpose(leaf.clone())
    {
        return Some(Ok(tensor));
    }
    let (dtype, shape) = (last.dtype, last.shape.clone());
    let tensor = expression.tensor()?;
    if !small {
        return Some(Ok(tensor));
    }
    Some(tensor.bytes.read().map(|bytes| Tensor::inline(dtype, &shape, bytes.into_owned())))
}

/// The operation that a node is, if its data are constants.
fn step(view: &View<'_>, node: &Node, known: &Known) -> Option<Step> {
    if !matches!(node.domain.as_str(), "" | "ai.onnx") || view.opset() < 7 {
        return None;
    }
    let data = node.input(0)?;
    let (dtype, shape) = known.get(&data)?;
    let one =
        |action, dtype: DType, shape: Vec<usize>| Some(Step { action, operands: vec![data], dtype, shape });
    match node.op_type.as_str() {
        "Reshape" | "Squeeze" | "Unsqueeze" | "Flatten" => {
            let to = view.facts().fixed_shape(node.output(0)?)?;
            let same = dtype.byte_len(shape)? == dtype.byte_len(&to)?;
            same.then_some(()).and_then(|()| one(Action::Relabel, *dtype, to))
        }
        "Transpose" => {
            let (strides, to) = transposed(shape, node.ints("perm"))?;
            one(Action::Rearrange { offset: 0, strides }, whole_bytes(*dtype)?, to)
        }
        "Expand" => {
            let to = view.facts().fixed_shape(node.output(0)?)?;
            one(Action::Rearrange { offset: 0, strides: stretch(shape, &to)? }, whole_bytes(*dtype)?, to)
        }
        "Slice" => {
            let (offset, strides) = sliced(view, node, shape)?;
            let to = view.facts().fixed_shape(node.output(0)?)?;
            one(Action::Rearrange { offset, strides }, whole_bytes(*dtype)?, to)
        }
        "Gather" => gathered(view, node, known),
        "Concat" => joined(node, known),
        "Cast" => {
            let to = DType::from_onnx(i32::try_from(node.int("to")?).ok()?);
            let exact = matches!(
                (dtype, to),
                (DType::F32 | DType::BF16, DType::F16) | (DType::F16 | DType::BF16, DType::F32)
            );
            exact.then_some(()).and_then(|()| one(Action::Cast, to, shape.clone()))
        }
        "Neg" => one(Action::Map(|a| -a), computed(*dtype)?, shape.clone()),
        "Sqrt" => one(Action::Map(f32::sqrt), computed(*dtype)?, shape.clone()),
        "Reciprocal" => one(Action::Map(f32::recip), computed(*dtype)?, shape.clone()),
        "Add" => combined(node, known, |a, b| a + b),
        "Sub" => combined(node, known, |a, b| a - b),
        "Mul" => combined(node, known, |a, b| a * b),
        "Div" => combined(node, known, |a, b| a / b),
        _ => None,
    }
}

fn whole_bytes(dtype: DType) -> Option<DType> {
    dtype.size().map(|_| dtype)
}

fn computed(dtype: DType) -> Option<DType> {
    matches!(dtype, DType::F32 | DType::F16).then_some(dtype)
}

fn transposed(shape: &[usize], perm: Option<&[i64]>) -> Option<(Vec<isize>, Vec<usize>)> {
    let rank = shape.len();
    let perm: Vec<usize> = match perm {
        Some(perm) => perm.iter().map(|axis| axis_of(*axis, rank)).collect::<Option<_>>()?,
        None => (0..rank).rev().collect(),
    };
    let mut sorted = perm.clone();
    sorted.sort_unstable();
    if sorted.into_iter().ne(0..rank) {
        return None;
    }
    let own = row_major(shape)?;
    Some(perm.iter().map(|axis| (own[*axis], shape[*axis])).unzip())
}

/// Offset and strides; the operands are inputs, as in all versions since 10.
fn sliced(view: &View<'_>, node: &Node, shape: &[usize]) -> Option<(usize, Vec<isize>)> {
    let list = |index: usize| node.input(index).map(|value| view.facts().ints(value));
    let starts = list(1)??;
    let axes = match list(3) {
        Some(axes) => axes?.iter().map(|axis| axis_of(*axis, shape.len())).collect::<Option<Vec<_>>>()?,
        None => (0..starts.len()).collect(),
    };
    let steps = list(4).unwrap_or_else(|| Some(vec![1; starts.len()]))?;
    let mut strides = row_major(shape)?;
    let mut offset = 0usize;
    for ((start, axis), step) in starts.iter().zip(&axes).zip(&steps) {
        let size = i64::try_from(*shape.get(*axis)?).ok()?;
        let counted = if *start < 0 { start.checked_add(size)? } else { *start };
        let first = counted.clamp(0, if *step > 0 { size } else { (size - 1).max(0) });
        let stride = strides[*axis];
        offset =
            offset.checked_add(usize::try_from(first.checked_mul(i64::try_from(stride).ok()?)?).ok()?)?;
        strides[*axis] = stride.checked_mul(isize::try_from(*step).ok()?)?;
    }
    (starts.len() == axes.len() && axes.len() == steps.len()).then_some((offset, strides))
}

fn gathered(view: &View<'_>, node: &Node, known: &Known) -> Option<Step> {
    let (data, indices) = (node.input(0)?, node.input(1)?);
    let (dtype, shape) = known.get(&data)?;
    let at = axis_of(node.int("axis").unwrap_or(0), shape.len())?;
    let len = shape[at];
    let place = |index: &i64| axis_of(*index, len);
    let places: Vec<usize> = view.facts().ints(indices)?.iter().map(place).collect::<Option<_>>()?;
    let taken = view.facts().fixed_shape(indices)?;
    let (before, after) = (&shape[..at], &shape[at + 1..]);
    let to = [before, &taken, after].concat();
    let action = Action::Gather { rows: count(before)?, len, run: count(after)?, places };
    Some(Step { action, operands: vec![data], dtype: whole_bytes(*dtype)?, shape: to })
}

fn joined(node: &Node, known: &Known) -> Option<Step> {
    let operands: Vec<ValueId> = node.inputs.iter().copied().collect::<Option<_>>()?;
    let parts: Vec<&(DType, Vec<usize>)> =
        operands.iter().map(|value| known.get(value)).collect::<Option<_>>()?;
    let (dtype, first) = parts.first()?;
    let at = axis_of(node.int("axis")?, first.len())?;
    let mut to = first.clone();
    to[at] = 0;
    let mut runs = Vec::new();
    for (other, shape) in &parts {
        let alike = shape.len() == first.len()
            && (0..first.len()).all(|axis| axis == at || shape[axis] == first[axis]);
        if !alike || other != dtype {
            return None;
        }
        to[at] = to[at].checked_add(shape[at])?;
        runs.push(count(&shape[at..])?);
    }
    let action = Action::Concat { rows: count(&first[..at])?, runs };
    Some(Step { action, operands, dtype: whole_bytes(*dtype)?, shape: to })
}

fn combined(node: &Node, known: &Known, zip: fn(f32, f32) -> f32) -> Option<Step> {
    let operands = vec![node.input(0)?, node.input(1)?];
    let ((dtype, a), (other, b)) = (known.get(&operands[0])?, known.get(&operands[1])?);
    let rank = a.len().max(b.len());
    let size = |shape: &[usize], axis: usize| match (axis + shape.len()).checked_sub(rank) {
        Some(axis) => shape[axis],
        None => 1,
    };
    let along = |axis| match (size(a, axis), size(b, axis)) {
        (1, size) | (size, 1) => Some(size),
        (a, b) => (a == b).then_some(a),
    };
    let shape = (0..rank).map(along).collect::<Option<_>>()?;
    (dtype == other).then_some(())?;
    Some(Step { action: Action::Zip(zip), operands, dtype: computed(*dtype)?, shape })
}

fn axis_of(axis: i64, rank: usize) -> Option<usize> {
    let counted = if axis < 0 { axis.checked_add(i64::try_from(rank).ok()?)? } else { axis };
    usize::try_from(counted).ok().filter(|axis| *axis < rank)
}

fn count(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |count, size| count.checked_mul(*size))
}
