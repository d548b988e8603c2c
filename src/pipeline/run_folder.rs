//! What a run keeps on disk, so that the same run, started again after its process was killed, goes on from there.
//!
//! A run folder holds `identity.json`, which says what the run is, and tensors as `NAME.CHECKSUM.npy`: one rename makes
//! tensor and checksum appear together, so after a power cut a tensor is whole, absent, or found out. What cannot be read
//! back is computed again; what cannot be kept costs the run nothing but a warning.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use viaduct_export::files::{hex, open_regular, read_limited};

use super::{
    event::{Event, Listener},
    image::{ImageError, check_finite},
    runs::{Claim, ID_DIGITS, Runs, tensor_files},
    text_to_image::Negative,
};
use crate::{
    atomic_file::{self, Existing, FileError},
    npy::{self, NpyError},
    tensor::HostTensor,
};

pub(super) const IDENTITY: &str = "identity.json";
/// Longer than a prompt that a command line can hold.
const MAX_IDENTITY_BYTES: u64 = 16 << 20;
/// Digits of a tensor's checksum: enough against accidents, which is all that it is for.
const CHECKSUM_DIGITS: usize = 16;

/// Everything that decides a picture's bits. Two runs with the same identity are the same run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// The program's version.
    pub viaduct: String,
    /// Name and profile, for people.
    pub bundle: String,
    /// SHA-256 of the bundle's manifest, which states the hash of every file, and of the files' sizes and times.
    pub manifest: String,
    pub prompt: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub negative: Option<Negative>,
    pub width: usize,
    pub height: usize,
    pub steps: usize,
    pub noise: NoiseIdentity,
    /// What else decides the arithmetic: provider, device, driver, versions, the processor; by name.
    pub device: BTreeMap<String, String>,
}

/// Where the initial noise comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoiseIdentity {
    Seed(u64),
    /// A seed that the first attempt draws, and the following ones go on with.
    Drawn,
    /// SHA-256 of the given tensor.
    Given(String),
}

impl Identity {
    /// The run folder's name.
    fn id(&self) -> String {
        let json = serde_json::to_vec(self).expect("an identity has string keys and plain values");
        first(hex(&Sha256::digest(json)), ID_DIGITS)
    }
}

/// `identity.json`.
#[derive(PartialEq, Serialize, Deserialize)]
struct Record {
    #[serde(flatten)]
    identity: Identity,
    drawn_seed: Option<u64>,
}

/// What becomes of an earlier attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Earlier {
    Continue,
    Discard,
}

#[derive(Debug, thiserror::Error)]
enum KeepError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{}: {source}", path.display())]
    Folder { path: PathBuf, source: io::Error },
}

#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Npy(#[from] NpyError),
    #[error(transparent)]
    Unusable(#[from] ImageError),
    #[error("its checksum is {found}")]
    Checksum { found: String },
}

/// The folder of one run; or none, and then nothing is kept and nothing found.
#[derive(Default)]
pub struct RunFolder {
    open: Option<Open>,
    resumed_from: Option<String>,
}

struct Open {
    runs: Runs,
    claim: Claim,
    drawn_seed: Option<u64>,
    /// Names of the kept tensors, and their files.
    tensors: BTreeMap<String, String>,
    /// Whether an earlier write failed, so that no further one is tried.
    unwritable: bool,
}

impl RunFolder {
    /// A run that keeps nothing.
    pub fn none() -> RunFolder {
        RunFolder::default()
    }

    /// Opens or makes the folder of a run and removes what other runs kept beyond the limit. `drawn_seed` is the seed of
    /// a run whose identity names none. Where that cannot be, or another process draws the same picture, the run keeps
    /// nothing and says why.
    pub fn open(
        runs: &Runs,
        identity: &Identity,
        drawn_seed: Option<u64>,
        earlier: Earlier,
        listener: &mut dyn Listener,
    ) -> RunFolder {
        if runs.limit == 0 {
            return RunFolder::none();
        }
        let folder = runs.root.join(identity.id());
        let failed = |e: KeepError| Event::warning(format!("nothing of this run is kept: {e}"));
        let claim = match runs.claim(&identity.id()) {
            Ok(Some(claim)) => claim,
            Ok(None) => {
                listener.on_event(Event::note(format!(
                    "the same picture is being drawn by another process (in {}); this run keeps nothing",
                    folder.display()
                )));
                return RunFolder::none();
            }
            Err(source) => {
                listener.on_event(failed(KeepError::Folder { path: folder, source }));
                return RunFolder::none();
            }
        };
        let removed = runs.make_room(0, &folder);
        if removed > 0 {
            let root = runs.root.display();
            listener.on_event(Event::note(format!(
                "removed the oldest {removed} of the unfinished runs in {root}"
            )));
        }
        let mut open =
            Open { runs: runs.clone(), claim, drawn_seed, tensors: BTreeMap::new(), unwritable: false };
        let prepared = open.prepare(identity, earlier, listener);
        let run = RunFolder { open: Some(open), resumed_from: None };
        match prepared {
            Ok(()) => run,
            Err(e) => {
                listener.on_event(failed(e));
                RunFolder::none()
            }
        }
    }

