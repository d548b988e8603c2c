#!/usr/bin/env python3
"""Reference tensors of klein-emoji, computed by diffusers on the CPU in fp32 arithmetic on the saved bf16 weights.

  oracle.py --out DIR                  writes DIR/0, DIR/1, ...: one folder for each prompt
  oracle.py --check DIR                recomputes the request of DIR (or of each folder in it) and compares: exit 1 if
                                       a tensor differs by more than --limit of its largest value, or ids at all

A folder holds request.json, image.png and one .npy for each boundary (B = 1, N = 64 latent tokens, L = 64 text rows):

  input_ids, attention_mask [B, L]     the prompt in the chat template, padded
  prompt_embeds [B, L, 384]            the three taps side by side, padding rows included
  noise_nchw [B, 64, 8, 8]             torch.randn of the request's seed
  sigmas [steps + 1]                   noise levels, the last one 0
  pred_stepK, latents_stepK [B, N, 64] velocity at step K, latents after it
  vae_in [B, 16, 16, 16]               what enters the decoder: statistics undone, unpacked
  image_raw, image_01 [B, 3, 128, 128] what leaves it, and that in [0, 1]
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
from diffusers import Flux2KleinPipeline
from PIL import Image

from klein_emoji.config import GRID, SIZE, STEPS, TEXT, TEXT_LENGTH, VAE

PROMPTS = ("red apple", "a fox on a blue background")
FIRST_SEED = 1000
INTEGER = ("input_ids", "attention_mask")
PNG_LEVELS = 1  # a pixel may round the other way


def load_pipeline(checkpoint):
    pipe = Flux2KleinPipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def noise_of(seed, count=1):
    return torch.randn(count, VAE.packed, GRID, GRID, generator=torch.Generator().manual_seed(seed))


def new_request(prompt, seed):
    return {
        "prompt": prompt,
        "height": SIZE,
        "width": SIZE,
        "steps": STEPS,
        "guidance": 1.0,
        "seed": seed,
        "text_length": TEXT_LENGTH,
        "taps": list(TEXT.taps),
        "noise": "noise_nchw.npy",
    }


def call_options(request):
    """A request as arguments of the pipeline."""
    return {
        "height": request["height"],
        "width": request["width"],
        "num_inference_steps": request["steps"],
        "guidance_scale": request["guidance"],
        "max_sequence_length": request["text_length"],
        "text_encoder_out_layers": tuple(request["taps"]),
    }


def tokenise(pipe, request):
    """-> the prompt in the chat template, input ids and attention mask [1, L]"""
    turn = [{"role": "user", "content": request["prompt"]}]
    text = pipe.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    length = request["text_length"]
    tokens = pipe.tokenizer(text, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return text, tokens["input_ids"], tokens["attention_mask"]


@contextlib.contextmanager
def recorded(pipe):
    """Inside the block the transformer's outputs, the decoder's inputs and its outputs are appended to three lists."""
    velocities, decoder_in, decoder_out = [], [], []
    decode = pipe.vae.decode

    def recording_decode(z, **options):
        result = decode(z, **options)
        decoder_in.append(z.clone())
        decoder_out.append(result[0].clone())
        return result

    hook = pipe.transformer.register_forward_hook(lambda module, inputs, output: velocities.append(output[0].clone()))
    pipe.vae.decode = recording_decode
    try:
        yield velocities, decoder_in, decoder_out
    finally:
        hook.remove()
        pipe.vae.decode = decode


@torch.no_grad()
def compute(pipe, request, noise):
    """Runs the request from NOISE -> text after the template, {tensor name: array}, the pipeline's picture"""
    options, latents = call_options(request), []

    def keep_latents(pipeline, step, timestep, tensors):
        latents.append(tensors["latents"].clone())
        return tensors

    text, ids, mask = tokenise(pipe, request)
    embeds, _ = pipe.encode_prompt(
        request["prompt"],
        max_sequence_length=options["max_sequence_length"],
        text_encoder_out_layers=options["text_encoder_out_layers"],
    )
    with recorded(pipe) as (velocities, decoder_in, decoder_out):
        result = pipe(prompt=request["prompt"], latents=noise.clone(), callback_on_step_end=keep_latents, **options)
    tensors = {"input_ids": ids, "attention_mask": mask, "prompt_embeds": embeds, "noise_nchw": noise}
    tensors["sigmas"] = pipe.scheduler.sigmas
    tensors |= {f"pred_step{k}": velocity for k, velocity in enumerate(velocities)}
    tensors |= {f"latents_step{k}": after for k, after in enumerate(latents)}
    tensors |= {
        "vae_in": decoder_in[0],
        "image_raw": decoder_out[0],
        "image_01": (decoder_out[0] / 2 + 0.5).clamp(0, 1),
    }
    return text, {name: tensor.numpy() for name, tensor in tensors.items()}, result.images[0]


