//! `viaduct rm`

use clap::Args;
use viaduct_export::bytes::ByteSize;

use super::{
    model::hub,
    printer::{complain, print},
};
use crate::hub::RepoId;

/// Remove models from the download cache, with all their revisions; other tools for the hub lose them, too.
#[derive(Args)]
pub struct Arguments {
    /// owner/name, as `viaduct list` shows it
    #[arg(required = true, value_name = "REPOSITORY")]
    repos: Vec<RepoId>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let hub = hub()?;
    let mut freed = 0;
    for repo in &arguments.repos {
        let bytes = hub.remove(repo)?;
        complain(&format!("{}: removed, {} are free again", repo.id, ByteSize(bytes)));
        freed += bytes;
    }
    match arguments.json {
        true => print(&format!("{}\n", serde_json::json!({ "freed": freed }))),
        false => Ok(()),
    }
}
