//! Values of ONNX Runtime on the host: tensors on their way in and out of a session.

use std::fmt::Debug;

use half::f16;
use ort::{
    memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType},
    value::{DynValue, DynValueRef, PrimitiveTensorElementType, TensorElementType, TensorRef},
};
use viaduct_export::onnx::DType;

use crate::tensor::{HostTensor, Values, as_bytes};

/// Where outputs go that are read back.
pub(super) fn host_memory() -> ort::Result<MemoryInfo<'static>> {
    MemoryInfo::new(AllocationDevice::CPU, 0, AllocatorType::Device, MemoryType::CPUOutput)
}

/// Where outputs stay that are not.
pub(super) fn device_memory() -> ort::Result<MemoryInfo<'static>> {
    MemoryInfo::new(AllocationDevice::WEBGPU_BUFFER, 0, AllocatorType::Device, MemoryType::Default)
}

/// A tensor as a value of the runtime, without a copy. `IoBinding::bind_input` would copy it, in a session of its own.
pub(super) fn view(tensor: &HostTensor) -> ort::Result<DynValueRef<'_>> {
    fn typed<'t, T>(shape: &[usize], values: &'t [T]) -> ort::Result<DynValueRef<'t>>
    where
        T: PrimitiveTensorElementType + Clone + Debug + 'static,
    {
        Ok(TensorRef::from_array_view((shape.to_vec(), values))?.into_dyn())
    }
    match &tensor.values {
        Values::F32(v) => typed(&tensor.shape, v),
        Values::F16(v) => typed(&tensor.shape, v),
        Values::I64(v) => typed(&tensor.shape, v),
        Values::U8(v) => typed(&tensor.shape, v),
    }
}

/// An output of a run in the runtime's memory.
pub(super) struct Output<'o> {
    pub shape: Vec<usize>,
    pub values: OutputValues<'o>,
}

pub(super) enum OutputValues<'o> {
    F32(&'o [f32]),
    F16(&'o [f16]),
    I64(&'o [i64]),
    U8(&'o [u8]),
}

impl<'o> Output<'o> {
    /// Looks at a value on the host.
    pub fn read(value: &'o DynValue) -> Result<Output<'o>, String> {
        fn part<T: PrimitiveTensorElementType>(value: &DynValue) -> ort::Result<(Vec<usize>, &[T])> {
            let (shape, values) = value.try_extract_tensor::<T>()?;
            Ok((shape.iter().map(|d| *d as usize).collect(), values))
        }
        let (shape, values) = match value.dtype().tensor_type() {
            Some(TensorElementType::Float32) => part(value).map(|(s, v)| (s, OutputValues::F32(v))),
            Some(TensorElementType::Float16) => part(value).map(|(s, v)| (s, OutputValues::F16(v))),
            Some(TensorElementType::Int64) => part(value).map(|(s, v)| (s, OutputValues::I64(v))),
            Some(TensorElementType::Uint8) => part(value).map(|(s, v)| (s, OutputValues::U8(v))),
            other => return Err(format!("its type {other:?} cannot be read back")),
        }
        .map_err(|e: ort::Error| e.message().to_owned())?;
        Ok(Output { shape, values })
    }

    /// A copy.
    pub fn to_tensor(&self) -> HostTensor {
        let values = match self.values {
            OutputValues::F32(v) => Values::F32(v.to_vec().into()),
            OutputValues::F16(v) => Values::F16(v.to_vec().into()),
            OutputValues::I64(v) => Values::I64(v.to_vec().into()),
            OutputValues::U8(v) => Values::U8(v.to_vec().into()),
        };
        HostTensor { shape: self.shape.clone(), values }
    }
}

impl OutputValues<'_> {
    pub fn dtype(&self) -> DType {
        match self {
            OutputValues::F32(_) => DType::F32,
            OutputValues::F16(_) => DType::F16,
            OutputValues::I64(_) => DType::I64,
            OutputValues::U8(_) => DType::U8,
        }
    }

    pub fn as_bytes(&self) -> &[u8] {
        match self {
            OutputValues::F32(v) => as_bytes(v),
            OutputValues::F16(v) => as_bytes(v),
            OutputValues::I64(v) => as_bytes(v),
            OutputValues::U8(v) => as_bytes(v),
        }
    }
}

/// The runtime's element type.
pub(super) fn dtype_of(ty: TensorElementType) -> DType {
    // Numbers of `TensorProto.DataType`.
    DType::from_onnx(match ty {
        TensorElementType::Float32 => 1,
        TensorElementType::Uint8 => 2,
        TensorElementType::Int8 => 3,
        TensorElementType::Int32 => 6,
        TensorElementType::Int64 => 7,
        TensorElementType::Bool => 9,
        TensorElementType::Float16 => 10,
        _ => 0,
    })
}
