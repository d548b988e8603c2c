//! The graph: an arena of nodes and values with typed ids.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    path::PathBuf,
};

use super::{
    node::Node,
    proto,
    tensor::{DType, Tensor},
};

/// A node of one graph. Ids of other graphs are out of place; using one panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub(crate) u32);

/// A value (an edge) of one graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub(crate) u32);

impl ValueId {
    /// The value's place in [`Graph::values`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One dimension of a value's shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dim {
    Fixed(usize),
    /// A named size that is bound when the graph is run, for example `image_seq`.
    Symbol(String),
    Unknown,
}

/// `64`, `image_seq`, or `?`.
impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(size) => write!(f, "{size}"),
            Dim::Symbol(name) => f.write_str(name),
            Dim::Unknown => f.write_str("?"),
        }
    }
}

/// What is known about a value's type.
#[derive(Clone, Debug, PartialEq)]
pub enum ValueType {
    Tensor {
        dtype: DType,
        shape: Option<Vec<Dim>>,
    },
    /// Sequences, optionals, maps and sparse tensors, carried along.
    Other(Box<proto::TypeProto>),
}

/// An edge: a graph input, a constant, or the output of a node.
#[derive(Clone, Debug, Default)]
pub struct Value {
    pub name: String,
    pub ty: Option<ValueType>,
    /// The constant's tensor if the value is an initializer (it may be a graph input too: a default).
    pub constant: Option<Tensor>,
    /// Carried along: doc string, metadata, and the dimensions' denotations.
    pub extra: Option<Box<proto::ValueInfoProto>>,
}

/// A graph in execution order. Nodes are kept in the order in which they run; values are named uniquely.
///
/// The body of an If or Loop is a graph of its own. Where it uses a value of a graph around it, it has a value of that
/// name that nothing in it defines.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    pub name: String,
    pub(crate) nodes: Vec<Option<Node>>,
    /// Execution order; removed nodes leave it.
    pub(crate) order: Vec<NodeId>,
    pub(crate) values: Vec<Value>,
    pub(crate) by_name: HashMap<String, ValueId>,
    pub inputs: Vec<ValueId>,
    pub outputs: Vec<ValueId>,
    /// Carried along: doc string, metadata, quantization annotations, sparse initializers, and of the initializers
    /// what a [`Tensor`] does not hold (nodes and values emptied).
    pub extra: Option<Box<proto::GraphProto>>,
}

/// A model: one main graph and what stands around it.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub graph: Graph,
    pub ir_version: i64,
    /// Operator-set domain ("" is the standard one) and version.
    pub opsets: Vec<(String, i64)>,
    pub producer: String,
    /// The folder that external data lies in or below; set by the reader.
    pub folder: Option<PathBuf>,
    /// Carried along: functions, training info, metadata (the graph emptied).
    pub extra: Option<Box<proto::ModelProto>>,
}

impl Graph {
    pub fn new(name: &str) -> Graph {
        Graph { name: name.to_owned(), ..Graph::default() }
    }

