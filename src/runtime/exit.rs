//! Leaving the process without waiting for the device.

use std::io::Write;

/// Ends the process at once, after flushing standard output and error: no destructors of libraries run.
///
/// Some Vulkan drivers stall for ever when their device is torn down, after all work is done and saved
/// (https://github.com/akandr/bc250). Call this when results are on disk; it never returns.
pub fn exit(code: u8) -> ! {
    // A reader that has gone away is no reason to stay.
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().flush();
    // SAFETY: ends the process; nothing of it runs afterwards.
    unsafe { libc::_exit(i32::from(code)) }
}

/// Lets a write beyond the process's file-size limit fail as an error, which is cleaned up after, instead of a signal,
/// which kills the process and leaves half-written files.
pub fn make_file_limits_errors() {
    // SAFETY: changes how this process takes one signal; no handler of ours runs.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}
