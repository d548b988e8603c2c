//! One content, brought from where it was broken off, checked, and only then given its name.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    time::Duration,
};

use ureq::http::{HeaderMap, StatusCode, header};

use super::{
    Tell,
    cache::Shelf,
    client::{Answer, Attempts, Client, Failure},
    digest::{ContentId, Digester},
    error::HubError,
    reference::RepoId,
    settings::Patience,
    stop::Stop,
};
use crate::pipeline::event::Event;

/// How often a content may turn out to be another one before that is an error.
const TRIES: usize = 2;
/// Bytes per second at which a server must be allowed to reach the end that begins anew each time.
const SLOWEST: u64 = 50_000;
/// After so many bytes the system begins to bring them to the disk, so that little is left to wait for at the end.
const WRITE_BACK: u64 = 8 << 20;

/// What is to be brought.
pub(super) struct Wanted<'a> {
    pub repo: &'a RepoId,
    pub commit: &'a str,
    /// The file's name, for the address and for messages.
    pub name: &'a str,
    pub bytes: u64,
    pub id: &'a ContentId,
}

/// Brings contents into one repository's part of the cache.
pub(super) struct Transfers<'a> {
    pub client: &'a Client,
    pub shelf: &'a Shelf,
    pub patience: Patience,
    pub stop: &'a Stop<'a>,
    pub tell: Tell<'a>,
}

/// How far a transfer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moved {
    /// So many bytes of the content are here; fewer than before if it begins anew.
    To(u64),
    /// So many bytes came over the network.
    Came(u64),
}

impl Transfers<'_> {
    /// Sees to it that the content is in the cache; of several processes one brings it. Tells whether it was this one.
    pub(super) fn bring(&self, wanted: &Wanted<'_>, moved: &mut dyn FnMut(Moved)) -> Result<bool, HubError> {
        let blob = self.shelf.blob(wanted.id);
        if is_there(&blob, wanted.bytes) {
            return Ok(false);
        }
        let partial = incomplete(&blob);
        let mut waits = false;
        // Elsewhere than in the other process nobody sees how far it is.
        let watch = || {
            if !std::mem::replace(&mut waits, true) {
                let Wanted { repo, name, .. } = wanted;
                (self.tell)(Event::note(format!(
                    "{repo}: another process is downloading {name}; waiting for it"
                )));
            }
            moved(Moved::To(fs::metadata(&partial).map_or(0, |metadata| metadata.len())));
        };
        let _lock = self.shelf.lock(wanted.id, self.stop, watch)?;
        if is_there(&blob, wanted.bytes) {
            return Ok(false);
        }
        let what = format!("{}: {}", wanted.repo, wanted.name);
        let mut partial = Partial::open(partial, wanted)?;
        for tried in 1.. {
            let found = self.fill(&mut partial, wanted, &what, moved)?;
            if found == *wanted.id {
                break;
            }
            partial.clear()?;
            if tried == TRIES {
                let expected = wanted.id.to_string();
                let _ = fs::remove_file(&partial.path);
                return Err(HubError::Corrupt { what, expected, found: found.to_string() });
            }
            (self.tell)(Event::note(format!(
                "{what}: the bytes are not those that the hub states; they are brought once more"
            )));
        }
        partial.publish(&blob)?;
        Ok(true)
    }

    /// Takes a file for the content that lies in the snapshot itself, as it does where a cache was copied without links.
    pub(super) fn adopt(&self, wanted: &Wanted<'_>) -> Result<(), HubError> {
        let (file, blob) = (self.shelf.snapshot(wanted.commit).join(wanted.name), self.shelf.blob(wanted.id));
        let is_file = fs::symlink_metadata(&file).is_ok_and(|metadata| metadata.is_file());
        if !is_file || blob.exists() || !is_there(&file, wanted.bytes) {
            return Ok(());
        }
        if hash(&file, wanted.id, wanted.bytes, self.stop)? == *wanted.id {
            let folder = blob.parent().unwrap_or(Path::new("."));
            fs::create_dir_all(folder)
                .and_then(|()| fs::rename(&file, &blob))
                .map_err(HubError::io(&blob))?;
        }
        Ok(())
    }

    /// Brings what is missing, and tells what it all is.
    fn fill(
        &self,
        partial: &mut Partial,
        wanted: &Wanted<'_>,
        what: &str,
        moved: &mut dyn FnMut(Moved),
    ) -> Result<ContentId, HubError> {
        let url = self.client.address(wanted.repo, wanted.commit, wanted.name);
        let mut filling = Filling {
            digester: partial.digest(self.stop)?,
            partial,
            wanted,
            moved,
            stop: self.stop,
            continues: true,
        };
        let mut attempts = Attempts::new(self.patience, self.stop, self.tell, what);
        // One that begins anew and ends early again brings nothing.
        let mut furthest = filling.partial.bytes;
        while filling.partial.bytes < wanted.bytes {
            let attempt = self.attempt(&mut filling, &url);
            if filling.partial.bytes > furthest {
                furthest = filling.partial.bytes;
                attempts.brought_something();
            }
            if let Err(failure) = attempt {
                attempts.failed(failure)?;
            }
        }
        Ok(filling.digester.finish())
    }

    fn attempt(&self, filling: &mut Filling<'_>, url: &str) -> Result<(), Failure> {
        let from = filling.partial.bytes;
        let range = (from > 0).then(|| format!("bytes={from}-"));
        let limit = match filling.continues {
            true => self.patience.answer,
            false => self.patience.answer + Duration::from_secs(filling.wanted.bytes / SLOWEST),
        };
        let Wanted { repo, name, .. } = *filling.wanted;
        let answer = self.client.open(repo, name, url, range.as_deref(), limit)?;
        let id = filling.wanted.id.as_str();
        if let Some(content) = answer.content.as_ref().filter(|content| *content != id) {
            return Err(Failure::passing(format!("the hub names content {content} instead of {id}")));
        }
        match answer.status {
            StatusCode::PARTIAL_CONTENT => check_range(&answer.headers, from, filling.wanted.bytes)?,
            // The server knows no ranges: what it sends begins at the beginning.
            StatusCode::OK if from > 0 => {
                filling.continues = false;
                filling.restart()?;
            }
            StatusCode::OK => {}
            // It has fewer bytes than the hub says, or it counts wrongly.
            StatusCode::RANGE_NOT_SATISFIABLE => {
                filling.restart()?;
                return Err(Failure::passing(format!("the server has no bytes from {from} on")));
            }
            status => return Err(Failure::passing(format!("the server answered {status}"))),
        }
        filling.take(answer)
    }
}

