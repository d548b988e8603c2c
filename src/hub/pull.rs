//! Whole models: which files of a repository make one, and whether the cache has them all.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

use viaduct_export::{
    bundle::{CONFIG, ExportError, MANIFEST, Manifest, needed_files},
    weights::Arrivals,
};

use super::{
    Arriving, ContentId, Hub, Tell, Teller,
    error::HubError,
    listing::{Listing, RemoteFile},
    need::{Need, components, is_whole},
    reference::RepoId,
};
use crate::pipeline::event::Event;

/// Files by which people read a repository, and no model is run.
const FOR_PEOPLE: &[&str] =
    &["md", "png", "jpg", "jpeg", "gif", "webp", "svg", "mp4", "gitattributes", "gitignore"];

/// Files of a checkpoint beside its weights.
const CONFIGS: &[&str] = &["json", "txt", "jinja", "model", "toml"];
/// Larger than any of them.
const MAX_CONFIG: u64 = 64 << 20;

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

/// A checkpoint that is being exported.
pub struct Checkout {
    pub folder: PathBuf,
    /// Its weight files, where they still have to come.
    pub arriving: Option<Arc<Arriving>>,
    hub: Hub,
    repo: RepoId,
    in_use: File,
}

impl Checkout {
    pub fn repo(&self) -> &RepoId {
        &self.repo
    }

    /// Ends the export. Weight files that exports alone have brought go, unless another export reads them; tells how many bytes
    /// that gave.
    pub fn forget(self) -> Result<u64, HubError> {
        let alone = self.in_use.unlock().and_then(|()| Ok(self.in_use.try_lock()?));
        match alone {
            Ok(()) => self.hub.forget(&self.repo),
            Err(_) => Ok(0),
        }
    }

    /// Ends the export; all files stay.
    pub fn keep(self) -> Result<(), HubError> {
        self.hub.unmark(&self.repo)
    }
}

impl Hub {
    /// Brings a repository's model as it is on the hub now. What is in the cache already is not brought again; `check` has it
    /// hashed, and brought again where it is damaged. Offline, a model that is whole in the cache is taken as it is.
    pub fn pull(
        &self,
        repo: &RepoId,
        selection: Selection,
        check: bool,
        tell: Tell<'_>,
    ) -> Result<Pulled, HubError> {
        if self.settings.offline {
            return self.pulled_offline(repo, tell);
        }
        self.bring(self.list(repo, tell)?, selection, check, tell)
    }

    fn bring(
        &self,
        listing: Listing,
        selection: Selection,
        check: bool,
        tell: Tell<'_>,
    ) -> Result<Pulled, HubError> {
        // What is found now, no export removes.
        let _in_use = self.use_of(&listing.repo)?;
        let (files, came) = match selection {
            Selection::All => (listing.files.keys().cloned().collect(), 0),
            Selection::Model => {
                Need::Description.check(&listing)?;
                self.model_files(&listing, tell)?
            }
        };
        if check {
            self.remove_damaged(&listing, &files, tell)?;
        }
        let came = came + self.fetch(&listing, &files, tell)?;
        self.shelf(&listing.repo).refer(&listing.commit)?;
        self.settle(&listing, &files, tell);
        let bytes = files.iter().filter_map(|name| listing.files.get(name)).map(|file| file.bytes).sum();
        Ok(Pulled { folder: self.folder(&listing), commit: listing.commit, files, bytes, came })
    }

