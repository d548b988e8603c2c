//! What holds of a graph's values for all sizes that its open dimensions may take.
//!
//! Shapes are inferred under a handful of very different sizes. What is the same under all of them (a shape's size, an
//! integer computed from shapes) is taken to be constant, and a size that always equals a named dimension is that
//! dimension. Whether a size equals a number is left open where it may. Sizes that contradict the graph (odd ones, where
//! it halves) are left out.

use std::collections::{BTreeMap, BTreeSet};

use half::{bf16, f16};
use rayon::prelude::*;

use super::bind_sizes::symbols;
use crate::{
    onnx::{DType, Dim, Model, Node, Tensor, ValueId},
    shapes::{Elements, Fact, Shapes, Sizes, infer, infer_hiding},
};

/// Sizes of the open dimensions, which are taken to be at least 1. Row by row a sample; the first dimension takes the first
/// number, the second the second, and so on, around. Half of them are multiples of 16, as most models want them. But for
/// the smallest, no two dimensions are equal in one. The last are larger than what graphs compare sizes with.
const SAMPLES: [[usize; 8]; 7] = [
    [32, 48, 80, 112, 176, 208, 272, 304],
    [1, 2, 3, 5, 7, 11, 13, 17],
    [64, 16, 96, 32, 160, 128, 224, 192],
    [67, 35, 99, 131, 163, 195, 227, 259],
    [4096, 1024, 2048, 512, 3072, 768, 1536, 256],
    [100_003, 49_999, 200_003, 75_703, 151_121, 87_701, 33_119, 12_703],
    [1; 8],
];

/// What is known about the values of one graph.
pub struct Facts {
    samples: Vec<(Sizes, Shapes)>,
}

impl Facts {
    pub fn of(model: &Model) -> Facts {
        let symbols = symbols(&model.graph);
        let rows = if symbols.is_empty() { &SAMPLES[..1] } else { &SAMPLES[..] };
        let sizes = |row: &[usize; 8]| -> Sizes {
            // Beyond eight dimensions the numbers go around, far enough apart to stay different.
            let size = |i: usize| row[i % row.len()] + 16 * 10_007 * (i / row.len());
            symbols.iter().enumerate().map(|(i, name)| ((*name).to_owned(), size(i))).collect()
        };
        // Initializers that callers may replace are no constants: nothing but their types and shapes is known.
        let graph = &model.graph;
        let defaults = graph.inputs.iter().filter(|id| graph[**id].constant.is_some());
        let contents: BTreeMap<String, Fact> =
            defaults.map(|id| (graph[*id].name.clone(), Fact::default())).collect();
        let inferred = |row| {
            let sizes = sizes(row);
            let shapes = infer(model, &sizes, &contents);
            (sizes, shapes)
        };
        let mut samples: Vec<(Sizes, Shapes)> = rows.par_iter().map(inferred).collect();
        let fewest = samples.iter().map(|(_, shapes)| shapes.conflicts.len()).min().unwrap_or(0);
        let fits = |sample: &&(Sizes, Shapes)| sample.1.conflicts.len() == fewest;
        // One sample that fits says nothing about other sizes, and ones fit nearly everything. With all, what contradicts
        // itself stays unknown.
        let telling = &samples[..samples.len().min(SAMPLES.len() - 1)];
        if rows.len() == 1 || telling.iter().filter(fits).count() > 1 {
            samples.retain(|sample| fits(&sample));
        }
        let all_of = |size| -> Sizes { symbols.iter().map(|name| ((*name).to_owned(), size)).collect() };
        let least = || [0, 1].map(|size| infer(model, &all_of(size), &contents)).into();
        let undecided = undecided(model, &samples, least);
        if !undecided.is_empty() {
            let decided_later = |(sizes, shapes): &mut (Sizes, Shapes)| {
                *shapes = infer_hiding(model, sizes, &contents, &undecided);
            };
            samples.par_iter_mut().for_each(decided_later);
        }
        Facts { samples }
    }

    /// The element type.
    pub fn dtype(&self, value: ValueId) -> Option<DType> {
        self.all(|_, fact| fact.dtype, value)
    }

