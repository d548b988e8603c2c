//! One session: made from a model, run many times, dropped.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::CString,
    fmt::Display,
    marker::PhantomData,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    time::{Duration, Instant},
};

use ort::{
    AsPointer,
    memory::MemoryInfo,
    session::{
        IoBinding, Session,
        builder::{GraphOptimizationLevel, SessionBuilder},
    },
    value::{DynTensorValueType, Outlet, ValueType},
};
use viaduct_export::onnx::{DType, Dim};

use super::{
    DeviceTensor, Placement, Provider, Runtime, RuntimeError, Tensor, TensorView, assignment, env,
    quiet::quietly,
    value::{Output, device_memory, dtype_of, host_memory, view},
};
use crate::tensor::HostTensor;

/// A model to open.
pub struct StageModel<'m> {
    /// The stage's name in messages.
    pub name: &'m str,
    /// A serialized `ModelProto`; its large tensors may lie in external files.
    pub bytes: Vec<u8>,
    /// Where those files are.
    pub folder: &'m Path,
    /// Dispatches that WebGPU records before it submits them; see [`viaduct_export::memory::PENDING_DISPATCHES`].
    pub pending_dispatches: u32,
}

/// Whether the WebGPU provider may leave nodes to the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CpuNodes {
    /// Such a node is an error: graphs that are made here need none.
    Refused,
    /// Graphs that others exported hold some.
    Allowed,
}

/// How far ONNX Runtime may change a graph before it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Optimisation {
    /// Nodes run as they are written, but for the casts of what a provider has no kernel for.
    None,
    /// Constants are folded, and what is redundant goes.
    Basic,
    /// Nodes are fused, too.
    #[default]
    All,
}

/// What a session may do with its graph.
#[derive(Clone, Copy, Debug)]
pub(super) struct Freedom {
    pub cpu_nodes: CpuNodes,
    pub optimisation: Optimisation,
}

impl From<CpuNodes> for Freedom {
    fn from(cpu_nodes: CpuNodes) -> Freedom {
        Freedom { cpu_nodes, optimisation: Optimisation::All }
    }
}

/// An input or output of a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<Dim>,
}

/// A live session. It borrows the [`Runtime`], so that there is one at a time; dropping it returns its memory. Who keeps
/// several has `Stage<'static>`, which only this module's siblings can make: see [`super::KeptSessions`].
///
/// ```compile_fail,E0499
/// # use viaduct::runtime::{Runtime, RuntimeError, StageModel};
/// fn two(runtime: &mut Runtime, a: StageModel, b: StageModel) -> Result<(), RuntimeError> {
///     let first = runtime.open(a)?;
///     let second = runtime.open(b)?; // the runtime is lent to `first`
///     drop(first);
///     Ok(())
/// }
/// ```
pub struct Stage<'r> {
    name: String,
    /// Holds the device's copies of inputs. Declared before the session, so that they are released first: a device
    /// tensor that outlives its session aborts the process when it is touched.
    binding: IoBinding,
    /// The inputs that the binding may point into, by name. Declared after it, so that they outlive it, and so do the
    /// sessions that tensors on the device are from.
    pinned: BTreeMap<String, Tensor>,
    session: Session,
    host: MemoryInfo<'static>,
    /// Where outputs can stay and inputs come from; none where that is the host.
    device: Option<MemoryInfo<'static>>,
    inputs: Vec<TensorInfo>,
    outputs: Vec<TensorInfo>,
    /// Shapes of the inputs that stay bound.
    bound: BTreeMap<String, Vec<usize>>,
    nodes: BTreeMap<String, usize>,
    load_time: Duration,
    runtime: PhantomData<&'r mut Runtime>,
}

