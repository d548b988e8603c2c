//! An executor that looks at what linear layers read, while another runs them.

use std::collections::BTreeMap;

use viaduct_export::bundle::Bundle;

use super::{
    layers::{LayerInput, Source},
    sums::Sums,
};
use crate::{
    runtime::{
        Attended, Between, Binding, Device, Executor, Placement, RuntimeError, Session, Tensor, TensorView,
    },
    tensor::HostTensor,
};

/// A value of a stage that is looked at.
struct Watched {
    value: String,
    is_graph_input: bool,
    /// Which sums it is added to.
    sums: Vec<usize>,
}

/// Adds up what passes through the watched values, by stage.
pub struct Recorder<'e> {
    executor: &'e mut dyn Executor,
    watched: BTreeMap<String, Vec<Watched>>,
    /// In the order of the inputs.
    pub sums: Vec<Sums>,
}

impl<'e> Recorder<'e> {
    /// Looks at what these inputs are made of.
    pub fn new(executor: &'e mut dyn Executor, inputs: &[LayerInput]) -> Recorder<'e> {
        let mut watched: BTreeMap<String, Vec<Watched>> = BTreeMap::new();
        for (index, input) in inputs.iter().enumerate() {
            for Source { stage, value, is_graph_input } in &input.sources {
                let of_stage = watched.entry(stage.clone()).or_default();
                match of_stage.iter_mut().find(|known| known.value == *value) {
                    Some(known) => known.sums.push(index),
                    None => of_stage.push(Watched {
                        value: value.clone(),
                        is_graph_input: *is_graph_input,
                        sums: vec![index],
                    }),
                }
            }
        }
        let sums = inputs.iter().map(|input| Sums::new(input.width)).collect();
        Recorder { executor, watched, sums }
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
        let sums = &mut self.sums;
        let between = Recorded { watched, sums, exposed, bound: BTreeMap::new() };
        Ok(Box::new(Attended { session, between }))
    }
}

struct Recorded<'r> {
    watched: &'r [Watched],
    sums: &'r mut [Sums],
    /// The watched values that are no inputs of the graph.
    exposed: Vec<String>,
    /// The watched inputs that are bound.
    bound: BTreeMap<String, HostTensor>,
}

impl Between for Recorded<'_> {
    /// Without what only the recorder reads.
    fn outputs(&self, session: &dyn Session) -> Vec<String> {
        let mut outputs = session.outputs();
        outputs.retain(|output| !self.exposed.contains(output));
        outputs
    }

    fn bind(
        &mut self,
        session: &mut dyn Session,
        name: &str,
        tensor: &HostTensor,
    ) -> Result<(), RuntimeError> {
        if self.watched.iter().any(|watched| watched.value == name) {
            self.bound.insert(name.to_owned(), tensor.clone());
        }
        session.bind(name, tensor)
    }

    fn run_placed(
        &mut self,
        session: &mut dyn Session,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError> {
        let mut all = outputs.to_vec();
        all.extend(self.exposed.iter().map(|name| (name.as_str(), Placement::Host)));
        let mut tensors = session.run_placed(inputs, &all)?;
        let exposed = tensors.split_off(outputs.len());
        let exposed: BTreeMap<&str, &Tensor> =
            self.exposed.iter().map(String::as_str).zip(&exposed).collect();
        for watched in self.watched {
            let name = watched.value.as_str();
            let given = inputs.iter().find(|(input, _)| *input == name).map(|(_, tensor)| *tensor);
            let bound = || self.bound.get(name).map(TensorView::Host);
            let exposed = || exposed.get(name).map(|tensor| tensor.view());
            if let Some(tensor) = given.or_else(bound).or_else(exposed) {
                let tensor = tensor.on_host()?;
                record(session.name(), watched, self.sums, &tensor)?;
            }
        }
        Ok(tensors)
    }
}

fn record(
    stage: &str,
    watched: &Watched,
    sums: &mut [Sums],
    tensor: &HostTensor,
) -> Result<(), RuntimeError> {
    let rows = tensor.to_f32();
    for index in &watched.sums {
        let width = sums[*index].width();
        if tensor.shape.last() != Some(&width) {
            return Err(RuntimeError::BadTensor {
                stage: stage.to_owned(),
                tensor: watched.value.clone(),
                expected: format!("{width} columns"),
                got: format!("{:?}", tensor.shape),
            });
        }
        sums[*index].add(&rows);
    }
    Ok(())
}
