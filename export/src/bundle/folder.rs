//! Writes the files of a bundle and notes what they are.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::{ExportError, ExportEvent, FileEntry, MANIFEST, Manifest, Stage};
use crate::{
    arch::{CopiedFolder, RawFile, StageGraph},
    files::hex,
    onnx::{Bytes, Stored, Tensor, WriteOptions, write_model_beside},
    quant,
};

/// Copied files (tokenizer, templates) are read whole.
pub(super) const MAX_COPIED_FILE: u64 = 256 << 20;

pub(super) fn write_manifest(folder: &Path, manifest: &Manifest) -> Result<(), ExportError> {
    let path = folder.join(MANIFEST);
    let io = |source| ExportError::Io { path: path.clone(), source };
    let mut text = serde_json::to_vec_pretty(manifest).map_err(|e| io(io::Error::other(e)))?;
    text.push(b'\n');
    let mut file = File::create(&path).map_err(io)?;
    file.write_all(&text).and_then(|()| file.sync_all()).map_err(io)
}

/// A mapped matrix as matrices of a few megabytes; any other tensor as it is.
fn row_chunks(tensor: &Tensor) -> Vec<Tensor> {
    const CHUNK: usize = 16 << 20;
    let (Bytes::Mapped { file, range }, [rows, width]) = (&tensor.bytes, &tensor.shape[..]) else {
        return vec![tensor.clone()];
    };
    let row_bytes = range.len() / (*rows).max(1);
    let rows_per_chunk = (CHUNK / row_bytes.max(1)).max(1);
    let starts = (0..*rows).step_by(rows_per_chunk);
    starts
        .map(|start| {
            let count = rows_per_chunk.min(rows - start);
            let begin = range.start + start * row_bytes;
            let range = begin..begin + count * row_bytes;
            let bytes = Bytes::Mapped { file: file.clone(), range };
            Tensor { dtype: tensor.dtype, shape: vec![count, *width], bytes }
        })
        .collect()
}

/// A file that is to be copied.
pub(super) struct CopiedFile {
    path: PathBuf,
    name: String,
    pub bytes: u64,
}

/// The plain files of a folder of `root` that are to be copied, in name order.
pub(super) fn copied_files(root: &Path, folder: &CopiedFolder) -> Result<Vec<CopiedFile>, ExportError> {
    let from = root.join(&folder.from);
    let io = |path: &Path, source| ExportError::Io { path: path.to_owned(), source };
    let entries = fs::read_dir(&from).map_err(|e| io(&from, e))?;
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| io(&from, e))?;
        let path = entry.path();
        let metadata = fs::metadata(&path).map_err(|e| io(&path, e))?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        // Streams beside a file, as some downloads have them, are no part of a tokenizer.
        if metadata.is_file() && !name.contains(['\\', ':']) && folder.files.contain(&name, metadata.len()) {
            files.push(CopiedFile { path, name, bytes: metadata.len() });
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

/// Fills the staging folder and notes every file's size and hash.
pub(super) struct FolderWriter<'a> {
    pub folder: &'a Path,
    pub files: Vec<FileEntry>,
    pub progress: &'a mut dyn FnMut(ExportEvent),
}

impl FolderWriter<'_> {
    /// Writes graphs and streams their weights, those that several graphs have once.
    pub fn stages(&mut self, graphs: &[StageGraph]) -> Result<Vec<Stage>, ExportError> {
        let mut stages = Vec::new();
        let mut stored = Stored::default();
        for stage in graphs {
            (self.progress)(ExportEvent::Stage { name: stage.name.clone() });
            let file = format!("{}.onnx", stage.name);
            let mut bytes = |n| (self.progress)(ExportEvent::Bytes(n));
            let summary = write_model_beside(
                &stage.model,
                &self.folder.join(&file),
                &WriteOptions::default(),
                &mut stored,
                &mut bytes,
            )
            .map_err(|source| ExportError::Write { stage: stage.name.clone(), source })?;
            self.files.extend(summary.files.into_iter().map(|f| FileEntry {
                path: f.name,
                bytes: f.bytes,
                sha256: f.sha256,
            }));
            stages.push(Stage::describe(&stage.name, stage.component, &stage.model.graph, &file));
        }
        Ok(stages)
    }

    /// Converts and writes a matrix some rows at a time, so that a table of any size passes through little memory. Returns how
    /// many values were rounded because they are too small for its type.
    pub fn raw(&mut self, raw: &RawFile) -> Result<u64, ExportError> {
        (self.progress)(ExportEvent::Stage { name: raw.path.clone() });
        let path = self.folder.join(&raw.path);
        let io = |source| ExportError::Io { path: path.clone(), source };
        let problem = |source| ExportError::Tensor { path: path.clone(), source };
        let mut file = File::create(&path).map_err(io)?;
        let mut hash = Sha256::new();
        let (mut written, mut underflows) = (0, 0);
        for part in row_chunks(&raw.tensor) {
            let part = quant::cast(part, raw.dtype).map_err(|e| problem(e.into()))?;
            let bytes = part.bytes.read().map_err(problem)?;
            file.write_all(&bytes).map_err(io)?;
            hash.update(&bytes);
            written += bytes.len() as u64;
            underflows += part.bytes.underflows();
            (self.progress)(ExportEvent::Bytes(bytes.len() as u64));
            part.bytes.release();
        }
        file.sync_all().map_err(io)?;
        self.files.push(FileEntry { path: raw.path.clone(), bytes: written, sha256: hex(&hash.finalize()) });
        Ok(underflows)
    }

    /// Copies plain files of a folder of `root`, in name order.
    pub fn copy_folder(&mut self, root: &Path, folder: &CopiedFolder) -> Result<(), ExportError> {
        for CopiedFile { path, name, bytes } in copied_files(root, folder)? {
            if bytes > MAX_COPIED_FILE {
                return Err(ExportError::CopiedTooLarge { bytes, path });
            }
            let content = fs::read(&path).map_err(|source| ExportError::Io { path, source })?;
            self.write(&format!("{}/{name}", folder.to), &content)?;
        }
        Ok(())
    }

    fn write(&mut self, name: &str, content: &[u8]) -> Result<(), ExportError> {
        let path = self.folder.join(name);
        let io = |source| ExportError::Io { path: path.clone(), source };
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(io)?;
        }
        let mut file = File::create(&path).map_err(io)?;
        file.write_all(content).and_then(|()| file.sync_all()).map_err(io)?;
        let sha256 = hex(&Sha256::digest(content));
        self.files.push(FileEntry { path: name.to_owned(), bytes: content.len() as u64, sha256 });
        Ok(())
    }
}
