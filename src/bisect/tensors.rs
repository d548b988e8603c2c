//! Tensors by name in files: a folder of `.npy` and `.safetensors`, or one `.safetensors` file.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use serde::Serialize;
use viaduct_export::{
    onnx::{DType, Tensor},
    weights::{Checkpoint, WeightsError},
};

use crate::{
    atomic_file::{self, Existing, FileError},
    npy::{self, NpyError},
    tensor::{HostTensor, Values},
};

#[derive(Debug, thiserror::Error)]
pub enum TensorsError {
    #[error(transparent)]
    Npy(#[from] NpyError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: no .npy or .safetensors file is in this folder", .0.display())]
    Empty(PathBuf),
    #[error("{}: {tensor} cannot be read: {problem}", path.display())]
    Unreadable { path: PathBuf, tensor: String, problem: String },
}

/// Files that hold tensors, which are read when they are asked for.
pub struct TensorFiles {
    path: PathBuf,
    npy: BTreeMap<String, PathBuf>,
    safetensors: Vec<Checkpoint>,
}

impl TensorFiles {
    pub fn open(path: &Path) -> Result<TensorFiles, TensorsError> {
        let mut files = TensorFiles { path: path.to_owned(), npy: BTreeMap::new(), safetensors: Vec::new() };
        if !path.is_dir() {
            files.add(path)?;
            return Ok(files);
        }
        let io = |source| TensorsError::Io { path: path.to_owned(), source };
        let entries = fs::read_dir(path).map_err(io)?.map(|entry| Ok(entry?.path()));
        let mut paths = entries.collect::<Result<Vec<_>, _>>().map_err(io)?;
        // Of files that share a tensor's name, the same one counts each time.
        paths.sort();
        paths.iter().try_for_each(|path| files.add(path))?;
        match files.npy.is_empty() && files.safetensors.is_empty() {
            true => Err(TensorsError::Empty(path.to_owned())),
            false => Ok(files),
        }
    }

    fn add(&mut self, file: &Path) -> Result<(), TensorsError> {
        let ending = file.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        let stem = file.file_stem().and_then(|stem| stem.to_str());
        match (ending, stem) {
            ("npy", Some(stem)) => drop(self.npy.insert(stem.to_owned(), file.to_owned())),
            // Named by itself, a file is taken for one whatever it is called.
            _ if ending == "safetensors" || file == self.path => {
                self.safetensors.push(Checkpoint::open(file)?);
            }
            _ => {}
        }
        Ok(())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether there is a tensor of that name.
    pub fn has(&self, name: &str) -> bool {
        self.npy.contains_key(name) || self.safetensors.iter().any(|file| file.find(name).is_some())
    }

    /// The shape of the tensor of that name, if there is one. No value is read.
    pub fn shape(&self, name: &str) -> Result<Option<Vec<usize>>, TensorsError> {
        match self.npy.get(name) {
            Some(path) => Ok(Some(npy::read_shape(path)?)),
            None => Ok(self.safetensors.iter().find_map(|file| Some(file.find(name)?.shape.to_vec()))),
        }
    }

    /// The tensor of that name, if there is one.
    pub fn tensor(&self, name: &str) -> Result<Option<HostTensor>, TensorsError> {
        if let Some(path) = self.npy.get(name) {
            return Ok(Some(npy::read(path)?));
        }
        let Some((file, tensor)) = self.safetensors.iter().find_map(|f| Some((f, f.raw(name)?))) else {
            return Ok(None);
        };
        let unreadable = |problem: String| TensorsError::Unreadable {
            path: file.path().to_owned(),
            tensor: name.to_owned(),
            problem,
        };
        let host = host_tensor(&tensor).map_err(unreadable)?;
        Ok(Some(host))
    }
}

/// The type in which the host holds elements of a type; `None` for types that it does not read.
pub fn carried(dtype: DType) -> Option<DType> {
    match dtype {
        DType::F32 | DType::F16 | DType::I64 | DType::U8 => Some(dtype),
        DType::Bool => Some(DType::U8),
        DType::BF16 | DType::F64 => Some(DType::F32),
        DType::I8 | DType::I16 | DType::I32 | DType::U16 | DType::U32 | DType::U64 => Some(DType::I64),
        DType::Other(_) => None,
    }
}

/// A constant's elements on the host, in the type that [`carried`] names.
fn host_tensor(tensor: &Tensor) -> Result<HostTensor, String> {
    let bytes = tensor.bytes.read().map_err(|e| e.to_string())?;
    let ints = |size: usize, signed: bool| -> Values {
        let element = |bytes: &[u8]| {
            let fill = if signed && bytes.last().is_some_and(|top| *top > 127) { 0xff } else { 0 };
            let mut wide = [fill; 8];
            wide[..size].copy_from_slice(bytes);
            i64::from_le_bytes(wide)
        };
        Values::I64(bytes.chunks_exact(size).map(element).collect())
    };
    let values = match tensor.dtype {
        DType::F32 => Values::F32(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
        DType::F64 => {
            Values::F32(bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b) as f32).collect())
        }
        DType::F16 => Values::F16(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b)).collect()),
        DType::BF16 => {
            Values::F32(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect())
        }
        DType::U8 => Values::U8(bytes.to_vec().into()),
        DType::Bool => Values::U8(bytes.iter().map(|b| u8::from(*b != 0)).collect()),
        DType::I8 => ints(1, true),
        DType::I16 => ints(2, true),
        DType::I32 => ints(4, true),
        DType::I64 => ints(8, true),
        DType::U16 => ints(2, false),
        DType::U32 => ints(4, false),
        DType::U64 => ints(8, false),
        DType::Other(_) => return Err("its element type is none that is read".to_owned()),
    };
    let expected = tensor.shape.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim));
    match expected == Some(values.len()) {
        true => Ok(HostTensor { shape: tensor.shape.clone(), values }),
        false => Err(format!("{} elements for the shape {:?}", values.len(), tensor.shape)),
    }
}

