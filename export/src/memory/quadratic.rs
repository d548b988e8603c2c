//! Tensors that grow with the square of a sequence: what makes a long prompt or a large picture explode.

use std::collections::{BTreeMap, BTreeSet};

use super::TensorUse;
use crate::{
    onnx::{Dim, Graph, Model, NodeId, ValueId, ValueType},
    shapes::{Shapes, Sizes, infer},
};

/// A tensor whose bytes are proportional to the square of a sequence.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Quadratic {
    #[serde(flatten)]
    pub tensor: TensorUse,
    /// The size that it grows with; none where the graph has only numbers, and the tensor has the form of scores.
    pub symbol: Option<String>,
}

/// Growth is looked at where the symbol is this many times as large as asked for, so that what is added to it (a
/// prompt's tokens beside those of a picture) does not hide the square.
const FAR: usize = 64;
/// A tensor that grows by this much when a size doubles there has its square: fourfold, but for what is added.
const GROWTH: f64 = 3.5;
/// Sequences shorter than this are no trouble.
const SCORE_SIDE: usize = 256;

/// Every quadratic tensor of the graph under the given sizes, largest first. Tensors whose size is unknown are not in
/// the list.
///
/// Each of the graph's symbols is doubled alone. A tensor that then grows fourfold is quadratic in it: scores over h * w
/// tokens are, in h as in w, while a map [.., h, w] only doubles. A graph without symbols does not tell; there, it is
/// what enters or leaves a Softmax with two equal last sizes.
pub fn quadratic(model: &Model, shapes: &Shapes, sizes: &Sizes) -> Vec<Quadratic> {
    let graph = &model.graph;
    let symbols = symbols(graph);
    let found = match symbols.is_empty() {
        true => scores(graph, shapes).into_iter().map(|id| (id, None)).collect(),
        false => growing(model, shapes, sizes, &symbols),
    };
    let makers = makers(graph);
    let mut tensors: Vec<Quadratic> = found
        .into_iter()
        .filter_map(|(id, symbol)| {
            let node = makers.get(&id).map(|id| &graph[*id]);
            Some(Quadratic { tensor: TensorUse::of(graph, shapes, id, node)?, symbol })
        })
        .collect();
    tensors.sort_by_key(|found| std::cmp::Reverse(found.tensor.bytes));
    tensors
}

/// Names of the graph's sizes, sorted: those of its inputs.
pub fn symbols(graph: &Graph) -> BTreeSet<String> {
    let dims = graph.inputs.iter().filter_map(|id| match &graph[*id].ty {
        Some(ValueType::Tensor { shape: Some(dims), .. }) => Some(dims),
        _ => None,
    });
    let names = dims.flatten().filter_map(|dim| match dim {
        Dim::Symbol(name) => Some(name.clone()),
        _ => None,
    });
    names.collect()
}

fn makers(graph: &Graph) -> BTreeMap<ValueId, NodeId> {
    let outputs = graph.nodes().flat_map(|(id, node)| node.outputs.iter().flatten().map(move |v| (*v, id)));
    outputs.collect()
}

fn growing(
    model: &Model,
    shapes: &Shapes,
    sizes: &Sizes,
    symbols: &BTreeSet<String>,
) -> BTreeMap<ValueId, Option<String>> {
    let mut found = BTreeMap::new();
    for symbol in symbols {
        let grown = |times: usize| {
            let mut sizes = sizes.clone();
            let size = sizes.get_mut(symbol)?;
            *size = size.checked_mul(times)?;
            Some(infer(model, &sizes, &Default::default()))
        };
        let (Some(far), Some(farther)) = (grown(FAR), grown(2 * FAR)) else { continue };
        for (id, value) in model.graph.values().filter(|(id, _)| shapes.bytes(*id).is_some()) {
            let growth = far.bytes(id).filter(|b| *b > 0).zip(farther.bytes(id));
            let quadratic = growth.is_some_and(|(a, b)| b as f64 / a as f64 >= GROWTH);
            if quadratic && value.constant.is_none() {
                found.entry(id).or_insert_with(|| Some(symbol.clone()));
            }
        }
    }
    found
}

fn scores(graph: &Graph, shapes: &Shapes) -> BTreeSet<ValueId> {
    let softmaxes = graph.nodes().filter(|(_, node)| node.op_type == "Softmax");
    let around = softmaxes.flat_map(|(_, node)| node.inputs.iter().chain(&node.outputs).flatten().copied());
    let square = |id: &ValueId| match shapes.shape(*id).as_deref() {
        Some([.., rows, keys]) => rows == keys && *rows >= SCORE_SIDE,
        _ => false,
    };
    around.filter(square).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::{Builder, DType};

    fn found(model: &Model, sizes: &[(&str, usize)]) -> Vec<(String, Option<String>)> {
        let sizes: Sizes = sizes.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect();
        let shapes = infer(model, &sizes, &Default::default());
        let tensors = quadratic(model, &shapes, &sizes);
        tensors.into_iter().map(|found| (found.tensor.name, found.symbol)).collect()
    }

    /// softmax(x) with the given last two sizes; shapes are recorded.
    fn softmax(rows: Dim, keys: Dim) -> Model {
        let mut b = Builder::new("softmax");
        let dims = [Dim::Fixed(1), Dim::Fixed(2), rows, keys];
        let x = b.input("scores", DType::F16, &dims);
        let y = b.op("Softmax", &[x], &[]);
        b.output(y, "weights", &dims);
        b.finish()
    }

    #[test]
    fn a_square_grows_fourfold() {
        let tokens = || Dim::Symbol("tokens".to_owned());
        let square = found(&softmax(tokens(), tokens()), &[("tokens", 7)]);
        let symbol = Some("tokens".to_owned());
        assert_eq!(square, [("scores".to_owned(), symbol.clone()), ("weights".to_owned(), symbol)]);
        assert_eq!(found(&softmax(tokens(), Dim::Fixed(7)), &[("tokens", 7)]), []);
        let map = softmax(Dim::Symbol("h".to_owned()), Dim::Symbol("w".to_owned()));
        assert_eq!(found(&map, &[("h", 8), ("w", 8)]), []);
    }

    #[test]
    fn without_symbols_the_form_tells() {
        assert_eq!(found(&softmax(Dim::Fixed(512), Dim::Fixed(512)), &[]).len(), 2);
        assert_eq!(found(&softmax(Dim::Fixed(255), Dim::Fixed(255)), &[]), []);
        assert_eq!(found(&softmax(Dim::Fixed(512), Dim::Fixed(256)), &[]), []);
    }

    #[test]
    fn unbound_and_absurd_sizes_are_left_out() {
        let tokens = || Dim::Symbol("tokens".to_owned());
        assert_eq!(found(&softmax(tokens(), tokens()), &[]), []);
        assert_eq!(found(&softmax(tokens(), tokens()), &[("tokens", usize::MAX)]), []);
    }
}
