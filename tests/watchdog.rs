//! Workers that take more memory than they may, stopped on this machine. The worker is this test's own executable.

#[path = "support/system.rs"]
mod system;

use std::{
    fs,
    io::Write,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use system::{System, meminfo};
use viaduct::runtime::{
    Guard, Stopped, Watchdog,
    memory::{Floor, Limit, MemorySource},
    volunteer_for_oom_killer,
};
use viaduct_export::bytes::ByteSize;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// What the worker does: `grow` or `hold`.
const ROLE: &str = "VIADUCT_TEST_WORKER";

/// The worker gives up here, should nobody stop it: the machine is others' too.
const MOST: u64 = 5 * GIB;
const LEAST_LEFT: u64 = 2 * GIB;

/// No test, but the worker; it does nothing unless a test starts it.
#[test]
#[ignore = "the worker that other tests start"]
fn worker() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // The test first puts the worker where it should be.
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let mut held = Vec::new();
    let step = 8 * MIB as usize;
    let most = if role == "grow" { MOST } else { 64 * MIB };
    for taken in 1..=most / step as u64 {
        held.push(vec![1u8; step]);
        let available = MemorySource::at("/").host().unwrap().machine_available;
        assert!(available > LEAST_LEFT, "not stopped after {}", ByteSize(taken * step as u64));
        // About 1 GiB/s.
        thread::sleep(Duration::from_millis(7));
    }
    if role == "grow" {
        panic!("not stopped");
    }
    thread::sleep(Duration::from_secs(60));
    drop(held);
}

fn start(role: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "worker", "--nocapture"]).env(ROLE, role);
    // SAFETY: async-signal-safe, as its documentation promises.
    unsafe { command.pre_exec(volunteer_for_oom_killer) };
    command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
}

fn go(child: &mut Child) {
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
}

/// Waits for the child's death without collecting it, takes the watchdog's record, and collects it only then.
fn finish(mut child: Child, guard: Guard) -> (ExitStatus, Option<Stopped>) {
    // SAFETY: all zeros are a valid value of the C structure, which the call fills; WNOWAIT leaves the child be.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        assert_eq!(libc::waitid(libc::P_PID, child.id(), &mut info, libc::WEXITED | libc::WNOWAIT), 0);
    }
    let stopped = guard.stopped();
    drop(guard);
    let status = child.wait().unwrap();
    assert!(!Path::new(&format!("/proc/{}", child.id())).exists(), "a zombie is left");
    (status, stopped)
}

fn assert_stopped(status: ExitStatus, stopped: Option<Stopped>, limit: Limit) -> Stopped {
    assert_eq!(status.signal(), Some(libc::SIGKILL), "{status}");
    let stopped = stopped.expect("the watchdog's own record");
    println!("{stopped}; signal after {:?}", stopped.reaction);
    assert!(stopped.available < stopped.floor, "{stopped:?}");
    assert!(stopped.reaction <= Duration::from_millis(50), "{stopped:?}");
    assert_eq!((stopped.limit, &stopped.stage[..], stopped.planned), (limit, "vae_post1", GIB));
    assert!(stopped.held() > 64 * MIB, "{stopped:?}");
    stopped
}

/// The worst that happened while a test ran: how late a thread woke that sleeps 1 ms at a time, and how little memory was
/// available.
struct Bystander {
    ended: Arc<AtomicBool>,
    thread: thread::JoinHandle<(Duration, u64)>,
}

impl Bystander {
    fn start() -> Bystander {
        let ended = Arc::new(AtomicBool::new(false));
        let seen = ended.clone();
        let thread = thread::spawn(move || {
            let (mut worst, mut least) = (Duration::ZERO, u64::MAX);
            let source = MemorySource::at("/");
            while !seen.load(Ordering::Relaxed) {
                let before = Instant::now();
                thread::sleep(Duration::from_millis(1));
                worst = worst.max(before.elapsed());
                least = least.min(source.host().unwrap().machine_available);
            }
            (worst, least)
        });
        Bystander { ended, thread }
    }

