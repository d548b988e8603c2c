use viaduct_export::{
    onnx::{DType, Model},
    passes::{Settings, pass},
};

use crate::{
    runtime_support::{Feeds, Net, float, int, noise, tensor},
    same::{Bar, one, rewrite},
};

const HEAD: usize = 32;

fn norm(dtype: DType, width: usize, axis: i64) -> Model {
    let mut net = Net::new(dtype);
    net.x("x", &[1, 6, 4, width]).float("weight", &[width], &noise(2, width));
    let attributes = [("axis", int(axis)), ("epsilon", float(1e-6))];
    net.node("RMSNormalization", &["x", "weight"], "y", &attributes);
    net.model(&["y"])
}

fn feeds(scale: f32) -> Feeds {
    let values: Vec<f32> = noise(1, 6 * 4 * HEAD).iter().map(|v| v * scale).collect();
    vec![("x".to_owned(), tensor(DType::F16, &[1, 6, 4, HEAD], &values))]
}

/// From values whose squares f16 cannot hold to those that its subnormal numbers spoil.
#[test]
fn norms_of_heads_become_reductions() {
    for (scale, bar) in [(3000.0, 3e-3), (1.0, 3e-3), (0.1, 3e-3), (0.02, 3e-2)] {
        let after = one(&norm(DType::F16, HEAD, -1), "reduce_norms", &feeds(scale), Bar::Relative(bar));
        assert_eq!((after.applied(), after.refusals().len()), (1, 0), "{scale}");
        assert_eq!(after.operators().get("RMSNormalization"), None, "{scale}");
        assert_eq!(after.operators().get("ReduceL2"), Some(&1), "{scale}");
    }
}

#[test]
fn zeros_stay_zeros() {
    one(&norm(DType::F16, HEAD, -1), "reduce_norms", &feeds(0.0), Bar::Exact);
}

#[test]
fn what_the_operator_does_well_or_exactly_stays() {
    for (model, why) in [
        (norm(DType::F32, HEAD, -1), "its weight is not a row of f16 that is known"),
        (norm(DType::F16, 512, -1), "its rows are long enough for the operator"),
        (norm(DType::F16, HEAD, 2), "it is not over the last axis"),
    ] {
        let after = rewrite(&model, &[pass("reduce_norms").unwrap()], &Settings::default());
        assert_eq!((after.applied(), after.refusals()), (0, [(why.to_owned(), 1)].into()));
    }
}
