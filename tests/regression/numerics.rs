//! Wrong numbers without an error, on the WebGPU provider.

use std::time::Instant;

use half::f16;
use viaduct::{tensor::HostTensor, tune::self_tests};
use viaduct_export::{
    onnx::{
        Attribute, Builder, DType, Dim, Model, Node, Tensor, WriteOptions, model_bytes, read_model,
        write_model,
    },
    passes::{Settings, apply, sequence},
    quant::{BlockFormat, Quantized, dequantize, quantize},
};

use crate::{
    bad::{Good, SET, put},
    count, feed, findings, fixed, rewritten,
    runtime_support::{
        Feeds, Net, cpu, float, int, ints, noise, relative_error, run, string, tensor, webgpu,
    },
    told, toy,
};

fn assert_no_hazards(model: &Model) {
    let found = findings(model, "llvmpipe", "hazards");
    assert!(found.is_empty(), "{found:?}");
}

/// Two of four terms of a sum are 36000, two take them away again.
mod large_sums {
    use super::*;

    const STEP: f32 = 2250.0;
    const X: f32 = 16.0;

    fn sign(k: usize) -> f32 {
        if k % 4 < 2 { 1.0 } else { -1.0 }
    }

    pub fn feeds(dtype: DType, rows: usize, k: usize) -> Feeds {
        feed("x", tensor(dtype, &[1, rows, k], &vec![X; rows * k]))
    }

    pub fn product(dtype: DType, rows: usize, [k, n]: [usize; 2]) -> Model {
        let mut net = Net::new(dtype);
        let weight: Vec<f32> = (0..k * n).map(|i| STEP * sign(i / n)).collect();
        net.x("x", &[1, rows, k]).float("w", &[k, n], &weight).node("MatMul", &["x", "w"], "y", &[]);
        net.model(&["y"])
    }

    /// How a layer's weights are stored, and how many rows it has.
    #[derive(Clone, Copy, Debug)]
    pub struct Linear {
        pub bits: u8,
        pub block: usize,
        pub accuracy_level: i64,
        pub rows: usize,
    }

    /// All that the report names.
    pub fn linears() -> Vec<Linear> {
        let mut all = Vec::new();
        for bits in [4, 8] {
            for block in [16, 32] {
                for accuracy_level in [0, 4] {
                    all.extend([1, 256].map(|rows| Linear { bits, block, accuracy_level, rows }));
                }
            }
        }
        all
    }

    impl Linear {
        pub fn model(&self, dtype: DType, [k, n]: [usize; 2]) -> Model {
            let Linear { bits, block, accuracy_level, rows } = *self;
            let format = BlockFormat { bits, block, symmetric: true, scale: dtype };
            let (zero, per_byte) = (1u8 << (bits - 1), 8 / usize::from(bits));
            let code = |k: usize| if sign(k) > 0.0 { zero + 1 } else { zero - 1 };
            let byte = |i: usize| {
                (0..per_byte).fold(0, |byte, j| byte | code(i * per_byte + j) << (usize::from(bits) * j))
            };
            let codes: Vec<u8> = (0..n).flat_map(|_| (0..k / per_byte).map(byte)).collect();
            let mut net = Net::new(dtype);
            net.x("x", &[1, rows, k]);
            net.constant("codes", Tensor::inline(DType::U8, &format.codes_shape(n, k), codes));
            net.float("scales", &format.scales_shape(n, k), &vec![STEP; n * k / block]);
            let attributes = nbits_attributes(&format, n, k, accuracy_level);
            net.node("ms.MatMulNBits", &["x", "codes", "scales"], "y", &attributes);
            net.model(&["y"])
        }

        /// The self-test of the kernel that this layer has. Blocks of 16 never have the one that rounds activations.
        pub fn self_test(&self) -> &'static str {
            match (self.rows, self.accuracy_level, self.block) {
                (1, _, _) => "large sums in linear layers over one row",
                (_, 4, 32) => "large sums in linear layers",
                _ => "large sums in linear layers, exact",
            }
        }
    }

    /// Sums that adding in f16 gives.
    pub fn in_f16(k: usize) -> f16 {
        (0..k).fold(f16::ZERO, |sum, i| f16::from_f32(sum.to_f32() + X * STEP * sign(i)))
    }
}