    /// Where it is.
    pub fn path(&self) -> Option<&Path> {
        self.open.as_ref().map(|open| open.claim.folder.as_path())
    }

    /// A name that is this run's alone.
    pub fn id(&self) -> Option<&str> {
        self.path()?.file_name()?.to_str()
    }

    /// The seed that the first attempt drew.
    pub fn drawn_seed(&self) -> Option<u64> {
        self.open.as_ref()?.drawn_seed
    }

    /// Keeps tensors that together are the run's state, called after the first; the caller has found them finite. From now on
    /// the run needs, besides these, only those called `needed`; all others go. A state that is larger than all runs together
    /// may be is not kept; then the earlier state stays.
    pub fn keep(&mut self, tensors: &[(&str, &HostTensor)], needed: &[&str], listener: &mut dyn Listener) {
        let Some(open) = self.open.as_mut().filter(|open| !open.unwritable) else { return };
        if !tensors.iter().all(|(name, _)| is_plain(name)) {
            return;
        }
        match open.keep(tensors, needed) {
            Ok(Some(bytes)) => {
                let name = tensors.first().map_or(String::new(), |(name, _)| (*name).to_owned());
                listener.on_event(Event::Kept { name, bytes });
            }
            Ok(None) => {}
            Err(e) => {
                open.unwritable = true;
                let message = format!("the run goes on, but nothing more of it is kept: {e}");
                listener.on_event(Event::warning(message));
            }
        }
    }

    /// Whether it keeps what it is given.
    pub fn keeps(&self) -> bool {
        self.open.as_ref().is_some_and(|open| !open.unwritable)
    }

    /// A kept tensor, bit by bit as it was. One that is damaged is removed and counts as never kept.
    pub fn kept(&mut self, name: &str, listener: &mut dyn Listener) -> Option<HostTensor> {
        let open = self.open.as_mut()?;
        let file = open.tensors.get(name)?;
        let path = open.claim.folder.join(file);
        match load(name, &path) {
            Ok(tensor) => Some(tensor),
            Err(e) => {
                let message = format!("{} is damaged and computed again: {e}", path.display());
                listener.on_event(Event::note(message));
                let _ = fs::remove_file(&path);
                open.tensors.remove(name);
                None
            }
        }
    }

    /// Tells where the run goes on; only the first call counts, since the furthest state is looked for first.
    pub fn resume(&mut self, point: String, listener: &mut dyn Listener) {
        let Some(open) = self.open.as_ref().filter(|_| self.resumed_from.is_none()) else { return };
        let folder = open.claim.folder.display();
        listener.on_event(Event::note(format!("continues after {point} (kept in {folder})")));
        self.resumed_from = Some(point);
    }

    /// Whether something is kept that the same run would go on from.
    pub fn holds_tensors(&self) -> bool {
        self.open.as_ref().is_some_and(|open| !open.tensors.is_empty())
    }

    /// What an earlier attempt had finished: `step 3/4`, `vae_pre`.
    pub fn resumed_from(&self) -> Option<&str> {
        self.resumed_from.as_deref()
    }

    /// Removes the folder: the picture is on disk.
    pub fn finish(mut self, listener: &mut dyn Listener) {
        let Some(open) = self.open.take() else { return };
        let folder = open.claim.folder.clone();
        if let Err(e) = open.claim.remove() {
            listener.on_event(Event::warning(format!("{} cannot be removed: {e}", folder.display())));
        }
    }
}

impl Drop for RunFolder {
    /// A run that failed before there was anything to keep leaves nothing.
    fn drop(&mut self) {
        if let Some(open) = self.open.take().filter(|open| open.tensors.is_empty()) {
            let _ = open.claim.remove();
        }
    }
}

