//! Memory of the machine, as far as one process may have it.

use std::{fmt, path::Path};

use super::{
    CgroupMemory, MemorySource,
    cgroup::Cgroups,
    kernel_file::{Buffer, KernelFile, field},
};

/// What decides how much memory is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    Machine,
    Cgroup,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Limit::Machine => "the machine's memory",
            Limit::Cgroup => "cgroup limit",
        })
    }
}

/// Bytes of memory at one moment.
///
/// Pages that a GPU maps of the machine's memory (GTT) are gone from `machine_available` whoever maps them: what such a
/// GPU uses is in these figures already and must not be taken off a second time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// `MemTotal`: the machine's memory without what firmware and GPUs keep.
    pub machine_total: u64,
    /// `MemAvailable`: what can be had without swapping.
    pub machine_available: u64,
    pub swap_total: u64,
    pub swap_free: u64,
    /// The limit of the process's control groups, if there is one.
    pub cgroup: Option<CgroupMemory>,
}

impl HostMemory {
    fn parse(meminfo: &[u8]) -> Option<HostMemory> {
        Some(HostMemory {
            machine_total: field(meminfo, "MemTotal")?,
            machine_available: field(meminfo, "MemAvailable")?,
            swap_total: field(meminfo, "SwapTotal").unwrap_or(0),
            swap_free: field(meminfo, "SwapFree").unwrap_or(0),
            cgroup: None,
        })
    }

    /// The lower of the machine's memory and the limit.
    pub fn total(&self) -> u64 {
        self.cgroup.map_or(self.machine_total, |cgroup| cgroup.limit.min(self.machine_total))
    }

    /// What the process can still take, swap not counted.
    pub fn available(&self) -> u64 {
        self.cgroup.map_or(self.machine_available, |cgroup| cgroup.available.min(self.machine_available))
    }

    /// What [`available`](HostMemory::available) comes from.
    pub fn limit(&self) -> Limit {
        match self.cgroup {
            Some(cgroup) if cgroup.available < self.machine_available => Limit::Cgroup,
            _ => Limit::Machine,
        }
    }
}

/// Reads [`HostMemory`] again and again: files stay open, reading allocates nothing. Limits may change meanwhile; that
/// the process moves to another group is not noticed.
pub struct MemoryGauge {
    meminfo: KernelFile,
    cgroups: Cgroups,
    buffer: Buffer,
}

impl MemoryGauge {
    pub fn of_this_process(source: &MemorySource) -> Option<MemoryGauge> {
        MemoryGauge::open(source, &source.path("/proc/self"))
    }

    /// With the limits of another process, which may be in another group.
    pub fn of_process(source: &MemorySource, pid: u32) -> Option<MemoryGauge> {
        MemoryGauge::open(source, &source.path(format!("/proc/{pid}")))
    }

    fn open(source: &MemorySource, process: &Path) -> Option<MemoryGauge> {
        let mut buffer = Buffer::new();
        Some(MemoryGauge {
            meminfo: KernelFile::open(&source.path("/proc/meminfo"))?,
            cgroups: Cgroups::open(source, process, &mut buffer),
            buffer,
        })
    }

    /// `None` if the kernel does not tell (any more).
    pub fn read(&mut self) -> Option<HostMemory> {
        self.read_until(u64::MAX)
    }

    /// The same at less cost for one who only asks whether `enough` is available: a group that has that much left
    /// without dropping pages of files is not asked how many it could drop, which is slow, and tells too little then.
    pub fn read_until(&mut self, enough: u64) -> Option<HostMemory> {
        let host = HostMemory::parse(self.meminfo.read(&mut self.buffer)?)?;
        Some(HostMemory { cgroup: self.cgroups.read(enough, &mut self.buffer), ..host })
    }
}
