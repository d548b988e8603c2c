//! From a prompt to token ids: chat template, tokenizer, truncation and padding.
//!
//! Padding matters (FLUX.2's transformer reads every row of the encoded prompt, padding rows included), so length
//! and padding token come from the bundle and never from a tokenizer file's own wishes.

use std::cell::Cell;
use std::fs;
use std::io::{self, Read};
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Once;

use minijinja::{Environment, Error as TemplateError, ErrorKind, Value, context};
use serde::Serialize;
use tokenizers::Tokenizer;

use crate::tensor::HostTensor;

/// The largest tokenizer files known are around 40 MB.
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
/// Qwen3's template has 4 KB.
const MAX_TEMPLATE_BYTES: u64 = 1 << 16;
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
    #[error(
        "the tokens of the template's system part do not begin those of the whole text; tokenizer and template do not belong together"
    )]
    NotAPrefix,
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

/// A tokenizer by itself.
pub struct TextTokenizer(Tokenizer);

impl TextTokenizer {
    /// Loads `tokenizer.json` of a bundle's `tokenizer/` directory.
    pub fn load(directory: &Path) -> Result<TextTokenizer, PromptError> {
        load_tokenizer(&directory.join("tokenizer.json")).map(TextTokenizer)
    }

    /// The ids of a text as it stands: special tokens in it are recognised, none is added.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        let encode = || self.0.encode_fast(text, false).map(|e| e.get_ids().to_vec());
        guarded(encode).map_err(PromptError::Encode)
    }
}

/// A tokenizer with its chat template.
pub struct PromptEncoder {
    tokenizer: TextTokenizer,
    template: String,
    directory: PathBuf,
}

