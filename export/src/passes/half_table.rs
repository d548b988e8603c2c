//! Half of a table of cosines or sines that exporters write out in full.
//!
//! com.microsoft RotaryEmbedding takes one column per pair. Exporters make two equal ones, by repeating each column
//! (interleaved pairs) or the whole table (split halves), before or after the cosine. That they are equal is proved: by
//! the elements of a constant, or by the nodes that made them.

use std::collections::HashMap;

use super::{Replacement, View, pieces::axis_of};
use crate::onnx::{Attribute, Node, NodeId, Tensor, ValueId};

/// Where the second of two equal columns is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pairing {
    /// Columns 2m and 2m+1.
    Interleaved,
    /// Columns m and m + d/2.
    HalfSplit,
}

/// How to make the half of a value's columns.
#[derive(Clone, Debug)]
pub enum Half {
    Constant(Tensor),
    /// It is there.
    Value(ValueId),
    /// By the node that made the full value, from halves.
    Node {
        node: NodeId,
        inputs: Vec<Half>,
    },
}

/// Tables are read up to this size to compare their columns: 4096 rows of 128 in f32.
const MAX_TABLE: usize = 4096 * 128 * 4;

/// Nodes that are looked at for one table. Tables of four axes take some twenty.
const MAX_NODES: usize = 200;

/// Operators that treat every column by itself.
const ELEMENTWISE: &[&str] = &["Cast", "Cos", "Sin", "Neg", "Identity", "Mul", "Add", "Sub", "Div"];

/// Looks for equal columns.
pub struct Halver<'v, 'a> {
    pub view: &'v View<'a>,
    pub pairing: Pairing,
    nodes_left: usize,
}

impl<'v, 'a> Halver<'v, 'a> {
    pub fn new(view: &'v View<'a>, pairing: Pairing) -> Halver<'v, 'a> {
        Halver { view, pairing, nodes_left: MAX_NODES }
    }

    /// How to make the first of each two equal columns, if all columns are twice there.
    pub fn half(&mut self, value: ValueId) -> Option<Half> {
        self.nodes_left = self.nodes_left.checked_sub(1)?;
        if let Some(tensor) = self.view.constant(value) {
            return halved(tensor, self.pairing).map(Half::Constant);
        }
        let (id, node) = self.view.producer(value)?;
        match node.op_type.as_str() {
            _ if !node.is(&node.op_type) => None,
            "Reshape" | "Flatten" if self.pairing == Pairing::Interleaved => self.repeated(node, value),
            "Concat" => self.concat(id, node, value),
            "Unsqueeze" => self.unsqueeze(id, node, value),
            op if ELEMENTWISE.contains(&op) => self.elementwise(id, node),
            _ => None,
        }
    }

    fn width(&self, value: ValueId) -> Option<usize> {
        self.view.facts().fixed_dim(value, -1)
    }

    /// Of [.., n] as [.., n, 1], repeated along the last axis, as [.., 2n]: the [.., n].
    fn repeated(&self, node: &Node, value: ValueId) -> Option<Half> {
        let facts = self.view.facts();
        let pairs = node.input(0)?;
        let (_, repeat) = self.view.producer(pairs)?;
        let column = match repeat.op_type.as_str() {
            "Expand" | "Tile" => repeat.input(0)?,
            "Concat" => match repeat.inputs[..] {
                [Some(a), Some(b)] if a == b => a,
                _ => return None,
            },
            _ => return None,
        };
        let (_, unsqueeze) = self.view.made_by(column, "Unsqueeze")?;
        let single = unsqueeze.input(0)?;
        let rank = facts.rank(single)?;
        let last = i64::try_from(rank).ok()?;
        let same_rows = |a: ValueId, b: ValueId| {
            (0..last - 1)
                .all(|axis| facts.sizes(a, axis).is_some_and(|sizes| Some(sizes) == facts.sizes(b, axis)))
        };
        let ranks =
            facts.rank(column)? == rank + 1 && facts.rank(pairs)? == rank + 1 && facts.rank(value)? == rank;
        let columns = self.width(single)?;
        let widths = self.width(column)? == 1
            && self.width(pairs)? == 2
            && facts.fixed_dim(pairs, -2)? == columns
            && facts.fixed_dim(column, -2)? == columns
            && Some(self.width(value)?) == columns.checked_mul(2);
        (ranks && widths && same_rows(single, pairs) && same_rows(single, value))
            .then_some(Half::Value(single))
    }

