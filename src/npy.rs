//! NumPy's `.npy` files: the format of oracle tensors and dumps.
//!
//! Source: NEP 1 and `numpy.lib.format`. Reading is strict, since a wrong oracle is worse than none: the header's
//! three keys and nothing else, and a file exactly as long as its header says, checked before memory is taken.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use half::f16;

use viaduct_export::files::open_regular;

use crate::atomic_file::{self, Existing, FileError};
use crate::tensor::{HostTensor, Values};

mod header;

use header::Header;
pub use header::HeaderError;

/// The largest file that is read: four times the largest boundary of a picture of 1024x1024.
pub const MAX_FILE_BYTES: u64 = 2 << 30;

/// Why a file is not a tensor we can take.
#[derive(Debug, thiserror::Error)]
pub enum NpyError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    Format { path: PathBuf, source: FormatError },
}

/// What is wrong with the bytes of a `.npy` file.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum FormatError {
    #[error("not a .npy file")]
    Magic,
    #[error("version {0}.{1} of the .npy format is unknown")]
    Version(u8, u8),
    #[error("the header ends at byte {end}, the file at byte {length}")]
    HeaderLength { end: u64, length: u64 },
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("dtype {0:?} is not one of little-endian f4 f8 f2 i8 i4 u1 b1")]
    Dtype(String),
    #[error("shape {0:?} has more elements than can be counted")]
    Overflow(Vec<usize>),
    #[error("{shape:?} of {dtype} needs {expected} bytes after the header, the file has {found}")]
    Size { shape: Vec<usize>, dtype: String, expected: u64, found: u64 },
    #[error("a boolean has the value {0}")]
    Boolean(u8),
}

/// Reads a tensor. `f8` becomes f32 (rounded), `i4` i64, `b1` u8; Fortran order becomes row-major.
pub fn read(path: &Path) -> Result<HostTensor, NpyError> {
    let in_file = |source| NpyError::Format { path: path.to_path_buf(), source };
    let io = |source| NpyError::Io { path: path.to_path_buf(), source };
    let Opened { file, mut prefix, layout } = open(path)?;
    let mut data = prefix.split_off(layout.data_at);
    let rest = layout.data_bytes - data.len();
    data.try_reserve_exact(rest).map_err(|e| io(io::Error::new(io::ErrorKind::OutOfMemory, e)))?;
    file.take(rest as u64).read_to_end(&mut data).map_err(io)?;
    layout.decode(&data).map_err(in_file)
}

/// Reads a tensor's shape and none of its values. What [`read`] refuses for its header or its length is refused here.
pub fn read_shape(path: &Path) -> Result<Vec<usize>, NpyError> {
    Ok(open(path)?.layout.header.shape)
}

/// A file whose header is read.
struct Opened {
    file: File,
    /// The file's first bytes; `file` goes on after them.
    prefix: Vec<u8>,
    layout: Layout,
}

fn open(path: &Path) -> Result<Opened, NpyError> {
    let io = |source| NpyError::Io { path: path.to_path_buf(), source };
    let (mut file, length) = open_regular(path).map_err(io)?;
    if length > MAX_FILE_BYTES {
        let message = format!("{length} bytes, more than the {MAX_FILE_BYTES} that are read");
        return Err(io(io::Error::new(io::ErrorKind::FileTooLarge, message)));
    }
    let mut prefix = vec![0; usize::try_from(length).unwrap_or(usize::MAX).min(header::MAX_BYTES)];
    file.read_exact(&mut prefix).map_err(io)?;
    let layout = Layout::parse(&prefix, length)
        .map_err(|source| NpyError::Format { path: path.to_path_buf(), source })?;
    Ok(Opened { file, prefix, layout })
}

/// Reads a tensor from the bytes of a `.npy` file; see [`read`].
pub fn from_bytes(bytes: &[u8]) -> Result<HostTensor, FormatError> {
    let layout = Layout::parse(bytes, bytes.len() as u64)?;
    layout.decode(&bytes[layout.data_at..])
}

/// Writes a tensor as version 1, row-major, little-endian, with the header padded to 64 bytes as NumPy does.
pub fn write(path: &Path, existing: Existing, tensor: &HostTensor) -> Result<(), FileError> {
    atomic_file::write_with(path, existing, |out| write_to(out, tensor))
}

/// The bytes of a `.npy` file.
pub fn to_bytes(tensor: &HostTensor) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_to(&mut bytes, tensor).expect("memory takes every byte");
    bytes
}

/// Writes the bytes of a `.npy` file: the header, and the values as they lie in memory.
pub fn write_to(out: &mut dyn Write, tensor: &HostTensor) -> io::Result<()> {
    let descr = match &tensor.values {
        Values::F32(_) => "<f4",
        Values::F16(_) => "<f2",
        Values::I64(_) => "<i8",
        Values::U8(_) => "|u1",
    };
    out.write_all(&header::to_bytes(descr, &tensor.shape))?;
    out.write_all(tensor.values.as_bytes())
}

