use viaduct_export::{
    onnx::{Attribute, DType, Model, Tensor},
    passes::{Linears, Settings, pass},
    quant::{BlockFormat, dequantize, quantize},
};

use crate::{
    runtime_support::{Feeds, Net, float, int, ints, noise, tensor},
    same::{Bar, Rewritten, passes, rewrite},
};

const K: usize = 64;
const N: usize = 48;

/// A weight that 8-bit blocks hold exactly: what it is after having been quantised once.
fn weight(seed: u64) -> Vec<f32> {
    let format = BlockFormat { bits: 8, block: 32, symmetric: true, scale: DType::F32 };
    dequantize(&quantize(&noise(seed, N * K), N, K, &format).unwrap(), N, K, &format)
}

fn turned(weight: &[f32]) -> Vec<f32> {
    (0..K).flat_map(|k| (0..N).map(move |n| weight[n * K + k])).collect()
}

fn feeds() -> Feeds {
    vec![("x".to_owned(), tensor(DType::F32, &[5, K], &noise(9, 5 * K)))]
}

/// Computes with floats whatever the activations are: the comparison is of weights.
fn exact() -> Settings {
    Settings { linears: Linears { accuracy_level: 1, ..Linears::default() }, ..Settings::default() }
}

fn q8(model: &Model) -> Rewritten {
    passes(model, &[pass("quantize_matmul_q8").unwrap()], &exact(), &feeds(), Bar::Relative(2e-6))
}

fn net() -> Net {
    let mut net = Net::new(DType::F32);
    net.x("x", &[5, K]);
    net
}

#[test]
fn all_forms_of_a_linear_layer() {
    let w = weight(1);
    let mut net = net();
    net.float("w_kn", &[K, N], &turned(&w)).float("w_nk", &[N, K], &w).float("b", &[N], &noise(3, N));
    net.node("MatMul", &["x", "w_kn"], "y1", &[]);
    net.node("Transpose", &["w_nk"], "t", &[("perm", ints(&[1, 0]))]).node("MatMul", &["x", "t"], "y2", &[]);
    net.node("Gemm", &["x", "w_nk", "b"], "y3", &[("transB", int(1))]);
    net.node("Gemm", &["x", "w_kn"], "y4", &[]);
    let after = q8(&net.model(&["y1", "y2", "y3", "y4"]));
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("MatMulNBits", 4)]);
    // Two weights, each stored once: codes and scales, and the bias.
    let constants = after.model.graph.values().filter(|(_, value)| value.constant.is_some()).count();
    assert_eq!(constants, 5);
}

#[test]
fn four_bits_have_zero_points_unless_symmetric() {
    let mut net = net();
    net.float("w", &[K, N], &noise(1, N * K)).node("MatMul", &["x", "w"], "y", &[]);
    for (symmetric, operands) in [(false, 4), (true, 3)] {
        let settings =
            Settings { linears: Linears { symmetric, ..Linears::default() }, ..Settings::default() };
        let after = rewrite(&net.model(&["y"]), &[pass("quantize_matmul_q4").unwrap()], &settings);
        let (_, node) = after.model.graph.nodes().next().unwrap();
        assert_eq!(node.inputs.len(), operands);
    }
}

#[test]
fn rules_look_at_the_weight_and_the_node() {
    let mut net = net();
    net.float("onnx::MatMul_7", &[K, N], &noise(1, N * K)).float("proj.weight", &[K, N], &noise(2, N * K));
    net.node("MatMul", &["x", "onnx::MatMul_7"], "/time/embed", &[]).node(
        "MatMul",
        &["x", "proj.weight"],
        "y",
        &[],
    );
    let model = net.model(&["/time/embed", "y"]);
    for (include, exclude, applied) in
        [("", "time", 1), ("", r"^proj\.", 1), ("proj|time", "", 2), ("proj", "weight", 0)]
    {
        let rules = |text: &str| Some(text).filter(|t| !t.is_empty()).map(|t| regex::Regex::new(t).unwrap());
        let linears = Linears {
            include: rules(include).into_iter().collect(),
            rules: rules(exclude).map(|name| (name, None)).into_iter().collect(),
            ..Linears::default()
        };
        let settings = Settings { linears, ..Settings::default() };
        let after = rewrite(&model, &[pass("quantize_matmul_q8").unwrap()], &settings);
        assert_eq!(after.applied(), applied, "{include} without {exclude}");
        assert_eq!(after.refusals().values().sum::<usize>(), 2 - applied);
    }
}

