//! Quantising, casting and relaying out, on values that can be followed by hand.

use half::{bf16, f16};
use proptest::prelude::*;
use viaduct_export::{
    onnx::{Bytes, DType, Tensor},
    quant::{
        BlockFormat, Fitting, Quantized, cast, dequantize, pack, quantize, quantize_tensor,
        quantized_initializers, transpose, unpack,
    },
};

const Q4: BlockFormat = BlockFormat { bits: 4, block: 16, symmetric: true, scale: DType::F32 };
const Q4_ZERO: BlockFormat = BlockFormat { symmetric: false, ..Q4 };
const Q8: BlockFormat = BlockFormat { bits: 8, ..Q4 };

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn bf16_tensor(shape: &[usize], values: &[f32]) -> Tensor {
    let bytes = values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
    Tensor::inline(DType::BF16, shape, bytes)
}

#[test]
fn symmetric_scales_carry_the_sign_of_the_extreme() {
    let mut values = [0.0; 16];
    values[..6].copy_from_slice(&[-4.0, 3.5, 0.25, 0.75, -0.25, 4.0]);
    // Both extremes are 4: the negative one is taken, and 4 / 0.5 + 8 = 16 is cut to 15.
    let quantized = quantize(&values, 1, 16, &Q4).unwrap();
    assert_eq!(f32s(&quantized.scales), [0.5]);
    assert_eq!(quantized.codes, [0xf0, 0xa9, 0xf8, 0x88, 0x88, 0x88, 0x88, 0x88]);
    assert_eq!(quantized.zero_points, None);

    values[5] = 8.0;
    let quantized = quantize(&values, 1, 16, &Q4).unwrap();
    assert_eq!(f32s(&quantized.scales), [-1.0]);
    // 8 is code 0; 3.5 / -1 + 8 = 4.5 is rounded up.
    assert_eq!(quantized.codes[..3], [0x5c, 0x78, 0x08]);
}

#[test]
fn zero_points_make_zero_exact() {
    let values: Vec<f32> = (0..16).map(|i| i as f32 - 5.0).collect();
    let quantized = quantize(&values, 1, 16, &Q4_ZERO).unwrap();
    assert_eq!(f32s(&quantized.scales), [1.0]);
    // The second nibble belongs to no block and holds 8.
    assert_eq!(quantized.zero_points.as_deref(), Some(&[0x85][..]));
    assert_eq!(dequantize(&quantized, 1, 16, &Q4_ZERO), values);

    let positive = quantize(&[3.0; 16], 1, 16, &Q4_ZERO).unwrap();
    assert_eq!(
        positive,
        Quantized {
            codes: vec![0xff; 8],
            scales: 0.2f32.to_le_bytes().to_vec(),
            zero_points: Some(vec![0x80]),
        }
    );
    let zeros = quantize(&[0.0; 16], 1, 16, &Q4_ZERO).unwrap();
    assert_eq!((zeros.codes, zeros.zero_points), (vec![0; 8], Some(vec![0x80])));
}

