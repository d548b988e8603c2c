//! Runs whose components live in child processes: what they draw, and what they leave behind when a child or the parent
//! ends as it should not. All through the program.

mod support;

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs::{self, Permissions},
    io::{BufRead, BufReader},
    os::unix::{
        ffi::OsStrExt,
        fs::PermissionsExt,
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use serde_json::Value;
use support::{Bundle, Checkpoint, scratch, viaduct};
use tempfile::TempDir;
use viaduct::pipeline::event::Event;

const LIBRARY: &str = "libonnxruntime";
const PATIENCE: Duration = Duration::from_secs(120);

/// One command, whose folder of runs is its own.
struct Case {
    bundle: Bundle,
    folder: TempDir,
}

impl Case {
    fn new() -> Case {
        Case { bundle: Checkpoint::klein_emoji().export("q8", &[]), folder: scratch() }
    }

    fn runs(&self) -> PathBuf {
        self.folder.path().join("runs")
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("picture.png")
    }

    fn command(&self, more: &[&str]) -> Command {
        let base = viaduct();
        let mut command = Command::new(base.get_program());
        command.envs(base.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.arg("generate").arg("-b").arg(self.bundle.path()).arg("-o").arg(self.out());
        command.args(["-p", "red apple", "--seed", "1000", "--steps", "3"]);
        if !more.contains(&"--ep") {
            command.args(["--ep", "cpu"]);
        }
        if !more.contains(&"--progress") {
            command.args(["--progress", "none"]);
        }
        command.args(more).env("VIADUCT_RUNS", self.runs());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs the command to its end and takes the picture away.
    #[track_caller]
    fn draw(&self, more: &[&str]) -> Vec<u8> {
        self.take(self.command(more).output().unwrap())
    }

    /// The picture of a run that ended well and left nothing else.
    #[track_caller]
    fn take(&self, output: Output) -> Vec<u8> {
        assert!(output.status.success(), "{}: {}", output.status, text(&output.stderr));
        let png = fs::read(self.out()).unwrap();
        fs::remove_file(self.out()).unwrap();
        assert_eq!(names(&self.runs()), [""; 0]);
        png
    }

    /// The one line of a run that failed, of which neither a process nor an exchange folder is left.
    #[track_caller]
    fn failure(&self, output: Output, code: i32) -> String {
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{}: {told}", output.status);
        assert_eq!(told.lines().count(), 1, "{told}");
        assert!(told.starts_with("error: "), "{told}");
        assert!(!self.out().exists());
        assert_eq!(self.exchange_folders(), [""; 0]);
        wait_until("all workers end", || self.processes().is_empty());
        told
    }

    fn exchange_folders(&self) -> Vec<String> {
        let mut names = names(&self.runs());
        names.retain(|name| name.starts_with("exchange-"));
        names
    }

    /// Processes of this case that live, workers without a parent among them.
    fn processes(&self) -> Vec<u32> {
        let runs = self.runs();
        let is_own = |pid: &u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment
                .split(|byte| *byte == 0)
                .any(|entry| entry.strip_prefix(b"VIADUCT_RUNS=") == Some(runs.as_os_str().as_bytes()))
        };
        processes().into_iter().filter(|pid| lives(*pid) && is_own(pid)).collect()
    }

    /// The largest predicted peak of a stage.
    fn peak(&self) -> u64 {
        let mut command = viaduct();
        command.arg("report").arg(self.bundle.path()).args(["--device", "cpu", "--json"]);
        let report: Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
        report["chain"]["peak"].as_u64().unwrap()
    }

    /// A run that is halted after its first step, the worker that it then has, and the one that opens the decoder.
    fn halted(&self, more: &[&str]) -> (Child, u32, u32) {
        let mut command = self.command(more);
        command.env("VIADUCT_TEST_STOP", "STOP@step:1").process_group(0);
        let parent = command.spawn().unwrap();
        wait_until("the run halts", || state(parent.id()) == Some('T'));
        match children(parent.id())[..] {
            [worker, ahead] => (parent, worker, ahead),
            ref others => panic!("{others:?}"),
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().file_name());
    let names: BTreeSet<String> = entries.map(|name| name.into_string().unwrap()).collect();
    names.into_iter().collect()
}

/// What the kernel tells of a process (proc_pid_stat(5)).
struct Stat {
    state: char,
    parent: u32,
    /// When it started, in ticks of the clock.
    start: u64,
}

/// None if there is no such process.
fn stat(pid: u32) -> Option<Stat> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before it may contain anything.
    let (_, rest) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    Some(Stat {
        state: fields.first()?.chars().next()?,
        parent: fields.get(1)?.parse().ok()?,
        start: fields.get(19)?.parse().ok()?,
    })
}

fn state(pid: u32) -> Option<char> {
    stat(pid).map(|stat| stat.state)
}

fn processes() -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// A process that ended but was not collected is not alive.
fn lives(pid: u32) -> bool {
    state(pid).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// In the order in which they were started.
fn children(parent: u32) -> Vec<u32> {
    let own =
        |pid: u32| Some((stat(pid).filter(|stat| stat.parent == parent && stat.state != 'Z')?.start, pid));
    let mut children: Vec<_> = processes().into_iter().filter_map(own).collect();
    children.sort_unstable();
    children.into_iter().map(|(_, pid)| pid).collect()
}

fn maps_the_library(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains(LIBRARY))
}

#[track_caller]
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < PATIENCE, "{what}: not in {PATIENCE:?}");
        sleep(Duration::from_millis(5));
    }
}

