//! Checkpoints whose tensors lie under other names than the model's own: with a prefix, or several in one.

use std::{collections::BTreeMap, mem};

use super::{Checkpoint, safetensors::Entry};

impl Checkpoint {
    /// With names from which a prefix is taken: the first under which there is the tensor `known`. Tensors without it
    /// keep their names.
    pub fn without_prefix(mut self, prefixes: &[&str], known: &str) -> Checkpoint {
        let has_known = |prefix: &&&str| self.lists(&format!("{prefix}{known}"));
        let Some(prefix) = prefixes.iter().find(has_known) else { return self };
        let short = |name: String| name.strip_prefix(prefix).map_or_else(|| name.clone(), str::to_owned);
        for shard in &mut self.shards {
            let tensors = mem::take(&mut shard.tensors);
            shard.tensors = tensors.into_iter().map(|(name, entry)| (short(name), entry)).collect();
        }
        let absent = mem::take(&mut self.absent);
        self.absent = absent.into_iter().map(|(name, shard)| (short(name), shard)).collect();
        // Where a name is there with and without the prefix, the places must be those of the tensors that were kept.
        self.places = BTreeMap::new();
        for (place, shard) in self.shards.iter().enumerate() {
            self.places.extend(shard.tensors.keys().map(|name| (name.clone(), place)));
        }
        self
    }

    /// With tensors of their own for the two halves of the rows of `fused`, if there is one whose rows can be halved.
    pub fn with_halves(&mut self, fused: &str, halves: [&str; 2]) {
        if let Some(missing) = self.absent.get(fused).cloned() {
            self.absent.extend(halves.map(|half| (half.to_owned(), missing.clone())));
        }
        let Some(place) = self.places.get(fused).copied() else { return };
        let tensors = &mut self.shards[place].tensors;
        let Some(Entry { dtype, dtype_name, shape, range }) = tensors.get(fused) else { return };
        let (Some(rows), middle) = (shape.first(), range.start + range.len() / 2) else { return };
        if !rows.is_multiple_of(2) {
            return;
        }
        let half = |range| {
            let shape = [&[rows / 2], &shape[1..]].concat();
            Entry { dtype: *dtype, dtype_name: dtype_name.clone(), shape, range }
        };
        let entries = [half(range.start..middle), half(middle..range.end)];
        for (name, entry) in halves.into_iter().zip(entries) {
            tensors.insert(name.to_owned(), entry);
            self.places.insert(name.to_owned(), place);
        }
    }
}
