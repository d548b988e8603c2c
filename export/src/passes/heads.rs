//! The layouts of queries, keys and values around a written attention, and how they become [1, rows, heads * width].

use super::{Replacement, View, attention::scaled};
use crate::onnx::{Attribute, DType, Dim, Node, NodeId, ValueId};

/// Nodes that are followed from or to an attention; exporters write four.
const MAX_STEPS: usize = 16;

const SHAPE: &str = "the shape of q, k or v does not follow from the graph; sizes may have to be bound";
const HEADS: &str = "the number of heads or their width is not known";
const TYPE: &str = "q, k or v is of another type than f32 and f16";
const BATCH: &str = "the batch is not known to be one";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    /// Of size one: the batch, and what exporters add.
    Unit,
    Heads,
    Rows,
    Width,
}

/// A tensor of heads, and which axis is which. Without an axis of heads there is one head.
#[derive(Clone, Debug)]
pub(super) struct Heads {
    pub value: ValueId,
    axes: Vec<Axis>,
    /// Whether it is [1, rows, heads * width], with `axes` of its own no more.
    joined: bool,
    pub heads: usize,
    pub width: usize,
    /// Rows in every sample of the facts.
    pub rows: Vec<usize>,
    pub dim: Dim,
    pub dtype: DType,
    /// What it is to be multiplied by.
    pub scale: f64,
}

