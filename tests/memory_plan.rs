//! Pictures that do not fit the memory there is: refused before the start, stopped during the run if they are forced.

mod support;

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::atomic::{AtomicBool, Ordering},
    thread::{scope, sleep},
    time::{Duration, Instant},
};

use support::{Bundle, Checkpoint, fixture, json, scratch, viaduct};
use tempfile::TempDir;
use viaduct::pipeline::event::Event;
use viaduct_export::{bytes::ByteSize, memory::Predicted};

const MIB: u64 = 1 << 20;

struct Case {
    bundle: Bundle,
    folder: TempDir,
}

impl Case {
    fn new(bundle: Bundle) -> Case {
        Case { bundle, folder: scratch() }
    }

    fn klein() -> Case {
        Case::new(Checkpoint::klein_emoji().export("q8", &[]))
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("picture.png")
    }

    fn command(&self, arguments: &str) -> Command {
        let base = viaduct();
        let mut command = Command::new(base.get_program());
        command.envs(base.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.arg("generate").arg("-b").arg(self.bundle.path()).arg("-o").arg(self.out());
        command.args(["-p", "red apple", "--seed", "1", "--ep", "cpu", "--progress", "json"]);
        command.args(arguments.split_whitespace()).env("VIADUCT_RUNS", self.folder.path().join("runs"));
        command
    }

    fn run(&self, arguments: &str) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// The one line of a run that ended with the code and has begun no stage.
    #[track_caller]
    fn refusal(&self, arguments: &str) -> String {
        let output = self.run(arguments);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{told}");
        assert!(!told.contains(r#""event":"stage""#), "{told}");
        assert!(!self.out().exists());
        error_line(&told)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What the only error says; every line is an event.
#[track_caller]
fn error_line(told: &str) -> String {
    let event = |line| serde_json::from_str::<Event>(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    let errors = told.lines().map(event).filter_map(|event| match event {
        Event::Error { message, .. } => Some(message),
        _ => None,
    });
    let errors: Vec<String> = errors.collect();
    assert_eq!(errors.len(), 1, "{told}");
    errors.concat()
}

/// The largest planned peak of a picture on the CPU.
fn planned_peak(case: &Case, size: &str) -> u64 {
    let mut command = viaduct();
    command.arg("report").arg(case.bundle.path()).args(["--device", "cpu", "--size", size, "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
    let peak = |stage: &serde_json::Value| {
        let predicted: Predicted = serde_json::from_value(stage["predicted"].clone()).unwrap();
        predicted.total()
    };
    report["stages"].as_array().unwrap().iter().map(peak).max().unwrap()
}

#[test]
fn a_budget_that_holds_nothing_is_refused_before_the_start() {
    let line = Case::klein().refusal("--budget 4MiB");
    assert!(line.contains("needs") && line.contains("more than the budget of 4 MiB"), "{line}");
    assert!(line.contains(" in vae_post0"), "{line}");
    assert!(line.contains("its largest tensor is ") && line.contains("no smaller size fits"), "{line}");
}

#[test]
fn the_size_that_is_named_instead_fits() {
    let case = Case::klein();
    let [small, large] = ["128x128", "256x256"].map(|size| planned_peak(&case, size));
    assert!(small < large);
    let budget = (small + large) / 2;
    let line = case.refusal(&format!("--size 256x256 --budget {budget}"));
    let nearest = line.rsplit("; ").next().and_then(|end| end.strip_suffix(" fits")).unwrap();
    let (width, height) = nearest.split_once('x').unwrap();
    let [width, height]: [usize; 2] = [width, height].map(|side| side.parse().unwrap());
    assert!(width == height && (128..256).contains(&width), "{line}");
    let output = case.run(&format!("--steps 1 --size {nearest} --budget {budget}"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    // The next larger one does not: it is the nearest.
    let next = width + 16;
    if next < 256 {
        fs::remove_file(case.out()).unwrap();
        case.refusal(&format!("--size {next}x{next} --budget {budget}"));
    }
}

/// A run goes on although what is free has changed meanwhile.
#[test]
fn the_budget_does_not_make_another_run() {
    let case = Case::klein();
    let mut command = case.command("--steps 2 --size 256x256 --budget 64MiB --force");
    command.env("VIADUCT_TEST_STOP", "KILL@kept:latents_step0");
    assert_eq!(command.output().unwrap().status.code(), None);
    let output = case.run("--steps 2 --size 256x256 --budget 65MiB --force");
    assert!(output.status.success());
    assert!(text(&output.stderr).contains("continues after step 1/2"), "{}", text(&output.stderr));
}

#[test]
fn a_forced_run_is_stopped_at_the_floor() {
    let case = Case::klein();
    let output = case.run("--floor 100% --force");
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{told}");
    let line = error_line(&told);
    for part in
        ["stopped by the watchdog in stage ", "planned ", "the worker held ", " were available (floor "]
    {
        assert!(line.contains(part), "{line}");
    }
    assert!(!case.out().exists());
}

/// A memory control group of its own, removed at the end.
struct Group(PathBuf);

impl Group {
    fn with_limit(bytes: u64) -> Option<Group> {
        let hierarchies =
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        hierarchies.into_iter().find_map(|(hierarchy, limit)| {
            let folder = Path::new(hierarchy).join(format!("viaduct-plan-{}", std::process::id()));
            fs::create_dir(&folder).ok()?;
            let group = Group(folder);
            let limit = group.0.join(limit);
            (limit.exists() && fs::write(limit, bytes.to_string()).is_ok()).then_some(group)
        })
    }

    /// Runs a command in the group.
    fn run(&self, mut command: Command) -> Output {
        let members = self.0.join("cgroup.procs");
        // SAFETY: "0" is the writing process. Nothing else runs in this child of a program that forks while other
        // threads sleep, and the path was made before.
        unsafe { command.pre_exec(move || fs::write(&members, "0")) };
        command.output().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Does something while a thread sleeps 1 ms again and again; tells how late it woke at worst.
fn beside<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let ended = AtomicBool::new(false);
    scope(|scope| {
        let bystander = scope.spawn(|| {
            let mut worst = Duration::ZERO;
            while !ended.load(Ordering::Relaxed) {
                let before = Instant::now();
                sleep(Duration::from_millis(1));
                worst = worst.max(before.elapsed());
            }
            worst
        });
        let done = work();
        ended.store(true, Ordering::Relaxed);
        (done, bystander.join().unwrap())
    })
}

/// A decoder whose weights are most of what it needs: no group of 240 MiB holds all of them, but each stage's.
fn wide_decoder() -> Checkpoint {
    let folder = scratch();
    let mut spec = json(&fixture("flux2-a").join("checkpoint.json"));
    spec["vae"]["config"]["block_out_channels"] = serde_json::json!([64, 512, 512, 512]);
    spec.as_object_mut().unwrap().remove("fingerprints");
    let path = folder.path().join("checkpoint.json");
    fs::write(&path, spec.to_string()).unwrap();
    Checkpoint::procedural(&path, &[1, 3, 4], 40)
}

#[test]
fn in_a_control_group_only_the_split_decoder_runs() {
    let Some(group) = Group::with_limit(240 * MIB) else {
        println!("skipped: this user may make no control group with a limit");
        return;
    };
    let checkpoint = wide_decoder();
    let [whole, split] =
        ["", "1,2,3"].map(|cuts| Case::new(checkpoint.export("f32", &[&format!("vae_decoder.cuts={cuts}")])));
    println!(
        "planned: {} unsplit, {} split",
        ByteSize(planned_peak(&whole, "64x64")),
        ByteSize(planned_peak(&split, "64x64"))
    );
    let arguments = "--size 64x64 --steps 1 --floor 100MiB";

    let refused = group.run(whole.command(arguments));
    let told = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(4), "{told}");
    assert!(!told.contains(r#""event":"stage""#) && error_line(&told).contains(" in vae_post0"), "{told}");

    let forced = whole.command(&format!("{arguments} --force"));
    let (stopped, worst) = beside(|| group.run(forced));
    println!("a sleep of 1 ms took {worst:?} at worst");
    let told = text(&stopped.stderr);
    assert_eq!(stopped.status.code(), Some(5), "{told}");
    let line = error_line(&told);
    println!("{line}");
    assert!(line.contains("in stage vae_post0: planned ") && line.contains("cgroup limit"), "{line}");
    assert!(worst < Duration::from_secs(2), "{worst:?}");

    let done = group.run(split.command(arguments));
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert!(split.out().exists());
}
