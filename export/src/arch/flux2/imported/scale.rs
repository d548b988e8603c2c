//! Where the factor 1/sqrt(d) of a decoder's attention is that was exported in stages.
//!
//! Exporters split it evenly over q and k (d^(-1/4) each), put it on one of them, or leave it to the stage of the
//! attention; and a graph may have been cut before it, so that the host must apply it. What the graphs multiply with is
//! read off them: behind q and k, and in front of the softmax.

use crate::{
    onnx::{Graph, Links, Model, Node, NodeId, ValueId},
    shapes::{Shapes, Sizes, infer},
};

/// How far a product of factors, which may be rounded to f16, may be from the expected one.
const TOLERANCE: f64 = 4e-3;
/// Operators that only move or round elements, by their first input.
const MOVES: &[&str] = &["Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"];
/// Operators whose result is looked at no further.
const LONGEST: usize = 64;

/// The factor that the host must multiply q with: 1, or 1/sqrt(d) where no graph has it.
///
/// `start` gives q and kt, `attention` takes `q_chunk` and kt; `d` is the length of a row of q.
pub fn host_factor(start: &Model, attention: &Model, sizes: &Sizes, d: usize) -> Result<f32, String> {
    let expected = 1.0 / (d as f64).sqrt();
    let (before, within) = (Looked::at(start, sizes), Looked::at(attention, sizes));
    let mut product = within.scores_factor()?;
    for name in ["q", "kt"] {
        let value = start.graph.find(name).ok_or_else(|| format!("there is no '{name}'"))?;
        product *= before.back(value)?.0;
    }
    let near = |factor: f64| (product / factor - 1.0).abs() <= TOLERANCE;
    match (near(expected), near(1.0)) {
        (true, _) => Ok(1.0),
        (false, true) => Ok(expected as f32),
        (false, false) => Err(format!(
            "the graphs scale its scores by {product:.6}; {expected:.6} (1/sqrt({d})) or 1 is expected"
        )),
    }
}

/// A graph and what is known about its values.
struct Looked<'a> {
    graph: &'a Graph,
    shapes: Shapes,
    links: Links,
}

