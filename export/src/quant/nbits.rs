//! Block-wise round-to-nearest quantisation for `MatMulNBits` (com.microsoft), with the bytes of ONNX Runtime's own
//! quantiser.
//!
//! A matrix `[N, K]` (the checkpoint's `[out, in]`) is cut along K into blocks; each block gets a scale and, in
//! asymmetric formats, a zero point, and `w = (code - zero_point) * scale`. With `max = 2^bits - 1`, `mid = 2^(bits-1)`:
//!
//! - symmetric: `scale = -extreme / mid`, where `extreme` is the value of largest magnitude *with its sign* (the
//!   negative one in a tie), so that it lands on code 0 exactly; the zero point is `mid` and is not stored;
//! - asymmetric: `lo` and `hi` are the range widened to include 0, `scale = (hi - lo) / max`,
//!   `zero_point = round(-lo / scale)` clamped to `0..=max`, and 0 for a block of zeros;
//! - `code = round(w * (1 / scale) + zero_point)` clamped to `0..=max`, in f32 with halves away from zero, and a
//!   reciprocal of 0 for a scale of 0.
//!
//! With f16 scales the codes are computed against the *rounded* scale, the one the kernel will multiply with; only the
//! zero point uses the exact one. ONNX Runtime does the same with f16 weights.
//!
//! Codes and zero points are packed along K, the first in the lowest bits. Where K is not a multiple of the block, the
//! last block is padded with codes 0, which the kernel never multiplies; spare zero-point slots of the last byte hold
//! `mid`. Only the spare codes of the byte in which an odd K ends differ from ONNX Runtime, which leaves an earlier
//! code there.

use std::{any::Any, borrow::Cow, iter, sync::Arc};

use half::f16;
use rayon::prelude::*;

use super::{
    Fitting, QuantError,
    convert::{float_matrix, widen_into},
    pack::{pack, unpack},
};
use crate::onnx::{
    Bytes, DType, Tensor,
    tensor::{Compute, ComputeError},
};

/// Weights that one task quantises, about; large enough to hide the cost of a task.
const TASK: usize = 1 << 17;

/// Largest block.
pub(super) const MAX_BLOCK: usize = 256;

/// 2^23: a small non-negative f32 added to it is rounded to an integer, halves to even, which its lowest bits hold.
pub(super) const INTEGERS: f32 = 8_388_608.0;

/// How a matrix is quantised. Field by field the attributes of `MatMulNBits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockFormat {
    /// 2, 4 or 8.
    pub bits: u8,
    /// Values along K that share a scale: 16, 32, 64, 128 or 256.
    pub block: usize,
    /// No zero points; the range is symmetric about 0.
    pub symmetric: bool,
    /// Type of the scales, F32 or F16: the type of the activations.
    pub scale: DType,
}

/// A quantised matrix; shapes as [`BlockFormat::codes_shape`] and its siblings say, little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantized {
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    /// `None` in symmetric formats.
    pub zero_points: Option<Vec<u8>>,
}

impl BlockFormat {
    /// Refuses what `MatMulNBits` does not know.
    pub fn check(&self) -> Result<(), QuantError> {
        if !matches!(self.bits, 2 | 4 | 8) {
            return Err(QuantError::Bits(self.bits));
        }
        if !matches!(self.block, 16 | 32 | 64 | 128 | 256) {
            return Err(QuantError::Block(self.block));
        }
        if !matches!(self.scale, DType::F32 | DType::F16) {
            return Err(QuantError::ScaleType(self.scale));
        }
        Ok(())
    }

    /// Blocks per row; the last may be padded.
    pub fn blocks(&self, k: usize) -> usize {
        k.div_ceil(self.block)
    }

    /// Shape of the codes (U8): `[N, blocks, bytes of a block]`.
    pub fn codes_shape(&self, n: usize, k: usize) -> [usize; 3] {
        [n, self.blocks(k), self.block_bytes()]
    }

    /// Shape of the scales: `[N, blocks]`. ONNX Runtime accepts `[N * blocks]` too, here and for the zero points.
    pub fn scales_shape(&self, n: usize, k: usize) -> [usize; 2] {
        [n, self.blocks(k)]
    }

    /// Shape of the packed zero points (U8): `[N, bytes of the zero points of a row]`.
    pub fn zero_points_shape(&self, n: usize, k: usize) -> [usize; 2] {
        [n, self.blocks(k).div_ceil(self.per_byte())]
    }

    /// Bytes of the codes.
    pub fn codes_len(&self, n: usize, k: usize) -> usize {
        n * self.row_bytes(k)
    }

