//! A child process that can be killed, and no other in its place.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

/// Where the kernel has them (Linux 5.3), a process descriptor stays with its process for ever. A plain number is safe
/// only as long as the process is not collected (`wait`): until then no other gets it.
pub(super) struct ProcessHandle {
    pid: libc::pid_t,
    descriptor: Option<OwnedFd>,
}

impl ProcessHandle {
    pub(super) fn open(pid: u32) -> io::Result<ProcessHandle> {
        // Zero and negative numbers would mean whole groups of processes.
        let pid =
            libc::pid_t::try_from(pid).ok().filter(|pid| *pid > 0).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(ProcessHandle { pid, descriptor: descriptor(pid) })
    }

    /// Sends SIGKILL, which no process can refuse.
    pub(super) fn kill(&self) -> io::Result<()> {
        let sent = match &self.descriptor {
            // SAFETY: the descriptor is open; no signal information is passed.
            Some(descriptor) => unsafe {
                libc::syscall(
                    libc::SYS_pidfd_send_signal,
                    descriptor.as_raw_fd(),
                    libc::SIGKILL,
                    std::ptr::null::<libc::siginfo_t>(),
                    0,
                ) == 0
            },
            // SAFETY: sends a signal to one process, which the owner of this handle has not collected.
            None => unsafe { libc::kill(self.pid, libc::SIGKILL) == 0 },
        };
        if sent { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Whether the child is dead and waits to be collected. All its memory is back by then, which is later than the
    /// moment at which the kernel no longer tells how much it has.
    pub(super) fn has_ended(&self) -> bool {
        let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        // SAFETY: all zeros are a valid value of the C structure, which the call fills; the child is left uncollected.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let asked = libc::waitid(libc::P_PID, self.pid as libc::id_t, &mut info, options);
            asked != 0 || info.si_pid() == self.pid
        }
    }
}

fn descriptor(pid: libc::pid_t) -> Option<OwnedFd> {
    // SAFETY: makes a descriptor or fails.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    // SAFETY: it was just made, is owned by nothing else, and closes on exec.
    (descriptor >= 0).then(|| unsafe { OwnedFd::from_raw_fd(descriptor as i32) })
}
