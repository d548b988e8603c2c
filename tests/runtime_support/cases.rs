//! One small graph for every operator that bundles contain.

use viaduct::tensor::{HostTensor, Values};
use viaduct_export::onnx::{DType, Dim, Tensor};

use super::{Feeds, Net, float, int, ints, noise, string, tensor};

/// A graph with the output `y` and the inputs of a run.
pub struct Case {
    pub name: String,
    pub net: Net,
    pub feeds: Feeds,
    /// Errors that are allowed relative to the CPU provider in f32, on f32 and on f16.
    pub bars: [f32; 2],
}

/// A case under construction for one element type.
struct Draft {
    net: Net,
    feeds: Feeds,
}

impl Draft {
    fn new(dtype: DType) -> Draft {
        Draft { net: Net::new(dtype), feeds: Feeds::new() }
    }

    /// A floating-point input with noise.
    fn x(mut self, name: &str, shape: &[usize]) -> Draft {
        self.net.x(name, shape);
        let values = noise(self.feeds.len() as u64 + 1, shape.iter().product());
        self.feeds.push((name.to_owned(), tensor(self.net.dtype, shape, &values)));
        self
    }

    fn done(self, name: impl Into<String>) -> Case {
        Case { name: name.into(), net: self.net, feeds: self.feeds, bars: [2e-6, 3e-3] }
    }
}

pub fn all(dtype: DType) -> Vec<Case> {
    let mut cases = products(dtype);
    cases.extend(norms(dtype));
    cases.extend(images(dtype));
    cases.extend(layout(dtype));
    cases.extend(pointwise(dtype));
    cases
}

fn products(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    let weight = noise(9, 96 * 64);
    let shapes: [(&str, &[usize]); 2] =
        [("MatMul 3-D x 2-D", &[1, 40, 96]), ("MatMul 4-D x 2-D", &[1, 4, 10, 96])];
    for (name, shape) in shapes {
        let mut case = Draft::new(dtype).x("x", shape);
        case.net.float("w", &[96, 64], &weight).node("MatMul", &["x", "w"], "y", &[]);
        cases.push(case.done(name));
    }
    let mut case = Draft::new(dtype).x("a", &[1, 4, 40, 32]).x("b", &[1, 4, 32, 48]);
    case.net.node("MatMul", &["a", "b"], "y", &[]);
    cases.push(case.done("MatMul 4-D x 4-D"));
    for (bits, block, level, zeros, bias) in [
        (4, 32, 0, false, false),
        (4, 32, 4, false, false),
        (4, 32, 4, true, false),
        (4, 16, 0, true, true),
        (8, 32, 0, false, false),
        (8, 32, 4, false, true),
        (8, 32, 4, true, true),
    ] {
        for rows in [1, 40] {
            cases.push(nbits(dtype, rows, bits, block, level, zeros, bias));
        }
    }
    cases
}

fn nbits(dtype: DType, rows: usize, bits: usize, block: usize, level: i64, zeros: bool, bias: bool) -> Case {
    let (k, n) = (128, 64);
    let blocks = k / block;
    let bytes = |seed, count: usize| -> Vec<u8> {
        noise(seed, count).iter().map(|v| ((v + 1.0) * 127.9) as u8).collect()
    };
    let mut case = Draft::new(dtype).x("x", &[1, rows, k]);
    let (width, zero_width) = (block * bits / 8, (blocks * bits).div_ceil(8));
    case.net.constant("b", Tensor::inline(DType::U8, &[n, blocks, width], bytes(5, n * blocks * width)));
    let scales: Vec<f32> = noise(6, n * blocks).iter().map(|v| 0.02 + 0.01 * v).collect();
    case.net.float("scales", &[n * blocks], &scales);
    case.net.constant("zeros", Tensor::inline(DType::U8, &[n * zero_width], bytes(7, n * zero_width)));
    case.net.float("bias", &[n], &noise(8, n));
    let inputs = ["x", "b", "scales", if zeros { "zeros" } else { "" }, "", if bias { "bias" } else { "" }];
    let attributes = [
        ("K", int(k as i64)),
        ("N", int(n as i64)),
        ("bits", int(bits as i64)),
        ("block_size", int(block as i64)),
        ("accuracy_level", int(level)),
    ];
    let used = inputs.iter().rposition(|i| !i.is_empty()).map_or(0, |last| last + 1);
    case.net.node("ms.MatMulNBits", &inputs[..used], "y", &attributes);
    let with = |on: bool, text: &str| if on { text.to_owned() } else { String::new() };
    let mut case = case.done(format!(
        "MatMulNBits q{bits} block {block} level {level}{}{} M {rows}",
        with(zeros, " zeros"),
        with(bias, " bias")
    ));
    // Level 4 rounds the activations to 8 bits.
    if level == 4 {
        case.bars = [1e-2, 1e-2];
    }
    case
}

