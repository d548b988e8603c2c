//! Tensors whose bytes may not be in memory: inline, a range of a mapped file, computed when they are written, or absent.

use std::{any::Any, borrow::Cow, fmt, ops::Range, path::Path, sync::Arc};

use bytes::Bytes as SharedBytes;
use half::{bf16, f16};

use super::mapped_file::MappedFile;

/// Element types of ONNX tensors, with the numbers of `TensorProto.DataType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    F16,
    BF16,
    F64,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    Bool,
    /// A type that the project only carries along (strings, 4-bit and 8-bit floats, complex numbers).
    Other(i32),
}

/// `DType`, its number in `TensorProto.DataType`, its size in bytes.
const DTYPES: &[(DType, i32, usize)] = &[
    (DType::F32, 1, 4),
    (DType::U8, 2, 1),
    (DType::I8, 3, 1),
    (DType::U16, 4, 2),
    (DType::I16, 5, 2),
    (DType::I32, 6, 4),
    (DType::I64, 7, 8),
    (DType::Bool, 9, 1),
    (DType::F16, 10, 2),
    (DType::F64, 11, 8),
    (DType::U32, 12, 4),
    (DType::U64, 13, 8),
    (DType::BF16, 16, 2),
];

impl DType {
    pub fn from_onnx(number: i32) -> DType {
        DTYPES.iter().find(|d| d.1 == number).map_or(DType::Other(number), |d| d.0)
    }

    pub fn to_onnx(self) -> i32 {
        match self {
            DType::Other(number) => number,
            known => DTYPES.iter().find(|d| d.0 == known).map_or(0, |d| d.1),
        }
    }

    /// As bundles and reports spell it: `f32`, `i64`.
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// Bytes per element; `None` for types that are only carried along.
    pub fn size(self) -> Option<usize> {
        DTYPES.iter().find(|d| d.0 == self).map(|d| d.2)
    }

    /// Whether it is a float type whose elements the project reads.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16 | DType::F64)
    }

    /// Whether it is an integer type of whole bytes, or the type of truth values.
    pub fn is_integer(self) -> bool {
        !self.is_float() && !matches!(self, DType::Other(_))
    }

    /// The type of string tensors; see [`Tensor`] for their bytes.
    pub const STRING: DType = DType::Other(8);

    /// Bits per element in packed form; `None` for strings and for numbers that ONNX does not define.
    pub fn bits(self) -> Option<usize> {
        match self {
            DType::Other(14) => Some(64),          // complex64
            DType::Other(15) => Some(128),         // complex128
            DType::Other(17..=20 | 24) => Some(8), // float8
            DType::Other(21..=23) => Some(4),      // uint4, int4, float4
            DType::Other(25 | 26) => Some(2),      // uint2, int2
            other => other.size().map(|size| 8 * size),
        }
    }

    /// Bytes of a tensor of this type and shape. `None` for strings, undefined types, and sizes that do not fit.
    pub fn byte_len(self, shape: &[usize]) -> Option<usize> {
        let elements = shape.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim))?;
        Some(elements.checked_mul(self.bits()?)?.div_ceil(8))
    }
}

/// Why the bytes of a computed tensor could not be made.
pub type ComputeError = Box<dyn std::error::Error + Send + Sync>;

/// Tensors that come out of one computation over checkpoint weights, for example the packed codes, scales and
/// zero points of one quantised matrix. The writer asks for them when it reaches the first and drops them after the
/// last, so that a model of any size is written in the memory of its largest matrix.
pub trait Compute: Send + Sync {
    /// The bytes of every part, little-endian, each of exactly the length its [`Bytes::Computed`] states.
    fn compute(&self) -> Result<Vec<Vec<u8>>, ComputeError>;

    /// The tensors whose bytes the computation reads, in that order.
    fn operands(&self) -> Vec<&Tensor> {
        Vec::new()
    }

    /// Gives back the mapped pages that the computation has read, so that a pass over a checkpoint that is larger than
    /// memory stays small.
    fn release(&self) {
        self.operands().into_iter().for_each(|operand| operand.bytes.release());
    }

    /// The computation itself, for whoever looks for one kind of them.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }

    /// Values that the last computation rounded because they are too small for their new type.
    fn underflows(&self) -> u64 {
        0
    }

    /// Bytes that the computation reads, where it is known to be cheap otherwise.
    fn reads(&self) -> Option<usize> {
        None
    }
}

/// Where the little-endian bytes of a tensor are.
#[derive(Clone)]
pub enum Bytes {
    /// In memory, or a short slice of a mapped model file.
    Inline(SharedBytes),
    /// External data, or a long slice of a mapped model file.
    Mapped {
        file: Arc<MappedFile>,
        range: Range<usize>,
    },
    Computed {
        source: Arc<dyn Compute>,
        part: usize,
        len: usize,
    },
    /// External data in a file that does not exist, of the length that type and shape ask for; reading it is an
    /// error. Only [`super::read_graph`] makes such tensors.
    Absent {
        file: Arc<Path>,
        len: usize,
    },
}

