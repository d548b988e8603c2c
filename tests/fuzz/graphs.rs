//! Recipes of graphs, and the graphs that they make.

use proptest::prelude::*;
use viaduct_export::onnx::{DType, Dim, ValueType, model_bytes};

use crate::{
    draft::{Choices, Draft, RUNS, Size, fixed},
    operators::{OPERATORS, stretched},
    properties::{Depth, Trial},
};

/// Numbers that a graph is made of. Fewer and smaller ones make smaller graphs.
#[derive(Clone, Debug)]
pub struct Recipe {
    opset: i64,
    /// Sizes of the open dimensions.
    sizes: Vec<Size>,
    inputs: Vec<Vec<u16>>,
    /// One operator or pattern each.
    steps: Vec<Vec<u16>>,
    outputs: Vec<u16>,
}

pub fn recipe() -> impl Strategy<Value = Recipe> {
    use proptest::collection::vec;
    // Passes take open sizes to be at least 1.
    let size = prop_oneof![12 => 1..9usize, 2 => Just(16usize), 1 => Just(17usize)];
    let numbers = |len| vec(any::<u16>(), len);
    (
        11..=23i64,
        vec(proptest::array::uniform(size), 1..4),
        vec(numbers(6), 1..4),
        vec(numbers(10), 1..30),
        numbers(3),
    )
        .prop_map(|(opset, sizes, inputs, steps, outputs)| Recipe {
            opset,
            sizes,
            inputs,
            steps,
            outputs,
        })
}

impl Recipe {
    pub fn trial(&self) -> Trial {
        let mut draft = Draft::new(self.opset);
        for numbers in &self.inputs {
            draft.choices = Choices::of(numbers);
            self.input(&mut draft);
        }
        for numbers in &self.steps {
            draft.choices = Choices::of(numbers);
            let at = draft.choices.below(OPERATORS.len());
            OPERATORS[at](&mut draft);
        }
        for number in &self.outputs {
            draft.choices = Choices::of(&[*number]);
            output(&mut draft);
        }
        let bytes = model_bytes(&draft.model()).expect("a small model");
        let name = |i: usize| format!("s{i}");
        let sizes =
            |run: usize| self.sizes.iter().enumerate().map(|(i, size)| (name(i), size[run])).collect();
        Trial { bytes, sizes: (0..RUNS).map(sizes).collect(), depth: Depth::Numbers }
    }

    fn input(&self, draft: &mut Draft) {
        let dtype = draft.choices.of_list(&[DType::F32, DType::F32, DType::F32, DType::F16, DType::I64]);
        let rank = draft.choices.below(5);
        let dims = (0..rank).map(|axis| {
            if draft.choices.one_in(3) {
                let at = draft.choices.below(self.sizes.len());
                return (Dim::Symbol(format!("s{at}")), self.sizes[at]);
            }
            let sizes: &[usize] = if axis == 0 { &[1, 2, 1] } else { &[1, 2, 4, 8, 16, 32, 3] };
            let size = draft.choices.of_list(sizes);
            (Dim::Fixed(size), [size; RUNS])
        });
        let dims: Vec<(Dim, Size)> = dims.collect();
        draft.input(dtype, dims);
    }
}

/// Makes a value an output: bare, or, where it is no result of a node or of a type that cannot be read, behind a node.
fn output(draft: &mut Draft) {
    let Some(value) = draft.pick(|_| true) else { return };
    let made = draft
        .graph
        .nodes()
        .any(|(_, node)| node.outputs.iter().flatten().any(|id| draft.graph[*id].name == value.name));
    let value = match value.dtype {
        DType::F32 | DType::F16 | DType::I64 if made => Some(value),
        DType::F32 | DType::F16 | DType::I64 => draft.same("Identity", &value, &[]),
        _ => stretched(draft, &value),
    };
    let Some(value) = value else { return };
    let id = draft.graph.value(&value.name);
    let dim = |size: &Size| fixed(size).map_or(Dim::Unknown, Dim::Fixed);
    let shape = Some(value.shape.iter().map(dim).collect());
    draft.graph[id].ty = Some(ValueType::Tensor { dtype: value.dtype, shape });
    if !draft.graph.outputs.contains(&id) {
        draft.graph.outputs.push(id);
    }
}
