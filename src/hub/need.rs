//! What a model in the cache is wanted for, and whether its folder has that.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::Serialize;
use serde_json::Value;
use viaduct_export::{
    bundle::{Bundle, BundleError, CONFIG, MANIFEST, needed_files},
    weights::{Checkpoint, read_json},
};

use super::{error::HubError, listing::Listing};

/// What makes a folder a checkpoint.
pub(super) const CHECKPOINT: &str = "model_index.json";

/// What a repository holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Bundle,
    Checkpoint,
    /// Nothing that this program reads.
    Other,
}

impl Kind {
    /// By whether there is a file of that name.
    fn by(has: impl Fn(&str) -> bool) -> Kind {
        match has(CHECKPOINT) {
            _ if has(MANIFEST) || has(CONFIG) => Kind::Bundle,
            true => Kind::Checkpoint,
            false => Kind::Other,
        }
    }

    /// What a folder holds, by the file that describes it.
    pub fn of_folder(folder: &Path) -> Kind {
        Kind::by(|name| folder.join(name).exists())
    }

    pub(super) fn of_listing(listing: &Listing) -> Kind {
        Kind::by(|name| listing.files.contains_key(name))
    }
}

/// What a model is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// To be looked at, be it a bundle or a checkpoint: weights need not be there.
    Description,
    /// The graphs of a bundle.
    Graphs,
    /// A whole bundle.
    Bundle,
    /// A whole checkpoint.
    Checkpoint,
}

impl Need {
    /// Opens the bundle of a folder that has what is needed.
    pub fn open(self, folder: &Path) -> Result<Bundle, BundleError> {
        match self {
            Need::Description | Need::Graphs => Bundle::open_graphs(folder),
            Need::Bundle | Need::Checkpoint => Bundle::open(folder),
        }
    }

    /// Refuses a model of another kind than the one that is needed.
    pub(super) fn check(self, listing: &Listing) -> Result<(), HubError> {
        let repo = || listing.repo.clone();
        match (self, Kind::of_listing(listing)) {
            (_, Kind::Other) => Err(HubError::NoModel { repo: repo() }),
            (Need::Graphs | Need::Bundle, Kind::Checkpoint) => Err(HubError::IsCheckpoint { repo: repo() }),
            (Need::Checkpoint, Kind::Bundle) => Err(HubError::IsBundle { repo: repo() }),
            _ => Ok(()),
        }
    }

    /// Whether a folder has what is needed, in the sizes that the files must have.
    pub(super) fn is_met(self, folder: &Path) -> bool {
        match (self, Kind::of_folder(folder)) {
            (Need::Description | Need::Graphs | Need::Bundle, Kind::Bundle) => self.open(folder).is_ok(),
            (Need::Description, Kind::Checkpoint) => {
                components(folder).iter().all(|component| component.is_dir())
            }
            (Need::Checkpoint, Kind::Checkpoint) => {
                needed_files(folder, None, None, &[]).is_ok() || is_complete(folder)
            }
            _ => false,
        }
    }
}

/// Whether a folder has the whole of a model.
pub(super) fn is_whole(folder: &Path) -> bool {
    Need::Bundle.is_met(folder) || Need::Checkpoint.is_met(folder)
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
pub(super) fn components(folder: &Path) -> Vec<PathBuf> {
    let index = read_json::<BTreeMap<String, Value>>(&folder.join(CHECKPOINT)).unwrap_or_default();
    // `["diffusers", "AutoencoderKL"]`; other entries are settings, and `[null, null]` is a part that is left out.
    let is_component = |value: &Value| value.get(1).is_some_and(Value::is_string);
    let named = index.into_iter().filter(|(_, value)| is_component(value));
    named.map(|(name, _)| folder.join(name)).collect()
}