    /// The value of that name, made when it does not exist.
    pub fn value(&mut self, name: &str) -> ValueId {
        if let Some(id) = self.by_name.get(name) {
            return *id;
        }
        let id = ValueId(self.values.len() as u32);
        self.values.push(Value { name: name.to_owned(), ..Value::default() });
        self.by_name.insert(name.to_owned(), id);
        id
    }

    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.by_name.get(name).copied()
    }

    /// The name, or one that begins with it if a value has it.
    pub fn free_name(&self, name: &str) -> String {
        let is_free = |name: &String| self.find(name).is_none();
        let others = (2..).map(|n: usize| format!("{name}.{n}"));
        std::iter::once(name.to_owned()).chain(others).find(is_free).unwrap_or_default()
    }

    /// Gives a value another name; a value that had that name before loses it to `by_name`, so names stay unique only
    /// if the caller's are.
    pub fn rename(&mut self, id: ValueId, name: &str) {
        self.by_name.remove(&self.values[id.0 as usize].name);
        self.values[id.0 as usize].name = name.to_owned();
        self.by_name.insert(name.to_owned(), id);
    }

    pub fn add_constant(&mut self, name: &str, tensor: Tensor) -> ValueId {
        let id = self.value(name);
        self.values[id.0 as usize].constant = Some(tensor);
        id
    }

    /// Appends a node at the end of the execution order.
    pub fn add_node(&mut self, node: Node) -> NodeId {
        let id = NodeId(self.nodes.len() as u32);
        self.nodes.push(Some(node));
        self.order.push(id);
        id
    }

    /// Nodes in execution order.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.order.iter().filter_map(|id| Some((*id, self.nodes[id.0 as usize].as_ref()?)))
    }

    /// What to call a node by: its name, or that of its first output.
    pub fn place(&self, id: NodeId) -> String {
        let node = &self[id];
        match node.outputs.iter().flatten().next() {
            Some(output) if node.name.is_empty() => self[*output].name.clone(),
            _ => node.name.clone(),
        }
    }

    /// All values in order of creation, initializers and graph inputs included.
    pub fn values(&self) -> impl Iterator<Item = (ValueId, &Value)> {
        self.values.iter().enumerate().map(|(i, value)| (ValueId(i as u32), value))
    }

    /// Replaces one node by others at its place in the execution order.
    pub fn replace_node(&mut self, id: NodeId, with: Vec<Node>) {
        let Some(place) = self.order.iter().position(|n| *n == id) else { return };
        self.nodes[id.0 as usize] = None;
        let first = self.nodes.len() as u32;
        let count = with.len() as u32;
        self.nodes.extend(with.into_iter().map(Some));
        self.order.splice(place..=place, (first..first + count).map(NodeId));
    }

    /// Takes many nodes out in one go.
    pub fn remove_nodes(&mut self, ids: &HashSet<NodeId>) {
        self.order.retain(|id| !ids.contains(id));
        for id in ids {
            self.nodes[id.0 as usize] = None;
        }
    }

    /// Puts a value in another's place as an input of every node and as a graph output. Subgraphs refer to outer values
    /// by name and are not changed: see [`Graph::captured`].
    pub fn replace_uses(&mut self, old: ValueId, new: ValueId) {
        for node in self.nodes.iter_mut().flatten() {
            for input in node.inputs.iter_mut().filter(|input| **input == Some(old)) {
                *input = Some(new);
            }
        }
        for output in self.outputs.iter_mut().filter(|output| **output == old) {
            *output = new;
        }
    }

    /// Values that bodies of this graph's nodes use by name.
    pub fn captured(&self) -> HashSet<ValueId> {
        self.nodes().flat_map(|(_, node)| self.captured_by(node)).collect()
    }

    /// Names of the values of all bodies, at any depth, those that they capture included.
    pub fn names_in_bodies(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        let bodies = self.nodes().flat_map(|(_, node)| node.subgraphs());
        Box::new(bodies.flat_map(|body| {
            let own = body.values.iter().map(|value| value.name.as_str());
            own.chain(body.sparse_names()).chain(body.names_in_bodies())
        }))
    }

    /// Takes a node out; its values stay, without a producer.
    pub fn remove_node(&mut self, id: NodeId) -> Option<Node> {
        self.order.retain(|n| *n != id);
        self.nodes.get_mut(id.0 as usize)?.take()
    }

    /// Makes a value a graph output, behind the present ones, if it is not one yet. Its type, where known, becomes
    /// the output's type.
    pub fn add_output(&mut self, id: ValueId) {
        let value = &mut self.values[id.0 as usize];
        if let (None, Some(tensor)) = (&value.ty, &value.constant) {
            let shape = Some(tensor.shape.iter().map(|dim| Dim::Fixed(*dim)).collect());
            value.ty = Some(ValueType::Tensor { dtype: tensor.dtype, shape });
        }
        if !self.outputs.contains(&id) {
            self.outputs.push(id);
        }
    }
}

impl Model {
    /// The version of an operator set that the model imports; "" and "ai.onnx" are the standard one.
    pub fn opset(&self, domain: &str) -> Option<i64> {
        let plain = |domain: &str| if domain == "ai.onnx" { String::new() } else { domain.to_owned() };
        self.opsets.iter().find(|opset| plain(&opset.0) == plain(domain)).map(|opset| opset.1)
    }

    /// Makes the model import an operator set, if it does not yet.
    pub fn import(&mut self, domain: &str, version: i64) {
        if self.opset(domain).is_none() {
            self.opsets.push((domain.to_owned(), version));
        }
    }
}

impl std::ops::Index<ValueId> for Graph {
    type Output = Value;
    fn index(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }
}

impl std::ops::IndexMut<ValueId> for Graph {
    fn index_mut(&mut self, id: ValueId) -> &mut Value {
        &mut self.values[id.0 as usize]
    }
}

impl std::ops::IndexMut<NodeId> for Graph {
    /// Panics if the node was removed.
    fn index_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id.0 as usize].as_mut().expect("the node was removed from this graph")
    }
}

impl std::ops::Index<NodeId> for Graph {
    type Output = Node;
    /// Panics if the node was removed.
    fn index(&self, id: NodeId) -> &Node {
        self.nodes[id.0 as usize].as_ref().expect("the node was removed from this graph")
    }
}