def write(pipe, folder, prompt, seed):
    request = new_request(prompt, seed)
    text, tensors, image = compute(pipe, request, noise_of(seed))
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in tensors.items():
        np.save(folder / f"{name}.npy", tensor)
    image.save(folder / "image.png")
    request["text"] = text
    (folder / "request.json").write_text(json.dumps(request, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{folder}: {prompt!r}, seed {seed}")


def relative_error(new, stored):
    """Largest difference over the largest stored value; infinite where shapes differ or a value is not finite."""
    if new.shape != stored.shape or not np.isfinite(new).all():
        return float("inf")
    return float(np.abs(new - stored).max() / np.abs(stored).max())


def faults(name, new, stored, limit):
    """Compares one tensor and prints the figure -> whether it is wrong"""
    if name in INTEGER:
        wrong = not np.array_equal(new, stored)
        print(f"  {name:16} {'DIFFERS' if wrong else 'equal'}")
        return wrong
    error = relative_error(new, stored)
    wrong = not error <= limit
    print(f"  {name:16} {error:.2e}{'  TOO FAR' if wrong else ''}")
    return wrong


def check(pipe, folder, limit):
    """Recomputes the request of FOLDER and compares every stored tensor -> number of wrong ones"""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    stored = {path.stem: np.load(path) for path in sorted(folder.glob("*.npy"))}
    print(f"{folder}: {request['prompt']!r}")
    text, tensors, image = compute(pipe, request, noise_of(request["seed"]))
    wrong = sum(faults(name, tensors[name], stored[name], limit) for name in tensors if name in stored)
    for name in sorted(tensors.keys() ^ stored.keys()):
        print(f"  {name:16} {'NOT STORED' if name in tensors else 'NOT COMPUTED'}")
        wrong += 1
    if text != request["text"]:
        print(f"  text             DIFFERS: {text!r}")
        wrong += 1
    levels = np.abs(np.asarray(image).astype(int) - np.asarray(Image.open(folder / "image.png")).astype(int)).max()
    print(f"  image.png        {levels} levels of 255{'  TOO FAR' if levels > PNG_LEVELS else ''}")
    return wrong + int(levels > PNG_LEVELS)


def request_folders(folder):
    """FOLDER itself if it holds a request, else its subfolders that do."""
    if (folder / "request.json").exists():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/request.json"))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", default="klein-emoji", help="checkpoint folder (%(default)s)")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--out", type=Path, help="write oracle folders here")
    mode.add_argument("--check", type=Path, metavar="DIR", help="compare with this oracle folder")
    parser.add_argument("--prompt", action="append", help="prompt to write, repeatable (two fixed ones)")
    parser.add_argument(
        "--seed", type=int, default=FIRST_SEED, help="seed of the first prompt, then counted up (%(default)s)"
    )
    parser.add_argument("--limit", type=float, default=1e-5, help="largest relative error of a check (%(default)s)")
    return parser.parse_args()


def main():
    args = parse()
    pipe = load_pipeline(args.ckpt)
    if args.out:
        for k, prompt in enumerate(args.prompt or PROMPTS):
            write(pipe, args.out / str(k), prompt, args.seed + k)
        return
    folders = request_folders(args.check)
    if not folders:
        sys.exit(f"{args.check}: no request.json in it or one level below")
    wrong = sum(check(pipe, folder, args.limit) for folder in folders)
    print(f"{wrong} wrong" if wrong else "all within the limit")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
