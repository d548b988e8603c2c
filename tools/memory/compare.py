#!/usr/bin/env python3
"""Compares the predicted with the measured peak memory of every stage, each in a process of its own.

    python3 tools/memory/compare.py WORK [--program FILE] [--ep EP ...] [--side N ...] [--bar 0.15]

WORK holds the bundles that `tools/memory/bundles.sh WORK` makes. Measured is VmHWM, pages of mapped files included; with a
software Vulkan device the memory of the GPU is memory of the process. Ends with 1 if a prediction is off by more than the
bar. Needs Python 3.11 and nothing else.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
TEXT_ROWS = 512
ATTENTION_ROWS = 1024
# Two runs: from the second on inputs are uploaded beside those of the first.
RUNS = "2"
# Dispatches per submission as stages usually have them, and as they have them where memory is short.
USUAL, FEWEST = 4, 1


@dataclass
class Case:
    bundle: str
    side: int
    eps: tuple[str, ...]
    # Beginnings of stages' names.
    stages: tuple[str, ...]
    # Dispatches per submission, of WebGPU.
    dispatches: tuple[int, ...] = (USUAL,)


BOTH = ("cpu", "webgpu")
ALL = ("transformer", "vae_")
# The transformer's attention is one piece in the first and cut into more and more chunks of queries after that. The last
# transformer takes more than 3 GiB with WebGPU, the last decoder on the CPU. A software device binds 128 MiB at most, and
# convolutions over larger tensors fail there: 1408 pixels is as far as a decoder of 16 channels goes.
CASES = (
    Case("split", 768, BOTH, ALL, (USUAL, FEWEST)),
    Case("split", 1280, BOTH, ALL),
    Case("half", 1280, BOTH, ("vae_post",), (USUAL, FEWEST)),
    Case("unsplit", 1408, ("webgpu",), ("vae_",)),
    Case("unsplit", 4096, ("cpu",), ("vae_post",)),
    Case("unsplit", 1792, BOTH, ("transformer",)),
)


# What hides: a product of all rows of an input with each other.
HIDDEN = ("vae_attention", "v")
HIDDEN_SIDE = 576


def main() -> int:
    arguments = parse_arguments()
    arguments.program = arguments.program.resolve()
    print(f"{'stage':<24} {'side':<6} {'ep':<7} {'dispatches':>10} {'predicted':>10} {'measured':>10} {'ratio':>6}   MiB", flush=True)
    ratios = []
    for case in CASES:
        if case.side in arguments.side:
            for ep in case.eps:
                if ep in arguments.ep:
                    names = stages(arguments.work / case.bundle, case.stages)
                    for dispatches in case.dispatches if ep == "webgpu" else (USUAL,):
                        ratios += [compare(arguments, case.bundle, stage, ep, case.side, dispatches) for stage in names]
    for ep in arguments.ep if HIDDEN_SIDE in arguments.side else ():
        stage, source = HIDDEN
        ratios.append(compare(arguments, "split", stage, ep, HIDDEN_SIDE, USUAL))
        ratios.append(compare(arguments, "split", stage, ep, HIDDEN_SIDE, USUAL, source))
    worst = max((abs(ratio - 1) for ratio in ratios), default=0.0)
    print(f"worst: off by {worst:.1%}, bar {arguments.bar:.0%}")
    return 0 if worst <= arguments.bar else 1


def compare(
    arguments: argparse.Namespace, bundle: str, stage: str, ep: str, side: int, dispatches: int, hidden: str | None = None
) -> float:
    """Predicted over measured, printed."""
    program = [arguments.program, arguments.work / bundle, stage, ep]
    figures = measure(program, str(dispatches), sizes(side), hidden)
    ratio = figures["predicted"] / figures["peak"]
    mark = "" if abs(ratio - 1) <= arguments.bar else "  <--"
    predicted, peak = figures["predicted"] / MIB, figures["peak"] / MIB
    name = f"{stage}, hidden" if hidden else stage
    print(f"{name:<24} {side:<6} {ep:<7} {dispatches:>10} {predicted:>10.0f} {peak:>10.0f} {ratio:>6.2f}{mark}", flush=True)
    if arguments.verbose:
        print(json.dumps(figures), flush=True)
    if figures["unknown"]:
        print(f"  unknown sizes: {figures['unknown']}")
    return ratio


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="where the bundles are")
    parser.add_argument("--program", type=Path, default=ROOT / "target/release/examples/stage_memory")
    parser.add_argument("--ep", nargs="+", default=["cpu", "webgpu"], help="providers (default both)")
    sides = sorted({case.side for case in CASES} | {HIDDEN_SIDE})
    parser.add_argument("--side", nargs="+", type=int, default=sides, help="cases, by the picture's side (default all)")
    parser.add_argument("--bar", type=float, default=0.15, help="largest relative difference (default 0.15)")
    parser.add_argument("--verbose", action="store_true", help="all figures of every stage")
    return parser.parse_args()


def stages(bundle: Path, beginnings: tuple[str, ...]) -> list[str]:
    manifest = json.loads((bundle / "bundle.json").read_text())
    names = [stage["name"] for stage in manifest["stages"]]
    return [name for name in names if name.startswith(beginnings)]


def sizes(side: int) -> dict[str, int]:
    """Sizes of the graphs' symbols for a square picture."""
    tokens = (side // 16) ** 2
    middle = side // 8
    known = {
        "image_seq": tokens,
        "joint_seq": tokens + TEXT_ROWS,
        "chunk_rows": min(ATTENTION_ROWS, middle * middle),
        "kv_rows": middle * middle,
    }
    for axis in ("height", "width"):
        known |= {f"latent_{axis}": side // 16, f"mid_{axis}": middle, f"image_{axis}": side}
        known |= {f"up{level}_{axis}": middle << (level + 1) for level in range(3)}
    return known


def measure(program: list, dispatches: str, bound: dict[str, int], hidden: str | None) -> dict:
    _, _, stage, ep = program
    options = ["--hide", hidden] if hidden else []
    symbols = [f"{name}={size}" for name, size in bound.items()]
    # The driver compiles a shader in the first process that needs it, and keeps it: that process is not the one to measure.
    attempts = ("1", RUNS) if ep == "webgpu" else (RUNS,)
    for runs in attempts:
        command = [*program, runs, dispatches, *options, *symbols]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            sys.exit(f"{stage} on {ep} ended with {finished.returncode}: {finished.stderr.strip()}")
    return json.loads(finished.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
