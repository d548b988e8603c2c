//! Stages whose outputs are known are not run again: an executor that records a run, and one that answers from the record until
//! a boundary has been altered, and ends the run once its point is made.

use std::{cell::Cell, collections::BTreeMap};

use viaduct_export::bundle::Bundle;

use crate::{
    runtime::{
        Attended, Between, Binding, Device, Executor, Placement, RuntimeError, Session, Tensor, TensorView,
    },
    tensor::HostTensor,
};

/// Outputs of one run of a stage, by name.
type Outputs = BTreeMap<String, HostTensor>;

/// What the stages of a run gave, run after run. Those of the last component, the decoder, are left out: nothing comes after them, and
/// their outputs are large.
#[derive(Default)]
pub struct Recording {
    stages: BTreeMap<String, Vec<Outputs>>,
}

/// Records what another executor runs.
pub struct Recorder<'e> {
    pub executor: &'e mut dyn Executor,
    pub recording: Recording,
}

impl Executor for Recorder<'_> {
    fn device(&self) -> &Device {
        self.executor.device()
    }

    fn open_stage<'r>(
        &'r mut self,
        bundle: &Bundle,
        name: &str,
        binding: &Binding<'_>,
    ) -> Result<Box<dyn Session + 'r>, RuntimeError> {
        let session = self.executor.open_stage(bundle, name, binding)?;
        let component = |name: &str| bundle.stage(name).ok().map(|stage| stage.component());
        let last = bundle.manifest.stages.last().map(|stage| stage.component());
        if component(name) == last {
            return Ok(session);
        }
        let runs = self.recording.stages.entry(name.to_owned()).or_default();
        Ok(Box::new(Attended { session, between: Recorded { runs } }))
    }
}

struct Recorded<'r> {
    runs: &'r mut Vec<Outputs>,
}

impl Between for Recorded<'_> {
    fn run_placed(
        &mut self,
        session: &mut dyn Session,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError> {
        let tensors = session.run_placed(inputs, outputs)?;
        let named = outputs.iter().zip(&tensors);
        let on_host = named.map(|((name, _), tensor)| {
            let tensor = tensor.view();
            Ok(((*name).to_owned(), tensor.on_host()?.into_owned()))
        });
        self.runs.push(on_host.collect::<Result<Outputs, RuntimeError>>()?);
        Ok(tensors)
    }
}

/// How far a replayed run is, as its probe sees it.
#[derive(Default)]
pub struct Progress {
    /// From now on stages are run.
    pub altered: Cell<bool>,
    /// A stage was to run on from its record with what is altered, which it cannot.
    pub within_stage: Cell<bool>,
    /// Nothing more is needed.
    pub ended: Cell<bool>,
}

/// Answers from a record as long as nothing is altered.
pub struct Replayer<'e> {
    pub executor: &'e mut dyn Executor,
    pub recording: &'e Recording,
    pub progress: &'e Progress,
}

impl Executor for Replayer<'_> {
    fn device(&self) -> &Device {
        self.executor.device()
    }

    fn open_stage<'r>(
        &'r mut self,
        bundle: &Bundle,
        name: &str,
        binding: &Binding<'_>,
    ) -> Result<Box<dyn Session + 'r>, RuntimeError> {
        if self.progress.ended.get() {
            return Err(ended(name));
        }
        if let Some(runs) = self.recording.stages.get(name).filter(|_| !self.progress.altered.get()) {
            let (stage, progress) = (name.to_owned(), self.progress);
            return Ok(Box::new(Replayed { stage, runs, next: 0, nodes: BTreeMap::new(), progress }));
        }
        let session = self.executor.open_stage(bundle, name, binding)?;
        Ok(Box::new(Attended { session, between: Live { progress: self.progress } }))
    }
}

/// A session that computes nothing.
struct Replayed<'r> {
    stage: String,
    runs: &'r [Outputs],
    next: usize,
    nodes: BTreeMap<String, usize>,
    progress: &'r Progress,
}

impl Session for Replayed<'_> {
    fn name(&self) -> &str {
        &self.stage
    }

    fn outputs(&self) -> Vec<String> {
        self.runs.first().map(|outputs| outputs.keys().cloned().collect()).unwrap_or_default()
    }

    fn nodes(&self) -> &BTreeMap<String, usize> {
        &self.nodes
    }

    fn bind(&mut self, _: &str, _: &HostTensor) -> Result<(), RuntimeError> {
        Ok(())
    }

    fn run_placed(
        &mut self,
        _: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError> {
        if self.progress.ended.get() {
            return Err(ended(&self.stage));
        }
        let failed =
            |reason: &str| RuntimeError::Run { stage: self.stage.clone(), reason: reason.to_owned() };
        if self.progress.altered.get() {
            self.progress.within_stage.set(true);
            return Err(failed("a control altered a tensor between two runs of one stage"));
        }
        let run = self.runs.get(self.next).ok_or_else(|| failed("it ran less often when it was recorded"))?;
        self.next += 1;
        let output = |(name, _): &(&str, Placement)| {
            let tensor = run.get(*name).cloned().map(Tensor::Host);
            tensor.ok_or_else(|| failed("an output was not recorded"))
        };
        outputs.iter().map(output).collect()
    }

    fn finish(self: Box<Self>) -> Result<Option<u64>, RuntimeError> {
        Ok(None)
    }
}

/// Lets a session run until the run has ended.
struct Live<'r> {
    progress: &'r Progress,
}

impl Between for Live<'_> {
    fn run_placed(
        &mut self,
        session: &mut dyn Session,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError> {
        match self.progress.ended.get() {
            true => Err(ended(session.name())),
            false => session.run_placed(inputs, outputs),
        }
    }
}

fn ended(stage: &str) -> RuntimeError {
    RuntimeError::Run { stage: stage.to_owned(), reason: "nothing more of this run is needed".to_owned() }
}