    fn pulled_offline(&self, repo: &RepoId, tell: Tell<'_>) -> Result<Pulled, HubError> {
        let folder = self.cached(repo).filter(|folder| is_whole(folder));
        let folder = folder.ok_or_else(|| HubError::PullOffline { repo: repo.clone() })?;
        tell(Event::note(format!(
            "{repo}: HF_HUB_OFFLINE is set; this is the revision that is in the cache"
        )));
        let commit = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Pulled { commit, folder, files: Vec::new(), bytes: 0, came: 0 })
    }

    /// The folder of a model: from the cache if what is needed is there, without a word to the hub; else it is brought.
    pub fn open(&self, repo: &RepoId, need: Need, tell: Tell<'_>) -> Result<PathBuf, HubError> {
        if let Some(folder) = self.cached(repo).filter(|folder| need.is_met(folder)) {
            return Ok(folder);
        }
        let listing = self.ask_for(repo, need, tell)?;
        match need {
            Need::Description | Need::Graphs => {
                self.describe(&listing, tell)?;
                self.shelf(repo).refer(&listing.commit)?;
                Ok(self.folder(&listing))
            }
            Need::Bundle | Need::Checkpoint => Ok(self.bring(listing, Selection::Model, false, tell)?.folder),
        }
    }

    /// A checkpoint for an export with that recipe and those changes of it.
    pub fn checkpoint(
        &self,
        repo: &RepoId,
        recipe: Option<&str>,
        set: &[(String, String)],
        tell: Teller,
    ) -> Result<Checkout, HubError> {
        let in_use = self.use_of(repo)?;
        let checkout =
            |folder, arriving| Checkout { folder, arriving, hub: self.clone(), repo: repo.clone(), in_use };
        let is_whole = |folder: &PathBuf| {
            Need::Checkpoint.is_met(folder) || needed_files(folder, None, recipe, set).is_ok()
        };
        if let Some(folder) = self.cached(repo).filter(is_whole) {
            return Ok(checkout(folder, None));
        }
        let listing = self.ask_for(repo, Need::Checkpoint, &*tell)?;
        self.describe(&listing, &*tell)?;
        self.shelf(repo).refer(&listing.commit)?;
        let folder = self.folder(&listing);
        Ok(checkout(folder, Some(Arc::new(Arriving::new(self.clone(), listing, tell)))))
    }

    /// As long as the file lives, no export of another process removes the repository's weights.
    fn use_of(&self, repo: &RepoId) -> Result<File, HubError> {
        let shelf = self.shelf(repo);
        let in_use = shelf.in_use().map_err(HubError::io(shelf.locks()))?;
        // Where files cannot be locked, two processes at once are the user's matter.
        let _ = in_use.lock_shared();
        Ok(in_use)
    }

    /// Asks the hub what there is of a model that is not in the cache.
    fn ask_for(&self, repo: &RepoId, need: Need, tell: Tell<'_>) -> Result<Listing, HubError> {
        if self.settings.offline {
            return Err(HubError::Offline { repo: repo.clone(), cache: self.settings.cache.clone() });
        }
        tell(Event::note(format!(
            "{repo} is no path here, and not in the cache as a whole: asking {}",
            self.settings.endpoint
        )));
        let listing = self.list(repo, tell)?;
        need.check(&listing)?;
        Ok(listing)
    }

    /// Brings what tells of a model without its weights, and returns the bytes that came. Of the licence is told when a
    /// commit's files come for the first time.
    fn describe(&self, listing: &Listing, tell: Tell<'_>) -> Result<u64, HubError> {
        let (repo, folder) = (&listing.repo, self.folder(listing));
        let is_new = !folder.exists();
        let has = |name: &str| listing.files.contains_key(name);
        let (names, came) = if has(MANIFEST) {
            let came = self.fetch(listing, &[MANIFEST.to_owned()], tell)?;
            let manifest = Manifest::read(&folder)?;
            let files = bundle_files(listing, &manifest)?;
            (files.into_iter().filter(|name| manifest.is_graph(name)).collect(), came)
        } else if has(CONFIG) {
            // What such a bundle consists of shows only when all of it is there.
            (of_another_layout(listing), 0)
        } else {
            (configs(listing), 0)
        };
        let names: Vec<String> = names;
        let came = came + self.fetch(listing, &names, tell)?;
        let of_bundle = || Manifest::read(&folder).ok()?.source.license;
        if let Some(license) = listing.license.clone().or_else(of_bundle).filter(|_| is_new) {
            tell(Event::note(format!("{repo}: licence {license}")));
        }
        Ok(came)
    }

    /// The files of the model; those that have to be read to know them are brought. With the bytes that came.
    fn model_files(&self, listing: &Listing, tell: Tell<'_>) -> Result<(Vec<String>, u64), HubError> {
        let came = self.describe(listing, tell)?;
        let folder = self.folder(listing);
        if listing.files.contains_key(MANIFEST) {
            return Ok((bundle_files(listing, &Manifest::read(&folder)?)?, came));
        }
        if listing.files.contains_key(CONFIG) {
            return Ok((of_another_layout(listing), came));
        }
        let mut names = configs(listing);
        let silent: Teller = Arc::new(|_| ());
        let arrivals: Arc<dyn Arrivals> = Arc::new(Arriving::new(self.clone(), listing.clone(), silent));
        let name = |path: PathBuf| Some(path.strip_prefix(&folder).ok()?.to_str()?.to_owned());
        match needed_files(&folder, Some(&arrivals), None, &[]) {
            Ok(needed) => names.extend(needed.into_iter().filter_map(name)),
            Err(error @ (ExportError::Arch(_) | ExportError::Recipe(_))) => {
                // Which tensors another recipe wants is not known.
                let (repo, error) = (&listing.repo, error.to_string());
                tell(Event::note(format!("{repo}: all weights of its components are wanted: {error}")));
                names.extend(weights(listing, &folder));
            }
            Err(error) => return Err(HubError::Checkpoint(Box::new(error))),
        }
        Ok((names, came))
    }
}

/// The files of a checkpoint that hold no weights: configs, tokenizers, indices of shards.
fn configs(listing: &Listing) -> Vec<String> {
    let is_config = |(name, file): &(&String, &RemoteFile)| {
        CONFIGS.contains(&ending(name)) && name.matches('/').count() < 2 && file.bytes <= MAX_CONFIG
    };
    listing.files.iter().filter(is_config).map(|(name, _)| name.clone()).collect()
}

/// The weight files of a checkpoint's components.
fn weights(listing: &Listing, folder: &Path) -> Vec<String> {
    let components = components(folder);
    let is_weights = |name: &&String| {
        let inside = folder.join(name);
        ending(name) == "safetensors" && components.iter().any(|component| inside.parent() == Some(component))
    };
    listing.files.keys().filter(is_weights).cloned().collect()
}

/// The files of a bundle that does not list them.
fn of_another_layout(listing: &Listing) -> Vec<String> {
    listing.files.keys().filter(|name| !FOR_PEOPLE.contains(&ending(name))).cloned().collect()
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

fn ending(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(_, ending)| ending)
}
