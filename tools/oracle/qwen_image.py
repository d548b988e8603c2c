"""Small checkpoints of Qwen-Image-2.1, and the tensors that diffusers computes from them on the CPU in fp32 arithmetic.

`qwen_image.py tests/fixtures/qwen-image` builds the checkpoint that `FIXTURES` has under the folder's name, rounds its
random weights to bf16, stores those that a picture needs in `model/` and runs `QwenImage21Pipeline` on each folder with
a `request.json`. `--check` takes the stored checkpoint and compares with the stored tensors.

request.json: prompt, height, width, steps (of a checkpoint with levels of its own: their number), seed, noise (file
name), keep (names of the tensors to store, without their step's number; all where it is absent), and for a second
prompt negative_prompt and guidance. The initial noise is `torch.randn([1,C,h,w],
generator=torch.Generator().manual_seed(seed))`.

==============================  ===================  =============================================================
`input_ids`                     [1,L] int64          the prompt inside the template, unpadded
`enc_hidden_full`               [1,L,C]              the residual after the text encoder's last layer
`prompt_embeds`                 [1,L-system,C]       the same without the system part
`noise_nchw`                    [1,C,h,w]            initial latents
`sigmas`, `timesteps`           [steps+1], [steps]   the last noise level is 0
`txt_cos` ... `img_sin`         [1,rows,head/2]      rotary tables of the text and of the picture
`pred_stepK`, `latents_stepK`   [1,N,C]              velocity at step K, guided if there are two prompts; latents after it
`vae_in`                        [1,C,h,w]            what enters the decoder: unnormalised latents
`image_01`, `image_u8`          [1,4,H,W]            the picture in 0..1; times 255, rounded
==============================  ===================  =============================================================
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import BatchFeature, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from flux2 import Tape, compare

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
TEMPLATE = SYSTEM + "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
LEVELS = [1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568]  # of Turbo

# What of each component a picture needs; the rest of it is neither stored nor compared.
NEEDED = {
    "text_encoder": re.compile(r"model\.language_model\."),
    "transformer": re.compile(""),
    "vae": re.compile(r"(post_quant_conv|decoder)\.(?!.*time_conv)"),
}
FILES = {
    "text_encoder": "model.safetensors",
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
}


@dataclass
class Checkpoint:
    """Dimensions of a small checkpoint; whatever is not named here is as in the published one."""

    seed: int
    levels: list[float] | None = None
    sink: bool = False
    text: dict = field(default_factory=dict)
    transformer: dict = field(default_factory=dict)
    vae: dict = field(default_factory=dict)


SMALL = dict(
    text=dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1),
    transformer=dict(num_layers=2, attention_head_dim=32, num_attention_heads=2, mlp_ratio=3, axes_dims_rope=(8, 12, 12)),
    vae=dict(decoder_base_dim=2, z_dim=16, num_res_blocks=2),
)
DEEP = dict(
    text=dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1),
    transformer=dict(num_layers=32, attention_head_dim=16, num_attention_heads=2, mlp_ratio=1, axes_dims_rope=(4, 6, 6)),
    vae=dict(decoder_base_dim=1, z_dim=4, num_res_blocks=1),
)
FIXTURES = {
    "qwen-image": Checkpoint(seed=11, **SMALL),
    "qwen-image-turbo-sink": Checkpoint(seed=12, levels=LEVELS, sink=True, **SMALL),
    "qwen-image-deep": Checkpoint(seed=13, **DEEP),
}


def byte_tokenizer() -> Tokenizer:
    """A token for every byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


