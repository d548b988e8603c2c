//! The time embedding's two linears and the modulation that all blocks share: all that depends on the noise level alone. One
//! run serves every step of a schedule, and the text. Computed in f32.

use super::{Constants, QwenImageError, TIME_CHANNELS, config::TransformerConfig};
use crate::{
    arch::{author::Author, blocks::mlp::silu},
    onnx::{DType, Dim, Model},
    recipe::{Compute, Precision},
    weights::Checkpoint,
};

/// Input: `time_embedding` [levels, time_channels]. Outputs, f32: `mod` [levels, 4, width] (scale and gate of attention,
/// then of the feed-forward) and `mod_out` [levels, 1, width] (scale of the last norm), with 1 already added to every scale and
/// tanh taken of every gate.
pub fn author(
    config: &TransformerConfig,
    weights: &Checkpoint,
    precision: &Precision,
    constants: &Constants,
) -> Result<Model, QwenImageError> {
    let precision = Precision { compute: Compute::F32, accuracy_level: 0, ..precision.clone() };
    let mut a = Author::new("modulation", weights, &precision);
    let width = config.width();
    let levels = Dim::Symbol("levels".to_owned());
    let e = a.graph.input("time_embedding", DType::F32, &[levels.clone(), Dim::Fixed(TIME_CHANNELS)]);
    let time = |name| format!("time_text_embed.timestep_embedder.{name}.weight");
    let e = a.project(e, &time("linear_1"), TIME_CHANNELS, width)?;
    let e = silu(&mut a, e);
    let e = a.project(e, &time("linear_2"), width, width)?;
    a.graph.output(e, "dit_temb", &[levels.clone(), Dim::Fixed(width)]);
    let e = silu(&mut a, e);

    let rows = a.project(e, "modulation.1.weight", width, 4 * width)?;
    let one = a.graph.scalar(DType::F32, 1.0);
    let mut vectors = a.graph.split(rows, -1, [width; 4]);
    for (index, vector) in vectors.iter_mut().enumerate() {
        let is_gate = index % 2 == 1;
        *vector = match is_gate {
            false => a.graph.add(*vector, one),
            true if constants.bounded_gates => a.graph.op("Tanh", &[*vector], &[]),
            true => *vector,
        };
    }
    let joined = a.graph.concat(&vectors, -1);
    let joined = a.graph.reshape(joined, &[0, 4, width as i64]);
    a.graph.output(joined, "mod", &[levels.clone(), Dim::Fixed(4), Dim::Fixed(width)]);

    let scale = a.project(e, "norm_out.linear.weight", width, width)?;
    let scale = a.graph.add(scale, one);
    let scale = a.graph.reshape(scale, &[0, 1, width as i64]);
    a.graph.output(scale, "mod_out", &[levels, Dim::Fixed(1), Dim::Fixed(width)]);
    Ok(a.finish())
}
