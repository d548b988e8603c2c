//! One use of an operator, and what rules ask about it.

use super::{Dims, Fact, infer::Scope};
use crate::onnx::{Attribute, DType, Graph, Node};

/// One use of an operator, as its rule sees it.
pub(super) struct Call<'a> {
    pub node: &'a Node,
    /// Facts about the inputs, in order; an absent optional input is `None`.
    pub inputs: Vec<Option<&'a Fact>>,
    /// Version of the operator set that the node's domain has in the model; 1 where it states none.
    pub opset: i64,
    /// Where the node stands; see [`Call::body`].
    pub scope: &'a Scope<'a>,
}

/// A list of integers that is an attribute or an input, depending on the operator's version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Setting {
    /// Neither is there: the operator's default applies.
    Absent,
    /// An input whose contents are not known.
    Unknown,
    Known(Vec<i64>),
}

impl<'a> Call<'a> {
    /// The input, if the node has it.
    pub fn input(&self, index: usize) -> Option<&'a Fact> {
        self.inputs.get(index).copied().flatten()
    }

    pub fn required(&self, index: usize) -> Result<&'a Fact, String> {
        self.input(index).ok_or_else(|| format!("input {index} is missing"))
    }

    pub fn dtype(&self, index: usize) -> Option<DType> {
        self.input(index)?.dtype
    }

    /// Sizes of an input; `None` if it is absent or its rank is not known.
    pub fn dims(&self, index: usize) -> Option<&'a [Option<usize>]> {
        self.input(index)?.shape.as_deref()
    }

    /// All elements of an input, if each is a known integer.
    pub fn ints(&self, index: usize) -> Option<Vec<i64>> {
        self.input(index)?.ints()
    }

    /// The integer that an input of one element holds.
    pub fn int(&self, index: usize) -> Option<i64> {
        match self.ints(index)?[..] {
            [value] => Some(value),
            _ => None,
        }
    }

    pub fn attr_int(&self, name: &str, default: i64) -> i64 {
        self.node.int(name).unwrap_or(default)
    }

    pub fn attr_ints(&self, name: &str) -> Option<&'a [i64]> {
        match self.node.attribute(name)? {
            Attribute::Ints(values) => Some(values),
            _ => None,
        }
    }

    pub fn attr_str(&self, name: &str) -> Option<&'a str> {
        match self.node.attribute(name)? {
            Attribute::String(text) => std::str::from_utf8(text).ok(),
            _ => None,
        }
    }

    /// An element type that an attribute names by its number.
    pub fn attr_dtype(&self, name: &str) -> Option<DType> {
        let number = i32::try_from(self.node.int(name)?).ok()?;
        (number > 0).then(|| DType::from_onnx(number))
    }

    pub fn attr_graph(&self, name: &str) -> Result<&'a Graph, String> {
        match self.node.attribute(name) {
            Some(Attribute::Graph(graph)) => Ok(graph),
            _ => Err(format!("attribute '{name}' is no graph")),
        }
    }

    /// Integers of an input or, where the node has no such input, of an attribute.
    pub fn setting(&self, input: usize, attribute: &str) -> Setting {
        match (self.input(input), self.attr_ints(attribute)) {
            (Some(fact), _) => fact.ints().map_or(Setting::Unknown, Setting::Known),
            (None, Some(values)) => Setting::Known(values.to_vec()),
            (None, None) => Setting::Absent,
        }
    }

    /// Type and sizes of an input, without its contents.
    pub fn same_as(&self, index: usize) -> Result<Fact, String> {
        let input = self.required(index)?;
        Ok(Fact::partial(input.dtype, input.shape.clone()))
    }

    /// Infers the body of a control-flow operator and returns the facts about its outputs. `inputs` are the facts
    /// about the body's inputs, in order; values of the graphs around it are known to it by name. `Err` is the first
    /// contradiction in the body.
    pub fn body(&self, graph: &Graph, inputs: &[Fact]) -> Result<Vec<Fact>, String> {
        let place = self.node.subgraphs().position(|body| std::ptr::eq(body, graph));
        let place = place.ok_or_else(|| "a body of another node".to_owned())?;
        self.scope.body(graph, place, inputs)
    }
}

/// An axis of a tensor of that rank, counted from the end where it is negative.
pub(super) fn axis(axis: i64, rank: usize) -> Result<usize, String> {
    let counted = if axis < 0 { axis.checked_add_unsigned(rank as u64) } else { Some(axis) };
    let counted = counted.and_then(|axis| usize::try_from(axis).ok());
    counted.filter(|axis| *axis < rank).ok_or_else(|| format!("axis {axis} of a tensor of rank {rank}"))
}

/// Several axes, each different.
pub(super) fn axes(list: &[i64], rank: usize) -> Result<Vec<usize>, String> {
    let mut seen = vec![false; rank];
    let mut place = |value: &i64| {
        let at = axis(*value, rank)?;
        match std::mem::replace(&mut seen[at], true) {
            true => Err(format!("axis {value} is given twice")),
            false => Ok(at),
        }
    };
    list.iter().map(&mut place).collect()
}

/// Product of sizes; `Ok(None)` if one is not known. A zero makes it zero whatever the others are.
pub(super) fn product(dims: &[Option<usize>]) -> Result<Option<usize>, String> {
    if dims.contains(&Some(0)) {
        return Ok(Some(0));
    }
    let known: Option<Vec<usize>> = dims.iter().copied().collect();
    let count =
        |dims: Vec<usize>| super::fact::count(&dims).ok_or("a size does not fit into 64 bits".to_owned());
    known.map(count).transpose()
}

/// One size that two statements agree on; `Err` if they do not.
pub(super) fn agree(a: Option<usize>, b: Option<usize>) -> Result<Option<usize>, String> {
    match (a, b) {
        (Some(a), Some(b)) if a != b => Err(format!("sizes {a} and {b} should be equal")),
        _ => Ok(a.or(b)),
    }
}

/// Sizes of which nothing but their number is known.
pub(super) fn unknown_dims(rank: usize) -> Dims {
    vec![None; rank]
}