    fn concat(&mut self, id: NodeId, node: &Node, value: ValueId) -> Option<Half> {
        let rank = self.view.facts().rank(value)?;
        let along_columns = axis_of(self.view, value, node.int("axis")?)? + 1 == rank;
        if along_columns && self.pairing == Pairing::HalfSplit {
            return match node.inputs[..] {
                [Some(a), Some(b)] if a == b => Some(Half::Value(a)),
                _ => None,
            };
        }
        let inputs = node.inputs.iter().map(|input| self.half((*input)?)).collect::<Option<_>>()?;
        Some(Half::Node { node: id, inputs })
    }

    fn unsqueeze(&mut self, id: NodeId, node: &Node, value: ValueId) -> Option<Half> {
        let input = node.input(0)?;
        let columns = self.width(input).filter(|columns| *columns > 1)?;
        if self.width(value)? != columns {
            return None;
        }
        let axes = node.input(1).map(Half::Value);
        Some(Half::Node { node: id, inputs: [self.half(input)?].into_iter().chain(axes).collect() })
    }

    /// Operands that are the same for all columns stay.
    fn elementwise(&mut self, id: NodeId, node: &Node) -> Option<Half> {
        let mut inputs = Vec::new();
        for input in &node.inputs {
            let input = (*input)?;
            let single = self.width(input) == Some(1) || self.view.facts().rank(input) == Some(0);
            inputs.push(if single { Half::Value(input) } else { self.half(input)? });
        }
        let any =
            inputs.iter().any(|input| !matches!(input, Half::Value(v) if node.inputs.contains(&Some(*v))));
        any.then_some(Half::Node { node: id, inputs })
    }
}

/// Every second column, or the first half of them, if the others are equal to them.
fn halved(tensor: &Tensor, pairing: Pairing) -> Option<Tensor> {
    let (width, rows) = tensor.shape.split_last()?;
    let size = tensor.dtype.size()?;
    let len = tensor.dtype.byte_len(&tensor.shape)?;
    if *width < 2 || width % 2 != 0 || len == 0 || len > MAX_TABLE || tensor.bytes.len() != len {
        return None;
    }
    let bytes = tensor.bytes.read().ok()?;
    let mut half = Vec::with_capacity(bytes.len() / 2);
    for row in bytes.chunks_exact(width * size) {
        let pair = match pairing {
            Pairing::Interleaved => size,
            Pairing::HalfSplit => row.len() / 2,
        };
        for columns in row.chunks_exact(2 * pair) {
            let (first, second) = columns.split_at(pair);
            if first != second {
                return None;
            }
            half.extend_from_slice(first);
        }
    }
    let shape: Vec<usize> = rows.iter().copied().chain([width / 2]).collect();
    Some(Tensor::inline(tensor.dtype, &shape, half))
}

/// Halves that were made, by the value and the node they stand for.
#[derive(Default)]
pub struct Made(HashMap<(NodeId, Pairing), ValueId>);

impl Made {
    /// The nodes of a half. `source` gives the nodes of the graph as it was.
    pub fn make(
        &mut self,
        new: &mut Replacement<'_>,
        half: &Half,
        pairing: Pairing,
        source: &HashMap<NodeId, Node>,
    ) -> Option<ValueId> {
        match half {
            Half::Constant(tensor) => Some(new.constant(tensor.clone())),
            Half::Value(value) => Some(*value),
            Half::Node { node: id, inputs } => {
                if let Some(made) = self.0.get(&(*id, pairing)) {
                    return Some(*made);
                }
                let inputs: Vec<ValueId> = inputs
                    .iter()
                    .map(|input| self.make(new, input, pairing, source))
                    .collect::<Option<_>>()?;
                let node = source.get(id)?;
                let attributes: Vec<(&str, Attribute)> =
                    node.attributes.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
                let made = new.op(&node.op_type, &inputs, &attributes);
                self.0.insert((*id, pairing), made);
                Some(made)
            }
        }
    }
}

impl Half {
    /// The nodes that will be copied.
    pub fn nodes(&self, into: &mut Vec<NodeId>) {
        if let Half::Node { node, inputs } = self {
            into.push(*node);
            inputs.iter().for_each(|input| input.nodes(into));
        }
    }
}