impl Runtime {
    /// Makes a session of the model on the runtime's device. With WebGPU, a node that would run on the CPU is an error.
    pub fn open(&mut self, model: StageModel<'_>) -> Result<Stage<'_>, RuntimeError> {
        self.open_with(model, CpuNodes::Refused)
    }

    /// [`Runtime::open`] that may leave nodes to the CPU. The session does not borrow the runtime, so that the caller
    /// decides how many there are.
    pub(super) fn open_with(
        &mut self,
        model: StageModel<'_>,
        freedom: impl Into<Freedom>,
    ) -> Result<Stage<'static>, RuntimeError> {
        let start = Instant::now();
        let Freedom { cpu_nodes, optimisation } = freedom.into();
        let stage = model.name;
        let session = self.session(&model, optimisation).map_err(|reason| self.open_error(stage, reason))?;
        drop(model.bytes);
        let failed =
            |e: ort::Error| RuntimeError::Open { stage: stage.to_owned(), reason: e.message().to_owned() };
        // ONNX Runtime's own option against CPU nodes does not say which they are.
        let assignment = assignment::read(&session).map_err(failed)?;
        let refused = self.device.provider == Provider::WebGpu && cpu_nodes == CpuNodes::Refused;
        if refused && !assignment.on_cpu.is_empty() {
            return Err(RuntimeError::CpuNodes { stage: stage.to_owned(), nodes: assignment.on_cpu });
        }
        let info =
            |outlets: &[Outlet]| outlets.iter().map(|o| describe(stage, o)).collect::<Result<Vec<_>, _>>();
        Ok(Stage {
            name: stage.to_owned(),
            binding: session.create_binding().map_err(failed)?,
            host: host_memory().map_err(failed)?,
            device: match self.device.provider {
                Provider::WebGpu => Some(device_memory().map_err(failed)?),
                _ => None,
            },
            inputs: info(session.inputs())?,
            outputs: info(session.outputs())?,
            session,
            pinned: BTreeMap::new(),
            bound: BTreeMap::new(),
            nodes: assignment.nodes,
            load_time: start.elapsed(),
            runtime: PhantomData,
        })
    }

    fn session(&self, model: &StageModel<'_>, optimisation: Optimisation) -> Result<Session, String> {
        let entry = |builder: SessionBuilder, key: &str, value: &str| {
            builder.with_config_entry(key, value).map_err(text)
        };
        let builder = Session::builder(&self.env.ort).map_err(text)?;
        let level = match optimisation {
            Optimisation::None => GraphOptimizationLevel::Disable,
            Optimisation::Basic => GraphOptimizationLevel::Level1,
            Optimisation::All => GraphOptimizationLevel::All,
        };
        let builder = builder.with_optimization_level(level).map_err(text)?;
        let folder = model.folder.to_str().ok_or_else(|| {
            format!("{}: the name is not UTF-8, as ONNX Runtime needs it; rename it", model.folder.display())
        })?;
        let builder = entry(builder, "session.model_external_initializers_file_folder_path", folder)?;
        let builder = entry(builder, "session.record_ep_graph_assignment_info", "1")?;
        // Threads that spin while they wait take the cores from a software adapter, and heat up the rest.
        let mut builder = entry(builder, "session.intra_op.allow_spinning", "0")?;
        if self.device.provider == Provider::WebGpu {
            // An empty list of devices would be accepted, and would run on the CPU.
            let device = self.ort_device().ok_or("the plugin offers no device")?;
            // `simple` takes on an H200 half the memory of the default mode, and less time: 5.4 against 11.3 GiB for a
            // FLUX.2 Klein step; `lazyRelease` and `disabled` take six times as long. A freed buffer is reused only after the commands that may use it are submitted, so that many commands per
            // submission (16 by default) mean many buffers. On an H200 a decoder block takes 8.6 GiB with 16, 4.6 with 4
            // and 2.8 with 1, in the same time; a transformer step 5.1, 4.1 and 3.5 GiB in 193, 195 and 200 ms.
            let option = |key: &str, value: &str| (format!("{}.{key}", env::WEBGPU), value.to_owned());
            let options = [
                // Without it a Cast of token masks runs on the CPU.
                option("enableInt64", "1"),
                option("storageBufferCacheMode", "simple"),
                option("maxNumPendingDispatches", &model.pending_dispatches.to_string()),
            ];
            builder = builder.with_devices([device], Some(&options)).map_err(text)?;
        } else {
            builder = frugal(builder, &model.bytes)?;
        }
        // The binding panics over sizes that ONNX Runtime infers to be below -1.
        let commit = || builder.commit_from_memory(&model.bytes);
        let session = quietly(|| catch_unwind(AssertUnwindSafe(commit)));
        session.map_err(|_| "one of its inputs or outputs has a negative size")?.map_err(text)
    }

