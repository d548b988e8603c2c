#!/usr/bin/env python3
"""Measures FLUX.2 Klein at full size on this machine's GPU, and prints one table and writes `out/bench-gpu.json`.

    python3 tools/bench/gpu.py [--viaduct FILE] [--size LIST] [--seconds N] [--work FOLDER] [--set COMPONENT.KEY=VALUE ...]

Weights are random (tools/synth). They are exported to q4 and q8, the device is tuned for, and each bundle is measured by
`viaduct bench`; beside them one step of the graph that flux2-vulkan-bridge publishes; then q4 within a budget of 4 GiB,
which q8 must refuse with exit code 4; then a step of q4 under every form among which the tuner chooses. Caches of shaders and of the
tuner are empty at the start and lie in the work folder, which needs 30 GB and is deleted at the end. After `--seconds` the
command that runs is ended and the rest is left out; what was measured until then is in the JSON. Exit code 3 when a step failed or
was left out. Needs a built program, runtime/ and Python 3.11.
"""

import argparse
import json
import platform
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from os import cpu_count, environ
from pathlib import Path

from measure import Finished, run

ROOT = Path(__file__).resolve().parents[2]
BAR_MISSED = 3
OVER_BUDGET = 4
BUDGET = "4GiB"
# How each bundle is exported. The last is the graph that flux2-vulkan-bridge publishes: blocks of 16, which the fast kernel
# does not take, and attention in f32.
BRIDGE = "bridge"
BUNDLES = {
    "q4": ["--profile", "q4"],
    "q8": ["--profile", "q8"],
    BRIDGE: ["--profile", "q4", "--set", "profiles.q4.block=16", "--set", "profiles.q4.attention=f32", "--set", "profiles.q4.residual=islands"],
}
SWEEP = "q4 in every form"
# What tells the items of a list apart.
LABELS = ("size", "stage", "name")


@dataclass
class Step:
    """One command and what came of it."""

    name: str
    code: int
    seconds: float
    host_peak_mb: float
    expected_code: int = 0
    # What it printed as JSON, or its last words.
    result: dict = field(default_factory=dict)
    said: str = ""

    @property
    def is_right(self) -> bool:
        return self.code == self.expected_code


class Bench:
    """Runs steps until the time is up, and keeps their results in a file."""

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self.viaduct, self.out, self.work = arguments.viaduct, arguments.out, work
        self.started = time.monotonic()
        self.end = self.started + arguments.seconds
        caches = {"XDG_CACHE_HOME": "cache", "MESA_SHADER_CACHE_DIR": "shaders", "__GL_SHADER_DISK_CACHE_PATH": "shaders"}
        self.env = environ | {name: str(work / folder) for name, folder in caches.items()}
        (work / "shaders").mkdir()
        self.steps: list[Step] = []
        self.left_out: list[str] = []

    def step(self, name: str, command: list, expected_code: int = 0) -> Step | None:
        """None where no time is left."""
        left = self.end - time.monotonic()
        if left <= 0:
            self.left_out.append(name)
            return None
        self.say(name)
        finished = run(command, self.env, left)
        step = Step(name, finished.code, round(finished.seconds, 2), finished.peak_mb, expected_code, **outcome(finished))
        self.say(f"  {step.seconds:.1f} s" if step.is_right else f"  ended with {step.code}: {step.said}")
        self.steps.append(step)
        self.write()
        return step

    def run_viaduct(self, name: str, *arguments, expected_code: int = 0) -> Step | None:
        return self.step(name, [self.viaduct, *arguments], expected_code)

    def say(self, message: str) -> None:
        print(f"{time.monotonic() - self.started:4.0f} s  {message}", file=sys.stderr, flush=True)

    @property
    def is_right(self) -> bool:
        return not self.left_out and all(step.is_right for step in self.steps)

    def write(self) -> None:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": {"cores": cpu_count(), "os": platform.release()},
            "steps": [asdict(step) for step in self.steps],
            "left_out": self.left_out,
        }
        self.out.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    arguments = parse_arguments()
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.work.mkdir(exist_ok=True)
    # The folder goes, too, when this program is asked to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=arguments.work) as work:
        bench = Bench(arguments, Path(work))
        measure_all(bench, arguments)
    bench.write()
    print_table(bench)
    print(f"\nAlso in {arguments.out}")
    sys.exit(0 if bench.is_right else BAR_MISSED)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--viaduct", type=Path, default=ROOT / "target/release/viaduct", help="the program to measure")
    parser.add_argument("--preset", default="klein-4b", help="the checkpoint, by its name in tools/synth (default klein-4b)")
    parser.add_argument("--set", action="append", default=[], metavar="COMPONENT.KEY=VALUE", help="make it smaller, as tools/synth does")
    parser.add_argument("--size", default="512x512,1024x1024", help="pictures to measure (default 512x512,1024x1024)")
    parser.add_argument("--seconds", type=float, default=540, help="end after this time (default 540)")
    parser.add_argument("--work", type=Path, default=ROOT / "out", help="where the folder is made that is deleted at the end (default out/)")
    parser.add_argument("--out", type=Path, default=ROOT / "out/bench-gpu.json", help="results (default out/bench-gpu.json)")
    arguments = parser.parse_args()
    if not arguments.viaduct.is_file():
        parser.error(f"{arguments.viaduct} is missing; `make build` makes it")
    return arguments


