//! `viaduct rm`

use clap::Args;
use viaduct_export::bytes::ByteSize;

use super::{
    model::hub,
    printer::{complain, print},
};
use crate::hub::RepoId;

/// Remove models from the download cache, without asking; other tools for the hub lose them, too.
#[derive(Args)]
pub struct Arguments {
    /// owner/name, as `viaduct list` shows it; all its revisions go
    #[arg(required = true, value_name = "REPOSITORY", value_parser = repository)]
    repos: Vec<RepoId>,
    /// Only older revisions: those that no branch or tag stands for any more
    #[arg(long)]
    old: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let hub = hub()?;
    // A wrong name among them is told of before anything goes.
    arguments.repos.iter().try_for_each(|repo| hub.check_removable(repo))?;
    let mut removed = Vec::new();
    for repo in &arguments.repos {
        let (bytes, what) = match arguments.old {
            true => (hub.remove_old(repo)?, "older revisions removed"),
            false => (hub.remove(repo)?, "removed"),
        };
        complain(&format!("{}: {what}, {} are free again", repo.id, ByteSize(bytes)));
        removed.push(serde_json::json!({ "repo": repo.id, "freed": bytes }));
    }
    match arguments.json {
        true => print(&format!("{}\n", serde_json::json!({ "removed": removed }))),
        false => Ok(()),
    }
}

fn repository(text: &str) -> Result<RepoId, String> {
    match text.contains('@') {
        true => Err("all revisions go, or with --old the older ones; write owner/name alone".to_owned()),
        false => text.parse().map_err(|error: crate::hub::RepoIdError| error.to_string()),
    }
}