fn nbits_attributes(format: &BlockFormat, n: usize, k: usize, level: i64) -> [(&'static str, Attribute); 5] {
    [
        ("K", int(k as i64)),
        ("N", int(n as i64)),
        ("bits", int(i64::from(format.bits))),
        ("block_size", int(format.block as i64)),
        ("accuracy_level", int(level)),
    ]
}

/// Sums of f16 products that leave its range on the way: <https://github.com/microsoft/onnxruntime/pull/29599>,
/// <https://github.com/microsoft/onnxruntime/pull/29611>. Where a kernel adds in f16, the doctor names it, and the same
/// layer computed in f32, which a profile may ask for, is right.
#[test]
fn bug_1_webgpu_sums_beyond_f16() {
    const SIZE: [usize; 2] = [1024, 64];
    assert!(!large_sums::in_f16(SIZE[0]).is_finite(), "the case shows the fault");
    let Some(mut gpu) = webgpu() else { return };
    let tests = self_tests(&mut gpu.runtime).unwrap();
    let verdict = |name: &str| tests.iter().find(|test| test.name == name).unwrap();
    let mut is_right = |model: &Model, feeds: &Feeds| {
        let y = run(&mut gpu.runtime, model, feeds, &["y"]).unwrap()[0].to_f32();
        y.iter().all(|sum| sum.abs() <= 1.0)
    };
    let both = |model: &dyn Fn(DType) -> Model| [DType::F16, DType::F32].map(model);
    let product = both(&|dtype| large_sums::product(dtype, 256, [4096, 512]));
    let mut cases = vec![("MatMul".to_owned(), product, 256, 4096, "large sums in products")];
    cases.extend(large_sums::linears().into_iter().map(|linear| {
        let models = both(&|dtype| linear.model(dtype, SIZE));
        (format!("{linear:?}"), models, linear.rows, SIZE[0], linear.self_test())
    }));
    for (name, [half, full], rows, k, test) in cases {
        assert!(is_right(&full, &large_sums::feeds(DType::F32, rows, k)), "{name} in f32");
        let right = is_right(&half, &large_sums::feeds(DType::F16, rows, k));
        println!("{name} in f16: {}", if right { "right" } else { "wrong" });
        let test = verdict(test);
        assert!(right || !test.passed, "{name} is wrong, and {test:?}");
        assert!(test.passed || test.otherwise.contains("compute = \"f32\""), "{test:?}");
    }
}

/// What the doctor advises: a profile with 8-bit weights that computes in f32 has every linear layer in f32.
#[test]
fn bug_1_profiles_may_compute_in_f32() {
    const MINE: &str = r#"
        base = "flux2-klein"
        name = "whole"
        [profiles.whole]
        compute = "f32"
        weights = "q8"
        symmetric = true
        block = 32
        [gates.whole]
        tensor = 0.5
        image_db = 30.0
    "#;
    let directory = Good::checkpoint().copy();
    put(&directory.path().join("mine.toml"), MINE);
    let scales_of = |profile: &str| {
        let arguments = format!("export ck -o {profile} --profile {profile} --recipe mine.toml {SET}");
        told(directory.path(), &arguments, 0);
        let graph = read_model(&directory.path().join(profile).join("transformer.onnx")).unwrap().graph;
        let layers = graph.nodes().filter(|(_, node)| node.op_type == "MatMulNBits");
        let scales = layers.map(|(_, node)| graph[node.input(2).unwrap()].constant.as_ref().unwrap().dtype);
        scales.collect::<Vec<_>>()
    };
    let (whole, halved) = (scales_of("whole"), scales_of("q8"));
    assert!(whole.len() > 10 && whole.iter().all(|dtype| *dtype == DType::F32), "{whole:?}");
    assert!(halved.len() > 10 && halved.iter().all(|dtype| *dtype == DType::F16), "{halved:?}");
}

/// A layer norm as torch writes it below opset 17. With a weight, too, ONNX Runtime would fuse it.
fn written_norm(opset: i64, dtype: DType) -> Model {
    let mut net = Net::new(dtype);
    net.x("x", &[2, 16]).float("two", &[], &[2.0]).float("epsilon", &[], &[1e-3]);
    net.float("bias", &[16], &noise(3, 16));
    let axes = [("axes", ints(&[-1]))];
    net.node("ReduceMean", &["x"], "mean", &axes).node("Sub", &["x", "mean"], "centred", &[]);
    net.node("Pow", &["centred", "two"], "square", &[]).node("ReduceMean", &["square"], "variance", &axes);
    net.node("Add", &["variance", "epsilon"], "sum", &[]).node("Sqrt", &["sum"], "root", &[]);
    net.node("Div", &["centred", "root"], "normed", &[]).node("Add", &["normed", "bias"], "y", &[]);
    Model { opsets: vec![(String::new(), opset)], ir_version: 8, ..net.model(&["y"]) }
}

/// A norm that an exporter wrote out overflows in f16, without a NaN:
/// <https://github.com/microsoft/onnxruntime/issues/31626>. `report` names the reduction; rewritten it is one operator,
/// and right; converted by us its squares stay f32.
#[test]
fn bug_2_webgpu_decomposed_norm_in_f16() {
    let gpu = &mut webgpu();
    let signs: Vec<f32> = (0..32).map(|i| if i % 3 == 0 { 800.0 } else { -800.0 }).collect();
    for opset in [13, 17] {
        let written = written_norm(opset, DType::F16);
        let found = findings(&written, "llvmpipe", "hazards");
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            (&found[0]["kind"], &found[0]["op_type"]),
            (&"f16_squares_summed".into(), &"ReduceMean".into())
        );
        assert_no_hazards(&written_norm(opset, DType::F32));
        let plain = feed("x", HostTensor::f32(&[2, 16], signs.clone()));
        let expected = run(&mut cpu(), &written_norm(opset, DType::F32), &plain, &["y"]).unwrap();
        let expected = expected[0].to_f32();
        let feeds = feed("x", tensor(DType::F16, &[2, 16], &signs));
        let fused = rewritten(&written, &["fuse_layer_norm"]);
        assert_eq!((count(&fused, "LayerNormalization"), count(&fused, "Pow")), (1, 0));
        assert_no_hazards(&fused);
        let halved = rewritten(&written_norm(opset, DType::F32), &["to_f16"]);
        assert_no_hazards(&halved);
        let Some(gpu) = gpu else { continue };
        let y = run(&mut gpu.runtime, &written, &feeds, &["y"]).unwrap()[0].to_f32();
        // Looking for NaN and infinity alone would not show it.
        assert!(y.iter().all(|y| y.is_finite()), "{y:?}");
        let bias: Vec<f32> = noise(3, 16).repeat(2);
        assert!(relative_error(&y, &bias) < 1e-3, "nothing but the bias is left: {y:?}");
        assert!(relative_error(&y, &expected) > 0.3, "the case shows the fault: {y:?}");
        for (model, feeds) in [(&fused, &feeds), (&halved, &plain)] {
            let y = run(&mut gpu.runtime, model, feeds, &["y"]).unwrap()[0].to_f32();
            assert!(relative_error(&y, &expected) < 3e-3, "{y:?}");
        }
    }
}

