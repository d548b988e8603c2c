//! Memory of one process: resident pages, and what it holds of GPUs.

use std::{collections::BTreeSet, fs};

use super::{
    MemorySource,
    kernel_file::{Buffer, KernelFile, bytes, field},
};

/// Resident pages of a process, in bytes (proc_pid_status(5)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// All of them: the sum of the three below.
    pub resident: u64,
    pub anonymous: u64,
    /// Pages of mapped files; the kernel can drop clean ones.
    pub files: u64,
    pub shared: u64,
    /// The most that `resident` has been since the program started: `VmHWM`.
    pub peak: u64,
}

impl ProcessMemory {
    /// `None` for a process that has ended: it has no memory, even while its parent has not collected it.
    fn parse(status: &[u8]) -> Option<ProcessMemory> {
        let resident = field(status, "VmRSS")?;
        let of = |name| field(status, name).unwrap_or(0);
        Some(ProcessMemory {
            resident,
            anonymous: of("RssAnon"),
            files: of("RssFile"),
            shared: of("RssShmem"),
            peak: of("VmHWM").max(resident),
        })
    }

    /// Bytes that the process holds of host and GPU together, each page counted once.
    ///
    /// Pages that a driver gives the GPU and maps into the process are no resident ones of it: the kernel maps their
    /// frames without counting them. The exception is a driver whose buffers are files in memory (i915, by its oldest
    /// call): they count as `shared` then. So of the GPU's pages in the machine's memory and the process's `shared` ones
    /// the larger figure counts, not the sum.
    pub fn with_gpu(&self, gpu: ProcessGpuMemory) -> u64 {
        let shared = gpu.shared.max(self.shared);
        (self.resident.saturating_sub(self.shared)).saturating_add(shared).saturating_add(gpu.own)
    }
}

/// Reads [`ProcessMemory`] again and again, always of the same process, without allocating.
pub(crate) struct ProcessGauge {
    status: KernelFile,
    buffer: Buffer,
}

impl ProcessGauge {
    pub(crate) fn open(source: &MemorySource, pid: u32) -> Option<ProcessGauge> {
        let status = KernelFile::open(&source.path(format!("/proc/{pid}/status")))?;
        Some(ProcessGauge { status, buffer: Buffer::new() })
    }

    pub(crate) fn read(&mut self) -> Option<ProcessMemory> {
        ProcessMemory::parse(self.status.read(&mut self.buffer)?)
    }
}

/// What a process holds of GPUs, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessGpuMemory {
    /// Memory of the GPU's own.
    pub own: u64,
    /// Pages of the machine's memory.
    pub shared: u64,
}

impl ProcessGpuMemory {
    pub fn total(&self) -> u64 {
        self.own.saturating_add(self.shared)
    }

    fn add(&mut self, memory: &[u8], bytes: u64) {
        let part = match memory {
            _ if [&b"vram"[..], b"local", b"stolen"].iter().any(|own| memory.starts_with(own)) => {
                &mut self.own
            }
            _ if [&b"gtt"[..], b"system", b"cpu"].iter().any(|shared| memory.starts_with(shared)) => {
                &mut self.shared
            }
            _ => return,
        };
        *part = part.saturating_add(bytes);
    }
}

/// Sums up what the files under `/proc/PID/fdinfo` tell. A driver may wait for the GPU before it answers.
pub(super) fn gpu_memory(source: &MemorySource, pid: u32) -> ProcessGpuMemory {
    let entries = fs::read_dir(source.path(format!("/proc/{pid}/fdinfo"))).into_iter().flatten().flatten();
    let mut clients = Clients::default();
    for text in entries.filter_map(|entry| fs::read(entry.path()).ok()) {
        clients.add(&text);
    }
    clients.memory
}

/// Several descriptors may lead to one client of a driver; its memory counts once.
#[derive(Default)]
struct Clients {
    seen: BTreeSet<(Vec<u8>, Vec<u8>)>,
    memory: ProcessGpuMemory,
}

impl Clients {
    /// Adds the text of one descriptor, which is empty of `drm-` lines unless it is open on a GPU
    /// (<https://docs.kernel.org/gpu/drm-usage-stats.html>).
    fn add(&mut self, text: &[u8]) {
        let Some(client) = value(text, b"drm-client-id") else { return };
        let device = value(text, b"drm-pdev").unwrap_or_default();
        if !self.seen.insert((device.to_vec(), client.to_vec())) {
            return;
        }
        for memory in memories(text) {
            let amount = |kind: &str| bytes(value(text, &[b"drm-", kind.as_bytes(), b"-", memory].concat())?);
            // Older amdgpu has only `memory`, which means resident; `total` includes what was never touched.
            let held = ["resident", "memory", "total"].into_iter().find_map(amount);
            self.memory.add(memory, held.unwrap_or(0));
        }
    }
}

/// Names of the kinds of memory that a client's text tells of.
fn memories(text: &[u8]) -> BTreeSet<&[u8]> {
    lines(text)
        .filter_map(|(name, _)| {
            ["drm-resident-", "drm-memory-", "drm-total-"]
                .iter()
                .find_map(|kind| name.strip_prefix(kind.as_bytes()))
        })
        .collect()
}

