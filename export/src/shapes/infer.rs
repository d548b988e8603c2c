//! Runs the rules over a graph in execution order.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use super::{Call, Fact, MAX_ELEMENTS, rule, standard_domain};
use crate::onnx::{Dim, Graph, Model, Node, Value, ValueId, ValueType};

/// Sizes of a graph's named dimensions.
pub type Sizes = BTreeMap<String, usize>;

/// A node whose inputs contradict its operator's definition, or whose result contradicts what the graph records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    pub node: String,
    pub op_type: String,
    pub problem: String,
}

/// What is known about every value of a graph under given sizes.
#[derive(Clone, Debug, Default)]
pub struct Shapes {
    facts: Vec<Fact>,
    pub conflicts: Vec<Conflict>,
}

/// Nodes of bodies that are looked at, all bodies together and each as often as it is inferred. Loops within loops
/// multiply; beyond this their results stay unknown.
const MAX_BODY_NODES: usize = 1 << 16;

/// The highest rank that is followed.
const MAX_RANK: usize = 64;

/// What all graphs of one model share.
struct Context<'a> {
    opsets: HashMap<&'a str, i64>,
    sizes: &'a Sizes,
    hidden: &'a BTreeSet<String>,
    body_nodes_left: Cell<usize>,
}

/// A graph on the way: what its nodes and the bodies within them see.
pub(super) struct Scope<'a> {
    context: &'a Context<'a>,
    graph: &'a Graph,
    facts: &'a [Fact],
    outer: Option<&'a Scope<'a>>,
}

/// Infers every value's type and shape. `sizes` binds named dimensions; a name that is missing stays unknown.
/// Facts about graph inputs, with their contents for example, may be given by name in `contents`.
pub fn infer(model: &Model, sizes: &Sizes, contents: &BTreeMap<String, Fact>) -> Shapes {
    infer_hiding(model, sizes, contents, &BTreeSet::new())
}

/// Like [`infer`], but the contents of results of these names count as unknown.
pub fn infer_hiding(
    model: &Model,
    sizes: &Sizes,
    contents: &BTreeMap<String, Fact>,
    hidden: &BTreeSet<String>,
) -> Shapes {
    let context = Context {
        opsets: model.opsets.iter().map(|opset| (standard_domain(&opset.0), opset.1)).collect(),
        sizes,
        hidden,
        body_nodes_left: Cell::new(MAX_BODY_NODES),
    };
    Shapes::of(&context, &model.graph, |value| contents.get(&value.name), None)
}

impl Shapes {
    pub fn fact(&self, id: ValueId) -> &Fact {
        &self.facts[id.index()]
    }

    /// What is known about the value; `None` for one that the graph got later.
    pub fn known(&self, id: ValueId) -> Option<&Fact> {
        self.facts.get(id.index())
    }

    /// The shape if every size of it is known.
    pub fn shape(&self, id: ValueId) -> Option<Vec<usize>> {
        self.fact(id).full_shape()
    }

    /// Bytes of a value's tensor; `None` if unknown.
    pub fn bytes(&self, id: ValueId) -> Option<u64> {
        self.fact(id).bytes()
    }

    /// Operators whose outputs' sizes are not known, with how many such outputs there are.
    pub fn unknown(&self, graph: &Graph) -> BTreeMap<String, usize> {
        let mut unknown = BTreeMap::new();
        for (_, node) in graph.nodes() {
            let outputs = node.outputs.iter().flatten();
            let count = outputs.filter(|id| self.bytes(**id).is_none()).count();
            if count > 0 {
                *unknown.entry(node.op_type.clone()).or_default() += count;
            }
        }
        unknown
    }

