#!/usr/bin/env python3
"""Writes a FLUX.2 Klein checkpoint of about a given size, with random bf16 weights.

    python3 tools/bench/synthetic_checkpoint.py DEST --megabytes 2000

It exists to measure exports: the layout and the tensor names are those of a real checkpoint, and the picture that it would
draw is noise. Tokenizer, VAE, scheduler and recipe are klein-emoji's; text encoder and transformer are made here. The same
size and seed give the same bytes. Needs Python 3.11 and nothing else.
"""

import argparse
import json
import random
import shutil
from math import prod
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "bundles/klein-emoji/source"
HEAD = 128
DOUBLE_BLOCKS = 2
TEXT_LAYERS = 7
VOCABULARY = 32768
# Random bytes are drawn once; every tensor begins at another place of them.
POOL_BYTES = 16 << 20

Shapes = dict[str, tuple[int, ...]]


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
    pool = random_bf16(random.Random(seed), POOL_BYTES)
    write_component(dest / "text_encoder", "model", text, text_shapes(text), pool)
    write_component(dest / "transformer", "diffusion_pytorch_model", transformer, transformer_shapes(transformer), pool)
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
    without, with_one = (size(transformer_shapes(transformer_config(width, joint, n))) for n in (0, 1))
    return max(1, round((target - size(text_shapes(text)) - without) / (with_one - without)))


def size(shapes: Shapes) -> int:
    return sum(2 * prod(shape) for shape in shapes.values())


def text_shapes(c: dict) -> Shapes:
    hidden, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    shapes = {"model.embed_tokens": (c["vocab_size"], hidden), "model.norm": (hidden,)}
    for i in range(c["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries), "self_attn.q_norm": (head,), "self_attn.k_norm": (head,),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def transformer_shapes(c: dict) -> Shapes:
    head = c["attention_head_dim"]
    width = c["num_attention_heads"] * head
    inner = int(width * c["mlp_ratio"])
    shapes = {
        "x_embedder": (width, c["in_channels"]),
        "context_embedder": (width, c["joint_attention_dim"]),
        "time_guidance_embed.timestep_embedder.linear_1": (width, c["timestep_guidance_channels"]),
        "time_guidance_embed.timestep_embedder.linear_2": (width, width),
        "double_stream_modulation_img.linear": (6 * width, width),
        "double_stream_modulation_txt.linear": (6 * width, width),
        "single_stream_modulation.linear": (3 * width, width),
        "norm_out.linear": (2 * width, width),
        "proj_out": (c["in_channels"], width),
    }
    for i in range(c["num_layers"]):
        block = f"transformer_blocks.{i}"
        for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            shapes[f"{block}.attn.{name}"] = (width, width)
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            shapes[f"{block}.attn.{name}"] = (head,)
        for name in ("ff", "ff_context"):
            shapes[f"{block}.{name}.linear_in"] = (2 * inner, width)
            shapes[f"{block}.{name}.linear_out"] = (width, inner)
    for i in range(c["num_single_layers"]):
        block = f"single_transformer_blocks.{i}.attn"
        shapes[f"{block}.to_qkv_mlp_proj"] = (3 * width + 2 * inner, width)
        shapes[f"{block}.to_out"] = (width, width + inner)
        shapes[f"{block}.norm_q"] = shapes[f"{block}.norm_k"] = (head,)
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def random_bf16(source: random.Random, count: int) -> bytes:
    """Little-endian values of both signs between 2^-7 and 2^-5 in size: f16 can hold every one."""
    low = source.randbytes(count // 2)
    high = source.randbytes(count // 2).translate(bytes(0x3C | (byte & 0x80) for byte in range(256)))
    values = bytearray(count)
    values[0::2], values[1::2] = low, high
    return bytes(values)


def write_component(folder: Path, name: str, config: dict, shapes: Shapes, pool: bytes) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    header, end = {}, 0
    for key, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / f"{name}.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, shape in enumerate(shapes.values()):
            write_pool(file, pool, 2 * prod(shape), start=number * 74_002)


def write_pool(file, pool: bytes, count: int, start: int) -> None:
    while count > 0:
        start %= len(pool)
        part = pool[start : start + count]
        file.write(part)
        count, start = count - len(part), start + len(part)


if __name__ == "__main__":
    main()
