//! An executor that looks at what linear layers read, while another runs them.

use std::collections::BTreeMap;

use viaduct_export::bundle::Bundle;

use super::{layers::LayerInput, sums::Sums};
use crate::{
    runtime::{Binding, Device, Executor, Placement, RuntimeError, Session, Tensor, TensorView},
    tensor::HostTensor,
};

/// A value of a stage that is looked at.
pub struct Watched {
    pub value: String,
    pub is_graph_input: bool,
    pub sums: Sums,
}

/// Adds up what passes through the watched values, by stage.
pub struct Recorder<'e> {
    pub executor: &'e mut dyn Executor,
    pub watched: BTreeMap<String, Vec<Watched>>,
}

impl Recorder<'_> {
    /// The sums of these inputs, in their order.
    pub fn sums(self, inputs: &[(String, LayerInput)]) -> Vec<Sums> {
        let mut watched: BTreeMap<_, _> =
            self.watched.into_iter().map(|(stage, watched)| (stage, watched.into_iter())).collect();
        let next =
            |(stage, _): &(String, LayerInput)| watched.get_mut(stage)?.next().map(|watched| watched.sums);
        inputs.iter().filter_map(next).collect()
    }
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
        let watched = self.watched.entry(name.to_owned()).or_default();
        let inner = watched.iter().filter(|watched| !watched.is_graph_input);
        let exposed: Vec<String> = inner.map(|watched| watched.value.clone()).collect();
        let all: Vec<&str> =
            binding.exposed.iter().copied().chain(exposed.iter().map(String::as_str)).collect();
        // Nothing is opened ahead: what the next stage is to show is not known here.
        let Binding { sizes, scaled, settings, planned, .. } = *binding;
        let binding = Binding { sizes, exposed: &all, scaled, settings, planned, ahead: &[] };
        let session = self.executor.open_stage(bundle, name, &binding)?;
        Ok(Box::new(Recorded { session, watched, exposed, bound: BTreeMap::new() }))
    }
}

struct Recorded<'r> {
    session: Box<dyn Session + 'r>,
    watched: &'r mut [Watched],
    /// The watched values that are no inputs of the graph.
    exposed: Vec<String>,
    /// The watched inputs that are bound.
    bound: BTreeMap<String, HostTensor>,
}

impl Session for Recorded<'_> {
    fn name(&self) -> &str {
        self.session.name()
    }

    /// Without what only the recorder reads.
    fn outputs(&self) -> Vec<String> {
        let mut outputs = self.session.outputs();
        outputs.retain(|output| !self.exposed.contains(output));
        outputs
    }

    fn nodes(&self) -> &BTreeMap<String, usize> {
        self.session.nodes()
    }

    fn bind(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        if self.watched.iter().any(|watched| watched.value == name) {
            self.bound.insert(name.to_owned(), tensor.clone());
        }
        self.session.bind(name, tensor)
    }

    fn run_placed(
        &mut self,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError> {
        let mut all = outputs.to_vec();
        all.extend(self.exposed.iter().map(|name| (name.as_str(), Placement::Host)));
        let mut tensors = self.session.run_placed(inputs, &all)?;
        let exposed = tensors.split_off(outputs.len());
        let exposed: BTreeMap<&str, &Tensor> =
            self.exposed.iter().map(String::as_str).zip(&exposed).collect();
        for watched in self.watched.iter_mut() {
            let name = watched.value.as_str();
            let given = inputs.iter().find(|(input, _)| *input == name).map(|(_, tensor)| *tensor);
            let bound = || self.bound.get(name).map(TensorView::Host);
            let exposed = || exposed.get(name).map(|tensor| tensor.view());
            if let Some(tensor) = given.or_else(bound).or_else(exposed) {
                let tensor = tensor.on_host()?;
                record(self.session.name(), watched, &tensor)?;
            }
        }
        Ok(tensors)
    }

    fn finish(self: Box<Self>) -> Result<Option<u64>, RuntimeError> {
        self.session.finish()
    }
}

fn record(stage: &str, watched: &mut Watched, tensor: &HostTensor) -> Result<(), RuntimeError> {
    let width = watched.sums.width();
    if tensor.shape.last() != Some(&width) {
        return Err(RuntimeError::BadTensor {
            stage: stage.to_owned(),
            tensor: watched.value.clone(),
            expected: format!("{width} columns"),
            got: format!("{:?}", tensor.shape),
        });
    }
    watched.sums.add(&tensor.to_f32());
    Ok(())
}
