//! Parts of a graph as models of their own, which run one after another.
//!
//! What one part makes and a later one uses crosses between them: an output of the first and an input of the other, under
//! its name, with its type and shape. A size that is no named dimension gets a name: `2*h` where it is a multiple of one.
//! What can be had for little does not cross. Constants go to every part that uses them, by reference to the same bytes;
//! what is computed from constants alone, or from integers and shapes that the part has anyway, is computed again.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::{Refusal, View, bind_sizes::symbols, drop_dead, merge_duplicates::CHANCE};
use crate::onnx::{DType, Dim, Model, Node, NodeId, Tensor, ValueId, ValueType};

const UNKNOWN: &str = "it would cross, and its type or shape is not known";

/// A stage of a model that was split.
#[derive(Clone, Debug)]
pub struct Part {
    pub name: String,
    pub model: Model,
}

/// What it takes to have a value in another part than the one that makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It is a graph input.
    Given,
    /// A constant, or computed from constants alone.
    Constant,
    /// Integers that are computed from integers and shapes.
    Integers,
    /// Anything else: it has to cross.
    Computed,
}

/// Where every value of a graph comes from.
pub struct Origins(HashMap<ValueId, Origin>);

impl Origins {
    pub fn of(view: &View<'_>) -> Origins {
        let graph = view.graph;
        let mut origins = Origins(HashMap::new());
        for (id, value) in graph.values() {
            if graph.inputs.contains(&id) {
                origins.0.insert(id, Origin::Given);
            } else if value.constant.is_some() {
                origins.0.insert(id, Origin::Constant);
            }
        }
        for (_, node) in graph.nodes() {
            let origin = origins.made_by(view, node);
            origins.0.extend(node.outputs.iter().flatten().map(|output| (*output, origin)));
        }
        origins
    }

    pub fn get(&self, value: ValueId) -> Origin {
        self.0.get(&value).copied().unwrap_or(Origin::Computed)
    }

    /// Whether a node has results that cannot be had again for little.
    pub fn computes(&self, node: &Node) -> bool {
        node.outputs.iter().flatten().any(|output| self.get(*output) == Origin::Computed)
    }

    fn made_by(&self, view: &View<'_>, node: &Node) -> Origin {
        if node.subgraphs().next().is_some() || CHANCE.contains(&node.op_type.as_str()) {
            return Origin::Computed;
        }
        let mut inputs = node.inputs.iter().flatten();
        if inputs.clone().all(|input| self.get(*input) == Origin::Constant) {
            return Origin::Constant;
        }
        let integers = |value: &ValueId| view.facts().dtype(*value).is_some_and(DType::is_integer);
        let reads_shapes = node.is("Shape") || node.is("Size");
        let little = reads_shapes
            || inputs.all(|input| match self.get(*input) {
                Origin::Given => integers(input),
                origin => origin != Origin::Computed,
            });
        if little && node.outputs.iter().flatten().all(integers) {
            Origin::Integers
        } else {
            Origin::Computed
        }
    }
}

/// Nodes that a value depends on, the one that makes it included.
pub fn ancestors(view: &View<'_>, value: ValueId) -> HashSet<NodeId> {
    let mut found = HashSet::new();
    let mut open = vec![value];
    while let Some(value) = open.pop() {
        let Some((id, node)) = view.producer(value) else { continue };
        if found.insert(id) {
            open.extend(view.graph.used_by(node));
        }
    }
    found
}

/// Makes a model of each part. `part_of` assigns every node to one; no node may use what a later part makes. A part gets
/// the graph inputs that it uses and the graph outputs that it makes, in their order, before what crosses.
pub fn parts(
    view: &View<'_>,
    part_of: &HashMap<NodeId, usize>,
    names: &[String],
) -> Result<Vec<Part>, Refusal> {
    let origins = Origins::of(view);
    let cut = Cut { view, part_of: early(view, &origins, part_of), origins };
    let contents: Vec<Content> = (0..names.len()).map(|part| cut.content(part)).collect();
    let types = cut.types(&contents)?;
    let used: HashSet<ValueId> = contents.iter().flat_map(|content| &content.given).copied().collect();
    let mut parts = Vec::new();
    for (index, (name, mut content)) in names.iter().zip(contents.clone()).enumerate() {
        if index == 0 {
            // Callers feed inputs by name, used or not.
            content.given.extend(view.graph.inputs.iter().filter(|id| !used.contains(id)));
        }
        let model = cut.model(name, index, &content, &contents, &types);
        parts.push(Part { name: name.clone(), model });
    }
    Ok(parts)
}

/// Where nodes go: what can be had for little goes where it can be first, so that no part takes a large value for it alone.
fn early(view: &View<'_>, origins: &Origins, part_of: &HashMap<NodeId, usize>) -> HashMap<NodeId, usize> {
    let mut early: HashMap<NodeId, usize> = HashMap::new();
    for (id, node) in view.graph.nodes() {
        let Some(part) = part_of.get(&id) else { continue };
        let first = || {
            let made = view.graph.used_by(node).filter_map(|value| view.producer(value));
            made.filter_map(|(id, _)| early.get(&id)).copied().max().unwrap_or(0)
        };
        let part = if origins.computes(node) { *part } else { first() };
        early.insert(id, part);
    }
    early
}

/// What a part consists of besides constants.
#[derive(Clone, Debug, Default)]
struct Content {
    nodes: HashSet<NodeId>,
    given: HashSet<ValueId>,
    /// By id, which is the order in which most graphs name their values.
    crossing: BTreeSet<ValueId>,
    known: HashMap<ValueId, Tensor>,
}

struct Cut<'a> {
    view: &'a View<'a>,
    part_of: HashMap<NodeId, usize>,
    origins: Origins,
}