impl<'a> Looked<'a> {
    fn at(model: &'a Model, sizes: &Sizes) -> Looked<'a> {
        let shapes = infer(model, sizes, &Default::default());
        Looked { graph: &model.graph, shapes, links: model.graph.links() }
    }

    fn producer(&self, value: ValueId) -> Option<(NodeId, &'a Node)> {
        let id = self.links.producer(value)?;
        Some((id, &self.graph[id]))
    }

    /// The number that a value of one element holds in every run: a constant, or computed from a shape.
    fn number(&self, value: ValueId) -> Result<Option<f64>, String> {
        let fact = self.shapes.fact(value);
        if fact.full_shape().is_some_and(|shape| shape.iter().any(|size| *size != 1)) {
            return Ok(None);
        }
        match fact.floats().as_deref() {
            Some([number]) if number.is_finite() && *number != 0.0 => Ok(Some(*number)),
            Some(_) => Err(format!("'{}' is no factor of a softmax's scores", self.graph[value].name)),
            None if fact.full_shape().is_some() => {
                Err(format!("what '{}' holds is not known before the run", self.graph[value].name))
            }
            None => Ok(None),
        }
    }

    /// Back over factors and moves: the product of the factors, and the value before them.
    fn back(&self, mut value: ValueId) -> Result<(f64, ValueId), String> {
        let mut product = 1.0;
        for _ in 0..LONGEST {
            let Some((_, node)) = self.producer(value) else { break };
            let operand = |i: usize| node.inputs.get(i).copied().flatten();
            value = match (node.op_type.as_str(), operand(0), operand(1)) {
                (op, Some(x), _) if MOVES.contains(&op) => x,
                ("Mul", Some(a), Some(b)) => match (self.number(a)?, self.number(b)?) {
                    (None, Some(factor)) => {
                        product *= factor;
                        a
                    }
                    (Some(factor), None) => {
                        product *= factor;
                        b
                    }
                    _ => break,
                },
                ("Div", Some(a), Some(b)) => match self.number(b)? {
                    Some(divisor) => {
                        product /= divisor;
                        a
                    }
                    None => break,
                },
                _ => break,
            };
        }
        Ok((product, value))
    }

    /// What the attention's own graph multiplies the scores with.
    fn scores_factor(&self) -> Result<f64, String> {
        let mut softmaxes = self.graph.nodes().filter(|(_, node)| node.op_type == "Softmax");
        let (Some((_, softmax)), None) = (softmaxes.next(), softmaxes.next()) else {
            return Err("its attention has not exactly one Softmax".to_owned());
        };
        let scores = softmax.inputs.first().copied().flatten().ok_or("its Softmax has no input")?;
        let (mut product, scores) = self.back(scores)?;
        let product_of = self.producer(scores).filter(|(_, node)| node.op_type == "MatMul");
        let (_, matmul) = product_of.ok_or("its Softmax is not over a product of two matrices")?;
        for (input, name) in matmul.inputs.iter().flatten().zip(["q_chunk", "kt"]) {
            let (factor, origin) = self.back(*input)?;
            if self.graph.find(name) != Some(origin) {
                return Err(format!(
                    "its scores are not the product of q_chunk and kt, but of '{}'",
                    self.graph[origin].name
                ));
            }
            product *= factor;
        }
        Ok(product)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::{Attribute, Builder, DType, Dim};

    const D: usize = 16;

    fn rows(columns: bool) -> [Dim; 4] {
        let (rows, d) = (Dim::Symbol("kv_rows".to_owned()), Dim::Fixed(D));
        let [a, b] = if columns { [d, rows] } else { [rows, d] };
        [Dim::Fixed(1), Dim::Fixed(1), a, b]
    }

    /// A first stage that multiplies q and kt.
    fn start(q_factor: Option<f32>, k_factor: Option<f32>) -> Model {
        let mut b = Builder::new("start");
        for (name, columns, factor) in [("q", false, q_factor), ("kt", true, k_factor)] {
            let mut x = b.input(&format!("{name}_in"), DType::F32, &rows(columns));
            x = b.op("Relu", &[x], &[]);
            if let Some(factor) = factor {
                let factor = b.scalar(DType::F32, factor);
                x = b.mul(factor, x);
            }
            let x = b.op("Identity", &[x], &[]);
            b.output(x, name, &rows(columns));
        }
        b.finish()
    }

    /// The attention with an operation on its scores.
    fn attention(on_scores: Option<(&str, f32)>) -> Model {
        let mut b = Builder::new("attention");
        let q = b.input("q_chunk", DType::F32, &rows(false));
        let kt = b.input("kt", DType::F32, &rows(true));
        let mut scores = b.matmul(q, kt);
        if let Some((op, number)) = on_scores {
            let number = b.scalar(DType::F32, number);
            scores = b.op(op, &[scores, number], &[]);
        }
        let y = b.op("Softmax", &[scores], &[("axis", Attribute::Int(-1))]);
        b.output(y, "attn_chunk", &rows(false));
        b.finish()
    }

    fn factor(start: &Model, attention: &Model) -> Result<f32, String> {
        host_factor(start, attention, &Sizes::from([("kv_rows".to_owned(), 6)]), D)
    }

    #[test]
    fn the_factor_is_found_wherever_it_is() {
        let (half, whole) = (Some(0.5), Some(0.25));
        for (start, attention) in [
            (start(half, half), attention(None)),
            (start(whole, None), attention(None)),
            (start(None, whole), attention(None)),
            (start(None, None), attention(Some(("Mul", 0.25)))),
            (start(None, None), attention(Some(("Div", 4.0)))),
            // Rounded to f16 on the way.
            (start(Some(0.2502), None), attention(None)),
        ] {
            assert_eq!(factor(&start, &attention), Ok(1.0));
        }
        assert_eq!(factor(&start(None, None), &attention(None)), Ok(0.25));
    }

    #[test]
    fn other_factors_are_refused() {
        for (start, attention) in [
            (start(Some(0.5), Some(0.5)), attention(Some(("Mul", 0.25)))),
            (start(Some(0.5), None), attention(None)),
            (start(Some(0.3), Some(0.3)), attention(None)),
        ] {
            let problem = factor(&start, &attention).unwrap_err();
            assert!(problem.contains("0.250000 (1/sqrt(16)) or 1 is expected"), "{problem}");
        }
        assert!(factor(&start(Some(0.0), None), &attention(None)).unwrap_err().contains("no factor"));
    }

    #[test]
    fn a_factor_that_the_run_decides_is_refused() {
        let mut b = Builder::new("start");
        let given = b.input("scale", DType::F32, &[Dim::Fixed(1)]);
        for (name, columns) in [("q", false), ("kt", true)] {
            let x = b.input(&format!("{name}_in"), DType::F32, &rows(columns));
            let x = b.mul(x, given);
            b.output(x, name, &rows(columns));
        }
        let problem = factor(&b.finish(), &attention(None)).unwrap_err();
        assert_eq!(problem, "what 'scale' holds is not known before the run");
    }

    #[test]
    fn scores_of_something_else_are_refused() {
        let mut b = Builder::new("attention");
        let q = b.input("q_chunk", DType::F32, &rows(false));
        let kt = b.input("kt", DType::F32, &rows(true));
        let shifted = b.add(q, q);
        let scores = b.matmul(shifted, kt);
        let y = b.op("Softmax", &[scores], &[("axis", Attribute::Int(-1))]);
        b.output(y, "attn_chunk", &rows(false));
        let problem = factor(&start(None, None), &b.finish()).unwrap_err();
        assert!(problem.contains("not the product of q_chunk and kt"), "{problem}");
    }
}