class TextProcessor:
    """What the pipeline calls of a Qwen3VLProcessor where there is no picture to read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.tokenizer = tokenizer, self

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def apply_chat_template(self, messages: list[dict], **_: object) -> list[list[int]]:
        turns = (f"<|im_start|>{turn['role']}\n{turn['content'][0]['text']}<|im_end|>\n" for turn in messages)
        return [self.encode("".join(turns))]

    def __call__(self, text: list[str], **_: object) -> BatchFeature:
        (ids,) = [self.encode(one) for one in text]
        return BatchFeature({"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)})


def text_config(spec: Checkpoint, tokenizer: Tokenizer) -> Qwen3VLConfig:
    text = dict(
        vocab_size=tokenizer.get_vocab_size(),
        head_dim=32,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        attention_bias=False,
        max_position_embeddings=4096,
        rope_parameters=dict(rope_type="default", rope_theta=5e6, mrope_section=[6, 5, 5], mrope_interleaved=True),
        **spec.text,
    )
    # Never run: the config wants one.
    vision = dict(
        depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=spec.text["hidden_size"], patch_size=16,
        spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=4, deepstack_visual_indexes=[0],
    )  # fmt: skip
    tokens = {name: tokenizer.token_to_id(f"<|{token}|>") for name, token in [
        ("image_token_id", "image_pad"), ("video_token_id", "video_pad"),
        ("vision_start_token_id", "vision_start"), ("vision_end_token_id", "vision_end"),
    ]}  # fmt: skip
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)


def randomise(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Outputs of about the size of the inputs, norms and biases with a spread of their own."""
    for name, weight in module.named_parameters():
        if weight.dim() == 1 or "gamma" in name or "norm" in name:
            middle = 1.0 if weight.float().mean() > 0.5 else 0.0
            weight.copy_(middle + 0.2 * torch.randn(weight.shape, generator=generator))
        else:
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight[0].numel() ** 0.5)


def sharpen(transformer: torch.nn.Module, factor: float = 3.0) -> None:
    """Makes attention choose, so that it matters where a token is: of random queries all keys have about the same share."""
    for block in transformer.transformer_blocks:
        block.attn.norm_q.weight.mul_(factor)


def plant_sink(encoder: torch.nn.Module, token: int, peak: float = 17500.0, left: float = 5.0) -> None:
    """Gives a token a massive activation: the first layer's feed-forward adds about `peak` to one channel of its residual,
    and the last layer's takes all but `left` away again. In 16 bits what is left is mostly rounding."""
    source, channel = 3, 7
    stack, table = encoder.model.language_model, encoder.model.language_model.embed_tokens.weight
    table[:, [source, channel]] = 0.0
    table[token] *= 0.3
    table[token, source] = 64.0
    for layer in stack.layers:
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight[[source, channel]] = 0.0
    first, last = stack.layers[0].mlp, stack.layers[-1].mlp
    for mlp, read, sign in ((first, source, 1.0), (last, channel, -1.0)):
        for weight in (mlp.gate_proj.weight, mlp.up_proj.weight):
            weight[0] = 0.0
            weight[0, read] = 1.0
        mlp.down_proj.weight[:, 0] = 0.0
        mlp.down_proj.weight[channel, 0] = sign
    for weight in encoder.parameters():
        weight.copy_(weight.bfloat16())

    def residual(layer: int) -> float:
        kept = []
        hook = stack.layers[layer].register_forward_hook(lambda _m, _i, out: kept.append(out[0] if isinstance(out, tuple) else out))
        stack(input_ids=torch.tensor([[token]]))
        hook.remove()
        return float(kept[0].flatten()[channel])

    # What a layer adds is linear in one entry of its last linear, but for the rounding of that entry to eight bits: of some
    # peaks the one is taken that can be taken away best.
    end = len(stack.layers) - 1
    write, undo = first.down_proj.weight, last.down_proj.weight
    share = residual(0) / float(write[channel, 0])

    def plant(aimed: float) -> float:
        write[channel, 0] = torch.tensor(aimed / share).bfloat16()
        undo[channel, 0] = -1.0
        before = residual(end - 1)
        undo[channel, 0] = torch.tensor((before - left) / (residual(end) - before)).bfloat16()
        return residual(end)

    peaks = [peak * (1 + step / 128) for step in range(16)]
    best = min(peaks, key=lambda aimed: abs(plant(aimed) - left))
    after = plant(best)
    print(f"residual of the planted token: {residual(end - 1):.0f} before the last layer, {after:.1f} after it")


