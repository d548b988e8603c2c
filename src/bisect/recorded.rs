//! The inputs that a stage gets in a picture's run: the run goes as far as the stage's first turn.

use std::collections::BTreeMap;

use viaduct_export::{arch::SizesRequest, bundle::Bundle};

use super::{BisectError, side::Tensors};
use crate::{
    pipeline::{
        event::Listener,
        probe::Probe,
        run::{Run, Watch},
        run_folder::RunFolder,
        text_to_image::{Noise, Request, TextToImage},
    },
    runtime::{Binding, Device, Executor, Placement, Runtime, RuntimeError, Session, Tensor, TensorView},
    tensor::HostTensor,
    verify::{Oracle, OracleRequest},
};

/// The picture whose run gives the inputs.
pub enum Picture<'a> {
    /// That of reference tensors, which replace what passes the boundaries before the stage.
    Oracle(&'a Oracle),
    Asked {
        prompt: &'a str,
        size: SizesRequest,
        seed: u64,
    },
}

impl Picture<'_> {
    fn request(&self, pipeline: &TextToImage<'_>) -> Result<Request, BisectError> {
        let (prompt, width, height, steps) = match self {
            Picture::Oracle(oracle) => {
                let OracleRequest { prompt, width, height, steps, .. } = &oracle.request;
                (prompt.as_str(), *width, *height, *steps)
            }
            Picture::Asked { prompt, size, .. } => (*prompt, size.width, size.height, size.steps),
        };
        let size = pipeline.family().size(width, height)?;
        let noise = match self {
            Picture::Oracle(oracle) => Noise::Given(oracle.noise(size)?),
            Picture::Asked { seed, .. } => Noise::Seed(*seed),
        };
        let steps = pipeline.family().steps(Some(steps));
        Ok(Request { prompt: prompt.to_owned(), negative: None, size, steps, noise })
    }
}

impl Probe for &Picture<'_> {
    fn boundary(&mut self, name: &str, tensor: HostTensor) -> HostTensor {
        let Picture::Oracle(oracle) = self else { return tensor };
        // A file that cannot be read is an error as soon as it is compared with.
        match oracle.tensor(name) {
            Ok(Some(reference)) if reference.shape == tensor.shape => {
                reference.as_type(tensor.values.dtype())
            }
            _ => tensor,
        }
    }
}

/// Draws until the stage has its inputs, and returns these.
pub fn recorded_inputs(
    bundle: &Bundle,
    stage: &str,
    mut picture: &Picture<'_>,
    runtime: &mut Runtime,
    listener: &mut dyn Listener,
) -> Result<Tensors, BisectError> {
    let pipeline = TextToImage::open(bundle)?;
    let request = picture.request(&pipeline)?;
    let mut recorder = Recorder { runtime, stage, inputs: None };
    let watch = Watch::new(listener, &mut picture);
    let mut run = Run { executor: &mut recorder, plan: None, watch, folder: RunFolder::none() };
    let drawn = pipeline.draw(&request, &mut run);
    match (recorder.inputs, drawn) {
        (Some(inputs), _) => Ok(inputs),
        (None, Err(error)) => Err(error.into()),
        (None, Ok(_)) => Err(BisectError::NotReached { stage: stage.to_owned() }),
    }
}

struct Recorder<'r> {
    runtime: &'r mut Runtime,
    stage: &'r str,
    /// What the stage was given, once it was.
    inputs: Option<Tensors>,
}

impl Executor for Recorder<'_> {
    fn device(&self) -> &Device {
        self.runtime.device()
    }

    fn open_stage<'r>(
        &'r mut self,
        bundle: &Bundle,
        name: &str,
        binding: &Binding<'_>,
    ) -> Result<Box<dyn Session + 'r>, RuntimeError> {
        if name != self.stage {
            return Executor::open_stage(self.runtime, bundle, name, binding);
        }
        Ok(Box::new(Recording {
            stage: self.stage,
            bound: Tensors::new(),
            inputs: &mut self.inputs,
            nodes: BTreeMap::new(),
        }))
    }
}

/// A session that computes nothing: it keeps what it is given, and ends the run.
struct Recording<'r> {
    stage: &'r str,
    bound: Tensors,
    inputs: &'r mut Option<Tensors>,
    nodes: BTreeMap<String, usize>,
}

impl Session for Recording<'_> {
    fn name(&self) -> &str {
        self.stage
    }

    fn outputs(&self) -> Vec<String> {
        Vec::new()
    }

    fn nodes(&self) -> &BTreeMap<String, usize> {
        &self.nodes
    }

    fn bind(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        self.bound.insert(name.to_owned(), tensor.clone());
        Ok(())
    }

    fn run_placed(
        &mut self,
        inputs: &[(&str, TensorView<'_>)],
        _: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError> {
        let mut all = std::mem::take(&mut self.bound);
        for (name, tensor) in inputs {
            all.insert((*name).to_owned(), tensor.on_host()?.into_owned());
        }
        *self.inputs = Some(all);
        let reason = "its inputs are recorded, and the run ends here".to_owned();
        Err(RuntimeError::Run { stage: self.stage.to_owned(), reason })
    }

    fn finish(self: Box<Self>) -> Result<Option<u64>, RuntimeError> {
        Ok(None)
    }
}
