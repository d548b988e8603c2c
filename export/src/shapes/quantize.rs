//! Quantized tensors: what makes them, and what multiplies or looks up in them.

use super::{
    Call, Dims, Fact, Row,
    broadcast::broadcast,
    call::{agree, axis, product},
    products::product_shape,
};
use crate::onnx::DType;

pub(super) const QUANTIZE: &[Row] = &[
    ("", "QuantizeLinear", quantize),
    ("", "DequantizeLinear", dequantize),
    ("", "DynamicQuantizeLinear", dynamic_quantize),
    ("com.microsoft", "QuantizeLinear", quantize),
    ("com.microsoft", "DequantizeLinear", dequantize),
    ("com.microsoft", "MatMulNBits", |call| multiply_packed(call, "N")),
    ("com.microsoft", "MatMulBnb4", |call| {
        multiply_packed(call, if call.attr_int("transB", 1) != 0 { "N" } else { "K" })
    }),
    ("com.microsoft", "DynamicQuantizeMatMul", |call| multiply(call, call.dtype(0))),
    ("com.microsoft", "MatMulInteger16", |call| multiply(call, Some(DType::I32))),
    ("com.microsoft", "MatMulIntegerToFloat", |call| multiply(call, call.dtype(2))),
    ("com.microsoft", "MatMulBlockQuantizedFp4Weight", multiply_by_rows),
    ("com.microsoft", "MatMulBlockQuantizedFp8Weight", multiply_by_rows),
    ("com.microsoft", "MatMulNBitsMlp", matmul_nbits_mlp),
    ("com.microsoft", "MatMulNBitsQkv", matmul_nbits_qkv),
    ("com.microsoft", "GatherBlockQuantized", gather_block_quantized),
    ("com.microsoft", "MoE", mixture_of_experts),
    ("com.microsoft", "QMoE", mixture_of_experts),
    ("com.microsoft", "QLinearAdd", |call| elementwise(call, &[0, 3], 7)),
    ("com.microsoft", "QLinearMul", |call| elementwise(call, &[0, 3], 7)),
    ("com.microsoft", "QLinearWhere", |call| elementwise(call, &[0, 1, 4], 8)),
    ("com.microsoft", "QLinearLeakyRelu", same),
    ("com.microsoft", "QLinearSigmoid", same),
    ("com.microsoft", "QLinearSoftmax", same),
];

fn same(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    Ok(vec![call.same_as(0)?])
}

/// The type of the result is that of the zero point, or the stated one.
fn quantize(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let dtype = call.attr_dtype("output_dtype").unwrap_or(DType::U8);
    let dtype = if call.input(2).is_some() { call.dtype(2) } else { Some(dtype) };
    Ok(vec![Fact::partial(dtype, call.same_as(0)?.shape)])
}

/// The type of the result is that of the scales, or the stated one.
fn dequantize(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let dtype = call.attr_dtype("output_dtype").or(call.dtype(1));
    Ok(vec![Fact::partial(dtype, call.same_as(0)?.shape)])
}

/// The quantized tensor, its scale and its zero point.
fn dynamic_quantize(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let y = Fact::partial(Some(DType::U8), call.same_as(0)?.shape);
    Ok(vec![y, Fact::of(Some(DType::F32), &[]), Fact::of(Some(DType::U8), &[])])
}

/// A matrix product of the first two inputs, whose scales and zero points follow.
fn multiply(call: &Call<'_>, dtype: Option<DType>) -> Result<Vec<Fact>, String> {
    Ok(vec![Fact::partial(dtype, product_shape(call.dims(0), call.dims(1))?)])
}

/// The first input times the transpose of the second, whose rows may be packed.
fn multiply_by_rows(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let mut y = call.same_as(0)?;
    if let Some(dims) = &mut y.shape {
        let last = dims.last_mut().ok_or("a scalar is multiplied by a matrix")?;
        *last = call.dims(1).and_then(|dims| dims.first().copied()).flatten();
    }
    Ok(vec![y])
}

/// The first operand with rows of the attribute's length.
fn multiply_packed(call: &Call<'_>, columns: &str) -> Result<Vec<Fact>, String> {
    let rows = if columns == "N" { "K" } else { "N" };
    Ok(vec![product_of_rows(call, rows, columns)?])
}

fn matmul_nbits_mlp(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    Ok(vec![product_of_rows(call, "K", "N")?, call.same_as(0)?])
}

fn matmul_nbits_qkv(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let key = product_of_rows(call, "K", "Nkv")?;
    Ok(vec![product_of_rows(call, "K", "Nq")?, key.clone(), key, call.same_as(0)?])
}

/// A [batch..., rows] times a packed matrix of the stated sizes gives [batch..., columns].
fn product_of_rows(call: &Call<'_>, rows: &str, columns: &str) -> Result<Fact, String> {
    let size = |name: &str| {
        let stated = call.node.int(name).ok_or_else(|| format!("{name} is missing"))?;
        usize::try_from(stated).map_err(|_| format!("{name} is {stated}"))
    };
    let (rows, columns) = (size(rows)?, size(columns)?);
    let mut y = call.same_as(0)?;
    if let Some(dims) = &mut y.shape {
        let last = dims.last_mut().ok_or("a scalar is multiplied by a matrix")?;
        agree(*last, Some(rows)).map_err(|problem| format!("rows of the product: {problem}"))?;
        *last = Some(columns);
    }
    Ok(y)
}

/// A Gather whose result is dequantized. Elements of less than 8 bits in a tensor of bytes are unpacked along the
/// last axis.
fn gather_block_quantized(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let dtype = call.dtype(2);
    let (Some(data), Some(indices)) = (call.dims(0), call.dims(1)) else {
        return Ok(vec![Fact::partial(dtype, None)]);
    };
    let at = axis(call.attr_int("gather_axis", 0), data.len())?;
    let mut data: Dims = data.to_vec();
    if call.dtype(0) == Some(DType::U8) {
        let per_byte = match call.attr_int("bits", 4) {
            bits @ (2 | 4 | 8) => 8 / bits as usize,
            bits => return Err(format!("elements of {bits} bits")),
        };
        if let Some(last) = data.last_mut() {
            *last = product(&[*last, Some(per_byte)])?;
        }
    }
    Ok(vec![Fact::partial(dtype, Some([&data[..at], indices, &data[at + 1..]].concat()))])
}

/// Input [tokens..., row] and router scores [all tokens, experts] give a result like the input.
fn mixture_of_experts(call: &Call<'_>) -> Result<Vec<Fact>, String> {
    let y = call.same_as(0)?;
    if let (Some([tokens @ .., _]), Some([rows, _])) = (&y.shape.as_deref(), call.dims(1)) {
        agree(product(tokens)?, *rows).map_err(|problem| format!("tokens and router scores: {problem}"))?;
    }
    Ok(vec![y])
}

/// An elementwise operator over the given inputs, between which scales and zero points lie. The type of the result
/// is that of its zero point or, where it has none, of the last operand.
fn elementwise(call: &Call<'_>, operands: &[usize], zero_point: usize) -> Result<Vec<Fact>, String> {
    let shape = broadcast(operands.iter().map(|input| call.dims(*input)))?;
    let dtype = operands.iter().filter_map(|input| call.dtype(*input)).next_back();
    Ok(vec![Fact::partial(call.dtype(zero_point).or(dtype), shape)])
}
