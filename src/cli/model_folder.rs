//! A folder of models that is there as a whole or not at all.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use viaduct_export::{
    onnx::{WriteOptions, write_model_with},
    passes::Part,
};

use crate::atomic_file::FileError;

/// Endings of the files that such a folder consists of.
const ENDINGS: [&str; 2] = ["onnx", "data"];

/// Refuses a target that exists, but for a folder of nothing but models if it may be replaced.
pub fn check_target(source: &Path, out: &Path, force: bool) -> Result<(), FileError> {
    let failed = |source| FileError::Write { path: out.to_owned(), source };
    if fs::symlink_metadata(out).is_err() {
        return Ok(());
    }
    if !force {
        return Err(FileError::Exists(out.to_owned()));
    }
    let folder = source.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let inside = fs::canonicalize(folder).ok().zip(fs::canonicalize(out).ok());
    if inside.is_some_and(|(folder, out)| folder.starts_with(out)) {
        return Err(FileError::SourceInside(out.to_owned()));
    }
    for entry in fs::read_dir(out).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = entry.path();
        let ours = path.extension().is_some_and(|ending| ENDINGS.iter().any(|known| ending == *known));
        if !ours || !entry.file_type().map_err(failed)?.is_file() {
            return Err(FileError::Foreign { path: out.to_owned(), file: path });
        }
    }
    Ok(())
}

/// Writes each part to `<part>.onnx` and its data beside it. The folder appears when all are complete; one of that name
/// goes only then.
pub fn write(parts: &[Part], out: &Path, progress: &mut dyn FnMut(u64)) -> anyhow::Result<()> {
    let failed = |source| FileError::Write { path: out.to_owned(), source };
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(failed)?;
    let staging = tempfile::Builder::new().prefix(".viaduct-parts").tempdir_in(parent).map_err(failed)?;
    let folder = staging.path().join("parts");
    fs::create_dir(&folder).map_err(failed)?;
    for part in parts {
        let path = folder.join(format!("{}.onnx", part.name));
        write_model_with(&part.model, &path, &WriteOptions::default(), progress)?;
    }
    publish(&folder, out, staging.path().join("replaced")).map_err(failed)?;
    Ok(())
}

/// What is replaced goes with the temporary folder.
fn publish(folder: &Path, out: &Path, replaced: PathBuf) -> io::Result<()> {
    if fs::symlink_metadata(out).is_err() {
        return fs::rename(folder, out);
    }
    fs::rename(out, &replaced)?;
    fs::rename(folder, out).inspect_err(|_| {
        // Better the old one than none.
        let _ = fs::rename(&replaced, out);
    })
}