const WINDOW: usize = 15;
const LENGTHS: std::ops::RangeInclusive<usize> = 1..=600;

/// `x`, as often as windows cover its length: the length is a shape, and goes through floats.
fn windows() -> Model {
    let mut net = Net::new(DType::F32);
    net.input("x", DType::F32, &[Dim::Symbol("length".to_owned()), Dim::Fixed(2)]);
    net.ints("0", &[0]).float("window", &[1], &[WINDOW as f32]);
    net.node("Shape", &["x"], "shape", &[]).node("Gather", &["shape", "0"], "length", &[]);
    net.node("Cast", &["length"], "float", &[("to", int(1))]).node(
        "Div",
        &["float", "window"],
        "quotient",
        &[],
    );
    net.node("Ceil", &["quotient"], "whole", &[]).node("Cast", &["whole"], "windows", &[("to", int(7))]);
    net.node("Cast", &["windows"], "count", &[("to", int(1))]).node("Mul", &["x", "count"], "y", &[]);
    net.model(&["y"])
}

/// Numbers that are computed of one element come out wrong: <https://github.com/microsoft/onnxruntime/issues/27661>.
/// Rewriting computes them on the host, for every length.
#[test]
fn bug_3_scalar_chains_are_folded() {
    let (model, passes) = (windows(), sequence("lean").unwrap());
    let found = findings(&model, "llvmpipe", "hazards");
    assert!(found.len() == 1 && found[0]["op_type"] == "Cast", "while the length is open: {found:?}");
    for length in LENGTHS {
        let mut folded = model.clone();
        let sizes = [("length".to_owned(), length)].into();
        apply(&mut folded, &passes, &Settings { sizes, ..Settings::default() }).unwrap();
        let nodes: Vec<&Node> = folded.graph.nodes().map(|(_, node)| node).collect();
        let [mul] = nodes[..] else { panic!("{length}: {nodes:?}") };
        let count = folded.graph[mul.input(1).unwrap()].constant.as_ref().unwrap();
        assert_eq!(count.to_f32().unwrap().unwrap(), [length.div_ceil(WINDOW) as f32], "{length}");
    }
}

