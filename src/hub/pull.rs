//! Whole models: which files of a repository make one, and whether the cache has them all.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde_json::Value;
use viaduct_export::{
    bundle::{Bundle, BundleError, CONFIG, ExportError, MANIFEST, Manifest, needed_files},
    weights::{Arrivals, Checkpoint, read_json},
};

use super::{
    Arriving, ContentId, Hub, Tell, Teller,
    error::HubError,
    listing::{Listing, RemoteFile},
    reference::RepoId,
};
use crate::pipeline::event::Event;

/// Files by which people read a repository, and no model is run.
const FOR_PEOPLE: &[&str] =
    &["md", "png", "jpg", "jpeg", "gif", "webp", "svg", "mp4", "gitattributes", "gitignore"];

/// What makes a repository a checkpoint.
const CHECKPOINT: &str = "model_index.json";
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

/// What a model is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// To be looked at: graphs or config files do, weights need not be there.
    Description,
    /// To be run, or exported.
    Weights,
}

impl Need {
    /// Opens the bundle of a folder that holds what is needed.
    pub fn open(self, folder: &Path) -> Result<Bundle, BundleError> {
        match self {
            Need::Description => Bundle::open_graphs(folder),
            Need::Weights => Bundle::open(folder),
        }
    }
}

impl Hub {
    /// Brings a repository's model as it is on the hub now. What is in the cache already is not brought again.
    pub fn pull(&self, repo: &RepoId, selection: Selection, tell: Tell<'_>) -> Result<Pulled, HubError> {
        let listing = self.list(repo, tell)?;
        let (files, came) = match selection {
            Selection::All => (listing.files.keys().cloned().collect(), 0),
            Selection::Model => self.model_files(&listing, tell)?,
        };
        let came = came + self.fetch(&listing, &files, tell)?;
        self.shelf(repo).refer(&listing.commit)?;
        let bytes = files.iter().filter_map(|name| listing.files.get(name)).map(|file| file.bytes).sum();
        Ok(Pulled { folder: self.folder(&listing), commit: listing.commit, files, bytes, came })
    }

    /// The folder of a model: from the cache if what is needed is there, without a word to the hub; else it is brought.
    pub fn open(&self, repo: &RepoId, need: Need, tell: Tell<'_>) -> Result<PathBuf, HubError> {
        if let Some(folder) = self.cached(repo).filter(|folder| suffices(folder, need)) {
            return Ok(folder);
        }
        self.check_online(repo)?;
        match need {
            Need::Weights => Ok(self.pull(repo, Selection::Model, tell)?.folder),
            Need::Description => {
                let listing = self.list(repo, tell)?;
                self.describe(&listing, tell)?;
                self.shelf(repo).refer(&listing.commit)?;
                Ok(self.folder(&listing))
            }
        }
    }

    /// For an export with that recipe and those changes of it: the folder of a checkpoint, and its weight files where they
    /// still have to come.
    pub fn checkpoint(
        &self,
        repo: &RepoId,
        recipe: Option<&str>,
        set: &[(String, String)],
        tell: Teller,
    ) -> Result<(PathBuf, Option<Arriving>), HubError> {
        let is_whole = |folder: &PathBuf| {
            suffices(folder, Need::Weights) || needed_files(folder, None, recipe, set).is_ok()
        };
        if let Some(folder) = self.cached(repo).filter(is_whole) {
            return Ok((folder, None));
        }
        self.check_online(repo)?;
        let listing = self.list(repo, &*tell)?;
        self.describe(&listing, &*tell)?;
        self.shelf(repo).refer(&listing.commit)?;
        let folder = self.folder(&listing);
        Ok((folder, Some(Arriving::new(self.clone(), listing, tell))))
    }

    fn check_online(&self, repo: &RepoId) -> Result<(), HubError> {
        match self.settings.offline {
            true => Err(HubError::Offline { repo: repo.clone(), cache: self.settings.cache.clone() }),
            false => Ok(()),
        }
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
        } else if has(CHECKPOINT) {
            (configs(listing), 0)
        } else {
            return Err(HubError::NoModel { repo: repo.clone() });
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

/// Whether a folder has what is needed of its model, in the sizes that the files must have.
pub(super) fn suffices(folder: &Path, need: Need) -> bool {
    let is_checkpoint = !Bundle::is_at(folder) && folder.join(CHECKPOINT).exists();
    match (is_checkpoint, need) {
        (false, need) => need.open(folder).is_ok(),
        (true, Need::Description) => components(folder).iter().all(|component| component.is_dir()),
        (true, Need::Weights) => needed_files(folder, None, None, &[]).is_ok() || is_complete(folder),
    }
}

/// Whether a checkpoint has all weights of all components, whatever a recipe wants of them.
fn is_complete(folder: &Path) -> bool {
    // Tokenizers and schedulers have configs of other names.
    let has_all = |component: &PathBuf| match component.join("config.json").exists() {
        true => Checkpoint::open(component).is_ok_and(|weights| weights.is_complete()),
        false => component.is_dir(),
    };
    components(folder).iter().all(has_all)
}

/// The folders of a checkpoint that its index names.
fn components(folder: &Path) -> Vec<PathBuf> {
    let index = read_json::<BTreeMap<String, Value>>(&folder.join(CHECKPOINT)).unwrap_or_default();
    // `["diffusers", "AutoencoderKL"]`; other entries are settings, and `[null, null]` is a part that is left out.
    let is_component = |value: &Value| value.get(1).is_some_and(Value::is_string);
    let named = index.into_iter().filter(|(_, value)| is_component(value));
    named.map(|(name, _)| folder.join(name)).collect()
}

fn ending(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(_, ending)| ending)
}
