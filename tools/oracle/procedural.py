"""Procedural FLUX.2 Klein checkpoints: weights computed from a seed, so that no weight has to be stored.

A spec (`tests/fixtures/<name>/checkpoint.json`) holds the model configs and a seed. This module writes the
checkpoint folder (diffusers layout) that the spec describes; the Rust package `viaduct-procedural` writes the
same one, and every weight of the two is equal bit for bit.

Spec
----
==================  ==================================================================================
`seed`              unsigned 64-bit integer
`dtype`             "f32", "f16" or "bf16": every floating-point tensor of the checkpoint
`text_encoder`      `config`: Qwen3 config without rope_theta spelling and pad id; `shards`; `rope_theta`;
                    `rope_spelling`: "top" (`rope_theta` at the top of config.json, older writers) or
                    "rope_parameters" (nested, newer writers)
`transformer`       `config`: Flux2Transformer2DModel; `shards`
`vae`               `config`: AutoencoderKLFlux2; `shards`
`scheduler`         FlowMatchEulerDiscreteScheduler config
`tokenizer`         `kind`: "byte-level" (ids 0-255: the byte alphabet sorted by character, then the five special
                    tokens of `SPECIAL`); `pad`: "text_encoder" (`pad_token_id` in text_encoder/config.json as well) or
                    "tokenizer" (null there: only tokenizer_config.json tells)
`fingerprints`      per component, FNV-1a-64 over name and bytes of every tensor, in byte order of the names;
                    a writer whose weights differ from them must fail
==================  ==================================================================================

Generator
---------
All integers are unsigned 64-bit and wrap around::

    mix(z)  = z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
    key     = mix(mix(seed) ^ FNV-1a-64(tensor name, UTF-8))
    bits(i) = mix(key + (i + 1) * 0x9E3779B97F4A7C15) >> 40            # 24 bits; i = row-major element index
    t(i)    = (bits(i) - 2^23) * 2^-23                                 # [-1, 1), exact in f32
    w(i)    = f32(f32(t(i) * spread) + centre)                         # one multiply, one add, no fused form

`spread` is computed in f64 and rounded once to f32: `std * sqrt(3)` (a uniform distribution of that standard
deviation), with `std = gain / sqrt(fan_in)` for matrices and convolutions. f16 and bf16 round w(i) to nearest even.
`rule` says which tensor gets which centre and spread: norms near 1, gates of order 1, nothing degenerate, so that
every block moves the result.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import TensorSpec, serialize_file

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FNV_OFFSET, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
SAFETENSORS_DTYPE = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64"}

Shape = tuple[int, ...]


# ---------------------------------------------------------------------------------------------- generator


def mix(z: int) -> int:
    """The splitmix64 finaliser."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def fnv1a(data: bytes, state: int = FNV_OFFSET) -> int:
    """FNV-1a, 64 bit."""
    for byte in data:
        state = ((state ^ byte) * FNV_PRIME) & MASK
    return state


def unit(seed: int, name: str, count: int) -> np.ndarray:
    """t(0) .. t(count-1) of a tensor, in [-1, 1)."""
    key = np.uint64(mix(mix(seed) ^ fnv1a(name.encode())))
    z = key + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    bits = (z >> np.uint64(40)).astype(np.int64) - (1 << 23)
    return bits.astype(np.float32) * np.float32(2.0**-23)


def rule(name: str, shape: Shape) -> tuple[float, float] | None:
    """(centre, spread) of a tensor in f64; None: an int64 tensor of zeros."""
    sqrt3 = math.sqrt(3.0)
    if name.endswith("num_batches_tracked"):
        return None
    if name.endswith("running_var"):
        return 2.0, 0.5
    if name.endswith("running_mean"):
        return 0.0, 0.1 * sqrt3
    if len(shape) == 1:
        return (1.0, 0.2 * sqrt3) if name.endswith("weight") else (0.0, 0.05 * sqrt3)
    if name.endswith("embed_tokens.weight"):
        return 0.0, sqrt3
    gain = 2.0 if "modulation" in name or name.startswith("norm_out") else 1.0
    return 0.0, gain / math.sqrt(math.prod(shape[1:])) * sqrt3


def tensor(seed: int, dtype: str, name: str, shape: Shape) -> tuple[str, bytes]:
    """Stored dtype and little-endian bytes of one tensor."""
    chosen = rule(name, shape)
    if chosen is None:
        return "i64", bytes(8 * math.prod(shape))
    centre, spread = map(np.float32, chosen)
    w = unit(seed, name, math.prod(shape)) * spread + centre
    assert w.dtype == np.float32
    if dtype == "f32":
        return dtype, w.astype("<f4").tobytes()
    if dtype == "f16":
        return dtype, w.astype("<f2").tobytes()
    if dtype == "bf16":
        bits = w.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return dtype, rounded.astype("<u2").tobytes()
    raise ValueError(f"dtype {dtype!r} is not one of f32, f16, bf16")