/// <https://github.com/microsoft/onnxruntime/issues/25231>, <https://github.com/microsoft/onnxruntime/pull/24546>:
/// columns beyond K must be padding, and the zero points of an odd number of blocks must not change places.
#[test]
fn ragged_matrices_with_odd_blocks() {
    for (k, block, blocks) in [(48, 16, 3), (48, 32, 2), (72, 16, 5), (72, 32, 3), (80, 16, 5), (80, 32, 3)] {
        for bits in [4, 8] {
            let format = BlockFormat { bits, block, symmetric: false, scale: DType::F32 };
            // Block b of row r lies in r - b ..= r - b + 1, so that every zero point is different.
            let value = |r: usize, c: usize| (r as f32 - (c / block) as f32) / 2.0 + (c % 16) as f32 / 15.0;
            let values: Vec<f32> = (0..8 * k).map(|i| value(i / k, i % k)).collect();
            let quantized = quantize(&values, 8, k, &format).unwrap();
            assert_eq!(format.codes_shape(8, k)[1], blocks);
            assert_eq!(quantized.codes.len(), format.codes_len(8, k));
            assert_eq!(quantized.scales.len(), format.scales_len(8, k));

            let codes = unpack(&quantized.codes, bits);
            for row in codes.chunks(blocks * block) {
                assert!(row[k..].iter().all(|code| *code == 0), "{format:?}: padding of K = {k}");
            }
            let zero_points = quantized.zero_points.as_ref().unwrap();
            assert_eq!(zero_points.len(), format.zero_points_len(8, k));
            if bits == 4 && blocks % 2 == 1 {
                let last_bytes = zero_points.chunks(blocks.div_ceil(2)).map(|row| row[blocks / 2] >> 4);
                assert!(last_bytes.into_iter().all(|spare| spare == 8));
            }
            let scales = f32s(&quantized.scales);
            for (i, (exact, back)) in values.iter().zip(dequantize(&quantized, 8, k, &format)).enumerate() {
                let scale = scales[i / k * blocks + i % k / block];
                assert!((exact - back).abs() <= scale * 1.001, "{format:?}, K = {k}: {exact} became {back}");
            }
        }
    }
}

#[test]
fn codes_follow_the_rounded_scale() {
    let format = BlockFormat { scale: DType::F16, ..Q8 };
    let mut values = [0.0f32; 16];
    (values[0], values[1]) = (-1.001, 0.9);
    let quantized = quantize(&values, 1, 16, &format).unwrap();
    let scale = f16::from_f32(1.001 / 128.0);
    assert_eq!(quantized.scales, scale.to_le_bytes());
    assert_eq!(quantized.codes[1], (0.9 / scale.to_f32() + 128.0).round() as u8);
}

#[test]
fn impossible_weights_and_formats_are_errors() {
    let mut values = [1.0; 48];
    let message =
        |values: &[f32], format: &BlockFormat| quantize(values, 2, 24, format).unwrap_err().to_string();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        values[24 + 17] = bad;
        assert!(message(&values, &Q4).contains("weight [1, 17] is"), "{}", message(&values, &Q4));
    }
    values[24 + 17] = 1e7;
    let halves = BlockFormat { scale: DType::F16, ..Q4 };
    assert!(message(&values, &halves).contains("block 1 in row 1 does not fit F16"));
    assert!(message(&values[..47], &Q4).contains("188 bytes of weights, 192 expected"));
    assert!(message(&values, &BlockFormat { bits: 3, ..Q4 }).contains("3-bit"));
    assert!(message(&values, &BlockFormat { block: 24, ..Q4 }).contains("24 values"));
    assert!(message(&values, &BlockFormat { scale: DType::BF16, ..Q4 }).contains("BF16"));

    let integers = Tensor::from_i64(&[1, 1], &[1]);
    assert!(quantize_tensor(&integers, &Q4).unwrap_err().to_string().contains("I64"));
    assert!(quantized_initializers(Tensor::from_f32(&[4], &[0.0; 4]), &Q4, Fitting::Nearest).is_err());
}

#[test]
fn initializers_are_lazy_and_as_long_as_they_say() {
    let values: Vec<f32> = (0..3 * 40).map(|i| (i % 11) as f32 - 4.0).collect();
    let weights = bf16_tensor(&[3, 40], &values);
    for format in [Q4, Q4_ZERO, Q8, BlockFormat { scale: DType::F16, ..Q4_ZERO }] {
        let parts = quantized_initializers(weights.clone(), &format, Fitting::Nearest).unwrap();
        let direct = quantize(&values, 3, 40, &format).unwrap();
        let expected = [Some(direct.codes), Some(direct.scales), direct.zero_points];
        let expected: Vec<_> = expected.into_iter().flatten().collect();
        assert_eq!(parts.len(), expected.len());
        assert_eq!(parts.iter().map(|p| p.bytes.len()).sum::<usize>(), format.total_len(3, 40));
        for (part, expected) in parts.iter().zip(expected) {
            assert!(matches!(part.bytes, Bytes::Computed { .. }));
            assert_eq!(part.bytes.len(), part.elements() * part.dtype.size().unwrap());
            assert_eq!(*part.bytes.read().unwrap(), expected[..]);
        }
    }
}

