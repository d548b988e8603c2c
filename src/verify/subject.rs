//! What is verified: a bundle's pipeline, asked for the picture of the reference.

use std::collections::BTreeMap;

use viaduct_export::bundle::Bundle;

use super::{Oracle, VerifyError};
use crate::{
    pipeline::{
        event::Listener,
        flux2::{Flux2, Flux2Error, Noise, Request},
        noise::draw_latents,
        probe::Probe,
        run::{Run, Watch},
        run_folder::RunFolder,
    },
    runtime::Executor,
    tensor::HostTensor,
};

pub struct Subject<'a> {
    bundle: &'a Bundle,
    pub oracle: &'a Oracle,
    flux2: Flux2<'a>,
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
        let flux2 = Flux2::open(bundle)?;
        check_settings(&flux2, oracle)?;
        let asked = &oracle.request;
        let request = Request {
            prompt: asked.prompt.clone(),
            size: flux2.form().size(asked.width, asked.height)?,
            steps: asked.steps,
            noise: Noise::Given(oracle.noise()?),
        };
        Ok(Subject { bundle, oracle, flux2, request })
    }

    pub fn profile(&self) -> &str {
        &self.bundle.manifest.profile
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
        let image = self.flux2.draw(&self.request, &mut run)?;
        Ok(Drawn { image, nodes: run.watch.nodes })
    }

    /// The noise that the reference's seed gives, where it states one.
    pub fn noise_of_seed(&self) -> Option<HostTensor> {
        let [rows, columns] = self.request.size.grid();
        let seed = self.oracle.request.seed?;
        Some(draw_latents(seed, self.flux2.form().channels(), rows, columns))
    }

    /// Why a run refused to go on with its numbers; other errors stay.
    pub fn refusal(error: VerifyError) -> Result<String, VerifyError> {
        match error {
            VerifyError::Pipeline(Flux2Error::Image(problem)) => Ok(problem.to_string()),
            error => Err(error),
        }
    }
}

fn check_settings(flux2: &Flux2<'_>, oracle: &Oracle) -> Result<(), VerifyError> {
    let form = flux2.form();
    let list = |taps: &[usize]| taps.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let settings = [
        (
            "text_encoder.length",
            Some(form.text_length().to_string()),
            oracle.request.text_length.map(|n| n.to_string()),
        ),
        ("text_encoder.taps", form.taps().map(list), oracle.request.taps.as_deref().map(list)),
    ];
    for (key, bundle, oracle) in settings {
        if let (Some(bundle), Some(oracle)) = (bundle, oracle)
            && bundle != oracle
        {
            return Err(VerifyError::Mismatch { key, bundle, oracle });
        }
    }
    Ok(())
}
