//! Graphs that were authored here: tables, masks and modulations come from the host, in a stage of their own where a graph
//! computes them.

use viaduct_export::{arch::flux2::parameters::Parameters, shapes::Sizes};

use super::{Graphs, prompt_inputs, seen_ids};
use crate::{
    pipeline::{
        embedding::gather_rows,
        image::check_finite,
        position::{PadKeys, image_ids, rope_tables, rope_tables_1d, text_ids, text_mask},
        probe::Probe,
        prompt::EncodedPrompt,
        run::Run,
        schedule::{Schedule, time_embedding},
        size::Size,
        text_to_image::{Conditions, PipelineError, Sampled, TEXT_ENCODER, TextToImage, misshapen, shaped},
    },
    tensor::{HostTensor, Values},
};

/// The transformer's inputs that the modulation stage gives.
const MODULATIONS: [&str; 4] = ["mod_img", "mod_txt", "mod_single", "mod_out"];

/// An authored bundle's parameters.
pub(super) struct Authored(pub Parameters);

impl Graphs for Authored {
    fn encode(
        &self,
        pipeline: &TextToImage<'_>,
        prompts: &[EncodedPrompt],
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, PipelineError> {
        let text = &self.0.text;
        let path = pipeline.bundle().path(&text.embedding.file)?;
        let pad_keys = if text.mask_padding { PadKeys::Hidden } else { PadKeys::Visible };
        let (cos, sin) = rope_tables_1d(text.length, text.head_dim, text.rope_theta)?;
        let mut stage = pipeline.stage(TEXT_ENCODER, sizes, run.executor, run.plan, &mut run.watch)?;
        let mut encode = |prompt: &EncodedPrompt| {
            let embeds = gather_rows(&path, &text.embedding, &prompt.ids)?;
            let Values::I64(mask) = &prompt.mask.values else {
                unreachable!("the prompt encoder makes an i64 mask")
            };
            let mask = text_mask(mask, pad_keys);
            let inputs =
                [("inputs_embeds", &embeds), ("mask", &mask), ("rope_cos", &cos), ("rope_sin", &sin)];
            Ok(stage.run(&inputs, &["prompt_embeds"])?.remove(0))
        };
        let embeds = prompts.iter().map(&mut encode).collect::<Result<_, PipelineError>>()?;
        stage.close(run.plan, &mut run.watch)?;
        Ok(embeds)
    }

    fn conditions(
        &self,
        pipeline: &TextToImage<'_>,
        sampled: &Sampled<'_>,
        embeds: &[HostTensor],
        run: &mut Run<'_>,
    ) -> Result<Conditions, PipelineError> {
        let Sampled { size, schedule, sizes } = *sampled;
        let modulations = self.modulate(pipeline, schedule, sizes, run)?;
        let (cos, sin) = self.joint_tables(size, run.watch.probe)?;
        let of_step = |step| {
            let row = |(name, tensor): &(&'static str, HostTensor)| ((*name).into(), tensor.row(step));
            modulations.iter().map(row).collect()
        };
        Ok(Conditions {
            constant: vec![("rope_cos".into(), cos), ("rope_sin".into(), sin)],
            prompts: embeds.iter().map(prompt_inputs).collect(),
            steps: (0..schedule.steps()).map(of_step).collect(),
        })
    }
}

impl Authored {
    /// Everything that depends on the step alone, for all steps in one run.
    /// Each is [steps, count, width].
    fn modulate(
        &self,
        pipeline: &TextToImage<'_>,
        schedule: &Schedule,
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<Vec<(&'static str, HostTensor)>, PipelineError> {
        let transformer = &self.0.transformer;
        let channels = transformer.time_channels;
        let steps = &schedule.sigmas()[..schedule.steps()];
        let times = steps.iter().flat_map(|s| time_embedding(*s, channels, transformer.time_order)).collect();
        let times = HostTensor::f32(&[steps.len(), channels], times);
        let mut stage = pipeline.stage("modulation", sizes, run.executor, run.plan, &mut run.watch)?;
        let outputs = ["dit_temb", MODULATIONS[0], MODULATIONS[1], MODULATIONS[2], MODULATIONS[3]];
        let mut tensors = stage.run(&[("time_embedding", &times)], &outputs)?;
        stage.close(run.plan, &mut run.watch)?;
        for (name, tensor) in outputs.iter().zip(&tensors) {
            if tensor.shape.first() != Some(&times.shape[0]) {
                return Err(misshapen("modulation", name, format!("{} rows", times.shape[0]), tensor));
            }
        }
        let width = self.0.transformer.width;
        let temb = shaped("modulation", outputs[0], tensors.remove(0), &[times.shape[0], width])?;
        check_finite("modulation", None, &temb)?;
        run.watch.probe.shown("dit_temb", temb.row(0).reshaped(&[1, width]));
        Ok(MODULATIONS.into_iter().zip(tensors).collect())
    }

    /// Rotary tables of the joint sequence, text rows first: [tokens, head_dim / 2].
    fn joint_tables(
        &self,
        size: Size,
        probe: &mut dyn Probe,
    ) -> Result<(HostTensor, HostTensor), PipelineError> {
        let transformer = &self.0.transformer;
        let [rows, columns] = size.grid();
        let text = text_ids(self.0.text.length, transformer.text_ids);
        let mut ids = seen_ids("txt_ids", text, probe);
        ids.extend(seen_ids("img_ids", image_ids(0, rows, columns), probe));
        let (cos, sin) = rope_tables(&ids, &transformer.axes, transformer.rope_theta)?;
        if probe.internals() {
            probe.shown("rope_cos", cos.each_twice());
            probe.shown("rope_sin", sin.each_twice());
        }
        Ok((cos, sin))
    }
}