    /// Bytes of the scales.
    pub fn scales_len(&self, n: usize, k: usize) -> usize {
        n * self.blocks(k) * self.scale_bytes()
    }

    /// Bytes of the zero points; 0 in symmetric formats.
    pub fn zero_points_len(&self, n: usize, k: usize) -> usize {
        if self.symmetric { 0 } else { self.zero_points_shape(n, k).iter().product() }
    }

    /// Bytes of everything that is stored for a matrix.
    pub fn total_len(&self, n: usize, k: usize) -> usize {
        self.codes_len(n, k) + self.scales_len(n, k) + self.zero_points_len(n, k)
    }

    pub(super) fn per_byte(&self) -> usize {
        8 / usize::from(self.bits)
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.block / self.per_byte()
    }

    pub(super) fn row_bytes(&self, k: usize) -> usize {
        self.blocks(k) * self.block_bytes()
    }

    pub(super) fn scale_bytes(&self) -> usize {
        if self.scale == DType::F16 { 2 } else { 4 }
    }

    /// Largest code.
    pub(super) fn max(&self) -> u8 {
        u8::MAX >> (8 - self.bits)
    }

    /// Zero point of symmetric formats.
    pub(super) fn mid(&self) -> u8 {
        1 << (self.bits - 1)
    }
}

/// Quantises `weights`, `[n, k]` row by row.
pub fn quantize(weights: &[f32], n: usize, k: usize, format: &BlockFormat) -> Result<Quantized, QuantError> {
    check_len(weights.len() * 4, n * k * 4)?;
    quantize_rows(n, k, format, |row, out| out.copy_from_slice(&weights[row * k..][..k]))
}

/// Quantises an f32, f16 or bf16 matrix `[N, K]`; only one row per thread is ever widened.
pub fn quantize_tensor(weights: &Tensor, format: &BlockFormat) -> Result<Quantized, QuantError> {
    let ([n, k], bytes) = read_matrix(weights)?;
    quantize_rows(n, k, format, |row, out| widen_row(weights.dtype, &bytes, row, out))
}

/// A float matrix's `[N, K]` and bytes.
pub(super) fn read_matrix(weights: &Tensor) -> Result<([usize; 2], Cow<'_, [u8]>), QuantError> {
    let (n, k) = float_matrix(weights)?;
    let bytes = weights.bytes.read().map_err(QuantError::Source)?;
    check_len(bytes.len(), n * k * weights.dtype.size().unwrap_or(0))?;
    Ok(([n, k], bytes))
}

/// A row of a float matrix, which is as long as `out`.
pub(super) fn widen_row(dtype: DType, bytes: &[u8], row: usize, out: &mut [f32]) {
    let row_bytes = out.len() * dtype.size().unwrap_or(0);
    widen_into(dtype, &bytes[row * row_bytes..][..row_bytes], out);
}

/// The values that `quantized` stands for, `[n, k]` row by row; lengths must be those of the format.
pub fn dequantize(quantized: &Quantized, n: usize, k: usize, format: &BlockFormat) -> Vec<f32> {
    let blocks = format.blocks(k);
    let scales: Vec<f32> = match format.scale {
        DType::F16 => {
            quantized.scales.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
        }
        _ => quantized.scales.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    };
    let codes = unpack(&quantized.codes, format.bits);
    let zero_points = quantized.zero_points.as_ref().map(|packed| unpack(packed, format.bits));
    let zero_points_per_row = format.zero_points_shape(n, k)[1] * format.per_byte();
    let value = |row: usize, column: usize| {
        let block = column / format.block;
        let zero_point = zero_points.as_ref().map_or(format.mid(), |z| z[row * zero_points_per_row + block]);
        let code = codes[row * blocks * format.block + column];
        (f32::from(code) - f32::from(zero_point)) * scales[row * blocks + block]
    };
    (0..n).flat_map(|row| (0..k).map(move |column| (row, column))).map(|(r, c)| value(r, c)).collect()
}

/// Quantises a matrix when it is written; parts: codes, scales and, in asymmetric formats, zero points.
pub struct QuantizeCompute {
    /// Floats, `[N, K]`.
    pub weights: Tensor,
    pub format: BlockFormat,
    pub fitting: Fitting,
}

impl Compute for QuantizeCompute {
    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn operands(&self) -> Vec<&Tensor> {
        iter::once(&self.weights).chain(self.fitting.sums()).collect()
    }

    fn compute(&self) -> Result<Vec<Vec<u8>>, ComputeError> {
        let fitted = self.fitting.quantize(&self.weights, &self.format)?;
        let Quantized { codes, scales, zero_points } = fitted;
        Ok([codes, scales].into_iter().chain(zero_points).collect())
    }
}