    fn of<'a>(
        context: &Context<'_>,
        graph: &Graph,
        given: impl Fn(&Value) -> Option<&'a Fact>,
        outer: Option<&Scope<'_>>,
    ) -> Shapes {
        let mut shapes = Shapes::default();
        for (_, value) in graph.values() {
            let recorded = recorded(value, context.sizes);
            let fact = given(value).map(|given| {
                let mut fact = given.clone();
                let problem = fact.fill(&recorded).err();
                let conflict =
                    |problem| Conflict { node: value.name.clone(), op_type: String::new(), problem };
                shapes.conflicts.extend(problem.map(conflict));
                fact
            });
            shapes.facts.push(bounded(fact.unwrap_or(recorded)));
        }
        if let Some(outer) = outer {
            shapes.capture(graph, outer);
        }
        for (_, node) in graph.nodes() {
            shapes.run(context, graph, node, outer);
        }
        shapes
    }

    /// Takes over the facts about values that a body uses but does not define.
    fn capture(&mut self, graph: &Graph, outer: &Scope<'_>) {
        let mut defined: Vec<bool> = graph.values().map(|(_, value)| value.constant.is_some()).collect();
        let outputs = graph.nodes().flat_map(|(_, node)| node.outputs.iter().flatten());
        graph.inputs.iter().chain(outputs).for_each(|id| defined[id.index()] = true);
        for (id, value) in graph.values().filter(|(id, _)| !defined[id.index()]) {
            if let Some(fact) = outer.find(&value.name) {
                self.facts[id.index()] = fact.clone();
            }
        }
    }

    fn run(&mut self, context: &Context<'_>, graph: &Graph, node: &Node, outer: Option<&Scope<'_>>) {
        let Some(rule) = rule(&node.domain, &node.op_type) else { return };
        let opset = context.opsets.get(standard_domain(&node.domain)).copied().unwrap_or(1);
        let scope = Scope { context, graph, facts: &self.facts, outer };
        let inputs = node.inputs.iter().map(|id| id.map(|id| &self.facts[id.index()])).collect();
        let result = rule(&Call { node, inputs, opset, scope: &scope });
        let conflict = |problem| Conflict { node: node.name.clone(), op_type: node.op_type.clone(), problem };
        match result {
            Ok(facts) => {
                for (id, fact) in node.outputs.iter().zip(facts) {
                    let Some(id) = id else { continue };
                    let mut fact = bounded(fact);
                    if context.hidden.contains(&graph[*id].name) {
                        fact.elements = None;
                    }
                    let recorded = std::mem::replace(&mut self.facts[id.index()], fact);
                    let problem = self.facts[id.index()].fill(&recorded).err();
                    self.conflicts.extend(problem.map(conflict));
                }
            }
            Err(problem) => self.conflicts.push(conflict(problem)),
        }
    }
}

impl Scope<'_> {
    /// See [`Call::body`].
    pub fn body(&self, graph: &Graph, inputs: &[Fact]) -> Result<Vec<Fact>, String> {
        let context = self.context;
        let Some(left) = context.body_nodes_left.get().checked_sub(1 + graph.nodes().count()) else {
            return Ok(vec![Fact::default(); graph.outputs.len()]);
        };
        context.body_nodes_left.set(left);
        let names = graph.inputs.iter().map(|id| graph[*id].name.as_str());
        let given: HashMap<&str, &Fact> = names.zip(inputs).collect();
        let shapes = Shapes::of(context, graph, |value| given.get(value.name.as_str()).copied(), Some(self));
        match shapes.conflicts.into_iter().next() {
            Some(Conflict { node, op_type, problem }) => Err(format!("{node} ({op_type}): {problem}")),
            None => Ok(graph.outputs.iter().map(|id| shapes.facts[id.index()].clone()).collect()),
        }
    }

    /// A value of this graph, or of one around it.
    fn find(&self, name: &str) -> Option<&Fact> {
        match self.graph.find(name) {
            Some(id) => Some(&self.facts[id.index()]),
            None => self.outer?.find(name),
        }
    }
}

/// Tensors of absurd rank, and sequences that are long or nested, are not followed, so that a hostile chain of nodes
/// cannot multiply one long list.
fn bounded(fact: Fact) -> Fact {
    let many =
        |items: &Vec<Fact>| items.len() > MAX_ELEMENTS || items.iter().any(|item| item.items.is_some());
    if fact.rank().is_some_and(|rank| rank > MAX_RANK) || fact.items.as_ref().is_some_and(many) {
        return Fact { dtype: fact.dtype, ..Fact::default() };
    }
    fact
}

/// What the graph itself says about a value: a constant, or a recorded type.
fn recorded(value: &Value, sizes: &Sizes) -> Fact {
    if let Some(tensor) = &value.constant {
        return Fact::of_tensor(tensor);
    }
    let Some(ValueType::Tensor { dtype, shape }) = &value.ty else { return Fact::default() };
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => Some(*size),
        Dim::Symbol(name) => sizes.get(name).copied(),
        Dim::Unknown => None,
    };
    let shape = shape.as_ref().map(|dims| dims.iter().map(size).collect());
    let stated = dtype.to_onnx() != 0;
    Fact::partial(stated.then_some(*dtype), shape)
}
