//! Tensors on the host, as they travel between files, the pipeline and the runtime.

mod buffer;
mod sums;

use std::{ops::Range, path::Path};

use half::f16;
use viaduct_export::onnx::DType;

pub use self::{
    buffer::{Buffer, Element, TensorFile, as_bytes},
    sums::Sums,
};

/// The values of a [`HostTensor`].
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    F32(Buffer<f32>),
    F16(Buffer<f16>),
    I64(Buffer<i64>),
    U8(Buffer<u8>),
}

impl Values {
    pub fn len(&self) -> usize {
        match self {
            Values::F32(v) => v.len(),
            Values::F16(v) => v.len(),
            Values::I64(v) => v.len(),
            Values::U8(v) => v.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn dtype(&self) -> DType {
        match self {
            Values::F32(_) => DType::F32,
            Values::F16(_) => DType::F16,
            Values::I64(_) => DType::I64,
            Values::U8(_) => DType::U8,
        }
    }

    /// The values as they lie in memory: little-endian on every machine that this program is for.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Values::F32(v) => v.as_bytes(),
            Values::F16(v) => v.as_bytes(),
            Values::I64(v) => v.as_bytes(),
            Values::U8(v) => v.as_bytes(),
        }
    }

    /// One value as f32; an integer is converted. Panics beyond the end.
    pub fn f32_at(&self, index: usize) -> f32 {
        match self {
            Values::F32(v) => v[index],
            Values::F16(v) => v[index].to_f32(),
            Values::I64(v) => v[index] as f32,
            Values::U8(v) => f32::from(v[index]),
        }
    }

    /// A copy of some of the values. Panics beyond the end.
    pub fn slice(&self, range: Range<usize>) -> Values {
        match self {
            Values::F32(v) => Values::F32(v[range].to_vec().into()),
            Values::F16(v) => Values::F16(v[range].to_vec().into()),
            Values::I64(v) => Values::I64(v[range].to_vec().into()),
            Values::U8(v) => Values::U8(v[range].to_vec().into()),
        }
    }

    /// The file that holds exactly these values, if one does.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Values::F32(v) => v.file(),
            Values::F16(v) => v.file(),
            Values::I64(v) => v.file(),
            Values::U8(v) => v.file(),
        }
    }

    /// The values of a file; `None` if its length is not that of `count` elements, or for other types.
    pub fn mapped(file: TensorFile, dtype: DType, count: usize) -> Option<Values> {
        match dtype {
            DType::F32 => Buffer::mapped(file, count).map(Values::F32),
            DType::F16 => Buffer::mapped(file, count).map(Values::F16),
            DType::I64 => Buffer::mapped(file, count).map(Values::I64),
            DType::U8 => Buffer::mapped(file, count).map(Values::U8),
            _ => None,
        }
    }
}

/// A dense row-major tensor; `values.len()` is the product of `shape`.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    pub shape: Vec<usize>,
    pub values: Values,
}

impl HostTensor {
    /// Panics if the number of values is not the product of `shape`: the caller has computed both.
    pub fn new(shape: &[usize], values: Values) -> HostTensor {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "shape {shape:?} against its values");
        HostTensor { shape: shape.to_vec(), values }
    }

    pub fn f32(shape: &[usize], values: Vec<f32>) -> HostTensor {
        HostTensor::new(shape, Values::F32(values.into()))
    }

    pub fn i64(shape: &[usize], values: Vec<i64>) -> HostTensor {
        HostTensor::new(shape, Values::I64(values.into()))
    }

    /// The values as f32; integers are converted.
    pub fn to_f32(&self) -> Vec<f32> {
        match &self.values {
            Values::F32(v) => v.to_vec(),
            Values::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
            Values::I64(v) => v.iter().map(|x| *x as f32).collect(),
            Values::U8(v) => v.iter().map(|x| f32::from(*x)).collect(),
        }
    }

    /// The same values under another shape of the same size. Panics if the size differs.
    pub fn reshaped(mut self, shape: &[usize]) -> HostTensor {
        assert_eq!(shape.iter().product::<usize>(), self.values.len(), "{:?} as {shape:?}", self.shape);
        self.shape = shape.to_vec();
        self
    }

    /// Entry `index` along the first axis, without that axis. Panics if there is no such entry.
    pub fn row(&self, index: usize) -> HostTensor {
        let shape = &self.shape[1..];
        let size: usize = shape.iter().product();
        HostTensor::new(shape, self.values.slice(index * size..(index + 1) * size))
    }

    /// Every value twice in a row, as f32: the last axis doubles.
    pub fn each_twice(&self) -> HostTensor {
        let mut shape = self.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last *= 2;
        }
        HostTensor::f32(&shape, self.to_f32().into_iter().flat_map(|x| [x, x]).collect())
    }

    /// The tensor in another element type, by the name that bundles give it; none where it has that type already, or none
    /// of `f32`, `f16` and `i64` becomes another.
    pub fn cast(&self, dtype: &str) -> Option<HostTensor> {
        let values = match (dtype, &self.values) {
            ("f32", Values::F16(_) | Values::I64(_)) => Values::F32(self.to_f32().into()),
            ("f16", Values::F32(v)) => {
                Values::F16(v.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>().into())
            }
            ("f16", Values::I64(v)) => {
                Values::F16(v.iter().map(|x| f16::from_f32(*x as f32)).collect::<Vec<_>>().into())
            }
            _ => return None,
        };
        Some(HostTensor { shape: self.shape.clone(), values })
    }

    /// The tensor in another of the types that the host holds, by way of f32; itself if it has that type already.
    pub fn as_type(&self, dtype: DType) -> HostTensor {
        let floats = || self.to_f32().into_iter();
        let values = match dtype {
            own if own == self.values.dtype() => self.values.clone(),
            DType::F32 => Values::F32(floats().collect()),
            DType::F16 => Values::F16(floats().map(f16::from_f32).collect()),
            DType::I64 => Values::I64(floats().map(|x| x as i64).collect()),
            DType::U8 => Values::U8(floats().map(|x| x as u8).collect()),
            _ => self.values.clone(),
        };
        HostTensor { shape: self.shape.clone(), values }
    }

    /// The tensor with its values as f32, without a copy if they are.
    pub fn widened(self) -> HostTensor {
        match self.values {
            Values::F32(_) => self,
            _ => HostTensor::f32(&self.shape, self.to_f32()),
        }
    }
}
