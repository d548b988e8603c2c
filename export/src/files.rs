//! Opening files that others made: regular ones only, and never more of one than its reader is ready for.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::Path,
};

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
