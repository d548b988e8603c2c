//! The two sides of a comparison: a graph on a device, or tensors that somebody else computed.

use std::collections::BTreeMap;

use viaduct_export::{
    onnx::{DType, Dim, Model, ValueId, ValueType},
    shapes::{Shapes, infer},
};

use super::{
    BisectError,
    exposure::{Exposure, expose},
    tensors::TensorFiles,
};
use crate::{
    runtime::{Optimisation, Runtime, RuntimeError},
    tensor::HostTensor,
};

/// Tensors by name.
pub type Tensors = BTreeMap<String, HostTensor>;

/// Runs values.
pub trait Side {
    /// The values of these names, each run as one of several that are looked at together.
    fn values(&mut self, names: &[&str]) -> Result<Vec<HostTensor>, BisectError>;
}

/// A graph, as it is to run.
pub struct Subject {
    /// What messages call it.
    pub name: String,
    pub model: Model,
    pub shapes: Shapes,
    pub pending_dispatches: u32,
    pub optimisation: Optimisation,
}

impl Subject {
    fn value(&self, name: &str) -> Result<ValueId, BisectError> {
        let unknown = || BisectError::NoValue { graph: self.name.clone(), value: name.to_owned() };
        self.model.graph.find(name).ok_or_else(unknown)
    }

    /// States types and shapes of values, as their tensors have them.
    pub fn state(&mut self, tensors: &[(ValueId, &HostTensor)]) {
        for (id, tensor) in tensors {
            let dtype = self.dtype(*id, tensor);
            let shape = Some(tensor.shape.iter().map(|size| Dim::Fixed(*size)).collect());
            self.model.graph[*id].ty = Some(ValueType::Tensor { dtype, shape });
        }
        self.shapes = infer(&self.model, &Default::default(), &Default::default());
    }

    /// The element type of a value: what is known of it, else that of its tensor.
    pub fn dtype(&self, id: ValueId, tensor: &HostTensor) -> DType {
        let recorded = match &self.model.graph[id].ty {
            Some(ValueType::Tensor { dtype, .. }) => Some(*dtype),
            _ => None,
        };
        let known = self.shapes.known(id).and_then(|fact| fact.dtype);
        known.or(recorded).unwrap_or_else(|| tensor.values.dtype())
    }

    /// Runs the values on a device, with inputs of the names that the graph has for them.
    pub fn run(
        &self,
        runtime: &mut Runtime,
        inputs: &Tensors,
        names: &[&str],
    ) -> Result<Vec<HostTensor>, BisectError> {
        let values = names.iter().map(|name| self.value(name)).collect::<Result<Vec<_>, _>>()?;
        let Exposure { model, inputs: wanted, outputs } = expose(&self.model, &self.shapes, &values);
        let mut given = Vec::new();
        for (here, name) in &wanted {
            let missing = || RuntimeError::InputMissing { stage: self.name.clone(), tensor: name.clone() };
            given.push((here.as_str(), inputs.get(name).ok_or_else(missing)?));
        }
        let mut stage =
            runtime.open_for_inspection(&self.name, model, self.pending_dispatches, self.optimisation)?;
        let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
        Ok(stage.run(&given, &outputs)?)
    }
}

/// A graph on a device.
pub struct OnDevice<'a> {
    pub subject: &'a Subject,
    pub runtime: &'a mut Runtime,
    pub inputs: &'a Tensors,
}

impl Side for OnDevice<'_> {
    fn values(&mut self, names: &[&str]) -> Result<Vec<HostTensor>, BisectError> {
        self.subject.run(self.runtime, self.inputs, names)
    }
}

impl Side for &TensorFiles {
    fn values(&mut self, names: &[&str]) -> Result<Vec<HostTensor>, BisectError> {
        let tensor = |name: &&str| {
            let gone = || BisectError::NoValue {
                graph: self.path().display().to_string(),
                value: (*name).to_owned(),
            };
            self.tensor(name)?.ok_or_else(gone)
        };
        names.iter().map(tensor).collect()
    }
}
