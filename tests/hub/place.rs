//! A hub, a cache of its own, and looks into it that find whatever is not whole.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use tempfile::TempDir;
use viaduct::{
    hub::{Hub, HubError, Patience, RepoId, Settings},
    pipeline::event::Event,
};
use viaduct_hub_server::{HubServer, Listed, Repository};

pub const ID: &str = "someone/model";

/// Waits of milliseconds, but time enough for any answer of a busy machine.
pub const PATIENCE: Patience = Patience {
    answer: Duration::from_secs(20),
    attempts: 4,
    first_wait: Duration::from_millis(1),
    longest_wait: Duration::from_millis(20),
};

/// Contents by the path in the repository.
pub type Files = BTreeMap<String, Vec<u8>>;

/// A hub with one repository, and an empty cache.
pub struct Place {
    pub server: HubServer,
    pub home: TempDir,
    pub settings: Settings,
    pub files: Files,
    listed: Vec<Listed>,
}

impl Place {
    /// Files whose name ends in `.json` are small ones of the hub itself, others are in Git LFS.
    pub fn new(files: &Files) -> Place {
        Place::serving(files, repository(files))
    }

    /// The repository must hold exactly those files.
    pub fn serving(files: &Files, repository: Repository) -> Place {
        let server = HubServer::start().unwrap();
        let home = tempfile::tempdir().unwrap();
        let listed = repository.listed();
        server.add(repository);
        let settings = Settings {
            endpoint: server.url(),
            cache: home.path().join("hub"),
            token: None,
            offline: false,
            patience: PATIENCE,
        };
        Place { server, home, settings, files: files.clone(), listed }
    }

    /// Brings everything; the bytes that came, by the client's count.
    pub fn pull(&self) -> Result<u64, HubError> {
        self.pull_until(|_| false)
    }

    /// Brings everything, or ends early once `enough` says so of how many bytes are there.
    pub fn pull_until(&self, enough: impl Fn(u64) -> bool + Sync) -> Result<u64, HubError> {
        let stop = Arc::new(AtomicBool::new(false));
        let hub = Hub::new(self.settings.clone(), stop.clone())?;
        let listing = hub.list(&repo())?;
        let names: Vec<String> = listing.files.keys().cloned().collect();
        hub.fetch(&listing, &names, &|event| {
            if let Event::Download { all_done, .. } = event
                && enough(all_done)
            {
                stop.store(true, Ordering::Relaxed);
            }
        })
    }

    pub fn bytes(&self) -> u64 {
        self.files.values().map(|content| content.len() as u64).sum()
    }

    /// Size in bytes of each content, by one of its paths.
    pub fn contents(&self) -> BTreeMap<String, u64> {
        let paths: BTreeMap<PathBuf, &String> =
            self.files.keys().map(|path| (self.blob(path), path)).collect();
        paths.into_values().map(|path| (path.clone(), self.files[path].len() as u64)).collect()
    }

    /// Where the cache keeps a content, by its file's path.
    pub fn blob(&self, path: &str) -> PathBuf {
        let listed = self.listed.iter().find(|listed| listed.path == path).unwrap();
        let name = listed.sha256.as_ref().unwrap_or(&listed.blob);
        self.folder().join("blobs").join(name)
    }

    pub fn incomplete(&self, path: &str) -> PathBuf {
        self.blob(path).with_extension("incomplete")
    }

    /// Bytes of a content that are there, whole or not.
    pub fn there(&self, path: &str) -> u64 {
        let size = |path| fs::metadata(path).map_or(0, |metadata| metadata.len());
        size(self.blob(path)).max(size(self.incomplete(path)))
    }

    fn folder(&self) -> PathBuf {
        self.settings.cache.join(format!("models--{}", ID.replace('/', "--")))
    }

    pub fn assert_whole(&self) {
        self.whole().unwrap();
    }

    /// Everything is there, byte for byte, and nothing else.
    fn whole(&self) -> Result<(), String> {
        let snapshots = fs::read_dir(self.folder().join("snapshots")).map_err(|e| e.to_string())?;
        let snapshots: Vec<PathBuf> = snapshots.map(|entry| entry.unwrap().path()).collect();
        let [snapshot] = &snapshots[..] else { return Err(format!("{snapshots:?}")) };
        for (path, content) in &self.files {
            let found = fs::read(snapshot.join(path)).map_err(|e| format!("{path}: {e}"))?;
            if found != *content {
                return Err(format!("{path}: {} bytes of {}", found.len(), content.len()));
            }
            if self.incomplete(path).exists() {
                return Err(format!("{path}: something incomplete is left"));
            }
        }
        self.look()
    }

