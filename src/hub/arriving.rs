//! A checkpoint whose weight files are still on their way: each is read as soon as it is whole.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, atomic::Ordering},
    thread,
    time::Duration,
};

use viaduct_export::weights::{Arrivals, Beginning};

use super::{Hub, HubError, Listing, fetch::locked, listing::RemoteFile, stop::Stop};
use crate::pipeline::event::Event;

/// What weight files are called.
const WEIGHTS: &str = ".safetensors";
/// Of the length of a header.
const PREFIX: usize = 8;
/// Fewer than a pull has: the sooner the first file is whole, the sooner it is exported.
const CONNECTIONS: usize = 2;
/// Longer than most headers, and little beside a shard.
const FIRST: u64 = 128 << 10;
/// Longer than the headers of thousands of tensors. Those of all shards are kept.
const MAX_HEADER: u64 = 16 << 20;
/// How often a reader that waits looks whether it is to end.
const LOOK: Duration = Duration::from_millis(100);

/// Who is told of the progress, for as long as there is any.
pub type Teller = Arc<dyn Fn(Event) + Send + Sync>;

/// The weight files of a repository's snapshot.
pub struct Arriving {
    shared: Arc<Shared>,
}

struct Shared {
    hub: Hub,
    listing: Listing,
    folder: PathBuf,
    tell: Teller,
    beginnings: Mutex<BTreeMap<String, Beginning>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// What is being brought, or was.
    expected: BTreeSet<String>,
    came: BTreeSet<String>,
    /// Why no more comes.
    failed: Option<Arc<HubError>>,
}

/// An error that several readers may have to hear of.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Failed(Arc<HubError>);

impl Arriving {
    pub fn new(hub: Hub, listing: Listing, tell: Teller) -> Arriving {
        let folder = hub.folder(&listing);
        let (beginnings, state, changed) = Default::default();
        Arriving { shared: Arc::new(Shared { hub, listing, folder, tell, beginnings, state, changed }) }
    }

    /// The licence that the repository states.
    pub fn license(&self) -> Option<&str> {
        self.shared.listing.license.as_deref()
    }
}

/// Tells those who wait when the thread that brings files panics.
struct Watched<'a>(&'a Shared);

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.fail(HubError::Interrupted);
        }
    }
}

impl Shared {
    /// The name of a file in the repository.
    fn name<'a>(&self, file: &'a Path) -> Option<&'a str> {
        file.strip_prefix(&self.folder).ok()?.to_str()
    }

    /// Brings files in a thread of its own; those that wait for them hear of each.
    fn bring(self: &Arc<Self>, names: Vec<String>) {
        let shared = Arc::clone(self);
        let bring = move || {
            let _watched = Watched(&shared);
            let arrived = |name: &str, came: bool| {
                if came {
                    shared.hub.mark(&shared.listing, name);
                }
                locked(&shared.state).came.insert(name.to_owned());
                shared.changed.notify_all();
            };
            let Shared { hub, listing, tell, .. } = &*shared;
            if let Err(error) = hub.fetch_each(listing, &names, CONNECTIONS, &**tell, &arrived) {
                shared.fail(error);
            }
        };
        if let Err(error) = thread::Builder::new().spawn(bring) {
            self.fail(HubError::Thread(error));
        }
    }

    fn fail(&self, error: HubError) {
        locked(&self.state).failed.get_or_insert(Arc::new(error));
        self.changed.notify_all();
    }

    fn read_beginning(&self, name: &str, file: &RemoteFile) -> Result<Beginning, HubError> {
        let mut header = self.read(name, FIRST.min(file.bytes))?;
        let len = header.first_chunk::<PREFIX>().map_or(0, |len| u64::from_le_bytes(*len));
        let whole = len.saturating_add(PREFIX as u64).min(file.bytes);
        if whole > MAX_HEADER {
            let what = format!("{}: {name}", self.listing.repo);
            let problem =
                format!("its header of {len} bytes is longer than what is read ahead ({MAX_HEADER})");
            return Err(HubError::Transfer { what, problem, attempts: 1 });
        }
        if whole > header.len() as u64 {
            header = self.read(name, whole)?;
        }
        header.truncate(usize::try_from(whole).unwrap_or(usize::MAX));
        Ok(Beginning { header, bytes: file.bytes })
    }

    fn read(&self, name: &str, bytes: u64) -> Result<Vec<u8>, HubError> {
        let stop = Stop::by(&self.hub.stop);
        let what = format!("{}: {name}", self.listing.repo);
        let mut attempts = self.hub.attempts(&stop, &*self.tell, &what);
        loop {
            match self.hub.client.beginning(&self.listing, name, bytes) {
                Ok(read) => return Ok(read),
                Err(failure) => attempts.failed(failure)?,
            }
        }
    }
}

impl Arrivals for Arriving {
    fn names_in(&self, folder: &Path) -> Vec<String> {
        let Some(below) = self.shared.name(folder) else { return Vec::new() };
        let inside = |name: &String| {
            let name = name.strip_prefix(below)?.strip_prefix('/')?;
            let is_new = name.ends_with(WEIGHTS) && !name.contains('/') && !folder.join(name).exists();
            is_new.then(|| name.to_owned())
        };
        self.shared.listing.files.keys().filter_map(inside).collect()
    }

    fn beginning(&self, path: &Path) -> io::Result<Option<Beginning>> {
        let shared = &self.shared;
        let Some(name) = shared.name(path) else { return Ok(None) };
        let Some(file) = shared.listing.files.get(name) else { return Ok(None) };
        let mut beginnings = locked(&shared.beginnings);
        if let Some(known) = beginnings.get(name) {
            return Ok(Some(known.clone()));
        }
        let beginning = shared.read_beginning(name, file).map_err(io::Error::other)?;
        beginnings.insert(name.to_owned(), beginning.clone());
        Ok(Some(beginning))
    }

    fn expect(&self, files: &[PathBuf]) {
        let names: Vec<String> =
            files.iter().filter_map(|file| self.shared.name(file)).map(str::to_owned).collect();
        locked(&self.shared.state).expected.extend(names.iter().cloned());
        self.shared.bring(names);
    }

    fn wait(&self, path: &Path) -> io::Result<()> {
        let shared = &self.shared;
        let name = shared.name(path).ok_or(io::ErrorKind::NotFound)?;
        let is_new = locked(&shared.state).expected.insert(name.to_owned());
        if is_new {
            shared.bring(vec![name.to_owned()]);
        }
        let mut state = locked(&shared.state);
        while !state.came.contains(name) && state.failed.is_none() {
            if shared.hub.stop.load(Ordering::Relaxed) {
                return Err(io::Error::other(HubError::Interrupted));
            }
            let waited = shared.changed.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        match &state.failed {
            Some(error) if !state.came.contains(name) => Err(io::Error::other(Failed(Arc::clone(error)))),
            _ => Ok(()),
        }
    }
}
