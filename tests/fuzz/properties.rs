//! What must hold of every model and every pass.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use bytes::Bytes;
use prost::Message;
use viaduct::{
    runtime::{Runtime, StageModel},
    tensor::{HostTensor, Values},
};
use viaduct_export::{
    memory::PENDING_DISPATCHES,
    onnx::{
        Attribute, DType, Dim, Model, Node, ReadError, Value, ValueId, ValueType, model_bytes,
        proto::ModelProto, read_model_bytes,
    },
    passes::{
        AttentionForm, Facts, PASSES, Pass, PassError, Replacement, SEQUENCES, Settings, apply, sequence,
    },
    shapes::{Sizes, infer},
};

use crate::{
    runtime_faults,
    runtime_support::{Feeds, cpu, noise, tensor},
};

/// What is asked of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// Nothing goes wrong.
    Structure,
    /// The numbers are the same, too.
    Numbers,
}

/// A model and how to run it.
pub struct Trial {
    pub bytes: Vec<u8>,
    /// Sizes of the open dimensions, one run each.
    pub sizes: Vec<Sizes>,
    pub depth: Depth,
}

/// What became of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Seen {
    /// The reader refused it.
    Refused,
    /// It was rewritten, but does not run or was not run.
    Rewritten,
    /// It gave the same numbers before and after.
    Compared,
}

/// A pass or a sequence of passes takes a second or less; this is a hang.
const MAX_TIME: Duration = Duration::from_secs(30);

/// Tensors with more elements are not run.
const MAX_ELEMENTS: usize = 1 << 20;

/// Passes that round: no numbers are compared behind them, but the model must run.
const ROUNDING: &[&str] = &["to_f16", "fp32_islands", "quantize_matmul_q8", "quantize_matmul_q4"];
const ROUNDING_SEQUENCES: &[&str] = &["f16", "q8", "q4"];

/// How far numbers may be apart: ONNX Runtime fuses on its own before and after, so that no bit is promised here.
const BAR: f32 = 1e-5;
const BAR_F16: f32 = 1e-2;

pub struct Checker {
    runtime: Runtime,
    /// In how many models a pass alone found something to do.
    pub applied: BTreeMap<&'static str, u64>,
}

type Outputs = Vec<HostTensor>;

impl Checker {
    pub fn new() -> Checker {
        Checker { runtime: cpu(), applied: BTreeMap::new() }
    }

    pub fn runs(&mut self, trial: &Trial) -> Result<(), String> {
        let model = read(&trial.bytes).map_err(|error| error.to_string())?;
        self.outputs(&model, &trial.sizes, 0.0).map(drop)
    }

    pub fn check(&mut self, trial: &Trial) -> Result<Seen, String> {
        let Ok(model) = read(&trial.bytes) else { return Ok(Seen::Refused) };
        written(&model, "the model as it is")?;
        let before = match trial.depth {
            Depth::Numbers if runtime_faults::may_die_of(&model) => None,
            Depth::Numbers => self.outputs(&model, &trial.sizes, 0.0).ok(),
            Depth::Structure => None,
        };
        let conflicts: Vec<usize> = trial.sizes.iter().map(|sizes| conflicts(&model, sizes)).collect();
        for list in lists() {
            let settings = Settings { attention: list.attention, ..Settings::default() };
            let Some(after) = rewritten(&model, &list, &settings)? else { continue };
            *self.applied.entry(list.name).or_default() += 1;
            for (sizes, conflicts) in trial.sizes.iter().zip(&conflicts) {
                if *conflicts == 0 && self::conflicts(&after, sizes) > 0 {
                    let found = infer(&after, sizes, &BTreeMap::new()).conflicts;
                    return Err(format!("{}: shapes contradict: {:?}", list.name, found[0]));
                }
            }
            if let Some(before) = &before {
                self.compare(&model, &after, &list, &trial.sizes, before)?;
            }
        }
        if let (Some(before), [sizes, ..]) = (&before, &trial.sizes[..]) {
            self.bound(&model, sizes, before)?;
        }
        Ok(if before.is_some() { Seen::Compared } else { Seen::Rewritten })
    }