def build(spec: Checkpoint, root: Path) -> None:
    """Writes the checkpoint in the layout of the published one."""
    generator = torch.Generator().manual_seed(spec.seed)
    tokenizer = byte_tokenizer()
    width, channels = spec.text["hidden_size"], spec.vae["z_dim"]
    encoder = Qwen3VLForConditionalGeneration(text_config(spec, tokenizer)).float().eval()
    transformer = QwenImage21Transformer2DModel(
        in_channels=channels, out_channels=channels, context_in_dim=width, eps=1e-6, causal_condition=True, **spec.transformer
    )
    statistics = torch.randn(channels, generator=generator) * 1.5, 3 + torch.rand(channels, generator=generator)
    vae = AutoencoderKLQwenImage21(
        base_dim=1, dim_mult=[1, 2, 4, 8, 8], temperal_downsample=[False, True, True, True], is_residual=True, in_channels=4,
        out_channels=4, latents_mean=statistics[0].tolist(), latents_std=statistics[1].tolist(), **spec.vae,
    )  # fmt: skip
    modules = {"text_encoder": encoder, "transformer": transformer, "vae": vae}
    for module in modules.values():
        randomise(module, generator)
    sharpen(transformer)
    if spec.sink:
        plant_sink(encoder, tokenizer.token_to_id("<|im_start|>"))
    for name, module in modules.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        config = module.config
        config.save_pretrained(root / name) if name == "text_encoder" else module.save_config(root / name)
        stored = {key: value.bfloat16().contiguous() for key, value in module.state_dict().items() if NEEDED[name].match(key)}
        save_file(stored, root / name / FILES[name])
    scheduler(spec).save_pretrained(root / "scheduler")
    (root / "processor").mkdir(exist_ok=True)
    tokenizer.save(str(root / "processor/tokenizer.json"))
    index = {
        "_class_name": "QwenImage21Pipeline",
        "processor": ["transformers", "Qwen3VLProcessor"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
        "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage21"],
        **({"sample_sigmas": spec.levels} if spec.levels else {}),
    }
    (root / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def scheduler(spec: Checkpoint) -> FlowMatchEulerDiscreteScheduler:
    shifted = spec.levels is None
    return FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256, max_image_seq_len=8192, base_shift=0.5, max_shift=0.9, num_train_timesteps=1000, shift=1.0,
        shift_terminal=0.02 if shifted else None, time_shift_type="exponential", use_dynamic_shifting=shifted,
    )  # fmt: skip


def load(module: torch.nn.Module, root: Path, name: str) -> torch.nn.Module:
    """Fills a module with the stored weights, which must be all that a picture needs."""
    stored = {key: value.float() for key, value in load_file(root / name / FILES[name]).items()}
    missing, unexpected = module.float().load_state_dict(stored, strict=False)
    lacking = [key for key in missing if NEEDED[name].match(key)]
    if lacking or unexpected:
        raise ValueError(f"{name}: {lacking} not stored, {unexpected} not known")
    return module.eval()


