//! The time embedding's two linears and the shared modulation vectors: all that depends on the step alone. One run
//! serves every step of a schedule, and 4 % of the weights leave the transformer's graph. Computed in f32.

use super::{Constants, Flux2Error, config::TransformerConfig};
use crate::{
    arch::{author::Author, blocks::mlp::silu},
    onnx::{DType, Dim, Model, Tensor, ValueId},
    recipe::{Compute, Precision},
    weights::Checkpoint,
};

/// Input: `time_embedding` [steps, time_channels]. Outputs, f32: `dit_temb` [steps, width], and modulation vectors with
/// 1 already added to every scale: `mod_img`, `mod_txt` [steps, 6, width] (shift, scale, gate of attention, then of the
/// feed-forward), `mod_single` [steps, 3, width] (shift, scale, gate), `mod_out` [steps, 2, width] (shift, scale).
pub fn author(
    config: &TransformerConfig,
    weights: &Checkpoint,
    precision: &Precision,
    constants: &Constants,
) -> Result<Model, Flux2Error> {
    let precision = Precision { compute: Compute::F32, accuracy_level: 0, ..precision.clone() };
    let mut a = Author::new("modulation", weights, &precision);
    let (width, channels) = (config.width(), config.timestep_guidance_channels);
    let steps = Dim::Symbol("steps".to_owned());
    let e = a.graph.input("time_embedding", DType::F32, &[steps.clone(), Dim::Fixed(channels)]);
    let time = |name| format!("time_guidance_embed.timestep_embedder.{name}.weight");
    let e = a.project(e, &time("linear_1"), channels, width)?;
    let e = silu(&mut a, e);
    let vec = a.project(e, &time("linear_2"), width, width)?;
    a.graph.output(vec, "dit_temb", &[steps.clone(), Dim::Fixed(width)]);
    let vec = silu(&mut a, vec);
    let sets: [(&str, &str, &[f32]); 3] = [
        ("mod_img", "double_stream_modulation_img", &[0.0, 1.0, 0.0, 0.0, 1.0, 0.0]),
        ("mod_txt", "double_stream_modulation_txt", &[0.0, 1.0, 0.0, 0.0, 1.0, 0.0]),
        ("mod_single", "single_stream_modulation", &[0.0, 1.0, 0.0]),
    ];
    for (output, layer, ones) in sets {
        let vectors = vectors(&mut a, vec, &format!("{layer}.linear.weight"), ones.len(), width)?;
        emit(&mut a, vectors, output, ones, width);
    }
    let rows = vectors(&mut a, vec, "norm_out.linear.weight", 2, width)?;
    let shift_first = match constants.norm_out_scale_first {
        true => {
            let (scale, shift) = (a.graph.slice(rows, 1, 0, 1), a.graph.slice(rows, 1, 1, 2));
            a.graph.concat(&[shift, scale], 1)
        }
        false => rows,
    };
    emit(&mut a, shift_first, "mod_out", &[0.0, 1.0], width);
    Ok(a.finish())
}

/// `count` vectors per step: [steps, count, width].
fn vectors(
    a: &mut Author<'_>,
    x: ValueId,
    weight: &str,
    count: usize,
    width: usize,
) -> Result<ValueId, Flux2Error> {
    let y = a.project(x, weight, width, count * width)?;
    Ok(a.graph.reshape(y, &[0, count as i64, width as i64]))
}

fn emit(a: &mut Author<'_>, vectors: ValueId, output: &str, ones: &[f32], width: usize) {
    let ones_value = a.graph.small_constant(Tensor::from_f32(&[ones.len(), 1], ones));
    let sum = a.graph.add(vectors, ones_value);
    let dims = [Dim::Symbol("steps".to_owned()), Dim::Fixed(ones.len()), Dim::Fixed(width)];
    a.graph.output(sum, output, &dims);
}
