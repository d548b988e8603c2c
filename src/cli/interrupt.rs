//! Ctrl-C and the signals that ask a process to end.

use std::{
    io::{self, Read},
    os::fd::IntoRawFd,
    ptr,
    sync::{
        atomic::{AtomicBool, AtomicI32, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

const SIGNALS: [i32; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// The end of the pipe that the handler writes to.
static PIPE: AtomicI32 = AtomicI32::new(-1);
/// Set by the first signal.
static SEEN: AtomicBool = AtomicBool::new(false);

/// The exit code of a process that a signal ends, as shells have it.
fn exit_code(signal: u8) -> u8 {
    128 + signal
}

/// Has the first of the signals call `act` with its number, on a thread of its own; a second one ends the process at
/// once. A signal that the process was started to ignore, as `nohup` does, stays ignored. A later call takes the place of
/// an earlier one.
pub fn on_interrupt(act: impl FnOnce(u8) + Send + 'static) -> io::Result<()> {
    let (mut reader, writer) = io::pipe()?;
    // Open for as long as the process lives.
    PIPE.store(writer.into_raw_fd(), Ordering::SeqCst);
    thread::Builder::new().name("interrupt".to_owned()).spawn(move || {
        let mut signal = [0];
        if reader.read_exact(&mut signal).is_ok() {
            act(signal[0]);
        }
    })?;
    SIGNALS.into_iter().try_for_each(install)
}

/// How long the last word may take: standard error may be a pipe that nobody reads.
const LAST_WORD: Duration = Duration::from_millis(500);

/// Ends the interrupted process after its last word.
pub fn leave_with(signal: u8, last_word: impl FnOnce() + Send + 'static) -> ! {
    within(LAST_WORD, last_word);
    leave(signal)
}

/// Does something for a while at most; what takes longer goes on alone.
fn within(limit: Duration, act: impl FnOnce() + Send + 'static) {
    let (done, wait) = mpsc::channel();
    let thread = thread::Builder::new().spawn(move || {
        act();
        let _ = done.send(());
    });
    if thread.is_ok() {
        let _ = wait.recv_timeout(limit);
    }
}

/// Ends the process that a signal has interrupted, without a lock that another thread may hold for ever.
fn leave(signal: u8) -> ! {
    // SAFETY: ends the process; nothing of it runs afterwards.
    unsafe { libc::_exit(i32::from(exit_code(signal))) }
}

fn install(signal: i32) -> io::Result<()> {
    // SAFETY: both structures are plain data for which all zeros is a value; the handler is async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(signal, ptr::null(), &mut action) != 0 {
            return Err(io::Error::last_os_error());
        }
        if action.sa_sigaction == libc::SIG_IGN {
            return Ok(());
        }
        action = std::mem::zeroed();
        action.sa_sigaction = forward as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        match libc::sigaction(signal, &action, ptr::null_mut()) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Passes a signal on to the thread that waits for it. Only async-signal-safe calls, and the interrupted thread's `errno`
/// stays.
extern "C" fn forward(signal: i32) {
    // Numbers of signals are below 65.
    let number = signal as u8;
    // SAFETY: `_exit` and `write` may be called in a handler; the byte outlives the call.
    unsafe {
        if SEEN.swap(true, Ordering::SeqCst) {
            libc::_exit(i32::from(exit_code(number)));
        }
        let errno = *libc::__errno_location();
        libc::write(PIPE.load(Ordering::SeqCst), ptr::from_ref(&number).cast(), 1);
        *libc::__errno_location() = errno;
    }
}
