//! Models of a Hugging Face hub: found in the cache that all tools for it share, or brought there, whole or not at all.
//!
//! Built on `hf-hub`, which knows the cache's layout and the hub's addresses. Beside it stand transfers that go on where
//! they were broken off, are checked against size and hash, and are shared by processes that want the same file.

mod cache;
mod client;
mod digest;
mod error;
mod fetch;
mod listing;
mod pull;
mod reference;
mod settings;
mod shelves;
mod space;
mod stop;
mod transfer;

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
};

use self::{
    cache::Shelf,
    client::{Attempts, Client},
    stop::Stop,
};
pub use self::{
    digest::ContentId,
    error::HubError,
    listing::{Listing, RemoteFile},
    pull::{Pulled, Selection},
    reference::{MAIN, ModelName, RepoId, RepoIdError},
    settings::{Patience, Settings},
    shelves::{Kept, Kind},
};
use crate::pipeline::event::Event;

/// A hub and the cache of what was brought from it.
pub struct Hub {
    settings: Settings,
    client: Client,
    stop: Arc<AtomicBool>,
}

/// Who is told of the progress, from any thread.
pub type Tell<'a> = &'a (dyn Fn(Event) + Sync);

impl Hub {
    /// `stop` ends all work, with [`HubError::Interrupted`], within a tenth of a second or a server's answer.
    pub fn new(settings: Settings, stop: Arc<AtomicBool>) -> Result<Hub, HubError> {
        Ok(Hub { client: Client::new(&settings)?, settings, stop })
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    fn shelf(&self, repo: &RepoId) -> Shelf {
        Shelf::new(&self.settings.cache, repo)
    }

    /// The folder of the revision as it was last brought, by whichever tool; its files need not be complete.
    pub fn cached(&self, repo: &RepoId) -> Option<PathBuf> {
        self.shelf(repo).current()
    }

    /// The folder in which a commit's files are, or will be.
    pub fn folder(&self, listing: &Listing) -> PathBuf {
        self.shelf(&listing.repo).snapshot(&listing.commit)
    }

    /// Asks the hub what the repository holds.
    pub fn list(&self, repo: &RepoId) -> Result<Listing, HubError> {
        if self.settings.offline {
            return Err(HubError::PullOffline { repo: repo.clone() });
        }
        let (what, stop) = (repo.to_string(), Stop::by(&self.stop));
        let mut attempts = Attempts::new(self.settings.patience, &stop, &what);
        loop {
            match self.client.describe(repo) {
                Ok(json) => return Listing::parse(repo, &json),
                Err(failure) => attempts.failed(failure)?,
            }
        }
    }
}
