//! The place of an exported bundle: filled out of sight, and given its name only when it is whole.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use super::{ExportError, MANIFEST, Manifest, folder::MAX_COPIED_FILE};
use crate::{
    files::read_limited,
    locked_folder::{LockedFolder, remove_abandoned},
};

/// What a folder that is being filled is called, behind the bundle's name; random letters follow.
const PARTIAL: &str = ".partial-";
/// What the name of a bundle that is being replaced ends with.
const REPLACED: &str = ".replaced";

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

    /// A folder beside the target, so that the final rename stays on one file system.
    pub fn staging_folder(&self) -> Result<LockedFolder, ExportError> {
        let parent = match self.out.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let io = |source| ExportError::Io { path: parent.to_owned(), source };
        if parent.exists() && !parent.is_dir() {
            return Err(io(io::ErrorKind::NotADirectory.into()));
        }
        fs::create_dir_all(parent).map_err(io)?;
        let name = self.out.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let prefix = format!(".{name}{PARTIAL}");
        // A bundle that was being replaced goes only if there is a new one.
        let replaced = self.out.exists();
        let left = |name: &str| name.starts_with(&prefix) && (replaced || !name.ends_with(REPLACED));
        remove_abandoned(parent, left).map_err(io)?;
        LockedFolder::create_in(parent, &prefix).map_err(io)
    }

    /// Moves the finished folder to its name; an old bundle under that name goes only now.
    pub fn publish(&self, staging: LockedFolder) -> Result<(), ExportError> {
        let io = |source| ExportError::Io { path: self.out.to_owned(), source };
        make_readable(staging.path()).map_err(io)?;
        if self.force && self.out.exists() {
            // Named after the staging folder, whose name nobody else has.
            let mut old = staging.path().as_os_str().to_owned();
            old.push(REPLACED);
            let old = PathBuf::from(old);
            fs::rename(self.out, &old).map_err(io)?;
            if let Err(e) = fs::rename(staging.path(), self.out) {
                // The old bundle goes back: better the old one than none.
                let _ = fs::rename(&old, self.out);
                return Err(io(e));
            }
            let _ = staging.keep();
            return fs::remove_dir_all(&old).map_err(io);
        }
        fs::rename(staging.path(), self.out).map_err(io)?;
        let _ = staging.keep();
        Ok(())
    }
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
    match files_below(&out).map_err(io)?.into_iter().find(|file| !known.contains(file)) {
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

/// Temporary folders are private; a bundle is as readable as any new folder.
#[cfg(unix)]
fn make_readable(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn make_readable(_folder: &Path) -> io::Result<()> {
    Ok(())
}
