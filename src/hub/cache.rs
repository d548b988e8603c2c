//! The cache's layout, which all tools for the hub share: contents under their hash, and for each commit links to them
//! under their names. <https://huggingface.co/docs/huggingface_hub/guides/manage-cache>

use std::{
    fs::{self, File, TryLockError},
    io::{self, Write},
    os::unix::fs::{MetadataExt, symlink},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use tempfile::Builder;
use viaduct_export::locked_file;

use super::{digest::ContentId, error::HubError, listing::is_commit, reference::RepoId, stop::Stop};

/// Where locks are, so that a repository's folder holds nothing but its files.
const LOCKS: &str = ".locks";
/// The ending of files that say that a content came for an export alone.
pub(super) const MARK: &str = "exported";
/// How often a lock that another process holds is tried.
const RETRY: Duration = Duration::from_millis(100);
/// How the names of files begin that get their own one in the next moment.
const TEMPORARY: &str = ".viaduct-";

/// One repository's part of the cache.
pub(super) struct Shelf {
    /// The folder of the repository.
    folder: PathBuf,
    locks: PathBuf,
    revisions: CacheRepo,
    revision: String,
}

impl Shelf {
    pub(super) fn new(cache: &Path, repo: &RepoId) -> Shelf {
        let named = Repo::with_revision(repo.id.clone(), RepoType::Model, repo.revision.clone());
        let name = named.folder_name();
        Shelf {
            folder: cache.join(&name),
            locks: cache.join(LOCKS).join(&name),
            revisions: Cache::new(cache.to_owned()).repo(named),
            revision: repo.revision.clone(),
        }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn locks(&self) -> &Path {
        &self.locks
    }

    pub(super) fn blob(&self, id: &ContentId) -> PathBuf {
        self.revisions.blob_path(id.as_str())
    }

    /// The files of a commit.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.revisions.pointer_path(commit)
    }

    /// The files of the revision as it was last brought; they need not be complete.
    pub(super) fn current(&self) -> Option<PathBuf> {
        let commit = match is_commit(&self.revision) {
            true => self.revision.clone(),
            false => fs::read_to_string(self.reference()).ok()?.trim().to_owned(),
        };
        Some(self.snapshot(&commit)).filter(|folder| is_commit(&commit) && folder.is_dir())
    }

    fn reference(&self) -> PathBuf {
        self.folder.join("refs").join(&self.revision)
    }

    /// From now on the revision is that commit.
    pub(super) fn refer(&self, commit: &str) -> Result<(), HubError> {
        let path = self.reference();
        if self.revision == commit || fs::read_to_string(&path).is_ok_and(|text| text == commit) {
            return Ok(());
        }
        let write = || {
            let folder = make_parent(&path)?;
            let mut file = locked_file::create_in(folder, TEMPORARY, "")?;
            file.write_all(commit.as_bytes())?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            Ok(())
        };
        write().map_err(HubError::io(&path))
    }

    /// Gives a content its name in a commit.
    pub(super) fn link(&self, commit: &str, name: &str, id: &ContentId) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(name);
        // Out of the name's folders, the commit's and `snapshots`.
        let up = "../".repeat(name.split('/').count() + 1);
        let target = PathBuf::from(format!("{up}blobs/{id}"));
        let write = || {
            let folder = make_parent(&path)?;
            if fs::read_link(&path).is_ok_and(|link| link == target) {
                return Ok(());
            }
            let link = Builder::new().prefix(TEMPORARY).make_in(folder, |path| symlink(&target, path))?;
            link.into_temp_path().persist(&path)?;
            Ok(())
        };
        write().map_err(HubError::io(&path))
    }

    /// Held, shared, by those that read files which [`Hub::forget`](super::Hub) may remove.
    pub(super) fn in_use(&self) -> io::Result<File> {
        let path = self.locks.join("exports.lock");
        make_parent(&path)?;
        File::options().create(true).append(true).open(path)
    }

    pub(super) fn lock_path(&self, id: &str) -> PathBuf {
        self.locks.join(format!("{id}.lock"))
    }

    /// A file that says that a content came for an export alone.
    pub(super) fn mark(&self, id: &ContentId) -> PathBuf {
        self.locks.join(format!("{id}.{MARK}"))
    }

    /// The one place from which a content may be written. Waits for other processes that have it; `waiting` is called
    /// now and then meanwhile.
    pub(super) fn lock(
        &self,
        id: &ContentId,
        stop: &Stop<'_>,
        mut waiting: impl FnMut(),
    ) -> Result<File, HubError> {
        let path = self.lock_path(id.as_str());
        let try_lock = || {
            make_parent(&path)?;
            let file = File::options().create(true).append(true).open(&path)?;
            let free = match file.try_lock() {
                // Others remove a file that they have unlocked; a lock on it is none.
                Ok(()) => file.metadata()?.nlink() > 0,
                // Where files cannot be locked, the hash at the end tells whether two have written at once.
                Err(TryLockError::Error(_)) => true,
                Err(TryLockError::WouldBlock) => false,
            };
            Ok(free.then_some(file))
        };
        loop {
            if let Some(file) = try_lock().map_err(HubError::io(&path))? {
                return Ok(file);
            }
            waiting();
            if stop.is_asked() {
                return Err(HubError::Interrupted);
            }
            thread::sleep(RETRY);
        }
    }
}

fn make_parent(path: &Path) -> io::Result<&Path> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    Ok(folder)
}
