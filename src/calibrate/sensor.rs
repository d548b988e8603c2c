//! How far a model's result is off where the output of a layer is off.
//!
//! Each layer of a stage in turn has the columns of its output changed by a small part, up or down, and the stage is run
//! again. What stages hand to later ones is changed likewise, and so an error in an early stage counts by what it does to
//! the result of the last.

use std::collections::{BTreeMap, BTreeSet};

use viaduct_export::{
    bundle::Bundle,
    onnx::{DType, Graph, ValueType},
};

use super::layers::{Layer, layers};
use crate::{
    pipeline::text_to_image::Family,
    runtime::{
        Attended, Between, Binding, Device, Executor, Placement, RuntimeError, Session, Tensor, TensorView,
        gain_of,
    },
    split_mix::SplitMix64,
    tensor::HostTensor,
};

/// The part by which columns are changed: about what 4 bits lose.
const CHANGE: f32 = 1.0 / 16.0;

/// An executor that runs stages again with changes, beside the run that is asked for.
pub struct Sensor<'e> {
    executor: &'e mut dyn Executor,
    family: &'e dyn Family,
    /// In the order in which they were opened first.
    stages: Vec<Sensed>,
}

/// What was seen of a stage.
struct Sensed {
    name: String,
    outputs: Vec<String>,
    /// The layers' weights and products; a weight may have several.
    layers: Vec<[String; 2]>,
    /// By what was changed (the product of a layer, or an earlier stage's output), and output.
    responses: BTreeMap<(String, String), Response>,
}

/// Squares of an output's change and of the output, summed up.
#[derive(Clone, Copy, Default)]
struct Response {
    change: f64,
    energy: f64,
}

impl Response {
    fn add(&mut self, plain: &[f32], changed: &[f32]) {
        for (plain, changed) in plain.iter().zip(changed) {
            let (plain, off) = (f64::from(*plain), f64::from(changed - plain));
            self.change += off * off;
            self.energy += plain * plain;
        }
    }

    /// As a share of what was changed.
    fn share(&self) -> f64 {
        let change = f64::from(CHANGE);
        if self.energy > 0.0 { self.change / self.energy / (change * change) } else { 0.0 }
    }
}

impl<'e> Sensor<'e> {
    pub fn new(executor: &'e mut dyn Executor, family: &'e dyn Family) -> Sensor<'e> {
        Sensor { executor, family, stages: Vec::new() }
    }

    /// A stage before the last of whose outputs no later stage was seen to read one: what its layers do to the result is
    /// not known.
    pub fn unread(&self) -> Option<&str> {
        let is_read = |index: usize, output: &String| {
            self.stages[index + 1..]
                .iter()
                .any(|later| later.responses.keys().any(|(what, _)| what == output))
        };
        let last = self.stages.len().saturating_sub(1);
        let unread =
            |index: &usize| !self.stages[*index].outputs.iter().any(|output| is_read(*index, output));
        (0..last).find(unread).map(|index| self.stages[index].name.as_str())
    }

    /// The squared error of the last stage's result, as a share of it, for that of the layer's output; 0 for a weight that no
    /// stage has.
    pub fn sensitivity(&self, weight: &str) -> f64 {
        let of_stage = |stage: usize| {
            let products = self.stages[stage].layers.iter().filter(|[own, _]| own == weight);
            products.map(|[_, product]| self.caused(stage, product)).sum::<f64>()
        };
        (0..self.stages.len()).map(of_stage).sum()
    }

    /// What a change in a stage does to the result.
    fn caused(&self, stage: usize, changed: &str) -> f64 {
        let responses = self.stages[stage].responses.iter().filter(|((what, _), _)| what == changed);
        responses.map(|((_, output), response)| response.share() * self.effect(stage, output)).sum()
    }

    /// What a change of a stage's output does to the result.
    fn effect(&self, stage: usize, output: &str) -> f64 {
        match stage + 1 == self.stages.len() {
            true => 1.0,
            false => (stage + 1..self.stages.len()).map(|later| self.caused(later, output)).sum(),
        }
    }
}

impl Executor for Sensor<'_> {
    fn device(&self) -> &Device {
        self.executor.device()
    }

    fn open_stage<'r>(
        &'r mut self,
        bundle: &Bundle,
        name: &str,
        binding: &Binding<'_>,
    ) -> Result<Box<dyn Session + 'r>, RuntimeError> {
        let graph = bundle.model(name)?.graph;
        let gains: Vec<_> = layers(&graph).into_iter().map(|layer| Gain::new(layer, &graph)).collect();
        let earlier = self.stages.iter().filter(|stage| stage.name != name);
        let handed = earlier.flat_map(|stage| stage.outputs.clone()).collect();
        let scaled: Vec<&str> = gains.iter().map(|gain| gain.layer.output.as_str()).collect();
        let Binding { sizes, exposed, settings, planned, .. } = *binding;
        let binding = Binding { sizes, exposed, scaled: &scaled, settings, planned, ahead: &[] };
        let mut session = self.executor.open_stage(bundle, name, &binding)?;
        for gain in &gains {
            session.bind(&gain.input, &gain.tensor(|| 1.0))?;
        }
        let known = self.stages.iter().position(|stage| stage.name == name);
        let index = known.unwrap_or_else(|| {
            let (name, outputs) = (name.to_owned(), session.outputs());
            let layers =
                gains.iter().map(|gain| [gain.layer.weight.clone(), gain.layer.output.clone()]).collect();
            self.stages.push(Sensed { name, outputs, layers, responses: BTreeMap::new() });
            self.stages.len() - 1
        });
        let (sensed, family) = (&mut self.stages[index], self.family);
        let between =
            Sensing { family, gains, handed, bound: BTreeMap::new(), sensed, signs: Signs(SplitMix64(0)) };
        Ok(Box::new(Attended { session, between }))
    }
}

