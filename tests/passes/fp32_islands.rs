use viaduct_export::{
    onnx::{DType, Dim},
    passes::{Settings, pass},
};

use crate::{
    runtime_support::{Net, cpu, int, noise, run, tensor},
    same::{Bar, one, rewrite},
};

/// `x + gate * LayerNorm(x)`, in f16.
fn block() -> Net {
    let mut net = Net::new(DType::F16);
    net.x("x", &[1, 4, 8]).float("w", &[8], &noise(1, 8)).float("gate", &[8], &noise(2, 8));
    net.node("LayerNormalization", &["x", "w"], "n", &[("axis", int(-1))]);
    net.node("Mul", &["n", "gate"], "g", &[]).node("Add", &["x", "g"], "y", &[]);
    net
}

#[test]
fn norm_gate_and_residual_addition_become_islands_of_their_own() {
    let feeds = vec![("x".to_owned(), tensor(DType::F16, &[1, 4, 8], &noise(3, 32)))];
    let after = one(&block().model(&["y"]), "fp32_islands", &feeds, Bar::Relative(2e-3));
    assert_eq!(after.applied(), 3);
    // Two operands of the addition and one of each other node go up, three results come down.
    assert_eq!((after.operators()["Cast"], after.operators()["Clip"]), (7, 2));
}

#[test]
fn a_sum_beyond_the_range_saturates() {
    let feeds = vec![("x".to_owned(), tensor(DType::F16, &[1, 4, 8], &[60000.0; 32]))];
    let mut net = Net::new(DType::F16);
    net.x("x", &[1, 4, 8]).node("Relu", &["x"], "r", &[]).node("Add", &["x", "r"], "y", &[]);
    let model = net.model(&["y"]);
    let after = rewrite(&model, &[pass("fp32_islands").unwrap()], &Settings::default());
    let largest = |model| run(&mut cpu(), model, &feeds, &["y"]).unwrap()[0].to_f32()[0];
    assert_eq!((largest(&model), largest(&after.model)), (f32::INFINITY, 65504.0));
}

#[test]
fn a_bias_is_no_residual_addition_and_unknown_shapes_are_refused() {
    let mut net = Net::new(DType::F16);
    net.x("x", &[1, 4, 8]).x("one", &[8]).node("Relu", &["x"], "r", &[]).node("Add", &["r", "one"], "y", &[]);
    net.node("Neg", &["r"], "z", &[]);
    let passes = [pass("fp32_islands").unwrap()];
    let after = rewrite(&net.model(&["y", "z"]), &passes, &Settings::default());
    assert_eq!((after.applied(), after.refusals().len()), (0, 0));

    let mut net = Net::new(DType::F16);
    net.input("x", DType::F16, &[Dim::Fixed(4)]).node("ms.Unheard", &["x"], "u", &[]);
    net.node("Cast", &["u"], "h", &[("to", int(10))]).node("Add", &["h", "x"], "y", &[]).node(
        "Neg",
        &["x"],
        "z",
        &[],
    );
    let after = rewrite(&net.model(&["y", "z"]), &passes, &Settings::default());
    let why = "the shapes of what it adds are not known".to_owned();
    assert_eq!(after.refusals().into_iter().collect::<Vec<_>>(), [(why, 1)]);
}