/// The initializers of a `MatMulNBits` node, inputs 1 and up in their order, for a float matrix `[N, K]`: codes U8
/// `[N, blocks, bytes]`, scales `[N, blocks]` and, in asymmetric formats, zero points U8 `[N, bytes]`. Quantising waits
/// until they are written.
pub fn quantized_initializers(
    weights: Tensor,
    format: &BlockFormat,
    fitting: Fitting,
) -> Result<Vec<Tensor>, QuantError> {
    format.check()?;
    let (n, k) = float_matrix(&weights)?;
    fitting.check(k)?;
    let source: Arc<dyn Compute> = Arc::new(QuantizeCompute { weights, format: *format, fitting });
    let part = |part, dtype, shape: &[usize], len| Tensor {
        dtype,
        shape: shape.to_vec(),
        bytes: Bytes::Computed { source: source.clone(), part, len },
    };
    let mut parts = vec![
        part(0, DType::U8, &format.codes_shape(n, k), format.codes_len(n, k)),
        part(1, format.scale, &format.scales_shape(n, k), format.scales_len(n, k)),
    ];
    if !format.symmetric {
        parts.push(part(2, DType::U8, &format.zero_points_shape(n, k), format.zero_points_len(n, k)));
    }
    Ok(parts)
}

fn check_len(found: usize, expected: usize) -> Result<(), QuantError> {
    if found == expected { Ok(()) } else { Err(QuantError::Length { expected, found }) }
}

/// What is stored of consecutive rows.
pub(super) struct RowsMut<'a> {
    pub codes: &'a mut [u8],
    pub scales: &'a mut [u8],
    /// Empty in symmetric formats.
    pub zero_points: &'a mut [u8],
}

