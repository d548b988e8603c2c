//! The one attention over all pixels in an autoencoder's graph, and values of fixed layouts around it.
//!
//! It is MatMul, Softmax, MatMul or com.microsoft MultiHeadAttention, with one head, and the pixels are one axis or two. In
//! its place come f32 `q` (scaled) and `v` [1,h,w,C], `kt` [1,C,h,w], and what is to be made of them, [1,h,w,C].

use super::{
    Refusal, Replacement, View,
    fold_shapes::sizes,
    part::{Origin, Origins},
};
use crate::onnx::{Attribute, DType, Model, Node, NodeId, ValueId};

const NO_CONV: &str = "it is no autoencoder: it has no Conv";
const NO_ATTENTION: &str = "it has no attention of one head over pixels";
const SEVERAL: &str = "it has several attentions";
const HEADS: &str = "the attention has several heads";
const MASKED: &str = "something stands between the scores and their Softmax";
const ROWS: &str = "the rows of the attention are not the pixels of what it is added to";
const OPSET: &str = "the model's opset is below 13";
const BODIES: &str = "nodes have bodies";

/// Nodes between the attention and the addition of its result that are followed.
const MAX_NODES: usize = 16;

/// Attention of one head as it stands in a graph.
struct Attention {
    /// The node that makes `output`.
    root: NodeId,
    /// [1, .., rows, C].
    query: ValueId,
    /// [1, .., C, rows] if transposed, else [1, .., rows, C].
    key: ValueId,
    transposed: bool,
    value: ValueId,
    output: ValueId,
    /// What the query is still to be multiplied by.
    scale: Option<f32>,
}

fn refusal(place: String, why: &'static str) -> Refusal {
    Refusal { place, why: why.into() }
}

