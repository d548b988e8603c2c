//! What is read of the kernel's files, from folders that stand for machines that nobody here has.

#[path = "support/system.rs"]
mod system;

use std::fs;

use system::{System, meminfo};
use viaduct::runtime::memory::{CgroupMemory, Limit, MemoryGauge, MemorySource, Pool, ProcessGpuMemory};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

#[test]
fn meminfo_is_read() {
    let system = System::new();
    let host = system.source().host().unwrap();
    assert_eq!((host.total(), host.available()), (16 * GIB, 12 * GIB));
    assert_eq!((host.swap_total, host.swap_free), (2 * GIB, GIB));
    assert_eq!((host.cgroup, host.limit()), (None, Limit::Machine));
    system.put("proc/meminfo", "MemAvailable: 5 kB\nMemTotal: 10 kB");
    let host = system.source().host().unwrap();
    assert_eq!((host.total(), host.available(), host.swap_total), (10 << 10, 5 << 10, 0));
    let binary: String = (0..4096).map(|i| char::from(i as u8)).collect();
    for text in ["", "MemTotal: 10 kB\n", "MemTotal: lots\nMemAvailable: 5 kB\n", "MemTotal", &binary] {
        system.put("proc/meminfo", text);
        assert_eq!(system.source().host(), None, "{text:?}");
    }
    assert_eq!(MemorySource::at("/nowhere").host(), None);
}

#[test]
fn limits_of_version_1_are_read() {
    let system = System::new();
    system.put_cgroup("self", 1, "/jobs/mine");
    let group = |path: &str, limit: &str, usage: u64, stat: &str| {
        let folder = format!("sys/fs/cgroup/memory{path}");
        system.put(&format!("{folder}/memory.limit_in_bytes"), limit);
        system.put(&format!("{folder}/memory.usage_in_bytes"), &format!("{usage}\n"));
        system.put(&format!("{folder}/memory.stat"), stat);
    };
    let unlimited = "9223372036854771712\n";
    let unlimited_stat = "cache 1\nhierarchical_memory_limit 9223372036854771712\n";
    group("", unlimited, 5 * GIB, unlimited_stat);
    group("/jobs", unlimited, 4 * GIB, unlimited_stat);
    group("/jobs/mine", unlimited, 3 * GIB, unlimited_stat);
    assert_eq!(system.source().host().unwrap().cgroup, None);
    // The own group's limit, and files in its cache.
    let stat = format!(
        "inactive_file 1\ntotal_inactive_file {}\ntotal_active_file {}\n{unlimited_stat}",
        256 * MIB,
        256 * MIB
    );
    group("/jobs/mine", &(4 * GIB).to_string(), 3 * GIB, &stat);
    let host = system.source().host().unwrap();
    assert_eq!(host.cgroup, Some(CgroupMemory { limit: 4 * GIB, available: GIB + 512 * MIB }));
    assert_eq!((host.total(), host.available(), host.limit()), (4 * GIB, GIB + 512 * MIB, Limit::Cgroup));
    // The group above has less left.
    group("/jobs", &(4608 * MIB).to_string(), 4 * GIB, unlimited_stat);
    assert_eq!(system.source().host().unwrap().available(), 512 * MIB);
    // A limit outside a container shows only in the sum of all.
    let system = System::new();
    system.put_cgroup("self", 1, "/");
    let folder = "sys/fs/cgroup/memory";
    system.put(&format!("{folder}/memory.limit_in_bytes"), unlimited);
    system.put(&format!("{folder}/memory.usage_in_bytes"), "1073741824\n");
    system.put(&format!("{folder}/memory.stat"), "hierarchical_memory_limit 3221225472\n");
    assert_eq!(
        system.source().host().unwrap().cgroup,
        Some(CgroupMemory { limit: 3 * GIB, available: 2 * GIB })
    );
}

