//! The folder of all run folders: which process works in which, and what goes when they grow too large.

use std::{
    fs::{self, DirBuilder, File, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    time::SystemTime,
};

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
            let created = File::options().create(true).truncate(false).write(true).open(folder.join(LOCK));
            match created {
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
    /// limit; also those that hold no tensor. A folder in which a process works stays. Returns how many
    /// runs with tensors went.
    pub(super) fn make_room(&self, needed: u64, own: &Path) -> usize {
        let mut total = needed;
        let mut idle = Vec::new();
        for entry in fs::read_dir(&self.root).into_iter().flatten().flatten() {
            let (folder, name) = (entry.path(), entry.file_name());
            let Some(name) = name.to_str().filter(|_| entry.file_type().is_ok_and(|t| t.is_dir())) else {
                continue;
            };
            if name.starts_with(REMOVED) {
                let _ = fs::remove_dir_all(&folder);
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

/// Names of a folder's `.npy` files.
pub(super) fn tensor_files(folder: &Path) -> impl Iterator<Item = String> + use<> {
    let names = fs::read_dir(folder).into_iter().flatten().flatten();
    names.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| name.ends_with(".npy"))
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

/// Removes a folder in which no process works. One without a lock file is of a process that died, or has only just begun;
/// either way it is empty.
fn remove_idle(folder: &Path) -> bool {
    match File::options().write(true).open(folder.join(LOCK)) {
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
        match fs::metadata(folder.join(LOCK)) {
            Ok(named) if (named.dev(), named.ino()) == (locked.dev(), locked.ino()) => {
                Ok(Taken::Ours(Claim { folder: folder.to_owned(), _lock: lock }))
            }
            _ => Ok(Taken::Gone),
        }
    }

    /// Removes the folder. It loses its name first, so that another process never finds half of it.
    pub fn remove(self) -> io::Result<()> {
        let id = self.folder.file_name().unwrap_or_default().to_string_lossy();
        let nameless = self.folder.with_file_name(format!("{REMOVED}{id}-{}", std::process::id()));
        fs::rename(&self.folder, &nameless)?;
        match fs::remove_dir_all(&nameless) {
            // Another process clears away such remains, too.
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}
