//! Several files of a repository at once, with one account of how far they are.

use std::{
    collections::{BTreeMap, VecDeque},
    fs,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    Hub, Tell,
    cache::Shelf,
    error::HubError,
    listing::{Listing, RemoteFile},
    space,
    stop::Stop,
    transfer::{Moved, Transfers, Wanted, incomplete, is_there},
};
use crate::pipeline::event::Event;

/// Files that are brought at once: more than one, since servers limit each connection.
const CONNECTIONS: usize = 4;
/// How often a file's progress is told.
const TOLD: Duration = Duration::from_millis(100);

impl Hub {
    /// Brings files of a repository, in this order as far as connections are free, and gives them their names in the
    /// snapshot. Returns the bytes that came over the network.
    ///
    /// # Errors
    /// The first one ends the others, too. What has come stays, and is gone on with by the next call.
    pub fn fetch(&self, listing: &Listing, names: &[String], tell: Tell<'_>) -> Result<u64, HubError> {
        self.fetch_each(listing, names, CONNECTIONS, tell, &|_, _| ())
    }

    /// [`Hub::fetch`] of so many files at once, which calls `arrived` with each file's name as soon as it is there, and with whether it came over the
    /// network.
    pub(super) fn fetch_each(
        &self,
        listing: &Listing,
        names: &[String],
        connections: usize,
        tell: Tell<'_>,
        arrived: &(dyn Fn(&str, bool) + Sync),
    ) -> Result<u64, HubError> {
        let shelf = self.shelf(&listing.repo);
        let files = names.iter().map(|name| Ok((&name[..], listing.file(name, "the request")?)));
        let files = files.collect::<Result<Vec<_>, HubError>>()?;
        check_space(&shelf, &files)?;
        let (stop, account) = (Stop::by(&self.stop), Account::new(&shelf, &files, tell));
        let transfers = Transfers {
            client: &self.client,
            shelf: &shelf,
            patience: self.settings.patience,
            stop: &stop,
            tell,
        };
        let (queue, failed) = (Mutex::new(VecDeque::from(files)), Mutex::new(None));
        let next = || locked(&queue).pop_front().filter(|_| !stop.is_asked());
        let work = || {
            while let Some((name, file)) = next() {
                match fetch_one(&transfers, listing, name, file, &account) {
                    Ok(came) => arrived(name, came),
                    Err(error) => {
                        locked(&failed).get_or_insert(error);
                        stop.ask();
                    }
                }
            }
        };
        thread::scope(|scope| {
            // This thread works, too, so that it goes on where there may be no others.
            for _ in 1..connections.min(names.len()) {
                let _ = thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None if stop.is_asked() => Err(HubError::Interrupted),
            None => Ok(account.came.into_inner()),
        }
    }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fetch_one(
    transfers: &Transfers<'_>,
    listing: &Listing,
    name: &str,
    file: &RemoteFile,
    account: &Account<'_>,
) -> Result<bool, HubError> {
    let Listing { repo, commit, .. } = listing;
    let wanted = Wanted { repo, commit, name, bytes: file.bytes, id: &file.id };
    transfers.adopt(&wanted)?;
    let came = transfers.bring(&wanted, &mut |moved| account.note(name, moved))?;
    transfers.shelf.link(commit, name, &file.id)?;
    account.note(name, Moved::To(file.bytes));
    Ok(came)
}

/// Refuses what does not fit on the disk before anything is written.
fn check_space(shelf: &Shelf, files: &[(&str, &RemoteFile)]) -> Result<(), HubError> {
    let contents: BTreeMap<_, _> = files.iter().map(|(_, file)| (file.id.as_str(), *file)).collect();
    let needed: u64 = contents.values().map(|file| missing(shelf, file)).fold(0, u64::saturating_add);
    match space::free(shelf.folder()) {
        Some(free) if free < needed => {
            Err(HubError::NoSpace { folder: shelf.folder().to_owned(), needed, free })
        }
        _ => Ok(()),
    }
}

/// Bytes of a file that are still to come.
fn missing(shelf: &Shelf, file: &RemoteFile) -> u64 {
    let blob = shelf.blob(&file.id);
    match is_there(&blob, file.bytes) {
        true => 0,
        false => file.bytes.saturating_sub(fs::metadata(incomplete(&blob)).map_or(0, |found| found.len())),
    }
}

/// How far all files are.
struct Account<'a> {
    files: Mutex<BTreeMap<&'a str, Entry>>,
    came: AtomicU64,
    tell: Tell<'a>,
}

struct Entry {
    done: u64,
    bytes: u64,
    told: Option<Instant>,
    /// Whether its end was told of.
    ended: bool,
}

impl<'a> Account<'a> {
    /// Of what is there already nothing is told.
    fn new(shelf: &Shelf, files: &[(&'a str, &RemoteFile)], tell: Tell<'a>) -> Account<'a> {
        let missing = files.iter().filter(|(_, file)| !is_there(&shelf.blob(&file.id), file.bytes));
        let entry = |file: &RemoteFile| {
            let done = file.bytes - self::missing(shelf, file).min(file.bytes);
            Entry { done, bytes: file.bytes, told: None, ended: false }
        };
        let files = missing.map(|(name, file)| (*name, entry(file))).collect();
        Account { files: Mutex::new(files), came: AtomicU64::new(0), tell }
    }

    fn note(&self, name: &str, moved: Moved) {
        let done = match moved {
            Moved::Came(bytes) => {
                self.came.fetch_add(bytes, Ordering::Relaxed);
                return;
            }
            Moved::To(done) => done,
        };
        let mut files = locked(&self.files);
        let Some(entry) = files.get_mut(name) else { return };
        let is_new = entry.told.is_none_or(|told| told.elapsed() >= TOLD);
        let ends = done == entry.bytes && !entry.ended;
        entry.ended |= ends;
        entry.done = done;
        if !is_new && !ends {
            return;
        }
        entry.told = Some(Instant::now());
        let bytes = entry.bytes;
        let (all_done, all_bytes) = files.values().fold((0, 0), |(done, bytes), entry| {
            (entry.done.saturating_add(done), entry.bytes.saturating_add(bytes))
        });
        // Told in the order in which they happen.
        (self.tell)(Event::Download { file: name.to_owned(), done, bytes, all_done, all_bytes });
    }
}
