//! The inputs that a stage gets in a picture's run: the run goes as far as the stage's first turn.

use std::{cell::RefCell, collections::BTreeMap, rc::Rc};

use viaduct_export::{arch::SizesRequest, bundle::Bundle};

use super::{BisectError, side::Tensors};
use crate::{
    pipeline::{
        event::Listener,
        flux2::{Flux2, Noise, Request},
        probe::Probe,
        run::{Run, Watch},
        run_folder::RunFolder,
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
    fn request(&self, flux2: &Flux2<'_>) -> Result<Request, BisectError> {
        let (prompt, width, height, steps, noise) = match self {
            Picture::Oracle(oracle) => {
                let OracleRequest { prompt, width, height, steps, .. } = &oracle.request;
                (prompt.as_str(), *width, *height, *steps, Noise::Given(oracle.noise()?))
            }
            Picture::Asked { prompt, size, seed } => {
                (*prompt, size.width, size.height, size.steps, Noise::Seed(*seed))
            }
        };
        let size = flux2.form().size(width, height)?;
        Ok(Request { prompt: prompt.to_owned(), size, steps, noise })
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
    let flux2 = Flux2::open(bundle)?;
    let request = picture.request(&flux2)?;
    let inputs = Rc::new(RefCell::new(None));
    let mut recorder = Recorder { runtime, stage, inputs: Rc::clone(&inputs) };
    let watch = Watch::new(listener, &mut picture);
    let mut run = Run { executor: &mut recorder, plan: None, watch, folder: RunFolder::none() };
    let drawn = flux2.draw(&request, &mut run);
    match (inputs.take(), drawn) {
        (Some(inputs), _) => Ok(inputs),
        (None, Err(error)) => Err(error.into()),
        (None, Ok(_)) => Err(BisectError::NotReached { stage: stage.to_owned() }),
    }
}

struct Recorder<'r> {
    runtime: &'r mut Runtime,
    stage: &'r str,
    inputs: Rc<RefCell<Option<Tensors>>>,
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
        let inputs = Rc::clone(&self.inputs);
        Ok(Box::new(Recording {
            stage: name.to_owned(),
            bound: Tensors::new(),
            inputs,
            nodes: BTreeMap::new(),
        }))
    }
}

/// A session that computes nothing: it keeps what it is given, and ends the run.
struct Recording {
    stage: String,
    bound: Tensors,
    inputs: Rc<RefCell<Option<Tensors>>>,
    nodes: BTreeMap<String, usize>,
}

impl Session for Recording {
    fn name(&self) -> &str {
        &self.stage
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
        self.inputs.replace(Some(all));
        let reason = "its inputs are recorded, and the run ends here".to_owned();
        Err(RuntimeError::Run { stage: self.stage.clone(), reason })
    }

    fn finish(self: Box<Self>) -> Result<Option<u64>, RuntimeError> {
        Ok(None)
    }
}
