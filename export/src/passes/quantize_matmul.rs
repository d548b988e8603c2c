//! Matrix products with a constant matrix, with the matrix stored in blocks of 8 or 4 bits.
//!
//! Before: `MatMul(x, W)` with W [K, N], `MatMul(x, Transpose(W))` with W [N, K], `Gemm(x, W, bias)` with or without
//! `transB`. After: com.microsoft `MatMulNBits(x, codes, scales[, zero points][, bias])`. A weight that several nodes use is
//! stored once. The scales have the type of x, as the kernels ask for. Rules about names look at the weight's and the
//! node's: where an exporter has transposed a weight, only the node's still tells what it is. A rule may ask for another
//! number of bits.
//!
//! Refused: weights that a rule leaves out, that are not float matrices, or that hold what no scale fits; products whose
//! first operand is the constant; operands whose type is not known to be f32 or f16; a Gemm that scales or transposes more
//! than its weight.

use std::collections::HashMap;

use super::{Linears, Outcome, Pass, PassError, Replacement, View};
use crate::{
    onnx::{Attribute, DType, Model, Node, NodeId, Tensor, ValueId},
    quant::{self, BlockFormat, Fitting, QuantError},
};

pub const Q8: Pass = Pass {
    name: "quantize_matmul_q8",
    what: "MatMul or Gemm with a constant matrix -> MatMulNBits, 8 bits",
    why: "weights are read from memory for every token: a quarter of the bytes, and the only matrix units WebGPU reaches",
    run: |model, settings| run(model, &settings.linears, 8),
};

pub const Q4: Pass = Pass {
    name: "quantize_matmul_q4",
    what: "MatMul or Gemm with a constant matrix -> MatMulNBits, 4 bits",
    why: "an eighth of the bytes, where memory is what is short",
    run: |model, settings| run(model, &settings.linears, 4),
};

/// Why a product is left alone that the user does not want to be quantised.
pub const LEFT_OUT: &str = "a rule about names leaves it out";

/// A product that can be quantised.
struct Product {
    node: NodeId,
    x: ValueId,
    /// Type of x and of the result.
    dtype: DType,
    weight: Weight,
    bits: u8,
    bias: Option<ValueId>,
    output: ValueId,
}

/// A constant matrix, and whether it is [K, N] and has to be turned.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Weight {
    value: ValueId,
    turned: bool,
}

fn run(model: &mut Model, linears: &Linears, bits: u8) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    let products = products(&View::of(model), linears, bits, &mut outcome);
    let mut stored: HashMap<(Weight, BlockFormat), Vec<ValueId>> = HashMap::new();
    for product in &products {
        let format = BlockFormat {
            bits: product.bits,
            block: linears.block,
            symmetric: product.bits == 8 || linears.symmetric,
            scale: product.dtype,
        };
        let key = (product.weight, format);
        let name = model.graph[product.weight.value].name.clone();
        let tensor = model.graph[product.weight.value].constant.clone();
        let Some((tensor, [n, k])) = tensor.and_then(|tensor| matrix(tensor, product.weight.turned)) else {
            continue;
        };
        let mut new = Replacement::of(&mut model.graph, product.node);
        let parts = match stored.get(&key) {
            Some(parts) => parts.clone(),
            None => {
                let tensor = if product.weight.turned { quant::transpose(tensor) } else { Ok(tensor) };
                let tensors = tensor
                    .and_then(|tensor| quant::quantized_initializers(tensor, &format, Fitting::Nearest));
                let tensors = tensors.map_err(|source| failed(&name, source))?;
                let names = ["codes", "scales", "zero_points"].iter().zip(tensors);
                names.map(|(part, tensor)| new.named_constant(&format!("{name}.{part}"), tensor)).collect()
            }
        };
        stored.entry(key).or_insert_with(|| parts.clone());
        new.push(product.node(&parts, n, k, &format, linears.accuracy_level));
        new.finish();
        outcome.applied += 1;
    }
    if outcome.applied > 0 {
        model.import("com.microsoft", 1);
    }
    Ok(outcome)
}

impl Product {
    fn node(&self, parts: &[ValueId], n: usize, k: usize, format: &BlockFormat, accuracy_level: i64) -> Node {
        let mut inputs = vec![Some(self.x)];
        inputs.extend(parts.iter().copied().map(Some));
        if let Some(bias) = self.bias {
            // Zero points and group indices come before it.
            inputs.resize(5, None);
            inputs.push(Some(bias));
        }
        let int = |name: &str, value: i64| (name.to_owned(), Attribute::Int(value));
        Node {
            op_type: "MatMulNBits".to_owned(),
            domain: "com.microsoft".to_owned(),
            inputs,
            outputs: vec![Some(self.output)],
            attributes: vec![
                int("K", k as i64),
                int("N", n as i64),
                int("bits", i64::from(format.bits)),
                int("block_size", format.block as i64),
                int("accuracy_level", accuracy_level),
            ],
            ..Node::default()
        }
    }
}

