//! Runs that are interrupted, killed or robbed of what they kept: the same command goes on, and the picture is the same
//! bit by bit. All through the program. `VIADUCT_RESUME_ARGUMENTS` adds arguments to every run.

mod support;

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::Write,
    os::{fd::AsRawFd, unix::process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant, SystemTime},
};

use serde_json::Value;
use support::{Bundle, Checkpoint, fixture, json, oracle, scratch, viaduct};
use tempfile::TempDir;
use viaduct::{npy, pipeline::event::Event, tensor::HostTensor};

/// Which signal ends a run, and how the process then ends.
const KILL: (&str, i32) = ("KILL", 9);
const INT: (&str, i32) = ("INT", 2);

/// A command whose run is kept in a folder of its own.
struct Case {
    bundle: Bundle,
    arguments: Vec<&'static str>,
    folder: TempDir,
}

impl Case {
    fn new(bundle: Bundle, arguments: &str) -> Case {
        let arguments = arguments.to_owned().leak().split(' ').collect();
        Case { bundle, arguments, folder: scratch() }
    }

    /// The trained model; its decoder attends, and is cut.
    fn klein() -> Case {
        let bundle = Checkpoint::klein_emoji().export("q8", &["vae_decoder.cuts=2,3"]);
        Case::new(bundle, "--seed 1000 --steps 3")
    }

    fn flux2_a() -> Case {
        let bundle = Checkpoint::of_fixture("flux2-a").export("f32", &[]);
        Case::new(bundle, "--seed 7 --steps 2 --size 112x80")
    }

    fn runs(&self) -> PathBuf {
        self.folder.path().join("runs")
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("picture.png")
    }