# ---------------------------------------------------------------------------------------------- tensor names


def text_encoder_shapes(c: dict) -> Iterator[tuple[str, Shape]]:
    """Qwen3ForCausalLM; `lm_head.weight` only if the embedding is not tied."""
    hidden, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    if c["attention_bias"]:
        raise ValueError("attention_bias is not supported")
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", (hidden,)
        yield p + "self_attn.q_proj.weight", (q, hidden)
        yield p + "self_attn.k_proj.weight", (kv, hidden)
        yield p + "self_attn.v_proj.weight", (kv, hidden)
        yield p + "self_attn.o_proj.weight", (hidden, q)
        yield p + "self_attn.q_norm.weight", (head,)
        yield p + "self_attn.k_norm.weight", (head,)
        yield p + "post_attention_layernorm.weight", (hidden,)
        yield p + "mlp.gate_proj.weight", (inner, hidden)
        yield p + "mlp.up_proj.weight", (inner, hidden)
        yield p + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], hidden)


def transformer_shapes(c: dict) -> Iterator[tuple[str, Shape]]:
    """Flux2Transformer2DModel without guidance embedding."""
    if c["guidance_embeds"]:
        raise ValueError("guidance_embeds is not supported")
    head = c["attention_head_dim"]
    hidden = c["num_attention_heads"] * head
    inner = int(hidden * c["mlp_ratio"])
    out = c["out_channels"] or c["in_channels"]
    yield "x_embedder.weight", (hidden, c["in_channels"])
    yield "context_embedder.weight", (hidden, c["joint_attention_dim"])
    yield "time_guidance_embed.timestep_embedder.linear_1.weight", (hidden, c["timestep_guidance_channels"])
    yield "time_guidance_embed.timestep_embedder.linear_2.weight", (hidden, hidden)
    yield "double_stream_modulation_img.linear.weight", (6 * hidden, hidden)
    yield "double_stream_modulation_txt.linear.weight", (6 * hidden, hidden)
    yield "single_stream_modulation.linear.weight", (3 * hidden, hidden)
    for i in range(c["num_layers"]):
        p = f"transformer_blocks.{i}."
        for n in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            yield f"{p}attn.{n}.weight", (hidden, hidden)
        for n in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            yield f"{p}attn.{n}.weight", (head,)
        for n in ("ff", "ff_context"):
            yield f"{p}{n}.linear_in.weight", (2 * inner, hidden)
            yield f"{p}{n}.linear_out.weight", (hidden, inner)
    for i in range(c["num_single_layers"]):
        p = f"single_transformer_blocks.{i}.attn."
        yield p + "to_qkv_mlp_proj.weight", (3 * hidden + 2 * inner, hidden)
        yield p + "to_out.weight", (hidden, hidden + inner)
        yield p + "norm_q.weight", (head,)
        yield p + "norm_k.weight", (head,)
    yield "norm_out.linear.weight", (2 * hidden, hidden)
    yield "proj_out.weight", (c["patch_size"] ** 2 * out, hidden)


