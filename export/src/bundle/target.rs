//! The place of an exported bundle: filled out of sight, and given its name only when it is whole.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use super::{ExportError, MANIFEST, Manifest, folder::MAX_COPIED_FILE, verified::is_unfinished};
use crate::{
    files::read_limited,
    staged_folder::{StagedFolder, folder_of},
};

/// The folder that becomes a bundle.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub out: &'a Path,
    /// Replace an existing bundle.
    pub force: bool,
}

impl Target<'_> {
    /// Refuses a folder that is not to be replaced. `sources` are what the export reads.
    pub fn check(&self, sources: &[&Path]) -> Result<(), ExportError> {
        let path = self.out.to_owned();
        if self.out.file_name().is_none() {
            return Err(ExportError::NoName { path });
        }
        match fs::symlink_metadata(self.out) {
            Err(_) => Ok(()),
            Ok(_) if !self.force => Err(ExportError::Exists { path }),
            Ok(_) => replaceable(sources, path),
        }
    }

    /// The folder to fill.
    pub fn staging_folder(&self) -> Result<StagedFolder<'_>, ExportError> {
        let io = |source| ExportError::Io { path: folder_of(self.out).to_owned(), source };
        StagedFolder::create(self.out).map_err(io)
    }

    /// Moves the finished folder to its name; an old bundle under that name goes only now.
    pub fn publish(&self, staging: StagedFolder<'_>) -> Result<(), ExportError> {
        let io = |source| ExportError::Io { path: self.out.to_owned(), source };
        staging.publish(self.force).map_err(io)
    }
}

/// Refuses a folder in which no bundle may be made, before anything is done for it.
pub fn check_target(out: &Path, force: bool) -> Result<(), ExportError> {
    Target { out, force }.check(&[])
}

/// `--force` removes a folder, so the folder must be a bundle with nothing of the user's in it.
fn replaceable(sources: &[&Path], path: PathBuf) -> Result<(), ExportError> {
    let io = |source| ExportError::Io { path: path.clone(), source };
    let Some(manifest) = manifest_of(&path) else { return Err(ExportError::NotReplaceable { path }) };
    let out = path.canonicalize().map_err(io)?;
    for source in sources {
        if source.canonicalize().map_err(io)?.starts_with(&out) {
            return Err(ExportError::SourceInside { path });
        }
    }
    let known: BTreeSet<PathBuf> =
        manifest.files.iter().map(|f| out.join(&f.path)).chain([out.join(MANIFEST)]).collect();
    let foreign = |file: &PathBuf| !known.contains(file) && !is_unfinished(&out, file);
    match files_below(&out).map_err(io)?.into_iter().find(foreign) {
        Some(file) => Err(ExportError::Foreign { path, file }),
        None => Ok(()),
    }
}

fn manifest_of(folder: &Path) -> Option<Manifest> {
    serde_json::from_slice(&read_limited(&folder.join(MANIFEST), MAX_COPIED_FILE).ok()?).ok()
}

/// Everything below a folder that is not itself a folder.
fn files_below(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => files.extend(files_below(&entry.path())?),
            false => files.push(entry.path()),
        }
    }
    Ok(files)
}
