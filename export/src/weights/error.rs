use std::{io, path::PathBuf};

use crate::onnx::DType;

/// Why a checkpoint, or one tensor of it, cannot be used. Every message names the file, and the tensor where one is
/// concerned.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },

    #[error(
        "{}: no *.safetensors or *.safetensors.index.json here; give a checkpoint file or a component directory",
        path.display()
    )]
    NoWeights { path: PathBuf },

    #[error(
        "{}: several weight files and no index that joins them ({}); name the one to use, or put the \
         *.safetensors.index.json beside them",
        path.display(),
        files.join(", ")
    )]
    Ambiguous { path: PathBuf, files: Vec<String> },

    #[error("{}: not a .safetensors file, a *.safetensors.index.json or a directory", path.display())]
    UnknownKind { path: PathBuf },

    #[error("{}: this is a Git LFS pointer, not the weights; fetch the file itself (git lfs pull)", path.display())]
    LfsPointer { path: PathBuf },

    #[error(
        "{}: truncated, {expected} bytes expected and {found} found; the download did not finish, fetch it again",
        path.display()
    )]
    Truncated { path: PathBuf, expected: u64, found: u64 },

    #[error(
        "{}: {found} bytes have come where {expected} were announced; it is not the file that it was, start again",
        path.display()
    )]
    OtherLength { path: PathBuf, expected: u64, found: u64 },

    #[error("{}: it has come with another header than was announced; it is not the file that it was, start again", path.display())]
    OtherHeader { path: PathBuf },

    #[error("{}: {extra} bytes after the last tensor; the file is damaged or not safetensors", path.display())]
    TrailingBytes { path: PathBuf, extra: u64 },

    #[error("{}: header of {len} bytes, at most {max} allowed; not a safetensors file", path.display())]
    HeaderTooLarge { path: PathBuf, len: u64, max: u64 },

    #[error("{}: bad header: {reason}", path.display())]
    BadHeader { path: PathBuf, reason: String },

    #[error("{}: bad header: tensor `{tensor}`: {reason}", path.display())]
    BadTensor { path: PathBuf, tensor: String, reason: String },

    #[error("{}: bad index: {reason}", path.display())]
    BadIndex { path: PathBuf, reason: String },

    #[error("{}: shard name {shard:?} of tensor `{tensor}` leaves the directory of the index; refused", path.display())]
    UnsafeShard { path: PathBuf, tensor: String, shard: String },

    #[error(
        "{}: shard file is missing; `{}` lists it for `{tensor}` and {others} more tensors; the download is incomplete",
        shard.display(),
        index.display()
    )]
    ShardMissing { index: PathBuf, shard: PathBuf, tensor: String, others: usize },

    #[error(
        "`{}` lists tensor `{tensor}` in `{}`, but the header of that file does not have it; index and shards are \
         not from the same checkpoint",
        index.display(),
        shard.display()
    )]
    ListedButAbsent { index: PathBuf, shard: PathBuf, tensor: String },

    #[error(
        "`{}` holds tensor `{tensor}`, but `{}` does not list it there; index and shards are not from the same \
         checkpoint",
        shard.display(),
        index.display()
    )]
    PresentButUnlisted { index: PathBuf, shard: PathBuf, tensor: String },

    #[error("{}: no tensor `{tensor}` in this checkpoint{}", path.display(), did_you_mean(nearest))]
    NoSuchTensor { path: PathBuf, tensor: String, nearest: Option<String> },

    #[error("{}: tensor `{tensor}` has shape {found:?}, {expected:?} expected", path.display())]
    WrongShape { path: PathBuf, tensor: String, expected: Vec<usize>, found: Vec<usize> },

    #[error("{}: tensor `{tensor}` is {name}; only F32, F16 and BF16 weights can be used", path.display())]
    WrongDType { path: PathBuf, tensor: String, dtype: DType, name: String },

    #[error("tensor `{tensor}` of shape {shape:?} is larger than any that could be stored")]
    TooLarge { tensor: String, shape: Vec<usize> },

    #[error("{}: {len} bytes, at most {max} allowed for a JSON file", path.display())]
    JsonTooLarge { path: PathBuf, len: u64, max: u64 },

    #[error("{}: {}{source}", path.display(), at_key(key))]
    Json { path: PathBuf, key: Option<String>, source: serde_json::Error },
}

fn did_you_mean(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or(String::new(), |name| format!("; nearest is `{name}`"))
}

fn at_key(key: &Option<String>) -> String {
    key.as_ref().map_or(String::new(), |key| format!("key `{key}`: "))
}