fn norms(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    let scale: Vec<f32> = noise(3, 96).iter().map(|v| 1.0 + 0.5 * v).collect();
    let mut case = Draft::new(dtype).x("x", &[1, 40, 96]);
    case.net.float("s", &[96], &scale);
    case.net.node("RMSNormalization", &["x", "s"], "y", &[("axis", int(-1)), ("epsilon", float(1e-6))]);
    cases.push(case.done("RMSNormalization 3-D"));
    let mut case = Draft::new(dtype).x("x", &[1, 40, 4, 32]);
    case.net.float("s", &[32], &scale[..32]);
    case.net.node("RMSNormalization", &["x", "s"], "y", &[("axis", int(-1)), ("epsilon", float(1e-6))]);
    cases.push(case.done("RMSNormalization per head"));
    let mut case = Draft::new(dtype).x("x", &[1, 40, 96]);
    case.net.float("s", &[96], &scale);
    case.net.node(
        "SimplifiedLayerNormalization",
        &["x", "s"],
        "y",
        &[("axis", int(-1)), ("epsilon", float(1e-6))],
    );
    cases.push(case.done("SimplifiedLayerNormalization"));
    let mut case = Draft::new(dtype).x("x", &[1, 40, 96]);
    case.net.float("s", &[96], &[1.0; 96]);
    case.net.node("LayerNormalization", &["x", "s"], "y", &[("axis", int(-1)), ("epsilon", float(1e-6))]);
    cases.push(case.done("LayerNormalization scale 1, no bias"));
    let mut case = Draft::new(dtype).x("x", &[1, 40, 96]);
    case.net.float("s", &[96], &scale).float("b", &[96], &noise(4, 96));
    case.net.node(
        "LayerNormalization",
        &["x", "s", "b"],
        "y",
        &[("axis", int(-1)), ("epsilon", float(1e-6))],
    );
    cases.push(case.done("LayerNormalization"));
    let mut case = Draft::new(dtype).x("x", &[1, 8, 300]);
    case.net.float("s", &[8], &scale[..8]).float("b", &[8], &noise(4, 8));
    case.net.node("InstanceNormalization", &["x", "s", "b"], "y", &[("epsilon", float(1e-6))]);
    cases.push(case.done("InstanceNormalization 3-D"));
    let mut case = Draft::new(dtype).x("x", &[1, 64, 9, 11]);
    case.net.float("one", &[8], &[1.0; 8]).float("zero", &[8], &[0.0; 8]);
    case.net.float("s", &[64, 1, 1], &scale[..64]).float("b", &[64, 1, 1], &noise(4, 64));
    case.net.ints("groups", &[0, 8, -1]).ints("back", &[1, 64, 9, 11]);
    case.net.node("Reshape", &["x", "groups"], "g", &[]);
    case.net.node("InstanceNormalization", &["g", "one", "zero"], "n", &[("epsilon", float(1e-6))]);
    case.net.node("Reshape", &["n", "back"], "r", &[]).node("Mul", &["r", "s"], "m", &[]);
    case.net.node("Add", &["m", "b"], "y", &[]);
    cases.push(case.done("GroupNorm by InstanceNormalization"));
    let mut case = Draft::new(dtype).x("x", &[1, 4, 40, 80]);
    case.net.node("Softmax", &["x"], "y", &[("axis", int(-1))]);
    cases.push(case.done("Softmax"));
    for (interleaved, name) in [(1, "RotaryEmbedding interleaved"), (0, "RotaryEmbedding halves")] {
        cases.push(rotary(dtype, interleaved, name));
    }
    cases
}

