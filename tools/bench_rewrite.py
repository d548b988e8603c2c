#!/usr/bin/env python3
"""Measures `viaduct rewrite` against onnxsim, onnxslim and onnxruntime's quantiser: time, memory, and that all say the same.

    make bench-rewrite          or: .cache/bench-rewrite/bin/python tools/bench_rewrite.py [--layers N] [--only TOOL ...]

Two models of tools/bench/synthetic_model.py go through every tool: a small one, and one of 3 GiB (`--layers 16`). Each run starts
with the source out of the page cache and ends when what it wrote is on the disk; peak memory is the process's VmHWM, pages
of mapped files included. A tool that fails is shown with its last line. The outputs of original and rewritten model are
compared on ONNX Runtime's CPU provider, for both models: `lean` must agree within 1e-5, and 4-bit weights must not be further
from the original than those of onnxruntime's quantiser (5 % to spare).

onnxruntime's quantiser sees no weight behind a Transpose and no Gemm, so `same-q4` is viaduct on those weights alone that it does see:
the row to compare it with. `viaduct q4` takes them all.

Needs 10 GB of disk below out/, and the memory that the other tools need (`--memory-gb` stops them there). Exit code 3 when
a comparison fails or the ratios are below `--times`.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools/bench"))
from measure import MB, run  # noqa: E402
from synthetic_model import write  # noqa: E402

BAR_MISSED = 3
MEASURE = ["python3", ROOT / "tools/bench/measure.py"]
MEASURED = re.compile(r"^([0-9.]+) s, CPU ([0-9.]+) s, peak ([0-9]+) MB$", re.MULTILINE)
SMALL = dict(layers=2, width=256)
LARGE_WIDTH = 2048
BLOCK = 32
# The weights of tools/bench/synthetic_model.py that MatMul reads directly.
DIRECT = r"(^shared|\.(q|down|value))\.weight$"
EXACT = 1e-5
# Two roundings to the nearest code need not break ties alike.
QUANTISED_SLACK = 1.05


@dataclass
class Result:
    task: str
    tool: str
    seconds: float
    cpu_seconds: float
    peak_mb: float
    nodes: int
    written_mb: float
    error: float
    failure: str = ""


def commands(viaduct: Path) -> dict[str, dict[str, list]]:
    """Task -> tool -> command line; IN and OUT are replaced."""
    python = Path(sys.executable)
    quantise = [python, "-m", "onnxruntime.quantization.matmul_nbits_quantizer", "--input_model", "IN", "--output_model", "OUT"]

    def simplify(tool: str) -> list:
        return [python.with_name(tool), "IN", "OUT", "--save-as-external-data"]

    rewrite = [viaduct, "rewrite", "IN", "-o", "OUT", "--progress", "none"]
    q4 = [*rewrite, "--passes", "q4", "--block", BLOCK, "--symmetric"]
    return {
        "lean": {"viaduct": [*rewrite, "--passes", "lean"], "onnxslim": simplify("onnxslim"), "onnxsim": simplify("onnxsim")},
        "q4": {"viaduct": q4},
        "same-q4": {
            "viaduct": [*q4, "--include", DIRECT],
            "onnxruntime": [*quantise, "--bits", 4, "--block_size", BLOCK, "--symmetric", "True"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--viaduct", type=Path, default=ROOT / "target/release/viaduct", help="the program to measure")
    parser.add_argument("--layers", type=int, default=16, help="of the large model, 192 MiB each (default 16); 0: leave it out")
    parser.add_argument("--only", nargs="+", metavar="TOOL", help="run these tools alone")
    parser.add_argument("--memory-gb", type=float, default=12, help="data memory that a tool may take (default 12)")
    parser.add_argument("--times", type=float, default=5, help="how much faster and smaller viaduct must be on the large model")
    arguments = parser.parse_args()
    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    sizes = {"small": SMALL}
    if arguments.layers:
        sizes["large"] = dict(layers=arguments.layers, width=LARGE_WIDTH)
    report = {}
    # Beside the results and not in /tmp, which may lie in memory and then has no cold pages.
    with tempfile.TemporaryDirectory(prefix="rewrite-", dir=out) as work:
        for name, size in sizes.items():
            source = Path(work) / name / "model.onnx"
            total = write(source, **size)
            print(f"\n{name}: {total / 2**30:.2f} GiB, load {os.getloadavg()[0]:.0f}", flush=True)
            report[name] = measure_all(arguments, source, size["width"])
            shutil.rmtree(source.parent)
    (out / "bench-rewrite.json").write_text(json.dumps({k: [asdict(r) for r in v] for k, v in report.items()}, indent=1) + "\n")
    failures = [f"{name}: {line}" for name, results in report.items() for line in wrong(results)]
    failures += too_little(report.get("large", []), arguments.times)
    for line in failures:
        print(f"error: {line}", file=sys.stderr)
    sys.exit(BAR_MISSED if failures else 0)


def measure_all(arguments: argparse.Namespace, source: Path, width: int) -> list[Result]:
    x = np.random.default_rng(0).standard_normal((1, 4, width), np.float32)
    reference = output(source, x)
    print(f"{'task':<7} {'tool':<12} {'time':>8} {'CPU':>8} {'peak':>9} {'nodes':>6} {'written':>10} {'error':>8}")
    results = []
    for task, tools in commands(arguments.viaduct).items():
        for tool, command in tools.items():
            if arguments.only and tool not in arguments.only:
                continue
            result = measure(arguments, task, tool, command, source, x, reference)
            results.append(result)
            print(
                f"{task:<7} {tool:<12} {result.seconds:>6.1f} s {result.cpu_seconds:>6.1f} s {result.peak_mb:>6.0f} MB {result.nodes:>6} "
                f"{result.written_mb:>7.0f} MB {result.error:>8.1e}  {result.failure}",
                flush=True,
            )
    return results


def measure(
    arguments: argparse.Namespace, task: str, tool: str, command: list, source: Path, x: np.ndarray, reference: np.ndarray
) -> Result:
    with tempfile.TemporaryDirectory(prefix=f"{tool}-", dir=source.parent.parent) as folder:
        target = Path(folder) / "rewritten.onnx"
        paths = {"IN": source, "OUT": target}
        limit = ["prlimit", f"--data={int(arguments.memory_gb * 1e9)}"]
        os.sync()
        # In a process of its own: a child's peak is never less than its parent's, and this one holds models.
        finished = run([*MEASURE, "--cold", source.parent, "--", *limit, *(paths.get(part, part) for part in command)])
        # `sync FILE` waits for these files alone.
        to_disk = run(["sync", *Path(folder).iterdir()]).seconds
        seconds, cpu_seconds, peak_mb = map(float, MEASURED.search(finished.stdout).groups())
        written = sum(path.stat().st_size for path in Path(folder).iterdir()) / MB
        result = Result(task, tool, round(seconds + to_disk, 1), cpu_seconds, peak_mb, 0, round(written, 1), float("nan"))
        try:
            if finished.code != 0:
                raise RuntimeError((finished.stderr.strip().splitlines() or [f"exit code {finished.code}"])[-1])
            result.nodes = len(onnx.load(target, load_external_data=False).graph.node)
            result.error = difference(output(target, x), reference)
        except Exception as error:  # whatever another tool does, or wrote
            result.failure = f"FAILED: {str(error)[:200]}"
        return result


def output(model: Path, x: np.ndarray) -> np.ndarray:
    """What the CPU provider computes, with weights left in the mapped file."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference, relative to the largest value."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def wrong(results: list[Result]) -> list[str]:
    """What viaduct failed at, or computed wrongly."""
    others = {(r.task, r.tool): r for r in results if not r.failure}
    lines = []
    for r in (r for r in results if r.tool == "viaduct"):
        if r.failure:
            lines.append(f"{r.task}: {r.failure}")
        elif r.task == "lean" and not r.error <= EXACT:
            lines.append(f"lean is {r.error:.1e} off, more than {EXACT}")
        elif r.task == "same-q4" and (theirs := others.get(("same-q4", "onnxruntime"))) and not r.error <= theirs.error * QUANTISED_SLACK:
            lines.append(f"4-bit weights are {r.error:.1e} off, onnxruntime's {theirs.error:.1e}")
    return lines


def too_little(results: list[Result], times: float) -> list[str]:
    """Prints how many times the others take, and says where that is less than asked for."""
    ours = {r.task: r for r in results if r.tool == "viaduct" and not r.failure}
    lines = []
    for r in results:
        if r.tool == "viaduct" or r.failure or r.task not in ours:
            continue
        for what, of in (("time", "seconds"), ("CPU time", "cpu_seconds"), ("peak", "peak_mb")):
            ratio = getattr(r, of) / getattr(ours[r.task], of)
            print(f"{r.task}: {r.tool} takes {ratio:.1f} times the {what} of viaduct")
            if ratio < times and what != "CPU time":
                lines.append(f"{r.task}: {what} is only {ratio:.1f} times better than {r.tool}'s")
    return lines


if __name__ == "__main__":
    main()
