//! An executor that takes the time of another's sessions.

use std::time::Instant;

use viaduct_export::bundle::Bundle;

use crate::{
    runtime::{
        Attended, Between, Binding, Device, Executor, Fence, Placement, RuntimeError, Session, Tensor,
        TensorView,
    },
    tensor::HostTensor,
};

/// Opens stages as the inner executor does, and notes how long everything takes.
pub(super) struct Timed<'e> {
    executor: &'e mut dyn Executor,
    fence: &'e mut Option<Fence>,
    openings: Vec<Opening>,
}

/// One opening of a stage, in seconds.
#[derive(Default)]
pub(super) struct Opening {
    pub stage: String,
    /// To make the session; next to nothing where it was kept.
    pub load: f64,
    /// Of inputs that stay for every run.
    pub uploads: f64,
    /// Each with its inputs' way to the device and its outputs' way back, of those that do not lie or stay there.
    pub runs: Vec<f64>,
}

/// One picture.
pub(super) struct TimedPicture {
    pub openings: Vec<Opening>,
    /// All of it, the host's work included.
    pub whole: f64,
}

impl<'e> Timed<'e> {
    /// `fence` is made when it is first needed, which no time should count.
    pub fn new(executor: &'e mut dyn Executor, fence: &'e mut Option<Fence>) -> Timed<'e> {
        Timed { executor, fence, openings: Vec::new() }
    }

    pub fn into_picture(self, whole: f64) -> TimedPicture {
        TimedPicture { openings: self.openings, whole }
    }
}

impl TimedPicture {
    pub fn of<'p>(&'p self, stage: &'p str) -> impl Iterator<Item = &'p Opening> {
        self.openings.iter().filter(move |opening| opening.stage == stage)
    }

    pub fn runs<'p>(&'p self, stage: &'p str) -> impl Iterator<Item = f64> {
        self.of(stage).flat_map(|opening| opening.runs.iter().copied())
    }
}

impl Executor for Timed<'_> {
    fn device(&self) -> &Device {
        self.executor.device()
    }

    fn open_stage<'r>(
        &'r mut self,
        bundle: &Bundle,
        name: &str,
        binding: &Binding<'_>,
    ) -> Result<Box<dyn Session + 'r>, RuntimeError> {
        let Timed { executor, fence, openings } = self;
        let started = Instant::now();
        let session = executor.open_stage(bundle, name, binding)?;
        let load = started.elapsed().as_secs_f64();
        openings.push(Opening { stage: name.to_owned(), load, ..Opening::default() });
        let opening = openings.last_mut().expect("one was just added");
        Ok(Box::new(Attended { session, between: Timing { fence, opening } }))
    }
}

/// Times what a session does.
struct Timing<'r> {
    fence: &'r mut Option<Fence>,
    opening: &'r mut Opening,
}

impl Between for Timing<'_> {
    fn bind(
        &mut self,
        session: &mut dyn Session,
        name: &str,
        tensor: &HostTensor,
    ) -> Result<(), RuntimeError> {
        let started = Instant::now();
        let bound = session.bind(name, tensor);
        self.opening.uploads += started.elapsed().as_secs_f64();
        bound
    }

    fn run_placed(
        &mut self,
        session: &mut dyn Session,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError> {
        let started = Instant::now();
        let tensors = session.run_placed(inputs, outputs)?;
        // Nobody waited for outputs that stay on the device.
        if tensors.iter().any(|tensor| matches!(tensor, Tensor::Device(_))) {
            match &mut self.fence {
                Some(fence) => fence.wait()?,
                none => none.insert(Fence::new()?).wait()?,
            }
        }
        self.opening.runs.push(started.elapsed().as_secs_f64());
        Ok(tensors)
    }
}
