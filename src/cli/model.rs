//! Where a model is that the user names: a folder, or a repository that is in the cache or is brought there.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use clap::Args;

use super::{
    exit::UsageError,
    interrupt::{leave_with, on_interrupt},
    progress::Progress,
};
use crate::{
    hub::{Hub, HubError, Kind, ModelName, Need, RepoId, Settings},
    pipeline::event::{Event, Listener},
};

#[derive(Args)]
pub struct ModelArguments {
    /// Take repositories (owner/name) from this local folder instead of the hub and its cache: from DIR/owner/name or DIR/name,
    /// or DIR itself if it is a model
    #[arg(long, value_name = "DIR", env = "VIADUCT_MODEL_DIR")]
    pub model_dir: Option<PathBuf>,
}

impl ModelArguments {
    /// The folder of a model. A repository that is not in the cache is downloaded, which `progress` tells of.
    pub fn folder(&self, model: &ModelName, need: Need, progress: &mut Progress) -> anyhow::Result<PathBuf> {
        match model {
            ModelName::Path(path) => Ok(path.clone()),
            ModelName::Repository(repo) => match &self.model_dir {
                Some(dir) => {
                    let folder = local(dir, repo)?;
                    let note = format!("{repo} is taken from {} (--model-dir)", folder.display());
                    progress.on_event(Event::note(note));
                    Ok(folder)
                }
                None => {
                    let downloads = tell_if_interrupted(progress)?;
                    let folder = hub()?.open(repo, need, &teller(&Mutex::new(progress)));
                    downloads.store(false, Ordering::Relaxed);
                    Ok(folder?)
                }
            },
        }
    }
}

/// An interrupt ends the process, as long as the flag is set with a word on what is downloaded: it is gone on with, whole or not.
pub fn tell_if_interrupted(progress: &Progress) -> anyhow::Result<Arc<AtomicBool>> {
    let (downloads, last_word) = (Arc::new(AtomicBool::new(true)), progress.last_word());
    let is_told = Arc::clone(&downloads);
    on_interrupt(move |signal| {
        leave_with(signal, move || {
            if is_told.load(Ordering::Relaxed) {
                last_word(Event::warning(HubError::Interrupted.to_string()));
            }
        })
    })?;
    Ok(downloads)
}

/// The hub of the environment.
pub fn hub() -> anyhow::Result<Hub> {
    Ok(Hub::new(Settings::from_env()?, Arc::new(AtomicBool::new(false)))?)
}

/// Passes events from any thread to one display.
pub fn teller(progress: &Mutex<&mut Progress>) -> impl Fn(Event) + Sync {
    |event| progress.lock().unwrap_or_else(PoisonError::into_inner).on_event(event)
}

fn local(dir: &Path, repo: &RepoId) -> Result<PathBuf, UsageError> {
    if !dir.is_dir() {
        let message = format!("--model-dir (or VIADUCT_MODEL_DIR) {}: no such folder", dir.display());
        return Err(UsageError(message));
    }
    let name = repo.id.rsplit('/').next().unwrap_or_default();
    let places = [dir.join(&repo.id), dir.join(name), dir.to_owned()];
    let is_model = |place: &&PathBuf| Kind::of_folder(place) != Kind::Other;
    places.iter().find(is_model).cloned().ok_or_else(|| {
        let [of_owner, of_name, itself] = places.map(|place| place.display().to_string());
        UsageError(format!(
            "--model-dir (or VIADUCT_MODEL_DIR): no model {repo} in {of_owner}, {of_name} or {itself}"
        ))
    })
}
