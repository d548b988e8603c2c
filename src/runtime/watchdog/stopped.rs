//! Why the watchdog stopped a run.

use std::{fmt, time::Duration};

use viaduct_export::bytes::ByteSize;

use crate::runtime::memory::{Limit, ProcessGpuMemory, ProcessMemory};

/// What the watchdog saw when available memory was below the floor and it killed the worker. Sizes are bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Stopped {
    pub stage: String,
    /// What the plan said that the stage needs.
    pub planned: u64,
    pub process: ProcessMemory,
    /// As last seen, up to a tenth of a second earlier.
    pub gpu: ProcessGpuMemory,
    pub available: u64,
    pub floor: u64,
    pub limit: Limit,
    /// From the reading that was below the floor to the signal's return.
    pub reaction: Duration,
}

impl Stopped {
    /// The exit code of a process that ends with this error.
    pub const EXIT_CODE: u8 = 5;

    /// What the worker held of host and GPU, each page counted once.
    pub fn held(&self) -> u64 {
        self.process.with_gpu(self.gpu)
    }
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [planned, held, available, floor] =
            [self.planned, self.held(), self.available, self.floor].map(ByteSize);
        let advice = match self.limit {
            Limit::Machine => "close other programs",
            Limit::Cgroup => "raise the limit",
        };
        write!(
            f,
            "stopped by the watchdog in stage {}: planned {planned}, the worker held {held}, {available} were available \
             (floor {floor}, {}); try a smaller size, or {advice}",
            self.stage, self.limit
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_tells_all_in_one_line() {
        let stopped = Stopped {
            stage: "vae_post1".to_owned(),
            planned: 3_328_599_654,
            process: ProcessMemory { resident: 1 << 30, ..ProcessMemory::default() },
            gpu: ProcessGpuMemory { own: 0, shared: 2_576_980_378 },
            available: 480 << 20,
            floor: 717 << 20,
            limit: Limit::Cgroup,
            reaction: Duration::from_micros(80),
        };
        assert_eq!(
            stopped.to_string(),
            "stopped by the watchdog in stage vae_post1: planned 3.1 GiB, the worker held 3.4 GiB, 480 MiB were \
             available (floor 717 MiB, cgroup limit); try a smaller size, or raise the limit"
        );
        let message = Stopped { limit: Limit::Machine, ..stopped }.to_string();
        assert!(
            message.ends_with(
                "(floor 717 MiB, the machine's memory); try a smaller size, or close other programs"
            )
        );
    }
}