/// Heads packed in the last axis, angles as graph inputs, one constant position.
fn rotary(dtype: DType, interleaved: i64, name: &str) -> Case {
    let (tokens, heads, size) = (40, 4, 32);
    let mut case = Draft::new(dtype).x("x", &[1, tokens, heads * size]);
    let angle =
        |i: usize| (i / (size / 2)) as f32 * 100f32.powf(-((i % (size / 2)) as f32) / (size / 2) as f32);
    let angles: Vec<f32> = (0..tokens * size / 2).map(angle).collect();
    for (cache, f) in [("cos", f32::cos as fn(f32) -> f32), ("sin", f32::sin)] {
        case.net.x(cache, &[tokens, size / 2]);
        let values: Vec<f32> = angles.iter().map(|a| f(*a)).collect();
        case.feeds.push((cache.to_owned(), tensor(dtype, &[tokens, size / 2], &values)));
    }
    case.net.ints("position", &[0]);
    let attributes = [("interleaved", int(interleaved)), ("num_heads", int(heads as i64))];
    case.net.node("ms.RotaryEmbedding", &["x", "position", "cos", "sin"], "y", &attributes);
    case.done(name)
}

fn images(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    // https://github.com/microsoft/onnxruntime/pull/23591: a division that misses a whole number picks the neighbour.
    for width in [37, 72, 104, 216] {
        let mut case = Draft::new(dtype).x("x", &[1, 3, 5, width]);
        case.net.constant("scales", Tensor::from_f32(&[4], &[1.0, 1.0, 2.0, 2.0]));
        let attributes = [
            ("mode", string("nearest")),
            ("coordinate_transformation_mode", string("asymmetric")),
            ("nearest_mode", string("floor")),
        ];
        case.net.node("Resize", &["x", "", "scales"], "y", &attributes);
        cases.push(case.done(format!("Resize nearest x2, width {width}")));
    }
    let mut case = Draft::new(dtype).x("x", &[1, 16, 5, 7]);
    case.net.node("DepthToSpace", &["x"], "y", &[("blocksize", int(2)), ("mode", string("CRD"))]);
    cases.push(case.done("DepthToSpace CRD"));
    for (kernel, stride, pads) in [(3, 1, [1, 1, 1, 1]), (3, 2, [0, 0, 1, 1]), (1, 1, [0, 0, 0, 0])] {
        let mut case = Draft::new(dtype).x("x", &[1, 8, 18, 14]);
        case.net.float("w", &[12, 8, kernel, kernel], &noise(7, 12 * 8 * kernel * kernel));
        case.net.float("b", &[12], &noise(8, 12));
        let attributes = [("strides", ints(&[stride, stride])), ("pads", ints(&pads))];
        case.net.node("Conv", &["x", "w", "b"], "y", &attributes);
        cases.push(case.done(format!("Conv {kernel}x{kernel} stride {stride}")));
    }
    let mut case = Draft::new(dtype).x("x", &[1, 3, 5, 7]);
    case.net.ints("pads", &[0, 0, 0, 0, 0, 0, 1, 1]).node("Pad", &["x", "pads"], "y", &[]);
    cases.push(case.done("Pad"));
    cases
}

fn layout(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut case = Draft::new(dtype).x("x", &[1, 40, 96]);
    case.net.ints("s", &[10]).ints("e", &[30]).ints("a", &[1]);
    case.net.node("Slice", &["x", "s", "e", "a"], "y", &[]);
    cases.push(case.done("Slice"));
    let mut case = Draft::new(dtype).x("a", &[1, 12, 96]).x("b", &[1, 40, 96]);
    case.net.node("Concat", &["a", "b"], "y", &[("axis", int(1))]);
    cases.push(case.done("Concat of 2"));
    let mut case = Draft::new(dtype).x("x", &[1, 40, 4, 24]);
    case.net.node("Transpose", &["x"], "y", &[("perm", ints(&[0, 2, 1, 3]))]);
    cases.push(case.done("Transpose"));
    let mut case = Draft::new(dtype).x("x", &[1, 40, 96]);
    case.net.ints("shape", &[0, 0, 4, -1]).node("Reshape", &["x", "shape"], "r", &[]).node(
        "Neg",
        &["r"],
        "y",
        &[],
    );
    cases.push(case.done("Reshape with 0 and -1"));
    let mut case = Draft::new(dtype).x("table", &[50, 16]);
    case.net.input("ids", DType::I64, &[Dim::Fixed(1), Dim::Fixed(5)]);
    case.feeds.push(("ids".to_owned(), HostTensor::i64(&[1, 5], vec![3, 0, 49, 7, 7])));
    case.net.node("Gather", &["table", "ids"], "y", &[]);
    cases.push(case.done("Gather by i64"));
    let mut case = Draft::new(dtype).x("x", &[1, 40, 96]);
    case.net.constant("to", Tensor::from_i64(&[3], &[2, 40, 96])).node("Expand", &["x", "to"], "y", &[]);
    cases.push(case.done("Expand"));
    let mut case = Draft::new(dtype);
    case.net.input("t", DType::U8, &[Dim::Fixed(64)]);
    case.feeds.push(("t".to_owned(), HostTensor::new(&[64], Values::U8((0..64).collect()))));
    case.net.node("Cast", &["t"], "y", &[("to", int(i64::from(dtype.to_onnx())))]);
    cases.push(case.done("Cast from u8"));
    cases
}

