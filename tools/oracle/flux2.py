"""Reference tensors of FLUX.2 Klein, computed by diffusers on the CPU in fp32 arithmetic.

A fixture folder holds `checkpoint.json` (see procedural.py) and `oracle/request.json`, both written by hand.
This module builds the checkpoint in a temporary folder, runs `Flux2KleinPipeline` on the request and writes one
`.npy` per boundary beside the request; with `--check` it compares with the stored ones instead.

request.json: prompt, height, width, steps, guidance (1: Klein is distilled), seed, text_length (tokens), taps (entries
of `hidden_states`; 0 is the embedding), noise (file name). The initial noise is
`torch.randn(shape, generator=torch.Generator().manual_seed(seed))`.

==========================================  ===================  ================================================
`input_ids`, `attention_mask`               [1,L] int64          prompt in the chat template, right-padded
`prompt_embeds`                             [1,L,C]              taps side by side, padding rows included
`noise_nchw`                                [1,C,h,w]            initial latents
`sigmas`                                    [steps+1]            the last one is 0
`img_ids`, `txt_ids`                        [1,N,4], [1,L,4]     (t, row, column, text position), int64
`rope_cos`, `rope_sin`                      [L+N,head]           text rows first, each angle twice in a row
`dit_temb`, `dit_x_in`, `dit_ctx_in`        [1,hidden], [1,N|L,hidden]  embedders
`dit_doubleI_img`, `dit_doubleI_txt`        [1,N|L,hidden]       after double block I
`dit_singleI`                               [1,L+N,hidden]       after single block I, text rows first
`dit_norm_out`                              [1,N,hidden]         before `proj_out`
`pred_stepK`, `latents_stepK`               [1,N,C]              velocity at step K; latents after it
`vae_in`                                    [1,c,H/f,W/f]        after batch-norm and unpatchify
`vae_post_quant` ... `vae_mid`, `vae_upI`   [1,c,y,x]            inside the decoder
`image_raw`                                 [1,3,H,W]            decoder output
`image_01`, `image_u8`                      [1,3,H,W]            clamp(raw/2 + 0.5, 0, 1); times 255, rounded
==========================================  ===================  ================================================

Everything named `dit_*` is from step 0. Latent channel of a packed token: c*4 + dy*2 + dx.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from diffusers import Flux2KleinPipeline
from safetensors.torch import load_file

from procedural import write_checkpoint


class Tape:
    """Records named tensors and attaches the hooks that feed it."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def keep(self, name: str, value: torch.Tensor | np.ndarray) -> None:
        """Record `value` unless the name is taken: only a module's first call counts."""
        if name not in self.tensors:
            self.tensors[name] = np.array(value.detach().numpy() if torch.is_tensor(value) else value)

    def output(self, module: torch.nn.Module, name: str, pick=lambda out: out) -> None:
        self._hooks.append(module.register_forward_hook(lambda _m, _i, out: self.keep(name, pick(out))))

    def input(self, module: torch.nn.Module, name: str) -> None:
        self._hooks.append(module.register_forward_pre_hook(lambda _m, args: self.keep(name, args[0])))

    def each_output(self, module: torch.nn.Module, stem: str, pick) -> None:
        """Record every call of `module`, numbered."""
        calls = iter(range(10_000))
        self._hooks.append(module.register_forward_hook(lambda _m, _i, out: self.keep(f"{stem}{next(calls)}", pick(out))))

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()


def attach(tape: Tape, pipe: Flux2KleinPipeline) -> None:
    """Hook every boundary inside the transformer and the decoder."""
    dit, vae, decoder = pipe.transformer, pipe.vae, pipe.vae.decoder
    tape.output(dit.time_guidance_embed, "dit_temb")
    tape.output(dit.x_embedder, "dit_x_in")
    tape.output(dit.context_embedder, "dit_ctx_in")
    for i, block in enumerate(dit.transformer_blocks):
        tape.output(block, f"dit_double{i}_txt", lambda out: out[0])
        tape.output(block, f"dit_double{i}_img", lambda out: out[1])
    for i, block in enumerate(dit.single_transformer_blocks):
        tape.output(block, f"dit_single{i}")
    tape.output(dit.norm_out, "dit_norm_out")
    tape.each_output(dit, "pred_step", lambda out: out[0])
    if vae.post_quant_conv is not None:
        tape.input(vae.post_quant_conv, "vae_in")
        tape.output(vae.post_quant_conv, "vae_post_quant")
    else:
        tape.input(decoder.conv_in, "vae_in")
    tape.output(decoder.conv_in, "vae_conv_in")
    tape.output(decoder.mid_block.resnets[0], "vae_mid_res0")
    if decoder.mid_block.attentions[0] is not None:
        tape.output(decoder.mid_block.attentions[0], "vae_mid_attn")
    tape.output(decoder.mid_block, "vae_mid")
    for i, block in enumerate(decoder.up_blocks):
        tape.output(block, f"vae_up{i}")
    tape.output(decoder, "image_raw")


def expect_loaded(module: torch.nn.Module, folder: Path) -> None:
    """Fail unless the module holds exactly the stored tensors: loaders only warn about names they do not know."""
    stored = {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}
    held = module.state_dict()
    if getattr(module.config, "tie_word_embeddings", False):
        held.pop("lm_head.weight", None)  # the embedding under a second name
    if stored.keys() != held.keys():
        raise ValueError(f"{folder.name}: {sorted(stored.keys() ^ held.keys())} only in one of checkpoint and module")
    for name, value in stored.items():
        if not torch.equal(value.to(held[name].dtype), held[name]):
            raise ValueError(f"{folder.name}: {name} is not what the checkpoint holds")


