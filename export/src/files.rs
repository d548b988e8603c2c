//! Files that others made: opened if they are regular ones, never read beyond what the reader is ready for, and checked.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::Path,
};

use sha2::{Digest, Sha256};

/// Bytes as people write checksums: two lower-case digits each.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Opens a regular file (a link to one counts) and tells its size. A pipe would block for ever, a device has no end.
pub fn open_regular(path: &Path) -> io::Result<(File, u64)> {
    let metadata = fs::metadata(path)?;
    if metadata.is_dir() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder, not a file"));
    }
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok((File::open(path)?, metadata.len()))
}

/// Reads a whole regular file of at most `limit` bytes.
pub fn read_limited(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let (file, bytes) = open_regular(path)?;
    if bytes > limit {
        let message = format!("{bytes} bytes, more than the {limit} that are read");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    let mut content = Vec::new();
    file.take(limit).read_to_end(&mut content)?;
    Ok(content)
}

/// The SHA-256 of a regular file in hexadecimal digits; `progress` is told of the bytes of each part that was read.
pub fn sha256(path: &Path, progress: &mut dyn FnMut(u64)) -> io::Result<String> {
    const PART: usize = 1 << 20;
    let (mut file, mut hash, mut part) = (open_regular(path)?.0, Sha256::new(), vec![0; PART]);
    loop {
        match file.read(&mut part)? {
            0 => return Ok(hex(&hash.finalize())),
            count => {
                hash.update(&part[..count]);
                progress(count as u64);
            }
        }
    }
}