    fn finish(self) -> (Duration, u64) {
        self.ended.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

#[test]
fn a_greedy_worker_is_stopped_and_the_machine_stays_responsive() {
    let source = MemorySource::at("/");
    let host = source.host().unwrap();
    let allowed = GIB + GIB / 4;
    if host.limit() != Limit::Machine || host.available() < LEAST_LEFT + 2 * allowed {
        println!("skipped: {} are available, too little to take any", ByteSize(host.available()));
        return;
    }
    let mut child = start("grow");
    let score = fs::read_to_string(format!("/proc/{}/oom_score_adj", child.id())).unwrap();
    assert_eq!(score.trim(), "800");
    let floor = ByteSize(source.host().unwrap().available() - allowed);
    let watchdog = Watchdog::start(source, Floor::Bytes(floor)).unwrap();
    let guard = watchdog.guard(child.id(), "vae_post1", GIB).unwrap();
    assert!(!guard.is_blind());
    let bystander = Bystander::start();
    go(&mut child);
    let (status, stopped) = finish(child, guard);
    let (worst, least) = bystander.finish();
    println!("a sleep of 1 ms took {worst:?} at worst; at least {} were available", ByteSize(least));
    let stopped = assert_stopped(status, stopped, Limit::Machine);
    assert_eq!(stopped.floor, floor.0);
    assert!(least > floor.0 / 2, "{}", ByteSize(least));
    assert!(worst < Duration::from_secs(2), "{worst:?}");
}

/// A control group of its own, removed at the end.
struct Group {
    folder: PathBuf,
    /// The file whose line `oom_kill` counts what the kernel killed.
    events: &'static str,
}

impl Group {
    fn with_limit(name: &str, bytes: u64) -> Option<Group> {
        for (hierarchy, limit, events) in [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.oom_control"),
            ("/sys/fs/cgroup", "memory.max", "memory.events"),
        ] {
            let folder = Path::new(hierarchy).join(format!("viaduct-{name}-{}", std::process::id()));
            if fs::create_dir(&folder).is_err() {
                continue;
            }
            let group = Group { folder, events };
            if group.folder.join(limit).exists()
                && fs::write(group.folder.join(limit), bytes.to_string()).is_ok()
            {
                return Some(group);
            }
        }
        None
    }

    fn kernel_kills(&self) -> u64 {
        let events = fs::read_to_string(self.folder.join(self.events)).unwrap();
        events.lines().find_map(|line| line.strip_prefix("oom_kill ")).map_or(0, |n| n.parse().unwrap())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.folder);
    }
}

#[test]
fn a_worker_in_a_control_group_is_stopped_before_the_kernel_does() {
    let Some(group) = Group::with_limit("greedy", 600 * MIB) else {
        println!("skipped: this user may make no control group with a limit");
        return;
    };
    let mut child = start("grow");
    fs::write(group.folder.join("cgroup.procs"), child.id().to_string()).unwrap();
    let watchdog = Watchdog::start(MemorySource::at("/"), Floor::Bytes(ByteSize(100 * MIB))).unwrap();
    let guard = watchdog.guard(child.id(), "vae_post1", GIB).unwrap();
    go(&mut child);
    let (status, stopped) = finish(child, guard);
    let stopped = assert_stopped(status, stopped, Limit::Cgroup);
    assert!(stopped.held() < 600 * MIB, "{stopped}");
    assert_eq!(group.kernel_kills(), 0);
}

#[test]
fn a_worker_that_yields_is_stopped_first_and_the_other_goes_on() {
    let Some(group) = Group::with_limit("yielding", 600 * MIB) else {
        println!("skipped: this user may make no control group with a limit");
        return;
    };
    let (mut needed, mut ahead) = (start("hold"), start("grow"));
    for child in [&needed, &ahead] {
        fs::write(group.folder.join("cgroup.procs"), child.id().to_string()).unwrap();
    }
    let watchdog = Watchdog::start(MemorySource::at("/"), Floor::Bytes(ByteSize(200 * MIB))).unwrap();
    // Listed first, and yet not the first to be killed.
    let guard = watchdog.guard(needed.id(), "transformer", GIB).unwrap();
    let yielding = watchdog.guard(ahead.id(), "vae_post1", GIB).unwrap();
    yielding.yield_to_others();
    go(&mut needed);
    go(&mut ahead);
    let (status, stopped) = finish(ahead, yielding);
    assert_stopped(status, stopped, Limit::Cgroup);
    thread::sleep(Duration::from_millis(500));
    assert_eq!(guard.stopped(), None);
    assert!(needed.try_wait().unwrap().is_none());
    needed.kill().unwrap();
    assert_eq!(finish(needed, guard).1, None);
}

#[test]
fn a_modest_worker_is_measured_and_left_alone() {
    let mut child = start("hold");
    let watchdog = Watchdog::start(MemorySource::at("/"), Floor::Bytes(ByteSize(MIB))).unwrap();
    let guard = watchdog.guard(child.id(), "before", 0).unwrap();
    guard.begin_stage("allocate", 64 * MIB);
    go(&mut child);
    let begin = Instant::now();
    while guard.peaks()[1].resident < 64 * MIB {
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", guard.peaks());
        thread::sleep(Duration::from_millis(5));
    }
    guard.begin_stage("after", 0);
    let peaks = guard.peaks();
    let names: Vec<_> = peaks.iter().map(|peak| (&peak.stage[..], peak.planned)).collect();
    assert_eq!(names, [("before", 0), ("allocate", 64 * MIB), ("after", 0)]);
    assert!(peaks[0].resident < 64 * MIB && peaks[1].held >= 64 * MIB, "{peaks:?}");
    assert_eq!(guard.stopped(), None);
    child.kill().unwrap();
    assert_eq!(finish(child, guard).1, None);
}

/// A tree whose figures fall below the floor while a real process is guarded.
#[test]
fn the_figures_of_the_source_decide() {
    let system = System::new();
    let mut child = start("hold");
    let pid = child.id().to_string();
    system.put(
        &format!("proc/{pid}/status"),
        "VmRSS:\t 2097152 kB\nVmHWM:\t 2097152 kB\nRssAnon:\t 2097152 kB\n",
    );
    let client = "drm-client-id:\t3\ndrm-memory-gtt:\t1048576 KiB\n";
    system.put(&format!("proc/{pid}/fdinfo/5"), client);
    system.put(&format!("proc/{pid}/fdinfo/6"), client);
    system.put_cgroup(&pid, 2, "/job");
    system.put("sys/fs/cgroup/job/memory.max", "10737418240\n");
    system.put("sys/fs/cgroup/job/memory.current", "2147483648\n");
    let watchdog = Watchdog::start(system.source(), Floor::Default).unwrap();
    let guard = watchdog.guard(child.id(), "vae_post1", GIB).unwrap();
    let begin = Instant::now();
    while guard.peaks()[0].held < 3 * GIB {
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", guard.peaks());
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(guard.stopped(), None);
    assert!(child.try_wait().unwrap().is_none());
    system.put("sys/fs/cgroup/job/memory.current", "10737400000\n");
    let (status, stopped) = finish(child, guard);
    let stopped = assert_stopped(status, stopped, Limit::Cgroup);
    // Once, though two descriptors lead to the client: 2 GiB of the process's, 1 GiB of the GPU's.
    assert_eq!((stopped.held(), stopped.floor), (3 * GIB, 512 * MIB));
}

#[test]
fn a_source_that_tells_nothing_kills_nobody() {
    let system = System::new();
    system.put("proc/meminfo", "");
    let mut child = start("hold");
    system.put(&format!("proc/{}/status", child.id()), "VmRSS:\t 4 kB\n");
    let watchdog = Watchdog::start(system.source(), Floor::Percent(100.0)).unwrap();
    let guard = watchdog.guard(child.id(), "vae_post1", GIB).unwrap();
    assert!(guard.is_blind());
    thread::sleep(Duration::from_millis(100));
    system.put("proc/meminfo", &meminfo(16 << 20, 0));
    thread::sleep(Duration::from_millis(100));
    assert!(child.try_wait().unwrap().is_none());
    child.kill().unwrap();
    assert_eq!(finish(child, guard).1, None);
}

#[test]
fn a_worker_that_has_ended_is_not_stopped() {
    let mut child = start("hold");
    let watchdog = Watchdog::start(MemorySource::at("/"), Floor::Percent(100.0)).unwrap();
    child.kill().unwrap();
    // SAFETY: as in `finish`.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(libc::P_PID, child.id(), &mut info, libc::WEXITED | libc::WNOWAIT);
    }
    let guard = watchdog.guard(child.id(), "vae_post1", GIB).unwrap();
    thread::sleep(Duration::from_millis(100));
    assert_eq!(finish(child, guard).1, None);
    for nobody in [0, u32::MAX] {
        assert!(watchdog.guard(nobody, "vae_post1", GIB).is_err());
    }
}

/// CPU time of the watchdog's threads, for people to read: a busy machine proves nothing by it.
#[test]
fn the_watchdogs_own_time_is_printed() {
    let mut child = start("hold");
    go(&mut child);
    let watchdog = Watchdog::start(MemorySource::at("/"), Floor::Bytes(ByteSize(0))).unwrap();
    let guard = watchdog.guard(child.id(), "vae_post1", GIB).unwrap();
    let time = Duration::from_secs(2);
    thread::sleep(time);
    for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        // Nanoseconds on a CPU come first.
        let used = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        if let (true, Some(Ok(used))) =
            (name.starts_with("watchdog"), used.split(' ').next().map(str::parse::<u64>))
        {
            println!("{}: {:.2} % of a core", name.trim(), used as f64 / time.as_nanos() as f64 * 100.0);
        }
    }
    child.kill().unwrap();
    finish(child, guard);
}