def tokenize(pipe: Flux2KleinPipeline, prompt: str, length: int) -> dict[str, torch.Tensor]:
    """Token ids and mask as the pipeline makes them (it does not hand them out)."""
    text = pipe.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return pipe.tokenizer(text, padding="max_length", truncation=True, max_length=length, return_tensors="pt")


def capture(checkpoint: Path, request: dict) -> dict[str, np.ndarray]:
    """Run the reference pipeline and return every boundary tensor."""
    pipe = Flux2KleinPipeline.from_pretrained(
        checkpoint, dtype=torch.float32, local_files_only=True, low_cpu_mem_usage=False
    )
    pipe.set_progress_bar_config(disable=True)
    for name in ("text_encoder", "transformer", "vae"):
        expect_loaded(getattr(pipe, name), checkpoint / name)
    factor = 2 * pipe.vae_scale_factor
    height, width, length = request["height"], request["width"], request["text_length"]
    if height % factor or width % factor:
        raise ValueError(f"{height}x{width} is not a multiple of {factor}")
    if request["guidance"] != 1.0:
        raise ValueError("only guidance 1 (distilled models) is captured")

    tape = Tape()
    ids = tokenize(pipe, request["prompt"], length)
    tape.keep("input_ids", ids["input_ids"])
    tape.keep("attention_mask", ids["attention_mask"])
    shape = (1, pipe.transformer.config.in_channels, height // factor, width // factor)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(request["seed"]))
    tape.keep("noise_nchw", noise)

    embeds, txt_ids = pipe.encode_prompt(
        request["prompt"], max_sequence_length=length, text_encoder_out_layers=request["taps"]
    )
    img_ids = pipe._prepare_latent_ids(noise)
    tape.keep("prompt_embeds", embeds)
    tape.keep("txt_ids", txt_ids)
    tape.keep("img_ids", img_ids)
    cos, sin = pipe.transformer.pos_embed(torch.cat([txt_ids[0], img_ids[0]]))
    tape.keep("rope_cos", cos)
    tape.keep("rope_sin", sin)

    def after_step(_pipe, step: int, _t, values: dict) -> dict:
        tape.keep(f"latents_step{step}", values["latents"])
        return values

    attach(tape, pipe)
    images = pipe(
        prompt=request["prompt"],
        height=height,
        width=width,
        num_inference_steps=request["steps"],
        guidance_scale=request["guidance"],
        latents=noise.clone(),
        max_sequence_length=length,
        text_encoder_out_layers=request["taps"],
        output_type="pt",
        callback_on_step_end=after_step,
    ).images
    tape.detach()
    tape.keep("sigmas", pipe.scheduler.sigmas)
    tape.keep("image_01", images)
    tape.keep("image_u8", np.round(tape.tensors["image_01"] * 255).astype(np.uint8))
    return tape.tensors


def compare(found: dict[str, np.ndarray], folder: Path, tolerance: float) -> bool:
    """Print max|difference| per stored tensor; False if one is beyond tolerance * max(1, max|stored|)."""
    stored = {path.stem: np.load(path) for path in sorted(folder.glob("*.npy"))}
    good = True
    for name in sorted(stored.keys() | found.keys()):
        if name not in stored or name not in found:
            print(f"{name:20} {'not stored' if name in found else 'not computed'}")
            good = False
            continue
        want, have = stored[name], found[name]
        if want.shape != have.shape or want.dtype != have.dtype:
            print(f"{name:20} {have.dtype}{have.shape}, stored {want.dtype}{want.shape}")
            good = False
            continue
        difference = np.abs(want.astype(np.float64) - have.astype(np.float64)).max()
        scale = np.abs(want.astype(np.float64)).max()
        # A pixel that lies on a rounding edge may move by one; token ids and masks may not move at all.
        allowed = 1.0 if name == "image_u8" else tolerance * max(1.0, scale) if want.dtype == np.float32 else 0.0
        good &= bool(difference <= allowed)
        print(f"{name:20} max|diff| {difference:.2e}  max|ref| {scale:.3g}{'' if difference <= allowed else '  FAILED'}")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description="Capture (or check) the reference tensors of a FLUX.2 fixture.")
    parser.add_argument("fixture", type=Path, help="folder with checkpoint.json and oracle/request.json")
    parser.add_argument("--check", action="store_true", help="compare with the stored tensors instead of writing them")
    parser.add_argument("--tolerance", type=float, default=2e-5, help="of --check, relative to max(1, max|stored|)")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # the order of summation must not depend on the machine's cores

    folder = args.fixture / "oracle"
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as checkpoint:
        write_checkpoint(json.loads((args.fixture / "checkpoint.json").read_text(encoding="utf-8")), Path(checkpoint))
        tensors = capture(Path(checkpoint), request)
    if args.check:
        sys.exit(0 if compare(tensors, folder, args.tolerance) else 1)
    for name, value in tensors.items():
        np.save(folder / f"{name}.npy", value)
    print(f"{folder}: {len(tensors)} tensors, {sum(v.nbytes for v in tensors.values())} bytes")


if __name__ == "__main__":
    main()
