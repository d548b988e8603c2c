//! A folder of models that is there as a whole or not at all.

use std::{fs, path::Path};

use viaduct_export::{
    onnx::{WriteOptions, write_model_with},
    passes::Part,
    staged_folder::{StagedFolder, folder_of},
};

use crate::atomic_file::FileError;

/// Endings of the files that such a folder consists of.
pub const ENDINGS: &[&str] = &["onnx", "data"];

/// Refuses a target that exists, but for a folder of nothing but files with these endings if it may be replaced.
pub fn check_target(source: &Path, out: &Path, endings: &[&str], force: bool) -> Result<(), FileError> {
    let failed = |source| FileError::Write { path: out.to_owned(), source };
    if fs::symlink_metadata(out).is_err() {
        return Ok(());
    }
    if !force {
        return Err(FileError::Exists(out.to_owned()));
    }
    let inside = fs::canonicalize(folder_of(source)).ok().zip(fs::canonicalize(out).ok());
    if inside.is_some_and(|(folder, out)| folder.starts_with(out)) {
        return Err(FileError::SourceInside(out.to_owned()));
    }
    if !out.is_dir() {
        return Err(FileError::NotAFolder(out.to_owned()));
    }
    for entry in fs::read_dir(out).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = entry.path();
        let ours = path.extension().is_some_and(|ending| endings.iter().any(|known| ending == *known));
        if !ours || !entry.file_type().map_err(failed)?.is_file() {
            return Err(FileError::Foreign { path: out.to_owned(), file: path });
        }
    }
    Ok(())
}

/// Refuses a target that could not be made, before anything is computed for it. It leaves nothing behind.
pub fn check_writable(out: &Path) -> Result<(), FileError> {
    let above = folder_of(out).ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("."));
    let writable = tempfile::tempfile_in(above).map(drop);
    writable.map_err(|source| FileError::Write { path: out.to_owned(), source })
}

/// Writes each part to `<part>.onnx` and its data beside it. The folder appears when all are complete; one of that name
/// goes only then, and if it may.
pub fn write(parts: &[Part], out: &Path, force: bool, progress: &mut dyn FnMut(u64)) -> anyhow::Result<()> {
    let failed = |source| FileError::Write { path: out.to_owned(), source };
    let staging = StagedFolder::create(out).map_err(failed)?;
    for part in parts {
        let path = staging.path().join(format!("{}.onnx", part.name));
        write_model_with(&part.model, &path, &WriteOptions::default(), progress)?;
    }
    staging.publish(force).map_err(failed)?;
    Ok(())
}