    /// `lean` with all sizes bound.
    fn bound(&mut self, model: &Model, sizes: &Sizes, before: &[Outputs]) -> Result<(), String> {
        let list = List {
            name: "lean",
            passes: sequence("lean").unwrap(),
            compared: true,
            attention: AttentionForm::Fused,
        };
        let named = symbols(model);
        let sizes: Sizes = sizes.clone().into_iter().filter(|(name, _)| named.contains(name)).collect();
        let settings = Settings { sizes: sizes.clone(), ..Settings::default() };
        let Some(after) = rewritten(model, &list, &settings)? else { return Ok(()) };
        self.compare(model, &after, &list, std::slice::from_ref(&sizes), &before[..1])
            .map_err(|e| format!("sizes bound: {e}"))
    }

    fn compare(
        &mut self,
        model: &Model,
        after: &Model,
        list: &List,
        sizes: &[Sizes],
        before: &[Outputs],
    ) -> Result<(), String> {
        if list.passes.iter().any(|pass| pass.name == "to_f16") {
            // ONNX Runtime's CPU provider dies of some graphs in f16 when it optimises them.
            return Ok(());
        }
        let outputs = self.outputs(after, sizes, 0.0);
        if outputs.as_ref().is_err_and(|problem| runtime_faults::explains(problem)) {
            return Ok(());
        }
        // What contradicts itself runs for as long as ONNX Runtime does not see it.
        let contradicts = || sizes.iter().any(|sizes| conflicts(model, sizes) > 0);
        if outputs.as_ref().is_err_and(|problem| runtime_faults::sees_contradiction(problem)) && contradicts()
        {
            return Ok(());
        }
        let outputs = outputs.map_err(|problem| format!("{}: does not run: {problem}", list.name))?;
        if !list.compared {
            return Ok(());
        }
        let halves = model.graph.values().any(|(_, value)| dtype(value) == Some(DType::F16))
            || model.graph.nodes().any(|(_, node)| makes_halves(node));
        let bar = if halves { BAR_F16 } else { BAR };
        for (run, (before, outputs)) in before.iter().zip(&outputs).enumerate() {
            for (at, (before, output)) in before.iter().zip(outputs).enumerate() {
                let distance = distance(before, output, list.heals());
                if distance <= bar {
                    continue;
                }
                let sizes = &sizes[run..=run];
                // Numbers that a little noise moves as far say nothing.
                let noise = if halves { 1e-3 } else { 1e-6 };
                let moved = self.moved(model, sizes, noise, at, before)?;
                if distance <= 30.0 * moved {
                    continue;
                }
                // Nor do those that depend on digits of Sigmoid that the runtime does not compute.
                if list.passes.iter().any(|pass| pass.name == "fuse_silu") {
                    let moved = self.moved(&with_inexact_sigmoids(after), sizes, 0.0, at, output)?;
                    // Both as numbers: what was exactly zero has no relative error.
                    if distance * peak(before) <= 4.0 * moved * peak(output) {
                        continue;
                    }
                }
                if self.same_unfused([model, after], sizes, at, bar) {
                    continue;
                }
                return Err(format!(
                    "{}: other numbers: output {at} under {:?} is {distance:e} off (noise: {moved:e}), {:?} -> {:?}",
                    list.name, sizes[0], before.shape, output.shape
                ));
            }
        }
        Ok(())
    }

    /// Whether an output is the same where every value is given out, so that the runtime can fuse none: its fusion of layer
    /// norms takes `mean - x` for `x - mean`.
    fn same_unfused(&mut self, models: [&Model; 2], sizes: &[Sizes], at: usize, bar: f32) -> bool {
        let mut output = |model| self.outputs(&given_out(model), sizes, 0.0).ok()?.pop()?.into_iter().nth(at);
        let [before, after] = models.map(&mut output);
        before.zip(after).is_some_and(|(before, after)| distance(&before, &after, false) <= bar)
    }

    /// How far an output moves when the inputs are shaken, or the model is another.
    fn moved(
        &mut self,
        model: &Model,
        sizes: &[Sizes],
        shake: f32,
        at: usize,
        from: &HostTensor,
    ) -> Result<f32, String> {
        let outputs = self.outputs(model, sizes, shake).map_err(|problem| format!("noise: {problem}"))?;
        let output = outputs.first().and_then(|outputs| outputs.get(at));
        Ok(output.map_or(0.0, |output| distance(from, output, false)))
    }