fn value<'a>(text: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    lines(text).find_map(|(key, value)| (key == name).then_some(value))
}

/// Lines of `name: value`.
fn lines(text: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    text.split(|b| *b == b'\n').filter_map(|line| {
        let colon = line.iter().position(|b| *b == b':')?;
        Some((line[..colon].trim_ascii(), line[colon + 1..].trim_ascii()))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Clients, ProcessGpuMemory, ProcessMemory};

    const MIB: u64 = 1 << 20;

    fn read(texts: &[&str]) -> ProcessGpuMemory {
        let mut clients = Clients::default();
        texts.iter().for_each(|text| clients.add(text.as_bytes()));
        clients.memory
    }

    const AMDGPU: &str = "pos:\t0\nflags:\t02100002\nmnt_id:\t27\nino:\t1082\ndrm-driver:\tamdgpu\ndrm-client-id:\t91\n\
        drm-pdev:\t0000:01:00.0\npasid:\t32771\ndrm-total-cpu:\t0\ndrm-shared-cpu:\t0\ndrm-resident-cpu:\t0\n\
        drm-total-gtt:\t3072 MiB\ndrm-shared-gtt:\t0\ndrm-resident-gtt:\t2048 MiB\ndrm-purgeable-gtt:\t0\n\
        drm-total-vram:\t256 MiB\ndrm-resident-vram:\t256 MiB\ndrm-memory-vram:\t262144 KiB\n\
        drm-memory-gtt: \t2097152 KiB\ndrm-memory-cpu: \t0 KiB\namd-evicted-vram:\t0 KiB\ndrm-engine-gfx:\t5 ns\n";
    const OLD_AMDGPU: &str = "drm-driver:\tamdgpu\ndrm-client-id:\t7\ndrm-pdev:\t0000:01:00.0\n\
        drm-memory-vram:\t1024 KiB\ndrm-memory-gtt: \t2048 KiB\ndrm-memory-cpu: \t0 KiB\n";
    const I915: &str = "drm-driver:\ti915\ndrm-client-id:\t4\ndrm-pdev:\t0000:00:02.0\ndrm-total-system0:\t64 MiB\n\
        drm-shared-system0:\t1 MiB\ndrm-active-system0:\t0\ndrm-resident-system0:\t48 MiB\n\
        drm-purgeable-system0:\t0\ndrm-total-stolen-system0:\t0\ndrm-engine-render:\t1 ns\n";
    const XE: &str = "drm-driver:\txe\ndrm-client-id:\t4\ndrm-pdev:\t0000:03:00.0\ndrm-total-system:\t0\n\
        drm-resident-system:\t0\ndrm-total-gtt:\t24 MiB\ndrm-resident-gtt:\t24 MiB\ndrm-total-vram0:\t512 MiB\n\
        drm-resident-vram0:\t500 MiB\ndrm-total-stolen:\t0\n";

    #[test]
    fn drivers_tell_the_memory_of_their_clients() {
        for (text, own, shared) in [
            (AMDGPU, 256 * MIB, 2048 * MIB),
            (OLD_AMDGPU, MIB, 2 * MIB),
            (I915, 0, 48 * MIB),
            (XE, 500 * MIB, 24 * MIB),
        ] {
            assert_eq!(read(&[text]), ProcessGpuMemory { own, shared }, "{text}");
        }
        assert_eq!(read(&["pos:\t0\nflags:\t02\n", ""]), ProcessGpuMemory::default());
    }

    #[test]
    fn clients_count_once() {
        assert_eq!(read(&[AMDGPU, AMDGPU]), read(&[AMDGPU]));
        // The same number on another device is another client.
        assert_eq!(read(&[I915, XE, I915]), ProcessGpuMemory { own: 500 * MIB, shared: 72 * MIB });
    }

    #[test]
    fn pages_count_once() {
        let status = b"Name:\tworker\nVmHWM:\t 9000 kB\nVmRSS:\t    8000 kB\nRssAnon:\t    5000 kB\n\
            RssFile:\t    2000 kB\nRssShmem:\t    1000 kB\nThreads:\t4\n";
        let process = ProcessMemory::parse(status).unwrap();
        assert_eq!((process.resident, process.peak, process.shared), (8000 << 10, 9000 << 10, 1000 << 10));
        for (own, shared, held) in [(0, 0, 8000), (300, 0, 8300), (0, 600, 8000), (300, 4000, 11300)] {
            let gpu = ProcessGpuMemory { own: own << 10, shared: shared << 10 };
            assert_eq!(process.with_gpu(gpu), held << 10, "{gpu:?}");
        }
        assert_eq!(ProcessMemory::parse(b"Name:\tgone\nState:\tZ (zombie)\n"), None);
    }

    proptest! {
        #[test]
        fn garbage_never_panics(text in "(drm-client-id:|drm-(total|resident)-|gtt|:| |[0-9]{1,22}|[KM]iB|\n|\\PC){0,40}") {
            read(&[&text]);
            let _ = ProcessMemory::parse(text.as_bytes());
        }
    }
}
