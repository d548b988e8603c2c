//! A model as passes look at it: who defines a value, who uses it, and what is known about it.

use std::cell::OnceCell;

use super::Facts;
use crate::onnx::{Graph, Links, Model, Node, NodeId, Tensor, ValueId};

/// A model, unchanged while it is looked at.
pub struct View<'a> {
    pub model: &'a Model,
    pub graph: &'a Graph,
    links: Links,
    facts: OnceCell<Facts>,
}

impl<'a> View<'a> {
    pub fn of(model: &'a Model) -> View<'a> {
        View { model, graph: &model.graph, links: model.graph.links(), facts: OnceCell::new() }
    }

    /// Types, shapes and small contents; inferred when first asked for.
    pub fn facts(&self) -> &Facts {
        self.facts.get_or_init(|| Facts::of(self.model))
    }

    /// The version of the standard operators.
    pub fn opset(&self) -> i64 {
        self.model.opset("").unwrap_or(0)
    }

    /// Nodes of a standard operator, in execution order.
    pub fn nodes(&self, op_type: &str) -> impl Iterator<Item = (NodeId, &'a Node)> {
        self.graph.nodes().filter(move |(_, node)| node.is(op_type))
    }

    /// The node that defines the value.
    pub fn producer(&self, value: ValueId) -> Option<(NodeId, &'a Node)> {
        let id = self.links.producer(value)?;
        Some((id, &self.graph[id]))
    }

    /// The node that defines the value, if it is that standard operator.
    pub fn made_by(&self, value: ValueId, op_type: &str) -> Option<(NodeId, &'a Node)> {
        self.producer(value).filter(|(_, node)| node.is(op_type))
    }

    /// The nodes that use the value, each once, in execution order.
    pub fn uses(&self, value: ValueId) -> &[NodeId] {
        self.links.uses(value)
    }

    /// The only node that uses the value, if the graph itself does not give it out.
    pub fn sole_use(&self, value: ValueId) -> Option<(NodeId, &'a Node)> {
        match self.uses(value) {
            [one] if !self.graph.outputs.contains(&value) => Some((*one, &self.graph[*one])),
            _ => None,
        }
    }

    /// The value's tensor if it is an initializer that no caller can replace.
    pub fn constant(&self, value: ValueId) -> Option<&'a Tensor> {
        let tensor = self.graph[value].constant.as_ref()?;
        (!self.graph.inputs.contains(&value)).then_some(tensor)
    }

    /// The one element of a constant, whatever its rank and type.
    pub fn scalar(&self, value: ValueId) -> Option<f64> {
        self.facts().scalar(value)
    }

    /// All integers of a small constant.
    pub fn ints(&self, value: ValueId) -> Option<Vec<i64>> {
        self.facts().ints(value)
    }

    /// The two operands of a commutative node, in both orders: `[(a, b), (b, a)]`.
    pub fn operands(&self, node: &Node) -> Vec<(ValueId, ValueId)> {
        match node.inputs[..] {
            [Some(a), Some(b)] => vec![(a, b), (b, a)],
            _ => Vec::new(),
        }
    }

    /// A binary commutative node with a constant scalar operand: the other operand and the scalar.
    pub fn with_scalar(&self, node: &Node) -> Option<(ValueId, f64)> {
        self.operands(node).into_iter().find_map(|(x, c)| Some((x, self.scalar(c)?)))
    }
}
