//! Keeps every boundary tensor of a run as .npy, under the names of the reference files.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{image::to_unit, probe::Probe};
use crate::{
    atomic_file::{Existing, FileError},
    npy,
    tensor::HostTensor,
};

#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    #[error("--dump {}: the folder is not empty; choose another or pass --force", path.display())]
    NotEmpty { path: PathBuf },
    #[error("cannot make the folder {}: {source}", path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("a tensor of the bundle is called '{name}', which is no name for a file")]
    Name { name: String },
    #[error(transparent)]
    File(#[from] FileError),
}

/// A probe that writes what it sees.
pub struct Dump {
    folder: PathBuf,
    /// The first tensor that could not be written; a probe cannot stop a run, so it is reported at the end.
    failed: Option<DumpError>,
}

impl Dump {
    /// A folder that holds something is refused, or emptied of tensors with `Existing::Replace`: files of two runs must
    /// not mix.
    pub fn create(folder: &Path, existing: Existing) -> Result<Dump, DumpError> {
        let failed = |source| DumpError::Folder { path: folder.to_owned(), source };
        fs::create_dir_all(folder).map_err(failed)?;
        for entry in fs::read_dir(folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if existing == Existing::Keep {
                return Err(DumpError::NotEmpty { path: folder.to_owned() });
            }
            if path.extension().is_some_and(|e| e == "npy") {
                fs::remove_file(&path).map_err(failed)?;
            }
        }
        Ok(Dump { folder: folder.to_owned(), failed: None })
    }

    /// Adds the picture in 0..1 and reports what could not be written.
    pub fn finish(mut self, image: &HostTensor) -> Result<(), DumpError> {
        self.write("image_01", &to_unit(image));
        self.failed.map_or(Ok(()), Err)
    }

    fn write(&mut self, name: &str, tensor: &HostTensor) {
        // Names come from the bundle's graphs, which may be anyone's.
        let plain = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if !plain && self.failed.is_none() {
            self.failed = Some(DumpError::Name { name: name.to_owned() });
        }
        if self.failed.is_none() {
            self.failed = npy::write(&self.folder.join(format!("{name}.npy")), Existing::Replace, tensor)
                .err()
                .map(Into::into);
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
