//! What tests of the program share: checkpoints, bundles made of them, and runs of the program.
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod python;
pub mod webgpu;

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;
use viaduct::{npy, tensor::HostTensor};
use viaduct_export::bundle::{ExportRequest, export};
use viaduct_procedural::write_checkpoint;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub fn fixture(name: &str) -> PathBuf {
    root().join("tests/fixtures").join(name)
}

/// The folder of an oracle: `flux2-a`, `klein-emoji/0`.
pub fn oracle(name: &str) -> PathBuf {
    let inner = fixture(name).join("oracle");
    if inner.is_dir() { inner } else { fixture(name) }
}

pub fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

pub fn tensor(folder: &Path, name: &str) -> HostTensor {
    npy::read(&folder.join(format!("{name}.npy"))).unwrap()
}

/// Names of the tensors in a folder, sorted.
pub fn tensors(folder: &Path) -> Vec<String> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = files.filter_map(|f| f.strip_suffix(".npy").map(str::to_owned)).collect();
    names.sort();
    names
}

/// The greatest absolute difference.
pub fn difference(a: &HostTensor, b: &HostTensor) -> f32 {
    assert_eq!(a.shape, b.shape);
    a.to_f32().iter().zip(b.to_f32()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Where ONNX Runtime is: `VIADUCT_RUNTIME`, or `runtime/` at the root.
pub fn runtime_folder() -> PathBuf {
    env::var_os("VIADUCT_RUNTIME").map_or_else(|| root().join("runtime"), PathBuf::from)
}

/// The program. Runs share the shaders that a software adapter compiles.
pub fn viaduct() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_viaduct"));
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let defaults = [
        ("VIADUCT_RUNTIME", runtime_folder()),
        ("MESA_SHADER_CACHE_DIR", scratch.join("shaders")),
        ("XDG_RUNTIME_DIR", scratch.to_owned()),
        ("VIADUCT_RUNS", scratch.join("runs")),
        ("VIADUCT_TUNING", scratch.join("no tuning")),
    ];
    command.envs(defaults.into_iter().filter(|(name, _)| env::var_os(name).is_none()));
    command
}

/// A folder of test data that goes when it is dropped.
pub fn scratch() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A checkpoint and what its recipe does not know of it.
pub struct Checkpoint {
    source: PathBuf,
    set: Vec<(String, String)>,
    /// Of a checkpoint that was written for the test.
    _folder: Option<TempDir>,
}

impl Checkpoint {
    /// The trained model that ships with the project.
    pub fn klein_emoji() -> Checkpoint {
        Checkpoint { source: root().join("bundles/klein-emoji/source"), set: Vec::new(), _folder: None }
    }

    /// A checkpoint that is stored with its fixture.
    pub fn stored(name: &str) -> Checkpoint {
        Checkpoint { source: fixture(name).join("model"), set: Vec::new(), _folder: None }
    }

    /// The checkpoint of a fixture, for the request of its oracle.
    pub fn of_fixture(name: &str) -> Checkpoint {
        let request = json(&oracle(name).join("request.json"));
        let taps: Vec<usize> = serde_json::from_value(request["taps"].clone()).unwrap();
        Checkpoint::procedural(
            &fixture(name).join("checkpoint.json"),
            &taps,
            request["text_length"].as_u64().unwrap(),
        )
    }

    /// A checkpoint with computed weights.
    pub fn procedural(spec: &Path, taps: &[usize], length: u64) -> Checkpoint {
        let folder = scratch();
        write_checkpoint(spec, folder.path()).unwrap();
        let taps = taps.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let set = [("text_encoder.taps", taps), ("text_encoder.length", length.to_string())];
        let set = set.map(|(key, value)| (key.to_owned(), value)).to_vec();
        Checkpoint { source: folder.path().to_owned(), set, _folder: Some(folder) }
    }

    /// The checkpoint's folder.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// `viaduct export` of it, to be run; `set` are further values of the recipe.
    pub fn export_command(&self, out: &Path, profile: &str, set: &[&str]) -> Command {
        let mut command = viaduct();
        command.arg("export").arg(&self.source).arg("-o").arg(out).args(["--profile", profile]);
        for (key, value) in &self.set {
            command.arg("--set").arg(format!("{key}={value}"));
        }
        command.args(set.iter().flat_map(|value| ["--set", value]));
        command
    }

    /// A bundle as the program exports it.
    pub fn export(&self, profile: &str, set: &[&str]) -> Bundle {
        let bundle = Bundle(scratch());
        self.export_command(&bundle.path(), profile, set).assert().success();
        bundle
    }

    /// A bundle with a planted fault.
    pub fn export_with_fault(&self, profile: &str, fault: &str) -> Bundle {
        let bundle = Bundle(scratch());
        let request = ExportRequest {
            source: &self.source,
            arrivals: None,
            out: &bundle.path(),
            recipe: None,
            profile,
            calibration: None,
            target_bytes: None,
            set: &self.set,
            force: false,
            fault: Some(fault),
        };
        export(&request, &mut |_| ()).unwrap();
        bundle
    }
}

/// An exported bundle that goes when it is dropped.
pub struct Bundle(TempDir);

impl Bundle {
    /// A bundle that something else than an export makes at [`Bundle::path`].
    pub fn to_be_made() -> Bundle {
        Bundle(scratch())
    }

    pub fn path(&self) -> PathBuf {
        self.0.path().join("bundle")
    }

    /// `viaduct verify` of it, to be run.
    pub fn verify_command(&self, oracle: &Path, ep: &str, more: &[&str]) -> Command {
        let mut command = viaduct();
        command.arg("verify").arg(self.path()).arg("--oracle").arg(oracle).args(["--json", "--ep", ep]);
        command.args(more);
        command
    }

    /// The report of `viaduct verify` with some more arguments, which must end with the given exit code.
    pub fn verify_with(&self, oracle: &Path, ep: &str, more: &[&str], code: i32) -> Value {
        let assert = self.verify_command(oracle, ep, more).assert().code(code);
        serde_json::from_slice(&assert.get_output().stdout).unwrap()
    }

    /// The report of the comparison alone.
    pub fn verify(&self, oracle: &Path, ep: &str, code: i32) -> Value {
        self.verify_with(oracle, ep, &["--no-controls", "--no-store"], code)
    }

    /// `viaduct generate` with this bundle, to be given its other arguments.
    pub fn generate(&self, out: &Path, prompt: &str, ep: &str) -> Command {
        let mut command = viaduct();
        command.arg("generate").arg("-b").arg(self.path()).arg("-o").arg(out);
        command.args(["-p", prompt, "--ep", ep]);
        command
    }
}
