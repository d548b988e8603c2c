"""The tokenizer: a byte-level BPE trained on the captions, with Qwen3's added tokens in Qwen3's order behind it."""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from .captions import load_meta, phrases, suffixes
from .config import TEXT

ADDED_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip
SPECIAL_COUNT = 14  # the first ones are "special": skipped when ids are turned back into text
PAD, END = "<|endoftext|>", "<|im_end|>"
BPE_SIZE = TEXT.vocab - len(ADDED_TOKENS)

# A user turn with thinking disabled, as the chat template writes it around the prompt.
HEAD = "<|im_start|>user\n"
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

# Qwen3's split: contractions, words, single digits, punctuation, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def untrained_tokenizer():
    """Qwen3's normaliser, splitter and decoder around an empty BPE model."""
    byte_level = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(**byte_level)]
    )
    tokenizer.post_processor = processors.ByteLevel(**byte_level)
    tokenizer.decoder = decoders.ByteLevel(**byte_level)
    return tokenizer


def training_text(meta):
    """Captions in about the proportion in which training shows them."""
    text = []
    for _, phrase, weight in phrases(meta):
        text += [phrase] * max(1, round(weight * 10))
    for _, suffix in suffixes():
        text += ["x" + suffix] * 200
    return text + ["user\nassistant\n\n"] * 400


def train_tokenizer(work):
    """Trains on WORK/meta.json and writes WORK/tokenizer.json."""
    tokenizer = untrained_tokenizer()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=BPE_SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(training_text(load_meta(work)), trainer)
    if tokenizer.get_vocab_size() != BPE_SIZE:
        raise ValueError(f"the captions gave {tokenizer.get_vocab_size()} tokens, the model needs {BPE_SIZE}")
    for n, token in enumerate(ADDED_TOKENS):
        special = n < SPECIAL_COUNT
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(token, special=special, normalized=False)])
    tokenizer.save(f"{work}/tokenizer.json")
    return tokenizer


def load_tokenizer(work):
    return Tokenizer.from_file(str(Path(work, "tokenizer.json")))