impl Open {
    /// Finds what an earlier attempt kept, or removes it.
    fn prepare(
        &mut self,
        identity: &Identity,
        earlier: Earlier,
        listener: &mut dyn Listener,
    ) -> Result<(), KeepError> {
        let folder = self.claim.folder.clone();
        let path = folder.join(IDENTITY);
        self.clear_partials().map_err(|source| KeepError::Folder { path: folder.clone(), source })?;
        let files = tensor_files(&folder).filter_map(|file| Some((name_of(&file)?.to_owned(), file)));
        self.tensors = files.collect();
        let record = read_limited(&path, MAX_IDENTITY_BYTES).ok();
        let record = record.and_then(|bytes| serde_json::from_slice::<Record>(&bytes).ok());
        match record.filter(|record| record.identity == *identity) {
            Some(record) if earlier == Earlier::Continue => {
                self.drawn_seed = record.drawn_seed;
                return Ok(());
            }
            None if !self.tensors.is_empty() => {
                let message = format!("{} says nothing of this run; it begins anew", path.display());
                listener.on_event(Event::note(message));
            }
            _ => {}
        }
        self.forget_all_but(&[]);
        let record = Record { identity: identity.clone(), drawn_seed: self.drawn_seed };
        let json = serde_json::to_vec_pretty(&record).expect("a record has string keys and plain values");
        Ok(atomic_file::write(&path, Existing::Replace, &json)?)
    }

    /// Removes what a killed process had half written.
    fn clear_partials(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.claim.folder)? {
            let path = entry?.path();
            if path.file_name().is_some_and(atomic_file::is_temporary) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// Bytes written; none where they are too many.
    fn keep(&mut self, tensors: &[(&str, &HostTensor)], needed: &[&str]) -> Result<Option<u64>, KeepError> {
        let sums: Vec<(String, u64)> = tensors.iter().map(|(name, tensor)| checksum(name, tensor)).collect();
        let bytes = sums.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        let own: Vec<&str> = tensors.iter().map(|(name, _)| *name).collect();
        let stays = needed.iter().filter(|name| !own.contains(name)).map(|name| self.bytes_of(name));
        let together = stays.fold(bytes, u64::saturating_add);
        if together > self.runs.limit || sums.iter().any(|(_, bytes)| *bytes > npy::MAX_FILE_BYTES) {
            return Ok(None);
        }
        self.runs.make_room(bytes, &self.claim.folder);
        for ((name, tensor), (sum, _)) in tensors.iter().zip(sums) {
            let file = format!("{name}.{sum}.npy");
            npy::write(&self.claim.folder.join(&file), Existing::Replace, tensor)?;
            if let Some(old) =
                self.tensors.insert((*name).to_owned(), file.clone()).filter(|old| *old != file)
            {
                let _ = fs::remove_file(self.claim.folder.join(old));
            }
        }
        self.forget_all_but(&[&own, needed].concat());
        Ok(Some(bytes))
    }

    /// Bytes of a kept tensor.
    fn bytes_of(&self, name: &str) -> u64 {
        let file = self.tensors.get(name).map(|file| self.claim.folder.join(file));
        file.and_then(|file| fs::metadata(file).ok()).map_or(0, |metadata| metadata.len())
    }

    fn forget_all_but(&mut self, needed: &[&str]) {
        let folder = &self.claim.folder;
        self.tensors.retain(|name, file| {
            let stays = needed.contains(&name.as_str());
            if !stays {
                // One that cannot be removed only takes room.
                let _ = fs::remove_file(folder.join(file));
            }
            stays
        });
    }
}

/// The tensor's name in the name of its file.
pub(super) fn name_of(file: &str) -> Option<&str> {
    let (name, sum) = file.strip_suffix(".npy")?.rsplit_once('.')?;
    (is_plain(name) && sum.len() == CHECKSUM_DIGITS).then_some(name)
}

/// Names of stages come from the bundle, which may be anyone's.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Reads a tensor whose file's name states its name and its checksum.
fn load(name: &str, path: &Path) -> Result<HostTensor, LoadError> {
    let (file, bytes) = open_regular(path)?;
    let mut sum = Checksum::of(name);
    io::copy(&mut file.take(bytes), &mut sum)?;
    let found = sum.finish().0;
    let stem = path.file_stem().unwrap_or_default().as_encoded_bytes();
    if !stem.ends_with(format!(".{found}").as_bytes()) {
        return Err(LoadError::Checksum { found });
    }
    let tensor = npy::read(path)?;
    check_finite(name, None, &tensor)?;
    Ok(tensor)
}

/// The checksum of a tensor's name and file, and the file's length. Type and shape are part of the file.
fn checksum(name: &str, tensor: &HostTensor) -> (String, u64) {
    let mut sum = Checksum::of(name);
    npy::write_to(&mut sum, tensor).expect("a checksum takes every byte");
    sum.finish()
}

/// Adds up what is written into it, behind a name.
struct Checksum {
    hash: Sha256,
    bytes: u64,
}

impl Checksum {
    fn of(name: &str) -> Checksum {
        Checksum { hash: Sha256::new_with_prefix(name), bytes: 0 }
    }

    fn finish(self) -> (String, u64) {
        (first(hex(&self.hash.finalize()), CHECKSUM_DIGITS), self.bytes)
    }
}

impl Write for Checksum {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn first(mut text: String, digits: usize) -> String {
    text.truncate(digits);
    text
}
