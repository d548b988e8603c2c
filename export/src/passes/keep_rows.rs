//! Attention over the pixels of a picture, without reading the picture's size to get back to it.
//!
//! Before: [1, C, H, W] -> [1, C, H*W] -> ... attention ... -> [1, C, H*W] -> Reshape to [1, C, H, W], whose H and W are
//! read at run time. After: the query's rows keep two axes all the way: q is [.., H, W, C], the scores
//! [.., H, W, H*W], and the result is [1, C, H, W] by itself. Keys and values are flat as before; what queries share with
//! them is flattened there, which needs no size.
//!
//! Products are computed per row of the picture, so that sums may be rounded otherwise. Refused: rows that go through an
//! operator that is not known to treat them one by one.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
};

use super::{
    Outcome, Pass, PassError, Replacement, Settings, View,
    fold_shapes::{group_norm, reshape, sizes},
    reshape_plan::{Plan, Sizes, kept_axis, plan},
};
use crate::onnx::{Attribute, Model, Node, NodeId, ValueId};

pub const PASS: Pass = Pass {
    name: "keep_rows",
    what: "pixels flattened for attention and unflattened by sizes read at run time -> two axes all along",
    why: "the sizes are computed on the CPU, between launches on the GPU",
    run,
};

/// Operators between the flattening and its end that are followed.
const MAX_NODES: usize = 256;

/// Places in one graph.
const MAX_PLACES: usize = 64;

const ELEMENTWISE: &[&str] = &[
    "Abs",
    "Add",
    "Cast",
    "Clip",
    "Div",
    "Exp",
    "Max",
    "Min",
    "Mul",
    "Neg",
    "Pow",
    "Reciprocal",
    "Relu",
    "Sigmoid",
    "Sqrt",
    "Sub",
    "Tanh",
    "Where",
];

const OPSET: &str = "the model's opset is below 13";
const UNKNOWN: &str = "the shapes around it are not known";
const LONG: &str = "the way back to the flattening is too long";

type Why = Cow<'static, str>;

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    loop {
        let (found, refused) = find(&View::of(model));
        outcome.refused = refused;
        let Some(found) = found.filter(|_| outcome.applied < MAX_PLACES) else { return Ok(outcome) };
        rewrite(model, found);
        outcome.applied += 1;
    }
}

/// The nodes that get another form, in execution order, and the Reshape that goes.
struct Found {
    root: NodeId,
    output: ValueId,
    result: Input,
    nodes: Vec<(NodeId, Split)>,
}

/// What is used in a new node.
#[derive(Clone, Copy)]
enum Input {
    /// As it was.
    Old(ValueId),
    /// The form with two axes of a value.
    Split(ValueId),
    /// With an axis of size 1 at that place.
    Unsqueezed(ValueId, i64),
}

impl Input {
    /// The value, where it is not its form with two axes that is used.
    fn flat(self) -> Option<ValueId> {
        match self {
            Input::Old(value) | Input::Unsqueezed(value, _) => Some(value),
            Input::Split(_) => None,
        }
    }
}

/// The new form of a node's result.
struct Split {
    old: ValueId,
    form: Form,
    /// The old result is made of the new one, for those who still use it.
    flatten: Option<Plan>,
}

enum Form {
    Node { node: Node, inputs: Vec<Option<Input>> },
    Reshape { x: Input, plan: Plan },
    GroupNorm { x: ValueId, norm: Node, groups: usize, channels: usize },
}

impl Form {
    /// Values that it uses as they were.
    fn flat_inputs(&self) -> Vec<ValueId> {
        match self {
            Form::Node { inputs, .. } => inputs.iter().flatten().filter_map(|input| input.flat()).collect(),
            Form::Reshape { x, .. } => x.flat().into_iter().collect(),
            Form::GroupNorm { x, norm, .. } => {
                let parameters = norm.inputs.iter().skip(1).flatten();
                std::iter::once(x).chain(parameters).copied().collect()
            }
        }
    }
}