#[test]
fn limits_of_version_2_are_read() {
    let system = System::new();
    system.put_cgroup("self", 2, "/user.slice/app.scope");
    let group = |path: &str, files: &[(&str, &str)]| {
        for (name, text) in files {
            system.put(&format!("sys/fs/cgroup{path}/{name}"), text);
        }
    };
    group(
        "/user.slice/app.scope",
        &[
            ("memory.max", "max\n"),
            ("memory.high", "max\n"),
            ("memory.current", "1073741824\n"),
            ("memory.stat", "anon 5\nfile 7\ninactive_file 268435456\nactive_file 268435456\n"),
        ],
    );
    assert_eq!(system.source().host().unwrap().cgroup, None);
    let app = |max: &str, high: &str| {
        group("/user.slice/app.scope", &[("memory.max", max), ("memory.high", high)]);
        system.source().host().unwrap().cgroup
    };
    let half = 512 * MIB;
    assert_eq!(app("2147483648\n", "max\n"), Some(CgroupMemory { limit: 2 * GIB, available: GIB + half }));
    let mut gauge = MemoryGauge::of_this_process(&system.source()).unwrap();
    for (enough, available) in [(GIB, GIB), (GIB + 1, GIB + half)] {
        assert_eq!(gauge.read_until(enough).unwrap().available(), available);
    }
    assert_eq!(app("2147483648\n", "1073741824\n"), Some(CgroupMemory { limit: GIB, available: half }));
    assert_eq!(app("0\n", "max\n"), Some(CgroupMemory { limit: 0, available: 0 }));
    // The slice above is tighter, and has no statistics.
    app("2147483648\n", "max\n");
    group("/user.slice", &[("memory.max", "1610612736"), ("memory.current", "1342177280")]);
    assert_eq!(
        system.source().host().unwrap().cgroup,
        Some(CgroupMemory { limit: GIB + half, available: 256 * MIB })
    );
    // A limit above the machine's memory changes nothing.
    group("/user.slice", &[("memory.max", "max")]);
    app("1099511627776\n", "max\n");
    let host = system.source().host().unwrap();
    assert_eq!((host.total(), host.available(), host.limit()), (16 * GIB, 12 * GIB, Limit::Machine));
    // Without the figure of what is used a limit says nothing.
    app("garbage", "-1");
    assert_eq!(system.source().host().unwrap().cgroup, None);
    app("2147483648\n", "max\n");
    fs::remove_file(system.path().join("sys/fs/cgroup/user.slice/app.scope/memory.current")).unwrap();
    assert_eq!(system.source().host().unwrap().cgroup, None);
}

#[test]
fn amdgpu_tells_its_memory() {
    let system = System::new();
    assert_eq!(system.source().gpus(), []);
    system.put_bc250(15 * GIB, "3145728\n");
    system.put("sys/class/drm/card1/device/vendor", "0x8086\n");
    let [gpu] = &system.source().gpus()[..] else { panic!("{:?}", system.source().gpus()) };
    assert_eq!((&gpu.card[..], gpu.vendor_id, gpu.device_id), ("card0", 0x1002, 0x13FE));
    assert_eq!(gpu.vram, Pool { total: 512 * MIB, used: 40 * MIB });
    assert_eq!(gpu.gtt, Pool { total: 15 * GIB, used: GIB });
    assert_eq!(
        (gpu.ttm_ceiling, gpu.shared_ceiling(), gpu.shared_free()),
        (Some(12 * GIB), 12 * GIB, 11 * GIB)
    );
    for garbage in ["", "many", "-1", "18446744073709551615"] {
        system.put("sys/module/ttm/parameters/pages_limit", garbage);
        let [gpu] = &system.source().gpus()[..] else { panic!() };
        assert_eq!((gpu.ttm_ceiling, gpu.shared_ceiling()), (None, 15 * GIB), "{garbage}");
    }
}

#[test]
fn processes_tell_their_memory() {
    let this = MemorySource::at("/").process(std::process::id()).unwrap();
    assert!(this.resident > MIB && this.peak >= this.resident, "{this:?}");
    let system = System::new();
    assert_eq!(system.source().process(7), None);
    system.put("proc/7/status", "Name:\tw\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nRssAnon:\t 1024 kB\n");
    let process = system.source().process(7).unwrap();
    assert_eq!((process.resident, process.anonymous, process.peak), (MIB, MIB, 2 * MIB));
    let client =
        "drm-driver:\tamdgpu\ndrm-client-id:\t3\ndrm-pdev:\t0000:01:00.0\ndrm-memory-gtt:\t4096 KiB\n";
    system.put("proc/7/fdinfo/0", "pos:\t0\nflags:\t0100002\n");
    system.put("proc/7/fdinfo/5", client);
    system.put("proc/7/fdinfo/6", client);
    let gpu = system.source().process_gpu(7);
    assert_eq!(gpu, ProcessGpuMemory { own: 0, shared: 4 * MIB });
    assert_eq!(process.with_gpu(gpu), 5 * MIB);
}

#[test]
fn figures_change_between_readings() {
    let system = System::new();
    let mut gauge = MemoryGauge::of_this_process(&system.source()).unwrap();
    assert_eq!(gauge.read().unwrap().available(), 12 * GIB);
    system.put("proc/meminfo", &meminfo(16 << 20, 3 << 20));
    assert_eq!(gauge.read().unwrap().available(), 3 * GIB);
    system.put("proc/meminfo", "");
    assert_eq!(gauge.read(), None);
}
