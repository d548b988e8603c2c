//! A byte-level tokenizer without merges: one token per byte, and the special tokens of Qwen3's chat template.

use serde_json::{Map, Value, json};

const SPECIAL: [(&str, bool); 5] = [
    ("<|endoftext|>", true),
    ("<|im_start|>", true),
    ("<|im_end|>", true),
    ("<think>", false),
    ("</think>", false),
];

/// Id of `<|endoftext|>`.
pub const PAD_ID: u32 = 256;

pub const CHAT_TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\
    {% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}";

/// The 256 characters that stand for bytes in byte-level BPE, sorted by code point.
fn byte_alphabet() -> impl Iterator<Item = char> {
    let plain = ('\u{21}'..='\u{7e}').chain('\u{a1}'..='\u{ac}').chain('\u{ae}'..='\u{ff}');
    // The bytes without a printable character of their own take the code points after 255.
    let rest = 256 - plain.clone().count();
    plain.chain(('\u{100}'..).take(rest))
}

pub fn tokenizer_json() -> Value {
    let vocab: Map<String, Value> =
        byte_alphabet().enumerate().map(|(i, c)| (c.to_string(), json!(i))).collect();
    let added: Vec<Value> = SPECIAL
        .iter()
        .zip(PAD_ID..)
        .map(|((text, special), id)| {
            json!({
                "id": id, "content": text, "special": special,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            })
        })
        .collect();
    let level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": level,
        "post_processor": null,
        "decoder": level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    })
}

pub fn tokenizer_config_json() -> Value {
    json!({
        "backend": "tokenizers",
        "tokenizer_class": "TokenizersBackend",
        "model_max_length": 1_000_000,
        "pad_token": SPECIAL[0].0,
        "eos_token": SPECIAL[2].0,
        "padding_side": "right",
    })
}