fn find(view: &View<'_>) -> (Option<Found>, Vec<super::Refusal>) {
    let mut outcome = Outcome::default();
    for (root, node) in view.nodes("Reshape") {
        let (Some(z), Some(target), Some(output)) = (node.input(0), node.input(1), node.output(0)) else {
            continue;
        };
        if view.producer(target).is_none() || view.facts().constant(target).is_some() {
            continue;
        }
        let (Some(from), Some(to)) = (sizes(view, z), sizes(view, output)) else { continue };
        let Some(axis) = split_axis(&from, &to).filter(|_| plan(&from, &to).is_err()) else { continue };
        if view.opset() < 13 {
            outcome.refuse(view.graph.label(root), OPSET);
            continue;
        }
        let mut splitter = Splitter {
            view,
            rows: [to[axis].clone(), to[axis + 1].clone()],
            made: HashMap::new(),
            nodes: Vec::new(),
            left: MAX_NODES,
        };
        let found = splitter.split(z, axis).and_then(|result| Ok((result, splitter.finish(root)?)));
        match found {
            Ok((result, nodes)) => return (Some(Found { root, output, result, nodes }), outcome.refused),
            Err(why) => outcome.refuse(view.graph.label(root), why),
        }
    }
    (None, outcome.refused)
}

/// The axis that becomes two, where all others stay.
fn split_axis(from: &[Sizes], to: &[Sizes]) -> Option<usize> {
    let axis = from.iter().zip(to).position(|(from, to)| from != to)?;
    let rest = from.get(axis + 1..)? == to.get(axis + 2..)?;
    let products: Option<Vec<usize>> =
        to[axis].iter().zip(&to[axis + 1]).map(|(a, b)| a.checked_mul(*b)).collect();
    (rest && products.as_ref() == Some(&from[axis])).then_some(axis)
}

/// Follows the rows back to where they were flattened.
struct Splitter<'a> {
    view: &'a View<'a>,
    rows: [Sizes; 2],
    /// The axis at which a value was split.
    made: HashMap<ValueId, (usize, Input)>,
    nodes: Vec<(NodeId, Split)>,
    /// Values that may still be looked at.
    left: usize,
}

