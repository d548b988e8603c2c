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
#[derive(Args)]
pub struct Arguments {
    /// Also repositories that hold no model that this program knows
    #[arg(long)]
    all: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let hub = hub()?;
    let mut kept = hub.kept()?;
    kept.retain(|kept| arguments.all || kept.kind != Kind::Other || kept.incomplete > 0);
    let cache = &hub.settings().cache;
    let total: u64 = kept.iter().map(|kept| kept.bytes).sum();
    if arguments.json {
        let report = serde_json::json!({ "cache": cache, "bytes": total, "models": kept });
        return print(&format!("{report}\n"));
    }
    let width = kept.iter().map(|kept| kept.repo.len()).max().unwrap_or(0);
    let mut text: String = kept.iter().map(|kept| line(kept, width)).collect();
    let _ = writeln!(text, "{} in {}", ByteSize(total), cache.display());
    print(&text)
}

fn line(kept: &Kept, width: usize) -> String {
    let kind = match kept.kind {
        Kind::Bundle => "bundle",
        Kind::Checkpoint => "checkpoint",
        Kind::Other => "other",
    };
    let state = match (kept.whole, kept.incomplete) {
        (_, 1..) => format!("{} broken off; `viaduct pull` goes on", ByteSize(kept.incomplete)),
        (true, 0) => "whole".to_owned(),
        (false, 0) => "in part".to_owned(),
    };
    let license = kept.license.as_deref().map(printable::one_line);
    let license = license.map_or(String::new(), |license| format!(", {license}"));
    format!("{:<width$}  {:>9}  {kind:<10}  {state}{license}\n", kept.repo, ByteSize(kept.bytes))
}