/// A checked header: the file holds exactly `data_bytes` from `data_at` on.
struct Layout {
    header: Header,
    dtype: Dtype,
    data_at: usize,
    data_bytes: usize,
}

impl Layout {
    /// `prefix` has the file's first bytes, at least as many as a header may have or the whole file.
    fn parse(prefix: &[u8], length: u64) -> Result<Layout, FormatError> {
        let (text, data_at) = header::split(prefix, length)?;
        let header = Header::parse(text)?;
        let dtype = Dtype::parse(&header.descr)?;
        let overflow = || FormatError::Overflow(header.shape.clone());
        let product = |n: usize, dim: &usize| n.checked_mul(*dim);
        let elements = header.shape.iter().try_fold(1usize, product).ok_or_else(overflow)?;
        let data_bytes = elements.checked_mul(dtype.size()).ok_or_else(overflow)?;
        let found = length - data_at as u64;
        if data_bytes as u64 != found {
            return Err(size_error(&header, data_bytes, found));
        }
        Ok(Layout { header, dtype, data_at, data_bytes })
    }

    fn decode(&self, data: &[u8]) -> Result<HostTensor, FormatError> {
        let shape = &self.header.shape;
        if data.len() != self.data_bytes {
            // The file shrank after its length was taken.
            return Err(size_error(&self.header, self.data_bytes, data.len() as u64));
        }
        let fortran = self.header.fortran_order;
        let values = match self.dtype {
            Dtype::F32 => Values::F32(elements(data, shape, fortran, f32::from_le_bytes).into()),
            Dtype::F64 => {
                Values::F32(elements(data, shape, fortran, |b| f64::from_le_bytes(b) as f32).into())
            }
            Dtype::F16 => Values::F16(elements(data, shape, fortran, f16::from_le_bytes).into()),
            Dtype::I64 => Values::I64(elements(data, shape, fortran, i64::from_le_bytes).into()),
            Dtype::I32 => {
                Values::I64(elements(data, shape, fortran, |b| i32::from_le_bytes(b).into()).into())
            }
            Dtype::U8 => Values::U8(elements(data, shape, fortran, |[b]| b).into()),
            Dtype::Bool => match data.iter().find(|b| **b > 1) {
                Some(b) => return Err(FormatError::Boolean(*b)),
                None => Values::U8(elements(data, shape, fortran, |[b]| b).into()),
            },
        };
        Ok(HostTensor::new(shape, values))
    }
}

fn size_error(header: &Header, expected: usize, found: u64) -> FormatError {
    let (shape, dtype) = (header.shape.clone(), header.descr.clone());
    FormatError::Size { shape, dtype, expected: expected as u64, found }
}

#[derive(Clone, Copy)]
enum Dtype {
    F32,
    F64,
    F16,
    I64,
    I32,
    U8,
    Bool,
}

impl Dtype {
    fn parse(descr: &str) -> Result<Dtype, FormatError> {
        Ok(match descr {
            "<f4" => Dtype::F32,
            "<f8" => Dtype::F64,
            "<f2" => Dtype::F16,
            "<i8" => Dtype::I64,
            "<i4" => Dtype::I32,
            "|u1" => Dtype::U8,
            "|b1" => Dtype::Bool,
            _ => return Err(FormatError::Dtype(descr.to_string())),
        })
    }

    fn size(self) -> usize {
        match self {
            Dtype::F64 | Dtype::I64 => 8,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F16 => 2,
            Dtype::U8 | Dtype::Bool => 1,
        }
    }
}

/// The elements of `data` in row-major order; `data` is whole elements.
fn elements<T: Copy, const N: usize>(
    data: &[u8],
    shape: &[usize],
    fortran: bool,
    decode: impl Fn([u8; N]) -> T,
) -> Vec<T> {
    let (chunks, _) = data.as_chunks::<N>();
    if !fortran {
        return chunks.iter().map(|c| decode(*c)).collect();
    }
    // Count up the row-major index digit by digit, and carry the Fortran offset along.
    let mut index = vec![0; shape.len()];
    let mut offset = 0;
    let mut values = Vec::with_capacity(chunks.len());
    for _ in chunks {
        values.push(decode(chunks[offset]));
        let mut stride = chunks.len();
        for (i, dim) in index.iter_mut().zip(shape).rev() {
            stride /= dim;
            *i += 1;
            offset += stride;
            if *i < *dim {
                break;
            }
            offset -= stride * dim;
            *i = 0;
        }
    }
    values
}

#[cfg(test)]
mod tests;