impl Splitter<'_> {
    fn split(&mut self, value: ValueId, axis: usize) -> Result<Input, Why> {
        if let Some((at, input)) = self.made.get(&value) {
            return if *at == axis { Ok(*input) } else { Err("two axes of a value hold the rows".into()) };
        }
        self.left = self.left.checked_sub(1).ok_or(LONG)?;
        let (id, node) = self.view.producer(value).ok_or("the rows were flat from the start")?;
        let old = sizes(self.view, value).ok_or(UNKNOWN)?;
        let both = self.rows[0].iter().zip(&self.rows[1]).map(|(a, b)| a.checked_mul(*b));
        if both.collect::<Option<Sizes>>().as_ref() != old.get(axis) {
            return Err(UNKNOWN.into());
        }
        let wanted = self.halves(&old, axis);
        let input = match self.flattened(node, &wanted) {
            Some(input) => input,
            None => {
                let form = self.form(node, axis, &old, &wanted)?;
                self.nodes.push((id, Split { old: value, form, flatten: None }));
                Input::Split(value)
            }
        };
        self.made.insert(value, (axis, input));
        Ok(input)
    }

    /// The sizes with two for the axis.
    fn halves(&self, sizes: &[Sizes], axis: usize) -> Vec<Sizes> {
        [&sizes[..axis], &self.rows, &sizes[axis + 1..]].concat()
    }

    /// What the node flattens, if that has the wanted shape.
    fn flattened(&self, node: &Node, wanted: &[Sizes]) -> Option<Input> {
        let x = node.input(0).filter(|_| node.is("Reshape") || node.is("Flatten"))?;
        (sizes(self.view, x)? == wanted).then_some(Input::Old(x))
    }

    fn form(&mut self, node: &Node, axis: usize, old: &[Sizes], wanted: &[Sizes]) -> Result<Form, Why> {
        let rank = old.len();
        let x = node.input(0).ok_or(UNKNOWN)?;
        if node.is("Reshape") {
            return match self.group_norm(x, wanted) {
                Some(form) => Ok(form),
                None => self.reshape(x, axis, old, wanted),
            };
        }
        let mut node = node.clone();
        let inputs = if node.is("Transpose") {
            let perm = node.ints("perm").map_or_else(|| (0..rank as i64).rev().collect(), <[i64]>::to_vec);
            let from =
                perm.get(axis).and_then(|from| usize::try_from(*from).ok()).filter(|from| *from < rank);
            let from = from.ok_or(UNKNOWN)?;
            let at = from as i64;
            let moved = perm.iter().flat_map(|p| match *p {
                p if p == at => vec![at, at + 1],
                p => vec![p + i64::from(p > at)],
            });
            node.attributes = vec![("perm".to_owned(), Attribute::Ints(moved.collect()))];
            vec![Some(self.split(x, from)?)]
        } else if node.is("MatMul") {
            self.product(&node, axis, rank)?
        } else if node.is("Softmax") {
            let along = node.int("axis").unwrap_or(-1);
            let along = if along < 0 { along + rank as i64 } else { along };
            if along == axis as i64 {
                return Err("Softmax goes over the rows".into());
            }
            let along = along + i64::from(along > axis as i64);
            node.attributes = vec![("axis".to_owned(), Attribute::Int(along))];
            vec![Some(self.split(x, axis)?)]
        } else if ELEMENTWISE.iter().any(|op| node.is(op)) {
            self.elementwise(&node, axis, old)?
        } else {
            return Err(format!("the rows go through {}", node.op_type).into());
        };
        node.name = String::new();
        node.outputs = Vec::new();
        Ok(Form::Node { node, inputs })
    }

    /// Rows of the first factor stay rows; a stack of second factors gets an axis that is stretched over the new one.
    fn product(&mut self, node: &Node, axis: usize, rank: usize) -> Result<Vec<Option<Input>>, Why> {
        let [Some(a), Some(b)] = node.inputs[..] else { return Err(UNKNOWN.into()) };
        let (of_a, of_b) = (self.view.facts().rank(a), self.view.facts().rank(b).ok_or(UNKNOWN)?);
        if of_a != Some(rank) || axis + 2 != rank || of_b < 2 {
            return Err("the rows are not those of the first factor of a MatMul".into());
        }
        let b = if of_b == 2 { Input::Old(b) } else { Input::Unsqueezed(b, of_b as i64 - 2) };
        Ok(vec![Some(self.split(a, axis)?), Some(b)])
    }

    fn elementwise(&mut self, node: &Node, axis: usize, old: &[Sizes]) -> Result<Vec<Option<Input>>, Why> {
        let mut inputs = Vec::new();
        for input in &node.inputs {
            let Some(value) = *input else {
                inputs.push(None);
                continue;
            };
            let own = sizes(self.view, value).ok_or(UNKNOWN)?;
            let at = (axis + own.len()).checked_sub(old.len());
            inputs.push(Some(match at {
                None => Input::Old(value),
                Some(at) if own[at] == old[axis] => self.split(value, at)?,
                // What is stretched along the rows is stretched along both axes.
                Some(at) if own[at].iter().any(|size| *size != 1) => return Err(UNKNOWN.into()),
                Some(0) => Input::Old(value),
                Some(at) => Input::Unsqueezed(value, at as i64),
            }));
        }
        Ok(inputs)
    }

    /// Reshape of an InstanceNormalization of groups of what has the wanted shape.
    fn group_norm(&self, normed: ValueId, wanted: &[Sizes]) -> Option<Form> {
        let (_, norm) = self.view.made_by(normed, "InstanceNormalization")?;
        let grouped = norm.input(0)?;
        let x = self.view.made_by(grouped, "Reshape")?.1.input(0)?;
        let shape = sizes(self.view, grouped)?;
        let fits =
            wanted.len() == 4 && shape.len() == 3 && sizes(self.view, x)? == wanted && shape[0] == wanted[0];
        let (groups, channels) =
            (self.view.facts().fixed_dim(grouped, 1)?, self.view.facts().fixed_dim(x, 1)?);
        let whole = groups > 0 && channels > 0 && channels % groups == 0;
        (fits && whole).then(|| Form::GroupNorm { x, norm: norm.clone(), groups, channels })
    }

    fn reshape(&mut self, x: ValueId, axis: usize, old: &[Sizes], wanted: &[Sizes]) -> Result<Form, Why> {
        let from = sizes(self.view, x).ok_or(UNKNOWN)?;
        let at = kept_axis(&from, old, axis).ok_or("a Reshape mixes the rows with others")?;
        let plan =
            plan(&self.halves(&from, at), wanted).map_err(|_| "a Reshape mixes the rows with others")?;
        Ok(Form::Reshape { x: self.split(x, at)?, plan })
    }

    /// The nodes, with those results marked that are still used flat: by nodes outside, or by new forms, as a stack of
    /// second factors is.
    fn finish(mut self, root: NodeId) -> Result<Vec<(NodeId, Split)>, Why> {
        let mut nodes = std::mem::take(&mut self.nodes);
        let mut inside: HashSet<NodeId> = nodes.iter().map(|node| node.0).collect();
        inside.insert(root);
        let mut flat = self.view.graph.captured();
        flat.extend(&self.view.graph.outputs);
        flat.extend(nodes.iter().flat_map(|(_, split)| split.form.flat_inputs()));
        for (_, split) in &mut nodes {
            let used = flat.contains(&split.old)
                || self.view.uses(split.old).iter().any(|user| !inside.contains(user));
            split.flatten = if used { Some(self.flat(split.old).ok_or(UNKNOWN)?) } else { None };
        }
        Ok(nodes)
    }

    /// How the value is made of its form with two axes.
    fn flat(&self, value: ValueId) -> Option<Plan> {
        let target = sizes(self.view, value)?;
        let (axis, _) = self.made.get(&value)?;
        plan(&self.halves(&target, *axis), &target).ok()
    }
}

