//! Weights fitted to their format: never worse than rounded, and the same whoever computes them.

use proptest::prelude::*;
use viaduct_export::{
    onnx::{DType, Tensor},
    quant::{
        BlockFormat, DAMPING, Fitting, Gram, QuantError, Quantized, WINDOW, dequantize, misfit, quantize,
        quantize_tensor,
    },
};

const Q4: BlockFormat = BlockFormat { bits: 4, block: 16, symmetric: true, scale: DType::F16 };
const FORMATS: [BlockFormat; 4] = [
    Q4,
    BlockFormat { symmetric: false, ..Q4 },
    BlockFormat { bits: 8, block: 32, ..Q4 },
    BlockFormat { bits: 2, symmetric: false, scale: DType::F32, ..Q4 },
];

/// Numbers in -1..1 that a seed gives, some of them large.
fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count)
        .map(|_| {
            let x = next();
            if next() > 0.9 { 4.0 * x } else { x }
        })
        .collect()
}

/// The sum of x x^T over rows whose columns are alike: each is partly the one before it.
fn sums(seed: u64, k: usize) -> Vec<f64> {
    let mut sums = vec![0.0; k * k];
    for row in noise(seed, 24 * k).chunks_exact(k) {
        let mut last = 0.0;
        let next = |x: &f32| {
            last = 0.8 * last + f64::from(*x);
            last
        };
        let row: Vec<f64> = row.iter().map(next).collect();
        for i in 0..k {
            for j in 0..k {
                sums[i * k + j] += row[i] * row[j];
            }
        }
    }
    sums
}

fn gram(sums: &[f64], k: usize) -> Gram {
    let width = k.min(WINDOW);
    let value = |i: usize, j: usize| {
        let column = i - i % WINDOW + j;
        if column < k { sums[i * k + column] as f32 } else { 0.0 }
    };
    let values: Vec<f32> =
        (0..k).flat_map(|i| (0..width).map(move |j| (i, j))).map(|(i, j)| value(i, j)).collect();
    Gram::new(Tensor::from_f32(&[k, width], &values)).unwrap()
}

/// `d H d^T` over all rows, with H damped, and without what lies in two windows.
fn cost(errors: &[f32], sums: &[f64], k: usize) -> f64 {
    let mut total = 0.0;
    for row in errors.chunks_exact(k) {
        for start in (0..k).step_by(WINDOW) {
            let columns = start..k.min(start + WINDOW);
            let mean = columns.clone().map(|i| sums[i * k + i]).sum::<f64>() / columns.len() as f64;
            for i in columns.clone() {
                for j in columns.clone() {
                    let damping = if i == j { DAMPING * mean } else { 0.0 };
                    total += f64::from(row[i]) * f64::from(row[j]) * (sums[i * k + j] + damping);
                }
            }
        }
    }
    total
}

