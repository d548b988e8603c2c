//! `viaduct list`

use std::fmt::Write;

use clap::Args;
use viaduct_export::bytes::ByteSize;

use super::{model::hub, printer::print};
use crate::{
    hub::{Kept, Kind},
    printable,
};

/// List the models in the download cache, and what they take on the disk.
///
/// A model is `whole`, or there `in part`: after `report` or `inspect`, which need no weights, after an export, which removes those
/// that it has downloaded, or when a download was broken off, which the same command goes on with.
#[derive(Args)]
pub struct Arguments {
    /// Also repositories that hold no model that this program knows
    #[arg(long)]
    all: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The heading of the names.
const REPOSITORY: &str = "repository";

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let hub = hub()?;
    let mut kept = hub.kept()?;
    kept.retain(|kept| arguments.all || kept.kind != Kind::Other || kept.incomplete > 0);
    let cache = &hub.settings().cache;
    let total: u64 = kept.iter().map(|kept| kept.bytes).sum();
    if arguments.json {
        let report = serde_json::json!({ "cache": cache.to_string_lossy(), "bytes": total, "models": kept });
        return print(&format!("{report}\n"));
    }
    let width = kept.iter().map(|kept| kept.repo.len()).max().unwrap_or(0).max(REPOSITORY.len());
    let mut text = match kept[..] {
        [] => "nothing is there; `viaduct pull owner/name` downloads a model\n".to_owned(),
        _ => format!("{REPOSITORY:<width$}    on disk  kind        state\n"),
    };
    text.extend(kept.iter().map(|kept| line(kept, width)));
    let _ = writeln!(text, "{} in {}", ByteSize(total), cache.display());
    print(&text)
}

fn line(kept: &Kept, width: usize) -> String {
    let kind = match kept.kind {
        Kind::Bundle => "bundle",
        Kind::Checkpoint => "checkpoint",
        Kind::Other => "other",
    };
    let mut state = if kept.whole { "whole" } else { "in part" }.to_owned();
    match kept.incomplete {
        _ if kept.busy => state.push_str(", in use"),
        0 => {}
        bytes => state.push_str(&format!(" ({} broken off)", ByteSize(bytes))),
    }
    let license = kept.license.as_deref().map(printable::one_line);
    let license = license.map_or(String::new(), |license| format!(", {license}"));
    format!("{:<width$}  {:>9}  {kind:<10}  {state}{license}\n", kept.repo, ByteSize(kept.bytes))
}