fn pointwise(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut case = Draft::new(dtype).x("x", &[1, 40, 96]);
    case.net.node("Sigmoid", &["x"], "s", &[]).node("Mul", &["x", "s"], "y", &[]);
    cases.push(case.done("x * Sigmoid(x)"));
    let mut case = Draft::new(dtype).x("x", &[1, 40, 96]);
    case.net.float("lo", &[], &[-0.5]).float("hi", &[], &[0.25]).node("Clip", &["x", "lo", "hi"], "y", &[]);
    cases.push(case.done("Clip"));
    let mut case = Draft::new(dtype).x("x", &[1, 40, 96]);
    let other = if dtype == DType::F16 { DType::F32 } else { DType::F16 };
    case.net.node("Cast", &["x"], "c", &[("to", int(i64::from(other.to_onnx())))]);
    case.net.node("Mul", &["c", "c"], "d", &[]);
    case.net.node("Cast", &["d"], "y", &[("to", int(i64::from(dtype.to_onnx())))]);
    cases.push(Case { bars: [3e-4, 3e-4], ..case.done("Cast f16 <-> f32") });
    let mut case = Draft::new(dtype).x("x", &[1, 40, 96]).x("shift", &[1, 1, 96]).x("scale", &[1, 1, 96]);
    case.net.float("one", &[], &[1.0]).node("Add", &["scale", "one"], "f", &[]);
    case.net.node("Mul", &["x", "f"], "m", &[]).node("Add", &["m", "shift"], "y", &[]);
    cases.push(case.done("x * (1 + scale) + shift"));
    for (name, approximate) in [("Gelu", "none"), ("Gelu tanh", "tanh")] {
        let mut case = Draft::new(dtype).x("x", &[1, 40, 96]);
        case.net.node("Gelu", &["x"], "y", &[("approximate", string(approximate))]);
        cases.push(case.done(name));
    }
    for op in ["Tanh", "Exp", "Erf"] {
        let mut case = Draft::new(dtype).x("x", &[1, 40, 96]);
        case.net.node(op, &["x"], "y", &[]);
        cases.push(Case { bars: [2e-6, 5e-3], ..case.done(op) });
    }
    // flux2-vulkan-bridge saw 0.545 for the square root of 128 that a chain of scalars computed on the device.
    let mut case = Draft::new(dtype);
    case.net.x("x", &[1]).float("one", &[], &[1.0]);
    case.feeds.push(("x".to_owned(), tensor(dtype, &[1], &[128.0])));
    case.net.node("Sqrt", &["x"], "a", &[]).node("Div", &["one", "a"], "b", &[]).node(
        "Sqrt",
        &["b"],
        "y",
        &[],
    );
    cases.push(case.done("Sqrt, Div, Sqrt of one number"));
    cases
}

/// One attention over q, k and v [1, rows, heads * size], with the output `y`.
pub fn attention(dtype: DType, rows: usize, heads: usize, size: usize) -> (Net, Feeds) {
    let mut net = Net::new(dtype);
    let shape = [1, rows, heads * size];
    let mut feeds = Vec::new();
    for (seed, name) in ["q", "k", "v"].into_iter().enumerate() {
        net.x(name, &shape);
        feeds.push((name.to_owned(), tensor(dtype, &shape, &noise(seed as u64 + 1, rows * heads * size))));
    }
    net.node("ms.MultiHeadAttention", &["q", "k", "v"], "y", &[("num_heads", int(heads as i64))]);
    (net, feeds)
}
