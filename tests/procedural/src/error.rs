use std::io;
use std::path::PathBuf;

/// Why a checkpoint could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{what}: {source}")]
    Json { what: String, source: serde_json::Error },
    #[error("{}: {source}", path.display())]
    Safetensors { path: PathBuf, source: safetensors::SafeTensorError },
    #[error("{what} is not supported")]
    Unsupported { what: &'static str },
    #[error("{component}: shard {shard} of {shards} would be empty")]
    EmptyShard { component: &'static str, shard: usize, shards: usize },
    /// The weights differ from those that the reference tensors were computed from.
    #[error("{component}: fingerprint {found}, but the spec says {wanted}")]
    Fingerprint { component: &'static str, found: String, wanted: String },
}
