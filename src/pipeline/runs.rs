//! The folder of all run folders: which process works in which, and what goes when they grow too large.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, DirBuilder, File, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::SystemTime,
};

use super::run_folder::{IDENTITY, name_of};
use crate::atomic_file::is_temporary;

/// The file whose lock says that a process works in the folder. The lock dies with its process.
const LOCK: &str = "lock";
/// What a run folder is called while it is being removed begins with this.
const REMOVED: &str = ".removed-";
/// Digits of a run folder's name.
pub(super) const ID_DIGITS: usize = 16;
/// How often a folder may vanish while it is being claimed.
const ATTEMPTS: usize = 100;

/// Where runs keep their folders, and how large these may be.
#[derive(Clone, Debug)]
pub struct Runs {
    pub root: PathBuf,
    /// Bytes of all run folders together.
    pub limit: u64,
}

impl Runs {
    /// Makes the folder `id` this process's own; none if another process works in it.
    pub(super) fn claim(&self, id: &str) -> io::Result<Option<Claim>> {
        let folder = self.root.join(id);
        for _ in 0..ATTEMPTS {
            // What is drawn is nobody else's business.
            DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
            if !fs::symlink_metadata(&folder)?.is_dir() {
                return Err(io::Error::new(io::ErrorKind::NotADirectory, "it is a link, not a folder"));
            }
            match open_lock(&folder, true) {
                Ok(lock) => match Claim::take(&folder, lock)? {
                    Taken::Ours(claim) => return Ok(Some(claim)),
                    Taken::Theirs => return Ok(None),
                    Taken::Gone => {}
                },
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Err(io::Error::other("the folder vanishes again and again"))
    }

    /// Removes the folders of other runs, those of the longest idle first, until `needed` more bytes fit under the
    /// limit; also those that hold no tensor. A folder in which a process works stays, as does one with anything that no
    /// run put there. Returns how many runs with tensors went.
    pub(super) fn make_room(&self, needed: u64, own: &Path) -> usize {
        let mut total = needed;
        let mut idle = Vec::new();
        for entry in fs::read_dir(&self.root).into_iter().flatten().flatten() {
            let (folder, name) = (entry.path(), entry.file_name());
            let Some(name) = name.to_str().filter(|_| entry.file_type().is_ok_and(|t| t.is_dir())) else {
                continue;
            };
            if name.starts_with(REMOVED) {
                let _ = remove_own(&folder);
            } else if is_id(name) {
                let bytes = bytes_in(&folder);
                total = total.saturating_add(bytes);
                if folder != own {
                    idle.push((last_change(&folder), folder, bytes));
                }
            }
        }
        idle.sort();
        let mut removed = 0;
        for (_, folder, bytes) in idle {
            let holds_tensors = tensor_files(&folder).next().is_some();
            if (total > self.limit || !holds_tensors) && remove_idle(&folder) {
                total = total.saturating_sub(bytes);
                removed += usize::from(holds_tensors);
            }
        }
        removed
    }
}

/// Names of a folder's kept tensors.
pub(super) fn tensor_files(folder: &Path) -> impl Iterator<Item = String> + use<> {
    let names = fs::read_dir(folder).into_iter().flatten().flatten();
    names.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| name_of(name).is_some())
}

/// Whether a run may have put a file of that name into its folder.
fn is_own(name: &OsStr) -> bool {
    let known = |name: &str| name == LOCK || name == IDENTITY || name_of(name).is_some();
    name.to_str().is_some_and(known) || is_temporary(name)
}

/// Something in the folder that no run put there.
fn foreign(folder: &Path) -> io::Result<Option<OsString>> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if !is_own(&entry.file_name()) || entry.file_type()?.is_dir() {
            return Ok(Some(entry.file_name()));
        }
    }
    Ok(None)
}

/// Removes what a run put into the folder, and the folder if nothing else is in it.
fn remove_own(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if is_own(&entry.file_name()) && !entry.file_type()?.is_dir() {
            fs::remove_file(entry.path())?;
        }
    }
    fs::remove_dir(folder)
}

/// Opens a folder's lock file. A link is not followed, a pipe not waited for.
fn open_lock(folder: &Path, create: bool) -> io::Result<File> {
    let mut options = File::options();
    // For reading, too: so that a pipe opens, and is seen to be one.
    options
        .create(create)
        .truncate(false)
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let lock = options.open(folder.join(LOCK))?;
    match lock.metadata()?.is_file() {
        true => Ok(lock),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "its lock is not a regular file")),
    }
}

fn is_id(name: &str) -> bool {
    name.len() == ID_DIGITS && name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn bytes_in(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len()).sum()
}

/// When a file was last put into the folder.
fn last_change(folder: &Path) -> SystemTime {
    fs::metadata(folder).and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Removes a folder in which no process works and only files of runs are. One without a lock file is of a process that died,
/// or has only just begun; either way it is empty.
fn remove_idle(folder: &Path) -> bool {
    if !foreign(folder).is_ok_and(|found| found.is_none()) {
        return false;
    }
    match open_lock(folder, false) {
        Ok(lock) => match Claim::take(folder, lock) {
            Ok(Taken::Ours(claim)) => claim.remove().is_ok(),
            _ => false,
        },
        Err(_) => fs::remove_dir(folder).is_ok(),
    }
}

/// A run folder that is this process's own while this lives.
pub(super) struct Claim {
    pub folder: PathBuf,
    /// Locked.
    _lock: File,
}

enum Taken {
    Ours(Claim),
    Theirs,
    /// The folder was removed while it was being claimed.
    Gone,
}

impl Claim {
    fn take(folder: &Path, lock: File) -> io::Result<Taken> {
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(Taken::Theirs),
            Err(TryLockError::Error(e)) => return Err(e),
        }
        let locked = lock.metadata()?;
        match fs::symlink_metadata(folder.join(LOCK)) {
            Ok(named) if (named.dev(), named.ino()) == (locked.dev(), locked.ino()) => {
                Ok(Taken::Ours(Claim { folder: folder.to_owned(), _lock: lock }))
            }
            _ => Ok(Taken::Gone),
        }
    }

    /// Removes the folder. It loses its name first, so that another process never finds half of it. Where something else
    /// is in it, that stays.
    pub fn remove(self) -> io::Result<()> {
        if let Some(name) = foreign(&self.folder)? {
            let _ = remove_own(&self.folder);
            let name = name.to_string_lossy();
            return Err(io::Error::other(format!("it holds {name}, which is not of a run")));
        }
        let id = self.folder.file_name().unwrap_or_default().to_string_lossy();
        let nameless = self.folder.with_file_name(format!("{REMOVED}{id}-{}", std::process::id()));
        fs::rename(&self.folder, &nameless)?;
        match remove_own(&nameless) {
            // Another process clears away such remains, too.
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}
