#!/usr/bin/env python3
"""Writes a FLUX.2 Klein checkpoint of about a given size, with random bf16 weights.

    python3 tools/bench/synthetic_checkpoint.py DEST --megabytes 2000

It exists to measure exports: the layout and the tensor names are those of a real checkpoint, and the picture that it would
draw is noise. Tokenizer, VAE, scheduler and recipe are klein-emoji's; text encoder and transformer are made here, and their
weights as tools/synth makes them, which has the full sizes. The same size and seed give the same bytes. Needs Python 3.11 and nothing
else.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from synth import shapes  # noqa: E402
from synth.weights import Pool, size, write_weights  # noqa: E402

SOURCE = ROOT / "bundles/klein-emoji/source"
HEAD = 128
DOUBLE_BLOCKS = 2
TEXT_LAYERS = 7
VOCABULARY = 32768
SHARD_BYTES = 50_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path, help="folder to make")
    parser.add_argument("--megabytes", type=int, default=400, help="size of all weights together, at least 260 (default 400)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"{arguments.dest}: {write(arguments.dest, arguments.megabytes, arguments.seed) / 1e6:.0f} MB")


def write(dest: Path, megabytes: int, seed: int = 1) -> int:
    """Makes the checkpoint; its bytes."""
    width = 2048 if megabytes >= 1000 else 1024
    shutil.copytree(SOURCE, dest, ignore=shutil.ignore_patterns("text_encoder", "transformer"))
    text = text_config(width // 2)
    blocks = single_blocks(megabytes * 1_000_000, width, text)
    transformer = transformer_config(width, 3 * width // 2, blocks)
    pool = Pool(seed)
    write_component(dest / "text_encoder", "model", text, shapes.text_encoder(text), pool)
    write_component(dest / "transformer", "diffusion_pytorch_model", transformer, shapes.transformer(transformer), pool)
    return sum(path.stat().st_size for path in dest.rglob("*.safetensors"))


def text_config(hidden: int) -> dict:
    config = json.loads((SOURCE / "text_encoder/config.json").read_text())
    heads = hidden // HEAD
    return config | {
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": TEXT_LAYERS, "head_dim": HEAD,
        "num_attention_heads": heads, "num_key_value_heads": heads // 4, "vocab_size": VOCABULARY,
    }  # fmt: skip


def transformer_config(width: int, joint: int, single: int) -> dict:
    config = json.loads((SOURCE / "transformer/config.json").read_text())
    return config | {
        "attention_head_dim": HEAD, "num_attention_heads": width // HEAD, "axes_dims_rope": [HEAD // 4] * 4,
        "num_layers": DOUBLE_BLOCKS, "num_single_layers": single, "joint_attention_dim": joint,
    }  # fmt: skip


def single_blocks(target: int, width: int, text: dict) -> int:
    """How many single blocks fill what the rest leaves."""
    joint = 3 * text["hidden_size"]
    without, with_one = (size(shapes.transformer(transformer_config(width, joint, n))) for n in (0, 1))
    return max(1, round((target - size(shapes.text_encoder(text)) - without) / (with_one - without)))


def write_component(folder: Path, name: str, config: dict, tensors: shapes.Shapes, pool: Pool) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_weights(folder, name, tensors, pool, SHARD_BYTES)


if __name__ == "__main__":
    main()
