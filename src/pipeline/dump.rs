//! Keeps every boundary tensor of a run as .npy, under the names of the reference files.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::probe::Probe;
use crate::{
    atomic_file::{Existing, FileError},
    npy,
    tensor::HostTensor,
};

#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    #[error("cannot make the folder {}: {source}", path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error(transparent)]
    File(#[from] FileError),
}

/// A probe that writes what it sees.
pub struct Dump {
    folder: PathBuf,
    /// The first tensor that could not be written; a probe cannot stop a run, so it is reported at the end.
    failed: Option<FileError>,
}

impl Dump {
    pub fn create(folder: &Path) -> Result<Dump, DumpError> {
        fs::create_dir_all(folder).map_err(|source| DumpError::Folder { path: folder.to_owned(), source })?;
        Ok(Dump { folder: folder.to_owned(), failed: None })
    }

    /// Adds the picture in 0..1 and reports what could not be written.
    pub fn finish(mut self, image: &HostTensor) -> Result<(), DumpError> {
        let values = image.to_f32().iter().map(|x| (x / 2.0 + 0.5).clamp(0.0, 1.0)).collect();
        self.write("image_01", &HostTensor::f32(&image.shape, values));
        self.failed.map_or(Ok(()), |error| Err(error.into()))
    }

    fn write(&mut self, name: &str, tensor: &HostTensor) {
        if self.failed.is_none() {
            self.failed =
                npy::write(&self.folder.join(format!("{name}.npy")), Existing::Replace, tensor).err();
        }
    }
}

impl Probe for Dump {
    fn internals(&self) -> bool {
        true
    }

    fn boundary(&mut self, name: &str, tensor: HostTensor) -> HostTensor {
        self.write(name, &tensor);
        tensor
    }
}
