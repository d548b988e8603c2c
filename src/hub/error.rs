use std::{io, path::PathBuf, time::Duration};

use viaduct_export::{
    bundle::{BundleError, ExportError},
    bytes::ByteSize,
};

use super::reference::RepoId;

/// Why a model could not be brought or found. None of them leaves a partial file under its final name.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error(
        "{repo} is not in the cache as a whole ({}), and HF_HUB_OFFLINE forbids to download it; unset HF_HUB_OFFLINE, run `viaduct pull {repo}` where there is a network and copy the cache, or name a local folder with --model-dir",
        cache.display()
    )]
    Offline { repo: RepoId, cache: PathBuf },
    #[error(
        "{repo} is not in the cache as a whole, and HF_HUB_OFFLINE is set, so nothing is downloaded; unset it"
    )]
    PullOffline { repo: RepoId },
    #[error(
        "{repo}: no such repository on {endpoint}; check the name, or set HF_TOKEN if the repository is private"
    )]
    NoRepository { repo: RepoId, endpoint: String },
    #[error("{repo}: the repository has no revision '{}'; a commit is written with all its 40 digits", repo.revision)]
    NoRevision { repo: RepoId },
    #[error(
        "{repo}: access is restricted; accept the terms on {endpoint}/{}, make a token there and set HF_TOKEN (or log in with `hf auth login`)",
        repo.id
    )]
    Gated { repo: RepoId, endpoint: String },
    #[error("{repo}: the hub does not accept the token; set HF_TOKEN to one that may read the repository")]
    Unauthorized { repo: RepoId },
    #[error(
        "{what}: {problem}, and the server asks to wait {} s; try again then (with HF_TOKEN more is allowed); what is downloaded stays",
        wait.as_secs()
    )]
    RateLimited { what: String, problem: String, wait: Duration },
    #[error("{repo}: the hub cannot be asked ({problem}); check the network and HF_ENDPOINT")]
    Unreachable { repo: RepoId, problem: String },
    #[error("{what}: {problem} ({attempts} attempts); what is downloaded stays, so run it again to go on")]
    Transfer { what: String, problem: String, attempts: u32 },
    #[error("{what}: the server answered {status}{}", said(message))]
    Status { what: String, status: u16, message: String },
    #[error(
        "{what}: the downloaded bytes have another hash than the hub states ({found}, not {expected}), twice; they are removed. Try again later, or look for a proxy that changes files"
    )]
    Corrupt { what: String, expected: String, found: String },
    #[error("{repo}: the hub's list of files cannot be used: {problem}")]
    Listing { repo: RepoId, problem: String },
    #[error("{repo} has no file {file}, but {by} names it; the repository is incomplete")]
    NoFile { repo: RepoId, file: String, by: String },
    #[error(
        "{repo}: {file} is {found} on the hub, but bundle.json says {expected}; the repository holds files of different exports"
    )]
    Disagrees { repo: RepoId, file: String, expected: String, found: String },
    #[error(
        "{repo} holds no model that this program knows (no bundle.json, flux2-config.json or model_index.json); `viaduct pull --all` downloads it all the same"
    )]
    NoModel { repo: RepoId },
    #[error("{repo} is a checkpoint; make a bundle of it: `viaduct export {repo} -o BUNDLE`")]
    IsCheckpoint { repo: RepoId },
    #[error("{repo} is a bundle already: `viaduct generate -b {repo}`")]
    IsBundle { repo: RepoId },
    #[error(
        "{}: {} free, but {} more are needed; make room (`viaduct list`, `viaduct rm`), or set HF_HOME to a larger disk",
        folder.display(), ByteSize(*free), ByteSize(*needed)
    )]
    NoSpace { folder: PathBuf, needed: u64, free: u64 },
    #[error("{repo} is not in the cache ({}); `viaduct list` shows what is", cache.display())]
    NotCached { repo: RepoId, cache: PathBuf },
    #[error("{repo}: another process is downloading or exporting it; end that first")]
    InUse { repo: RepoId },
    #[error("no home folder is known; set HF_HOME to the folder that is to hold downloads")]
    NoHome,
    #[error("{variable}={value}: {problem}")]
    Setting { variable: &'static str, value: String, problem: &'static str },
    #[error("no thread can be started ({0}); raise the limit of processes (`ulimit -u`)")]
    Thread(io::Error),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error(transparent)]
    Checkpoint(Box<ExportError>),
    #[error("interrupted; what is downloaded stays, so run it again to go on")]
    Interrupted,
}

fn said(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}

impl HubError {
    pub(super) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> HubError {
        let path = path.into();
        |source| HubError::Io { path, source }
    }
}