def vae_shapes(c: dict) -> Iterator[tuple[str, Shape]]:
    """AutoencoderKLFlux2: encoder, decoder (with its own widths where the config has them), batch-norm statistics."""
    latent, layers = c["latent_channels"], c["layers_per_block"]
    encoder = c["block_out_channels"]
    decoder = c["decoder_block_out_channels"] or encoder

    def affine(name: str, *shape: int) -> Iterator[tuple[str, Shape]]:
        yield name + ".weight", shape
        yield name + ".bias", (shape[0],)

    def resnet(p: str, cin: int, cout: int) -> Iterator[tuple[str, Shape]]:
        yield from affine(p + ".norm1", cin)
        yield from affine(p + ".conv1", cout, cin, 3, 3)
        yield from affine(p + ".norm2", cout)
        yield from affine(p + ".conv2", cout, cout, 3, 3)
        if cin != cout:
            yield from affine(p + ".conv_shortcut", cout, cin, 1, 1)

    def mid(p: str, width: int) -> Iterator[tuple[str, Shape]]:
        yield from resnet(p + ".resnets.0", width, width)
        if c["mid_block_add_attention"]:
            yield from affine(p + ".attentions.0.group_norm", width)
            for n in ("to_q", "to_k", "to_v", "to_out.0"):
                yield from affine(f"{p}.attentions.0.{n}", width, width)
        yield from resnet(p + ".resnets.1", width, width)

    yield from affine("encoder.conv_in", encoder[0], c["in_channels"], 3, 3)
    width = encoder[0]
    for i, cout in enumerate(encoder):
        for j in range(layers):
            yield from resnet(f"encoder.down_blocks.{i}.resnets.{j}", width, cout)
            width = cout
        if i + 1 < len(encoder):
            yield from affine(f"encoder.down_blocks.{i}.downsamplers.0.conv", cout, cout, 3, 3)
    yield from mid("encoder.mid_block", width)
    yield from affine("encoder.conv_norm_out", width)
    yield from affine("encoder.conv_out", 2 * latent, width, 3, 3)
    if c["use_quant_conv"]:
        yield from affine("quant_conv", 2 * latent, 2 * latent, 1, 1)

    if c["use_post_quant_conv"]:
        yield from affine("post_quant_conv", latent, latent, 1, 1)
    width = decoder[-1]
    yield from affine("decoder.conv_in", width, latent, 3, 3)
    yield from mid("decoder.mid_block", width)
    for i, cout in enumerate(reversed(decoder)):
        for j in range(layers + 1):
            yield from resnet(f"decoder.up_blocks.{i}.resnets.{j}", width, cout)
            width = cout
        if i + 1 < len(decoder):
            yield from affine(f"decoder.up_blocks.{i}.upsamplers.0.conv", cout, cout, 3, 3)
    yield from affine("decoder.conv_norm_out", width)
    yield from affine("decoder.conv_out", c["out_channels"], width, 3, 3)

    packed = latent * math.prod(c["patch_size"])
    yield "bn.running_mean", (packed,)
    yield "bn.running_var", (packed,)
    yield "bn.num_batches_tracked", ()


# ---------------------------------------------------------------------------------------------- tokenizer

SPECIAL = [("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<think>", False), ("</think>", False)]
PAD_ID = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE, sorted by code point."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return sorted(map(chr, plain + list(range(0x100, 0x100 + 256 - len(plain)))))