fn attention(view: &View<'_>) -> Result<Attention, Refusal> {
    let graph = view.graph;
    let whole = |why| refusal(graph.name.clone(), why);
    if view.opset() < 13 {
        return Err(whole(OPSET));
    }
    if graph.nodes().any(|(_, node)| node.subgraphs().next().is_some()) {
        return Err(whole(BODIES));
    }
    if view.nodes("Conv").next().is_none() {
        return Err(whole(NO_CONV));
    }
    let written = view.nodes("Softmax").filter_map(|(id, node)| Some((id, written(view, node)?)));
    let fused = graph.nodes().filter(|(_, node)| node.is_contrib("MultiHeadAttention"));
    let mut found: Vec<(NodeId, Result<Attention, &'static str>)> =
        written.chain(fused.filter_map(|(id, node)| Some((id, fused_one(view, id, node)?)))).collect();
    match (found.pop(), found.is_empty()) {
        (None, _) => Err(whole(NO_ATTENTION)),
        (Some((id, _)), false) => Err(refusal(graph.label(id), SEVERAL)),
        (Some((id, one)), true) => one.map_err(|why| refusal(graph.label(id), why)),
    }
}

/// The attention around a Softmax, if a product of two computed values follows it.
fn written(view: &View<'_>, softmax: &Node) -> Option<Result<Attention, &'static str>> {
    let mut probabilities = softmax.output(0)?;
    let (root, product) = loop {
        let (id, node) = view.sole_use(probabilities)?;
        if !node.is("Cast") {
            break (id, node);
        }
        probabilities = node.output(0)?;
    };
    let (first, value) = (product.input(0)?, product.input(1)?);
    if !product.is("MatMul") || first != probabilities || view.constant(value).is_some() {
        return None;
    }
    let last = softmax.int("axis").unwrap_or(-1);
    let rank = view.facts().rank(softmax.input(0)?)? as i64;
    let along_keys = last == -1 || last == rank - 1;
    let mut scale = None;
    let mut scores = softmax.input(0)?;
    let (_, product) = loop {
        let (id, node) = view.producer(scores)?;
        let factor = match node.op_type.as_str() {
            "MatMul" => break (id, node),
            "Cast" => None,
            "Mul" => view.with_scalar(node),
            "Div" => node.input(0).zip(node.input(1).and_then(|by| Some(1.0 / view.scalar(by)?))),
            _ => return Some(Err(MASKED)),
        };
        scores = match (factor, node.is("Cast")) {
            (Some((scores, factor)), _) => {
                scale = Some(scale.unwrap_or(1.0) * factor as f32);
                scores
            }
            (None, true) => node.input(0)?,
            (None, false) => return Some(Err(MASKED)),
        };
    };
    let (query, key, output) = (product.input(0)?, product.input(1)?, view.graph[root].output(0)?);
    let attention = Attention { root, query, key, transposed: true, value, output, scale };
    Some(if along_keys { Ok(attention) } else { Err(ROWS) })
}

fn fused_one(view: &View<'_>, root: NodeId, node: &Node) -> Option<Result<Attention, &'static str>> {
    let (query, key, value) = (node.input(0)?, node.input(1)?, node.input(2)?);
    let output = node.output(0)?;
    if node.inputs.iter().skip(3).flatten().next().is_some() || node.int("unidirectional") == Some(1) {
        return Some(Err(MASKED));
    }
    if node.int("num_heads") != Some(1) {
        return Some(Err(HEADS));
    }
    let width = view.facts().fixed_dim(query, -1)?;
    let scale = node.float("scale").filter(|scale| *scale != 0.0);
    let scale = Some(scale.unwrap_or(1.0 / (width as f32).sqrt()));
    Some(Ok(Attention { root, query, key, transposed: false, value, output, scale }))
}

/// A model whose attention is between values of the stages' shapes.
pub struct Prepared {
    pub model: Model,
    pub residual: ValueId,
    pub q: ValueId,
    pub kt: ValueId,
    pub v: ValueId,
    pub attended: ValueId,
    pub channels: usize,
}

/// How the rows of attention lie in a value.
#[derive(Clone, Copy)]
struct Rows {
    rank: usize,
    /// Height and width are two axes.
    apart: bool,
}

pub fn prepared(model: &Model) -> Result<Prepared, Refusal> {
    let view = View::of(model);
    let attention = attention(&view)?;
    let here = |why| refusal(view.graph.label(attention.root), why);
    let residual = residual(&view, &attention).ok_or_else(|| here(ROWS))?;
    let channels = view.facts().fixed_dim(attention.query, -1).ok_or_else(|| here(ROWS))?;
    let pixels = [2, 3].map(|axis| view.facts().sizes(residual, axis));
    let [Some(height), Some(width)] = pixels else { return Err(here(ROWS)) };
    let rows = |value: ValueId, transposed: bool| {
        rows(&view, value, transposed, [&height, &width], channels).ok_or_else(|| here(ROWS))
    };
    let laid = [
        rows(attention.query, false)?,
        rows(attention.key, attention.transposed)?,
        rows(attention.value, false)?,
        rows(attention.output, false)?,
    ];
    let dtype = view.facts().dtype(attention.output).ok_or_else(|| here(ROWS))?;
    if !matches!(dtype, DType::F32 | DType::F16) {
        return Err(here(ROWS));
    }
    Ok(insert(model.clone(), &attention, residual, channels, dtype, laid))
}

/// What the attention's result is added to: [1,C,h,w].
fn residual(view: &View<'_>, attention: &Attention) -> Option<ValueId> {
    let origins = Origins::of(view);
    let mut value = attention.output;
    for _ in 0..MAX_NODES {
        let (_, node) = view.sole_use(value)?;
        if node.is("Add") {
            let other = node.inputs.iter().flatten().find(|input| **input != value)?;
            if origins.get(*other) != Origin::Constant {
                return (view.facts().rank(*other)? == 4).then_some(*other);
            }
        }
        value = node.output(0)?;
    }
    None
}

fn rows(
    view: &View<'_>,
    value: ValueId,
    transposed: bool,
    [height, width]: [&Vec<usize>; 2],
    channels: usize,
) -> Option<Rows> {
    let sizes = sizes(view, value)?;
    let product: Vec<usize> =
        height.iter().zip(width).map(|(h, w)| h.checked_mul(*w)).collect::<Option<_>>()?;
    let channels = vec![channels; height.len()];
    let tails: [(&[&Vec<usize>], bool); 2] = match transposed {
        true => [(&[&channels, &product], false), (&[&channels, height, width], true)],
        false => [(&[&product, &channels], false), (&[height, width, &channels], true)],
    };
    tails.iter().find_map(|(tail, apart)| {
        let leading = sizes.len().checked_sub(tail.len())?;
        let ones = sizes[..leading].iter().flatten().all(|size| *size == 1);
        let same = sizes[leading..].iter().zip(*tail).all(|(size, tail)| size == *tail);
        (ones && same).then_some(Rows { rank: sizes.len(), apart: *apart })
    })
}

/// Height and width of the pixels, lists of one, read at run time. In the stages they need not be.
struct Sides([ValueId; 2]);

impl Sides {
    /// Those of [1,C,h,w].
    fn of(new: &mut Replacement<'_>, picture: ValueId) -> Sides {
        let shape = new.op("Shape", &[picture], &[]);
        Sides([2, 3].map(|axis| {
            let axis = new.ints(&[axis]);
            new.op("Gather", &[shape, axis], &[("axis", Attribute::Int(0))])
        }))
    }

    /// A shape, with height and width where it has none.
    fn shape(&self, new: &mut Replacement<'_>, shape: &[Option<i64>]) -> ValueId {
        if let Some(fixed) = shape.iter().copied().collect::<Option<Vec<i64>>>() {
            return new.ints(&fixed);
        }
        let mut sides = self.0.iter().copied();
        let mut parts = Vec::new();
        for size in shape {
            parts.extend(match size {
                Some(size) => Some(new.ints(&[*size])),
                None => sides.next(),
            });
        }
        new.op("Concat", &parts, &[("axis", Attribute::Int(0))])
    }

    fn reshape(&self, new: &mut Replacement<'_>, x: ValueId, shape: &[Option<i64>]) -> ValueId {
        let shape = self.shape(new, shape);
        new.op("Reshape", &[x, shape], &[])
    }
}

fn cast(new: &mut Replacement<'_>, x: ValueId, from: DType, to: DType) -> ValueId {
    if from == to {
        return x;
    }
    new.cast(x, to)
}

/// Puts a placeholder, between values of the stages' layouts, in the place of the attention.
fn insert(
    mut model: Model,
    attention: &Attention,
    residual: ValueId,
    channels: usize,
    dtype: DType,
    [of_q, of_k, of_v, of_output]: [Rows; 4],
) -> Prepared {
    let c = Some(channels as i64);
    let mut replacement = Replacement::of(&mut model.graph, attention.root);
    let new = &mut replacement;
    let sides = Sides::of(new, residual);
    let spread = |new: &mut Replacement<'_>, x: ValueId, of: Rows| {
        let x = if of.apart { x } else { sides.reshape(new, x, &[Some(1), Some(-1), c]) };
        let x = sides.reshape(new, x, &[Some(1), None, None, c]);
        cast(new, x, dtype, DType::F32)
    };
    let mut q = spread(new, attention.query, of_q);
    if let Some(scale) = attention.scale {
        let scale = new.scalar(DType::F32, scale);
        q = new.op("Mul", &[q, scale], &[]);
    }
    let kt = if attention.transposed {
        let k = attention.key;
        let k = if of_k.apart { k } else { sides.reshape(new, k, &[Some(1), c, Some(-1)]) };
        let k = sides.reshape(new, k, &[Some(1), c, None, None]);
        cast(new, k, dtype, DType::F32)
    } else {
        let k = spread(new, attention.key, of_k);
        new.op("Transpose", &[k], &[("perm", Attribute::Ints(vec![0, 3, 1, 2]))])
    };
    let v = spread(new, attention.value, of_v);
    let attended = new.op("Identity", &[q], &[]);
    let back = cast(new, attended, DType::F32, dtype);
    let axes = 2 + usize::from(of_output.apart);
    let ones = vec![Some(1); of_output.rank.saturating_sub(axes)];
    let apart = sides.shape(new, &[&ones[..], &[None, None, c]].concat());
    if of_output.apart {
        new.op_into("Reshape", &[back, apart], &[], attention.output);
    } else {
        let rows = new.op("Reshape", &[back, apart], &[]);
        let flat = sides.shape(new, &[&ones[..], &[Some(-1), c]].concat());
        new.op_into("Reshape", &[rows, flat], &[], attention.output);
    }
    replacement.finish();
    Prepared { model, residual, q, kt, v, attended, channels }
}