    pub fn rank(&self, value: ValueId) -> Option<usize> {
        self.all(|_, fact| fact.rank(), value)
    }

    /// The shape, as far as it is known. `None` if not even the rank is.
    pub fn shape(&self, value: ValueId) -> Option<Vec<Dim>> {
        (0..self.rank(value)?).map(|axis| Some(self.dim(value, axis))).collect()
    }

    /// The shape if it is the same whatever the open dimensions are.
    pub fn fixed_shape(&self, value: ValueId) -> Option<Vec<usize>> {
        self.all(|_, fact| fact.full_shape(), value)
    }

    /// The size along an axis; a negative axis counts from the end.
    pub fn fixed_dim(&self, value: ValueId, axis: i64) -> Option<usize> {
        self.all(|_, fact| size(fact, axis), value)
    }

    /// The size along an axis: a number, a named dimension, or unknown.
    pub fn dim(&self, value: ValueId, axis: usize) -> Dim {
        if let Some(size) = self.fixed_dim(value, axis as i64) {
            return Dim::Fixed(size);
        }
        let Some(sizes) = self.sizes(value, axis as i64) else { return Dim::Unknown };
        let same = |name: &&String| {
            self.samples.iter().zip(&sizes).all(|((bound, _), size)| bound.get(*name) == Some(size))
        };
        let names = self.samples.first().into_iter().flat_map(|(bound, _)| bound.keys());
        names.into_iter().find(same).map_or(Dim::Unknown, |name| Dim::Symbol(name.clone()))
    }

    /// The size along an axis in every sample; equal lists mean equal sizes.
    pub fn sizes(&self, value: ValueId, axis: i64) -> Option<Vec<usize>> {
        self.each(|fact| size(fact, axis), value)
    }

    /// Whether two values have the same shape, whatever the open dimensions are.
    pub fn same_shape(&self, a: ValueId, b: ValueId) -> bool {
        let shapes = |value| self.each(Fact::full_shape, value);
        shapes(a).is_some_and(|shape| Some(shape) == shapes(b))
    }

    /// The value as a constant, if it is small, known and the same whatever the open dimensions are.
    pub fn constant(&self, value: ValueId) -> Option<Tensor> {
        let fact = self.all(|_, fact| Some(fact.clone()), value)?;
        tensor(fact.dtype?, &fact.full_shape()?, fact.elements.as_ref()?)
    }

    /// The one element of a constant.
    pub fn scalar(&self, value: ValueId) -> Option<f64> {
        let elements = self.all(|_, fact| fact.elements.clone(), value)?;
        match elements {
            Elements::Ints(values) => one(&values).map(|v| v as f64),
            Elements::Floats(values) => one(&values),
        }
    }

    /// All integers of a small constant.
    pub fn ints(&self, value: ValueId) -> Option<Vec<i64>> {
        self.all(|_, fact| fact.ints(), value)
    }

    /// All elements of a small constant of any type of numbers.
    pub fn floats(&self, value: ValueId) -> Option<Vec<f64>> {
        match self.all(|_, fact| fact.elements.clone(), value)? {
            Elements::Floats(values) => values.into_iter().collect(),
            Elements::Ints(values) => {
                values.into_iter().map(|value| value.map(|value| value as f64)).collect()
            }
        }
    }

    /// One integer of a small tensor, in every sample.
    pub fn int_at(&self, value: ValueId, index: usize) -> Option<Vec<i64>> {
        self.each(|fact| *fact.partial_ints()?.get(index)?, value)
    }

    /// Open dimensions that integers, one in every sample, are computed from: the one that they are, are a multiple of, or
    /// differ from by a constant; else all.
    pub fn symbols_of(&self, ints: &[i64]) -> Vec<String> {
        let Some((sizes, _)) = self.samples.first() else { return Vec::new() };
        let like = |name: &&String| {
            let bound =
                self.samples.iter().map(|(sizes, _)| sizes.get(*name).map_or(0, |size| *size as i128));
            let pairs: Vec<(i128, i128)> =
                bound.zip(ints).map(|(size, int)| (size, i128::from(*int))).collect();
            let Some((size, int)) = pairs.first() else { return false };
            pairs.iter().all(|(s, i)| s * int == size * i) || pairs.iter().all(|(s, i)| s - i == size - int)
        };
        match sizes.keys().find(like) {
            Some(name) => vec![name.clone()],
            None => sizes.keys().cloned().collect(),
        }
    }

