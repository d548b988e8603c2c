//! The bytes of a file of a repository, in memory or on disk.

use std::{fs::File, io, os::unix::fs::FileExt, path::Path, sync::Arc};

use sha1::Sha1;
use sha2::{Digest, Sha256};

const BLOCK: usize = 256 << 10;

/// The bytes of a file, in memory or on disk.
#[derive(Clone)]
pub enum Content {
    /// Bytes in memory.
    Memory(Arc<[u8]>),
    /// An open file and its size in bytes.
    Disk(Arc<File>, u64),
}

impl Content {
    /// The content of a file on disk, which is read whenever it is served.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        Ok(Self::Disk(Arc::new(file), size))
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        match self {
            Self::Memory(bytes) => bytes.len() as u64,
            Self::Disk(_, size) => *size,
        }
    }

    /// Fills the buffer from that offset on; the content must reach so far.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Memory(bytes) => {
                let start = usize::try_from(offset).map_err(io::Error::other)?;
                buffer.copy_from_slice(&bytes[start..start + buffer.len()]);
                Ok(())
            }
            Self::Disk(file, _) => file.read_exact_at(buffer, offset),
        }
    }

    /// SHA-256 in hexadecimal, as Git LFS names a file.
    pub fn sha256(&self) -> io::Result<String> {
        self.digest(Sha256::new())
    }

    /// The SHA-1 in hexadecimal under which Git stores a file.
    pub fn git_sha1(&self) -> io::Result<String> {
        self.digest(Sha1::new_with_prefix(format!("blob {}\0", self.size())))
    }

    /// Other bytes of the same size: each bit is turned.
    pub(crate) fn inverted(&self) -> io::Result<Self> {
        let mut bytes = vec![0; usize::try_from(self.size()).map_err(io::Error::other)?];
        self.read_at(0, &mut bytes)?;
        bytes.iter_mut().for_each(|byte| *byte = !*byte);
        Ok(bytes.into())
    }

    fn digest(&self, mut hash: impl Digest) -> io::Result<String> {
        let mut offset = 0;
        let mut block = vec![0; BLOCK];
        while offset < self.size() {
            let length = (self.size() - offset).min(BLOCK as u64) as usize;
            self.read_at(offset, &mut block[..length])?;
            hash.update(&block[..length]);
            offset += length as u64;
        }
        Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl From<Vec<u8>> for Content {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Memory(bytes.into())
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        text.as_bytes().to_vec().into()
    }
}

/// Bytes that look random and follow from the seed (splitmix64).
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed;
    let words = std::iter::repeat_with(|| {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    });
    words.flat_map(u64::to_le_bytes).take(length).collect()
}
