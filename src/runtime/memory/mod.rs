//! What the kernel says about memory: the machine's, a control group's, a GPU's and a process's.
//!
//! Everything is read from text files under /proc and /sys. The parsers are pure functions over bytes: what is missing
//! or makes no sense is `None`, never an error and never a panic.

mod budget;
mod cgroup;
mod gpu;
mod host;
mod kernel_file;
mod process;

use std::path::{Path, PathBuf};

pub use budget::{Budget, Floor, FloorError, effective_budget};
pub use cgroup::CgroupMemory;
pub use gpu::{GpuMemory, Pool};
pub use host::{HostMemory, Limit, MemoryGauge};
pub use process::{ProcessGpuMemory, ProcessMemory};

pub(super) use process::ProcessGauge;

/// Whose /proc and /sys are read; tests put a folder of files in their place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemorySource {
    root: PathBuf,
}

impl MemorySource {
    /// This machine. The environment variable `VIADUCT_SYSTEM_ROOT`, which only tests set, names another root for
    /// `proc` and `sys`.
    pub fn system() -> MemorySource {
        MemorySource::at(std::env::var_os("VIADUCT_SYSTEM_ROOT").unwrap_or_else(|| "/".into()))
    }

    pub fn at(root: impl Into<PathBuf>) -> MemorySource {
        MemorySource { root: root.into() }
    }

    /// Memory as this process sees it now, or `None` where the kernel does not tell.
    pub fn host(&self) -> Option<HostMemory> {
        MemoryGauge::of_this_process(self)?.read()
    }

    /// GPUs whose drivers tell their memory (amdgpu), in the order of their numbers.
    pub fn gpus(&self) -> Vec<GpuMemory> {
        gpu::read_all(self)
    }

    /// Memory of a process, or `None` if it has ended.
    pub fn process(&self, pid: u32) -> Option<ProcessMemory> {
        ProcessGauge::open(self, pid)?.read()
    }

    /// What a process holds of all GPUs; zero where its driver does not tell.
    pub fn process_gpu(&self, pid: u32) -> ProcessGpuMemory {
        process::gpu_memory(self, pid)
    }

    /// The path of an absolute one under the root.
    fn path(&self, absolute: impl AsRef<Path>) -> PathBuf {
        let absolute = absolute.as_ref();
        self.root.join(absolute.strip_prefix("/").unwrap_or(absolute))
    }
}