    /// A name for sizes that are a multiple of a named dimension: `2*h`.
    pub fn multiple(&self, sizes: &[usize]) -> Option<String> {
        let (first, _) = self.samples.first()?;
        let factor = |name: &String| {
            let mut factors = self.samples.iter().zip(sizes).map(|((bound, _), size)| {
                let of = bound.get(name).filter(|of| **of > 0 && size.is_multiple_of(**of))?;
                Some(size / of)
            });
            let one = factors.next()??;
            factors.all(|factor| factor == Some(one)).then_some(one)
        };
        first.keys().find_map(|name| Some(format!("{}*{name}", factor(name)?)))
    }

    /// Why little is known about a graph that does not hold for most sizes of its open dimensions: a node, and those.
    pub fn contradiction(&self) -> Option<String> {
        let (sizes, shapes) = self.samples.first()?;
        let conflict = shapes.conflicts.first().filter(|_| !sizes.is_empty())?;
        let names: Vec<String> = sizes.keys().map(|name| format!("--dim {name}=N")).collect();
        Some(format!(
            "the graph holds for some sizes only (see '{}'): bind them with {}",
            conflict.node,
            names.join(" ")
        ))
    }

    fn each<T>(&self, ask: impl Fn(&Fact) -> Option<T>, value: ValueId) -> Option<Vec<T>> {
        self.samples.iter().map(|(_, shapes)| ask(shapes.known(value)?)).collect()
    }

    /// What is the same in all samples.
    fn all<T: PartialEq>(&self, ask: impl Fn(&Sizes, &Fact) -> Option<T>, value: ValueId) -> Option<T> {
        let mut answers = self.samples.iter().map(|(sizes, shapes)| ask(sizes, shapes.known(value)?));
        let first = answers.next()??;
        answers.all(|answer| answer.as_ref() == Some(&first)).then_some(first)
    }
}

/// Operators that turn different numbers into one: what they give may be the same in all samples and differ between them.
const DECIDING: &[&str] = &[
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "Mod",
    "Min",
    "Max",
    "Clip",
    "Sign",
    "Floor",
    "Ceil",
    "Round",
    "Cast",
    "ReduceMin",
    "ReduceMax",
    "ArgMin",
    "ArgMax",
    "TopK",
];

/// Results that are the same in all samples, but need not be for sizes between them, beyond them, or down to `least`.
fn undecided(
    model: &Model,
    samples: &[(Sizes, Shapes)],
    least: impl Fn() -> Vec<Shapes>,
) -> BTreeSet<String> {
    let graph = &model.graph;
    let mut undecided = BTreeSet::new();
    if samples.len() < 2 {
        return undecided;
    }
    let mut equal = Vec::new();
    for (_, node) in graph.nodes() {
        if node.is("Equal") {
            equal.push(node);
        } else if DECIDING.iter().any(|op| node.is(op)) && decides(samples, node)
            || node.is("Div") && rounds(samples, node)
        {
            undecided.extend(node.outputs.iter().flatten().map(|output| graph[*output].name.clone()));
        }
    }
    if !equal.is_empty() {
        let fits = |least: &Shapes| {
            samples.iter().all(|(_, shapes)| least.conflicts.len() <= shapes.conflicts.len())
        };
        let least: Vec<Shapes> = least().into_iter().filter(fits).collect();
        let all: Vec<&Shapes> = samples.iter().map(|(_, shapes)| shapes).chain(&least).collect();
        let open = equal.into_iter().filter(|node| passes_zero(&all, node)).filter_map(|node| node.output(0));
        undecided.extend(open.map(|output| graph[output].name.clone()));
    }
    undecided
}

