//! Files that are either whole or absent.
//!
//! Bytes go to a temporary name in the target's directory; only a complete, synced file takes the target's name. A
//! run that dies half-way, or whose result is bad, leaves the earlier file as it was.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};

use tempfile::NamedTempFile;
use viaduct_export::locked_file;

/// Why a file could not be written; the text of the operating system is in the message.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{} exists; choose another name or pass --force to replace it", .0.display())]
    Exists(PathBuf),
    #[error("{} is not a regular file, so it is not replaced", .0.display())]
    NotRegular(PathBuf),
    #[error("{} holds {}, which is no part of a model, so it is not replaced", path.display(), file.display())]
    Foreign { path: PathBuf, file: PathBuf },
    #[error("{} holds the model that is read, so it is not replaced", .0.display())]
    SourceInside(PathBuf),
    #[error("{} is no folder, so it is not replaced", .0.display())]
    NotAFolder(PathBuf),
    #[error("{} is a directory", .0.display())]
    IsDirectory(PathBuf),
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// What to do with an earlier file of that name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    Replace,
    /// Refuse, even if it appears while the new one is being written.
    Keep,
}

/// Shared by all writes while they have a temporary file.
static WRITES: RwLock<()> = RwLock::new(());

/// The temporary files that there are.
static TEMPORARIES: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn temporaries() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    TEMPORARIES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How the name of a temporary file begins.
const TEMPORARY: &str = ".viaduct-";
/// How it ends.
const PARTIAL: &str = ".partial";

/// Whether a file of that name is one that is being written, or was when its process died.
pub fn is_temporary(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    name.starts_with(TEMPORARY.as_bytes()) && name.ends_with(PARTIAL.as_bytes())
}

/// Waits for the writes that have begun, and lets none begin while the guard lives: a process that ends meanwhile leaves
/// no temporary file.
pub fn hold_writes() -> RwLockWriteGuard<'static, ()> {
    WRITES.write().unwrap_or_else(PoisonError::into_inner)
}

/// Removes what is being written, and lets no write begin while the guard lives: for a process that ends meanwhile, and does
/// not wait for writes that take long.
pub fn discard_writes() -> impl Sized {
    let temporaries = temporaries();
    for file in temporaries.iter() {
        let _ = fs::remove_file(file);
    }
    temporaries
}

/// A temporary file's place among those that there are.
struct Registered(PathBuf);

impl Registered {
    /// Makes the file. No discarding of files comes between.
    fn create(directory: &Path, name: Option<&str>) -> io::Result<(Registered, NamedTempFile)> {
        let mut known = temporaries();
        let file = create_in(directory, name)?;
        known.insert(file.path().to_owned());
        Ok((Registered(file.path().to_owned()), file))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        temporaries().remove(&self.0);
    }
}

/// Writes `path` with what `fill` writes. Any error, also one of `fill`, removes the temporary file and leaves an
/// earlier file alone.
pub fn write_with(
    path: &Path,
    existing: Existing,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), FileError> {
    write_through(path, existing, None, fill)
}

/// Like [`write_with`]. Parts that killed processes left under the name `temporary` are removed: what of that name is
/// still being written is locked.
pub fn write_through(
    path: &Path,
    existing: Existing,
    temporary: Option<&str>,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), FileError> {
    let failed = |source| FileError::Write { path: path.to_path_buf(), source };
    // Known before the work, which may be long: a taken name.
    check_target(path, existing)?;
    let directory = directory_of(path);
    let _writing = WRITES.read().unwrap_or_else(PoisonError::into_inner);
    let (_registered, mut temporary) = Registered::create(directory, temporary).map_err(failed)?;
    let mut buffered = io::BufWriter::new(temporary.as_file_mut());
    fill(&mut buffered).and_then(|()| buffered.flush()).map_err(failed)?;
    drop(buffered);
    temporary.as_file().sync_all().map_err(failed)?;
    persist(temporary, path, existing)?;
    sync_directory(directory).map_err(failed)
}

/// Writes `bytes` to `path`; see [`write_with`].
pub fn write(path: &Path, existing: Existing, bytes: &[u8]) -> Result<(), FileError> {
    write_with(path, existing, |out| out.write_all(bytes))
}

