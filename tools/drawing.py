"""Pictures that the built program draws, as arrays."""

import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "setup"))
from check_picture import read_png  # noqa: E402

PROGRAM = Path(__file__).parent.parent / "target/release/viaduct"
# Prompts of one command, which share a seed.
GROUP = 8
FIRST_SEED = 500


def run(program, *arguments):
    command = [str(program), *map(str, arguments), "--ep", "cpu", "--progress", "none"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def checked(result):
    if result.returncode:
        raise SystemExit(f"{' '.join(result.args)}: {result.stderr.strip()}")


def seed_of(index):
    """The seed of a prompt, by its place among the prompts."""
    return FIRST_SEED + index // GROUP


def draw(program, bundle, prompts, folder):
    """Draws on the CPU provider. -> pictures in 0..1 [prompts, height, width, 3]"""
    pictures = []
    for start in range(0, len(prompts), GROUP):
        flags = [flag for prompt in prompts[start : start + GROUP] for flag in ("-p", prompt)]
        out, count = folder / f"{start}.png", len(flags) // 2
        checked(run(program, "generate", "-b", bundle, "-o", out, "--seed", seed_of(start), "--in-process", "--force", *flags))
        files = [out] if count == 1 else [folder / f"{start}-{i + 1}.png" for i in range(count)]
        pictures += [pixels(file) for file in files]
    return np.stack(pictures) / 255.0


def pixels(path):
    """-> uint8 [height, width, 3]"""
    width, height, samples = read_png(path)
    return np.array(samples, np.uint8).reshape(height, width, 3)
