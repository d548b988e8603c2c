//! What in the cache nobody needs any more, or cannot use: broken-off transfers, weights that only an export wanted, older
//! revisions, damaged files.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{OsStr, OsString},
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use viaduct_export::bytes::ByteSize;

use super::{
    Hub, Tell,
    cache::{MARK, Shelf},
    digest::ContentId,
    error::HubError,
    listing::{Listing, RemoteFile},
    reference::RepoId,
    shelves::{blobs, remove_folder, revisions},
    stop::Stop,
    transfer::{hash, incomplete, is_there},
};
use crate::pipeline::event::Event;

impl Hub {
    /// After a pull: transfers that were broken off and can no more be gone on with go, files that an export brought stay from
    /// now on, and of older revisions is told.
    pub(super) fn settle(&self, listing: &Listing, names: &[String], tell: Tell<'_>) {
        let shelf = self.shelf(&listing.repo);
        for file in names.iter().filter_map(|name| listing.files.get(name)) {
            let _ = fs::remove_file(shelf.mark(&file.id));
        }
        let wanted: BTreeSet<&str> = listing.files.values().map(|file| file.id.as_str()).collect();
        for (path, _) in blobs(shelf.folder()) {
            let id = path.file_stem().and_then(OsStr::to_str).unwrap_or_default();
            // Other tools name theirs otherwise, and may be at work on them.
            let is_broken_off = path.extension() == Some(OsStr::new("incomplete")) && ContentId::is_one(id);
            let is_of_use = wanted.contains(id) && !path.with_extension("").exists();
            if is_broken_off && !is_of_use && !is_locked(&shelf.lock_path(id)) {
                let _ = fs::remove_file(path);
            }
        }
        let old: u64 = self.old(&shelf).1.iter().map(|(_, bytes)| bytes).sum();
        if old > 0 {
            let (id, old) = (&listing.repo.id, ByteSize(old));
            tell(Event::note(format!(
                "{id}: older revisions keep {old}; `viaduct rm --old {id}` removes them"
            )));
        }
    }

    /// Notes that a file came for an export alone.
    pub(super) fn mark(&self, listing: &Listing, name: &str) {
        if let Some(file) = listing.files.get(name) {
            // Without the mark the file stays, which is no harm.
            let _ = File::create(self.shelf(&listing.repo).mark(&file.id));
        }
    }

    /// Removes the weight files that exports, and they alone, have brought, and tells how many bytes that gave.
    pub(super) fn forget(&self, repo: &RepoId) -> Result<u64, HubError> {
        let (shelf, mut freed) = (self.shelf(repo), 0);
        let marked = self.marked(&shelf);
        let all = links(&shelf.folder().join("snapshots")).into_iter();
        for (link, _) in all.filter(|(_, content)| marked.contains_key(content)) {
            remove(&link)?;
        }
        for (path, bytes) in blobs(shelf.folder()) {
            if let Some(mark) = path.file_name().and_then(|name| marked.get(name)) {
                remove(&path)?;
                remove(mark)?;
                freed += bytes;
            }
        }
        Ok(freed)
    }

    /// Files that exports have brought stay from now on.
    pub(super) fn unmark(&self, repo: &RepoId) -> Result<(), HubError> {
        self.marked(&self.shelf(repo)).values().try_for_each(|mark| remove(mark))
    }

    /// By content, the marks of those that exports have brought.
    fn marked(&self, shelf: &Shelf) -> BTreeMap<OsString, PathBuf> {
        let marks = fs::read_dir(shelf.locks()).into_iter().flatten().flatten().map(|entry| entry.path());
        let marks = marks.filter(|path| path.extension() == Some(OsStr::new(MARK)));
        marks.filter_map(|path| Some((path.file_stem()?.to_owned(), path.clone()))).collect()
    }

    /// Removes the snapshots that no branch or tag stands for any more, and what only they hold; tells how many bytes that gave.
    pub fn remove_old(&self, repo: &RepoId) -> Result<u64, HubError> {
        self.check_removable(repo)?;
        let shelf = self.shelf(repo);
        let (snapshots, contents) = self.old(&shelf);
        for snapshot in snapshots {
            remove_folder(&snapshot)?;
        }
        for (path, _) in &contents {
            remove(path)?;
        }
        Ok(contents.iter().map(|(_, bytes)| bytes).sum())
    }

    /// Snapshots that no revision stands for, and contents that no other snapshot links to. None where no revision is known.
    fn old(&self, shelf: &Shelf) -> (Vec<PathBuf>, Vec<(PathBuf, u64)>) {
        let kept: BTreeSet<OsString> = revisions(shelf.folder()).into_values().map(OsString::from).collect();
        if kept.is_empty() {
            return Default::default();
        }
        let snapshots = fs::read_dir(shelf.folder().join("snapshots")).into_iter().flatten().flatten();
        let (current, old): (Vec<PathBuf>, Vec<PathBuf>) = snapshots
            .map(|entry| entry.path())
            .partition(|path| path.file_name().is_some_and(|commit| kept.contains(commit)));
        let linked: BTreeSet<OsString> =
            current.iter().flat_map(|folder| links(folder)).map(|(_, content)| content).collect();
        let is_old = |(path, _): &(PathBuf, u64)| {
            path.extension().is_none() && path.file_name().is_some_and(|name| !linked.contains(name))
        };
        (old, blobs(shelf.folder()).filter(is_old).collect())
    }

    /// Hashes what is there of files, and removes what is damaged, so that it is brought again.
    pub(super) fn remove_damaged(
        &self,
        listing: &Listing,
        names: &[String],
        tell: Tell<'_>,
    ) -> Result<(), HubError> {
        let (shelf, stop) = (self.shelf(&listing.repo), Stop::by(&self.stop));
        for (name, RemoteFile { bytes, id }) in names.iter().filter_map(|n| Some((n, listing.files.get(n)?)))
        {
            let blob = shelf.blob(id);
            if is_there(&blob, *bytes) && hash(&blob, id, *bytes, &stop)? != *id {
                let repo = &listing.repo;
                tell(Event::warning(format!("{repo}: {name} is damaged; it is brought again")));
                remove(&blob)?;
                let _ = fs::remove_file(incomplete(&blob));
            }
        }
        Ok(())
    }
}

fn is_locked(lock: &Path) -> bool {
    File::open(lock).is_ok_and(|file| file.try_lock().is_err())
}

/// The links below a folder, and the contents that they lead to.
fn links(folder: &Path) -> Vec<(PathBuf, OsString)> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(entry.path());
            } else if let Ok(target) = fs::read_link(entry.path()) {
                found.extend(target.file_name().map(|content| (entry.path(), content.to_owned())));
            }
        }
    }
    found
}

fn remove(path: &Path) -> Result<(), HubError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(HubError::io(path)(error)),
        _ => Ok(()),
    }
}