fn check_target(path: &Path, existing: Existing) -> Result<(), FileError> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => Err(FileError::IsDirectory(path.to_path_buf())),
        Ok(found) if !found.is_file() && !found.is_symlink() => {
            Err(FileError::NotRegular(path.to_path_buf()))
        }
        Ok(_) if existing == Existing::Keep => Err(FileError::Exists(path.to_path_buf())),
        _ => Ok(()),
    }
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}

fn create_in(directory: &Path, name: Option<&str>) -> io::Result<NamedTempFile> {
    let prefix = match name {
        Some(name) => format!("{TEMPORARY}{name}-"),
        None => TEMPORARY.to_owned(),
    };
    if name.is_some() {
        let named = |file: &OsStr| file.as_encoded_bytes().starts_with(prefix.as_bytes());
        locked_file::remove_abandoned(directory, |file| named(file) && is_temporary(file))?;
    }
    locked_file::create_in(directory, &prefix, PARTIAL)
}

fn persist(temporary: NamedTempFile, path: &Path, existing: Existing) -> Result<(), FileError> {
    let result = match existing {
        Existing::Replace => temporary.persist(path),
        Existing::Keep => temporary.persist_noclobber(path),
    };
    result.map(drop).map_err(|e| match e.error.kind() {
        io::ErrorKind::AlreadyExists => FileError::Exists(path.to_path_buf()),
        _ => FileError::Write { path: path.to_path_buf(), source: e.error },
    })
}

/// Makes the new name itself survive a power cut, where the system can.
pub(crate) fn sync_directory(directory: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(directory)?.sync_all() } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn replaces_or_keeps() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out.png");
        write(&path, Existing::Keep, b"one").unwrap();
        let error = write(&path, Existing::Keep, b"two").unwrap_err();
        assert!(matches!(&error, FileError::Exists(p) if *p == path), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"one");
        write(&path, Existing::Replace, b"three").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"three");
        assert_eq!(names(directory.path()), ["out.png"]);
    }

    #[test]
    fn parts_of_one_name_disturb_each_other_only_when_they_are_abandoned() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = (directory.path().join("one.png"), directory.path().join("other.png"));
        fs::write(directory.path().join(".viaduct-run-old.partial"), "dead").unwrap();
        write_through(&one, Existing::Keep, Some("run"), |out| {
            write_through(&other, Existing::Keep, Some("run"), |out| out.write_all(b"other"))
                .map_err(io::Error::other)?;
            out.write_all(b"one")
        })
        .unwrap();
        assert_eq!(
            (fs::read(&one).unwrap(), fs::read(&other).unwrap()),
            (b"one".to_vec(), b"other".to_vec())
        );
        assert_eq!(names(directory.path()).len(), 2);
    }

    #[test]
    fn an_error_leaves_the_earlier_file_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out.png");
        write(&path, Existing::Keep, b"good").unwrap();
        let full = io::Error::from(io::ErrorKind::StorageFull);
        let error = write_with(&path, Existing::Replace, |out| {
            out.write_all(&[0; 100_000])?;
            Err(full)
        })
        .unwrap_err();
        assert!(error.to_string().contains("out.png: no storage space"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"good");
        assert_eq!(names(directory.path()), ["out.png"]);
    }

    #[test]
    fn a_file_that_appears_meanwhile_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out.png");
        let result = write_with(&path, Existing::Keep, |out| {
            fs::write(&path, b"theirs")?;
            out.write_all(b"ours")
        });
        assert!(matches!(result, Err(FileError::Exists(_))));
        assert_eq!(fs::read(&path).unwrap(), b"theirs");
        assert_eq!(names(directory.path()), ["out.png"]);
    }

    #[test]
    fn impossible_targets_are_named() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(write(directory.path(), Existing::Replace, b""), Err(FileError::IsDirectory(_))));
        assert!(matches!(write(Path::new("/"), Existing::Replace, b""), Err(FileError::IsDirectory(_))));
        let missing = directory.path().join("no/such/out.png");
        let error = write(&missing, Existing::Replace, b"").unwrap_err();
        assert!(error.to_string().contains("no/such/out.png"), "{error}");
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(matches!(write(&file.join("out"), Existing::Keep, b""), Err(FileError::Write { .. })));
    }

    #[test]
    #[cfg(unix)]
    fn others_may_read_what_the_umask_lets_them() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let (ours, plain) = (directory.path().join("ours"), directory.path().join("plain"));
        write(&ours, Existing::Keep, b"").unwrap();
        fs::write(&plain, b"").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&ours), mode(&plain));
    }
}
