#!/usr/bin/env python3
"""Does the exported checkpoint draw what the prompt says? Run by diffusers on the CPU, in fp32 arithmetic.

Draws random labels and backgrounds, and compares with the training pictures in a work folder filled by prep.py:

  top1      share of label prompts whose nearest training picture (32x32 px, 2,064 of them) is the prompted one
  colour    share of "<label> on a <colour> background" prompts whose corners show that colour
  forms     top1 of other phrasings: "a picture of X", "X emoji", "A X."
  fidelity  mean PSNR to the training picture, dB

With --quantise the same for weights rounded to 8 and 4 bits and expanded again, and PSNR to the pictures as saved.
Writes figures.json and contact sheets.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from klein_emoji.captions import on_background
from klein_emoji.config import PALETTE
from klein_emoji.judge import Judge, psnr
from klein_emoji.pictures import Pictures
from klein_emoji.quantise import quantise
from klein_emoji.sheet import PROMPTS, save_sheet
from oracle import call_options, load_pipeline, new_request, noise_of

BATCH = 25
FORMS = ("{}", "a picture of {}", "{} emoji", "A {}.")
# Linear layers outside the blocks: few weights, and each touches every token.
OUTSIDE_BLOCKS = ("modulation", "norm_out", "time_guidance", "x_embedder", "context_embedder", "proj_out")


@dataclass(frozen=True)
class Variant:
    """A way to quantise; network: only that one, blocks_only: leave the layers of OUTSIDE_BLOCKS as they are."""

    bits: int
    block: int
    symmetric: bool
    network: str | None = None
    blocks_only: bool = False

    def __str__(self):
        part = self.network or ("block linears" if self.blocks_only else "all linears")
        return f"q{self.bits} block {self.block} {'symmetric' if self.symmetric else 'asymmetric'}, {part}"

    def covers(self, network, layer):
        inside = not any(part in layer for part in OUTSIDE_BLOCKS)
        return (self.network in (None, network)) and (inside or not self.blocks_only)


VARIANTS = (
    Variant(8, 32, True),
    Variant(4, 32, True),
    Variant(4, 32, False),
    Variant(4, 16, True),
    Variant(4, 16, False),
    Variant(4, 32, False, blocks_only=True),
    Variant(4, 32, False, network="transformer"),
    Variant(4, 32, False, network="text_encoder"),
)


class Cases:
    """COUNT random labels with a colour and an initial noise each; the same ones on every run."""

    def __init__(self, pictures, count):
        generator = torch.Generator().manual_seed(11)
        self.concept = torch.randperm(len(pictures), generator=generator)[:count]
        self.colour = torch.randint(len(PALETTE), (count,), generator=generator)
        self.noise = noise_of(5, count)
        self.labels = [pictures.meta[i]["label"] for i in self.concept.tolist()]
        self.coloured = [on_background(x, list(PALETTE)[c]) for x, c in zip(self.labels, self.colour.tolist())]
        self.phrased = [FORMS[k % len(FORMS)].format(label) for k, label in enumerate(self.labels)]


def draw(pipe, prompts, noise):
    """Pictures [B, 3, 128, 128] in [-1, 1] for prompts and noise [B, 64, 8, 8]."""
    options, out = call_options(new_request("", 0)), []
    for start in range(0, len(prompts), BATCH):
        cut = slice(start, start + BATCH)
        result = pipe(prompt=list(prompts[cut]), latents=noise[cut].clone(), output_type="pt", **options)
        out.append(result.images * 2 - 1)
    return torch.cat(out)


def measure(pipe, judge, cases):
    """-> pictures of the labels, figures"""
    y, on_colour = draw(pipe, cases.labels, cases.noise), draw(pipe, cases.coloured, cases.noise)
    return y, {
        "top1": (judge.nearest(y) == cases.concept).float().mean().item(),
        "colour": (judge.colour(on_colour) == cases.colour).float().mean().item(),
        "fidelity": judge.fidelity(y, cases.concept).mean().item(),
    }


def show(name, figures):
    print(f"{name}:", ", ".join(f"{key} {value:.3f}" for key, value in figures.items()), flush=True)


def measure_unquantised(pipe, judge, cases):
    """Also prints which labels were missed. -> pictures of the labels, figures"""
    y, figures = measure(pipe, judge, cases)
    nearest = judge.nearest(y).tolist()
    for label, got, wanted in zip(cases.labels, nearest, cases.concept.tolist()):
        if got != wanted:
            print(f"missed: {label!r} looks like {judge.pictures.meta[got]['label']!r}")
    phrased = draw(pipe, cases.phrased, cases.noise)
    figures["forms"] = (judge.nearest(phrased) == cases.concept).float().mean().item()
    return y, figures


def measure_quantised(pipe, judge, cases, base, out):
    """Every variant in turn -> {name: figures}; writes sheets of pairs, unquantised left. Restores the weights."""
    networks = {"text_encoder": pipe.text_encoder.model, "transformer": pipe.transformer}
    linears = {
        (network, name): layer
        for network, module in networks.items()
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    original = {key: layer.weight.data.clone() for key, layer in linears.items()}
    results = {}
    for number, variant in enumerate(VARIANTS):
        for key, layer in linears.items():
            weight = original[key]
            covered = variant.covers(*key)
            layer.weight.data = quantise(weight, variant.bits, variant.block, variant.symmetric) if covered else weight
        y, figures = measure(pipe, judge, cases)
        distance = psnr(y, base)
        figures |= {"to_fp32": distance.mean().item(), "to_fp32_p10": distance.quantile(0.1).item()}
        show(str(variant), figures)
        results[str(variant)] = figures
        save_sheet(torch.stack([base[:12], y[:12]], 1).flatten(0, 1), out / f"quantised_{number}.png", 8)
    for key, layer in linears.items():
        layer.weight.data = original[key]
    return results


def draw_sheet(pipe, path):
    """The contact sheet of the fixed prompts; each row of eight has a seed of its own."""
    rows = [PROMPTS[i : i + 8] for i in range(0, len(PROMPTS), 8)]
    save_sheet(torch.cat([draw(pipe, row, noise_of(77 + 8 * k, len(row))) for k, row in enumerate(rows)]), path, 6)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", default="klein-emoji", help="checkpoint folder (%(default)s)")
    parser.add_argument("--work", default="work", help="work folder with emoji.zip and meta.json (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for figures and sheets (%(default)s)")
    parser.add_argument("--count", type=int, default=100, help="prompts of each kind (%(default)s)")
    parser.add_argument("--quantise", action="store_true", help="also measure quantised weights (8 more rounds)")
    return parser.parse_args()


@torch.no_grad()
def main():
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    pipe = load_pipeline(args.ckpt)
    pictures = Pictures(args.work, "cpu")
    judge, cases = Judge(pictures), Cases(pictures, args.count)
    base, figures = measure_unquantised(pipe, judge, cases)
    show("as saved", figures)
    results = {"as saved": figures}
    if args.quantise:
        results |= measure_quantised(pipe, judge, cases, base, args.out)
    draw_sheet(pipe, args.out / "contact_sheet.png")
    (args.out / "figures.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