/// A transfer in progress.
struct Filling<'a> {
    partial: &'a mut Partial,
    digester: Digester,
    wanted: &'a Wanted<'a>,
    moved: &'a mut dyn FnMut(Moved),
    stop: &'a Stop<'a>,
    /// Whether the server goes on where it is asked to.
    continues: bool,
}

impl Filling<'_> {
    fn restart(&mut self) -> Result<(), Failure> {
        self.partial.clear().map_err(Failure::Final)?;
        self.digester = Digester::start(self.wanted.id, self.wanted.bytes).map_err(Failure::Final)?;
        (self.moved)(Moved::To(0));
        Ok(())
    }

    /// Reads a body as far as the content goes.
    fn take(&mut self, answer: Answer) -> Result<(), Failure> {
        let mut body = answer.body.into_reader();
        while self.partial.bytes < self.wanted.bytes {
            if self.stop.is_asked() {
                return Err(Failure::Final(HubError::Interrupted));
            }
            let left = self.wanted.bytes - self.partial.bytes;
            let mut piece = self.digester.piece();
            let room = usize::try_from(left).unwrap_or(usize::MAX).min(piece.buffer.len());
            piece.len = match body.read(&mut piece.buffer[..room]) {
                Ok(0) => return Err(Failure::passing(format!("the connection ended {left} bytes early"))),
                Ok(len) => len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    return Err(Failure::passing(format!(
                        "the connection ended {left} bytes early: {error}"
                    )));
                }
            };
            self.partial.append(&piece.buffer[..piece.len]).map_err(Failure::Final)?;
            (self.moved)(Moved::Came(piece.len as u64));
            (self.moved)(Moved::To(self.partial.bytes));
            self.digester.update(piece);
        }
        Ok(())
    }
}

