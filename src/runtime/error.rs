//! What can go wrong between the bundle and the device.

use std::path::PathBuf;

use super::{Stopped, lower::LowerError};
use viaduct_export::{
    bundle::BundleError,
    onnx::{ReadError, WriteError},
};

/// An error of the runtime; every one that concerns a stage names it.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error(
        "{file} is in none of: {}; `make setup` fetches it, or set VIADUCT_RUNTIME to its directory",
        list(looked_in)
    )]
    LibraryMissing { file: &'static str, looked_in: Vec<PathBuf> },
    #[error("{}: {reason}; `make setup` fetches the version that this program was built for", path.display())]
    LibraryUnusable { path: PathBuf, reason: String },
    #[error("no adapter for WebGPU: {reason}; `--ep cpu` runs without one")]
    NoAdapter { reason: String },
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error("stage {stage}: {source}")]
    Graph { stage: String, source: Box<ReadError> },
    #[error("stage {stage}: {source}")]
    Lower { stage: String, source: Box<LowerError> },
    #[error("stage {stage}: {source}")]
    Write { stage: String, source: Box<WriteError> },
    #[error(
        "stage {stage} computes in f16, which {adapter} cannot; export with --profile f32, or run with --ep cpu"
    )]
    NoF16 { stage: String, adapter: String },
    #[error("stage {stage}: the session could not be made: {reason}")]
    Open { stage: String, reason: String },
    /// Nodes that the WebGPU provider left to the CPU; graphs must not need one.
    #[error("stage {stage}: {} would run on the CPU: {}", count(nodes.len()), nodes.join(", "))]
    CpuNodes { stage: String, nodes: Vec<String> },
    #[error("stage {stage}: tensor {tensor}: expected {expected}, got {got}")]
    BadTensor { stage: String, tensor: String, expected: String, got: String },
    #[error("stage {stage} has no {role} {tensor}; it has: {known}")]
    UnknownTensor { stage: String, role: &'static str, tensor: String, known: String },
    #[error("stage {stage}: input {tensor} was neither bound nor given")]
    InputMissing { stage: String, tensor: String },
    #[error("stage {stage}: the run failed: {reason}")]
    Run { stage: String, reason: String },
    #[error(
        "stage {stage}: node {node} needs {asked} or more storage buffers, the device allows {allowed}; `viaduct report` \
         lists such nodes, and `viaduct rewrite --passes webgpu` makes trees of them"
    )]
    StorageBuffers { stage: String, node: String, asked: u32, allowed: u32 },
    /// What a worker reports, in its own words.
    #[error("{message}")]
    Worker { message: String, exit_code: u8 },
    #[error(transparent)]
    Stopped(#[from] Box<Stopped>),
    #[error("the worker process {problem}")]
    WorkerUnusable { problem: String },
    #[error("the worker of stage {stage} {end}")]
    WorkerDied { stage: String, end: String },
    #[error("cannot pass a tensor through {}: {source}", path.display())]
    Exchange { path: PathBuf, source: std::io::Error },
    #[error("stage {stage}: the device was lost: {reason}")]
    DeviceLost { stage: String, reason: String },
}

impl RuntimeError {
    /// The exit code of the process that ends with this error: 6 for a lost, unfit or absent device, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            RuntimeError::NoAdapter { .. }
            | RuntimeError::DeviceLost { .. }
            | RuntimeError::StorageBuffers { .. }
            | RuntimeError::NoF16 { .. }
            | RuntimeError::CpuNodes { .. } => 6,
            RuntimeError::Worker { exit_code, .. } => *exit_code,
            RuntimeError::Stopped(_) => Stopped::EXIT_CODE,
            _ => 1,
        }
    }

    /// The error of a failed run, recognised by its message: ONNX Runtime has no code for a lost device or its limits.
    pub(super) fn from_run(stage: &str, reason: String) -> RuntimeError {
        let stage = stage.to_owned();
        if let Some((node, asked, allowed)) = storage_buffers(&reason) {
            return RuntimeError::StorageBuffers { stage, node, asked, allowed };
        }
        let lower = reason.to_lowercase();
        if ["device was destroyed", "device is lost", "device lost", "device_lost"]
            .iter()
            .any(|m| lower.contains(m))
        {
            RuntimeError::DeviceLost { stage, reason }
        } else {
            RuntimeError::Run { stage, reason }
        }
    }
}

/// The node of `... Name:'join' ... Too many storage buffers in shader. Current: 17, Max is 16`, and the two numbers.
fn storage_buffers(reason: &str) -> Option<(String, u32, u32)> {
    let (before, numbers) = reason.split_once("Too many storage buffers in shader. Current: ")?;
    let (asked, allowed) = numbers.split_once(", Max is ")?;
    let allowed = allowed.split(|c: char| !c.is_ascii_digit()).next()?;
    let (node, _) = before.split_once("Name:'")?.1.split_once("' Status")?;
    Some((node.to_owned(), asked.parse().ok()?, allowed.parse().ok()?))
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn count(nodes: usize) -> String {
    if nodes == 1 { "1 node".to_owned() } else { format!("{nodes} nodes") }
}
