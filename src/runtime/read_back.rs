//! Sessions that do nothing but bring tensors from the device to the host.

use std::fmt::Display;

use ort::{
    session::{IoBinding, Session},
    value::{self, Value, ValueTypeMarker},
};
use viaduct_export::onnx::{Builder, DType, Dim, Model, model_bytes};

use super::{
    RuntimeError,
    device::webgpu_device,
    env,
    value::{Output, host_memory},
};
use crate::tensor::HostTensor;

/// Brings tensors of one type and shape to the host. ONNX Runtime can also copy between devices without a session, but
/// then keeps the device, and all that is cached on it, until the process ends.
pub(super) struct ReadBack {
    binding: IoBinding,
    session: Session,
}

impl ReadBack {
    pub fn open(dtype: DType, shape: &[usize]) -> Result<ReadBack, String> {
        let env = env::env().map_err(text)?;
        let device = webgpu_device(env).ok_or("the plugin offers no device")?;
        let options = [(format!("{}.enableInt64", env::WEBGPU), "1".to_owned())];
        let builder = Session::builder(&env.ort).map_err(text)?;
        let mut builder = builder.with_devices([device], Some(&options)).map_err(text)?;
        let bytes = model_bytes(&identity(dtype, shape)).map_err(text)?;
        let session = builder.commit_from_memory(&bytes).map_err(text)?;
        let mut binding = session.create_binding().map_err(text)?;
        binding.bind_output_to_device("y", &host_memory().map_err(text)?).map_err(text)?;
        Ok(ReadBack { binding, session })
    }

    pub fn read<T: ValueTypeMarker + ?Sized>(&mut self, value: &Value<T>) -> Result<HostTensor, String> {
        self.binding.bind_input("x", value).map_err(text)?;
        let values = self.session.run_binding(&self.binding).map_err(text)?;
        Ok(Output::read(values.get("y").ok_or("not returned")?)?.to_tensor())
    }
}

fn identity(dtype: DType, shape: &[usize]) -> Model {
    let mut graph = Builder::new("read back");
    let dims: Vec<Dim> = shape.iter().map(|size| Dim::Fixed(*size)).collect();
    let x = graph.input("x", dtype, &dims);
    let y = graph.op("Identity", &[x], &[]);
    graph.output(y, "y", &dims);
    graph.finish()
}

/// Waits for the device. Work ends in the order in which it was submitted, so that all is done when a tensor that was
/// submitted last has been read back. While a fence is there, the device and what is cached on it stay.
pub struct Fence {
    read_back: ReadBack,
    value: value::Tensor<f32>,
}

impl Fence {
    pub fn new() -> Result<Fence, RuntimeError> {
        let open = || {
            let value = value::Tensor::from_array((vec![1usize], vec![0f32])).map_err(text)?;
            Ok(Fence { read_back: ReadBack::open(DType::F32, &[1])?, value })
        };
        open().map_err(|reason: String| RuntimeError::from_run("fence", reason))
    }

    /// Until everything that any session was given is done.
    pub fn wait(&mut self) -> Result<(), RuntimeError> {
        let read = self.read_back.read(&self.value);
        read.map(drop).map_err(|reason| RuntimeError::from_run("fence", reason))
    }
}

fn text<E: Display>(error: E) -> String {
    error.to_string()
}
