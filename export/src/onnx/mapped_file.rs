//! Files whose bytes are mapped and shared by the tensors that lie in them.

use std::{
    fmt, fs, io,
    ops::Range,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use memmap2::Mmap;

use super::tensor::ComputeError;

/// A read-only mapped file, shared by all tensors that lie in it. One that is still on its way is mapped when its bytes are
/// first read.
pub struct MappedFile {
    pub path: PathBuf,
    contents: Contents,
}

enum Contents {
    There(Mmap),
    Awaited { map: OnceLock<Mmap>, arrival: Box<Arrival> },
}

/// Waits for a file, and maps it.
type Arrival = dyn Fn() -> Result<Mmap, ComputeError> + Send + Sync;

impl MappedFile {
    /// Maps a file for reading. The file must not be truncated while it is mapped.
    pub fn open(path: &Path) -> io::Result<MappedFile> {
        // Asked before opening: opening a pipe would wait for its writer.
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = fs::File::open(path)?;
        // SAFETY: weights files are written once and then only read; see above.
        let map = unsafe { Mmap::map(&file)? };
        Ok(MappedFile::new(path, map))
    }

    /// A file that was mapped by others.
    pub fn new(path: &Path, map: Mmap) -> MappedFile {
        MappedFile { path: path.to_owned(), contents: Contents::There(map) }
    }

    /// A file that is not there yet. `arrival` waits for it and maps it; its errors name the file. It is called when bytes are
    /// read, and again by every reader until it has succeeded.
    pub fn awaited(
        path: &Path,
        arrival: impl Fn() -> Result<Mmap, ComputeError> + Send + Sync + 'static,
    ) -> MappedFile {
        let contents = Contents::Awaited { map: OnceLock::new(), arrival: Box::new(arrival) };
        MappedFile { path: path.to_owned(), contents }
    }

    /// Whether the file was not there when it was opened.
    pub fn is_awaited(&self) -> bool {
        matches!(self.contents, Contents::Awaited { .. })
    }

    /// All bytes of the file, for which this waits if they are not there yet.
    pub fn bytes(&self) -> Result<&[u8], ComputeError> {
        match &self.contents {
            Contents::There(map) => Ok(map),
            Contents::Awaited { map, arrival } => match map.get() {
                Some(map) => Ok(map),
                None => {
                    let arrived = arrival()?;
                    Ok(map.get_or_init(|| arrived))
                }
            },
        }
    }

    /// All bytes of the file, if it is mapped already.
    pub fn mapped(&self) -> Option<&[u8]> {
        self.map().map(|map| &map[..])
    }

    fn map(&self) -> Option<&Mmap> {
        match &self.contents {
            Contents::There(map) => Some(map),
            Contents::Awaited { map, .. } => map.get(),
        }
    }

    /// Gives the pages that lie wholly in the range back to the system, so that a pass over a file that is larger
    /// than memory stays small. They are read from the file again when they are next touched.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        {
            const PAGE: usize = 4096;
            let Some(map) = self.map() else { return };
            let (start, end) = (range.start.next_multiple_of(PAGE), range.end / PAGE * PAGE);
            if start < end && end <= map.len() {
                // SAFETY: the mapping is shared, read-only and backed by the file, so dropped pages lose nothing.
                // Advice that is refused (for example with larger pages) changes nothing.
                let _ = unsafe {
                    map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start)
                };
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

impl fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedFile({})", self.path.display())
    }
}
