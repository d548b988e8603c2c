//! Runs the rules over a graph in execution order.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet, HashMap, btree_map::Entry},
    fmt,
};

use super::{Call, Fact, MAX_ELEMENTS, rule, standard_domain};
use crate::onnx::{Dim, Graph, Model, Node, NodeId, Value, ValueId, ValueType};

/// Sizes of a graph's named dimensions.
pub type Sizes = BTreeMap<String, usize>;

/// A node whose inputs contradict its operator's definition, or whose result contradicts what the graph records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    pub node: String,
    pub op_type: String,
    pub problem: String,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Conflict { node, op_type, problem } = self;
        write!(f, "{op_type} {node}: {problem}")
    }
}

/// What is known about every value of a graph under given sizes.
#[derive(Clone, Debug, Default)]
pub struct Shapes {
    facts: Vec<Fact>,
    /// Of the bodies that may run: the node, and the body's place among its subgraphs.
    bodies: BTreeMap<(NodeId, usize), Shapes>,
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
    /// What was found out about the bodies of the node that is being looked at.
    bodies: RefCell<BTreeMap<usize, Shapes>>,
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

    /// What is known about the values of a node's body, by its place among the node's subgraphs: each value as it is at
    /// its largest, over all turns of a loop. `None` for a branch that is never taken.
    pub fn body(&self, node: NodeId, place: usize) -> Option<&Shapes> {
        self.bodies.get(&(node, place))
    }

    /// Operators whose outputs' sizes are not known, with how many such outputs there are, bodies included. An operator
    /// of whose bodies nothing is known counts as one more.
    pub fn unknown(&self, graph: &Graph) -> BTreeMap<String, usize> {
        let mut unknown = BTreeMap::new();
        for (id, node) in graph.nodes() {
            let outputs = node.outputs.iter().flatten();
            let mut count = outputs.filter(|id| self.fact(**id).footprint().is_none()).count();
            let mut bodies = node.subgraphs().enumerate().peekable();
            let has_bodies = bodies.peek().is_some();
            let known: Vec<_> =
                bodies.filter_map(|(place, body)| Some((body, self.body(id, place)?))).collect();
            count += usize::from(has_bodies && known.is_empty());
            if count > 0 {
                *unknown.entry(node.op_type.clone()).or_default() += count;
            }
            for (body, shapes) in known {
                for (op, count) in shapes.unknown(body) {
                    *unknown.entry(op).or_default() += count;
                }
            }
        }
        unknown
    }

    /// Nothing at all about a graph.
    fn nothing(graph: &Graph) -> Shapes {
        Shapes { facts: vec![Fact::default(); graph.values().count()], ..Shapes::default() }
    }

    /// Takes over what another turn of the same body made larger, or left unknown.
    fn widen(&mut self, turn: Shapes) {
        for (fact, other) in self.facts.iter_mut().zip(turn.facts) {
            let smaller = |bytes: u64| other.bytes().is_none_or(|other| other > bytes);
            if fact.bytes().is_some_and(smaller) {
                *fact = other;
            }
        }
        for (body, shapes) in turn.bodies {
            match self.bodies.entry(body) {
                Entry::Occupied(mut known) => known.get_mut().widen(shapes),
                Entry::Vacant(unseen) => drop(unseen.insert(shapes)),
            }
        }
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
        for (id, node) in graph.nodes() {
            shapes.run(context, graph, (id, node), outer);
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

    fn run(
        &mut self,
        context: &Context<'_>,
        graph: &Graph,
        (id, node): (NodeId, &Node),
        outer: Option<&Scope<'_>>,
    ) {
        let Some(rule) = rule(&node.domain, &node.op_type) else { return };
        let opset = context.opsets.get(standard_domain(&node.domain)).copied().unwrap_or(1);
        let scope = Scope { context, graph, facts: &self.facts, outer, bodies: RefCell::default() };
        let inputs = node.inputs.iter().map(|id| id.map(|id| &self.facts[id.index()])).collect();
        let result = rule(&Call { node, inputs, opset, scope: &scope });
        let bodies = scope.bodies.into_inner();
        self.bodies.extend(bodies.into_iter().map(|(place, shapes)| ((id, place), shapes)));
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
    /// See [`Call::body`]; `place` is the body's among the subgraphs of the node.
    pub fn body(&self, graph: &Graph, place: usize, inputs: &[Fact]) -> Result<Vec<Fact>, String> {
        let context = self.context;
        let Some(left) = context.body_nodes_left.get().checked_sub(1 + graph.nodes().count()) else {
            self.remember(place, Shapes::nothing(graph));
            return Ok(vec![Fact::default(); graph.outputs.len()]);
        };
        context.body_nodes_left.set(left);
        let names = graph.inputs.iter().map(|id| graph[*id].name.as_str());
        let given: HashMap<&str, &Fact> = names.zip(inputs).collect();
        let shapes = Shapes::of(context, graph, |value| given.get(value.name.as_str()).copied(), Some(self));
        match shapes.conflicts.first() {
            Some(Conflict { node, op_type, problem }) => Err(format!("{node} ({op_type}): {problem}")),
            None => {
                let outputs = graph.outputs.iter().map(|id| shapes.facts[id.index()].clone()).collect();
                self.remember(place, Shapes { conflicts: Vec::new(), ..shapes });
                Ok(outputs)
            }
        }
    }

    fn remember(&self, place: usize, turn: Shapes) {
        match self.bodies.borrow_mut().entry(place) {
            Entry::Occupied(mut known) => known.get_mut().widen(turn),
            Entry::Vacant(unseen) => drop(unseen.insert(turn)),
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