/// A layer whose output an input of the graph scales.
struct Gain {
    layer: Layer,
    input: String,
    dtype: DType,
}

impl Gain {
    fn new(layer: Layer, graph: &Graph) -> Gain {
        let dtype = match graph.find(&layer.output).and_then(|value| graph[value].ty.as_ref()) {
            Some(ValueType::Tensor { dtype, .. }) => *dtype,
            _ => DType::F32,
        };
        Gain { input: gain_of(&layer.output), dtype, layer }
    }

    /// A factor for each column.
    fn tensor(&self, mut factor: impl FnMut() -> f32) -> HostTensor {
        let columns = self.layer.outputs;
        HostTensor::f32(&[columns], (0..columns).map(|_| factor()).collect()).as_type(self.dtype)
    }
}

/// Runs a session again with changes.
struct Sensing<'r> {
    family: &'r dyn Family,
    gains: Vec<Gain>,
    /// Names of what earlier stages hand on.
    handed: BTreeSet<String>,
    bound: BTreeMap<String, HostTensor>,
    sensed: &'r mut Sensed,
    signs: Signs,
}

/// What a run is asked for, and what it gave without a change.
struct Plain<'a> {
    outputs: &'a [(&'a str, Placement)],
    values: Vec<Vec<f32>>,
}

impl Sensing<'_> {
    /// The earlier stage's output that an input is made of, if it is.
    fn handed(&self, input: &str) -> Option<String> {
        let output = self.family.output_behind(input);
        self.handed.contains(output).then(|| output.to_owned())
    }

    fn run_changed(
        &mut self,
        session: &mut dyn Session,
        changed: &str,
        inputs: &[(&str, TensorView<'_>)],
        plain: &Plain<'_>,
    ) -> Result<(), RuntimeError> {
        let found = session.run_placed(inputs, plain.outputs)?;
        for (((output, _), plain), found) in plain.outputs.iter().zip(&plain.values).zip(found) {
            let response =
                self.sensed.responses.entry((changed.to_owned(), (*output).to_owned())).or_default();
            response.add(plain, &found.into_host()?.to_f32());
        }
        Ok(())
    }

    /// A tensor with every element changed.
    fn changed(&mut self, tensor: &HostTensor) -> HostTensor {
        let values = tensor.to_f32().into_iter().map(|value| value * self.signs.factor()).collect();
        HostTensor::f32(&tensor.shape, values).as_type(tensor.values.dtype())
    }
}

impl Between for Sensing<'_> {
    fn bind(
        &mut self,
        session: &mut dyn Session,
        name: &str,
        tensor: &HostTensor,
    ) -> Result<(), RuntimeError> {
        if self.handed(name).is_some() {
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
        let outputs: Vec<_> = outputs.iter().map(|(name, _)| (*name, Placement::Host)).collect();
        let tensors = session.run_placed(inputs, &outputs)?;
        let values = tensors.iter().map(|tensor| Ok(tensor.view().on_host()?.to_f32()));
        let plain = Plain { outputs: &outputs, values: values.collect::<Result<_, RuntimeError>>()? };
        for index in 0..self.gains.len() {
            let Gain { layer, input, .. } = &self.gains[index];
            let (product, input) = (layer.output.clone(), input.clone());
            let factors = self.gains[index].tensor(|| self.signs.factor());
            session.bind(&input, &factors)?;
            self.run_changed(session, &product, inputs, &plain)?;
            session.bind(&input, &self.gains[index].tensor(|| 1.0))?;
        }
        for (name, tensor) in self.bound.clone() {
            let Some(output) = self.handed(&name) else { continue };
            let changed = self.changed(&tensor);
            session.bind(&name, &changed)?;
            self.run_changed(session, &output, inputs, &plain)?;
            session.bind(&name, &tensor)?;
        }
        for (index, (name, tensor)) in inputs.iter().enumerate() {
            let Some(output) = self.handed(name) else { continue };
            let changed = self.changed(&*tensor.on_host()?);
            let mut inputs = inputs.to_vec();
            inputs[index].1 = TensorView::Host(&changed);
            self.run_changed(session, &output, &inputs, &plain)?;
        }
        Ok(tensors)
    }
}

/// Up and down at random.
struct Signs(SplitMix64);

impl Signs {
    fn factor(&mut self) -> f32 {
        if self.0.next() & 1 == 0 { 1.0 + CHANGE } else { 1.0 - CHANGE }
    }
}