    /// All outputs for all sizes.
    fn outputs(&mut self, model: &Model, sizes: &[Sizes], shake: f32) -> Result<Vec<Outputs>, String> {
        let feeds: Vec<Feeds> =
            sizes.iter().map(|sizes| feeds(model, sizes, shake)).collect::<Result<_, _>>()?;
        let bytes = model_bytes(model).map_err(|e| e.to_string())?;
        // Should the runtime die of it.
        let _ = fs::write(crate::failures_folder().join("running.onnx"), &bytes);
        let folder = Path::new(".");
        let stage = StageModel { name: "fuzz", bytes, folder, pending_dispatches: PENDING_DISPATCHES };
        let mut stage = self.runtime.open(stage).map_err(|e| e.to_string())?;
        let outputs: Vec<&str> =
            model.graph.outputs.iter().map(|id| model.graph[*id].name.as_str()).collect();
        let run = |feeds: &Feeds| {
            let inputs: Vec<(&str, &HostTensor)> = feeds.iter().map(|(n, t)| (n.as_str(), t)).collect();
            stage.run(&inputs, &outputs).map_err(|e| e.to_string())
        };
        feeds.iter().map(run).collect()
    }
}

/// The model with every Sigmoid as far off as ONNX Runtime's CPU provider computes it.
fn with_inexact_sigmoids(model: &Model) -> Model {
    const ERROR: f32 = 1.5e-7;
    let facts = Facts::of(model);
    let f32_sigmoid = |node: &Node| {
        let output = node.output(0).filter(|_| node.is("Sigmoid"))?;
        (facts.dtype(output) == Some(DType::F32)).then_some(output)
    };
    let sigmoids: Vec<_> =
        model.graph.nodes().filter_map(|(id, node)| Some((id, f32_sigmoid(node)?))).collect();
    let mut inexact = model.clone();
    for (id, output) in sigmoids {
        let node = inexact.graph[id].clone();
        let mut new = Replacement::of(&mut inexact.graph, id);
        let (exact, error) = (new.value(), new.scalar(DType::F32, ERROR));
        new.push(Node { name: String::new(), outputs: vec![Some(exact)], ..node });
        new.op_into("Add", &[exact, error], &[], output);
        new.finish();
    }
    inexact
}

/// The model with every value that can be read as an output, behind its own.
fn given_out(model: &Model) -> Model {
    let facts = Facts::of(model);
    let readable =
        |id: &ValueId| facts.dtype(*id).filter(|t| [DType::F32, DType::F16, DType::I64].contains(t));
    let made = model.graph.nodes().flat_map(|(_, node)| node.outputs.iter().flatten());
    let mut all = model.clone();
    for (id, dtype) in made.filter_map(|id| Some((*id, readable(id)?))) {
        all.graph[id].ty.get_or_insert(ValueType::Tensor { dtype, shape: None });
        all.graph.add_output(id);
    }
    all
}

fn makes_halves(node: &Node) -> bool {
    let half = |(_, attribute): &(_, Attribute)| matches!(attribute, Attribute::Tensor(tensor) if tensor.dtype == DType::F16);
    node.is("Cast") && node.int("to") == Some(10) || node.attributes.iter().any(half)
}

/// Passes that are run together.
struct List {
    name: &'static str,
    passes: Vec<&'static Pass>,
    /// Whether the numbers stay the same.
    compared: bool,
    attention: AttentionForm,
}

impl List {
    /// Whether rows that were NaN, because their mask hides all there is, get numbers, and guards against NaN from elsewhere
    /// go.
    fn heals(&self) -> bool {
        self.passes.iter().any(|pass| ["finite_masks", "remove_nan_guard"].contains(&pass.name))
    }
}

