#!/usr/bin/env python3
"""Writes what tools/adherence compares with: every drawing of WORK (filled by prep.py) at 16x16 pixels, and their labels.

references.npz holds `rgba`, uint8 [concepts, 16, 16, 4]: as a picture has it, in its place and size; colours are multiplied with the
coverage, which comes last. labels.txt has a label a line, in the same order.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from klein_emoji.pictures import Pictures

SIDE = 16
BATCH = 128


@torch.no_grad()
def on_ground(pictures, value):
    """All drawings over a grey in -1..1 -> [concepts, 3, SIDE, SIDE] in 0..1"""
    out = []
    for concept in torch.arange(len(pictures)).split(BATCH):
        flip = torch.zeros(len(concept), dtype=torch.bool)
        drawn = pictures.render(concept, flip, torch.full((len(concept), 3), value))
        out.append(F.avg_pool2d(drawn, drawn.shape[-1] // SIDE))
    return (torch.cat(out) + 1) / 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="work", help="work folder with emoji.zip and meta.json (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "adherence", help="%(default)s")
    args = parser.parse_args()
    pictures = Pictures(args.work, "cpu")
    black, white = on_ground(pictures, -1.0), on_ground(pictures, 1.0)
    coverage = 1 - (white - black).mean(1, keepdim=True)
    rgba = torch.cat([black, coverage], 1).mul(255).round().clamp(0, 255).byte().permute(0, 2, 3, 1)
    np.savez_compressed(args.out / "references.npz", rgba=rgba.numpy())
    labels = "".join(m["label"] + "\n" for m in pictures.meta)
    (args.out / "labels.txt").write_text(labels, encoding="utf-8")


if __name__ == "__main__":
    main()
