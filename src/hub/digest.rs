//! Hashes of contents, computed beside the work that brings them.

use std::{
    fmt,
    sync::mpsc::{Receiver, SyncSender, channel, sync_channel},
    thread::{self, JoinHandle},
};

use sha1::Sha1;
use sha2::{Digest, Sha256};
use viaduct_export::files::hex;

use super::error::HubError;

/// Bytes of a piece.
pub(super) const PIECE: usize = 256 << 10;
/// Pieces that wait to be hashed.
const WAITING: usize = 16;

/// What a hub names a content by; also the name of its file in the cache.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ContentId {
    /// Of large files: SHA-256 of the content.
    Sha256(String),
    /// Of files that git itself keeps: SHA-1 of `blob`, the length and the content.
    Git(String),
}

impl ContentId {
    pub(super) fn sha256(hex: &str) -> Option<ContentId> {
        is_hex(hex, 64).then(|| ContentId::Sha256(hex.to_owned()))
    }

    pub(super) fn git(hex: &str) -> Option<ContentId> {
        is_hex(hex, 40).then(|| ContentId::Git(hex.to_owned()))
    }

    /// Whether a text is of the form of an id.
    pub(super) fn is_one(text: &str) -> bool {
        is_hex(text, 64) || is_hex(text, 40)
    }

    pub fn as_str(&self) -> &str {
        let (ContentId::Sha256(hex) | ContentId::Git(hex)) = self;
        hex
    }
}

impl fmt::Display for ContentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

enum Hasher {
    Sha256(Sha256),
    Git(Sha1),
}

impl Hasher {
    fn new(id: &ContentId, bytes: u64) -> Hasher {
        match id {
            ContentId::Sha256(_) => Hasher::Sha256(Sha256::new()),
            ContentId::Git(_) => Hasher::Git(Sha1::new().chain_update(format!("blob {bytes}\0"))),
        }
    }

    fn update(&mut self, piece: &[u8]) {
        match self {
            Hasher::Sha256(hasher) => hasher.update(piece),
            Hasher::Git(hasher) => hasher.update(piece),
        }
    }

    fn finish(self) -> ContentId {
        match self {
            Hasher::Sha256(hasher) => ContentId::Sha256(hex(&hasher.finalize())),
            Hasher::Git(hasher) => ContentId::Git(hex(&hasher.finalize())),
        }
    }
}

/// A piece of a content: a buffer and how much of it counts.
pub(super) struct Piece {
    pub buffer: Vec<u8>,
    pub len: usize,
}

/// Hashes pieces in a thread of its own: a network and a hash take about the same time.
pub(super) struct Digester {
    pieces: SyncSender<Piece>,
    hashed: Receiver<Piece>,
    thread: JoinHandle<ContentId>,
}

impl Digester {
    /// For a content of so many bytes that is to have this id.
    pub(super) fn start(id: &ContentId, bytes: u64) -> Result<Digester, HubError> {
        let mut hasher = Hasher::new(id, bytes);
        let (pieces, waiting) = sync_channel::<Piece>(WAITING);
        let (give_back, hashed) = channel();
        let hash = move || {
            for piece in waiting {
                hasher.update(&piece.buffer[..piece.len]);
                // Nobody needs the buffer when the transfer has ended.
                let _ = give_back.send(piece);
            }
            hasher.finish()
        };
        let thread = thread::Builder::new().spawn(hash).map_err(HubError::Thread)?;
        Ok(Digester { pieces, hashed, thread })
    }

    /// An empty piece, of a buffer that was used before if there is one.
    pub(super) fn piece(&self) -> Piece {
        let used = self.hashed.try_recv().map(|piece| Piece { len: 0, ..piece });
        used.unwrap_or_else(|_| Piece { buffer: vec![0; PIECE], len: 0 })
    }

    pub(super) fn update(&self, piece: Piece) {
        // The thread takes pieces until the sender is dropped.
        let _ = self.pieces.send(piece);
    }

    /// The id of all that was given.
    pub(super) fn finish(self) -> ContentId {
        drop(self.pieces);
        self.thread.join().expect("hashing does not panic")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id_of(content: &[u8], like: &ContentId) -> ContentId {
        let digester = Digester::start(like, content.len() as u64).unwrap();
        for part in content.chunks(3) {
            let mut piece = digester.piece();
            piece.buffer[..part.len()].copy_from_slice(part);
            piece.len = part.len();
            digester.update(piece);
        }
        digester.finish()
    }

    #[test]
    fn ids_are_those_of_git_and_of_large_files() {
        // `printf 'hello\n' | git hash-object --stdin` and `| sha256sum`.
        let git = ContentId::git("ce013625030ba8dba906f756967f9e9ca394464a").unwrap();
        assert_eq!(id_of(b"hello\n", &git), git);
        let sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        let sha256 = ContentId::sha256(sha256).unwrap();
        assert_eq!(id_of(b"hello\n", &sha256), sha256);
    }

    #[test]
    fn other_texts_are_no_ids() {
        for text in ["", "ce01", "../../../../../../../../../../etc/passwd", &"g".repeat(40), &"A".repeat(64)]
        {
            assert_eq!((ContentId::git(text), ContentId::sha256(text)), (None, None), "{text}");
        }
    }
}
