//! Runs the binary on bad inputs, each in a directory of its own, and looks at all that it leaves: exit code, standard
//! error, files.
#![allow(dead_code)]

use std::{
    collections::BTreeMap,
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::SystemTime,
};

use serde_json::Value;
use tempfile::TempDir;

/// A run that takes longer hangs.
const PATIENCE_SECONDS: u32 = 300;

/// Recipe values that the procedural checkpoint needs; its oracle was made with them.
pub const SET: &str = "--set text_encoder.taps=1,3,4 --set text_encoder.length=40";

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The binary in a directory, with the project's runtime libraries unless the environment names others.
pub fn viaduct(directory: &Path, arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_viaduct"));
    command.current_dir(directory).args(arguments.split_whitespace()).env("RUST_BACKTRACE", "1");
    // What a run keeps has tests of its own.
    command.env("VIADUCT_RUNS_LIMIT", "0");
    command.env("VIADUCT_RUNS", Path::new(env!("CARGO_TARGET_TMPDIR")).join("runs"));
    command.env("VIADUCT_TUNING", Path::new(env!("CARGO_TARGET_TMPDIR")).join("no tuning"));
    if std::env::var_os("VIADUCT_RUNTIME").is_none() {
        command.env("VIADUCT_RUNTIME", root().join("runtime"));
    }
    command
}

/// Runs a command to its end; one that has none is ended by its alarm and then has no exit code.
pub fn finish(mut command: Command) -> Output {
    // SAFETY: async-signal-safe; the alarm outlives `exec`.
    unsafe {
        command.pre_exec(|| {
            libc::alarm(PATIENCE_SECONDS);
            Ok(())
        });
    }
    command.output().expect("the binary starts")
}

/// Limits the files of a command to so many bytes, as a full disk would: the write fails, the process lives on.
pub fn limit_files(command: &mut Command, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: both calls are async-signal-safe and touch the child alone.
    unsafe {
        command.pre_exec(move || {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            if libc::setrlimit(libc::RLIMIT_FSIZE, &limit) == 0 {
                Ok(())
            } else {
                Err(std::io::Error::last_os_error())
            }
        });
    }
}

/// A good checkpoint `ck` and the bundle `b` made of it, to be linked into every case's directory.
pub struct Good(TempDir);

impl Good {
    pub fn checkpoint() -> Good {
        let good = Good(TempDir::new().unwrap());
        let spec = root().join("tests/fixtures/flux2-a/checkpoint.json");
        viaduct_procedural::write_checkpoint(&spec, &good.0.path().join("ck")).unwrap();
        good
    }

    pub fn bundle() -> Good {
        let good = Good::checkpoint();
        let made = finish(viaduct(good.0.path(), &format!("export ck -o b --profile f32 {SET}")));
        assert!(made.status.success(), "{}", text(&made.stderr));
        fs::remove_dir_all(good.0.path().join("ck")).unwrap();
        good
    }

    /// A new directory with links to all files. Helpers below replace a file; nothing writes into one.
    pub fn copy(&self) -> TempDir {
        let directory = TempDir::new().unwrap();
        for (path, _) in snapshot(self.0.path()) {
            let (from, to) = (self.0.path().join(&path), directory.path().join(&path));
            if from.is_dir() {
                fs::create_dir(&to).unwrap();
            } else {
                fs::hard_link(&from, &to).unwrap();
            }
        }
        directory
    }
}

/// One bad input: what is done to the good files, what is run, and what must come of it.
pub struct Case {
    pub name: &'static str,
    pub harm: Box<dyn Fn(&Path)>,
    /// Arguments, or a command that is changed further.
    pub arguments: String,
    pub command: Box<dyn Fn(&mut Command)>,
    pub code: i32,
    /// What the error names: file, tensor, value, and what to do.
    pub says: &'static [&'static str],
}