def tokenizer_files() -> dict[str, object]:
    """File name -> JSON value (or text) of the byte-level tokenizer folder."""
    added = [
        dict(id=PAD_ID + i, content=text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=special)
        for i, (text, special) in enumerate(SPECIAL)
    ]
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    model = dict(
        type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
        fuse_unk=False, byte_fallback=False, ignore_merges=False,
        vocab={c: i for i, c in enumerate(byte_alphabet())}, merges=[],
    )  # fmt: skip
    return {
        "tokenizer.json": dict(
            version="1.0", truncation=None, padding=None, added_tokens=added, normalizer=None,
            pre_tokenizer=level, post_processor=None, decoder=level, model=model,
        ),
        "tokenizer_config.json": dict(
            backend="tokenizers", tokenizer_class="TokenizersBackend", model_max_length=1_000_000,
            pad_token=SPECIAL[0][0], eos_token=SPECIAL[2][0], padding_side="right",
        ),
        "chat_template.jinja": CHAT_TEMPLATE,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- writing


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def build(seed: int, dtype: str, shapes: Iterator[tuple[str, Shape]]) -> dict[str, tuple[str, Shape, bytes]]:
    """All tensors of a component, in byte order of their names: (dtype, shape, bytes)."""
    built = {}
    for name, shape in sorted(shapes, key=lambda t: t[0].encode()):
        stored, data = tensor(seed, dtype, name, shape)
        built[name] = stored, shape, data
    return built


def fingerprint(tensors: dict[str, tuple[str, Shape, bytes]]) -> str:
    """FNV-1a-64 over name and bytes of each tensor, 16 hex digits."""
    state = FNV_OFFSET
    for name, (_, _, data) in tensors.items():
        state = fnv1a(data, fnv1a(name.encode(), state))
    return f"{state:016x}"


def write_weights(folder: Path, stem: str, shards: int, tensors: dict[str, tuple[str, Shape, bytes]]) -> None:
    """One safetensors file, or `shards` of them and an index.

    A tensor that starts at byte s of the component's total n goes to shard floor(s * shards / n).
    """
    total = sum(len(data) for _, _, data in tensors.values())
    files: list[dict] = [{} for _ in range(shards)]
    weight_map, start = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        shard = start * shards // total
        address = np.frombuffer(data, np.uint8).ctypes.data  # `tensors` keeps the bytes alive
        spec = TensorSpec(dtype=SAFETENSORS_DTYPE[dtype], shape=shape, data_ptr=address, data_len=len(data))
        files[shard][name] = spec
        weight_map[name] = f"{stem}-{shard + 1:05}-of-{shards:05}.safetensors"
        start += len(data)
    for i, content in enumerate(files):
        if not content:
            raise ValueError(f"{folder.name}: shard {i + 1} of {shards} would be empty")
        name = f"{stem}.safetensors" if shards == 1 else f"{stem}-{i + 1:05}-of-{shards:05}.safetensors"
        serialize_file(content, folder / name, metadata={"format": "pt"})
    if shards > 1:
        write_json(folder / f"{stem}.safetensors.index.json", dict(metadata=dict(total_size=total), weight_map=weight_map))


def text_encoder_config(spec: dict) -> dict:
    """config.json of the text encoder in the spec's spelling."""
    part, dtype = spec["text_encoder"], SAFETENSORS_DTYPE[spec["dtype"]]
    pad = {"text_encoder": PAD_ID, "tokenizer": None}[spec["tokenizer"]["pad"]]
    config = dict(part["config"], architectures=["Qwen3ForCausalLM"], model_type="qwen3", pad_token_id=pad)
    match part["rope_spelling"]:
        case "top":
            return dict(config, rope_theta=part["rope_theta"], torch_dtype=dtype)
        case "rope_parameters":
            return dict(config, rope_parameters=dict(rope_theta=part["rope_theta"], rope_type="default"), dtype=dtype)
        case other:
            raise ValueError(f"rope_spelling {other!r} is not one of top, rope_parameters")


def write_checkpoint(spec: dict, dest: Path) -> dict[str, str]:
    """Write the checkpoint folder that `spec` describes; returns the fingerprints of its components."""
    if spec["tokenizer"]["kind"] != "byte-level":
        raise ValueError(f"tokenizer kind {spec['tokenizer']['kind']!r} is not byte-level")

    def diffusers(name: str, config: dict) -> dict:
        return dict(config, _class_name=name, _diffusers_version="0.42.1")

    transformer = diffusers("Flux2Transformer2DModel", spec["transformer"]["config"])
    vae = diffusers("AutoencoderKLFlux2", spec["vae"]["config"])
    found = {}
    for name, stem, shapes, config in (
        ("text_encoder", "model", text_encoder_shapes, text_encoder_config(spec)),
        ("transformer", "diffusion_pytorch_model", transformer_shapes, transformer),
        ("vae", "diffusion_pytorch_model", vae_shapes, vae),
    ):
        folder = dest / name
        folder.mkdir(parents=True, exist_ok=True)
        tensors = build(spec["seed"], spec["dtype"], shapes(spec[name]["config"]))
        write_json(folder / "config.json", config)
        write_weights(folder, stem, spec[name].get("shards", 1), tensors)
        found[name] = fingerprint(tensors)
        wanted = spec.get("fingerprints", {}).get(name, found[name])
        if wanted != found[name]:
            raise ValueError(f"{name}: fingerprint {found[name]}, but the spec says {wanted}")

    (dest / "scheduler").mkdir(exist_ok=True)
    write_json(dest / "scheduler/scheduler_config.json", diffusers("FlowMatchEulerDiscreteScheduler", spec["scheduler"]))
    (dest / "tokenizer").mkdir(exist_ok=True)
    for name, value in tokenizer_files().items():
        if isinstance(value, str):
            (dest / "tokenizer" / name).write_text(value, encoding="utf-8")
        else:
            write_json(dest / "tokenizer" / name, value)
    write_json(
        dest / "model_index.json",
        dict(
            _class_name="Flux2KleinPipeline",
            _diffusers_version="0.42.1",
            is_distilled=True,
            scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"],
            text_encoder=["transformers", "Qwen3ForCausalLM"],
            tokenizer=["transformers", "TokenizersBackend"],
            transformer=["diffusers", "Flux2Transformer2DModel"],
            vae=["diffusers", "AutoencoderKLFlux2"],
        ),
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the checkpoint that a procedural spec describes.")
    parser.add_argument("spec", type=Path, help="tests/fixtures/<name>/checkpoint.json")
    parser.add_argument("dest", type=Path, help="checkpoint folder to write (diffusers layout)")
    args = parser.parse_args()
    found = write_checkpoint(json.loads(args.spec.read_text(encoding="utf-8")), args.dest)
    print(json.dumps(dict(fingerprints=found), indent=2))


if __name__ == "__main__":
    main()
