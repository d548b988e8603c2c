//! RMS norm that is written out, as one operator.
//!
//! Before: Pow(x, 2) -> ReduceMean over the last axis -> Add epsilon -> Sqrt -> Reciprocal -> Mul x -> Mul weight, in all
//! the spellings of exporters, also between two Casts to f32 and back.
//! After: SimplifiedLayerNormalization, which ONNX Runtime has in the standard domain for every opset. Its statistics are
//! f32 whatever the type, where the written-out form overflows in f16 (values above 255) without a NaN to show for it.
//! Without a weight it gets one of ones.
//!
//! Refused: a mean over other axes, types other than f32 and f16, an epsilon or a width that is not constant.

use std::collections::HashSet;

use super::{Outcome, Pass, PassError, Replacement, Settings, View, normalised};
use crate::onnx::{Attribute, DType, Model, Tensor};

pub const PASS: Pass = Pass {
    name: "fuse_rms_norm",
    what: "x / sqrt(mean(x^2) + eps) * weight -> SimplifiedLayerNormalization",
    why: "six kernels instead of one, and in f16 the squares overflow without a NaN to show for it",
    run,
};

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    let view = View::of(model);
    let mut roots = HashSet::new();
    let found: Vec<_> = normalised::find(&view, &mut outcome)
        .into_iter()
        .filter(|norm| norm.centred(&view).is_none())
        .map(|norm| {
            let weighted = norm.weighted(&view, norm.x);
            let dtype = view.facts().dtype(weighted.x).unwrap_or(DType::F32);
            (norm, weighted, dtype)
        })
        .filter(|(_, weighted, _)| roots.insert(weighted.root))
        .collect();
    for (norm, weighted, dtype) in found {
        let mut new = Replacement::of(&mut model.graph, weighted.root);
        let weight = weighted.weight.unwrap_or_else(|| new.constant(row_of(dtype, norm.width, 1.0)));
        let attributes = [
            ("axis", Attribute::Int(-1)),
            ("epsilon", Attribute::Float(norm.epsilon)),
            ("stash_type", Attribute::Int(1)),
        ];
        new.op_into("SimplifiedLayerNormalization", &[weighted.x, weight], &attributes, weighted.output);
        new.finish();
        outcome.applied += 1;
    }
    Ok(outcome)
}

/// A row of equal values.
pub fn row_of(dtype: DType, width: usize, value: f32) -> Tensor {
    match dtype {
        DType::F16 => Tensor::from_f16(&[width], &vec![value; width]),
        _ => Tensor::from_f32(&[width], &vec![value; width]),
    }
}