/// A case whose command is the binary with these arguments.
pub fn case(
    name: &'static str,
    arguments: &str,
    harm: impl Fn(&Path) + 'static,
    code: i32,
    says: &'static [&'static str],
) -> Case {
    Case {
        name,
        harm: Box::new(harm),
        arguments: arguments.to_owned(),
        command: Box::new(|_| ()),
        code,
        says,
    }
}

impl Case {
    pub fn with(mut self, command: impl Fn(&mut Command) + 'static) -> Case {
        self.command = Box::new(command);
        self
    }

    /// What is wrong with how the program took it.
    fn fault(&self, good: &Good) -> Option<String> {
        let directory = good.copy();
        (self.harm)(directory.path());
        let before = snapshot(directory.path());
        let mut command = viaduct(directory.path(), &self.arguments);
        if !self.arguments.starts_with("inspect") {
            command.args(["--progress", "none"]);
        }
        (self.command)(&mut command);
        let output = finish(command);
        let told = text(&output.stderr);
        let after = snapshot(directory.path());
        let changed: Vec<_> =
            after.iter().filter(|(path, state)| before.get(*path) != Some(state)).map(|(p, _)| p).collect();
        let lost: Vec<_> = before.keys().filter(|path| !after.contains_key(*path)).collect();
        let problem = if output.status.code() != Some(self.code) {
            format!("{}, not {}", output.status, self.code)
        } else if told.lines().count() != 1 || !told.starts_with("error: ") || told.contains("panicked") {
            "not one line that begins with 'error: '".to_owned()
        } else if let Some(missing) = self.says.iter().find(|part| !told.contains(**part)) {
            format!("'{missing}' is not said")
        } else if !changed.is_empty() || !lost.is_empty() {
            format!("left behind {changed:?}, removed {lost:?}")
        } else {
            return None;
        };
        Some(format!("{}: {problem}\n    {}", self.name, told.trim_end().replace('\n', "\n    ")))
    }
}

/// Runs all cases and reports every fault.
pub fn check(good: &Good, cases: &[Case]) {
    let faults: Vec<String> = cases.iter().filter_map(|case| case.fault(good)).collect();
    assert!(faults.is_empty(), "{} of {} cases:\n{}", faults.len(), cases.len(), faults.join("\n"));
}

/// Everything below a directory, hidden names included: length and time of change of a file, 0 of a directory.
pub fn snapshot(directory: &Path) -> BTreeMap<PathBuf, (u64, Option<SystemTime>)> {
    let mut found = BTreeMap::new();
    let mut open = vec![directory.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let metadata = fs::symlink_metadata(&path).unwrap();
            let state =
                if metadata.is_dir() { (0, None) } else { (metadata.len(), metadata.modified().ok()) };
            found.insert(path.strip_prefix(directory).unwrap().to_owned(), state);
            if metadata.is_dir() {
                open.push(path);
            }
        }
    }
    found
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Puts a file in the place of another, which may be linked from elsewhere.
pub fn put(path: &Path, bytes: impl AsRef<[u8]>) {
    let _ = fs::remove_file(path);
    fs::write(path, bytes).unwrap();
}

/// Changes a file's bytes.
pub fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    put(path, bytes);
}

/// Changes a JSON file.
pub fn json(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut value);
    put(path, value.to_string());
}

/// Changes the header of a safetensors file and nothing else.
pub fn header(path: &Path, change: impl FnOnce(&mut Value)) {
    edit(path, |bytes| {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        change(&mut header);
        let header = header.to_string();
        let data = bytes.split_off(8 + length);
        *bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
    });
}

/// Replaces a bundle's file and states the new size in the manifest.
pub fn replace_listed(bundle: &Path, name: &str, bytes: &[u8]) {
    put(&bundle.join(name), bytes);
    json(&bundle.join("bundle.json"), |manifest| {
        let files = manifest["files"].as_array_mut().unwrap();
        files.iter_mut().find(|f| f["path"] == name).unwrap()["bytes"] = bytes.len().into();
    });
}

/// A child whose standard output nobody reads.
pub fn unread(mut command: Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    child.wait_with_output().unwrap()
}
