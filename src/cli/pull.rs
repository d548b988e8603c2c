//! `viaduct pull`

use std::{sync::Mutex, time::Instant};

use clap::Args;
use viaduct_export::bytes::ByteSize;

use super::{
    ProgressArguments,
    model::{hub, tell_if_interrupted, teller},
    printer::print,
    progress::Progress,
};
use crate::{
    hub::{Pulled, RepoId, Selection},
    pipeline::event::{Event, Listener},
};

/// Download a model from a Hugging Face hub, or bring it up to date.
///
/// Only the files that the model needs are fetched, several at once. Each gets its name only when its size and its hash are
/// those of the hub; what is broken off (also by Ctrl-C) is gone on with by the next call. The cache is the one of all tools
/// for the hub: what they have downloaded is used, and they use what this command downloads.
///
/// Prints the folder of the model.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// owner/name, owner/name@revision or hf://owner/name
    #[arg(value_name = "REPOSITORY")]
    repo: RepoId,
    /// Fetch all files of the repository, also those that no model needs
    #[arg(long)]
    all: bool,
    /// Read what is in the cache already, too, and fetch what is damaged once more
    #[arg(long)]
    check: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub progress: ProgressArguments,
}

const EXAMPLES: &str = "\
Examples:
  viaduct pull MarkShark2/flux2-klein-4b-onnx-webgpu-q4      a bundle, for `viaduct generate -b` with the same name
  viaduct pull black-forest-labs/FLUX.2-klein-4B             a checkpoint, for `viaduct export`
  viaduct pull owner/name@v1.0                               a branch, a tag or a commit

Environment, as of all tools for the hub:
  HF_TOKEN               for private and gated repositories; or log in with `hf auth login`
  HF_HOME, HF_HUB_CACHE  where downloads are kept (~/.cache/huggingface/hub)
  HF_ENDPOINT            another hub, or a mirror
  HF_HUB_OFFLINE=1       never ask a hub: only what is in the cache
  HF_HUB_DOWNLOAD_TIMEOUT, HTTPS_PROXY, VIADUCT_MODEL_DIR: docs/hub.md";

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let started = Instant::now();
    let hub = hub()?;
    let mut progress = Progress::new(arguments.progress.progress);
    tell_if_interrupted(&progress)?;
    let selection = if arguments.all { Selection::All } else { Selection::Model };
    let repo = &arguments.repo;
    let pulled = hub.pull(repo, selection, arguments.check, &teller(&Mutex::new(&mut progress)));
    let Pulled { commit, folder, files, bytes, came } = pulled?;
    let seconds = started.elapsed().as_secs_f64();
    progress.on_event(Event::note(match came {
        0 => format!("{repo}: nothing to download, all is there"),
        _ => format!("{repo}: {} downloaded in {seconds:.1} s", ByteSize(came)),
    }));
    drop(progress);
    if arguments.json {
        let RepoId { id, revision } = repo;
        let report = serde_json::json!({
            "repo": id, "revision": revision, "commit": commit, "path": folder.to_string_lossy(), "files": files,
            "bytes": bytes, "transferred": came, "seconds": seconds,
        });
        return print(&format!("{report}\n"));
    }
    print(&format!("{}\n", folder.display()))
}
