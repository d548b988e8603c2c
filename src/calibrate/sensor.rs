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
    runtime::{Binding, Device, Executor, Placement, RuntimeError, Session, Tensor, TensorView, gain_of},
    tensor::HostTensor,
};

/// The part by which columns are changed: about what 4 bits lose.
const CHANGE: f32 = 1.0 / 16.0;

/// An executor that runs stages again with changes, beside the run that is asked for.
pub struct Sensor<'e> {
    executor: &'e mut dyn Executor,
    /// In the order in which they were opened first.
    stages: Vec<Sensed>,
}

/// What was seen of a stage.
struct Sensed {
    name: String,
    outputs: Vec<String>,
    /// The layers' weights and products; a weight may have several.
    layers: Vec<[String; 2]>,
    /// By what was changed (the product of a layer, or an input of the stage), and output.
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
    pub fn new(executor: &'e mut dyn Executor) -> Sensor<'e> {
        Sensor { executor, stages: Vec::new() }
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
        let sensed = &mut self.stages[index];
        Ok(Box::new(Sensing { session, gains, handed, bound: BTreeMap::new(), sensed, signs: Signs(0) }))
    }
}

/// A layer whose output an input of the graph scales.
struct Gain {
    layer: Layer,
    input: String,
    half: bool,
}

impl Gain {
    fn new(layer: Layer, graph: &Graph) -> Gain {
        let output = graph.find(&layer.output).and_then(|value| graph[value].ty.as_ref());
        let half = matches!(output, Some(ValueType::Tensor { dtype: DType::F16, .. }));
        Gain { input: gain_of(&layer.output), half, layer }
    }

    /// A factor for each column.
    fn tensor(&self, mut factor: impl FnMut() -> f32) -> HostTensor {
        let factors =
            HostTensor::f32(&[self.layer.outputs], (0..self.layer.outputs).map(|_| factor()).collect());
        if self.half { factors.cast("f16").unwrap_or(factors) } else { factors }
    }
}

/// A session that runs again with changes.
struct Sensing<'r> {
    session: Box<dyn Session + 'r>,
    gains: Vec<Gain>,
    /// Names of what earlier stages hand on.
    handed: BTreeSet<String>,
    bound: BTreeMap<String, HostTensor>,
    sensed: &'r mut Sensed,
    signs: Signs,
}

impl Sensing<'_> {
    fn run_changed(
        &mut self,
        changed: &str,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
        plain: &[Tensor],
    ) -> Result<(), RuntimeError> {
        let found = self.session.run_placed(inputs, outputs)?;
        for (((output, _), plain), found) in outputs.iter().zip(plain).zip(found) {
            let response =
                self.sensed.responses.entry((changed.to_owned(), (*output).to_owned())).or_default();
            response.add(&plain.view().on_host()?.to_f32(), &found.into_host()?.to_f32());
        }
        Ok(())
    }

    /// A tensor with every element changed.
    fn changed(&mut self, tensor: &HostTensor) -> HostTensor {
        let values = tensor.to_f32().into_iter().map(|value| value * self.signs.factor()).collect();
        let changed = HostTensor::f32(&tensor.shape, values);
        if tensor.values.dtype() == DType::F16 { changed.cast("f16").unwrap_or(changed) } else { changed }
    }
}

impl Session for Sensing<'_> {
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
        if self.handed.contains(name) {
            self.bound.insert(name.to_owned(), tensor.clone());
        }
        self.session.bind(name, tensor)
    }

    fn run_placed(
        &mut self,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError> {
        let outputs: Vec<_> = outputs.iter().map(|(name, _)| (*name, Placement::Host)).collect();
        let plain = self.session.run_placed(inputs, &outputs)?;
        for index in 0..self.gains.len() {
            let Gain { layer, input, .. } = &self.gains[index];
            let (product, input) = (layer.output.clone(), input.clone());
            let factors = self.gains[index].tensor(|| self.signs.factor());
            self.session.bind(&input, &factors)?;
            self.run_changed(&product, inputs, &outputs, &plain)?;
            self.session.bind(&input, &self.gains[index].tensor(|| 1.0))?;
        }
        for (name, tensor) in self.bound.clone() {
            let changed = self.changed(&tensor);
            self.session.bind(&name, &changed)?;
            self.run_changed(&name, inputs, &outputs, &plain)?;
            self.session.bind(&name, &tensor)?;
        }
        for (index, (name, tensor)) in inputs.iter().enumerate() {
            if self.handed.contains(*name) {
                let changed = self.changed(&*tensor.on_host()?);
                let mut inputs = inputs.to_vec();
                inputs[index].1 = TensorView::Host(&changed);
                self.run_changed(name, &inputs, &outputs, &plain)?;
            }
        }
        Ok(plain)
    }

    fn finish(self: Box<Self>) -> Result<Option<u64>, RuntimeError> {
        self.session.finish()
    }
}

/// Up and down at random, the same on every machine (splitmix64).
struct Signs(u64);

impl Signs {
    fn factor(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        if (bits ^ (bits >> 31)) & 1 == 0 { 1.0 + CHANGE } else { 1.0 - CHANGE }
    }
}