def measure_all(bench: Bench, arguments: argparse.Namespace) -> None:
    bench.run_viaduct("doctor", "doctor", "--json")
    bundles = export_all(bench, arguments)
    bench.run_viaduct("doctor --tune", "doctor", "--tune", "--json")
    for name, bundle in bundles.items():
        once = ["--steps", "1", "--runs", "1"] if name == BRIDGE else []
        bench.run_viaduct(name, "bench", bundle, "--size", arguments.size, *once, "--json")
    if "q4" in bundles:
        limited = ["--size", arguments.size, "--budget", BUDGET, "--json"]
        bench.run_viaduct(f"q4 {BUDGET}", "bench", bundles["q4"], *limited)
    if "q8" in bundles:
        limited = ["--size", arguments.size.split(",")[0], "--budget", BUDGET]
        bench.run_viaduct(f"q8 {BUDGET}, bench", "bench", bundles["q8"], *limited, expected_code=OVER_BUDGET)
        picture = ["-b", bundles["q8"], "-p", "a lighthouse", "-o", bench.work / "picture.png", *limited]
        bench.run_viaduct(f"q8 {BUDGET}, generate", "generate", *picture, expected_code=OVER_BUDGET)
    if "q4" in bundles:
        # Each size by itself, so that what was swept stays when the time is up.
        for size in arguments.size.split(","):
            bench.run_viaduct(f"{SWEEP}, {size}", "bench", bundles["q4"], "--size", size, "--steps", "3", "--sweep", "--json")


def export_all(bench: Bench, arguments: argparse.Namespace) -> dict[str, Path]:
    """Bundles by profile. The checkpoint is deleted as soon as they are there."""
    checkpoint = bench.work / "checkpoint"
    settings = [part for setting in arguments.set for part in ("--set", setting)]
    synth = [sys.executable, ROOT / "tools/synth", checkpoint, "--preset", arguments.preset, *settings]
    bench.step("checkpoint", synth)
    bundles = {}
    for name, settings in BUNDLES.items():
        bundle = bench.work / name
        command = ["export", checkpoint, "-o", bundle, *settings, "--json", "--progress", "none"]
        step = bench.run_viaduct(f"export {name}", *command)
        if step and step.is_right:
            bundles[name] = bundle
    shutil.rmtree(checkpoint, ignore_errors=True)
    return bundles


def outcome(finished: Finished) -> dict:
    """The fields of a step that tell what the command printed."""
    try:
        result = json.loads(finished.stdout)
    except json.JSONDecodeError:
        result = None
    words = finished.stderr.strip().splitlines() or [""]
    if not isinstance(result, dict):
        return {"said": words[-1]}
    return {"result": result, "said": result.get("error", "")}


def print_table(bench: Bench) -> None:
    print(f"{'step':<20} {'time':>9} {'host peak':>10}")
    for step in bench.steps:
        end = "" if step.is_right else f"  ended with {step.code} instead of {step.expected_code}: {step.said}"
        print(f"{step.name:<20} {step.seconds:>7.1f} s {step.host_peak_mb:>7.0f} MB{end}")
    for name in bench.left_out:
        print(f"{name:<20} left out: the time was up")
    sweeps = [sweep for step in bench.steps if step.name.startswith(SWEEP) for sweep in step.result.get("sweeps", [])]
    for sweep in sweeps:
        ratio, trials = sweep["tuned_over_best"], len(sweep["trials"])
        print(f"{sweep['width']}x{sweep['height']}: a step as tuned takes {ratio:.3f} times the best of {trials} forms")
    measured = {step.name: flat(step.result) for step in bench.steps if is_measurement(step)}
    if not measured:
        return
    rows = dict.fromkeys(path for values in measured.values() for path in values)
    width = max(map(len, rows))
    print(f"\n{'':<{width}}" + "".join(f" {name:>14}" for name in measured))
    for path in rows:
        print(f"{path:<{width}}" + "".join(f" {cell(values.get(path)):>14}" for values in measured.values()))


def is_measurement(step: Step) -> bool:
    return step.is_right and step.name.startswith(tuple(BUNDLES)) and not step.name.startswith(SWEEP) and bool(step.result)


def flat(value, path: str = "") -> dict[str, object]:
    """The numbers and words of nested JSON by their paths; an item of a list goes by its label, else by its place."""
    if isinstance(value, dict):
        items = [(key, item) for key, item in value.items() if key not in LABELS or path == ""]
    elif isinstance(value, list):
        items = [(label(item, place), item) for place, item in enumerate(value)]
    else:
        return {path: value}
    return {key: leaf for name, item in items for key, leaf in flat(item, f"{path} {name}".strip()).items()}


def label(item, place: int) -> str:
    labels = [str(item[key]) for key in LABELS if key in item] if isinstance(item, dict) else []
    return labels[0] if labels else str(place)


def cell(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


if __name__ == "__main__":
    main()
