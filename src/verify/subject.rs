//! What is verified: a bundle's pipeline, asked for the picture of the reference.

use std::collections::BTreeMap;

use viaduct_export::bundle::Bundle;

use super::{Oracle, VerifyError};
use crate::{
    pipeline::{
        event::Listener,
        noise::draw_latents,
        probe::Probe,
        run::{Run, Watch},
        run_folder::RunFolder,
        text_to_image::{Noise, Request, TextToImage},
    },
    runtime::Executor,
    tensor::HostTensor,
};

pub struct Subject<'a> {
    pub oracle: &'a Oracle,
    pipeline: TextToImage<'a>,
    pub request: Request,
}

/// A picture and how it came about.
pub struct Drawn {
    /// As the decoder leaves it, in -1..1.
    pub image: HostTensor,
    /// Nodes by execution provider.
    pub nodes: BTreeMap<String, usize>,
}

impl<'a> Subject<'a> {
    pub fn open(bundle: &'a Bundle, oracle: &'a Oracle) -> Result<Subject<'a>, VerifyError> {
        let pipeline = TextToImage::open(bundle)?;
        check_settings(&pipeline, oracle)?;
        let asked = &oracle.request;
        let size = pipeline.family().size(asked.width, asked.height)?;
        let steps = pipeline.family().steps(Some(asked.steps));
        if steps != asked.steps {
            let path = oracle.folder().to_owned();
            return Err(VerifyError::Steps { path, oracle: asked.steps, bundle: steps });
        }
        let request = Request {
            prompt: asked.prompt.clone(),
            negative: None,
            size,
            steps,
            noise: Noise::Given(oracle.noise(size)?),
        };
        pipeline.check(&request)?;
        Ok(Subject { oracle, pipeline, request })
    }

    pub fn profile(&self) -> &str {
        &self.pipeline.bundle().manifest.profile
    }

    /// Draws the picture, from the reference's noise.
    pub fn draw(
        &self,
        executor: &mut dyn Executor,
        probe: &mut dyn Probe,
        listener: &mut dyn Listener,
    ) -> Result<Drawn, VerifyError> {
        let watch = Watch::new(listener, probe);
        let mut run = Run { executor, plan: None, watch, folder: RunFolder::none() };
        let image = self.pipeline.draw(&self.request, &mut run)?;
        Ok(Drawn { image, nodes: run.watch.nodes })
    }

    /// The noise that the reference's seed gives, where it states one.
    pub fn noise_of_seed(&self) -> Option<HostTensor> {
        let [rows, columns] = self.request.size.grid();
        let seed = self.oracle.request.seed?;
        Some(draw_latents(seed, self.pipeline.family().channels(), rows, columns))
    }
}

fn check_settings(pipeline: &TextToImage<'_>, oracle: &Oracle) -> Result<(), VerifyError> {
    let list = |taps: &[usize]| taps.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let stated = [
        ("text_encoder.length", oracle.request.text_length.map(|n| n.to_string())),
        ("text_encoder.taps", oracle.request.taps.as_deref().map(list)),
    ];
    for (key, bundle) in pipeline.family().settings() {
        let oracle = stated.iter().find(|(known, _)| *known == key).and_then(|(_, oracle)| oracle.clone());
        if let Some(oracle) = oracle.filter(|oracle| *oracle != bundle) {
            return Err(VerifyError::Mismatch { key, bundle, oracle });
        }
    }
    Ok(())
}