impl PromptEncoder {
    /// Loads `tokenizer.json` and the chat template of a bundle's `tokenizer/` directory.
    pub fn load(directory: &Path) -> Result<PromptEncoder, PromptError> {
        let encoder = PromptEncoder {
            tokenizer: TextTokenizer::load(directory)?,
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

    /// One user message, rendered, tokenized, cut at `length` and padded on the right with `pad_id`.
    pub fn encode(&self, prompt: &str, length: usize, pad_id: u32) -> Result<EncodedPrompt, PromptError> {
        if length == 0 {
            return Err(PromptError::NoRoom);
        }
        let mut ids = self.tokenizer.tokenize(&self.render(&[Message::user(prompt)])?)?;
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

thread_local! {
    /// Whether this thread's panics are answered, so that nobody needs to read of them.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs a call into the tokenizer library, which asserts its way through some malformed files, without its panics.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                usual(info);
            }
        }));
    });
    GUARDED.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(call));
    GUARDED.set(false);
    match outcome {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Three words, two special tokens; asks for truncation and padding of its own.
    const TOKENIZER: &str = r#"{
        "version": "1.0",
        "truncation": {"direction": "Left", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": "?"},
        "added_tokens": [
            {"id": 4, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
             "normalized": false, "special": true},
            {"id": 5, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
             "normalized": false, "special": true}],
        "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}}},
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"?": 0, "a": 1, "red": 2, "cat": 3}, "unk_token": "?"}
    }"#;
    const TEMPLATE: &str = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}";

    fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    fn load(files: &[(&str, &str)]) -> Result<PromptEncoder, PromptError> {
        PromptEncoder::load(directory(files).path())
    }

    fn with_template(template: &str) -> Result<PromptEncoder, PromptError> {
        load(&[("tokenizer.json", TOKENIZER), ("chat_template.jinja", template)])
    }

    fn render(template: &str, prompt: &str) -> String {
        with_template(template).unwrap().render(&[Message::user(prompt)]).unwrap()
    }

    #[test]
    fn pads_and_cuts_on_the_right_whatever_the_file_wishes() {
        let encoder = with_template(TEMPLATE).unwrap();
        let encoded = encoder.encode("a red cat", 7, 5).unwrap();
        assert_eq!(encoded.ids, HostTensor::i64(&[1, 7], vec![4, 1, 2, 3, 5, 5, 5]));
        assert_eq!(encoded.mask, HostTensor::i64(&[1, 7], vec![1, 1, 1, 1, 1, 0, 0]));
        assert_eq!((encoded.tokens, encoded.truncated), (5, 0));

        let cut = encoder.encode("a red cat", 3, 5).unwrap();
        assert_eq!(cut.ids, HostTensor::i64(&[1, 3], vec![4, 1, 2]));
        assert_eq!((cut.tokens, cut.truncated), (3, 2));
        assert!(matches!(encoder.encode("a", 0, 5), Err(PromptError::NoRoom)));
        assert_eq!(encoder.encode("", 3, 5).unwrap().tokens, 2);
    }

    #[test]
    fn the_template_may_be_in_the_config() {
        let config = serde_json::json!({ "chat_template": TEMPLATE }).to_string();
        let encoder = load(&[("tokenizer.json", TOKENIZER), ("tokenizer_config.json", &config)]).unwrap();
        assert_eq!(encoder.render(&[Message::user("x")]).unwrap(), "<s>x</s>");
        // Its own file wins.
        let files =
            [("tokenizer.json", TOKENIZER), ("tokenizer_config.json", &config), ("chat_template.jinja", "y")];
        assert_eq!(load(&files).unwrap().render(&[Message::user("x")]).unwrap(), "y");
    }

    #[test]
    fn blocks_leave_no_lines_and_the_last_newline_goes() {
        let template =
            "{%- for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n\n";
        assert_eq!(render(template, "x"), "user\n");
        assert_eq!(
            render("{% if enable_thinking is defined and enable_thinking is false %}off{% endif %}", ""),
            "off"
        );
        assert_eq!(
            render("{% if add_generation_prompt %}{{ messages[0].content }}{% endif %}", " <&> "),
            " <&> "
        );
    }

    /// The constructs of the Qwen3 family's templates.
    #[test]
    fn templates_may_use_python() {
        let content = "<think>\nhm\n</think>\n\nyes";
        for (template, expected) in [
            ("{{ messages[0].content.split('</think>')[-1].lstrip('\\n') }}", "yes"),
            (
                "{{ messages[0].content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].strip('\\n') }}",
                "hm",
            ),
            (
                "{{ messages[0].content.startswith('<think>') and not messages[0].content.endswith('no') }}",
                "True",
            ),
            (
                "{% set ns = namespace(n=0) %}{% for i in [1, 2, 3][::-1] %}{% set ns.n = ns.n * 10 + i %}{% endfor %}{{ ns.n }}",
                "321",
            ),
            (
                "{% for i in [5, 6] %}{{ loop.index0 }}{{ loop.first }}{% if loop.last %}.{% endif %}{% endfor %}",
                "0True1False.",
            ),
            ("{{ messages[0] | tojson }}", r#"{"role":"user","content":"<think>\nhm\n</think>\n\nyes"}"#),
            ("{{ messages[0].tool_calls is defined }}{{ none is none }}{{ tools }}", "FalseTrue"),
            ("{{ messages | length - 1 }}{{ 'a' in 'cat' }}{{ messages[0].content is string }}", "0TrueTrue"),
        ] {
            assert_eq!(render(template, content).to_lowercase(), expected.to_lowercase(), "{template}");
        }
    }

    #[test]
    fn hostile_templates_end_in_an_error() {
        assert!(matches!(with_template("{% for %}"), Err(PromptError::Template { .. })));
        for template in [
            "{{ raise_exception('no system role') }}",
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            "{% include '/etc/passwd' %}",
            "{{ messages.nothing() }}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        ] {
            let error = with_template(template).unwrap().encode("x", 4, 0).unwrap_err();
            assert!(matches!(error, PromptError::Template { .. }), "{template}: {error}");
        }
    }

    #[test]
    fn missing_and_malformed_files_are_named() {
        let message = |files: &[(&str, &str)]| load(files).err().expect("refused").to_string();
        assert!(message(&[]).contains("tokenizer.json"));
        assert!(message(&[("tokenizer.json", TOKENIZER)]).contains("no chat template"));
        let config = |text| message(&[("tokenizer.json", TOKENIZER), ("tokenizer_config.json", text)]);
        assert!(config("{}").contains("no chat template"));
        assert!(config("[1").contains("tokenizer_config.json"));
        assert!(config(r#"{"chat_template": [{"name": "default"}]}"#).contains("not one string"));
        for text in ["", "{}", "[]", "\u{feff}{}", &TOKENIZER[..300], &"[".repeat(100_000)] {
            let files = [("tokenizer.json", text), ("chat_template.jinja", TEMPLATE)];
            assert!(message(&files).contains("is not a tokenizer"), "{text:.20}");
        }
    }

    #[test]
    fn inconsistent_tokenizers_never_panic() {
        for (from, to) in [
            (r#""unk_token": "?""#, r#""unk_token": "absent""#),
            (
                r#""type": "Whitespace""#,
                r#""type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false"#,
            ),
            (r#""ids": [4]"#, r#""ids": []"#),
            (r#""id": 4,"#, r#""id": 4294967295,"#),
            (r#""cat": 3"#, r#""cat": 1"#),
            (r#""stride": 0"#, r#""stride": 18446744073709551615"#),
        ] {
            let text = TOKENIZER.replace(from, to);
            assert_ne!(text, TOKENIZER);
            let files = [("tokenizer.json", &text[..]), ("chat_template.jinja", TEMPLATE)];
            if let Ok(encoder) = load(&files) {
                let _ = encoder.encode("a dog", 8, 0);
            }
        }
    }
}
