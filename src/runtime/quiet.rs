//! Keeps what libraries print by themselves out of standard error, which belongs to the user and to JSON lines.

#[cfg(unix)]
use std::{
    fs::File,
    io::{Read, Seek},
    os::fd::AsRawFd,
};

/// Runs `work` with standard error going to a file, then passes the lines on as debug messages. The WebGPU plugin's Dawn
/// warns on standard error, without a way to ask it not to, whenever it opens an adapter.
#[cfg(unix)]
pub(super) fn quietly<T>(work: impl FnOnce() -> T) -> T {
    let Some(caught) = Caught::begin() else { return work() };
    let result = work();
    for line in caught.end().lines() {
        tracing::debug!(target: "webgpu", "{line}");
    }
    result
}

#[cfg(not(unix))]
pub(super) fn quietly<T>(work: impl FnOnce() -> T) -> T {
    work()
}

#[cfg(unix)]
struct Caught {
    file: File,
    /// A second descriptor of what standard error was.
    before: i32,
}

#[cfg(unix)]
impl Caught {
    fn begin() -> Option<Caught> {
        let file = tempfile::tempfile().ok()?;
        // SAFETY: duplicates descriptors of this process; a closed standard error gives -1 and is left alone.
        let before = unsafe { libc::dup(libc::STDERR_FILENO) };
        if before < 0 {
            return None;
        }
        // SAFETY: both descriptors are open.
        unsafe { libc::dup2(file.as_raw_fd(), libc::STDERR_FILENO) };
        Some(Caught { file, before })
    }

    fn end(self) -> String {
        let mut text = Vec::new();
        let mut file = &self.file;
        let read = file.rewind().and_then(|()| file.read_to_end(&mut text));
        read.map(|_| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default()
    }
}

/// Standard error comes back even where the work panics.
#[cfg(unix)]
impl Drop for Caught {
    fn drop(&mut self) {
        // SAFETY: `before` was made by `begin` and is closed here, once.
        unsafe {
            libc::dup2(self.before, libc::STDERR_FILENO);
            libc::close(self.before);
        }
    }
}
