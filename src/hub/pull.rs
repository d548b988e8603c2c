//! Whole models: which files of a repository make one, and whether the cache has them all.

use std::path::{Path, PathBuf};

use viaduct_export::bundle::{Bundle, CONFIG, MANIFEST, Manifest};

use super::{
    ContentId, Hub, Tell,
    error::HubError,
    listing::{Listing, RemoteFile},
    reference::RepoId,
};
use crate::pipeline::event::Event;

/// Files by which people read a repository, and no model is run.
const FOR_PEOPLE: &[&str] =
    &["md", "png", "jpg", "jpeg", "gif", "webp", "svg", "mp4", "gitattributes", "gitignore"];

/// A model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    pub commit: String,
    /// The snapshot.
    pub folder: PathBuf,
    /// Names of the model's files.
    pub files: Vec<String>,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that came over the network.
    pub came: u64,
}

/// Which files of a repository are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// Those that the model is run or exported from.
    Model,
    All,
}

impl Hub {
    /// Brings a repository's model as it is on the hub now. What is in the cache already is not brought again.
    pub fn pull(&self, repo: &RepoId, selection: Selection, tell: Tell<'_>) -> Result<Pulled, HubError> {
        let listing = self.list(repo)?;
        if let Some(license) = listing.license.as_ref().filter(|_| self.is_new(&listing)) {
            tell(Event::note(format!("{repo}: licence {license}")));
        }
        let (files, came) = match selection {
            Selection::All => (listing.files.keys().cloned().collect(), 0),
            Selection::Model => self.model_files(&listing, tell)?,
        };
        let came = came + self.fetch(&listing, &files, tell)?;
        self.shelf(repo).refer(&listing.commit)?;
        let bytes = files.iter().filter_map(|name| listing.files.get(name)).map(|file| file.bytes).sum();
        Ok(Pulled { folder: self.folder(&listing), commit: listing.commit, files, bytes, came })
    }

    /// The folder of a model: from the cache if it is whole there, without a word to the hub; else it is pulled.
    pub fn open(&self, repo: &RepoId, tell: Tell<'_>) -> Result<PathBuf, HubError> {
        if let Some(folder) = self.cached(repo).filter(|folder| is_whole(folder)) {
            return Ok(folder);
        }
        if self.settings.offline {
            return Err(HubError::Offline { repo: repo.clone(), cache: self.settings.cache.clone() });
        }
        Ok(self.pull(repo, Selection::Model, tell)?.folder)
    }

    /// Whether none of the repository's commits is in the cache.
    fn is_new(&self, listing: &Listing) -> bool {
        !self.shelf(&listing.repo).snapshot(&listing.commit).exists()
    }

    /// The files of the model; what has to be read to know them is brought. With the bytes that came.
    fn model_files(&self, listing: &Listing, tell: Tell<'_>) -> Result<(Vec<String>, u64), HubError> {
        let has = |name: &str| listing.files.contains_key(name);
        if has(MANIFEST) {
            let came = self.fetch(listing, &[MANIFEST.to_owned()], tell)?;
            let manifest = Manifest::read(&self.folder(listing))?;
            return Ok((bundle_files(listing, &manifest)?, came));
        }
        if has(CONFIG) {
            let names = listing.files.keys().filter(|name| !FOR_PEOPLE.contains(&ending(name)));
            return Ok((names.cloned().collect(), 0));
        }
        Err(HubError::NoModel { repo: listing.repo.clone() })
    }
}

/// The files that a bundle's manifest names, which must be those of the repository.
fn bundle_files(listing: &Listing, manifest: &Manifest) -> Result<Vec<String>, HubError> {
    let mut names = vec![MANIFEST.to_owned()];
    for entry in &manifest.files {
        let RemoteFile { bytes, id } = listing.file(&entry.path, MANIFEST)?;
        let disagrees = |found: String, expected: String| HubError::Disagrees {
            repo: listing.repo.clone(),
            file: entry.path.clone(),
            expected,
            found,
        };
        if *bytes != entry.bytes {
            return Err(disagrees(format!("{bytes} bytes"), format!("{} bytes", entry.bytes)));
        }
        match id {
            ContentId::Sha256(sha256) if *sha256 != entry.sha256 => {
                return Err(disagrees(format!("of hash {sha256}"), entry.sha256.clone()));
            }
            _ => names.push(entry.path.clone()),
        }
    }
    Ok(names)
}

/// Whether all files of a model are there, in the sizes that they must have.
pub(super) fn is_whole(folder: &Path) -> bool {
    Bundle::is_at(folder) && Bundle::open(folder).is_ok()
}

fn ending(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(_, ending)| ending)
}
