//! The rules every graph obeys: one definition per value, definitions before uses, names that are unique.

use std::collections::{HashMap, HashSet};

use thiserror::Error;

use super::{
    graph::{Graph, NodeId, ValueId},
    node::{Attribute, Node},
};

/// How a graph breaks the rules. Nodes are given as name (or position) and operator.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum GraphError {
    #[error("value '{value}' is used by node {node} before node {definer} defines it")]
    UsedBeforeDefined { value: String, node: String, definer: String },
    #[error("value '{value}' is used by node {node} but nothing defines it")]
    Undefined { value: String, node: String },
    #[error("graph output '{value}' of graph '{graph}' is not defined")]
    OutputUndefined { value: String, graph: String },
    #[error("value '{value}' is defined by node {node} although it is already {first}")]
    DefinedTwice { value: String, node: String, first: String },
    #[error("graph '{graph}' has two inputs named '{value}'")]
    DuplicateInput { value: String, graph: String },
    #[error("graph '{graph}' has two initializers named '{value}'")]
    DuplicateInitializer { value: String, graph: String },
    #[error("two values of graph '{graph}' are named '{value}'")]
    DuplicateName { value: String, graph: String },
    #[error("graph '{graph}' has an input, output or initializer without a name")]
    Unnamed { graph: String },
    #[error("node {node} has two attributes named '{attribute}'")]
    DuplicateAttribute { node: String, attribute: String },
    #[error("graph '{graph}' refers to value {id}, which belongs to another graph")]
    ForeignValue { graph: String, id: u32 },
}

/// Names that a graph may use: its own so far, and those of the graphs around it.
struct Scope<'a> {
    names: HashSet<&'a str>,
    outer: Option<&'a Scope<'a>>,
}

impl Scope<'_> {
    fn has(&self, name: &str) -> bool {
        self.names.contains(name) || self.outer.is_some_and(|outer| outer.has(name))
    }
}

impl Graph {
    /// Checks the graph and its subgraphs: every used value is defined before it is used, exactly once, under a
    /// unique name. Subgraphs may use the values that the graphs around them have defined by then.
    pub fn validate(&self) -> Result<(), GraphError> {
        self.check(None)
    }

    fn check(&self, outer: Option<&Scope>) -> Result<(), GraphError> {
        let graph = || self.name.clone();
        self.check_names()?;
        let mut scope = Scope { names: HashSet::new(), outer };
        let mut definers: HashMap<&str, NodeId> = HashMap::new();
        for id in &self.inputs {
            if !scope.names.insert(self.name_of(*id)?) {
                return Err(GraphError::DuplicateInput { value: self[*id].name.clone(), graph: graph() });
            }
        }
        scope.names.extend(self.values.iter().filter(|v| v.constant.is_some()).map(|v| v.name.as_str()));
        scope.names.extend(self.sparse_names());
        // Needed for the message only, but a graph that breaks the order is rare and this map is small.
        for (id, node) in self.nodes() {
            for output in node.outputs.iter().flatten() {
                definers.entry(self.name_of(*output)?).or_insert(id);
            }
        }
        for (id, node) in self.nodes() {
            self.check_attributes(id, node)?;
            for input in node.inputs.iter().flatten() {
                let value = self.name_of(*input)?;
                if !scope.has(value) {
                    return Err(self.undefined(value, id, definers.get(value).copied()));
                }
            }
            for subgraph in node.subgraphs() {
                subgraph.check(Some(&scope))?;
            }
            for output in node.outputs.iter().flatten() {
                let value = self.name_of(*output)?;
                if !scope.names.insert(value) {
                    let first = match definers.get(value) {
                        Some(first) if *first != id => format!("an output of node {}", self.label(*first)),
                        _ if self.inputs.contains(output) => "a graph input".to_owned(),
                        _ if self[*output].constant.is_some() => "an initializer".to_owned(),
                        _ => "one of its outputs".to_owned(),
                    };
                    return Err(GraphError::DefinedTwice {
                        value: value.to_owned(),
                        node: self.label(id),
                        first,
                    });
                }
            }
        }
        for id in &self.outputs {
            let value = self.name_of(*id)?;
            if !scope.has(value) {
                return Err(GraphError::OutputUndefined { value: value.to_owned(), graph: graph() });
            }
        }
        Ok(())
    }

    fn check_names(&self) -> Result<(), GraphError> {
        for (id, value) in self.values() {
            if value.name.is_empty() {
                return Err(GraphError::Unnamed { graph: self.name.clone() });
            }
            if self.find(&value.name) != Some(id) {
                return Err(GraphError::DuplicateName {
                    value: value.name.clone(),
                    graph: self.name.clone(),
                });
            }
        }
        Ok(())
    }

    fn check_attributes(&self, id: NodeId, node: &Node) -> Result<(), GraphError> {
        for (i, (name, _)) in node.attributes.iter().enumerate() {
            if node.attributes[..i].iter().any(|a| a.0 == *name) {
                return Err(GraphError::DuplicateAttribute { node: self.label(id), attribute: name.clone() });
            }
        }
        Ok(())
    }

    fn undefined(&self, value: &str, id: NodeId, definer: Option<NodeId>) -> GraphError {
        let (value, node) = (value.to_owned(), self.label(id));
        match definer {
            Some(definer) => GraphError::UsedBeforeDefined { value, node, definer: self.label(definer) },
            None => GraphError::Undefined { value, node },
        }
    }

    fn name_of(&self, id: ValueId) -> Result<&str, GraphError> {
        let value = self.values.get(id.0 as usize);
        value
            .map(|v| v.name.as_str())
            .ok_or_else(|| GraphError::ForeignValue { graph: self.name.clone(), id: id.0 })
    }

    /// A node as messages name it: `'name' (Operator)`, or its position where it has no name.
    pub fn label(&self, id: NodeId) -> String {
        let node = &self[id];
        if !node.name.is_empty() {
            return format!("'{}' ({})", node.name, node.op_type);
        }
        let position = self.order.iter().position(|n| *n == id).unwrap_or_default();
        format!("#{position} ({})", node.op_type)
    }

    /// Names that sparse initializers, which are only carried along, define.
    pub(super) fn sparse_names(&self) -> impl Iterator<Item = &str> {
        let sparse = self.extra.iter().flat_map(|extra| &extra.sparse_initializer);
        sparse.filter_map(|sparse| sparse.values.as_ref()?.name.as_deref())
    }
}

impl Node {
    /// The bodies of control-flow operators.
    pub fn subgraphs(&self) -> impl Iterator<Item = &Graph> {
        self.attributes.iter().flat_map(|(_, attribute)| match attribute {
            Attribute::Graph(graph) => std::slice::from_ref(&**graph),
            Attribute::Graphs(graphs) => graphs,
            _ => &[],
        })
    }
}