fn rewrite(model: &mut Model, found: Found) {
    let mut split: HashMap<ValueId, ValueId> = HashMap::new();
    for (id, Split { old, form, flatten }) in found.nodes {
        let mut new = Replacement::of(&mut model.graph, id);
        let value = match form {
            Form::Node { node, inputs } => {
                let inputs: Vec<Option<ValueId>> = inputs
                    .into_iter()
                    .map(|input| input.map(|input| used(&mut new, &split, input)))
                    .collect();
                let value = new.value();
                new.push(Node { inputs, outputs: vec![Some(value)], ..node });
                value
            }
            Form::Reshape { x, plan } => {
                let x = used(&mut new, &split, x);
                let value = new.value();
                reshape(&mut new, x, plan, value, false);
                value
            }
            Form::GroupNorm { x, norm, groups, channels } => {
                let value = new.value();
                group_norm(&mut new, x, norm, [groups, channels, 4], value);
                value
            }
        };
        if let Some(plan) = flatten {
            reshape(&mut new, value, plan, old, false);
        }
        split.insert(old, value);
        new.finish();
    }
    let mut new = Replacement::of(&mut model.graph, found.root);
    let result = used(&mut new, &split, found.result);
    new.op_into("Identity", &[result], &[], found.output);
    new.finish();
}

fn used(new: &mut Replacement<'_>, split: &HashMap<ValueId, ValueId>, input: Input) -> ValueId {
    match input {
        Input::Old(value) => value,
        Input::Split(value) => split.get(&value).copied().unwrap_or(value),
        Input::Unsqueezed(value, axis) => {
            let axes = new.ints(&[axis]);
            new.op("Unsqueeze", &[value, axes], &[])
        }
    }
}
