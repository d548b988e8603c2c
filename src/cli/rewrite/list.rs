//! The passes, sequences and splits there are.

use std::collections::BTreeMap;

use serde_json::json;
use viaduct_export::passes::{PASSES, SEQUENCES, SPLITS};

/// All of them, as text or JSON.
pub fn list(as_json: bool) -> String {
    if as_json {
        let passes: Vec<_> = PASSES
            .iter()
            .map(|pass| json!({ "name": pass.name, "what": pass.what, "why": pass.why }))
            .collect();
        let sequences: BTreeMap<&str, _> = SEQUENCES
            .iter()
            .map(|sequence| {
                (
                    sequence.name,
                    json!({ "what": sequence.what, "after": sequence.after, "passes": sequence.passes }),
                )
            })
            .collect();
        let splits: Vec<_> = SPLITS
            .iter()
            .map(|split| json!({ "name": split.name, "what": split.what, "why": split.why }))
            .collect();
        return format!("{}\n", json!({ "passes": passes, "sequences": sequences, "splits": splits }));
    }
    let mut text = "Sequences (--passes NAME):\n".to_owned();
    for sequence in SEQUENCES {
        text.push_str(&format!(
            "  {}: {}\n      {}{}\n",
            sequence.name,
            sequence.what,
            sequence.after.map_or(String::new(), |name| format!("{name}, then ")),
            sequence.passes.join(", ")
        ));
    }
    text.push_str("\nPasses (--pass NAME):\n");
    for pass in PASSES {
        text.push_str(&format!("  {}: {}\n      because {}\n", pass.name, pass.what, pass.why));
    }
    text.push_str("\nSplits (--split NAME; -o is a folder):\n");
    for split in SPLITS {
        text.push_str(&format!("  {}: {}\n      because {}\n", split.name, split.what, split.why));
    }
    text
}