def open_pipeline(root: Path) -> QwenImage21Pipeline:
    config = lambda kind, name: kind.from_config(kind.load_config(root / name))  # noqa: E731
    encoder = Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_pretrained(root / "text_encoder"))
    index = json.loads((root / "model_index.json").read_text(encoding="utf-8"))
    pipe = QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(root / "scheduler"),
        vae=load(config(AutoencoderKLQwenImage21, "vae"), root, "vae"),
        text_encoder=load(encoder, root, "text_encoder"),
        processor=TextProcessor(Tokenizer.from_file(str(root / "processor/tokenizer.json"))),
        transformer=load(config(QwenImage21Transformer2DModel, "transformer"), root, "transformer"),
        sample_sigmas=index.get("sample_sigmas"),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def capture(pipe: QwenImage21Pipeline, request: dict) -> dict[str, np.ndarray]:
    """Runs the reference pipeline and returns every boundary tensor."""
    tape, channels = Tape(), pipe.transformer.config.in_channels
    rows, columns = request["height"] // 16, request["width"] // 16
    ids = pipe.processor.encode(TEMPLATE.format(request["prompt"]))
    noise = torch.randn((1, channels, rows, columns), generator=torch.Generator().manual_seed(request["seed"]))
    tape.keep("input_ids", np.array([ids]))
    tape.keep("noise_nchw", noise)
    tape.input(pipe.text_encoder.model.language_model.norm, "enc_hidden_full")
    tape.input(pipe.vae.post_quant_conv, "_vae_in")
    seen: list[torch.Tensor] = []

    def after_step(_pipe, step: int, _t, values: dict) -> dict:
        tape.keep(f"latents_step{step}", values["latents"])
        return values

    step_of = pipe.scheduler.step

    def step(velocity: torch.Tensor, *args, **kwargs):
        tape.keep(f"pred_step{len(seen)}", velocity)
        seen.append(velocity)
        return step_of(velocity, *args, **kwargs)

    pipe.scheduler.step = step
    image = pipe(
        prompt=request["prompt"],
        negative_prompt=request.get("negative_prompt"),
        true_cfg_scale=request.get("guidance", 1.0),
        height=request["height"],
        width=request["width"],
        num_inference_steps=request["steps"],
        latents=noise.flatten(2).transpose(1, 2).clone(),
        callback_on_step_end=after_step,
        output_type="pt",
    ).images
    del pipe.scheduler.step
    tape.detach()
    tensors = tape.tensors
    system = len(pipe.processor.encode(SYSTEM))
    tensors["prompt_embeds"] = tensors["enc_hidden_full"][:, system:]
    tensors["vae_in"] = tensors.pop("_vae_in")[:, :, 0]
    tensors["sigmas"], tensors["timesteps"] = pipe.scheduler.sigmas.numpy(), pipe.scheduler.timesteps.numpy()
    tensors |= rotary_tables(pipe, len(ids) - system, rows, columns)
    tensors["image_01"] = image.numpy()
    tensors["image_u8"] = np.round(tensors["image_01"] * 255).astype(np.uint8)
    if len(seen) != request["steps"]:
        raise ValueError(f"{len(seen)} steps were made, and {request['steps']} are asked for")
    keep = request.get("keep")
    without_step = lambda name: re.sub(r"(?<=_step)\d+$", "", name)  # noqa: E731
    return {name: value for name, value in tensors.items() if keep is None or without_step(name) in keep}


def rotary_tables(pipe: QwenImage21Pipeline, text: int, rows: int, columns: int) -> dict[str, np.ndarray]:
    is_image = torch.tensor([False] * text + [True] * (rows * columns))
    table = pipe.transformer.pos_embed([(1, rows, columns)], is_image, "cpu")
    parts = {"txt": table[:text], "img": table[text:]}
    halves = {"cos": lambda part: part.real, "sin": lambda part: part.imag}
    return {f"{of}_{name}": half(part)[None].numpy() for of, part in parts.items() for name, half in halves.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write (or check) a Qwen-Image fixture.")
    parser.add_argument("fixture", type=Path, help=f"folder of one of {', '.join(FIXTURES)}")
    parser.add_argument("--check", action="store_true", help="compare with the stored tensors instead of writing them")
    parser.add_argument("--tolerance", type=float, default=2e-5, help="of --check, relative to max(1, max|stored|)")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # the order of summation must not depend on the machine's cores

    model, good = args.fixture / "model", True
    if not args.check:
        if args.fixture.name not in FIXTURES:
            parser.error(f"{args.fixture}: no such fixture; known are {', '.join(FIXTURES)}")
        build(FIXTURES[args.fixture.name], model)
    pipe = open_pipeline(model)
    for path in sorted(args.fixture.glob("*/request.json")):
        tensors = capture(pipe, json.loads(path.read_text(encoding="utf-8")))
        if args.check:
            good &= compare(tensors, path.parent, args.tolerance)
            continue
        for name, value in tensors.items():
            np.save(path.parent / f"{name}.npy", value)
        print(f"{path.parent}: {len(tensors)} tensors, {sum(value.nbytes for value in tensors.values())} bytes")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