/// To a process, or to a whole group if the number is negative.
fn send(pid: i32, signal: i32) {
    // SAFETY: sends a signal to processes that this test started and has not collected.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

#[test]
fn workers_draw_what_one_process_draws() {
    let case = Case::new();
    assert!(case.draw(&[]) == case.draw(&["--in-process"]));
}

#[test]
fn webgpu_workers_draw_what_one_process_draws() {
    let Some(webgpu) = support::webgpu::webgpu() else { return };
    drop(webgpu);
    let case = Case::new();
    let arguments = ["--ep", "webgpu", "--size", "64x64"];
    assert!(case.draw(&arguments) == case.draw(&[&arguments[..], &["--in-process"]].concat()));
}

#[test]
fn the_parent_never_loads_the_runtime() {
    let case = Case::new();
    let mut parent = case.command(&[]).spawn().unwrap();
    let (mut with, mut seen) = (BTreeSet::new(), BTreeSet::new());
    while parent.try_wait().unwrap().is_none() {
        assert!(!maps_the_library(parent.id()));
        for child in children(parent.id()) {
            seen.insert(child);
            if maps_the_library(child) {
                with.insert(child);
            }
        }
        sleep(Duration::from_millis(2));
    }
    // One for each component: those that open stages ahead are taken over.
    assert!(with.len() >= 2 && seen.len() <= 3, "{with:?} of {seen:?}");
    case.take(parent.wait_with_output().unwrap());
    assert!(!seen.into_iter().any(lives));
}

#[test]
fn every_stage_tells_its_planned_and_measured_peak() {
    let case = Case::new();
    let output = case.command(&["--progress", "json"]).output().unwrap();
    let events: Vec<Event> =
        text(&output.stderr).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    case.take(output);
    let stages = events.iter().filter_map(|event| match event {
        Event::Stage { name, .. } => Some(name),
        _ => None,
    });
    let measured = events.iter().filter_map(|event| match event {
        Event::Memory { stage, planned, measured } => {
            assert!(*planned > 0 && *measured > 0, "{event:?}");
            Some(stage)
        }
        _ => None,
    });
    let stages: Vec<_> = stages.collect();
    assert!(stages.len() >= 5);
    assert_eq!(measured.collect::<Vec<_>>(), stages);
}

/// A driver that never gives a device back: <https://github.com/akandr/bc250>.
#[test]
fn a_worker_that_hangs_after_its_work_costs_nothing_but_time() {
    let case = Case::new();
    let undisturbed = case.draw(&[]);
    for stage in ["text_encoder", "vae_post0"] {
        let mut command = case.command(&[]);
        command.env("VIADUCT_TEST_WORKER", format!("hang:{stage}"));
        assert!(case.take(command.output().unwrap()) == undisturbed, "{stage}");
    }
}

#[test]
fn a_worker_that_does_not_end_is_killed() {
    let case = Case::new();
    let mut command = case.command(&[]);
    command.env("VIADUCT_TEST_WORKER", "linger");
    case.take(command.output().unwrap());
}

#[test]
fn a_worker_that_crashes_costs_one_line() {
    let case = Case::new();
    for stage in ["text_encoder", "transformer", "vae_post0"] {
        let mut command = case.command(&[]);
        command.env("VIADUCT_TEST_WORKER", format!("crash:{stage}"));
        let told = case.failure(command.output().unwrap(), 1);
        assert!(told.contains(stage) && told.contains("signal 6"), "{told}");
    }
}

#[test]
fn a_worker_that_talks_nonsense_costs_one_line() {
    let case = Case::new();
    for stage in ["text_encoder", "transformer"] {
        let mut command = case.command(&[]);
        command.env("VIADUCT_TEST_WORKER", format!("babble:{stage}"));
        let told = case.failure(command.output().unwrap(), 1);
        assert!(told.contains("expected"), "{told}");
    }
}

#[test]
fn a_killed_parent_leaves_no_worker_and_the_next_run_clears_up() {
    let case = Case::new();
    let undisturbed = case.draw(&[]);
    let (mut parent, worker, ahead) = case.halted(&[]);
    assert!(!maps_the_library(parent.id()) && maps_the_library(worker));
    let exchange = case.exchange_folders();
    assert_eq!(exchange.len(), 1, "{exchange:?}");
    // A run beside it leaves the folder alone.
    let beside = case.command(&[]).output().unwrap();
    assert!(beside.status.success(), "{}", text(&beside.stderr));
    fs::remove_file(case.out()).unwrap();
    assert_eq!(case.exchange_folders(), exchange);
    parent.kill().unwrap();
    assert_eq!(parent.wait().unwrap().signal(), Some(libc::SIGKILL));
    wait_until("the workers end", || !lives(worker) && !lives(ahead));
    assert_eq!(case.exchange_folders(), exchange);
    assert!(case.draw(&[]) == undisturbed);
}

#[test]
fn tensors_pass_through_a_private_folder_wherever_it_lies() {
    let case = Case::new();
    let undisturbed = case.draw(&[]);
    let strange = case.folder.path().join(OsStr::from_bytes(b"runs-\xff"));
    let mut command = case.command(&[]);
    assert!(case.take(command.env("VIADUCT_RUNS", &strange).output().unwrap()) == undisturbed);

    // Without a home the folder is among the temporary ones, and nobody else's.
    let temporary = scratch();
    let homeless = || {
        let mut command = case.command(&[]);
        for name in ["VIADUCT_RUNS", "XDG_CACHE_HOME", "HOME"] {
            command.env_remove(name);
        }
        command.env("TMPDIR", temporary.path());
        command
    };
    assert!(case.take(homeless().output().unwrap()) == undisturbed);
    // SAFETY: reads a number of this process.
    let private = temporary.path().join(format!("viaduct-{}", unsafe { libc::geteuid() }));
    assert_eq!(fs::metadata(&private).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(names(&private), [""; 0]);
    fs::set_permissions(&private, Permissions::from_mode(0o777)).unwrap();
    let told = case.failure(homeless().output().unwrap(), 1);
    assert!(told.contains("not this user's alone"), "{told}");
    let mut command = homeless();
    assert!(case.take(command.arg("--in-process").output().unwrap()) == undisturbed, "it needs no folder");
}

#[test]
fn a_killed_worker_costs_one_line_and_the_run_goes_on() {
    let case = Case::new();
    let undisturbed = case.draw(&[]);
    let (parent, worker, _) = case.halted(&[]);
    send(worker as i32, libc::SIGKILL);
    send(parent.id() as i32, libc::SIGCONT);
    let told = case.failure(parent.wait_with_output().unwrap(), 1);
    assert!(told.contains("transformer") && told.contains("signal 9"), "{told}");
    assert!(case.draw(&[]) == undisturbed);
}

#[test]
fn within_a_tight_budget_nothing_is_opened_ahead() {
    let case = Case::new();
    let undisturbed = case.draw(&[]);
    let budget = case.peak().to_string();
    let mut parent = case.command(&["--budget", &budget, "--progress", "auto"]).spawn().unwrap();
    while parent.try_wait().unwrap().is_none() {
        let workers = children(parent.id());
        assert!(workers.len() <= 1, "{workers:?}");
        sleep(Duration::from_millis(2));
    }
    let output = parent.wait_with_output().unwrap();
    let told = text(&output.stderr);
    assert!(case.take(output) == undisturbed);
    assert!(told.contains("plan: at most") && !told.contains("ahead"), "{told}");
    let roomy = case.command(&["--progress", "auto"]).output().unwrap();
    let told = text(&roomy.stderr);
    assert!(case.take(roomy) == undisturbed);
    assert!(told.contains("vae_pre, vae_attention, vae_post0 loaded ahead"), "{told}");
}

#[test]
fn a_worker_that_is_lost_ahead_of_its_turn_is_replaced() {
    let case = Case::new();
    let undisturbed = case.draw(&[]);
    for stage in ["modulation", "transformer", "vae_pre"] {
        let mut command = case.command(&[]);
        command.env("VIADUCT_TEST_WORKER", format!("crash-ahead:{stage}"));
        assert!(case.take(command.output().unwrap()) == undisturbed, "{stage}");
    }
    for signal in [libc::SIGKILL, libc::SIGABRT] {
        let (parent, worker, ahead) = case.halted(&[]);
        send(ahead as i32, signal);
        wait_until("the worker ahead ends", || !lives(ahead));
        assert!(lives(worker));
        send(parent.id() as i32, libc::SIGCONT);
        assert!(case.take(parent.wait_with_output().unwrap()) == undisturbed, "{signal}");
    }
    assert_eq!(case.processes(), [0; 0]);
}

/// What a terminal sends to all processes of a command at once.
#[test]
fn a_signal_to_the_whole_group_is_the_parents_to_answer() {
    let case = Case::new();
    let undisturbed = case.draw(&[]);
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let mut command = case.command(&["--progress", "json"]);
        let mut parent = command.process_group(0).spawn().unwrap();
        let mut events = BufReader::new(parent.stderr.take().unwrap()).lines().map_while(Result::ok);
        assert!(events.any(|line| line.contains(r#""event":"step""#)));
        let workers = children(parent.id());
        send(-(parent.id() as i32), signal);
        let told: Vec<String> = events.collect();
        assert_eq!(parent.wait().unwrap().code(), Some(128 + signal), "{told:?}");
        assert!(told.iter().any(|line| line.contains("interrupted in stage transformer")), "{told:?}");
        assert!(!told.iter().any(|line| line.contains("error")), "{told:?}");
        wait_until("the workers end", || !workers.iter().copied().any(lives));
        assert!(case.draw(&[]) == undisturbed);
    }
}
