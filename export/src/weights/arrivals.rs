use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{WeightsError, safetensors::map};
use crate::onnx::MappedFile;

/// Weight files that are not in a checkpoint's folder yet, and whoever brings them. Files are named by the path that they
/// will have, below the checkpoint's folder as it was given.
///
/// A file that is announced here must come under its name whole: as soon as it is there, it is read. An error that is the
/// implementation's own goes into [`io::Error::other`], in which callers of an export find it by the chain of sources.
pub trait Arrivals: Send + Sync {
    /// Names of a folder's files that are not there yet. Those of other files than weights do not matter.
    fn names_in(&self, folder: &Path) -> Vec<String>;

    /// What is known of such a file before it is there, also if it has come in the meantime; `None` if nobody brings it. This
    /// may have to read a few kilobytes from far away, and is asked for again whenever the checkpoint is opened anew.
    fn beginning(&self, file: &Path) -> io::Result<Option<Beginning>>;

    /// These files will be waited for, first the first; nothing else of what could come will be, unless this is called again.
    fn expect(&self, files: &[PathBuf]);

    /// Returns when the file is there, whole and checked. One that nobody expected is brought now. Several threads may wait, and
    /// wait again after an error.
    fn wait(&self, file: &Path) -> io::Result<()>;
}

/// How a safetensors file begins, and how long it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beginning {
    /// The length of the header (8 bytes) and the header itself; bytes that follow do no harm.
    pub header: Vec<u8>,
    /// Of the whole file.
    pub bytes: u64,
}

/// A file that is mapped when it has come, if it is the one that was announced.
pub(super) fn awaited(path: &Path, announced: Beginning, arrivals: &Arc<dyn Arrivals>) -> MappedFile {
    let (file, arrivals) = (path.to_owned(), Arc::clone(arrivals));
    MappedFile::awaited(path, move || {
        arrivals.wait(&file).map_err(|source| WeightsError::Io { path: file.clone(), source })?;
        let map = map(&file)?;
        let (found, expected) = (map.len() as u64, announced.bytes);
        if found != expected {
            return Err(WeightsError::OtherLength { path: file.clone(), expected, found }.into());
        }
        if !map.starts_with(&announced.header) {
            return Err(WeightsError::OtherHeader { path: file.clone() }.into());
        }
        Ok(map)
    })
}
