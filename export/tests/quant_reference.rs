//! The quantiser against ONNX Runtime's: byte for byte where Python with onnxruntime is at hand, and against recorded
//! digests of the same bytes always.
//!
//! Weights that do not fill their blocks (K = 48, 72, 80) and odd numbers of blocks with zero points are where such
//! quantisers have gone wrong: <https://github.com/microsoft/onnxruntime/issues/25231>,
//! <https://github.com/microsoft/onnxruntime/pull/24546>.

use std::{
    env,
    fmt::Write as _,
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::Command,
};

use half::f16;
use sha2::{Digest, Sha256};
use viaduct_export::{
    onnx::{DType, Tensor},
    quant::{BlockFormat, Quantized, quantize_tensor},
};

/// Reads `<i>.in` as listed on standard input, writes the quantiser's codes, scales and zero points one after the
/// other to `<i>.out`. The calls are those of `DefaultWeightOnlyQuantizer.qbits_block_quant`.
const SCRIPT: &str = r#"
import sys
import numpy as np
from onnxruntime.capi import _pybind_state as ort

for line in open(sys.argv[1] + "/cases"):
    i, bits, block, symmetric, dtype, n, k = line.split()
    bits, block, symmetric, n, k = int(bits), int(block), symmetric == "true", int(n), int(k)
    weights = np.fromfile(f"{sys.argv[1]}/{i}.in", dtype=dtype).reshape(n, k)
    blocks, per_byte = -(-k // block), 8 // bits
    padded = np.ascontiguousarray(np.pad(weights.T, ((0, blocks * block - k), (0, 0))))
    codes = np.zeros((n, blocks, block // per_byte), np.uint8)
    zero_points = np.zeros((n, -(-blocks // per_byte)), np.uint8)
    scales = np.zeros((n, blocks), dtype)
    quantize = getattr(ort, f"quantize_matmul_{bits}bits")
    quantize(codes, padded, scales, zero_points, block, n, k, symmetric)
    with open(f"{sys.argv[1]}/{i}.out", "wb") as out:
        out.write(codes.tobytes() + scales.tobytes() + (b"" if symmetric else zero_points.tobytes()))
"#;

/// First 8 bytes of the SHA-256 of ONNX Runtime 1.31.1's outputs for all [`cases`] of one (bits, symmetric, type).
const RECORDED: [(u8, bool, DType, &str); 12] = [
    (2, true, DType::F32, "a73c1f884a546717"),
    (2, true, DType::F16, "2c5bb4350dda6631"),
    (2, false, DType::F32, "d78e3bf41b26fd1d"),
    (2, false, DType::F16, "76e824034daac680"),
    (4, true, DType::F32, "47e39f37026735d7"),
    (4, true, DType::F16, "0352971d25e60b60"),
    (4, false, DType::F32, "49bb298516e7f548"),
    (4, false, DType::F16, "7d5b25be4c4cc4e0"),
    (8, true, DType::F32, "4155e468c49ac948"),
    (8, true, DType::F16, "0bbee49bfa4861f3"),
    (8, false, DType::F32, "90feb4f2f98fb405"),
    (8, false, DType::F16, "695ad6330f336367"),
];

struct Case {
    format: BlockFormat,
    weights: Tensor,
}

impl Case {
    fn name(&self) -> String {
        format!("{:?} of {:?} {:?}", self.format, self.weights.dtype, self.weights.shape)
    }

    fn quantized(&self) -> Vec<u8> {
        let Quantized { codes, scales, zero_points } = quantize_tensor(&self.weights, &self.format).unwrap();
        [codes, scales, zero_points.unwrap_or_default()].concat()
    }
}

fn formats() -> impl Iterator<Item = (u8, bool, DType)> {
    let types = |bits, symmetric| [DType::F32, DType::F16].map(|scale| (bits, symmetric, scale));
    [2, 4, 8].into_iter().flat_map(move |bits| [true, false].into_iter().flat_map(move |s| types(bits, s)))
}

fn cases(bits: u8, symmetric: bool, scale: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for block in [16, 32, 64, 128, 256] {
        for k in [32, 48, 72, 80, 256] {
            for n in [1, 8, 17] {
                let values = matrix(n, k, scale == DType::F16);
                let weights = match scale {
                    DType::F16 => Tensor::from_f16(&[n, k], &values),
                    _ => Tensor::from_f32(&[n, k], &values),
                };
                cases.push(Case { format: BlockFormat { bits, block, symmetric, scale }, weights });
            }
        }
    }
    cases
}

/// Rows of every kind that has an edge: zeros of both signs, constants, one sign only, ties in the rounding and in the
/// extremes, huge and tiny values. Only exact arithmetic, so that the values are the same everywhere.
fn matrix(n: usize, k: usize, half: bool) -> Vec<f32> {
    let mut state = (n * 1000 + k) as u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    // Symmetric about 0, with a few values much larger than the rest.
    let mut weight = || {
        let fraction = (random() % (1 << 21)) as f32 / (1 << 20) as f32 - 1.0;
        fraction / (1 << (random() % 6)) as f32
    };
    let (tiny, huge) = if half { (2f32.powi(-20), 2f32.powi(15)) } else { (2f32.powi(-120), 2f32.powi(120)) };
    let mut values = Vec::with_capacity(n * k);
    for row in 0..n {
        for column in 0..k {
            let w = weight();
            values.push(match row % 14 {
                1 => 0.0,
                2 => -w.abs(),
                3 => w.abs(),
                4 => (w * 4.0).round() / 2.0,
                5 => 2.5,
                6 => -1.5,
                7 => w * tiny,
                8 => w * huge,
                9 => {
                    if w < 0.0 {
                        -0.0
                    } else {
                        0.0
                    }
                }
                10 => {
                    if column % 2 == 0 {
                        1.0
                    } else {
                        -1.0
                    }
                }
                11 => {
                    if column < 32 {
                        0.0
                    } else {
                        w
                    }
                }
                12 => {
                    if column % 16 == 5 {
                        w * 64.0
                    } else {
                        w / 64.0
                    }
                }
                13 => -0.0,
                _ => w,
            });
        }
    }
    values
}

#[test]
fn recorded_bytes() {
    let mut actual = Vec::new();
    for (bits, symmetric, scale) in formats() {
        let mut hash = Sha256::new();
        cases(bits, symmetric, scale).iter().for_each(|case| hash.update(case.quantized()));
        let digest = hash.finalize()[..8].iter().fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").unwrap();
            text
        });
        actual.push((bits, symmetric, scale, digest));
    }
    let recorded: Vec<_> =
        RECORDED.iter().map(|(b, s, t, digest)| (*b, *s, *t, (*digest).to_owned())).collect();
    assert_eq!(actual, recorded);
}

#[test]
fn bytes_of_onnxruntime() {
    let Some(python) = python() else {
        assert!(env::var("CI").as_deref() != Ok("true"), "no Python with onnxruntime: set VIADUCT_PYTHON");
        // Past the test harness, which shows the output of failed tests only.
        writeln!(io::stderr(), "NOT RUN: comparison with ONNX Runtime; set VIADUCT_PYTHON or make .venv")
            .unwrap();
        return;
    };
    let cases: Vec<_> =
        formats().flat_map(|(bits, symmetric, scale)| cases(bits, symmetric, scale)).collect();
    let dir = tempfile::tempdir().unwrap();
    let mut list = String::new();
    for (i, Case { format: BlockFormat { bits, block, symmetric, scale }, weights }) in
        cases.iter().enumerate()
    {
        let dtype = if *scale == DType::F16 { "float16" } else { "float32" };
        let [n, k] = weights.shape[..] else { unreachable!() };
        writeln!(list, "{i} {bits} {block} {symmetric} {dtype} {n} {k}").unwrap();
        fs::write(dir.path().join(format!("{i}.in")), weights.bytes.read().unwrap()).unwrap();
    }
    fs::write(dir.path().join("cases"), list).unwrap();
    let output = Command::new(&python).args(["-c", SCRIPT]).arg(dir.path()).output().unwrap();
    assert!(output.status.success(), "{}: {}", python.display(), String::from_utf8_lossy(&output.stderr));

    for (i, case) in cases.iter().enumerate() {
        let theirs = fs::read(dir.path().join(format!("{i}.out"))).unwrap();
        let ours = case.quantized();
        assert_eq!(ours.len(), theirs.len(), "{}", case.name());
        let different = ours.iter().zip(&theirs).position(|(a, b)| a != b);
        assert_eq!(different, None, "{}: first different byte", case.name());
    }
}

/// The interpreter that `VIADUCT_PYTHON` names, or that of the workspace's environment.
fn python() -> Option<PathBuf> {
    let named = env::var_os("VIADUCT_PYTHON").map(PathBuf::from);
    named.or_else(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.venv/bin/python");
        path.exists().then_some(path)
    })
}

/// Widened f16 values quantise to the same bytes as the f16 ones.
#[test]
fn the_type_of_the_weights_does_not_matter() {
    let format = BlockFormat { bits: 4, block: 32, symmetric: false, scale: DType::F16 };
    let values: Vec<f32> = matrix(17, 80, true).iter().map(|v| f16::from_f32(*v).to_f32()).collect();
    let halves = quantize_tensor(&Tensor::from_f16(&[17, 80], &values), &format).unwrap();
    let floats = quantize_tensor(&Tensor::from_f32(&[17, 80], &values), &format).unwrap();
    assert_eq!(halves, floats);
}
