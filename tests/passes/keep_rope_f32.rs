use viaduct_export::{
    onnx::{DType, Tensor},
    passes::{Settings, pass},
};

use crate::{
    runtime_support::{Net, int, noise, tensor},
    same::{Bar, one, rewrite},
};

const CAST_F32: i64 = 1;
const CAST_F16: i64 = 10;
const CAST_F64: i64 = 11;

fn double(shape: &[usize], values: &[f64]) -> Tensor {
    Tensor::inline(DType::F64, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
}

fn angles(op: &str) -> Net {
    let mut net = Net::new(DType::F32);
    net.x("ids", &[5, 1])
        .constant("frequencies", double(&[4], &[1.0, 0.149534878, 0.02236068, 0.0033437]))
        .node("Cast", &["ids"], "wide", &[("to", int(CAST_F64))])
        .node("Mul", &["wide", "frequencies"], "angle", &[])
        .node(op, &["angle"], "table", &[])
        .node("Cast", &["table"], "y", &[("to", int(CAST_F32))]);
    net
}

#[test]
fn doubles_become_f32() {
    let feeds = vec![("ids".to_owned(), tensor(DType::F32, &[5, 1], &[0.0, 1.0, 2.0, 31.0, 63.0]))];
    let after = one(&angles("Cos").model(&["y"]), "keep_rope_f32", &feeds, Bar::Relative(1e-5));
    assert_eq!(after.applied(), 1);
    let graph = &after.model.graph;
    let doubles =
        graph.values().filter(|(_, value)| value.constant.as_ref().is_some_and(|c| c.dtype == DType::F64));
    assert_eq!(doubles.count(), 0);
}

/// In f16 sines, and in those that are f32 already.
#[test]
fn angles_that_were_cast_to_f16_are_taken_from_before() {
    for wide_sine in [false, true] {
        let mut net = Net::new(DType::F32);
        net.x("ids", &[5, 1])
            .constant("frequencies", Tensor::from_f16(&[4], &noise(2, 4)))
            .node("Cast", &["ids"], "narrow", &[("to", int(CAST_F16))])
            .node("Mul", &["narrow", "frequencies"], "angle", &[])
            .node("Cast", &["angle"], "wide", &[("to", int(CAST_F32))])
            .node("Sin", &[if wide_sine { "wide" } else { "angle" }], "table", &[])
            .node("Cast", &["table"], "y", &[("to", int(CAST_F32))]);
        let feeds = vec![("ids".to_owned(), tensor(DType::F32, &[5, 1], &[0.0, 1.0, 2.0, 3.0, 4.0]))];
        let after = one(&net.model(&["y"]), "keep_rope_f32", &feeds, Bar::Relative(5e-3));
        assert_eq!(after.applied(), 1);
        let casts = after.model.graph.nodes().filter(|(_, node)| node.int("to") == Some(CAST_F16)).count();
        assert_eq!(casts, usize::from(!wide_sine), "only the sines are f16");
    }
}

#[test]
fn doubles_of_the_caller_and_of_other_operators_are_refused() {
    let refusals = |net: &Net, outputs: &[(&str, DType)]| {
        let after =
            rewrite(&net.model_typed(outputs), &[pass("keep_rope_f32").unwrap()], &Settings::default());
        assert_eq!(after.applied(), 0);
        after.refusals().into_keys().collect::<Vec<_>>()
    };
    assert_eq!(refusals(&angles("Cos"), &[("table", DType::F64)]), ["a graph input or output is f64"]);
    assert_eq!(
        refusals(&angles("Erf"), &[("y", DType::F32)]),
        ["an operator on f64 is more than plain arithmetic"]
    );
}
