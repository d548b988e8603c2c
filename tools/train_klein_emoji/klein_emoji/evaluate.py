"""Adherence of the networks in training, with our own modules: a quick figure, a contact sheet."""

import torch

from .captions import on_background
from .config import PALETTE, TOKENS, VAE
from .judge import Judge
from .sampler import generate
from .sheet import PROMPTS, save_sheet


@torch.no_grad()
def evaluate(models, pictures, prompts, count, tag, sheet=None):
    """Prints how many of COUNT label prompts give their own picture and how many backgrounds are right.

    SHEET: path of a contact sheet to write, or none.
    """
    device, judge, count = pictures.device, Judge(pictures), min(count, len(pictures))
    generator = torch.Generator().manual_seed(11)
    concept = torch.randperm(len(pictures), generator=generator)[:count]
    noise = torch.randn(count, TOKENS, VAE.packed, generator=generator).to(device)
    colour = torch.randint(len(PALETTE), (count,), generator=generator)
    labels = [pictures.meta[i]["label"] for i in concept.tolist()]
    coloured = [on_background(label, list(PALETTE)[c]) for label, c in zip(labels, colour.tolist())]
    concept, colour = concept.to(device), colour.to(device)
    with torch.compiler.set_stance("force_eager"):  # other batch sizes than in training: no recompilation
        y = generate(models, *prompts.encode(labels), noise)
        on_colour = generate(models, *prompts.encode(coloured), noise)
        if sheet:
            noise = torch.randn(len(PROMPTS), TOKENS, VAE.packed, generator=torch.Generator().manual_seed(3)).to(device)
            save_sheet(generate(models, *prompts.encode(PROMPTS), noise), sheet, 6)
    top1 = (judge.nearest(y) == concept).float().mean().item()
    fidelity = judge.fidelity(y, concept)
    right = (judge.colour(on_colour) == colour).float().mean().item()
    print(
        f"eval {tag}: top-1 {top1:.3f} of {count}, psnr mean {fidelity.mean():.2f} p10 {fidelity.quantile(0.1):.2f},"
        f" background colour {right:.3f}",
        flush=True,
    )
