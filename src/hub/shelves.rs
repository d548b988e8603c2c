//! What is in the cache, what it takes, and how it goes.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde::Serialize;
use tempfile::Builder;
use viaduct_export::bundle::Manifest;

use super::{
    Hub,
    cache::Shelf,
    error::HubError,
    listing::is_commit,
    need::{Kind, is_whole},
    reference::{MAIN, RepoId},
};

/// How the cache names a model's folder.
const MODELS: &str = "models--";
/// How a folder is named that is being removed.
const REMOVED: &str = ".viaduct-removed-";
/// The unit in which the system counts what a file takes.
const BLOCK: u64 = 512;

/// One repository in the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Kept {
    pub repo: String,
    pub kind: Kind,
    /// By revision, the commit that it stood for when it was last brought.
    pub revisions: BTreeMap<String, String>,
    /// Whether the newest commit has all files of its model.
    pub whole: bool,
    /// Bytes on the disk, those of broken-off transfers included.
    pub bytes: u64,
    /// Bytes of broken-off transfers.
    pub incomplete: u64,
    /// Whether a process is bringing files.
    pub busy: bool,
    pub license: Option<String>,
}

impl Hub {
    /// The repositories in the cache, by name.
    pub fn kept(&self) -> Result<Vec<Kept>, HubError> {
        let cache = &self.settings.cache;
        let entries = match fs::read_dir(cache) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(HubError::io(cache))?,
        };
        let mut kept: Vec<Kept> = entries.flatten().filter_map(|entry| kept(cache, &entry.path())).collect();
        kept.sort_by(|a, b| a.repo.cmp(&b.repo));
        Ok(kept)
    }

    /// Refuses a repository that is not in the cache, or of which a process is bringing or exporting files.
    pub fn check_removable(&self, repo: &RepoId) -> Result<(), HubError> {
        let shelf = self.shelf(repo);
        if !shelf.folder().is_dir() {
            return Err(HubError::NotCached { repo: repo.clone(), cache: self.settings.cache.clone() });
        }
        match is_used(shelf.locks()) {
            true => Err(HubError::InUse { repo: repo.clone() }),
            false => Ok(()),
        }
    }

    /// Removes all revisions of a repository from the cache, and tells how many bytes that gave.
    ///
    /// # Errors
    /// Those of [`Hub::check_removable`].
    pub fn remove(&self, repo: &RepoId) -> Result<u64, HubError> {
        self.check_removable(repo)?;
        let shelf = self.shelf(repo);
        let folder = shelf.folder();
        let bytes = blobs(folder).map(|(_, bytes)| bytes).sum();
        remove_folder(folder)?;
        let _ = fs::remove_dir_all(shelf.locks());
        Ok(bytes)
    }
}

/// Removes a folder in one step, so that nobody finds half of it. Of a link, what it leads to goes, too.
pub(super) fn remove_folder(folder: &Path) -> Result<(), HubError> {
    let failed = || HubError::io(folder);
    let real = fs::canonicalize(folder).map_err(failed())?;
    let above = real.parent().unwrap_or(Path::new("/"));
    // What a process that was killed has left.
    for entry in fs::read_dir(above).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(REMOVED.as_bytes()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    let removed = Builder::new().prefix(REMOVED).tempdir_in(above).map_err(failed())?;
    fs::rename(&real, removed.path().join("it")).map_err(failed())?;
    if folder.is_symlink() {
        fs::remove_file(folder).map_err(failed())?;
    }
    removed.close().map_err(failed())
}

/// Whether a process holds one of the locks.
pub(super) fn is_used(locks: &Path) -> bool {
    let files = fs::read_dir(locks).into_iter().flatten().flatten();
    files.filter_map(|entry| File::open(entry.path()).ok()).any(|file| file.try_lock().is_err())
}

fn kept(cache: &Path, folder: &Path) -> Option<Kept> {
    let name = folder.file_name()?.to_str()?.strip_prefix(MODELS)?;
    let repo: RepoId = name.replacen("--", "/", 1).parse().ok()?;
    let revisions = revisions(folder);
    let snapshot = newest(folder, &revisions);
    let kind = snapshot.as_deref().map_or(Kind::Other, Kind::of_folder);
    let license = snapshot.as_deref().and_then(|folder| Manifest::read(folder).ok()?.source.license);
    let incomplete = |(name, _): &(PathBuf, u64)| name.extension() == Some(OsStr::new("incomplete"));
    let busy = is_used(Shelf::new(cache, &repo).locks());
    Some(Kept {
        repo: repo.id,
        busy,
        kind,
        whole: snapshot.as_deref().is_some_and(is_whole),
        bytes: blobs(folder).map(|(_, bytes)| bytes).sum(),
        incomplete: blobs(folder).filter(incomplete).map(|(_, bytes)| bytes).sum(),
        revisions,
        license,
    })
}

/// By revision, its commit. A revision's name may have slashes.
pub(super) fn revisions(folder: &Path) -> BTreeMap<String, String> {
    let root = folder.join("refs");
    let (mut found, mut folders) = (BTreeMap::new(), vec![root.clone()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(path);
                continue;
            }
            let commit = fs::read_to_string(&path).unwrap_or_default().trim().to_owned();
            let name = path.strip_prefix(&root).ok().and_then(Path::to_str);
            found.extend(name.filter(|_| is_commit(&commit)).map(|name| (name.to_owned(), commit.clone())));
        }
    }
    found
}

/// The snapshot of the main branch, else the one that was made last.
fn newest(folder: &Path, revisions: &BTreeMap<String, String>) -> Option<PathBuf> {
    let snapshots = folder.join("snapshots");
    let main = revisions.get(MAIN).map(|commit| snapshots.join(commit)).filter(|folder| folder.is_dir());
    let made = |path: &PathBuf| {
        fs::metadata(path).and_then(|metadata| metadata.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
    };
    let all = || fs::read_dir(&snapshots).into_iter().flatten().flatten().map(|entry| entry.path());
    main.or_else(|| all().max_by_key(made))
}

/// Files of a repository's folder that hold contents, and what they take on the disk.
pub(super) fn blobs(folder: &Path) -> impl Iterator<Item = (PathBuf, u64)> {
    let files = fs::read_dir(folder.join("blobs")).into_iter().flatten().flatten();
    files.filter_map(|entry| Some((entry.path(), entry.metadata().ok()?.blocks() * BLOCK)))
}