fn failed(tensor: &str, source: QuantError) -> PassError {
    PassError::Constant { tensor: tensor.to_owned(), source: source.into() }
}

/// The tensor and its [N, K].
fn matrix(tensor: Tensor, turned: bool) -> Option<(Tensor, [usize; 2])> {
    let [rows, columns] = tensor.shape[..] else { return None };
    Some((tensor, if turned { [columns, rows] } else { [rows, columns] }))
}

fn products(view: &View<'_>, linears: &Linears, bits: u8, outcome: &mut Outcome) -> Vec<Product> {
    let mut products = Vec::new();
    let mut checked = HashMap::new();
    let mut fits = |weight: ValueId| {
        let tensor = view.constant(weight);
        *checked.entry(weight).or_insert_with(|| tensor.is_some_and(quant::fits_blocks))
    };
    for (id, node) in view.graph.nodes() {
        if !node.is("MatMul") && !node.is("Gemm") {
            continue;
        }
        match product(view, id, node, linears, bits) {
            Ok(Some(product)) if fits(product.weight.value) => products.push(product),
            Ok(Some(_)) => {
                outcome.refuse(view.graph.place(id), "its weight is not finite, or too large for a scale")
            }
            Ok(None) => {}
            Err(why) => outcome.refuse(view.graph.place(id), why),
        }
    }
    products
}

/// `None` for a product of two values that the graph computes, which has no weight.
fn product(
    view: &View<'_>,
    id: NodeId,
    node: &Node,
    linears: &Linears,
    usual: u8,
) -> Result<Option<Product>, &'static str> {
    let (Some(x), Some(matrix), Some(output)) = (node.input(0), node.input(1), node.output(0)) else {
        return Ok(None);
    };
    let gemm = node.is("Gemm");
    let straight = gemm && node.int("transB").unwrap_or(0) != 0;
    let bits = |constant: ValueId| {
        let names = [view.graph[constant].name.as_str(), &node.name];
        linears.bits(&names, usual).ok_or(LEFT_OUT)
    };
    let Some(weight) = weight(view, matrix, straight) else {
        if view.constant(x).is_none_or(|tensor| tensor.shape.len() < 2) {
            return Ok(None);
        }
        bits(x)?;
        return Err("its constant is the first operand");
    };
    let bits = bits(weight.value)?;
    let tensor = view.constant(weight.value).ok_or("its weight is no constant")?;
    if tensor.shape.len() != 2 || tensor.shape.contains(&0) {
        return Err("its weight is not a matrix");
    }
    if !matches!(tensor.dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err("its weight is not of f32, f16 or bf16");
    }
    let dtype = view.facts().dtype(x);
    let dtype =
        dtype.filter(|d| matches!(d, DType::F32 | DType::F16)).ok_or("x is not known to be f32 or f16")?;
    let outputs = if weight.turned { tensor.shape.get(1) } else { tensor.shape.first() };
    let bias = if gemm { bias(view, node, outputs.copied().unwrap_or(0))? } else { None };
    Ok(Some(Product { node: id, x, dtype, weight, bits, bias, output }))
}

/// The constant matrix behind an operand. `straight`: the node itself takes it as [N, K].
fn weight(view: &View<'_>, operand: ValueId, straight: bool) -> Option<Weight> {
    if view.constant(operand).is_some() {
        return Some(Weight { value: operand, turned: !straight });
    }
    let (_, transpose) = view.made_by(operand, "Transpose")?;
    let source = transpose.input(0)?;
    let rank = view.constant(source)?.shape.len();
    let swaps = match transpose.ints("perm") {
        Some(perm) => perm == [1, 0],
        None => rank == 2,
    };
    swaps.then_some(Weight { value: source, turned: straight })
}

/// The bias of a Gemm that is otherwise `x W^T`.
fn bias(view: &View<'_>, node: &Node, outputs: usize) -> Result<Option<ValueId>, &'static str> {
    if node.int("transA").unwrap_or(0) != 0 || node.float("alpha").unwrap_or(1.0) != 1.0 {
        return Err("it scales or transposes x");
    }
    let Some(bias) = node.input(2) else { return Ok(None) };
    if node.float("beta").unwrap_or(1.0) != 1.0 {
        return Err("it scales its bias");
    }
    let vector = view.constant(bias).is_some_and(|tensor| tensor.shape == [outputs]);
    if vector { Ok(Some(bias)) } else { Err("its bias is not a constant vector") }
}