fn errors(fitting: &Fitting, values: &[f32], n: usize, k: usize, format: &BlockFormat) -> Vec<f32> {
    let quantized = fitting.quantize(&Tensor::from_f32(&[n, k], values), format).unwrap();
    let back = dequantize(&quantized, n, k, format);
    values.iter().zip(back).map(|(exact, back)| exact - back).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn nothing_is_worse_than_rounded(seed: u64, n in 1usize..20, k in 1usize..90, format in 0..FORMATS.len()) {
        let (format, values, sums) = (FORMATS[format], noise(seed, n * k), sums(seed ^ 1, k));
        let rounded = errors(&Fitting::Nearest, &values, n, k, &format);
        let plain = |errors: &[f32]| errors.iter().map(|e| f64::from(e * e)).sum::<f64>();
        let searched = errors(&Fitting::Search(None), &values, n, k, &format);
        prop_assert!(plain(&searched) <= plain(&rounded) * (1.0 + 1e-5));
        let weighted = |errors: &[f32]| {
            let mean = (0..k).map(|i| sums[i * k + i]).sum::<f64>() / k as f64;
            let count = |i: usize| sums[i * k + i] + DAMPING * mean;
            errors.iter().enumerate().map(|(i, e)| f64::from(e * e) * count(i % k)).sum::<f64>()
        };
        let searched = errors(&Fitting::Search(Some(gram(&sums, k))), &values, n, k, &format);
        prop_assert!(weighted(&searched) <= weighted(&rounded) * (1.0 + 1e-5));
        let fitted = errors(&Fitting::Feedback(gram(&sums, k)), &values, n, k, &format);
        prop_assert!(cost(&fitted, &sums, k) <= cost(&rounded, &sums, k) * (1.0 + 1e-4));
    }

    #[test]
    fn what_the_format_holds_is_kept(seed: u64, format in 0..FORMATS.len()) {
        let (format, [n, k]) = (FORMATS[format], [5, 70]);
        let rounded = dequantize(&quantize(&noise(seed, n * k), n, k, &format).unwrap(), n, k, &format);
        // Some blocks no longer reach the ends of their range: only what rounds to itself is sure to be kept.
        let again = quantize(&rounded, n, k, &format).unwrap();
        prop_assume!(dequantize(&again, n, k, &format) == rounded);
        for fitting in [Fitting::Search(None), Fitting::Feedback(gram(&sums(seed, k), k))] {
            let kept = fitting.quantize(&Tensor::from_f32(&[n, k], &rounded), &format).unwrap();
            prop_assert_eq!(dequantize(&kept, n, k, &format), rounded.clone());
        }
    }
}

#[test]
fn feedback_loses_much_less_where_columns_are_alike() {
    let (n, k) = (32, 128);
    let (values, sums) = (noise(3, n * k), sums(4, k));
    let format = BlockFormat { block: 32, symmetric: false, ..Q4 };
    let cost = |fitting| cost(&errors(&fitting, &values, n, k, &format), &sums, k);
    let (rounded, fitted) = (cost(Fitting::Nearest), cost(Fitting::Feedback(gram(&sums, k))));
    assert!(fitted < 0.5 * rounded, "{fitted:e} of {rounded:e}");
    let misfit = misfit(&Tensor::from_f32(&[n, k], &values), &format, &gram(&sums, k)).unwrap();
    assert!((misfit.error / fitted - 1.0).abs() < 1e-3, "{misfit:?}, {fitted}");
    assert!(misfit.error < 0.05 * misfit.energy, "{misfit:?}");
}

#[test]
fn windows_are_fitted_apart_and_threads_change_nothing() {
    let (n, k) = (19, WINDOW + 40);
    let (values, sums) = (noise(5, n * k), sums(6, k));
    let weights = Tensor::from_f32(&[n, k], &values);
    let fitting = Fitting::Feedback(gram(&sums, k));
    let with_threads = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| fitting.quantize(&weights, &Q4).unwrap())
    };
    let alone = with_threads(1);
    assert_eq!(alone, with_threads(3));
    let columns: Vec<f32> = values.chunks_exact(k).flat_map(|row| &row[..WINDOW]).copied().collect();
    let first: Vec<f64> = (0..WINDOW).flat_map(|i| sums[i * k..][..WINDOW].to_vec()).collect();
    let part =
        Fitting::Feedback(gram(&first, WINDOW)).quantize(&Tensor::from_f32(&[n, WINDOW], &columns), &Q4);
    let (whole, part) = (dequantize(&alone, n, k, &Q4), dequantize(&part.unwrap(), n, WINDOW, &Q4));
    for (whole, part) in whole.chunks_exact(k).zip(part.chunks_exact(WINDOW)) {
        assert_eq!(&whole[..WINDOW], part);
    }
}

