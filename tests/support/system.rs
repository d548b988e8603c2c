//! A folder that stands for the kernel's /proc and /sys.
#![allow(dead_code)]

use std::{fs, path::Path};

use tempfile::TempDir;
use viaduct::runtime::memory::MemorySource;

pub struct System(TempDir);

impl System {
    /// A machine with 16 GiB, of which 12 are available, without a limit or a GPU.
    pub fn new() -> System {
        let system = System(TempDir::new().unwrap());
        system.put("proc/meminfo", &meminfo(16 << 20, 12 << 20));
        system
    }

    pub fn put(&self, path: &str, text: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A process's membership, and version 1 or 2 mounted where it usually is.
    pub fn put_cgroup(&self, process: &str, version: u8, group: &str) {
        let (membership, mount) = match version {
            1 => (
                format!("9:name=systemd:/\n4:cpu,memory:{group}\n"),
                "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            ),
            _ => (format!("0::{group}\n"), "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
        };
        self.put(&format!("proc/{process}/cgroup"), &membership);
        self.put(
            &format!("proc/{process}/mountinfo"),
            &format!("21 1 0:20 / / rw - ext4 /dev/vda rw\n{mount}"),
        );
    }

    /// An AMD BC-250: 512 MiB are the GPU's own, and it may take some of the rest.
    pub fn put_bc250(&self, gtt_bytes: u64, pages_limit: &str) {
        for (name, text) in [
            ("vendor", "0x1002\n".to_owned()),
            ("device", "0x13fe\n".to_owned()),
            ("mem_info_vram_total", "536870912\n".to_owned()),
            ("mem_info_vram_used", "41943040\n".to_owned()),
            ("mem_info_gtt_total", format!("{gtt_bytes}\n")),
            ("mem_info_gtt_used", "1073741824\n".to_owned()),
        ] {
            self.put(&format!("sys/class/drm/card0/device/{name}"), &text);
        }
        self.put("sys/class/drm/card0-DP-1/status", "connected\n");
        self.put("sys/class/drm/renderD128/dev", "226:128\n");
        self.put("sys/module/ttm/parameters/pages_limit", pages_limit);
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn source(&self) -> MemorySource {
        MemorySource::at(self.path())
    }
}

/// `/proc/meminfo` of a machine, in the kernel's kB.
pub fn meminfo(total: u64, available: u64) -> String {
    format!(
        "MemTotal:       {total} kB\nMemFree:          65536 kB\nMemAvailable:   {available} kB\n\
         Buffers:            1024 kB\nSwapCached:            0 kB\nSwapTotal:       2097152 kB\n\
         SwapFree:        1048576 kB\nHugePages_Total:       0\n"
    )
}