impl Bytes {
    pub fn len(&self) -> usize {
        match self {
            Bytes::Inline(bytes) => bytes.len(),
            Bytes::Mapped { range, .. } => range.len(),
            Bytes::Computed { len, .. } | Bytes::Absent { len, .. } => *len,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that have to be read to know these; `None` where that may be many, or they are not there.
    pub fn reads(&self) -> Option<usize> {
        match self {
            Bytes::Inline(bytes) => Some(bytes.len()),
            Bytes::Mapped { file, range } => file.mapped().map(|_| range.len()),
            Bytes::Computed { source, .. } => source.reads(),
            Bytes::Absent { .. } => None,
        }
    }

    /// Values that were rounded when the bytes were last computed, because they are too small for their type.
    pub fn underflows(&self) -> u64 {
        match self {
            Bytes::Computed { source, .. } => source.underflows(),
            _ => 0,
        }
    }

    /// Gives mapped pages back to the system; they are read again when they are next touched.
    pub fn release(&self) {
        match self {
            Bytes::Inline(_) | Bytes::Absent { .. } => {}
            Bytes::Mapped { file, range } => file.release(range.clone()),
            Bytes::Computed { source, .. } => source.release(),
        }
    }

    /// The files that the bytes lie in, or are computed from.
    pub fn files(&self) -> Vec<&MappedFile> {
        match self {
            Bytes::Inline(_) | Bytes::Absent { .. } => Vec::new(),
            Bytes::Mapped { file, .. } => vec![&**file],
            Bytes::Computed { source, .. } => {
                source.operands().into_iter().flat_map(|operand| operand.bytes.files()).collect()
            }
        }
    }

    /// The bytes, if they are in memory or in a file that is mapped already.
    pub fn in_memory(&self) -> Option<&[u8]> {
        match self {
            Bytes::Inline(bytes) => Some(bytes),
            Bytes::Mapped { file, range } => file.mapped()?.get(range.clone()),
            Bytes::Computed { .. } | Bytes::Absent { .. } => None,
        }
    }

    /// The bytes, borrowed where they exist and computed where they do not. Waits for a file that is still on its way.
    pub fn read(&self) -> Result<Cow<'_, [u8]>, ComputeError> {
        match self {
            Bytes::Inline(bytes) => Ok(Cow::Borrowed(bytes)),
            Bytes::Mapped { file, range } => {
                let beyond = || format!("{range:?} lies beyond the end of {}", file.path.display());
                Ok(Cow::Borrowed(file.bytes()?.get(range.clone()).ok_or_else(beyond)?))
            }
            Bytes::Computed { source, part, .. } => {
                let mut parts = source.compute()?;
                if *part >= parts.len() {
                    return Err(format!("part {part} of {} computed parts", parts.len()).into());
                }
                Ok(Cow::Owned(parts.swap_remove(*part)))
            }
            Bytes::Absent { file, .. } => Err(format!("its data file {} is absent", file.display()).into()),
        }
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bytes::Inline(bytes) => write!(f, "inline {} B", bytes.len()),
            Bytes::Mapped { file, range } => write!(f, "{}[{range:?}]", file.path.display()),
            Bytes::Computed { part, len, .. } => write!(f, "computed part {part}, {len} B"),
            Bytes::Absent { file, len } => write!(f, "{len} B of absent {}", file.display()),
        }
    }
}

/// A constant: element type, dimensions, and bytes that may still be lazy.
///
/// Bytes are little-endian and in the packed form of ONNX `raw_data`. Strings have no such form; theirs are the
/// `string_data` fields of a `TensorProto`, encoded.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub bytes: Bytes,
}

impl Tensor {
    pub fn inline(dtype: DType, shape: &[usize], bytes: Vec<u8>) -> Tensor {
        Tensor { dtype, shape: shape.to_vec(), bytes: Bytes::Inline(bytes.into()) }
    }

    pub fn from_f32(shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::inline(DType::F32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    pub fn from_f16(shape: &[usize], values: &[f32]) -> Tensor {
        let bytes = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
        Tensor::inline(DType::F16, shape, bytes)
    }

    pub fn from_i64(shape: &[usize], values: &[i64]) -> Tensor {
        Tensor::inline(DType::I64, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// Elements; the product of the dimensions.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The values of a floating-point tensor (f32, f16, bf16) widened to f32; `None` for other types.
    pub fn to_f32(&self) -> Result<Option<Vec<f32>>, ComputeError> {
        Ok(widen(self.dtype, &self.bytes.read()?))
    }
}

/// Little-endian f32, f16 or bf16 bytes as f32; `None` for other types. A trailing partial element is dropped.
pub fn widen(dtype: DType, bytes: &[u8]) -> Option<Vec<f32>> {
    let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    Some(match dtype {
        DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        DType::F16 => pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        DType::BF16 => pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        _ => return None,
    })
}
