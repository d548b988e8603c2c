"""Values of torch.randn for tests of the initial noise.

Draws `torch.randn(n, generator=torch.Generator("cpu").manual_seed(seed))` for a few seeds and sizes. Sizes below 16
take torch's scalar path, larger ones the vector path in groups of 16, and a size that is no multiple of 16 draws its
last 16 values anew: the three differ even for one seed.

The vector path computes log, sin and cos with the CPU's vector instructions, so the last bits depend on the machine;
`cpu_capability` says on which the file was made. `--check` allows `--tolerance`.

File: `draws` is a list of {seed, size, values | first, last, sum}. Values are f32 bit patterns in hexadecimal;
a draw longer than 128 has its first and last 16 values and `sum`, the f64 sum in index order of all values.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

SEEDS = (0, 1000, 2**32 + 5, 12345678901)
SIZES = (1, 5, 15, 16, 17, 31, 33, 64, 100, 4096)
EDGE, WHOLE = 16, 128


def draw(seed: int, size: int) -> np.ndarray:
    return torch.randn(size, generator=torch.Generator("cpu").manual_seed(seed)).numpy()


def to_hex(values: np.ndarray) -> list[str]:
    return [f"{bits:08x}" for bits in values.view(np.uint32)]


def from_hex(values: list[str]) -> np.ndarray:
    return np.array([int(v, 16) for v in values], np.uint32).view(np.float32)


def entry(seed: int, size: int) -> dict:
    values = draw(seed, size)
    if size <= WHOLE:
        return dict(seed=seed, size=size, values=to_hex(values))
    total = 0.0
    for v in values.tolist():
        total += v
    return dict(seed=seed, size=size, first=to_hex(values[:EDGE]), last=to_hex(values[-EDGE:]), sum=total)


def check(stored: dict, tolerance: float) -> bool:
    """Draw everything in `stored` again and print the largest difference."""
    worst = 0.0
    for want in stored["draws"]:
        have = entry(want["seed"], want["size"])
        for key in ("values", "first", "last"):
            if key in want:
                worst = max(worst, float(np.abs(from_hex(want[key]) - from_hex(have[key])).max()))
        if "sum" in want:
            worst = max(worst, abs(want["sum"] - have["sum"]) / want["size"])
    print(f"max|diff| {worst:.2e}")
    return worst <= tolerance


def main() -> None:
    parser = argparse.ArgumentParser(description="Write (or check) tests/fixtures/torch_randn.json.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    parser.add_argument("--tolerance", type=float, default=2e-6, help="of --check, absolute")
    args = parser.parse_args()
    if args.check:
        sys.exit(0 if check(json.loads(args.file.read_text()), args.tolerance) else 1)
    draws = ",\n  ".join(json.dumps(entry(seed, size)) for seed in SEEDS for size in SIZES)
    head = f'"torch": "{torch.__version__}",\n "cpu_capability": "{torch.backends.cpu.get_cpu_capability()}"'
    args.file.write_text(f'{{\n {head},\n "draws": [\n  {draws}\n ]\n}}\n')


if __name__ == "__main__":
    main()