/// What survives because it depends on data is listed by `report`, at the chain's end.
#[test]
fn bug_3_scalar_chains_that_survive_are_listed() {
    let mut b = Builder::new("scale");
    let x = b.input("length", DType::I64, &fixed([1]));
    let mut y = b.cast(x, DType::F32);
    b.record_shape(y, &fixed([1]));
    let fifteen = b.constant("fifteen", Tensor::from_f32(&[1], &[15.0]));
    for (op, operands) in [("Div", vec![fifteen]), ("Ceil", vec![]), ("Sqrt", vec![])] {
        y = b.op(op, &[vec![y], operands].concat(), &[]);
        b.record_shape(y, &fixed([1]));
    }
    b.output(y, "y", &fixed([1]));
    let found = findings(&b.finish(), "llvmpipe", "hazards");
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0]["what"], "Cast -> Div -> Ceil -> Sqrt on one element");
    assert_eq!(found[0]["op_type"], "Sqrt");
}

/// The same on the device, exactly, or the doctor names it; flux2-vulkan-bridge saw 0.545 for the root of 128, which is
/// 11.31.
#[test]
fn bug_3_webgpu_scalar_chains() {
    let Some(mut gpu) = webgpu() else { return };
    let mut net = Net::new(DType::F32);
    net.x("length", &[1]).float("window", &[1], &[WINDOW as f32]);
    net.node("Div", &["length", "window"], "quotient", &[]).node("Ceil", &["quotient"], "y", &[]);
    let bytes = model_bytes(&net.model(&["y"])).unwrap();
    let tests = self_tests(&mut gpu.runtime).unwrap();
    let passed = tests.iter().find(|test| test.name == "lengths rounded up").unwrap().passed;
    let mut stage = gpu.runtime.open(toy(bytes)).unwrap();
    for length in LENGTHS {
        let y = stage.run(&[("length", &HostTensor::f32(&[1], vec![length as f32]))], &["y"]).unwrap();
        assert!(y[0].to_f32() == [length.div_ceil(WINDOW) as f32] || !passed, "{length}: {y:?}");
    }
    drop(stage);
    // Multiplying by a rounded reciprocal is the fault, and these lengths show it.
    let wrong =
        |length: usize| (length as f32 * (1.0 / WINDOW as f32)).ceil() != length.div_ceil(WINDOW) as f32;
    assert!(LENGTHS.filter(|length| wrong(*length)).count() > 0);
    let mut net = Net::new(DType::F32);
    net.x("size", &[1]).float("one", &[], &[1.0]).node("Sqrt", &["size"], "root", &[]);
    net.node("Div", &["one", "root"], "scale", &[]).node("Sqrt", &["scale"], "y", &[]);
    let feeds = feed("size", HostTensor::f32(&[1], vec![128.0]));
    for (name, expected) in [("root", 128f32.sqrt()), ("y", 128f32.sqrt().recip().sqrt())] {
        let model = net.model(&[name]);
        let [cpu, gpu] = [&mut cpu(), &mut gpu.runtime].map(|on| run(on, &model, &feeds, &[name]).unwrap());
        assert_eq!(cpu[0].to_f32()[0], expected, "{name}");
        // GPUs may divide and take roots to two units in the last place.
        assert!((gpu[0].to_f32()[0] / expected - 1.0).abs() < 1e-6, "{name}: {gpu:?}");
    }
}