    fn command(&self) -> Command {
        let base = viaduct();
        let mut command = Command::new(base.get_program());
        command.envs(base.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.arg("generate").arg("-b").arg(self.bundle.path()).arg("-o").arg(self.out());
        command.args(["-p", "red apple", "--ep", "cpu", "--json", "--progress", "json"]);
        command.args(&self.arguments).env("VIADUCT_RUNS", self.runs());
        let more = std::env::var("VIADUCT_RESUME_ARGUMENTS").unwrap_or_default();
        command.args(more.split_whitespace());
        command
    }

    /// The command, to be stopped by a signal at a point of its run.
    fn stopped_at(&self, signal: &str, point: &str) -> Command {
        let mut command = self.command();
        command.env("VIADUCT_TEST_STOP", format!("{signal}@{point}"));
        command
    }

    fn stop(&self, (signal, number): (&str, i32), point: &str) -> Output {
        let output = self.stopped_at(signal, point).output().unwrap();
        let status = output.status;
        let ended = if signal == "KILL" { status.signal() } else { status.code().map(|code| code - 128) };
        assert_eq!(ended, Some(number), "{signal}@{point}: {status}: {}", text(&output.stderr));
        assert!(!self.out().exists(), "{signal}@{point}");
        output
    }

    /// Runs the command to its end and takes the picture away.
    fn draw(&self) -> Drawn {
        self.finish(self.command())
    }

    fn finish(&self, mut command: Command) -> Drawn {
        self.look(command.output().unwrap())
    }

    /// What a finished run left: the picture and nothing else.
    fn look(&self, output: Output) -> Drawn {
        let told = text(&output.stderr);
        assert!(output.status.success(), "{}: {told}", output.status);
        let png = fs::read(self.out()).unwrap();
        fs::remove_file(self.out()).unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        Drawn { png, report, told }
    }

    /// The folder of the one run that is kept. A killed process also leaves the tensors that it had on their way.
    fn kept(&self) -> PathBuf {
        let mut names = names(&self.runs());
        names.retain(|name| !name.starts_with("exchange-"));
        assert_eq!(names.len(), 1, "{names:?}");
        self.runs().join(&names[0])
    }

    /// The file of a kept tensor.
    fn tensor(&self, name: &str) -> PathBuf {
        let folder = self.kept();
        let is = |file: &&String| file.starts_with(&format!("{name}."));
        let files = names(&folder);
        folder.join(files.iter().find(is).unwrap_or_else(|| panic!("no {name} in {files:?}")))
    }

    #[track_caller]
    fn assert_clean(&self) {
        assert_eq!(names(self.folder.path()), ["runs"]);
        assert_eq!(names(&self.runs()), [""; 0]);
    }
}

struct Drawn {
    png: Vec<u8>,
    report: Value,
    told: String,
}

impl Drawn {
    fn events(&self) -> Vec<Event> {
        self.told.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn resumed_from(&self) -> Option<&str> {
        self.report["resumed_from"].as_str()
    }

    #[track_caller]
    fn assert_same(&self, other: &Drawn) {
        assert!(self.png == other.png, "another picture: {}", self.told);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Names in a folder, hidden ones included, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let names: BTreeSet<String> = entries.map(|name| name.into_string().unwrap()).collect();
    names.into_iter().collect()
}

/// Every point of a run at which it can be stopped, and what a run that was stopped there goes on from.
fn points(undisturbed: &Drawn) -> Vec<(String, bool)> {
    let mut kept = false;
    let mut points = Vec::new();
    for event in undisturbed.events() {
        let point = match event {
            Event::Stage { name, .. } => format!("stage:{name}"),
            Event::Step { index, .. } => format!("step:{index}"),
            Event::Kept { name, .. } => {
                kept = true;
                format!("kept:{name}")
            }
            _ => continue,
        };
        points.push((point, kept));
    }
    points
}

fn goes_on_from_every_point(case: &Case, signal: (&str, i32)) {
    let undisturbed = case.draw();
    case.assert_clean();
    assert_eq!(undisturbed.resumed_from(), None);
    let points = points(&undisturbed);
    println!("{points:?}");
    assert!(points.len() >= 12);
    for (point, kept) in points {
        let stopped = case.stop(signal, &point);
        if signal == INT {
            let told = if kept { "the same command goes on from there" } else { "nothing was kept" };
            assert!(text(&stopped.stderr).contains(told), "{point}: {}", text(&stopped.stderr));
        }
        let again = case.draw();
        again.assert_same(&undisturbed);
        assert_eq!(again.resumed_from().is_some(), kept, "{point}: {}", again.told);
        case.assert_clean();
    }
}

#[test]
fn a_killed_run_goes_on() {
    goes_on_from_every_point(&Case::klein(), KILL);
}

#[test]
fn an_interrupted_run_goes_on() {
    goes_on_from_every_point(&Case::klein(), INT);
}

/// Results in a bundle's manifest do not make it another bundle.
#[test]
fn a_run_goes_on_in_a_bundle_that_was_verified_meanwhile() {
    let case = Case::flux2_a();
    let undisturbed = case.draw();
    case.stop(KILL, "step:1");
    case.bundle.verify_with(&oracle("flux2-a"), "cpu", &["--no-controls"], 0);
    assert_eq!(json(&case.bundle.path().join("bundle.json"))["verified"].as_array().unwrap().len(), 1);
    let again = case.draw();
    again.assert_same(&undisturbed);
    assert!(again.resumed_from().is_some(), "{}", again.told);
    case.assert_clean();
}

/// From the moment on at which there is something to take away.
#[test]
fn an_interrupt_while_the_workers_start_leaves_nothing() {
    let case = Case::flux2_a();
    let exchange = || case.runs().exists() && names(&case.runs()).iter().any(|n| n.starts_with("exchange-"));
    let mut command = case.command();
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while !exchange() {
        assert!(
            Instant::now() < end && child.try_wait().unwrap().is_none(),
            "no folder for tensors was made"
        );
        sleep(Duration::from_millis(1));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(128 + INT.1), "{}", text(&output.stderr));
    assert!(!exchange(), "{:?}", names(&case.runs()));
}

#[test]
fn a_killed_run_of_another_model_goes_on() {
    goes_on_from_every_point(&Case::flux2_a(), KILL);
}

/// A run that never gets further than one state is as good as one that is left alone.
#[test]
fn a_run_that_is_killed_at_every_state_gets_there() {
    let case = Case::klein();
    let undisturbed = case.draw();
    let mut earlier = None;
    for (point, _) in points(&undisturbed).iter().filter(|(point, _)| point.starts_with("kept:")) {
        let stopped = case.stop(KILL, point);
        let lines = text(&stopped.stderr);
        let steps = lines.lines().filter(|line| line.contains(r#""event":"step""#)).count();
        assert!(steps <= 1, "{point}: {lines}");
        assert_eq!(lines.contains("continues after"), earlier.is_some(), "{point}: {lines}");
        earlier = Some(point);
        // Of the latents only the newest are kept, and nothing of the prompt once the decoder has begun.
        let kept = names(&case.kept());
        assert!(kept.iter().filter(|name| name.starts_with("latents_step")).count() <= 1, "{kept:?}");
        assert!(
            !kept.iter().any(|name| name.starts_with("prompt_embeds")) || !point.contains("vae"),
            "{kept:?}"
        );
    }
    let again = case.draw();
    again.assert_same(&undisturbed);
    assert_eq!(again.resumed_from(), Some("vae_post2"));
    case.assert_clean();
}

#[test]
fn runs_end_at_any_time() {
    let case = Case::klein();
    let started = Instant::now();
    let undisturbed = case.draw();
    let whole = started.elapsed();
    let mut unfinished = 0;
    for attempt in 0u32..16 {
        let mut child = case.command().stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        sleep(whole * attempt / 16);
        let signal = [libc::SIGKILL, libc::SIGINT, libc::SIGTERM, libc::SIGKILL][attempt as usize % 4];
        send(&child, signal);
        let status = child.wait().unwrap();
        assert!(
            status.success() || status.signal() == Some(signal) || status.code() == Some(128 + signal),
            "{status}"
        );
        // Killed after the picture was there: its bytes are all there, too.
        if case.out().exists() {
            assert!(fs::read(case.out()).unwrap() == undisturbed.png);
            fs::remove_file(case.out()).unwrap();
        } else {
            unfinished += 1;
        }
        if signal == libc::SIGINT {
            continue;
        }
        case.draw().assert_same(&undisturbed);
        case.assert_clean();
    }
    println!("{unfinished} of 16 ended early");
}

fn send(child: &Child, signal: i32) {
    // SAFETY: sends a signal to a child that has not been waited for.
    unsafe { libc::kill(child.id() as i32, signal) };
}

#[test]
fn what_is_damaged_is_computed_again() {
    let case = Case::klein();
    let undisturbed = case.draw();
    type Harm = fn(&Path);
    let harms: [(&str, Harm); 6] = [
        ("cut off", |path| cut(path, 1000)),
        ("empty", |path| cut(path, 0)),
        ("a flipped bit", |path| {
            let mut bytes = fs::read(path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(path, bytes).unwrap();
        }),
        ("another shape", |path| {
            let tensor = HostTensor::f32(&[2, 3], vec![0.5; 6]);
            fs::write(path, npy::to_bytes(&tensor)).unwrap();
        }),
        ("a pipe", |path| {
            fs::remove_file(path).unwrap();
            assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
        }),
        ("an unfinished file beside it", |path| {
            fs::write(path.with_file_name(".viaduct-abc.partial"), "x").unwrap();
            let run = path.parent().unwrap().file_name().unwrap().to_str().unwrap();
            let beside = path.ancestors().nth(3).unwrap().join(format!(".viaduct-{run}-dead.partial"));
            fs::write(beside, "x").unwrap();
        }),
    ];
    for (name, harm) in harms {
        let damaged = name != "an unfinished file beside it";
        for (tensor, remains) in
            [("latents_step1", Some("text_encoder")), ("prompt_embeds", Some("step 2/3"))]
        {
            case.stop(KILL, "kept:latents_step1");
            harm(&case.tensor(tensor));
            let again = case.draw();
            again.assert_same(&undisturbed);
            assert_eq!(
                again.told.contains("is damaged and computed again"),
                damaged,
                "{name}: {}",
                again.told
            );
            let remains = if damaged { remains } else { Some("step 2/3") };
            assert_eq!(again.resumed_from(), remains, "{name}: {}", again.told);
            case.assert_clean();
        }
    }
}

fn cut(path: &Path, bytes: u64) {
    File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

#[test]
fn a_folder_of_another_run_is_not_taken() {
    let case = Case::klein();
    let undisturbed = case.draw();
    let harms: [fn(&str) -> String; 3] = [
        |json| json.replace(r#""viaduct": ""#, r#""viaduct": "9."#),
        |json| json[..json.len() / 2].to_owned(),
        |_| String::new(),
    ];
    for harm in harms {
        case.stop(KILL, "kept:latents_step1");
        let path = case.kept().join("identity.json");
        let json = fs::read_to_string(&path).unwrap();
        assert!(json.contains("red apple"), "{json}");
        fs::write(&path, harm(&json)).unwrap();
        let again = case.draw();
        again.assert_same(&undisturbed);
        assert!(again.told.contains("says nothing of this run"), "{}", again.told);
        assert_eq!(again.resumed_from(), None);
        case.assert_clean();
    }
    // Another request has another folder.
    case.stop(KILL, "kept:latents_step1");
    let mut other = case.command();
    other.args(["--size", "96x96"]);
    assert_eq!(case.finish(other).resumed_from(), None);
    let again = case.draw();
    again.assert_same(&undisturbed);
    assert_eq!(again.resumed_from(), Some("step 2/3"));
    case.assert_clean();
}

#[test]
fn fresh_begins_anew() {
    let case = Case::klein();
    let undisturbed = case.draw();
    case.stop(KILL, "kept:latents_step1");
    let mut fresh = case.command();
    fresh.arg("--fresh");
    let again = case.finish(fresh);
    again.assert_same(&undisturbed);
    assert_eq!(again.resumed_from(), None);
    case.assert_clean();
}

/// A seed that nobody named belongs to the run.
#[test]
fn a_drawn_seed_stays() {
    let mut case = Case::klein();
    case.arguments = vec!["--steps", "2"];
    case.stop(INT, "kept:latents_step0");
    let again = case.draw();
    assert_eq!(again.resumed_from(), Some("step 1/2"));
    let seed = again.report["seed"].to_string();
    let mut named = case.command();
    named.args(["--seed", &seed]);
    case.finish(named).assert_same(&again);
    let another = case.draw();
    assert_ne!(another.report["seed"].to_string(), seed);
    case.assert_clean();
}

#[test]
fn a_failed_run_leaves_no_empty_folder() {
    let case = Case::klein();
    let graph = case.bundle.path().join("text_encoder.onnx");
    let bytes = fs::metadata(&graph).unwrap().len();
    fs::write(&graph, vec![0; bytes as usize]).unwrap();
    let output = case.command().output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    case.assert_clean();
}

#[test]
fn a_dump_neither_keeps_nor_continues() {
    let case = Case::klein();
    case.stop(KILL, "kept:latents_step1");
    let before = names(&case.kept());
    let dump = scratch();
    let mut command = case.command();
    command.arg("--dump").arg(dump.path());
    let drawn = case.finish(command);
    assert_eq!(drawn.resumed_from(), None);
    assert!(!drawn.told.contains(r#""event":"kept""#));
    assert_eq!(names(&case.kept()), before);
}

#[test]
fn two_runs_at_once_do_not_disturb_each_other() {
    let case = Case::klein();
    let undisturbed = case.draw();
    let mut first = case.stopped_at("STOP", "kept:latents_step0");
    let first = first.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_stop(&first);
    let before = names(&case.kept());
    let second = case.draw();
    second.assert_same(&undisturbed);
    assert!(second.told.contains("this run keeps nothing"), "{}", second.told);
    assert_eq!(names(&case.kept()), before);
    send(&first, libc::SIGCONT);
    case.look(first.wait_with_output().unwrap()).assert_same(&undisturbed);
    case.assert_clean();
}

/// The folder of a run that ended `age` seconds ago, with a tensor of so many bytes.
fn idle_run(runs: &Path, id: &str, age: u64, bytes: usize) -> PathBuf {
    let folder = runs.join(id);
    fs::create_dir_all(&folder).unwrap();
    for (name, bytes) in [("lock", 0), ("latents_step0.0123456789abcdef.npy", bytes)] {
        fs::write(folder.join(name), vec![0; bytes]).unwrap();
    }
    let changed = SystemTime::now() - Duration::from_secs(age);
    File::open(&folder).unwrap().set_modified(changed).unwrap();
    folder
}

#[test]
fn the_oldest_runs_make_room() {
    let case = Case::klein();
    let runs = case.runs();
    let [oldest, middle, newest, busy] =
        [("a", 300, 900_000), ("b", 200, 900_000), ("c", 100, 900_000), ("d", 400, 100)]
            .map(|(digit, age, bytes)| idle_run(&runs, &digit.repeat(16), age, bytes));
    let lock = File::open(busy.join("lock")).unwrap();
    lock.try_lock().unwrap();
    let empty = idle_run(&runs, &"e".repeat(16), 1, 0);
    fs::remove_file(empty.join("latents_step0.0123456789abcdef.npy")).unwrap();
    let removed = runs.join(".removed-ffffffffffffffff-1");
    fs::create_dir_all(&removed).unwrap();
    fs::write(removed.join("latents_step0.0123456789abcdef.npy"), "x").unwrap();
    // Looks like a run, and holds what no run has made.
    let photos = idle_run(&runs, &"f".repeat(16), 500, 100);
    fs::write(photos.join("cat.png"), "x").unwrap();
    // Nothing of ours.
    fs::create_dir_all(runs.join("photos")).unwrap();
    fs::write(runs.join("photos/cat.png"), "x").unwrap();

    let mut command = case.stopped_at("KILL", "kept:prompt_embeds");
    command.env("VIADUCT_RUNS_LIMIT", "2000000");
    assert_eq!(command.output().unwrap().status.signal(), Some(9));
    let left = |folder: &PathBuf| folder.exists();
    assert_eq!([&oldest, &middle, &newest, &busy].map(left), [false, true, true, true]);
    assert!(!empty.exists() && runs.join("photos/cat.png").exists());
    assert!(!runs.join(".removed-ffffffffffffffff-1").exists());

    // Less room than a state needs: the run keeps what fits, and leaves the picture alone.
    let mut command = case.command();
    command.env("VIADUCT_RUNS_LIMIT", "9000");
    let drawn = case.finish(command);
    assert_eq!([&middle, &newest, &busy].map(left), [false, false, true]);
    assert_eq!(drawn.resumed_from(), Some("text_encoder"));
    let kept = |event: &Event| matches!(event, Event::Kept { bytes, .. } if *bytes > 9000);
    assert!(!drawn.events().iter().any(kept), "{}", drawn.told);
    assert!(photos.join("cat.png").exists());
    assert!(names(&runs).len() == 3, "{:?}", names(&runs));

    let mut command = case.command();
    command.env("VIADUCT_RUNS_LIMIT", "0");
    let none = case.finish(command);
    none.assert_same(&drawn);
    assert!(!none.told.contains(r#""event":"kept""#));
    let mut command = case.command();
    command.env("VIADUCT_RUNS_LIMIT", "plenty");
    assert_eq!(command.output().unwrap().status.code(), Some(2));
}

fn warnings(drawn: &Drawn) -> Vec<String> {
    let messages = drawn.events().into_iter().filter_map(|event| match event {
        Event::Warning { message } => Some(message),
        _ => None,
    });
    messages.collect()
}

/// What others put in a run folder's place is neither waited for, nor followed, nor removed.
#[test]
fn strange_run_folders_cost_a_warning() {
    let case = Case::klein();
    let undisturbed = case.draw();
    let elsewhere = scratch();
    fs::write(elsewhere.path().join("identity.json"), "theirs").unwrap();
    let foreign = elsewhere.path().join("theirs");
    fs::write(&foreign, "x").unwrap();
    type Harm<'a> = (&'a str, Box<dyn Fn(&Path) + 'a>);
    let again = |path: &Path| {
        fs::remove_dir_all(path).unwrap();
        fs::create_dir(path).unwrap();
    };
    let harms: [Harm<'_>; 3] = [
        (
            "regular",
            Box::new(|path| {
                again(path);
                assert!(Command::new("mkfifo").arg(path.join("lock")).status().unwrap().success());
            }),
        ),
        (
            "nothing of this run is kept",
            Box::new(|path| {
                again(path);
                std::os::unix::fs::symlink(&foreign, path.join("lock")).unwrap();
            }),
        ),
        (
            "link",
            Box::new(|path| {
                fs::remove_dir_all(path).unwrap();
                std::os::unix::fs::symlink(elsewhere.path(), path).unwrap();
            }),
        ),
    ];
    for (told, harm) in &harms {
        case.stop(KILL, "kept:latents_step1");
        let folder = case.kept();
        harm(&folder);
        let drawn = case.draw();
        drawn.assert_same(&undisturbed);
        assert_eq!(warnings(&drawn).len(), 1, "{}", drawn.told);
        assert!(warnings(&drawn)[0].contains(told), "{told}: {}", drawn.told);
        let _ = fs::remove_dir_all(&folder);
        let _ = fs::remove_file(&folder);
    }
    assert_eq!(names(elsewhere.path()), ["identity.json", "theirs"]);
    assert_eq!(fs::read(&foreign).unwrap(), b"x");
}

#[test]
fn an_interrupt_does_not_wait_for_a_reader() {
    let case = Case::klein();
    let mut command = case.stopped_at("STOP", "kept:latents_step0");
    let (reader, mut writer) = std::io::pipe().unwrap();
    let stderr = writer.try_clone().unwrap();
    let mut child = command.stdout(Stdio::null()).stderr(stderr).spawn().unwrap();
    drop(command);
    wait_for_stop(&child);
    // What is said from now on finds no room.
    // SAFETY: changes a flag of a pipe of this test.
    unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) };
    let flags = unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_GETFL) };
    unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) };
    while writer.write(&[b'.'; 64]).is_ok() {}
    unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, flags) };
    send(&child, libc::SIGCONT);
    sleep(Duration::from_millis(300));
    send(&child, libc::SIGTERM);
    assert_eq!(child.wait().unwrap().code(), Some(128 + libc::SIGTERM));
    drop(reader);
}

fn wait_for_stop(child: &Child) {
    let state = format!("/proc/{}/stat", child.id());
    let patience = Instant::now();
    while !fs::read_to_string(&state).unwrap().contains(") T ") {
        assert!(patience.elapsed() < Duration::from_secs(120));
        sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_cache_that_takes_nothing_costs_a_warning() {
    let case = Case::flux2_a();
    let undisturbed = case.draw();
    let file = case.folder.path().join("file");
    fs::write(&file, "").unwrap();
    for runs in [file.join("runs"), PathBuf::from("/proc/viaduct"), file.clone()] {
        let mut command = case.command();
        command.env("VIADUCT_RUNS", &runs);
        let drawn = case.finish(command);
        drawn.assert_same(&undisturbed);
        let warnings = warnings(&drawn);
        assert!(warnings.len() == 1 && warnings[0].contains("nothing of this run is kept"), "{warnings:?}");
    }
    let mut command = case.command();
    command.env_remove("VIADUCT_RUNS").env_remove("XDG_CACHE_HOME").env_remove("HOME");
    case.finish(command).assert_same(&undisturbed);
}

/// A disk that is really full, where the system lets a user mount one.
#[test]
fn a_full_disk_costs_a_warning() {
    let user = ["--user", "--map-root-user", "--mount"];
    let mut probe = Command::new("unshare");
    probe.args(user).args(["mount", "-t", "tmpfs", "none", "/mnt"]);
    if !probe.output().is_ok_and(|output| output.status.success()) {
        return println!("this system mounts nothing for users: not tried");
    }
    let case = Case::klein();
    let undisturbed = case.draw();
    let disk = case.runs();
    let room = fs::metadata({
        case.stop(KILL, "kept:prompt_embeds");
        case.tensor("prompt_embeds")
    });
    // The prompt fits, and a little more.
    let size = room.unwrap().len() / 1024 + 24;
    case.draw();
    let script = format!(
        "mount -t tmpfs -o size={size}k none {disk} && \"$0\" \"$@\"; code=$?; ls -A {disk} >&2; exit $code",
        disk = disk.display()
    );
    let inner = case.command();
    let mut command = Command::new("unshare");
    command.args(user).args(["sh", "-c", &script]).arg(inner.get_program()).args(inner.get_args());
    command.envs(inner.get_envs().filter_map(|(key, value)| Some((key, value?))));
    let drawn = case.finish(command);
    drawn.assert_same(&undisturbed);
    let warnings = warnings(&drawn);
    assert!(warnings.len() == 1 && warnings[0].contains("nothing more of it is kept"), "{warnings:?}");
    assert!(warnings[0].contains("No space left on device"), "{warnings:?}");
    case.assert_clean();
}

/// The fixture's own noise decides, too.
#[test]
fn given_noise_goes_on() {
    let mut case = Case::klein();
    let noise = fixture("klein-emoji").join("0/noise_nchw.npy").to_str().unwrap().to_owned().leak();
    case.arguments = vec!["--steps", "2", "--noise", noise];
    let undisturbed = case.draw();
    case.stop(KILL, "kept:latents_step0");
    let again = case.draw();
    again.assert_same(&undisturbed);
    assert_eq!(again.resumed_from(), Some("step 1/2"));
    case.assert_clean();
}
