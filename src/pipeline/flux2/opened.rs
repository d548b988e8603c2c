//! An open stage and its entry in the manifest, by which tensors get the element types that its graph takes.

use std::borrow::Cow;

use viaduct_export::bundle::{Port, Stage};

use super::Flux2Error;
use crate::{
    pipeline::run::{Watch, close},
    plan::Plan,
    runtime::Session,
    tensor::HostTensor,
};

/// A session and what the bundle says of its graph.
pub(super) struct Opened<'r> {
    pub session: Box<dyn Session + 'r>,
    pub described: &'r Stage,
}

impl Opened<'_> {
    /// See [`Session::bind`].
    pub fn bind(&mut self, name: &str, tensor: &HostTensor) -> Result<(), Flux2Error> {
        Ok(self.session.bind(name, &fitted(self.described, name, tensor))?)
    }

    /// See [`Session::run`].
    pub fn run(
        &mut self,
        inputs: &[(&str, &HostTensor)],
        outputs: &[&str],
    ) -> Result<Vec<HostTensor>, Flux2Error> {
        let described = self.described;
        let fitted: Vec<_> =
            inputs.iter().map(|(name, tensor)| (*name, fitted(described, name, tensor))).collect();
        let inputs: Vec<_> = fitted.iter().map(|(name, tensor)| (*name, &**tensor)).collect();
        Ok(self.session.run(&inputs, outputs)?)
    }

    /// Runs the stage for one output and hands the exposed values to the probe, which only looks at them.
    pub fn run_and_probe(
        &mut self,
        inputs: &[(&str, &HostTensor)],
        output: &str,
        exposed: &[String],
        watch: &mut Watch<'_>,
    ) -> Result<HostTensor, Flux2Error> {
        let mut names = vec![output];
        names.extend(exposed.iter().map(String::as_str));
        let mut tensors = self.run(inputs, &names)?;
        let result = tensors.remove(0);
        for (name, tensor) in exposed.iter().zip(tensors) {
            watch.boundary(name, tensor);
        }
        Ok(result)
    }

    /// Names of the exposed values: outputs that the bundle does not list.
    pub fn exposed(&self) -> Vec<String> {
        let listed = &self.described.outputs;
        let names = self.session.outputs().into_iter();
        names.filter(|name| !listed.iter().any(|port| port.name == *name)).collect()
    }

    /// See [`close`].
    pub fn close(self, plan: Option<&Plan>, watch: &mut Watch<'_>) -> Result<(), Flux2Error> {
        Ok(close(self.session, plan, watch)?)
    }

    pub fn input(&self, name: &str) -> Option<&Port> {
        self.described.inputs.iter().find(|port| port.name == name)
    }
}

/// The tensor in the element type that the bundle states for the input.
fn fitted<'t>(stage: &Stage, name: &str, tensor: &'t HostTensor) -> Cow<'t, HostTensor> {
    let port = stage.inputs.iter().find(|port| port.name == name);
    match port.and_then(|port| tensor.cast(&port.dtype)) {
        Some(cast) => Cow::Owned(cast),
        None => Cow::Borrowed(tensor),
    }
}