/// FNV-1a of everything that is stored of a matrix.
fn digest(quantized: &Quantized) -> u64 {
    let Quantized { codes, scales, zero_points } = quantized;
    let bytes = codes.iter().chain(scales).chain(zero_points.iter().flatten());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

#[test]
fn fitted_bytes_stay_what_they_are() {
    let (n, k) = (21, 150);
    let weights = Tensor::from_f32(&[n, k], &noise(10, n * k));
    let known = || gram(&sums(11, k), k);
    let digests = FORMATS.map(|format| {
        let fittings = [Fitting::Search(None), Fitting::Search(Some(known())), Fitting::Feedback(known())];
        fittings.map(|fitting| digest(&fitting.quantize(&weights, &format).unwrap()))
    });
    let expected = [
        [0x3814_19ce_4bfa_6fa4, 0x7c50_58ac_7368_bfc3, 0xf6b8_dba2_3eee_5fa4],
        [0x4f17_f234_43c7_e139, 0x5e8a_3a31_7814_f2e3, 0xdd3d_818d_c75a_eae8],
        [0x3a9c_7698_f905_4d88, 0x86f6_4769_eb6e_1c5a, 0xfab4_4280_ac81_f99d],
        [0xf781_2b8c_33cb_134b, 0x0082_8aed_206e_23b4, 0xf04e_3e69_6e78_196d],
    ];
    assert_eq!(digests, expected);
}

#[test]
fn zeros_stay_and_damage_is_named() {
    let (n, k) = (3, 40);
    let mut values = noise(7, n * k);
    values[k..2 * k].fill(0.0);
    for fitting in [Fitting::Search(None), Fitting::Feedback(gram(&sums(8, k), k))] {
        let weights = Tensor::from_f32(&[n, k], &values);
        let fitted = fitting.quantize(&weights, &Q4).unwrap();
        assert_eq!(dequantize(&fitted, n, k, &Q4)[k..2 * k], [0.0; 40]);
        let constant = Tensor::from_f32(&[1, k], &[0.25; 40]);
        let kept = fitting.quantize(&constant, &Q4).unwrap();
        assert_eq!(dequantize(&kept, 1, k, &Q4), [0.25; 40]);
        let mut damaged = values.clone();
        damaged[2 * k + 17] = f32::NAN;
        let damaged = Tensor::from_f32(&[n, k], &damaged);
        let [ours, theirs] = [fitting.quantize(&damaged, &Q4), quantize_tensor(&damaged, &Q4)]
            .map(|e| e.unwrap_err().to_string());
        assert_eq!(ours, theirs);
        assert!(ours.contains("[2, 17]"), "{ours}");
    }
}

#[test]
fn statistics_that_cannot_be_are_refused() {
    let (k, width) = (8, 8);
    let weights = Tensor::from_f32(&[2, k], &noise(9, 2 * k));
    for broken in [f32::NAN, f32::INFINITY, -1.0] {
        let mut sums = vec![0.0; k * width];
        sums[9] = broken;
        let gram = Gram::new(Tensor::from_f32(&[k, width], &sums)).unwrap();
        let refused = Fitting::Feedback(gram).quantize(&weights, &Q4);
        assert!(matches!(refused, Err(QuantError::Statistics { .. })), "{broken}");
    }
    // Off the diagonal more than on it: no sums of products are so.
    let mut sums = vec![0.0; k * width];
    (0..k).for_each(|i| sums[i * width + i] = 1.0);
    (sums[1], sums[width]) = (5.0, 5.0);
    let gram = Gram::new(Tensor::from_f32(&[k, width], &sums)).unwrap();
    assert!(matches!(Fitting::Feedback(gram).quantize(&weights, &Q4), Err(QuantError::Statistics { .. })));
    assert!(Gram::new(Tensor::from_f32(&[8, 7], &[0.0; 56])).is_err());
    assert!(Gram::new(Tensor::from_f16(&[1, 1], &[0.0])).is_err());
    let other = Gram::new(Tensor::from_f32(&[4, 4], &[0.0; 16])).unwrap();
    assert!(matches!(Fitting::Feedback(other).quantize(&weights, &Q4), Err(QuantError::Inputs { .. })));
    // Inputs that were never anything but zero: plainly rounded, or better.
    let zeros = Gram::new(Tensor::from_f32(&[k, width], &[0.0; 64])).unwrap();
    assert!(Fitting::Feedback(zeros).quantize(&weights, &Q4).is_ok());
}
