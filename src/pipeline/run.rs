//! One run of a pipeline: where it computes, how its stages are set, who watches, and what it keeps.

use std::collections::BTreeMap;

use super::{
    event::{Event, Listener},
    probe::Probe,
    run_folder::RunFolder,
};
use crate::{
    plan::Plan,
    runtime::{Executor, Placement, RuntimeError, Session},
    tensor::HostTensor,
};

/// One run: where it computes, who watches, and what it keeps in case it is killed.
pub struct Run<'a> {
    pub executor: &'a mut dyn Executor,
    /// How stages are set; as usual if there is none.
    pub plan: Option<&'a Plan>,
    pub watch: Watch<'a>,
    /// None where the probe looks into the run: it is to see all of it, and might change it.
    pub folder: RunFolder,
}

impl Run<'_> {
    /// See [`RunFolder::keep`].
    pub(super) fn keep(&mut self, tensors: &[(&str, &HostTensor)], needed: &[&str]) {
        self.folder.keep(tensors, needed, self.watch.listener);
    }

    /// Where a tensor may lie that only the next stage needs: on the host where the probe is to see it or the folder keeps
    /// it.
    pub(super) fn between_stages(&self) -> Placement {
        match self.watch.probe.looks() || self.folder.keeps() {
            true => Placement::Host,
            false => Placement::Anywhere,
        }
    }

    /// See [`RunFolder::kept`].
    pub(super) fn kept(&mut self, name: &str) -> Option<HostTensor> {
        self.folder.kept(name, self.watch.listener)
    }

    /// See [`RunFolder::resume`].
    pub(super) fn resume(&mut self, point: String) {
        self.folder.resume(point, self.watch.listener);
    }
}

/// Who hears of a run and who looks into it.
pub struct Watch<'a> {
    pub listener: &'a mut dyn Listener,
    pub probe: &'a mut dyn Probe,
    /// Nodes that each execution provider ran, over all stages.
    pub nodes: BTreeMap<String, usize>,
}

impl<'a> Watch<'a> {
    pub fn new(listener: &'a mut dyn Listener, probe: &'a mut dyn Probe) -> Watch<'a> {
        Watch { listener, probe, nodes: BTreeMap::new() }
    }

    pub(super) fn boundary(&mut self, name: &str, tensor: HostTensor) -> HostTensor {
        self.probe.boundary(name, tensor)
    }
}

/// Ends a session and tells what its process took at its peak beside what was planned.
pub(super) fn close(
    stage: Box<dyn Session + '_>,
    plan: Option<&Plan>,
    watch: &mut Watch<'_>,
) -> Result<(), RuntimeError> {
    let name = stage.name().to_owned();
    let measured = stage.finish()?;
    if let (Some(planned), Some(measured)) = (plan.and_then(|plan| plan.bytes(&name)), measured) {
        watch.listener.on_event(Event::Memory { stage: name, planned, measured });
    }
    Ok(())
}