impl Cut<'_> {
    fn part(&self, value: ValueId) -> Option<usize> {
        self.part_of.get(&self.view.producer(value)?.0).copied()
    }

    fn content(&self, part: usize) -> Content {
        let view = self.view;
        let own = |id: &NodeId| self.part_of.get(id) == Some(&part);
        let mut content = Content::default();
        let mut little = Vec::new();
        for (id, node) in view.graph.nodes().filter(|(id, _)| own(id)) {
            content.nodes.insert(id);
            for value in view.graph.used_by(node).filter(|value| self.part(*value) != Some(part)) {
                match self.origins.get(value) {
                    Origin::Given => drop(content.given.insert(value)),
                    Origin::Computed => drop(content.crossing.insert(value)),
                    Origin::Constant | Origin::Integers => little.push(value),
                }
            }
        }
        for value in little {
            let mut again = Content::default();
            if self.again(value, part, &content, &mut again) {
                content.nodes.extend(again.nodes);
                content.given.extend(again.given);
                content.known.extend(again.known);
            } else {
                content.crossing.insert(value);
            }
        }
        content
    }

    /// Collects what computes a value of an earlier part once more, if that needs nothing that the part does not have.
    fn again(&self, value: ValueId, part: usize, has: &Content, again: &mut Content) -> bool {
        let mut open = vec![value];
        while let Some(value) = open.pop() {
            let there = has.crossing.contains(&value)
                || has.given.contains(&value)
                || has.known.contains_key(&value)
                || again.known.contains_key(&value)
                || self.part(value) == Some(part);
            if there || self.view.constant(value).is_some() {
                continue;
            }
            let origin = self.origins.get(value);
            let integers = self.view.facts().dtype(value).is_some_and(DType::is_integer);
            match self.view.producer(value) {
                None if origin == Origin::Given && integers => drop(again.given.insert(value)),
                Some(_) if origin == Origin::Computed => return false,
                Some((id, node)) => match self.view.facts().constant(value).filter(|_| integers) {
                    Some(tensor) => drop(again.known.insert(value, tensor)),
                    None if again.nodes.insert(id) => open.extend(node.inputs.iter().flatten()),
                    None => {}
                },
                None => return false,
            }
        }
        true
    }

    /// Types of all values that cross. Equal sizes have one name.
    fn types(&self, contents: &[Content]) -> Result<HashMap<ValueId, ValueType>, Refusal> {
        let mut names: HashMap<Vec<usize>, String> = HashMap::new();
        let mut types = HashMap::new();
        for value in contents.iter().flat_map(|content| &content.crossing) {
            let unknown = || Refusal { place: self.view.graph[*value].name.clone(), why: UNKNOWN.into() };
            let ty = self.ty(*value, &mut names).ok_or_else(unknown)?;
            types.insert(*value, ty);
        }
        Ok(types)
    }

    fn ty(&self, value: ValueId, names: &mut HashMap<Vec<usize>, String>) -> Option<ValueType> {
        let facts = self.view.facts();
        let dims = facts.shape(value)?.into_iter().enumerate().map(|(axis, dim)| {
            if dim != Dim::Unknown {
                return Some(dim);
            }
            let sizes = facts.sizes(value, axis as i64)?;
            let name = names.entry(sizes).or_insert_with_key(|sizes| {
                facts.multiple(sizes).unwrap_or_else(|| self.size_name(value, axis))
            });
            Some(Dim::Symbol(name.clone()))
        });
        Some(ValueType::Tensor { dtype: facts.dtype(value)?, shape: Some(dims.collect::<Option<_>>()?) })
    }

    /// A name for a size that no input has.
    fn size_name(&self, value: ValueId, axis: usize) -> String {
        let mut name = format!("{}_{axis}", self.view.graph[value].name);
        while symbols(self.view.graph).contains(name.as_str()) {
            name.push('_');
        }
        name
    }

    fn model(
        &self,
        name: &str,
        part: usize,
        content: &Content,
        contents: &[Content],
        types: &HashMap<ValueId, ValueType>,
    ) -> Model {
        let whole = self.view.graph;
        let mut model = self.view.model.clone();
        let graph = &mut model.graph;
        name.clone_into(&mut graph.name);
        let others = whole.nodes().map(|(id, _)| id).filter(|id| !content.nodes.contains(id));
        graph.remove_nodes(&others.collect());
        let again =
            |value: &ValueId| self.view.producer(*value).is_some_and(|(id, _)| content.nodes.contains(&id));
        for (value, tensor) in content.known.iter().filter(|(value, _)| !again(value)) {
            graph[*value].constant = Some(tensor.clone());
        }
        let given = whole.inputs.iter().filter(|id| content.given.contains(id));
        graph.inputs = given.chain(&content.crossing).copied().collect();
        // An output that no node makes is an input or a constant: any part could give it.
        let made = |id: &&ValueId| self.part(**id).unwrap_or(0) == part;
        graph.outputs = whole.outputs.iter().filter(made).copied().collect();
        let wanted: BTreeSet<ValueId> = contents.iter().flat_map(|later| &later.crossing).copied().collect();
        for value in wanted.into_iter().filter(|value| self.part(*value) == Some(part)) {
            if !graph.outputs.contains(&value) {
                graph.outputs.push(value);
            }
        }
        for (value, ty) in types {
            if graph.inputs.contains(value) || !whole.outputs.contains(value) {
                graph[*value].ty = Some(ty.clone());
            }
        }
        // What was a default of an input that went elsewhere is no constant here.
        for id in whole.inputs.iter().filter(|id| !content.given.contains(id)) {
            graph[*id].constant = None;
        }
        drop_dead::sweep(&mut model);
        model
    }
}
