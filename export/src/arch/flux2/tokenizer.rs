//! The few facts that authoring needs from the tokenizer folder.

use std::path::Path;

use serde::Deserialize;

use super::Flux2Error;
use crate::{
    arch::tokenizer::{AddedTokens, TOKENS},
    weights::read_json,
};

#[derive(Deserialize)]
struct TokenizerConfig {
    pad_token: Option<Token>,
}

/// A token is spelled as its text or as an object that holds it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Token {
    Text(String),
    Object { content: String },
}

/// The id of the padding token that `tokenizer_config.json` names.
pub fn pad_id(folder: &Path) -> Result<i64, Flux2Error> {
    let file = folder.join("tokenizer_config.json");
    let config: TokenizerConfig = read_json(&file)?;
    let pad = match config.pad_token {
        Some(Token::Text(content) | Token::Object { content }) => content,
        None => {
            let problem = "no pad_token, and text_encoder/config.json has no pad_token_id".to_owned();
            return Err(Flux2Error::Config { place: file.display().to_string(), problem });
        }
    };
    added_token(folder, &pad)?.ok_or_else(|| Flux2Error::Config {
        place: folder.join(TOKENS).display().to_string(),
        problem: format!("pad_token '{pad}' is not among added_tokens"),
    })
}

/// The id of a token among the tokenizer's added ones.
pub fn added_token(folder: &Path, content: &str) -> Result<Option<i64>, Flux2Error> {
    Ok(AddedTokens::read(folder)?.id(content))
}