#[test]
fn rules_say_the_bits_and_the_first_that_matches_counts() {
    let mut net = net();
    for (name, seed) in [("mod.1", 1), ("mod.2", 2), ("proj", 3)] {
        net.float(name, &[K, N], &noise(seed, N * K)).node("MatMul", &["x", name], &format!("{name}/y"), &[]);
    }
    let rules = [("2$", None), ("^mod", Some(8))];
    let rules = rules.map(|(name, bits)| (regex::Regex::new(name).unwrap(), bits)).to_vec();
    let settings = Settings { linears: Linears { rules, ..Linears::default() }, ..Settings::default() };
    let model = net.model(&["mod.1/y", "mod.2/y", "proj/y"]);
    let after = rewrite(&model, &[pass("quantize_matmul_q4").unwrap()], &settings);
    let graph = &after.model.graph;
    let bits: Vec<_> = graph.nodes().map(|(_, node)| node.int("bits")).collect();
    assert_eq!(bits, [Some(8), None, Some(4)]);
    // Eight bits have no zero points.
    let operands: Vec<_> = graph.nodes().map(|(_, node)| node.inputs.len()).collect();
    assert_eq!(operands, [3, 2, 4]);
}

/// The layer is named; the others are quantised, and the model can be written.
#[test]
fn a_weight_that_is_not_finite_stays_as_it_is() {
    for (dtype, value) in [(DType::F32, f32::NAN), (DType::F32, f32::MAX), (DType::F16, f32::INFINITY)] {
        let mut net = Net::new(dtype);
        let mut broken = noise(1, N * K);
        broken[700] = value;
        net.x("x", &[5, K]).float("bad", &[K, N], &broken).float("good", &[K, N], &noise(2, N * K));
        net.node("MatMul", &["x", "bad"], "y1", &[]).node("MatMul", &["x", "good"], "y2", &[]);
        let after =
            rewrite(&net.model(&["y1", "y2"]), &[pass("quantize_matmul_q8").unwrap()], &Settings::default());
        assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("MatMul", 1), ("MatMulNBits", 1)]);
        let [refusal] = &after.reports[0].refused[..] else { panic!("{:?}", after.reports) };
        assert_eq!(refusal.place, "MatMul_y1");
        assert_eq!(refusal.why, "its weight is not finite, or too large for a scale");
    }
}

/// What is left alone, the reason, and one difference to what is not.
#[test]
fn refusals() {
    type Case = (&'static str, fn(&mut Net));
    let cases: [Case; 7] = [
        ("its constant is the first operand", |net| {
            net.float("w", &[N, 5], &noise(1, N * 5)).node("MatMul", &["w", "x"], "y", &[]);
        }),
        ("its weight is not a matrix", |net| {
            net.float("w", &[1, K, N], &noise(1, N * K)).node("MatMul", &["x", "w"], "y", &[]);
        }),
        ("its weight is not of f32, f16 or bf16", |net| {
            net.constant("w", Tensor::from_i64(&[K, N], &vec![1; K * N]));
            net.node("Cast", &["x"], "i", &[("to", int(7))]).node("MatMul", &["i", "w"], "y", &[]);
        }),
        ("x is not known to be f32 or f16", |net| {
            net.float("w", &[K, N], &noise(1, N * K)).node("ms.Unheard", &["x"], "u", &[]);
            net.node("MatMul", &["u", "w"], "y", &[]);
        }),
        ("it scales or transposes x", |net| {
            net.float("w", &[K, N], &noise(1, N * K)).node(
                "Gemm",
                &["x", "w"],
                "y",
                &[("alpha", float(0.5))],
            );
        }),
        ("it scales its bias", |net| {
            net.float("w", &[K, N], &noise(1, N * K)).float("b", &[N], &noise(2, N));
            net.node("Gemm", &["x", "w", "b"], "y", &[("beta", float(0.5))]);
        }),
        ("its bias is not a constant vector", |net| {
            net.float("w", &[K, N], &noise(1, N * K)).float("b", &[5, N], &noise(2, 5 * N));
            net.node("Gemm", &["x", "w", "b"], "y", &[]);
        }),
    ];
    for (why, build) in cases {
        let mut net = net();
        build(&mut net);
        let after = rewrite(&net.model(&["y"]), &[pass("quantize_matmul_q8").unwrap()], &Settings::default());
        assert_eq!(after.refusals().into_iter().collect::<Vec<_>>(), [(why.to_owned(), 1)]);
        assert_eq!(after.applied(), 0, "{why}");
    }
}

#[test]
fn a_product_of_two_computed_values_has_no_weight() {
    let mut net = net();
    net.node("Transpose", &["x"], "t", &[("perm", Attribute::Ints(vec![1, 0]))]).node(
        "MatMul",
        &["x", "t"],
        "y",
        &[],
    );
    let after = rewrite(&net.model(&["y"]), &[pass("quantize_matmul_q8").unwrap()], &Settings::default());
    assert_eq!((after.applied(), after.refusals().len()), (0, 0));
}
