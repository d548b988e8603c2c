//! Models of a Hugging Face hub: found in the cache that all tools for it share, or brought there, whole or not at all.
//!
//! Built on `hf-hub`, which knows the cache's layout and the hub's addresses; added are transfers that go on where
//! they were broken off, are checked against size and hash, and are shared by processes that want the same file.

mod arriving;
mod cache;
mod client;
mod digest;
mod error;
mod fetch;
mod leftovers;
mod listing;
mod need;
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

pub use self::{
    arriving::{Arriving, Teller},
    digest::ContentId,
    error::HubError,
    listing::{Listing, RemoteFile},
    need::{Kind, Need},
    pull::{Checkout, Pulled, Selection},
    reference::{MAIN, ModelName, RepoId, RepoIdError},
    settings::{Patience, Settings},
    shelves::Kept,
};
use self::{
    cache::Shelf,
    client::{Attempts, Client},
    stop::Stop,
};
use crate::pipeline::event::Event;

/// A hub and the cache of what was brought from it.
#[derive(Clone)]
pub struct Hub {
    settings: Settings,
    client: Arc<Client>,
    stop: Arc<AtomicBool>,
}

/// Who is told of the progress, from any thread.
pub type Tell<'a> = &'a (dyn Fn(Event) + Sync);

impl Hub {
    /// `stop` ends all work, with [`HubError::Interrupted`], within a tenth of a second or a server's answer.
    pub fn new(settings: Settings, stop: Arc<AtomicBool>) -> Result<Hub, HubError> {
        Ok(Hub { client: Arc::new(Client::new(&settings)?), settings, stop })
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    fn shelf(&self, repo: &RepoId) -> Shelf {
        Shelf::new(&self.settings.cache, repo)
    }

    fn attempts<'a>(&self, stop: &'a Stop<'a>, tell: Tell<'a>, what: &'a str) -> Attempts<'a> {
        Attempts::new(self.settings.patience, stop, tell, what)
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
    pub fn list(&self, repo: &RepoId, tell: Tell<'_>) -> Result<Listing, HubError> {
        if self.settings.offline {
            return Err(HubError::PullOffline { repo: repo.clone() });
        }
        let (what, stop) = (repo.to_string(), Stop::by(&self.stop));
        // Where there is no network, nobody wants to wait long for that news.
        let patience =
            Patience { attempts: self.settings.patience.attempts.min(4), ..self.settings.patience };
        let mut attempts = Attempts::new(patience, &stop, tell, &what);
        loop {
            match self.client.describe(repo) {
                Ok(json) => return Listing::parse(repo, &json),
                Err(failure) => attempts.failed(failure).map_err(|error| match error {
                    HubError::Transfer { problem, .. } => {
                        HubError::Unreachable { repo: repo.clone(), problem }
                    }
                    other => other,
                })?,
            }
        }
    }
}
