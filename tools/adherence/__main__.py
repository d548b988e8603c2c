#!/usr/bin/env python3
"""Does a klein-emoji bundle draw what the prompt says?

    .venv/bin/python tools/adherence BUNDLE

Draws labels of the training set, every second one on a background of a named colour, and looks: is the nearest training
picture the prompted one, is the background of the colour? As a control, each picture is judged by the next one's prompt,
whose label and colour are others; that must be wrong. Ends with 1 if a share of right pictures is below --bar, or one of the
control above 1 - bar. Needs numpy, and the built program.

The references are klein-emoji's training pictures at 16x16 pixels; tools/train_klein_emoji/references.py made them.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from adherence.judge import Judge, PALETTE, on_background  # noqa: E402
from drawing import PROGRAM, draw  # noqa: E402


# The name in its bundles.
MODEL = "klein-emoji"


def cases(labels, count):
    """Prompts of COUNT random labels, the same ones on every run; two that follow each other have different colours."""
    chosen = np.random.default_rng(11).permutation(len(labels))[:count]
    named = [colour for colour in PALETTE if colour != "white"]
    return [
        on_background(labels[label], named[i // 2 % len(named)]) if i % 2 else labels[label]
        for i, label in enumerate(chosen)
    ]


def parse():
    parser = argparse.ArgumentParser(prog="tools/adherence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--program", type=Path, default=PROGRAM, help="%(default)s")
    parser.add_argument("--count", type=int, default=48, help="pictures, an even number (%(default)s)")
    parser.add_argument("--bar", type=float, default=0.95, help="share that must be right (%(default)s)")
    args = parser.parse_args()
    if problem := unfit(args):
        parser.error(problem)
    return args


def unfit(args):
    """Why there is nothing to judge; None if there is."""
    if args.count < 2 or args.count % 2:
        return f"--count {args.count}: an even number, of which every second picture has a colour"
    if not args.program.is_file():
        return f"{args.program}: no such program; build it with `make build`, or name it with --program"
    manifest = args.bundle / "bundle.json"
    try:
        name = json.loads(manifest.read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{manifest}: {error}"
    if name != MODEL:
        return f"{args.bundle}: a bundle of {name}; only pictures of {MODEL} can be judged"
    return None


def main():
    args = parse()
    judge = Judge()
    prompts = cases(judge.labels, args.count)
    with tempfile.TemporaryDirectory() as folder:
        pictures = draw(args.program, args.bundle, prompts, Path(folder))
    right, control = judge.scores(prompts, pictures), judge.scores(prompts[1:] + prompts[:1], pictures)
    for name, (label, colour) in (("asked", right), ("swapped (control)", control)):
        print(f"{name}: label {label:.3f}, background {colour:.3f} of {len(prompts)}")
    if min(right) < args.bar or max(control) > 1 - args.bar:
        sys.exit(f"{args.bundle}: wanted {args.bar:.2f} at least, and {1 - args.bar:.2f} at most when swapped")


if __name__ == "__main__":
    main()
