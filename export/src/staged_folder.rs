//! Folders that are there as a whole or not at all: filled out of sight, and given their name when they are complete.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::locked_folder::{LockedFolder, remove_abandoned};

/// What a folder that is being filled is called, behind the name that it will have; random letters follow.
const PARTIAL: &str = ".partial-";
/// What the name of a folder that is being replaced ends with.
const REPLACED: &str = ".replaced";

/// A folder beside the place that it is for, so that the final rename stays on one file system.
pub struct StagedFolder<'a> {
    out: &'a Path,
    folder: LockedFolder,
}

impl<'a> StagedFolder<'a> {
    /// Begins to fill `out`. What killed processes left of it is removed.
    pub fn create(out: &'a Path) -> io::Result<StagedFolder<'a>> {
        let parent = folder_of(out);
        if parent.exists() && !parent.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        fs::create_dir_all(parent)?;
        let name = out.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let prefix = format!(".{name}{PARTIAL}");
        // A folder that was being replaced goes only if there is a new one.
        let replaced = out.exists();
        let left = |name: &str| name.starts_with(&prefix) && (replaced || !name.ends_with(REPLACED));
        remove_abandoned(parent, left)?;
        Ok(StagedFolder { out, folder: LockedFolder::create_in(parent, &prefix)? })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Moves the finished folder to its name; an old folder of that name goes only now, if it may be replaced.
    pub fn publish(self, replace: bool) -> io::Result<()> {
        make_readable(self.path())?;
        if !(replace && self.out.exists()) {
            fs::rename(self.path(), self.out)?;
            let _ = self.folder.keep();
            return Ok(());
        }
        // Named after this folder, whose name nobody else has.
        let mut old = self.path().as_os_str().to_owned();
        old.push(REPLACED);
        let old = PathBuf::from(old);
        fs::rename(self.out, &old)?;
        fs::rename(self.path(), self.out).inspect_err(|_| {
            // Better the old one than none.
            let _ = fs::rename(&old, self.out);
        })?;
        let _ = self.folder.keep();
        fs::remove_dir_all(&old)
    }
}

/// The folder that a path lies in.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Temporary folders are private; a finished one is as readable as any new folder.
#[cfg(unix)]
fn make_readable(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn make_readable(_folder: &Path) -> io::Result<()> {
    Ok(())
}
