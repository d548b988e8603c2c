//! Files that are filled under a temporary name. A living process holds a lock on its file, as on a
//! [`LockedFolder`](crate::locked_folder::LockedFolder): what killed processes left can be told from what is in use.

use std::{
    ffi::OsStr,
    fs::{self, File, TryLockError},
    io,
    path::Path,
};

use tempfile::{Builder, NamedTempFile};

use crate::locked_folder::is_abandoned;

/// How often a new file may be taken for an abandoned one before it is locked.
const ATTEMPTS: usize = 10;

/// A new file `PREFIX......SUFFIX`, as readable as any new file. It goes when it is dropped without having been given a
/// name, or with [`remove_abandoned`] if the process dies.
pub fn create_in(folder: &Path, prefix: &str, suffix: &str) -> io::Result<NamedTempFile> {
    for _ in 0..ATTEMPTS {
        let file = make_in(folder, prefix, suffix)?;
        // Where files cannot be locked, nobody can take this one for abandoned either.
        let taken = matches!(file.as_file().try_lock(), Err(TryLockError::WouldBlock));
        if !taken && file.path().exists() {
            return Ok(file);
        }
    }
    Err(io::Error::other("the temporary file vanishes again and again"))
}

/// `tempfile` adds its random path to errors, which would only confuse, and makes files that nobody else may read.
fn make_in(folder: &Path, prefix: &str, suffix: &str) -> io::Result<NamedTempFile> {
    let mut code = None;
    let open = |path: &Path| {
        let opened = File::options().write(true).create_new(true).open(path);
        opened.inspect_err(|error| code = error.raw_os_error())
    };
    let made = Builder::new().prefix(prefix).suffix(suffix).make_in(folder, open);
    made.map_err(|error| code.map_or(error, io::Error::from_raw_os_error))
}

/// Removes the regular files in `folder` that have such a name and on which no process has a lock. Those that cannot be
/// opened are left alone.
pub fn remove_abandoned(folder: &Path, is_ours: impl Fn(&OsStr) -> bool) -> io::Result<()> {
    for entry in fs::read_dir(folder)?.flatten() {
        if is_ours(&entry.file_name()) && entry.file_type()?.is_file() && is_abandoned(&entry.path()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
