//! Files under construction: written to a temporary name, hashed on the way, and given their names together at the end.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    thread,
};

use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use super::write::{FileSummary, WriteError};
use crate::locked_file;

/// Tensors of at least this size start on a page, which is what ONNX asks for so that they can be mapped.
const PAGE: u64 = 4096;
const PAGED_FROM: u64 = 64 << 10;
/// Smaller ones, such as scales and zero points, start on a cache line: pages would be mostly padding.
const CACHE_LINE: u64 = 64;

/// A thread of its own is worth its start from here on.
const HASHED_ASIDE_FROM: usize = 1 << 20;

/// How the name of a file begins that does not have its own yet, and how it ends.
const TEMPORARY: [&str; 2] = [".viaduct-", ".part"];

/// Removes files that killed processes were writing into `folder`. Nothing is lost with one that stays: the write goes on.
pub(super) fn remove_abandoned(folder: &Path) {
    let is_ours = |name: &OsStr| {
        let [start, end] = TEMPORARY.map(str::as_bytes);
        name.as_encoded_bytes().starts_with(start) && name.as_encoded_bytes().ends_with(end)
    };
    let _ = locked_file::remove_abandoned(folder, is_ours);
}

/// One file that does not have its name yet. Dropped, it leaves nothing behind.
pub(super) struct Output {
    name: String,
    path: PathBuf,
    temporary: NamedTempFile,
    hash: Sha256,
    bytes: u64,
}

impl Output {
    pub fn create(folder: &Path, name: String) -> Result<Output, WriteError> {
        let path = folder.join(&name);
        let [start, end] = TEMPORARY;
        let created = locked_file::create_in(folder, start, end);
        let temporary = created.map_err(|source| WriteError::Io { file: path.clone(), source })?;
        Ok(Output { name, path, temporary, hash: Sha256::new(), bytes: 0 })
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        let (file, hash) = (self.temporary.as_file_mut(), &mut self.hash);
        // Copying takes several times as long as hashing: beside it, hashing costs nothing. Two threads that block do
        // it, not a pool whose idle threads spin: the other cores may have work.
        let (hashed, written) = thread::scope(|scope| {
            let aside = bytes.len() >= HASHED_ASIDE_FROM
                && thread::Builder::new().spawn_scoped(scope, || hash.update(bytes)).is_ok();
            (aside, file.write_all(bytes))
        });
        written.map_err(|source| WriteError::Io { file: self.path.clone(), source })?;
        if !hashed {
            self.hash.update(bytes);
        }
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn sync(&self) -> Result<(), WriteError> {
        let synced = self.temporary.as_file().sync_all();
        synced.map_err(|source| WriteError::Io { file: self.path.clone(), source })
    }
}

/// Where a tensor was put.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub shard: usize,
    pub offset: u64,
}

/// The data files of one model.
pub(super) struct Shards {
    folder: PathBuf,
    stem: String,
    limit: u64,
    files: Vec<Output>,
}

impl Shards {
    pub fn new(folder: &Path, stem: &str, limit: u64) -> Shards {
        Shards { folder: folder.to_owned(), stem: stem.to_owned(), limit, files: Vec::new() }
    }

    pub fn name(stem: &str, shard: usize) -> String {
        format!("{stem}-{shard:05}.data")
    }

    /// Whether a file may be data of the model with that stem.
    pub fn is_name(name: &str, stem: &str) -> bool {
        let number = name.strip_prefix(stem).and_then(|rest| rest.strip_prefix('-')?.strip_suffix(".data"));
        let shard = number.and_then(|number| number.parse().ok());
        shard.is_some_and(|shard| name == Shards::name(stem, shard))
    }

    /// Where a tensor of `len` bytes begins in a file of so many bytes.
    pub fn aligned(bytes: u64, len: u64) -> u64 {
        bytes.next_multiple_of(if len >= PAGED_FROM { PAGE } else { CACHE_LINE })
    }

    /// Makes room for a tensor: the last file, padded to the tensor's alignment, or a new one. A tensor that is
    /// larger than a shard may be gets one to itself.
    pub fn begin(&mut self, len: u64) -> Result<Place, WriteError> {
        if let Some(file) = self.files.last_mut() {
            let offset = Shards::aligned(file.bytes, len);
            if offset.saturating_add(len) <= self.limit {
                let padding = (offset - file.bytes) as usize;
                file.write(&[0; PAGE as usize][..padding])?;
                return Ok(Place { shard: self.files.len() - 1, offset });
            }
            file.sync()?;
        }
        let name = Shards::name(&self.stem, self.files.len());
        self.files.push(Output::create(&self.folder, name)?);
        Ok(Place { shard: self.files.len() - 1, offset: 0 })
    }

    /// Appends to the tensor begun last.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        match self.files.last_mut() {
            Some(file) => file.write(bytes),
            None => Ok(()),
        }
    }

    /// Puts all files in place, the graph last: a graph file that is there has its data. If one of them cannot be
    /// renamed, those that were are removed.
    pub fn publish(mut self, graph: Output) -> Result<Vec<FileSummary>, WriteError> {
        let folder = self.folder;
        self.files.push(graph);
        self.files.iter().try_for_each(Output::sync)?;
        let mut summaries: Vec<FileSummary> = Vec::new();
        for output in self.files {
            if let Err(error) = output.temporary.persist(&output.path) {
                for summary in summaries {
                    let _ = fs::remove_file(folder.join(summary.name));
                }
                return Err(WriteError::Io { file: output.path, source: error.error });
            }
            let sha256 = output.hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            summaries.push(FileSummary { name: output.name, bytes: output.bytes, sha256 });
        }
        // The names are safe once the folder is. Systems that cannot open folders have no need to.
        if let Ok(opened) = File::open(&folder) {
            let _ = opened.sync_all();
        }
        Ok(summaries)
    }
}
