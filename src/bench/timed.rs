//! An executor that takes the time of another's sessions.

use std::{collections::BTreeMap, time::Instant};

use viaduct_export::bundle::Bundle;

use crate::{
    runtime::{Binding, Device, Executor, RuntimeError, Session},
    tensor::HostTensor,
};

/// Opens stages as the inner executor does, and notes how long everything takes.
pub(super) struct Timed<'e> {
    executor: &'e mut dyn Executor,
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
    /// Each with its inputs' way to the device and its outputs' way back.
    pub runs: Vec<f64>,
}

/// One picture.
pub(super) struct TimedPicture {
    pub openings: Vec<Opening>,
    /// All of it, the host's work included.
    pub whole: f64,
}

impl<'e> Timed<'e> {
    pub fn new(executor: &'e mut dyn Executor) -> Timed<'e> {
        Timed { executor, openings: Vec::new() }
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
        let Timed { executor, openings } = self;
        let started = Instant::now();
        let session = executor.open_stage(bundle, name, binding)?;
        let load = started.elapsed().as_secs_f64();
        openings.push(Opening { stage: name.to_owned(), load, ..Opening::default() });
        let opening = openings.last_mut().expect("one was just added");
        Ok(Box::new(TimedSession { session, opening }))
    }
}

struct TimedSession<'r> {
    session: Box<dyn Session + 'r>,
    opening: &'r mut Opening,
}

impl Session for TimedSession<'_> {
    fn name(&self) -> &str {
        self.session.name()
    }

    fn outputs(&self) -> Vec<String> {
        self.session.outputs()
    }

    fn nodes(&self) -> &BTreeMap<String, usize> {
        self.session.nodes()
    }

    fn bind(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        let started = Instant::now();
        let bound = self.session.bind(name, tensor);
        self.opening.uploads += started.elapsed().as_secs_f64();
        bound
    }

    fn run(
        &mut self,
        inputs: &[(&str, &HostTensor)],
        outputs: &[&str],
    ) -> Result<Vec<HostTensor>, RuntimeError> {
        let started = Instant::now();
        let result = self.session.run(inputs, outputs);
        self.opening.runs.push(started.elapsed().as_secs_f64());
        result
    }

    fn finish(self: Box<Self>) -> Result<Option<u64>, RuntimeError> {
        self.session.finish()
    }
}