/// A chain with a planted fault: bisect names its node.
#[test]
fn bug_3_bisect_names_the_scalar() {
    let chain = |window: f32| {
        let mut net = Net::new(DType::F32);
        net.x("length", &[1]).x("x", &[4]).float("window", &[1], &[window]);
        net.node("Sqrt", &["length"], "root", &[]).node("Div", &["root", "window"], "scale", &[]);
        net.node("Sqrt", &["scale"], "again", &[]).node("Mul", &["x", "again"], "y", &[]);
        net.model(&["y"])
    };
    let directory = tempfile::tempdir().unwrap();
    for (name, window) in [("good", 1.0), ("bad", 0.0482)] {
        let path = directory.path().join(format!("{name}.onnx"));
        write_model(&chain(window), &path, &WriteOptions::default()).unwrap();
    }
    let found = |arguments: &str, code| -> serde_json::Value {
        let arguments = format!("bisect {arguments} --ep cpu --json --out found");
        serde_json::from_str(&told(directory.path(), &arguments, code).0).unwrap()
    };
    assert!(found("good.onnx good.onnx", 0)["found"].is_null());
    let report = found("bad.onnx good.onnx", 3);
    assert_eq!(report["found"]["node"]["name"], "Div_scale", "{report:#}");
}

/// Doubling by Resize picks a neighbour where a quotient misses a whole number:
/// <https://github.com/microsoft/onnxruntime/pull/23591>.
#[test]
fn bug_5_webgpu_nearest_resize() {
    let Some(mut gpu) = webgpu() else { return };
    let resize = |rounding: &str, width: Dim| {
        let mut net = Net::new(DType::F32);
        net.input("x", DType::F32, &[Dim::Fixed(1), Dim::Fixed(1), Dim::Fixed(2), width]);
        net.constant("scales", Tensor::from_f32(&[4], &[1.0, 1.0, 2.0, 2.0]));
        let attributes = [
            ("mode", string("nearest")),
            ("coordinate_transformation_mode", string("asymmetric")),
            ("nearest_mode", string(rounding)),
        ];
        net.node("Resize", &["x", "", "scales"], "y", &attributes).model(&["y"])
    };
    let picture = |width: usize| {
        let x: Vec<f32> = (0..2 * width).map(|i| i as f32).collect();
        let doubled = |i: usize| x[i / (2 * width) / 2 * width + i % (2 * width) / 2];
        let expected: Vec<f32> = (0..8 * width).map(doubled).collect();
        (HostTensor::f32(&[1, 1, 2, width], x), expected)
    };
    let model = resize("floor", Dim::Symbol("width".to_owned()));
    let bytes = model_bytes(&model).unwrap();
    let mut stage = gpu.runtime.open(toy(bytes)).unwrap();
    for width in (1..=300).chain([360, 512, 720, 1000]) {
        let (x, expected) = picture(width);
        let y = stage.run(&[("x", &x)], &["y"]).unwrap();
        assert_eq!(y[0].to_f32(), expected, "width {width}");
    }
    drop(stage);
    for width in [37, 72, 104, 216] {
        let (x, expected) = picture(width);
        let feeds = feed("x", x);
        let y = run(&mut cpu(), &resize("floor", Dim::Fixed(width)), &feeds, &["y"]).unwrap();
        assert_eq!(y[0].to_f32(), expected, "width {width} on the CPU");
        // The neighbour would be noticed.
        let y = run(&mut gpu.runtime, &resize("ceil", Dim::Fixed(width)), &feeds, &["y"]).unwrap();
        assert_ne!(y[0].to_f32(), expected, "width {width}");
    }
}

