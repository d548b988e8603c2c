//! Graphs that others exported: they compute embeddings, masks, tables and modulations themselves.

use viaduct_export::{arch::flux2::imported::Imported as Parameters, shapes::Sizes};

use super::{Graphs, id_tensor, prompt_inputs};
use crate::{
    pipeline::{
        position::{TextIds, image_ids, text_ids},
        prompt::EncodedPrompt,
        run::Run,
        text_to_image::{Conditions, PipelineError, Sampled, TEXT_ENCODER, TextToImage},
    },
    tensor::{HostTensor, Values},
};

/// An imported bundle's parameters.
pub(super) struct Imported(pub Parameters);

impl Graphs for Imported {
    fn encode(
        &self,
        pipeline: &TextToImage<'_>,
        prompts: &[EncodedPrompt],
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<Vec<HostTensor>, PipelineError> {
        let mut stage = pipeline.stage(TEXT_ENCODER, sizes, run.executor, run.plan, &mut run.watch)?;
        let mut encode = |prompt: &EncodedPrompt| {
            let inputs = [("input_ids", &prompt.ids), ("attention_mask", &prompt.mask)];
            let embeds = stage.run(&inputs, &["prompt_embeds"])?.remove(0);
            Ok(self.limited(embeds, &prompt.mask))
        };
        let embeds = prompts.iter().map(&mut encode).collect::<Result<_, PipelineError>>()?;
        stage.close(run.plan, &mut run.watch)?;
        Ok(embeds)
    }

    fn conditions(
        &self,
        _pipeline: &TextToImage<'_>,
        Sampled { size, schedule, .. }: &Sampled<'_>,
        embeds: &[HostTensor],
        run: &mut Run<'_>,
    ) -> Result<Conditions, PipelineError> {
        let [rows, columns] = size.grid();
        let text = id_tensor(&text_ids(self.0.text.length, TextIds::Index));
        let text = run.watch.boundary("txt_ids", text);
        let image = run.watch.boundary("img_ids", id_tensor(&image_ids(0, rows, columns)));
        let sigmas = &schedule.sigmas()[..schedule.steps()];
        let of_step = |sigma: &f32| vec![("sigma".into(), HostTensor::f32(&[1], vec![*sigma]))];
        Ok(Conditions {
            constant: vec![("img_ids".into(), image), ("txt_ids".into(), text)],
            prompts: embeds.iter().map(prompt_inputs).collect(),
            steps: sigmas.iter().map(of_step).collect(),
        })
    }
}

impl Imported {
    /// What the bundle asks to be done to the encoder's result: values cut, rows of padding set to zero.
    fn limited(&self, embeds: HostTensor, mask: &HostTensor) -> HostTensor {
        let text = &self.0.text;
        if text.clip == 0.0 && !text.zero_padding {
            return embeds;
        }
        let mut values = embeds.to_f32();
        if text.clip > 0.0 {
            values.iter_mut().for_each(|x| *x = x.clamp(-text.clip, text.clip));
        }
        if let (true, Values::I64(mask)) = (text.zero_padding, &mask.values) {
            let width = (values.len() / mask.len().max(1)).max(1);
            let padding = values.chunks_mut(width).zip(mask.iter()).filter(|(_, mask)| **mask == 0);
            padding.for_each(|(row, _)| row.fill(0.0));
        }
        HostTensor::f32(&embeds.shape, values)
    }
}