fn lists() -> Vec<List> {
    let alone = PASSES.iter().map(|pass| List {
        name: pass.name,
        passes: vec![pass],
        compared: !ROUNDING.contains(&pass.name),
        attention: AttentionForm::Fused,
    });
    let sequences = SEQUENCES.iter().map(|found| List {
        name: found.name,
        passes: sequence(found.name).unwrap(),
        compared: !ROUNDING_SEQUENCES.contains(&found.name),
        attention: AttentionForm::Fused,
    });
    let written = [1, 3].map(|slices| List {
        name: "webgpu, attention written out",
        passes: sequence("webgpu").unwrap(),
        compared: true,
        attention: AttentionForm::Written { slices },
    });
    alone.chain(sequences).chain(written).collect()
}

/// The model after the passes; nothing if they do nothing, or give an error that is no fault of theirs.
fn rewritten(model: &Model, list: &List, settings: &Settings) -> Result<Option<Model>, String> {
    let name = list.name;
    let start = Instant::now();
    let mut after = model.clone();
    let reports = match apply(&mut after, &list.passes, settings) {
        Ok(reports) => reports,
        Err(error @ (PassError::Invalid { .. } | PassError::Unsettled { .. })) => {
            return Err(format!("{name}: {error}"));
        }
        Err(_) => return Ok(None),
    };
    if start.elapsed() > MAX_TIME {
        return Err(format!("{name}: took {:?}", start.elapsed()));
    }
    if reports.iter().all(|report| report.applied == 0) {
        let [before, after] = [model, &after].map(|model| model_bytes(model).map_err(|e| e.to_string()));
        return if before == after {
            Ok(None)
        } else {
            Err(format!("{name}: changed what it did not apply to"))
        };
    }
    after.graph.validate().map_err(|error| format!("{name}: invalid: {error}"))?;
    let interface = |model: &Model| {
        let side = |ids: &[ValueId]| {
            ids.iter()
                .map(|id| (model.graph[*id].name.clone(), model.graph[*id].ty.clone()))
                .collect::<Vec<_>>()
        };
        (side(&model.graph.inputs), side(&model.graph.outputs))
    };
    if settings.sizes.is_empty() && interface(model) != interface(&after) {
        return Err(format!("{name}: inputs or outputs changed"));
    }
    // Weights that are NaN are found when they are quantised.
    if model_bytes(&after).is_err_and(|error| error.to_string().contains("the checkpoint is damaged")) {
        return Ok(None);
    }
    let bytes = written(&after, name)?;
    let mut again = after.clone();
    let settled = Settings { sizes: BTreeMap::new(), ..settings.clone() };
    let second = apply(&mut again, &list.passes, &settled).map_err(|e| format!("{name}: second run: {e}"))?;
    if let Some(report) = second.iter().find(|report| report.applied > 0) {
        return Err(format!("{name}: second run: {} applied {}", report.pass.name, report.applied));
    }
    if written(&again, name)? != bytes {
        return Err(format!("{name}: second run: other bytes"));
    }
    Ok(Some(after))
}

/// The model's bytes, which both readers accept and which say the same again.
fn written(model: &Model, name: &str) -> Result<Vec<u8>, String> {
    let bytes = model_bytes(model).map_err(|error| format!("{name}: does not write: {error}"))?;
    let back = read(&bytes).map_err(|error| format!("{name}: does not read back: {error}"))?;
    let again = model_bytes(&back).map_err(|error| format!("{name}: does not write again: {error}"))?;
    if bytes != again && sorted(&bytes)? != sorted(&again)? {
        return Err(format!("{name}: reads back otherwise"));
    }
    let other: Result<onnx_protobuf::ModelProto, _> = protobuf::Message::parse_from_bytes(&bytes);
    other.map_err(|error| format!("{name}: the other reader refuses: {error}"))?;
    Ok(bytes)
}

/// The message with what has no order sorted.
fn sorted(bytes: &[u8]) -> Result<ModelProto, String> {
    let mut model = ModelProto::decode(bytes).map_err(|error| error.to_string())?;
    if let Some(graph) = &mut model.graph {
        graph.initializer.sort_by(|a, b| a.name.cmp(&b.name));
        graph.value_info.sort_by(|a, b| a.name.cmp(&b.name));
    }
    Ok(model)
}

fn read(bytes: &[u8]) -> Result<Model, Box<ReadError>> {
    read_model_bytes(Bytes::copy_from_slice(bytes), None).map_err(Box::new)
}

