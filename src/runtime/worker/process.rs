//! One child process: started, spoken to, and never left behind.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    time::{Duration, Instant},
};

use super::protocol::{Reply, Request};
use crate::runtime::{RuntimeError, volunteer_for_oom_killer};

/// How long a child may take to end a session or itself: a driver may stall for ever when its device is torn down
/// (<https://github.com/akandr/bc250>).
pub(super) const TEARDOWN: Duration = Duration::from_secs(5);
/// How often a child that is silent is looked at.
const HALT: Duration = Duration::from_secs(5);
/// Longer than any reply.
const MAX_LINE: u64 = 1 << 24;

/// A running child. Dropping it kills and reaps it.
pub(super) struct Process {
    child: Child,
    input: Option<ChildStdin>,
    replies: Receiver<String>,
}

/// Why no reply came.
pub(super) enum Silence {
    /// The child ended, or closed its output.
    Ended,
    TimedOut,
    Unintelligible(String),
}

impl Process {
    /// Starts `viaduct worker` from this very executable.
    pub fn start() -> Result<Process, RuntimeError> {
        let unusable = |problem: String| RuntimeError::WorkerUnusable { problem };
        let executable = std::env::current_exe().map_err(|e| unusable(format!("has no executable: {e}")))?;
        let mut command = Command::new(executable);
        command.arg("worker").stdin(Stdio::piped()).stdout(Stdio::piped());
        let parent = std::process::id();
        // SAFETY: what runs between fork and exec only makes system calls.
        unsafe { command.pre_exec(move || bind_to_parent(parent)) };
        let mut child = command.spawn().map_err(|e| unusable(format!("could not be started: {e}")))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        // One answer at a time: a child that babbles must wait.
        let (lines, replies) = sync_channel(1);
        // Ends with the child's output.
        let listener = std::thread::Builder::new().name("worker output".to_owned());
        let listening = listener.spawn(move || output.into_iter().for_each(|output| pass_on(output, &lines)));
        // Dropped, it ends the child.
        let process = Process { child, input, replies };
        match listening {
            Ok(_) => Ok(process),
            Err(e) => Err(unusable(format!("cannot be listened to, for lack of a thread: {e}"))),
        }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a request and waits for its answer, for ever if no limit is given.
    pub fn ask(&mut self, request: &Request, limit: Option<Duration>) -> Result<Reply, Silence> {
        self.tell(request);
        self.answer(limit)
    }

    /// Sends a request whose answer is for later.
    pub fn tell(&mut self, request: &Request) {
        let mut line = serde_json::to_string(request).expect("a request has string keys and plain values");
        line.push('\n');
        // A child that has ended may have said why before: its last words are read even if it hears nothing any more.
        let _ = self.input.as_mut().map(|input| input.write_all(line.as_bytes()));
    }

    /// Waits for the next answer, for ever if no limit is given.
    pub fn answer(&mut self, limit: Option<Duration>) -> Result<Reply, Silence> {
        let line = match limit {
            None => self.next_line()?,
            Some(limit) => self.replies.recv_timeout(limit).map_err(|e| match e {
                RecvTimeoutError::Timeout => Silence::TimedOut,
                RecvTimeoutError::Disconnected => Silence::Ended,
            })?,
        };
        serde_json::from_str(&line).map_err(|e| Silence::Unintelligible(e.to_string()))
    }

    /// Waits for the next line, for ever; says so if the child is halted meanwhile, as by a terminal.
    fn next_line(&self) -> Result<String, Silence> {
        let mut told = false;
        loop {
            match self.replies.recv_timeout(HALT) {
                Ok(line) => return Ok(line),
                Err(RecvTimeoutError::Disconnected) => return Err(Silence::Ended),
                Err(RecvTimeoutError::Timeout) if !told && is_halted(self.id()) => {
                    tracing::warn!("the worker {} is halted by a signal; SIGCONT lets it go on", self.id());
                    told = true;
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Tells the child to end by itself: the end of its input does.
    pub fn dismiss(&mut self) {
        self.input = None;
    }

    /// Lets the child end by itself for a while, then kills it.
    pub fn stop(mut self) {
        self.dismiss();
        let _ = self.ended();
    }

    /// How a child that fell silent ended, in words; one that still runs is killed.
    pub fn end(mut self) -> String {
        self.dismiss();
        match self.ended() {
            Some(status) => in_words(status),
            None => "fell silent and was killed".to_owned(),
        }
    }

    /// Waits a while for the child's end.
    fn ended(&mut self) -> Option<ExitStatus> {
        let started = Instant::now();
        while started.elapsed() < TEARDOWN {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        None
    }
}

/// Whether a process is stopped (proc_pid_stat(5): its state follows its name, which may hold anything).
fn is_halted(id: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T'))
}

/// Reads lines to the end of the output, or until nobody takes them.
fn pass_on(output: ChildStdout, lines: &SyncSender<String>) {
    let mut output = BufReader::new(output);
    let mut line = String::new();
    while output.by_ref().take(MAX_LINE).read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
        if lines.send(std::mem::take(&mut line)).is_err() {
            return;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        // A child that is stuck in the kernel, inside of a driver, dies when it gets out: nobody waits for that.
        let _ = self.ended();
    }
}

/// Runs in the child before its program: it must not outlive its parent, and leaves to it the signals that end a whole
/// group of processes. A child that such a signal ended first would look like one that crashed.
fn bind_to_parent(parent: u32) -> std::io::Result<()> {
    // SAFETY: system calls of this process alone.
    unsafe {
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // A parent that died before the call above sends no signal.
        if libc::getppid() as u32 != parent {
            libc::_exit(1);
        }
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
    // Where it may not, the kernel chooses as it likes.
    let _ = volunteer_for_oom_killer();
    Ok(())
}

fn in_words(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(libc::SIGKILL), _) => {
            "was killed by signal 9: the system may have run out of memory; what is done of a single picture is kept for the same command; or try a smaller size".to_owned()
        }
        (Some(signal), _) => format!("was ended by signal {signal}: the driver or ONNX Runtime crashed"),
        (None, Some(code)) => format!("ended by itself with code {code}"),
        (None, None) => "ended".to_owned(),
    }
}