    fn open_error(&self, stage: &str, reason: String) -> RuntimeError {
        if reason.contains("Failed to get a WebGPU adapter") {
            return RuntimeError::NoAdapter { reason };
        }
        RuntimeError::Open { stage: stage.to_owned(), reason }
    }
}

impl Stage<'_> {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn inputs(&self) -> &[TensorInfo] {
        &self.inputs
    }

    pub fn outputs(&self) -> &[TensorInfo] {
        &self.outputs
    }

    /// How many nodes each execution provider runs, after ONNX Runtime's own optimisations.
    pub fn nodes(&self) -> &BTreeMap<String, usize> {
        &self.nodes
    }

    /// How long it took to make the session. Shaders are compiled later, in the first run.
    pub fn load_time(&self) -> Duration {
        self.load_time
    }

    /// Uploads an input that stays on the device for every run, until it is bound again. Whether its sizes go with those of
    /// other inputs shows when all are there: at a run.
    pub fn bind(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        self.bound.remove(name);
        self.check(&BTreeMap::new(), &[(name, tensor.into())])?;
        self.upload(name, tensor.into())?;
        self.bound.insert(name.to_owned(), tensor.shape.clone());
        Ok(())
    }

    /// Gives back what is bound: inputs, and the outputs of the last run.
    pub(super) fn unbind(&mut self) {
        self.binding.clear_inputs();
        self.binding.clear_outputs();
        self.bound.clear();
        self.pinned.clear();
    }

    /// Runs the graph once and reads the named outputs back, in that order. Every input must be bound or given.
    pub fn run(
        &mut self,
        inputs: &[(&str, &HostTensor)],
        outputs: &[&str],
    ) -> Result<Vec<HostTensor>, RuntimeError> {
        let mut tensors = Vec::with_capacity(outputs.len());
        self.run_into(inputs, outputs, &mut |output| {
            tensors.push(output.to_tensor());
            Ok(())
        })?;
        Ok(tensors)
    }

    /// [`Stage::run`] that shows each output to `sink` as it lies in the runtime's memory, so that it can be put into a
    /// file without a copy in between.
    pub(super) fn run_into(
        &mut self,
        inputs: &[(&str, &HostTensor)],
        outputs: &[&str],
        sink: &mut dyn FnMut(Output<'_>) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError> {
        let inputs: Vec<_> = inputs.iter().map(|(name, tensor)| (*name, TensorView::Host(tensor))).collect();
        let placed: Vec<_> = outputs.iter().map(|name| (*name, Placement::Host)).collect();
        self.prepare(&inputs, &placed)?;
        let failed = |reason| RuntimeError::from_run(&self.name, reason);
        let ended = self.session.run_binding(&self.binding);
        let values = ended.map_err(|e| failed(e.message().to_owned()))?;
        for name in outputs {
            let read = values.get(name).ok_or("not returned".to_owned()).and_then(Output::read);
            sink(read.map_err(|reason| failed(format!("output {name}: {reason}")))?)?;
        }
        Ok(())
    }

    /// [`Stage::run`] with inputs that lie anywhere, and outputs that stay on the device if they may and the session is
    /// there. Such an output holds the session when the stage is gone, so only who keeps sessions may ask for one.
    pub(super) fn run_placed(
        &mut self,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError> {
        self.prepare(inputs, outputs)?;
        let failed = |reason| RuntimeError::from_run(&self.name, reason);
        let session = self.session.inner();
        let ended = self.session.run_binding(&self.binding);
        let mut values = ended.map_err(|e| failed(e.message().to_owned()))?;
        let tensor = |(name, _): &(&str, Placement)| {
            let failed = |reason| failed(format!("output {name}: {reason}"));
            let value = values.remove(name).ok_or_else(|| failed("not returned".to_owned()))?;
            let value = value.downcast::<DynTensorValueType>().map_err(|e| failed(e.message().to_owned()))?;
            if value.memory_info().is_cpu_accessible() {
                let value = value.into_dyn();
                return Ok(Tensor::Host(Output::read(&value).map_err(failed)?.to_tensor()));
            }
            Ok(Tensor::Device(DeviceTensor::new(&self.name, value, session.clone())))
        };
        let tensors = outputs.iter().map(tensor).collect();
        drop(values);
        // They belong to the caller now, who decides how long the device holds them.
        self.binding.clear_outputs();
        tensors
    }

    /// Checks and binds what a run needs.
    fn prepare(
        &mut self,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<(), RuntimeError> {
        self.check(&self.bound, inputs)?;
        let given: BTreeSet<&str> = inputs.iter().map(|i| i.0).collect();
        let known = |name: &str| given.contains(name) || self.bound.contains_key(name);
        if let Some(missing) = self.inputs.iter().find(|i| !known(&i.name)) {
            return Err(RuntimeError::InputMissing {
                stage: self.name.clone(),
                tensor: missing.name.clone(),
            });
        }
        for (name, _) in outputs {
            find(&self.name, "output", &self.outputs, name)?;
        }
        for (name, tensor) in inputs {
            self.upload(name, *tensor)?;
        }
        self.binding.clear_outputs();
        for (name, placement) in outputs {
            let memory = match placement {
                Placement::Host => &self.host,
                Placement::Anywhere => self.device.as_ref().unwrap_or(&self.host),
            };
            let bound = self.binding.bind_output_to_device(*name, memory);
            bound.map_err(|e| RuntimeError::from_run(&self.name, e.message().to_owned()))?;
        }
        Ok(())
    }

    /// Binds an input in place of the value that was bound under its name before. WebGPU copies it to the device at once,
    /// if it is not there; the CPU provider reads it where it lies.
    fn upload(&mut self, name: &str, tensor: TensorView<'_>) -> Result<(), RuntimeError> {
        let tensor = match self.device {
            Some(_) => tensor.shared(),
            None => Tensor::Host(tensor.on_host()?.into_owned()),
        };
        let failed = |reason: &str| RuntimeError::from_run(&self.name, format!("input {name}: {reason}"));
        let c_name = CString::new(name).map_err(|e| failed(&e.to_string()))?;
        let on_host;
        let value = match &tensor {
            Tensor::Host(tensor) => {
                on_host = view(tensor).map_err(|e| failed(e.message()))?;
                on_host.ptr()
            }
            Tensor::Device(tensor) => tensor.value().ptr(),
        };
        // Given back first, so that two values are not there at once; but the session that a value on the device is from has
        // to be there until the binding has let go of it.
        let _replaced = self.pinned.remove(name).filter(|tensor| matches!(tensor, Tensor::Device(_)));
        // SAFETY: the pointers are valid during the call, which does not read the value that it replaces. After it, the
        // binding points to the elements or shares the device's value. `pinned` keeps either, behind a reference count or in
        // a map, until another value is bound under the name or the binding is gone. They are only read, as a map demands: ONNX Runtime
        // counts the caller among the users of an input, so that no kernel may write over it
        // (core/framework/allocation_planner.cc).
        let bound = unsafe {
            let status = (ort::api().BindInput)(self.binding.ptr_mut(), c_name.as_ptr(), value);
            ort::Error::result_from_status(status)
        };
        if let Err(e) = bound {
            // The value before is gone and must not be read: nothing is bound now.
            self.binding.clear_inputs();
            self.bound.clear();
            return Err(failed(e.message()));
        }
        self.pinned.insert(name.to_owned(), tensor);
        Ok(())
    }

    /// Compares inputs with the session's: names, element types, ranks, sizes, and that a symbol means
    /// one size in them and in what is bound.
    fn check(
        &self,
        bound: &BTreeMap<String, Vec<usize>>,
        inputs: &[(&str, TensorView<'_>)],
    ) -> Result<(), RuntimeError> {
        let mut symbols: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
        let shapes = bound.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()));
        let given = inputs.iter().map(|(name, tensor)| (*name, tensor.shape()));
        for (name, shape) in shapes.chain(given) {
            let info = find(&self.name, "input", &self.inputs, name)?;
            let bad = |expected: String| RuntimeError::BadTensor {
                stage: self.name.clone(),
                tensor: name.to_owned(),
                expected,
                got: format!("{shape:?}"),
            };
            if shape.len() != info.shape.len() {
                return Err(bad(format!("rank {}", info.shape.len())));
            }
            for (axis, (size, dim)) in shape.iter().zip(&info.shape).enumerate() {
                match dim {
                    Dim::Fixed(expected) if expected != size => {
                        return Err(bad(format!("{expected} on axis {axis}")));
                    }
                    Dim::Symbol(symbol) => {
                        let first = *symbols.entry(symbol).or_insert((*size, name));
                        if first.0 != *size {
                            return Err(bad(format!(
                                "{symbol} = {} on axis {axis} as in {}",
                                first.0, first.1
                            )));
                        }
                    }
                    Dim::Fixed(_) | Dim::Unknown => {}
                }
            }
        }
        for (name, tensor) in inputs {
            let info = find(&self.name, "input", &self.inputs, name)?;
            let got = tensor.dtype();
            let bad = |expected: String, got: String| RuntimeError::BadTensor {
                stage: self.name.clone(),
                tensor: (*name).to_owned(),
                expected,
                got,
            };
            if got != info.dtype {
                return Err(bad(format!("{:?}", info.dtype), format!("{got:?}")));
            }
            if bound.contains_key(*name) {
                return Err(bad("the value that is bound".to_owned(), "another for this run".to_owned()));
            }
        }
        Ok(())
    }
}

/// Options of the CPU provider that keep memory low. Measured on a decoder block of 64 MiB activations: 417 MiB at the
/// peak against 753, in the same time.
fn frugal(builder: SessionBuilder, model: &[u8]) -> Result<SessionBuilder, String> {
    let arena = ort::ep::CPU::default().with_arena_allocator(false).build();
    let builder = builder.with_memory_pattern(false).map_err(text)?;
    let builder = builder.with_execution_providers([arena]).map_err(text)?;
    // Repacked weights are a second copy that is not backed by the file, and products in f32 are no faster for it;
    // those of 4-bit weights take half as long again without.
    const REPACKED: &[u8] = b"MatMulNBits";
    builder.with_prepacking(model.windows(REPACKED.len()).any(|part| part == REPACKED)).map_err(text)
}

fn find<'i>(
    stage: &str,
    role: &'static str,
    known: &'i [TensorInfo],
    name: &str,
) -> Result<&'i TensorInfo, RuntimeError> {
    known.iter().find(|i| i.name == name).ok_or_else(|| RuntimeError::UnknownTensor {
        stage: stage.to_owned(),
        role,
        tensor: name.to_owned(),
        known: known.iter().map(|i| i.name.as_str()).collect::<Vec<_>>().join(", "),
    })
}

fn describe(stage: &str, outlet: &Outlet) -> Result<TensorInfo, RuntimeError> {
    let ValueType::Tensor { ty, shape, dimension_symbols } = outlet.dtype() else {
        let reason = format!("{} is no tensor", outlet.name());
        return Err(RuntimeError::Open { stage: stage.to_owned(), reason });
    };
    let dim = |(size, symbol): (&i64, &String)| match usize::try_from(*size) {
        Ok(size) => Dim::Fixed(size),
        Err(_) if symbol.is_empty() => Dim::Unknown,
        Err(_) => Dim::Symbol(symbol.clone()),
    };
    let shape = shape.iter().zip(dimension_symbols.iter()).map(dim).collect();
    Ok(TensorInfo { name: outlet.name().to_owned(), dtype: dtype_of(*ty), shape })
}

fn text<E: Display>(error: E) -> String {
    error.to_string()
}