/// Quantises rows in parallel; `read_row` fills the k values of a row.
fn quantize_rows(
    n: usize,
    k: usize,
    format: &BlockFormat,
    read_row: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<Quantized, QuantError> {
    let rows = (TASK / k.max(1)).clamp(1, n.max(1));
    let quantize = |first_row, rows: RowsMut<'_>| quantize_task(first_row, k, format, &read_row, rows);
    let (quantized, _) = in_tasks([n, k], format, rows, quantize)?;
    Ok(quantized)
}

/// Fills a quantised matrix [n, k] in parallel, so many rows per task; `task` gets the first row's index. Also the results
/// of the tasks, in the order of the rows.
pub(super) fn in_tasks<T: Send>(
    [n, k]: [usize; 2],
    format: &BlockFormat,
    rows: usize,
    task: impl Fn(usize, RowsMut<'_>) -> Result<T, QuantError> + Sync,
) -> Result<(Quantized, Vec<T>), QuantError> {
    format.check()?;
    let mut codes = vec![0; format.codes_len(n, k)];
    let mut scales = vec![0; format.scales_len(n, k)];
    let mut zero_points = vec![0; format.zero_points_len(n, k)];
    let mut results = Vec::new();
    if n * k > 0 {
        let zero_point_chunks = zero_points.chunks_mut(rows * format.zero_points_shape(1, k)[1]);
        let tasks: Vec<_> = codes
            .chunks_mut(rows * format.row_bytes(k))
            .zip(scales.chunks_mut(rows * format.scales_len(1, k)))
            .zip(zero_point_chunks.map(Some).chain(iter::repeat_with(|| None)))
            .collect();
        let run = |(index, ((codes, scales), zero_points)): (usize, ((_, _), Option<_>))| {
            task(index * rows, RowsMut { codes, scales, zero_points: zero_points.unwrap_or_default() })
        };
        results = tasks.into_par_iter().enumerate().map(run).collect::<Result<_, _>>()?;
    }
    Ok((Quantized { codes, scales, zero_points: (!format.symmetric).then_some(zero_points) }, results))
}

/// Quantises consecutive rows, the first of which is `first_row`.
fn quantize_task(
    first_row: usize,
    k: usize,
    format: &BlockFormat,
    read_row: &impl Fn(usize, &mut [f32]),
    RowsMut { codes, scales, zero_points }: RowsMut<'_>,
) -> Result<(), QuantError> {
    let BlockFormat { bits, block, .. } = *format;
    let blocks = format.blocks(k);
    let mut values = vec![0.0; blocks * block];
    let mut row_zero_points = vec![format.mid(); blocks.next_multiple_of(format.per_byte())];
    let mut block_codes = [0; MAX_BLOCK];
    let block_codes = &mut block_codes[..block];

    let scale_rows = scales.chunks_exact_mut(blocks * format.scale_bytes());
    for (i, (codes, scales)) in codes.chunks_exact_mut(format.row_bytes(k)).zip(scale_rows).enumerate() {
        let row = first_row + i;
        read_row(row, &mut values[..k]);
        let outputs =
            codes.chunks_exact_mut(format.block_bytes()).zip(scales.chunks_exact_mut(format.scale_bytes()));
        for (b, ((codes, scale_bytes), values)) in outputs.zip(values.chunks_exact(block)).enumerate() {
            let range = Range::of(values).ok_or_else(|| not_finite(row, b * block, values))?;
            let (exact, zero_point) = range.scale_and_zero_point(format);
            let scale = store_scale(exact, format.scale, scale_bytes);
            if !scale.is_finite() {
                return Err(QuantError::ScaleOverflow { row, block: b, scale: exact, dtype: format.scale });
            }
            row_zero_points[b] = zero_point;
            encode(values, scale, zero_point, format.max(), block_codes);
            block_codes[block.min(k - b * block)..].fill(0);
            pack(block_codes, bits, codes);
        }
        if !format.symmetric {
            let row_len = row_zero_points.len() / format.per_byte();
            pack(&row_zero_points, bits, &mut zero_points[i * row_len..][..row_len]);
        }
    }
    Ok(())
}

pub(super) fn not_finite(row: usize, first_column: usize, values: &[f32]) -> QuantError {
    let at = values.iter().position(|v| !v.is_finite()).unwrap_or(0);
    QuantError::NotFinite { row, column: first_column + at, value: values[at] }
}

/// Stores a scale and returns what it has become by rounding.
pub(super) fn store_scale(scale: f32, dtype: DType, out: &mut [u8]) -> f32 {
    if dtype == DType::F16 {
        let half = f16::from_f32(scale);
        out.copy_from_slice(&half.to_le_bytes());
        half.to_f32()
    } else {
        out.copy_from_slice(&scale.to_le_bytes());
        scale
    }
}

/// The extremes of a block, and its first value, which gives a block of zeros its sign.
pub(super) struct Range {
    pub lo: f32,
    pub hi: f32,
    first: f32,
}

impl Range {
    /// `None` if a value is infinite or not a number. Zeros that pad a block never change the outcome.
    pub fn of(values: &[f32]) -> Option<Range> {
        const LANES: usize = 16;
        let (mut lo, mut hi, mut check) = ([f32::MAX; LANES], [f32::MIN; LANES], [0.0f32; LANES]);
        for chunk in values.as_chunks::<LANES>().0 {
            for (i, &v) in chunk.iter().enumerate() {
                lo[i] = if v < lo[i] { v } else { lo[i] };
                hi[i] = if v > hi[i] { v } else { hi[i] };
                check[i] += v * 0.0;
            }
        }
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lo[i] = if lo[i + half] < lo[i] { lo[i + half] } else { lo[i] };
                hi[i] = if hi[i + half] > hi[i] { hi[i + half] } else { hi[i] };
                check[i] += check[i + half];
            }
        }
        let (lo, hi, finite) = (lo[0], hi[0], check[0] == 0.0);
        finite.then_some(Range { lo, hi, first: values[0] })
    }

    pub fn scale_and_zero_point(&self, format: &BlockFormat) -> (f32, u8) {
        if format.symmetric {
            let extreme = if self.hi.abs() > self.lo.abs() { self.hi } else { self.lo };
            let extreme = if extreme == 0.0 { self.first } else { extreme };
            return (-extreme / f32::from(format.mid()), format.mid());
        }
        let (lo, hi) = (self.lo.min(0.0), self.hi.max(0.0));
        // Adding 0 turns the -0 that zeros of both signs can give into 0.
        let scale = (hi - lo) / f32::from(format.max()) + 0.0;
        let zero_point = if scale == 0.0 { 0.0 } else { -lo / scale };
        (scale, zero_point.round().clamp(0.0, f32::from(format.max())) as u8)
    }
}

/// Codes of a block.
pub(super) fn encode(values: &[f32], scale: f32, zero_point: u8, max: u8, codes: &mut [u8]) {
    let reciprocal = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let (zero_point, max) = (f32::from(zero_point), f32::from(max));
    for (code, &value) in codes.iter_mut().zip(values) {
        let level = value * reciprocal + zero_point;
        // The comparisons also send a NaN (0 times the infinite reciprocal of a subnormal scale) to 0.
        let level = if level > 0.0 { level } else { 0.0 };
        let level = if level < max { level } else { max };
        let shifted = level + INTEGERS;
        let half_lost = level - (shifted - INTEGERS) == 0.5;
        *code = shifted.to_bits() as u8 + u8::from(half_lost);
    }
}