fn conflicts(model: &Model, sizes: &Sizes) -> usize {
    infer(model, sizes, &BTreeMap::new()).conflicts.len()
}

pub fn dtype(value: &Value) -> Option<DType> {
    match (&value.ty, &value.constant) {
        (Some(ValueType::Tensor { dtype, .. }), _) => Some(*dtype),
        (_, Some(tensor)) => Some(tensor.dtype),
        _ => None,
    }
}

/// Names of open dimensions of the inputs.
pub fn symbols(model: &Model) -> Vec<String> {
    let shapes = model.graph.inputs.iter().filter_map(|id| match &model.graph[*id].ty {
        Some(ValueType::Tensor { shape, .. }) => shape.as_ref(),
        _ => None,
    });
    let names = shapes.flatten().filter_map(|dim| match dim {
        Dim::Symbol(name) => Some(name.clone()),
        _ => None,
    });
    names.collect()
}

/// Noise for every input; `shake` moves the numbers by that part of themselves.
fn feeds(model: &Model, sizes: &Sizes, shake: f32) -> Result<Feeds, String> {
    let mut feeds = Feeds::new();
    for (at, id) in model.graph.inputs.iter().enumerate() {
        let value = &model.graph[*id];
        let Some(ValueType::Tensor { dtype, shape: Some(shape) }) = &value.ty else {
            return Err(format!("the input {} has no shape", value.name));
        };
        let size = |dim: &Dim| match dim {
            Dim::Fixed(size) => Some(*size),
            Dim::Symbol(name) => sizes.get(name).copied(),
            Dim::Unknown => Some(4),
        };
        let shape: Vec<usize> =
            shape.iter().map(size).collect::<Option<_>>().ok_or("an unknown dimension")?;
        let count = shape.iter().try_fold(1usize, |n, size| n.checked_mul(*size));
        let count = count.filter(|count| *count <= MAX_ELEMENTS).ok_or("a large input")?;
        let values = noise(at as u64 + 1, count).into_iter().enumerate();
        let values: Vec<f32> =
            values.map(|(i, v)| v * (1.0 + if i % 2 == 0 { shake } else { -shake })).collect();
        let tensor = match dtype {
            DType::F32 => HostTensor::f32(&shape, values),
            DType::F16 => tensor(*dtype, &shape, &values),
            DType::I64 => HostTensor::i64(&shape, (0..count as i64).map(|i| (i * 7 + 3) % 4).collect()),
            DType::U8 => HostTensor::new(&shape, Values::U8((0..count).map(|i| (i % 4) as u8).collect())),
            other => return Err(format!("an input of type {other:?}")),
        };
        feeds.push((value.name.clone(), tensor));
    }
    Ok(feeds)
}

fn peak(tensor: &HostTensor) -> f32 {
    peak_of(&tensor.to_f32())
}

/// The largest finite magnitude.
fn peak_of(values: &[f32]) -> f32 {
    values.iter().filter(|v| v.is_finite()).fold(1e-30f32, |peak, v| peak.max(v.abs()))
}

/// max|a-b| / max|a|; infinite where types, shapes, integers, or what is not finite differ.
/// `healed`: NaN is as good as anything.
fn distance(a: &HostTensor, b: &HostTensor, healed: bool) -> f32 {
    if a.shape != b.shape || a.values.dtype() != b.values.dtype() {
        return f32::INFINITY;
    }
    if !matches!(a.values.dtype(), DType::F32 | DType::F16) {
        return if a == b { 0.0 } else { f32::INFINITY };
    }
    let (a, b) = (a.to_f32(), b.to_f32());
    let peak = peak_of(&a);
    let apart = |(a, b): (&f32, &f32)| match () {
        () if a.to_bits() == b.to_bits()
            || a == b
            || (a.is_nan() && b.is_nan())
            || (healed && (a.is_nan() || b.is_nan())) =>
        {
            0.0
        }
        () if a.is_finite() && b.is_finite() => (a - b).abs() / peak,
        () => f32::INFINITY,
    };
    a.iter().zip(&b).map(apart).fold(0.0, f32::max)
}