impl Heads {
    /// The operand of a MatMul whose last two axes are given.
    pub fn of(view: &View<'_>, value: ValueId, last: [Axis; 2]) -> Result<Heads, &'static str> {
        let facts = view.facts();
        let rank = facts.rank(value).filter(|rank| *rank >= 2).ok_or(SHAPE)?;
        let mut axes = vec![Axis::Unit; rank - 2];
        axes.extend(last);
        let mut heads = 1;
        for (axis, role) in axes.iter_mut().enumerate().take(rank - 2) {
            let size = facts.fixed_dim(value, axis as i64);
            if size == Some(1) {
                continue;
            }
            if axis + 3 != rank {
                return Err(BATCH);
            }
            heads = size.filter(|size| *size > 0).ok_or(HEADS)?;
            *role = Axis::Heads;
        }
        let at = |wanted| axes.iter().position(|axis| *axis == wanted).ok_or(SHAPE);
        let (row, column) = (at(Axis::Rows)?, at(Axis::Width)?);
        let width = facts.fixed_dim(value, column as i64).filter(|width| *width > 0).ok_or(HEADS)?;
        i64::try_from(heads.checked_mul(width).ok_or(SHAPE)?).map_err(|_| SHAPE)?;
        Ok(Heads {
            value,
            joined: false,
            heads,
            width,
            rows: facts.sizes(value, row as i64).ok_or(SHAPE)?,
            dim: facts.dim(value, row),
            dtype: facts.dtype(value).filter(|t| matches!(t, DType::F32 | DType::F16)).ok_or(TYPE)?,
            scale: 1.0,
            axes,
        })
    }

    /// Follows the tensor back through what only changes its layout, widens it or, if that is wanted, scales it.
    pub fn traced(mut self, view: &View<'_>, through_scales: bool) -> Heads {
        for _ in 0..MAX_STEPS {
            if self.joined || !self.step(view, through_scales) {
                break;
            }
        }
        self
    }

    fn step(&mut self, view: &View<'_>, through_scales: bool) -> bool {
        let Some((_, node)) = view.producer(self.value) else { return false };
        let Some(input) = node.input(0) else { return false };
        let facts = view.facts();
        if node.is("Cast") && self.dtype == DType::F32 && facts.dtype(input) == Some(DType::F16) {
            (self.value, self.dtype) = (input, DType::F16);
        } else if let Some((inner, scale)) = scaled(view, node).filter(|_| through_scales) {
            (self.value, self.scale) = (inner, self.scale * scale);
        } else if node.is("Transpose") {
            let Some(perm) = permutation(node, self.axes.len()) else { return false };
            let mut axes = self.axes.clone();
            for (axis, from) in self.axes.iter().zip(perm) {
                axes[from] = *axis;
            }
            (self.value, self.axes) = (input, axes);
        } else if is_reshape(node) {
            if let Some(axes) = reshaped(view, self.value, &self.axes, input) {
                (self.value, self.axes) = (input, axes);
            } else if self.rows_first() && self.is_joined(view, input) {
                (self.value, self.joined) = (input, true);
            } else {
                return false;
            }
        } else {
            return false;
        }
        true
    }

    fn rows_first(&self) -> bool {
        let order: Vec<Axis> = self.axes.iter().copied().filter(|axis| *axis != Axis::Unit).collect();
        matches!(order[..], [Axis::Rows, Axis::Width] | [Axis::Rows, Axis::Heads, Axis::Width])
    }

    /// Whether a value of the same elements in the same order is [1, rows, heads * width].
    fn is_joined(&self, view: &View<'_>, value: ValueId) -> bool {
        let facts = view.facts();
        facts.rank(value) == Some(3)
            && facts.fixed_dim(value, 0) == Some(1)
            && facts.sizes(value, 1).as_ref() == Some(&self.rows)
            && facts.fixed_dim(value, 2) == Some(self.heads * self.width)
    }

    /// The recorded shape of what [`Heads::join`] gives.
    pub fn shape(&self) -> Vec<Dim> {
        vec![Dim::Fixed(1), self.dim.clone(), Dim::Fixed(self.heads * self.width)]
    }

    /// Makes it [1, rows, heads * width] of the given type.
    pub fn join(&self, r: &mut Replacement<'_>, dtype: DType) -> ValueId {
        let mut value = self.value;
        if !self.joined && self.axes[..] != [Axis::Unit, Axis::Rows, Axis::Width] {
            value = transpose(r, value, &self.axes, &self.base());
            let shape = r.ints(&[1, -1, (self.heads * self.width) as i64]);
            value = r.op("Reshape", &[value, shape], &[]);
        }
        if self.dtype != dtype {
            value = r.cast(value, dtype);
        }
        value
    }

    /// The same axes with the rows before the heads.
    fn base(&self) -> Vec<Axis> {
        let of = |wanted: Axis| self.axes.iter().copied().filter(move |axis| *axis == wanted);
        [Axis::Unit, Axis::Rows, Axis::Heads, Axis::Width].into_iter().flat_map(of).collect()
    }
}

/// What an attention gives, as far as only its layout changes.
#[derive(Clone, Debug)]
pub(super) struct Output {
    /// The node to replace, and what it defines.
    pub root: NodeId,
    pub value: ValueId,
    /// Whether the value is [1, rows, heads * width].
    pub joined: bool,
    heads: Heads,
}

impl Output {
    /// The output of the product with the values; followed to where its heads are joined, if they are.
    pub fn of(view: &View<'_>, apply: NodeId) -> Result<Output, &'static str> {
        let y = view.graph[apply].output(0).ok_or(SHAPE)?;
        let heads = Heads::of(view, y, [Axis::Rows, Axis::Width])?;
        let mut ahead = heads.clone();
        let mut root = apply;
        for _ in 0..MAX_STEPS {
            if ahead.rows_first() && ahead.is_joined(view, ahead.value) {
                return Ok(Output { root, value: ahead.value, joined: true, heads });
            }
            let Some((id, node)) = view.sole_use(ahead.value) else { break };
            let Some(next) = node.output(0).filter(|_| node.input(0) == Some(ahead.value)) else { break };
            root = id;
            if node.is("Transpose") {
                let Some(perm) = permutation(node, ahead.axes.len()) else { break };
                ahead.axes = perm.iter().map(|from| ahead.axes[*from]).collect();
            } else if !is_reshape(node) {
                break;
            } else if let Some(axes) = reshaped(view, ahead.value, &ahead.axes, next) {
                ahead.axes = axes;
            } else if !(ahead.rows_first() && ahead.is_joined(view, next)) {
                break;
            }
            ahead.value = next;
        }
        Ok(Output { root: apply, value: y, joined: false, heads })
    }

    /// The same without following it.
    pub fn before_joining(self, apply: NodeId) -> Output {
        Output { root: apply, value: self.heads.value, joined: false, heads: self.heads }
    }

    pub fn dtype(&self) -> DType {
        self.heads.dtype
    }

    pub fn heads(&self) -> &Heads {
        &self.heads
    }

    /// Defines the value from [1, rows, heads * width], which the caller does itself where the output is joined.
    pub fn split(&self, r: &mut Replacement<'_>, joined: ValueId) {
        let base = self.heads.base();
        let size = |axis: &Axis| match axis {
            Axis::Unit => 1,
            Axis::Rows => -1,
            Axis::Heads => self.heads.heads as i64,
            Axis::Width => self.heads.width as i64,
        };
        let shape = r.ints(&base.iter().map(size).collect::<Vec<_>>());
        let perm = order(&base, &self.heads.axes);
        if is_identity(&perm) {
            return r.op_into("Reshape", &[joined, shape], &[], self.value);
        }
        let split = r.op("Reshape", &[joined, shape], &[]);
        r.op_into("Transpose", &[split], &[("perm", Attribute::Ints(perm))], self.value);
    }
}

/// Where each axis of `to` is in `from`; units are taken in order.
fn order(from: &[Axis], to: &[Axis]) -> Vec<i64> {
    let mut left: Vec<Option<Axis>> = from.iter().copied().map(Some).collect();
    let mut take = |axis: &Axis| {
        let at = left.iter().position(|left| *left == Some(*axis))?;
        left[at] = None;
        Some(at as i64)
    };
    to.iter().filter_map(&mut take).collect()
}

fn is_identity(perm: &[i64]) -> bool {
    perm.iter().enumerate().all(|(i, from)| *from == i as i64)
}

fn transpose(r: &mut Replacement<'_>, value: ValueId, from: &[Axis], to: &[Axis]) -> ValueId {
    let perm = order(from, to);
    if is_identity(&perm) { value } else { r.op("Transpose", &[value], &[("perm", Attribute::Ints(perm))]) }
}

fn is_reshape(node: &Node) -> bool {
    ["Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"].iter().any(|op| node.is(op))
}

/// The axes that each axis of a Transpose's output comes from.
fn permutation(node: &Node, rank: usize) -> Option<Vec<usize>> {
    let Some(perm) = node.ints("perm") else { return Some((0..rank).rev().collect()) };
    let perm: Vec<usize> = perm.iter().map(|axis| usize::try_from(*axis).ok()).collect::<Option<_>>()?;
    let mut sorted = perm.clone();
    sorted.sort_unstable();
    (sorted.into_iter().eq(0..rank)).then_some(perm)
}

/// The axes of a value that has the same elements in the same order, if but for axes of size one it has the same shape.
fn reshaped(view: &View<'_>, value: ValueId, axes: &[Axis], other: ValueId) -> Option<Vec<Axis>> {
    let facts = view.facts();
    let mut left = axes.iter().enumerate().filter(|(_, axis)| **axis != Axis::Unit);
    let mut found = Vec::new();
    for axis in 0..facts.rank(other)? {
        if facts.fixed_dim(other, axis as i64) == Some(1) {
            found.push(Axis::Unit);
            continue;
        }
        let (at, role) = left.next()?;
        let sizes = facts.sizes(other, axis as i64)?;
        found.push((facts.sizes(value, at as i64)? == sizes).then_some(*role)?);
    }
    left.next().is_none().then_some(found)
}
