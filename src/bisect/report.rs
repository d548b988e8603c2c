//! What a comparison has found out.

use std::collections::BTreeMap;

use serde::Serialize;
use viaduct_export::{
    onnx::{Attribute, Dim, Graph, Node, NodeId, ValueId, ValueType},
    shapes::Shapes,
};

use super::{Difference, Reproduction};

/// Both runs, and where they part if they do.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What is looked at, and where it ran.
    pub a: String,
    /// What it is compared with.
    pub b: String,
    /// Values that both sides have.
    pub values: usize,
    /// Those that were compared.
    pub compared: usize,
    pub probes: usize,
    /// Inputs that were made up.
    pub invented_inputs: Vec<String>,
    /// Tensors of the other side that have the name of a value, and another shape.
    pub other_shape: Vec<String>,
    /// Values that agree because nothing in them could differ: they are empty, or NaN throughout on both sides.
    pub nothing_in: Vec<String>,
    /// None if the runs agree.
    pub found: Option<Finding>,
}

/// The first value that differs although all it is computed from agrees.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    pub value: String,
    /// The value's name on the other side.
    pub other: String,
    pub difference: Difference,
    /// The node that makes it.
    pub node: NodeOutline,
    /// All nodes between the last values that agree and this one, in order, as `operator name`. More than one only where the
    /// other side does not have the values between.
    pub between: Vec<String>,
    /// The values before it that agree.
    pub agreeing: Vec<String>,
    /// Whether it differed again when it was looked at with its sources alone.
    pub confirmed: bool,
    /// Values before it that were not compared, because the error stays from here on.
    pub unseen_before: usize,
    /// Where no node before it differs by itself, given the other side's values, and differences add up: the nodes that make
    /// most of it, the worst first.
    pub adds_up: Option<Vec<Contribution>>,
    pub reproduction: Option<Reproduction>,
}

/// What one node adds to a difference.
#[derive(Clone, Debug, Serialize)]
pub struct Contribution {
    /// Operator and name.
    pub node: String,
    pub value: String,
    /// Of its result, given the other side's values.
    pub difference: Difference,
}

/// A node in words.
#[derive(Clone, Debug, Serialize)]
pub struct NodeOutline {
    pub name: String,
    pub op_type: String,
    pub domain: String,
    pub attributes: BTreeMap<String, String>,
    pub inputs: Vec<Operand>,
    pub outputs: Vec<Operand>,
}

/// What a node takes or gives.
#[derive(Clone, Debug, Serialize)]
pub struct Operand {
    pub name: String,
    /// `input`, `constant` or `value`.
    pub kind: &'static str,
    pub dtype: String,
    /// Sizes, names of sizes, or `?`.
    pub shape: Vec<String>,
    /// None for what was not compared.
    pub difference: Option<Difference>,
}

/// The runs part; exit code 3.
#[derive(Debug, thiserror::Error)]
#[error("{how} {op_type} {node}: {numbers}")]
pub struct Parted {
    pub how: &'static str,
    pub op_type: String,
    pub node: String,
    pub numbers: String,
}

impl Report {
    /// An error if the runs part.
    pub fn check(&self) -> Result<(), Parted> {
        let Some(finding) = &self.found else { return Ok(()) };
        let Finding { node, difference, .. } = finding;
        let (op_type, node) = (node.op_type.clone(), node.name.clone());
        Err(Parted { how: finding.how(), op_type, node, numbers: difference.in_words() })
    }
}

impl Finding {
    /// What happens at the node, in words that its name follows.
    pub fn how(&self) -> &'static str {
        match self.adds_up {
            Some(_) => "small differences add up to more than the tolerance at",
            None => "the runs part at",
        }
    }
}

impl NodeOutline {
    /// `difference` tells how far a value is from the other side's, where that is known.
    pub fn of(
        graph: &Graph,
        shapes: &Shapes,
        id: NodeId,
        difference: &dyn Fn(ValueId) -> Option<Difference>,
    ) -> NodeOutline {
        let node = &graph[id];
        let operands = |ids: &[Option<ValueId>]| {
            let there = ids.iter().flatten();
            there.map(|id| Operand::of(graph, shapes, *id, difference(*id))).collect()
        };
        NodeOutline {
            name: graph.place(id),
            op_type: node.op_type.clone(),
            domain: node.domain.clone(),
            attributes: node.attributes.iter().map(|(name, value)| (name.clone(), in_words(value))).collect(),
            inputs: operands(&node.inputs),
            outputs: operands(&node.outputs),
        }
    }
}

impl Operand {
    fn of(graph: &Graph, shapes: &Shapes, id: ValueId, difference: Option<Difference>) -> Operand {
        let (value, fact) = (&graph[id], shapes.known(id));
        let recorded = match &value.ty {
            Some(ValueType::Tensor { dtype, shape }) => (Some(*dtype), shape.clone()),
            _ => (None, None),
        };
        let known = fact.and_then(|fact| fact.shape.clone()).map(|dims| {
            let dim = |dim: Option<usize>| dim.map_or(Dim::Unknown, Dim::Fixed);
            dims.into_iter().map(dim).collect::<Vec<_>>()
        });
        let kind = match (&value.constant, graph.inputs.contains(&id)) {
            (Some(_), _) => "constant",
            (_, true) => "input",
            _ => "value",
        };
        Operand {
            name: value.name.clone(),
            kind,
            dtype: fact.and_then(|f| f.dtype).or(recorded.0).map_or_else(|| "?".to_owned(), |d| d.name()),
            shape: known.or(recorded.1).unwrap_or_default().iter().map(Dim::to_string).collect(),
            difference,
        }
    }
}

/// `Softmax scores_3`
pub fn label(graph: &Graph, id: NodeId) -> String {
    let node: &Node = &graph[id];
    format!("{} {}", node.op_type, graph.place(id))
}

fn in_words(attribute: &Attribute) -> String {
    const MOST: usize = 16;
    fn list<T: ToString>(items: &[T]) -> String {
        let more = if items.len() > MOST { ", ..." } else { "" };
        let shown: Vec<String> = items.iter().take(MOST).map(ToString::to_string).collect();
        format!("[{}{more}]", shown.join(", "))
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).chars().take(200).collect::<String>();
    match attribute {
        Attribute::Int(value) => value.to_string(),
        Attribute::Float(value) => value.to_string(),
        Attribute::String(bytes) => text(bytes),
        Attribute::Ints(values) => list(values),
        Attribute::Floats(values) => list(values),
        Attribute::Strings(values) => list(&values.iter().map(|bytes| text(bytes)).collect::<Vec<_>>()),
        Attribute::Tensor(tensor) => format!("a tensor, {} {:?}", tensor.dtype.name(), tensor.shape),
        Attribute::Graph(graph) => format!("a graph of {} nodes", graph.nodes().count()),
        Attribute::Graphs(graphs) => format!("{} graphs", graphs.len()),
        Attribute::Other(_) => "of a kind that is only carried along".to_owned(),
    }
}
