//! From a prompt to token ids: chat template, tokenizer, truncation and padding.
//!
//! Padding matters (FLUX.2's transformer reads every row of the encoded prompt, padding rows included), so length
//! and padding token come from the bundle and never from a tokenizer file's own wishes.

use std::fs;
use std::io::{self, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use minijinja::{Environment, Error as TemplateError, ErrorKind, Value, context};
use serde::Serialize;
use tokenizers::Tokenizer;

use crate::tensor::HostTensor;

/// The largest tokenizer files known are around 40 MB.
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
/// Qwen3's template has 4 KB.
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;
/// Instructions a template may run. Qwen3's takes about a hundred for one message.
const TEMPLATE_FUEL: u64 = 10_000_000;

/// Why a prompt cannot become tokens.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is larger than {limit} bytes", path.display())]
    TooLarge { path: PathBuf, limit: u64 },
    #[error("{} is not a tokenizer: {reason}", path.display())]
    Tokenizer { path: PathBuf, reason: String },
    #[error("no chat template in {}: neither chat_template.jinja nor a chat_template in tokenizer_config.json", .0.display())]
    NoTemplate(PathBuf),
    #[error("{}: {reason}", path.display())]
    Config { path: PathBuf, reason: String },
    #[error("the chat template of {}: {source}", path.display())]
    Template { path: PathBuf, source: TemplateError },
    #[error("the tokenizer failed on the prompt: {0}")]
    Encode(String),
    #[error("a prompt needs room for at least one token")]
    NoRoom,
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Message<'a> {
    pub role: &'a str,
    pub content: &'a str,
}

impl<'a> Message<'a> {
    pub fn user(content: &'a str) -> Message<'a> {
        Message { role: "user", content }
    }
}

/// A prompt as the text encoder takes it.
#[derive(Clone, Debug, PartialEq)]
pub struct EncodedPrompt {
    /// `[1, length]` i64, padded on the right.
    pub ids: HostTensor,
    /// `[1, length]` i64: 1 for a token, 0 for padding.
    pub mask: HostTensor,
    /// How many tokens are no padding.
    pub tokens: usize,
    /// How many tokens were cut off at the right, the template's end among them, as diffusers does.
    pub truncated: usize,
}

/// A tokenizer with its chat template.
pub struct PromptEncoder {
    tokenizer: Tokenizer,
    template: String,
    directory: PathBuf,
}

impl PromptEncoder {
    /// Loads `tokenizer.json` and the chat template of a bundle's `tokenizer/` directory.
    pub fn load(directory: &Path) -> Result<PromptEncoder, PromptError> {
        let encoder = PromptEncoder {
            tokenizer: load_tokenizer(&directory.join("tokenizer.json"))?,
            template: load_template(directory)?,
            directory: directory.to_path_buf(),
        };
        let parsed = environment().template_from_str(&encoder.template).map(drop);
        parsed.map_err(|source| encoder.in_template(source))?;
        Ok(encoder)
    }

    /// The conversation as text, with the opening of the assistant's answer, thinking switched off.
    pub fn render(&self, messages: &[Message]) -> Result<String, PromptError> {
        let variables = context! { messages, add_generation_prompt => true, enable_thinking => false };
        environment().render_str(&self.template, variables).map_err(|source| self.in_template(source))
    }

    /// The ids of a text as it stands: special tokens in it are recognised, none is added.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        let encode = || self.tokenizer.encode_fast(text, false).map(|e| e.get_ids().to_vec());
        guarded(encode).map_err(PromptError::Encode)
    }

    /// One user message, rendered, tokenized, cut at `length` and padded on the right with `pad_id`.
    pub fn encode(&self, prompt: &str, length: usize, pad_id: u32) -> Result<EncodedPrompt, PromptError> {
        if length == 0 {
            return Err(PromptError::NoRoom);
        }
        let mut ids = self.tokenize(&self.render(&[Message::user(prompt)])?)?;
        let tokens = ids.len().min(length);
        let truncated = ids.len() - tokens;
        ids.resize(length, pad_id);
        let mask = (0..length).map(|i| i64::from(i < tokens)).collect();
        Ok(EncodedPrompt {
            ids: HostTensor::i64(&[1, length], ids.into_iter().map(i64::from).collect()),
            mask: HostTensor::i64(&[1, length], mask),
            tokens,
            truncated,
        })
    }

    fn in_template(&self, source: TemplateError) -> PromptError {
        PromptError::Template { path: self.directory.clone(), source }
    }
}

fn load_tokenizer(path: &Path) -> Result<Tokenizer, PromptError> {
    let bytes = read_limited(path, MAX_TOKENIZER_BYTES)?;
    let wrong = |reason| PromptError::Tokenizer { path: path.to_path_buf(), reason };
    let mut tokenizer = guarded(|| Tokenizer::from_bytes(&bytes)).map_err(wrong)?;
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(|e| wrong(e.to_string()))?;
    Ok(tokenizer)
}

/// Runs a call into the tokenizer library, which asserts its way through some malformed files, without its panics.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("the file is inconsistent".to_string()),
    }
}

/// The template's own file, else the one inside `tokenizer_config.json`.
fn load_template(directory: &Path) -> Result<String, PromptError> {
    let path = directory.join("chat_template.jinja");
    if path.exists() {
        return utf8(&path, read_limited(&path, MAX_TEMPLATE_BYTES)?);
    }
    let path = directory.join("tokenizer_config.json");
    if !path.exists() {
        return Err(PromptError::NoTemplate(directory.to_path_buf()));
    }
    let text = utf8(&path, read_limited(&path, MAX_TOKENIZER_BYTES)?)?;
    let config: serde_json::Value = serde_json::from_str(&text)
        .map_err(|e| PromptError::Config { path: path.clone(), reason: e.to_string() })?;
    match &config["chat_template"] {
        serde_json::Value::String(template) => Ok(template.clone()),
        serde_json::Value::Null => Err(PromptError::NoTemplate(directory.to_path_buf())),
        _ => Err(PromptError::Config { path, reason: "chat_template is not one string".to_string() }),
    }
}

fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, PromptError> {
    let mut bytes = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(limit + 1).read_to_end(&mut bytes));
    read.map_err(|source| PromptError::Read { path: path.to_path_buf(), source })?;
    if bytes.len() as u64 > limit {
        return Err(PromptError::TooLarge { path: path.to_path_buf(), limit });
    }
    Ok(bytes)
}

fn utf8(path: &Path, bytes: Vec<u8>) -> Result<String, PromptError> {
    String::from_utf8(bytes)
        .map_err(|e| PromptError::Config { path: path.to_path_buf(), reason: e.utf8_error().to_string() })
}

/// Jinja as transformers' `apply_chat_template` sets it up: no line left by a block, Python's string methods, plain
/// JSON, `raise_exception`. No loader, so a template reads no file, and fuel, so it ends.
fn environment<'a>() -> Environment<'a> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(TEMPLATE_FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", plain_json);
    environment.add_function("raise_exception", raise_exception);
    environment
}

/// Unlike Jinja's own `tojson`, without HTML escapes.
fn plain_json(value: Value) -> Result<Value, TemplateError> {
    serde_json::to_string(&value)
        .map(Value::from_safe_string)
        .map_err(|e| TemplateError::new(ErrorKind::BadSerialization, e.to_string()))
}

fn raise_exception(message: String) -> Result<Value, TemplateError> {
    Err(TemplateError::new(ErrorKind::InvalidOperation, message))
}
