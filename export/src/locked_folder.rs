//! Folders that are filled out of sight. A living process holds a lock on its folder, which the system takes back when the
//! process ends, however it ends: so what killed processes left can be told from what is in use, whichever processes can
//! be seen.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

/// How often a new folder may be taken for an abandoned one before it is locked.
const ATTEMPTS: usize = 10;

/// A folder of this process, closed to other users. It goes when it is dropped, or with [`remove_abandoned`] if the process
/// dies.
pub struct LockedFolder {
    folder: TempDir,
    _lock: File,
}

impl LockedFolder {
    /// A new folder whose name begins with `prefix`; random letters follow.
    pub fn create_in(parent: &Path, prefix: &str) -> io::Result<LockedFolder> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(prefix);
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700));
        for _ in 0..ATTEMPTS {
            let folder = builder.tempdir_in(parent)?;
            let lock = File::open(folder.path())?;
            if lock.try_lock().is_ok() && folder.path().exists() {
                return Ok(LockedFolder { folder, _lock: lock });
            }
        }
        Err(io::Error::other("the folder vanishes again and again"))
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Leaves the folder where it is.
    pub fn keep(self) -> PathBuf {
        self.folder.keep()
    }
}

/// Removes the folders in `parent` that have such a name and on which no process has a lock. Those that cannot be opened or
/// removed are left alone.
pub fn remove_abandoned(parent: &Path, is_ours: impl Fn(&str) -> bool) -> io::Result<()> {
    for entry in fs::read_dir(parent)?.flatten() {
        let ours = entry.file_name().to_str().is_some_and(&is_ours);
        if ours && entry.file_type()?.is_dir() && is_abandoned(&entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

/// Whether no process has a lock on a folder or regular file that this one may open.
pub fn is_abandoned(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| file.try_lock().is_ok())
}