/// A tensor to be written, and the type in which it is.
pub struct Written<'t> {
    pub name: &'t str,
    pub tensor: &'t HostTensor,
    pub dtype: DType,
}

/// Writes a `.safetensors` file, whole or not at all.
pub fn write_safetensors(path: &Path, tensors: &[Written<'_>]) -> Result<(), FileError> {
    #[derive(Serialize)]
    struct Entry<'a> {
        dtype: String,
        shape: &'a [usize],
        data_offsets: [usize; 2],
    }
    let (mut header, mut end) = (BTreeMap::new(), 0);
    let bytes: Vec<_> = tensors.iter().map(|t| bytes_of(&t.tensor.values, t.dtype)).collect();
    for (Written { name, tensor, dtype }, bytes) in tensors.iter().zip(&bytes) {
        let start = end;
        end += bytes.len();
        let dtype = dtype.name().to_uppercase();
        header.insert(*name, Entry { dtype, shape: &tensor.shape, data_offsets: [start, end] });
    }
    let failed = |source| FileError::Write { path: path.to_owned(), source };
    let mut header = serde_json::to_vec(&header).map_err(|e| failed(e.into()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    atomic_file::write_with(path, Existing::Keep, |out: &mut dyn Write| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        bytes.iter().try_for_each(|bytes| out.write_all(bytes))
    })
}

/// The values as elements of a type, little-endian.
fn bytes_of(values: &Values, dtype: DType) -> Cow<'_, [u8]> {
    let size = dtype.size().unwrap_or(1);
    match (values, dtype) {
        (Values::F32(values), DType::BF16) => {
            values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect::<Vec<_>>().into()
        }
        (Values::F32(values), DType::F64) => {
            values.iter().flat_map(|x| f64::from(*x).to_le_bytes()).collect::<Vec<_>>().into()
        }
        (Values::I64(values), _) if size < 8 => {
            values.iter().flat_map(|x| x.to_le_bytes().into_iter().take(size)).collect::<Vec<_>>().into()
        }
        _ => Cow::Borrowed(values.as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        let float = HostTensor::f32(&[2], vec![1.5, -2.0]);
        let int = HostTensor::i64(&[3], vec![-1, 0, 70_000]);
        let truth = HostTensor::new(&[1, 2], Values::U8(vec![0, 1].into()));
        let written = [
            ("f32", &float, DType::F32),
            ("bf16", &float, DType::BF16),
            ("f64", &float, DType::F64),
            ("i64", &int, DType::I64),
            ("i32", &int, DType::I32),
            ("bool", &truth, DType::Bool),
        ];
        let tensors = written.map(|(name, tensor, dtype)| Written { name, tensor, dtype });
        write_safetensors(&path, &tensors).unwrap();
        npy::write(&folder.path().join("n.npy"), Existing::Keep, &int).unwrap();
        for place in [path.as_path(), folder.path()] {
            let files = TensorFiles::open(place).unwrap();
            for (name, tensor, _) in &written {
                assert_eq!(files.tensor(name).unwrap().as_ref(), Some(*tensor), "{name}");
            }
            assert_eq!(files.has("n"), place == folder.path());
            assert_eq!(files.tensor("none").unwrap(), None);
        }
    }

    #[test]
    fn a_folder_of_nothing_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(TensorFiles::open(folder.path()), Err(TensorsError::Empty(_))));
    }
}
