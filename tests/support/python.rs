//! Python with the packages of `.venv`, for what tests compare against.

use std::{
    env,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

/// `VIADUCT_PYTHON`, or the `.venv` at the root. Its absence fails the test in CI and is announced elsewhere, past the
/// capture of test output.
pub fn python() -> Option<PathBuf> {
    let venv = super::root().join(".venv/bin/python");
    let found = env::var_os("VIADUCT_PYTHON").map(PathBuf::from).or_else(|| venv.exists().then_some(venv));
    if found.is_none() {
        assert!(env::var("CI").as_deref() != Ok("true"), "CI needs Python with onnx: set VIADUCT_PYTHON");
        let line = b"!!! NOT TESTED with Python: set VIADUCT_PYTHON or make .venv\n";
        std::io::stderr().write_all(line).unwrap();
    }
    found
}

/// Runs one of the project's scripts to its end.
pub fn run_script(python: &Path, script: &str, arguments: &[&str]) {
    let output =
        Command::new(python).arg(super::root().join(script)).args(arguments).output().expect("Python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
