//! Tensors as files of one folder, written by one process and mapped by another.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use viaduct_export::onnx::DType;

use super::protocol::TensorRef;
use crate::{
    runtime::RuntimeError,
    tensor::{HostTensor, TensorFile, Values},
};

/// One side's view of the folder.
pub(super) struct Exchange {
    folder: PathBuf,
    /// Begins the names of this side's files: two sides never write one name.
    side: String,
    written: u64,
}

impl Exchange {
    pub fn new(folder: &Path, side: &str) -> Exchange {
        Exchange { folder: folder.to_owned(), side: side.to_owned(), written: 0 }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A tensor's file. One that lies in a file of this folder already is named, not written again; what is written is
    /// this side's to remove, which `mine` remembers.
    pub fn put(&mut self, tensor: &HostTensor, mine: &mut Vec<PathBuf>) -> Result<TensorRef, RuntimeError> {
        let own = tensor.values.file().filter(|file| file.parent() == Some(&self.folder));
        if let Some(name) = own.and_then(|file| file.file_name()?.to_str()) {
            let dtype = tensor.values.dtype().to_onnx();
            return Ok(TensorRef { file: name.to_owned(), dtype, shape: tensor.shape.clone() });
        }
        let reference = self.write(tensor.values.dtype(), &tensor.shape, tensor.values.as_bytes())?;
        mine.push(self.folder.join(&reference.file));
        Ok(reference)
    }

    /// Writes elements to a new file. A file that cannot be written whole is removed.
    pub fn write(&mut self, dtype: DType, shape: &[usize], bytes: &[u8]) -> Result<TensorRef, RuntimeError> {
        let name = format!("{}{}", self.side, self.written);
        self.written += 1;
        let path = self.folder.join(&name);
        let written = File::create_new(&path).and_then(|mut file| file.write_all(bytes));
        written.map_err(|source| {
            let _ = fs::remove_file(&path);
            RuntimeError::Exchange { path: path.clone(), source }
        })?;
        Ok(TensorRef { file: name, dtype: dtype.to_onnx(), shape: shape.to_vec() })
    }

    /// Maps the other side's file, which goes when the last tensor in it does.
    pub fn take(&self, reference: &TensorRef) -> Result<HostTensor, RuntimeError> {
        let path = self.path(reference)?;
        let file = TensorFile::adopt(&path)
            .map_err(|source| RuntimeError::Exchange { path: path.clone(), source })?;
        tensor(file, reference).ok_or_else(|| invalid(&path))
    }

    /// Maps a file that stays the other side's.
    pub fn borrow(&self, reference: &TensorRef) -> Result<HostTensor, RuntimeError> {
        let path = self.path(reference)?;
        let file = TensorFile::borrow(&path)
            .map_err(|source| RuntimeError::Exchange { path: path.clone(), source })?;
        tensor(file, reference).ok_or_else(|| invalid(&path))
    }

    /// Names with folders in them would leave this one.
    fn path(&self, reference: &TensorRef) -> Result<PathBuf, RuntimeError> {
        let path = self.folder.join(&reference.file);
        match Path::new(&reference.file).file_name() {
            Some(name) if name == reference.file.as_str() => Ok(path),
            _ => Err(invalid(&path)),
        }
    }
}

fn tensor(file: TensorFile, reference: &TensorRef) -> Option<HostTensor> {
    let count = reference.shape.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim))?;
    let values = Values::mapped(file, DType::from_onnx(reference.dtype), count)?;
    Some(HostTensor::new(&reference.shape, values))
}

fn invalid(path: &Path) -> RuntimeError {
    let source = io::Error::new(io::ErrorKind::InvalidData, "not the tensor that it should be");
    RuntimeError::Exchange { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_passes_and_its_file_goes_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let (mut here, mut there) = (Exchange::new(folder.path(), "p"), Exchange::new(folder.path(), "c"));
        let tensor = HostTensor::f32(&[2, 2], vec![1.0, 2.0, 3.0, 4.0]);
        let mut mine = Vec::new();
        let sent = here.put(&tensor, &mut mine).unwrap();
        assert_eq!(there.borrow(&sent).unwrap(), tensor);
        assert!(mine[0].exists());
        let back = there.write(DType::F32, &[4], tensor.values.as_bytes()).unwrap();
        let taken = here.take(&back).unwrap();
        // What lies in the folder is named, and not written again.
        let mut none = Vec::new();
        assert_eq!(here.put(&taken, &mut none).unwrap().file, back.file);
        assert!(none.is_empty());
        drop(taken);
        assert!(!folder.path().join(&back.file).exists());
    }

    #[test]
    fn what_the_other_side_says_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let exchange = Exchange::new(folder.path(), "p");
        fs::write(folder.path().join("c0"), [0; 8]).unwrap();
        let reference = |file: &str, dtype, shape: &[usize]| TensorRef {
            file: file.to_owned(),
            dtype,
            shape: shape.to_vec(),
        };
        assert!(exchange.borrow(&reference("c0", 1, &[2])).is_ok());
        for bad in [
            reference("c0", 1, &[3]),
            reference("c0", 1, &[usize::MAX, 2]),
            reference("c0", 11, &[1]),
            reference("../c0", 1, &[2]),
            reference("./c0", 1, &[2]),
            reference("", 1, &[2]),
            reference("..", 1, &[2]),
            reference("missing", 1, &[2]),
        ] {
            assert!(exchange.borrow(&bad).is_err(), "{bad:?}");
        }
    }
}