#[test]
fn casts_round_to_nearest_and_refuse_what_does_not_fit() {
    let values = [0.0, -1.5, 65504.0, 1.0 / 3.0, 6e-8];
    let weights = Tensor::from_f32(&[5], &values);
    let half = cast(weights.clone(), DType::F16).unwrap();
    assert_eq!(half.bytes.len(), 10);
    assert_eq!(half.bytes.read().unwrap(), Tensor::from_f16(&[5], &values).bytes.read().unwrap());
    let wide = cast(bf16_tensor(&[2], &[1.5, -2.0]), DType::F32).unwrap();
    assert_eq!(wide.to_f32().unwrap().unwrap(), [1.5, -2.0]);
    assert!(matches!(cast(weights.clone(), DType::F32).unwrap().bytes, Bytes::Inline(_)));

    let mut many = vec![1.0; 70_000];
    many[66_000] = -1e5;
    let error =
        cast(bf16_tensor(&[70_000], &many), DType::F16).unwrap().bytes.read().unwrap_err().to_string();
    assert!(error.contains("element 66000 is -9.9"), "{error}");
    assert!(cast(weights, DType::BF16).is_err());
    assert!(cast(Tensor::from_i64(&[1], &[1]), DType::F16).is_err());
}

#[test]
fn transposes_of_every_width() {
    for (n, k) in [(1, 1), (3, 70), (70, 3), (33, 64), (0, 5)] {
        let values: Vec<f32> = (0..n * k).map(|i| (i % 1999) as f32).collect();
        let turned: Vec<f32> = (0..k * n).map(|i| values[i % n * k + i / n]).collect();
        for dtype in [DType::F32, DType::F16] {
            let tensor = transpose(cast(Tensor::from_f32(&[n, k], &values), dtype).unwrap()).unwrap();
            assert_eq!(tensor.shape, [k, n]);
            assert!(tensor.to_f32().unwrap().unwrap() == turned, "[{n}, {k}] {dtype:?}");
        }
    }
    assert!(transpose(Tensor::from_f32(&[1, 1, 1], &[0.0])).is_err());
}

proptest! {
    #[test]
    fn packing_is_undone_by_unpacking(bytes in prop::collection::vec(any::<u8>(), 0..64), bits in prop::sample::select(vec![2u8, 4, 8])) {
        let codes = unpack(&bytes, bits);
        prop_assert_eq!(codes.len(), bytes.len() * 8 / usize::from(bits));
        prop_assert!(codes.iter().all(|code| u16::from(*code) < 1 << bits));
        let mut packed = vec![0; bytes.len()];
        pack(&codes, bits, &mut packed);
        prop_assert_eq!(packed, bytes);
    }

    /// Half a step everywhere, a whole one where an asymmetric range or a symmetric extreme is cut.
    #[test]
    fn no_value_moves_by_more_than_a_step(
        values in prop::collection::vec(-3f32..3.0, 3 * 37),
        bits in prop::sample::select(vec![2u8, 4, 8]),
        symmetric: bool,
        half: bool,
    ) {
        let scale = if half { DType::F16 } else { DType::F32 };
        let format = BlockFormat { bits, block: 16, symmetric, scale };
        let quantized = quantize(&values, 3, 37, &format).unwrap();
        let step = if symmetric { 3.0 / f32::from(1u8 << (bits - 1)) } else { 6.0 / f32::from(u8::MAX >> (8 - bits)) };
        for (exact, back) in values.iter().zip(dequantize(&quantized, 3, 37, &format)) {
            prop_assert!((exact - back).abs() <= step * 1.01, "{} became {}", exact, back);
        }
    }
}
