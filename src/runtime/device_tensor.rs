//! Outputs of sessions that stay in the device's memory.

use std::{fmt, sync::Arc};

use ort::{session::SharedSessionInner, value::DynTensor};
use viaduct_export::onnx::DType;

use super::{RuntimeError, read_back::ReadBack, value::dtype_of};
use crate::tensor::HostTensor;

/// A tensor in the device's memory; its shape and type are known without reading it. A clone is the same tensor.
///
/// It holds the session that made it, weights included, because the session's allocator is to free it: a tensor that
/// outlives its session aborts the process when it is touched.
#[derive(Clone)]
pub struct DeviceTensor {
    shape: Vec<usize>,
    dtype: DType,
    /// Who made it, for messages: a stage.
    origin: String,
    resident: Arc<Resident>,
}

/// Fields are dropped in this order.
struct Resident {
    value: DynTensor,
    _session: Arc<SharedSessionInner>,
}

impl DeviceTensor {
    /// An output of the session, which nothing else holds.
    pub(super) fn new(origin: &str, value: DynTensor, session: Arc<SharedSessionInner>) -> DeviceTensor {
        DeviceTensor {
            shape: value.shape().iter().map(|size| *size as usize).collect(),
            dtype: dtype_of(*value.data_type()),
            origin: origin.to_owned(),
            resident: Arc::new(Resident { value, _session: session }),
        }
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Reads the tensor back, once all work on it is done. This takes a session of its own, so whoever knows beforehand
    /// that the host needs a tensor asks for it there ([`super::Placement::Host`]).
    pub fn to_host(&self) -> Result<HostTensor, RuntimeError> {
        let read = ReadBack::open(self.dtype, &self.shape).and_then(|mut session| session.read(self.value()));
        read.map_err(|reason| RuntimeError::from_run(&self.origin, format!("reading back: {reason}")))
    }

    pub(super) fn value(&self) -> &DynTensor {
        &self.resident.value
    }
}

impl fmt::Debug for DeviceTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?} of {} on the device", self.dtype, self.shape, self.origin)
    }
}
