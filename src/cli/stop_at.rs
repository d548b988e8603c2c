//! For tests: a process that gets a signal at a known point of its run.

use crate::pipeline::event::Event;

/// `SIGNAL@POINT`, as in `KILL@kept:latents_step1`; points are `stage:NAME` (begins), `step:INDEX` (computed, not kept
/// yet) and `kept:NAME`. Read by `viaduct generate` for its tests; no user needs it.
const VARIABLE: &str = "VIADUCT_TEST_STOP";

const SIGNALS: [(&str, i32); 4] =
    [("KILL", libc::SIGKILL), ("INT", libc::SIGINT), ("TERM", libc::SIGTERM), ("STOP", libc::SIGSTOP)];

pub struct StopAt {
    signal: i32,
    point: String,
}

impl StopAt {
    /// What the environment asks for; most often nothing.
    pub fn from_environment() -> Option<StopAt> {
        let text = std::env::var(VARIABLE).ok()?;
        let (name, point) = text.split_once('@')?;
        let (_, signal) = SIGNALS.iter().find(|(known, _)| *known == name)?;
        Some(StopAt { signal: *signal, point: point.to_owned() })
    }

    pub fn hear(&self, event: &Event) {
        let point = match event {
            Event::Stage { name, .. } => format!("stage:{name}"),
            Event::Step { index, .. } => format!("step:{index}"),
            Event::Kept { name, .. } => format!("kept:{name}"),
            _ => return,
        };
        if point != self.point {
            return;
        }
        // SAFETY: sends this process a signal.
        unsafe { libc::kill(libc::getpid(), self.signal) };
        // The thread that takes the signal ends the process; a stopped process goes on when it is told to.
        if matches!(self.signal, libc::SIGINT | libc::SIGTERM) {
            loop {
                std::thread::park();
            }
        }
    }
}
