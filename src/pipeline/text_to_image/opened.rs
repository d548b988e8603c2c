//! An open stage and its entry in the manifest, by which tensors get the element types that its graph takes.

use std::borrow::Cow;

use viaduct_export::bundle::{Port, Stage};

use super::PipelineError;
use crate::{
    pipeline::run::{Watch, close},
    plan::Plan,
    runtime::{Placement, RuntimeError, Session, Tensor, TensorView},
    tensor::HostTensor,
};

/// A session and what the bundle says of its graph.
pub struct Opened<'r> {
    pub session: Box<dyn Session + 'r>,
    pub described: &'r Stage,
}

impl Opened<'_> {
    /// See [`Session::bind`].
    pub fn bind(&mut self, name: &str, tensor: &HostTensor) -> Result<(), PipelineError> {
        Ok(self.session.bind(name, &cast(self.described, name, tensor))?)
    }

    /// See [`Session::run`].
    pub fn run(
        &mut self,
        inputs: &[(&str, &HostTensor)],
        outputs: &[&str],
    ) -> Result<Vec<HostTensor>, PipelineError> {
        let inputs: Vec<_> = inputs.iter().map(|(name, tensor)| (*name, TensorView::Host(tensor))).collect();
        let outputs: Vec<_> = outputs.iter().map(|name| (*name, Placement::Host)).collect();
        let tensors = self.run_placed(&inputs, &outputs)?.into_iter().map(Tensor::into_host);
        Ok(tensors.collect::<Result<_, _>>()?)
    }

    /// See [`Session::run_placed`].
    pub fn run_placed(
        &mut self,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, PipelineError> {
        let fitted = inputs.iter().map(|(name, tensor)| Ok((*name, fitted(self.described, name, *tensor)?)));
        let fitted = fitted.collect::<Result<Vec<_>, RuntimeError>>()?;
        let inputs: Vec<_> = fitted.iter().map(|(name, tensor)| (*name, tensor.view())).collect();
        Ok(self.session.run_placed(&inputs, outputs)?)
    }

    /// Runs the stage for one output and hands the exposed values to the probe, which only looks at them.
    pub fn run_and_probe(
        &mut self,
        inputs: &[(&str, TensorView<'_>)],
        output: (&str, Placement),
        exposed: &[String],
        watch: &mut Watch<'_>,
    ) -> Result<Tensor, PipelineError> {
        let mut outputs = vec![output];
        outputs.extend(exposed.iter().map(|name| (name.as_str(), Placement::Host)));
        let mut tensors = self.run_placed(inputs, &outputs)?;
        let result = tensors.remove(0);
        for (name, tensor) in exposed.iter().zip(tensors) {
            watch.probe.shown(name, tensor.into_host()?);
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
    pub fn close(self, plan: Option<&Plan>, watch: &mut Watch<'_>) -> Result<(), PipelineError> {
        Ok(close(self.session, plan, watch)?)
    }

    pub fn input(&self, name: &str) -> Option<&Port> {
        self.described.inputs.iter().find(|port| port.name == name)
    }
}

/// The tensor in the element type that the bundle states for the input; on the host if that is another than its own.
fn fitted(stage: &Stage, name: &str, tensor: TensorView<'_>) -> Result<Tensor, RuntimeError> {
    let port = stage.inputs.iter().find(|port| port.name == name);
    if let TensorView::Device(_) = tensor
        && port.is_none_or(|port| port.dtype == tensor.dtype().name())
    {
        return Ok(tensor.shared());
    }
    Ok(Tensor::Host(cast(stage, name, &*tensor.on_host()?).into_owned()))
}

/// The tensor on the host in the element type that the bundle states for the input.
fn cast<'t>(stage: &Stage, name: &str, tensor: &'t HostTensor) -> Cow<'t, HostTensor> {
    let port = stage.inputs.iter().find(|port| port.name == name);
    match port.and_then(|port| tensor.cast(&port.dtype)) {
        Some(cast) => Cow::Owned(cast),
        None => Cow::Borrowed(tensor),
    }
}