    /// What has a final name is whole, and nothing is outside the cache.
    pub fn look(&self) -> Result<(), String> {
        let folder = self.folder();
        let blobs: BTreeMap<PathBuf, &Vec<u8>> =
            self.files.iter().map(|(path, content)| (self.blob(path), content)).collect();
        for path in walk(&folder) {
            // A file may get its final name between the walk and here, never lose it.
            let Ok(found) = fs::read(&path) else {
                let is_link = path.symlink_metadata().is_ok();
                let told = path.strip_prefix(&folder).unwrap().display().to_string();
                if is_link && !is_passing(&path) {
                    return Err(format!("{told} leads nowhere"));
                } else {
                    continue;
                }
            };
            let name = path.strip_prefix(&folder).unwrap();
            let mut parts = name.components().map(|part| part.as_os_str().to_str().unwrap());
            let wanted = match (parts.next(), parts.next()) {
                _ if is_passing(&path) => continue,
                (Some("blobs"), _) => blobs.get(&path).copied(),
                (Some("snapshots"), _) => self.files.get(&parts.collect::<Vec<_>>().join("/")),
                _ => continue,
            };
            match wanted {
                Some(content) if *content == found => {}
                Some(content) => {
                    return Err(format!("{}: {} bytes of {}", name.display(), found.len(), content.len()));
                }
                None => return Err(format!("{} belongs to nothing", name.display())),
            }
        }
        let mut outside: Vec<_> =
            fs::read_dir(self.home.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        outside.retain(|name| name != "hub");
        if outside.is_empty() { Ok(()) } else { Err(format!("outside the cache: {outside:?}")) }
    }

    /// Looks into the cache again and again while something is done.
    pub fn watched<T>(&self, work: impl FnOnce() -> T) -> T {
        let (done, looks) = (AtomicBool::new(false), AtomicUsize::new(0));
        let (result, seen) = thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut seen = Ok(());
                while seen.is_ok() && !done.load(Ordering::Relaxed) {
                    seen = self.look();
                    looks.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(1));
                }
                seen
            });
            let result = work();
            done.store(true, Ordering::Relaxed);
            (result, watch.join().unwrap())
        });
        assert_eq!(seen, Ok(()), "while it ran");
        result
    }

    /// Contents of files that were asked for, each with the range, in the order of the requests from the `first` on.
    pub fn bodies(&self, first: usize) -> Vec<(String, Option<String>)> {
        let served = self.server.served().into_iter().skip(first);
        let bodies = served.filter(|served| matches!(served.status, 200 | 206) && !served.file.is_empty());
        bodies.map(|served| (served.file, served.range)).collect()
    }
}

pub fn repo() -> RepoId {
    ID.parse().unwrap()
}

pub fn repository(files: &Files) -> Repository {
    files.iter().fold(Repository::new(ID), |repository, (path, content)| {
        if path.ends_with(".json") {
            repository.file(path, content.clone())
        } else {
            repository.lfs(path, content.clone())
        }
    })
}

/// Names that say that what they name is on its way.
fn is_passing(path: &Path) -> bool {
    let name = path.file_name().unwrap().to_str().unwrap();
    name.ends_with(".incomplete") || name.starts_with(".viaduct-")
}

/// All files and links below a folder. What goes away meanwhile is left out.
pub fn walk(folder: &Path) -> Vec<PathBuf> {
    let entries = |folder: &Path| -> io::Result<Vec<PathBuf>> {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
    };
    let found = entries(folder).unwrap_or_default();
    let is_folder = |path: &PathBuf| path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir());
    found.into_iter().flat_map(|path| if is_folder(&path) { walk(&path) } else { vec![path] }).collect()
}

#[test]
fn looks_find_a_wrong_byte_a_partial_file_and_a_stray_one() {
    let place = Place::new(&Files::from([("w".into(), vec![7; 1000]), ("a.json".into(), b"{}".to_vec())]));
    place.pull().unwrap();
    place.assert_whole();
    let blob = place.blob("w");
    for broken in [[vec![7; 999], vec![6]].concat(), vec![7; 600], Vec::new()] {
        fs::write(&blob, broken).unwrap();
        assert!(place.look().is_err());
        assert!(place.whole().is_err());
    }
    fs::write(&blob, vec![7; 1000]).unwrap();
    place.look().unwrap();
    fs::write(place.folder().join("blobs").join("0".repeat(64)), "stray").unwrap();
    assert!(place.look().is_err());
    fs::remove_file(place.folder().join("blobs").join("0".repeat(64))).unwrap();
    fs::write(place.home.path().join("outside"), "").unwrap();
    assert!(place.look().is_err());
    fs::remove_file(place.home.path().join("outside")).unwrap();
    fs::remove_file(&blob).unwrap();
    assert!(place.look().unwrap_err().contains("leads nowhere"));
}
