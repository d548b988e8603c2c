//! The few facts that authoring needs from a tokenizer.

use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;

use crate::weights::{WeightsError, read_json};

/// The tokenizer's file.
pub const TOKENS: &str = "tokenizer.json";

#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: i64,
    content: String,
}

/// The tokens that a tokenizer takes whole wherever they stand: their ids, by text.
pub struct AddedTokens(BTreeMap<String, i64>);

impl AddedTokens {
    /// Those of a tokenizer's folder.
    pub fn read(folder: &Path) -> Result<AddedTokens, WeightsError> {
        let TokenizerFile { added_tokens } = read_json(&folder.join(TOKENS))?;
        // Of a token that is there twice the first counts.
        let tokens = added_tokens.into_iter().rev().map(|token| (token.content, token.id));
        Ok(AddedTokens(tokens.collect()))
    }

    /// The id of a token, if it is one of them.
    pub fn id(&self, content: &str) -> Option<i64> {
        self.0.get(content).copied()
    }
}