/// A body may be taken as the rest of a content only if it says that it is.
pub(super) fn check_range(headers: &HeaderMap, from: u64, bytes: u64) -> Result<(), Failure> {
    let range = headers.get(header::CONTENT_RANGE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let parsed = || {
        let (range, total) = range.strip_prefix("bytes ")?.split_once('/')?;
        let begin: u64 = range.split_once('-')?.0.trim().parse().ok()?;
        Some(begin == from && (total == "*" || total.trim().parse() == Ok(bytes)))
    };
    match parsed() {
        Some(true) => Ok(()),
        _ => Err(Failure::passing(format!(
            "asked for bytes from {from} of {bytes}, the server sends {range:?}"
        ))),
    }
}

/// What the bytes of a file are, which may be another content than `like`.
pub(super) fn hash(
    path: &Path,
    like: &ContentId,
    bytes: u64,
    stop: &Stop<'_>,
) -> Result<ContentId, HubError> {
    let digester = Digester::start(like, bytes)?;
    let read = || feed(&digester, &mut File::open(path)?, bytes, stop);
    read().map_err(HubError::io(path))?;
    if stop.is_asked() { Err(HubError::Interrupted) } else { Ok(digester.finish()) }
}

/// Hashes the first bytes of a file, and stands at their end; fewer if the work is to end.
fn feed(digester: &Digester, file: &mut File, bytes: u64, stop: &Stop<'_>) -> io::Result<()> {
    file.seek(SeekFrom::Start(0))?;
    let mut left = bytes;
    while left > 0 && !stop.is_asked() {
        let mut piece = digester.piece();
        piece.len = usize::try_from(left).unwrap_or(usize::MAX).min(piece.buffer.len());
        file.read_exact(&mut piece.buffer[..piece.len])?;
        left -= piece.len as u64;
        digester.update(piece);
    }
    Ok(())
}

/// A content that is not whole yet, under a name that says so.
struct Partial {
    path: PathBuf,
    file: File,
    bytes: u64,
    /// Bytes of which the system knows that they are to go to the disk.
    flushed: u64,
    whole: u64,
    id: ContentId,
}

pub(super) fn incomplete(blob: &Path) -> PathBuf {
    blob.with_extension("incomplete")
}

pub(super) fn is_there(blob: &Path, bytes: u64) -> bool {
    fs::metadata(blob).is_ok_and(|metadata| metadata.is_file() && metadata.len() == bytes)
}

impl Partial {
    fn open(path: PathBuf, wanted: &Wanted<'_>) -> Result<Partial, HubError> {
        let open = || {
            fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
            let file = File::options().create(true).read(true).write(true).truncate(false).open(&path)?;
            let bytes = file.metadata()?.len();
            Ok((file, bytes))
        };
        let (file, bytes) = open().map_err(HubError::io(&path))?;
        let mut partial =
            Partial { path, file, bytes, flushed: bytes, whole: wanted.bytes, id: wanted.id.clone() };
        if bytes > wanted.bytes {
            partial.clear()?;
        }
        Ok(partial)
    }

    /// Hashes what is there, and stands at its end.
    fn digest(&mut self, stop: &Stop<'_>) -> Result<Digester, HubError> {
        let digester = Digester::start(&self.id, self.whole)?;
        feed(&digester, &mut self.file, self.bytes, stop).map_err(HubError::io(&self.path))?;
        if stop.is_asked() { Err(HubError::Interrupted) } else { Ok(digester) }
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(HubError::io(&self.path))?;
        self.bytes += bytes.len() as u64;
        if self.bytes - self.flushed >= WRITE_BACK {
            start_write_back(&self.file, self.flushed, self.bytes);
            self.flushed = self.bytes;
        }
        Ok(())
    }

    fn clear(&mut self) -> Result<(), HubError> {
        let clear = |file: &mut File| {
            file.set_len(0)?;
            file.seek(SeekFrom::Start(0))
        };
        clear(&mut self.file).map_err(HubError::io(&self.path))?;
        (self.bytes, self.flushed) = (0, 0);
        Ok(())
    }

    /// Gives the content its name: from here on everybody may take it for whole.
    fn publish(self, blob: &Path) -> Result<(), HubError> {
        let publish = || {
            self.file.sync_all()?;
            fs::rename(&self.path, blob)?;
            File::open(blob.parent().unwrap_or(Path::new(".")))?.sync_all()
        };
        publish().map_err(HubError::io(blob))
    }
}

/// Lets the system begin to bring these bytes to the disk. Whether they are there only `fsync` tells, errors included.
fn start_write_back(file: &File, from: u64, to: u64) {
    let (Ok(offset), Ok(bytes)) = (i64::try_from(from), i64::try_from(to - from)) else { return };
    // SAFETY: the descriptor is open as long as `file`, and the call touches no memory of ours.
    unsafe { libc::sync_file_range(file.as_raw_fd(), offset, bytes, libc::SYNC_FILE_RANGE_WRITE) };
}