/// Whether an operand differs between samples where an element of a result does not.
fn decides(samples: &[(Sizes, Shapes)], node: &Node) -> bool {
    let contents = |value: &ValueId| -> Vec<&Elements> {
        samples.iter().filter_map(|(_, shapes)| shapes.known(*value)?.elements.as_ref()).collect()
    };
    let varies = |value: &ValueId| contents(value).windows(2).any(|pair| pair[0] != pair[1]);
    let decided = |value: &ValueId| {
        let contents = contents(value);
        contents.len() == samples.len() && shares_an_element(&contents)
    };
    node.inputs.iter().flatten().any(varies) && node.outputs.iter().flatten().any(decided)
}

/// Whether an element is known and the same in all lists.
fn shares_an_element(lists: &[&Elements]) -> bool {
    let (Some(first), rest) = (lists.first(), lists.get(1..).unwrap_or_default()) else { return false };
    (0..first.len()).any(|at| rest.iter().all(|list| list.share(first, at)))
}

/// Whether a division of integers has a remainder in a sample, so that its result says little of other sizes.
fn rounds(samples: &[(Sizes, Shapes)], node: &Node) -> bool {
    let [Some(a), Some(b)] = node.inputs[..] else { return false };
    let remainder = |(_, shapes): &(Sizes, Shapes)| {
        let (a, b) = (shapes.known(a)?.partial_ints()?, shapes.known(b)?.partial_ints()?);
        Some((0..a.len().max(b.len())).any(|i| match (stretched(a, i), stretched(b, i)) {
            (Some(a), Some(b)) => a.checked_rem(b).is_none_or(|rest| rest != 0),
            _ => false,
        }))
    };
    decides(samples, node) && samples.iter().any(|sample| remainder(sample).unwrap_or(false))
}

/// Whether what is compared may become equal, or stop being equal, for sizes that are no sample.
fn passes_zero(all: &[&Shapes], node: &Node) -> bool {
    let [Some(a), Some(b)] = node.inputs[..] else { return false };
    let differences: Vec<Vec<Option<i128>>> =
        all.iter().filter_map(|shapes| differences(shapes.known(a)?, shapes.known(b)?)).collect();
    let count = differences.iter().map(Vec::len).max().unwrap_or(0);
    (0..count).any(|at| {
        let known = || differences.iter().filter_map(|list| *list.get(at)?);
        known().min() < known().max() && known().any(|d| d <= 0) && known().any(|d| d >= 0)
    })
}

/// a - b, element by element, of lists of integers or one integer and a list.
fn differences(a: &Fact, b: &Fact) -> Option<Vec<Option<i128>>> {
    let (a, b) = (a.partial_ints()?, b.partial_ints()?);
    let difference = |i| Some(i128::from(stretched(a, i)?) - i128::from(stretched(b, i)?));
    Some((0..a.len().max(b.len())).map(difference).collect())
}

/// An element of a list, or that of a list of one.
fn stretched(list: &[Option<i64>], index: usize) -> Option<i64> {
    *list.get(if list.len() == 1 { 0 } else { index })?
}

fn size(fact: &Fact, axis: i64) -> Option<usize> {
    let shape = fact.shape.as_ref()?;
    let axis = if axis < 0 { axis + shape.len() as i64 } else { axis };
    *shape.get(usize::try_from(axis).ok()?)?
}

fn one<T: Copy>(values: &[Option<T>]) -> Option<T> {
    match values {
        [value] => *value,
        _ => None,
    }
}

/// The tensor of fully known contents.
fn tensor(dtype: DType, shape: &[usize], elements: &Elements) -> Option<Tensor> {
    let bytes: Vec<u8> = match elements {
        Elements::Ints(values) => {
            let width = dtype.size()?;
            let mut bytes = Vec::with_capacity(values.len() * width);
            for value in values {
                bytes.extend_from_slice(&(*value)?.to_le_bytes()[..width]);
            }
            bytes
        }
        Elements::Floats(values) => {
            let values: Vec<f64> = values.iter().copied().collect::<Option<_>>()?;
            match dtype {
                DType::F64 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                DType::F32 => values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect(),
                DType::F16 => values.iter().flat_map(|v| f16::from_f64(*v).to_le_bytes()).collect(),
                DType::BF16 => values.iter().flat_map(|v| bf16::from_f64(*v).to_le_bytes()).collect(),
                _ => return None,
            }
        }
    };
    Some(Tensor::inline(dtype, shape, bytes))
}