/// Convolutions over three dimensions in f16 make an invalid shader:
/// <https://github.com/microsoft/onnxruntime/issues/22974>. `report` names them; over one frame, with zeros before it as
/// causal decoders have them for their first, they become convolutions over two dimensions.
#[test]
fn bug_8_webgpu_conv3d_in_f16() {
    let gpu = &mut webgpu();
    let shape = [1, 4, 1, 6, 5];
    let conv = |dtype: DType, pad: Option<&str>| {
        let mut net = Net::new(dtype);
        net.x("x", &shape).float("w", &[3, 4, 3, 3, 3], &noise(1, 12 * 27));
        net.ints("before", &[0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        let (x, frames) = match pad {
            Some(mode) => {
                net.node("Pad", &["x", "before"], "padded", &[("mode", string(mode))]);
                ("padded", 0)
            }
            None => ("x", 2),
        };
        net.node("Conv", &[x, "w"], "y", &[("pads", ints(&[frames, 1, 1, 0, 1, 1]))]);
        net.model(&["y"])
    };
    let x = noise(3, 120);
    let [half, full] = [DType::F16, DType::F32].map(|dtype| feed("x", tensor(dtype, &shape, &x)));
    let is_named = |model: &Model| {
        let found = findings(model, "llvmpipe", "hazards");
        found.len() == 1 && found[0]["kind"] == "f16_conv3d"
    };
    for pad in [None, Some("constant")] {
        let before = conv(DType::F16, pad);
        assert!(is_named(&before), "{pad:?}");
        let after = rewritten(&before, &["flatten_conv3d"]);
        assert_no_hazards(&after);
        let expected = run(&mut cpu(), &conv(DType::F32, pad), &full, &["y"]).unwrap()[0].to_f32();
        let y = run(&mut cpu(), &after, &half, &["y"]).unwrap();
        assert!(relative_error(&y[0].to_f32(), &expected) < 3e-3, "{pad:?}");
        let Some(gpu) = gpu else { continue };
        let y = run(&mut gpu.runtime, &after, &half, &["y"]).unwrap();
        assert!(relative_error(&y[0].to_f32(), &expected) < 3e-3, "{pad:?} on WebGPU");
    }
    // The first frame instead of zeros, and several frames, stay as they are and are named.
    let first = conv(DType::F16, Some("edge"));
    let mut several = Net::new(DType::F16);
    several.x("x", &[1, 4, 3, 8, 8]).float("w", &[4, 4, 3, 3, 3], &[0.0; 432]);
    let several = several.node("Conv", &["x", "w"], "y", &[]).model(&["y"]);
    for model in [&first, &several] {
        assert!(is_named(&rewritten(model, &["flatten_conv3d"])));
    }
    let [zeros, first] = [None, Some("edge")]
        .map(|pad| run(&mut cpu(), &conv(DType::F32, pad), &full, &["y"]).unwrap()[0].to_f32());
    assert!(relative_error(&zeros, &first) > 0.1, "taking the one for the other would show");
}

/// Outputs that take more than 65535 workgroups on one axis are corrupted:
/// <https://github.com/microsoft/onnxruntime/issues/28536>, <https://github.com/microsoft/onnxruntime/pull/23696>,
/// <https://github.com/microsoft/onnxruntime/pull/21687>.
#[test]
fn bug_9_webgpu_large_dispatches() {
    let Some(mut gpu) = webgpu() else { return };
    let mut nets: Vec<(&str, Net, Vec<usize>)> = Vec::new();
    let net = |shape: &[usize]| {
        let mut net = Net::new(DType::F32);
        net.x("x", shape);
        net
    };
    // 64 threads a workgroup, and four elements a thread.
    let elements = vec![1, 3, 2400, 2400];
    let mut negated = net(&elements);
    negated.node("Neg", &["x"], "y", &[]);
    nets.push(("Neg", negated, elements));
    let rows = vec![70_000, 8];
    let mut softmax = net(&rows);
    softmax.node("Softmax", &["x"], "y", &[("axis", int(-1))]);
    nets.push(("Softmax", softmax, rows.clone()));
    let mut norm = net(&rows);
    norm.float("s", &[8], &noise(5, 8)).node(
        "RMSNormalization",
        &["x", "s"],
        "y",
        &[("epsilon", float(1e-6))],
    );
    nets.push(("RMSNormalization", norm, rows));
    let picture = vec![1, 3, 1536, 1536];
    let mut conv = net(&picture);
    conv.constant("w", Tensor::from_f32(&[2, 3, 3, 3], &noise(4, 54)));
    conv.node("Conv", &["x", "w"], "y", &[("pads", ints(&[1, 1, 1, 1]))]);
    nets.push(("Conv", conv, picture));
    let mut cpu = cpu();
    for (name, net, shape) in nets {
        let feeds = feed("x", HostTensor::f32(&shape, noise(3, shape.iter().product())));
        let model = net.model(&["y"]);
        let expected = run(&mut cpu, &model, &feeds, &["y"]).unwrap()[0].to_f32();
        let start = Instant::now();
        let y = run(&mut gpu.runtime, &model, &feeds, &["y"]).unwrap().remove(0).to_f32();
        let error = relative_error(&y, &expected);
        println!("{name}: {error:.2e} {:.2} s", start.elapsed().as_secs_f32());
        assert!(error < 2e-6, "{name}: {error:e}");
        // What the last workgroups would have computed counts.
        let mut cut = y;
        let last = cut.len() - 8;
        cut[last..].fill(0.0);
        assert!(relative_error(&cut, &expected) > 1e-3, "{name}");
    }
}

/// The plainest quantiser there is: codes of a row one after the other, the first in the lowest bits.
fn plain_quantiser(weight: &[f32], n: usize, k: usize, format: &BlockFormat) -> (Vec<u8>, Vec<f32>, Vec<u8>) {
    let (bits, most) = (u32::from(format.bits), f32::from(u8::MAX >> (8 - format.bits)));
    let pack = |row: &[u8], spare: u8| -> Vec<u8> {
        let per_byte = 8 / bits as usize;
        let byte = |codes: &[u8]| {
            let padded = (0..per_byte).map(|i| codes.get(i).copied().unwrap_or(spare));
            padded.enumerate().fold(0, |byte, (i, code)| byte | code << (bits as usize * i))
        };
        row.chunks(per_byte).map(byte).collect()
    };
    let (mut codes, mut scales, mut zeros) = (Vec::new(), Vec::new(), Vec::new());
    for row in weight.chunks(k).take(n) {
        let mut zeros_of_row = Vec::new();
        for block in row.chunks(format.block) {
            let (low, high) = block.iter().fold((0f32, 0f32), |(low, high), w| (low.min(*w), high.max(*w)));
            let scale = (high - low) / most;
            let zero = (-low / scale).round().clamp(0.0, most);
            let code = |w: &f32| (w * (1.0 / scale) + zero).round().clamp(0.0, most) as u8;
            let mut of_block: Vec<u8> = block.iter().map(code).collect();
            of_block.resize(format.block, 0);
            codes.extend(pack(&of_block, 0));
            scales.push(scale);
            zeros_of_row.push(zero as u8);
        }
        zeros.extend(pack(&zeros_of_row, 1 << (bits - 1)));
    }
    (codes, scales, zeros)
}

/// `MatMulNBits` whose rows do not fill their blocks, with an odd number of blocks and zero points:
/// <https://github.com/microsoft/onnxruntime/issues/25231>, <https://github.com/microsoft/onnxruntime/pull/24546>,
/// <https://github.com/microsoft/onnxruntime/pull/31152>. The codes are the plain quantiser's, and the products are right
/// on both providers.
#[test]
fn bug_10_webgpu_zero_points_and_odd_blocks() {
    const N: usize = 8;
    const ROWS: usize = 3;
    let gpu = &mut webgpu();
    for (bits, block, k) in [4, 8]
        .into_iter()
        .flat_map(|bits| [16, 32].into_iter().flat_map(move |block| [48, 72, 80].map(|k| (bits, block, k))))
    {
        let name = format!("{bits} bits, blocks of {block}, K {k}");
        let format = BlockFormat { bits, block, symmetric: false, scale: DType::F32 };
        // Each block is about a number of its own, so that its zero point is its own, too.
        let about = |i: usize| ((i % k) / block) as f32 * 0.3 - 0.4;
        let weight: Vec<f32> =
            noise(k as u64, N * k).iter().enumerate().map(|(i, w)| w * 0.5 + about(i)).collect();
        let Quantized { codes, scales, zero_points } = quantize(&weight, N, k, &format).unwrap();
        let (plain_codes, plain_scales, plain_zeros) = plain_quantiser(&weight, N, k, &format);
        let bytes: Vec<u8> = plain_scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let zeros = zero_points.unwrap();
        assert!(codes == plain_codes && scales == bytes && zeros == plain_zeros, "{name}");
        let model = |zeros: &[u8], level: i64| {
            let mut net = Net::new(DType::F32);
            net.x("x", &[1, ROWS, k]);
            net.constant("codes", Tensor::inline(DType::U8, &format.codes_shape(N, k), codes.clone()));
            net.constant("scales", Tensor::from_f32(&format.scales_shape(N, k), &plain_scales));
            net.constant("zeros", Tensor::inline(DType::U8, &format.zero_points_shape(N, k), zeros.to_vec()));
            let attributes = nbits_attributes(&format, N, k, level);
            net.node("ms.MatMulNBits", &["x", "codes", "scales", "zeros"], "y", &attributes).model(&["y"])
        };
        let x = noise(9, ROWS * k);
        let feeds = feed("x", HostTensor::f32(&[1, ROWS, k], x.clone()));
        let quantized = Quantized { codes: codes.clone(), scales, zero_points: Some(zeros.clone()) };
        let weight = dequantize(&quantized, N, k, &format);
        let dot = |i: usize| {
            let (x, w) = (&x[i / N * k..][..k], &weight[i % N * k..][..k]);
            x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>()
        };
        let expected: Vec<f32> = (0..ROWS * N).map(dot).collect();
        // Level 4 rounds the activations to 8 bits.
        for (level, bar) in [(0, 1e-5), (4, 2e-2)] {
            let y = run(&mut cpu(), &model(&zeros, level), &feeds, &["y"]).unwrap()[0].to_f32();
            assert!(relative_error(&y, &expected) < bar, "{name}, level {level}, CPU");
            let Some(gpu) = gpu else { continue };
            let y = run(&mut gpu.runtime, &model(&zeros, level), &feeds, &["y"]).unwrap()[0].to_f32();
            let error = relative_error(&y, &expected);
            assert!(error < bar, "{name}, level {level}, WebGPU: {error:e}");
        }
        // Zero points in the other order.
        let turned: Vec<u8> = match bits {
            4 => zeros.iter().map(|byte| byte.rotate_left(4)).collect(),
            _ => zeros.chunks(format.blocks(k)).flat_map(|row| row.iter().rev().copied()).collect(),
        };
        let y = run(&mut cpu(), &model(&turned, 0), &feeds, &["y"]).unwrap()[0].to_f32();
        assert!(relative_error(&y, &expected) > 5e-2, "{name}: the order of zero points shows");
    }
}
