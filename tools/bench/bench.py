#!/usr/bin/env python3
"""Measures export and drawing on this machine, and prints one table and `out/bench.json`.

    python3 tools/bench/bench.py [--viaduct FILE] [--large-megabytes N] [--repeats N] [--ep EP ...]

Exports start with the checkpoint out of the page cache. Peak memory is the child's VmHWM, pages of mapped files included; the
system never reports less than this program's own peak, some 17 MB, and the table then shows "<". Drawing is timed as a user waits for it, from the start of the process to its
end: once with empty shader caches (cold), then again with what that run left (warm, median). Absolute figures hold for one machine;
compare the ratios. Needs Python 3.11 and nothing else.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from measure import MB, checked, drop_from_page_cache, require, run

ROOT = Path(__file__).resolve().parents[2]
KLEIN_EMOJI = ROOT / "bundles/klein-emoji/source"
SYNTHETIC = Path(__file__).with_name("synthetic_checkpoint.py")
PROFILES = ("f32", "f16", "q8", "q4")
DRAWN = ("q8", "f32")
NO_DEVICE = 6


@dataclass
class Export:
    checkpoint: str
    profile: str
    read_mb: float
    written_mb: float
    seconds: float
    read_mb_per_second: float
    peak_mb: float


@dataclass
class Drawing:
    profile: str
    ep: str
    adapter: str
    cold_seconds: float
    warm_seconds: float
    warm_runs: list[float]
    peak_mb: float


def main() -> None:
    arguments = parse_arguments()
    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    # Beside the results and not in /tmp, which may lie in memory and then has no cold pages.
    with tempfile.TemporaryDirectory(prefix="bench-", dir=out) as work:
        report = measure_all(arguments, Path(work))
    print_table(report)
    (out / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nAlso in {out / 'bench.json'}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--viaduct", type=Path, default=ROOT / "target/release/viaduct", help="the program to measure")
    parser.add_argument("--large-megabytes", type=int, default=400, help="size of the synthetic checkpoint, at least 260 (default 400)")
    parser.add_argument("--repeats", type=int, default=3, help="warm runs, of which the median counts (default 3)")
    parser.add_argument("--ep", nargs="+", default=["cpu", "webgpu"], help="providers to draw with (default both)")
    arguments = parser.parse_args()
    if not arguments.viaduct.is_file():
        parser.error(f"{arguments.viaduct} is missing; `make build` makes it")
    return arguments


def measure_all(arguments: argparse.Namespace, work: Path) -> dict:
    large = work / "synthetic"
    say(f"making a checkpoint of {arguments.large_megabytes} MB")
    subprocess.run([sys.executable, SYNTHETIC, large, "--megabytes", str(arguments.large_megabytes)], check=True, stdout=2)
    exports = [
        export(arguments.viaduct, name, source, profile, work)
        for name, source in (("klein-emoji", KLEIN_EMOJI), ("synthetic", large))
        for profile in PROFILES
    ]
    drawings = [
        drawing
        for ep in arguments.ep
        for profile in DRAWN
        if (drawing := draw(arguments.viaduct, work, profile, ep, arguments.repeats))
    ]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "viaduct": checked([arguments.viaduct, "--version"]).stdout.strip(),
        "machine": machine(),
        "peak_floor_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB, 1),
        "exports": [asdict(row) for row in exports],
        "drawings": [asdict(row) for row in drawings],
        "ratios": ratios(drawings),
    }


def export(viaduct: Path, name: str, source: Path, profile: str, work: Path) -> Export:
    """Exports once; klein-emoji's bundle stays for the drawing."""
    say(f"export {name} {profile}")
    bundle = work / f"{name}-{profile}"
    read = drop_from_page_cache(source)
    command = [viaduct, "export", source, "-o", bundle, "--profile", profile, "--json", "--progress", "none"]
    finished = checked(command)
    written = json.loads(finished.stdout)["bytes"]
    if name != "klein-emoji":
        shutil.rmtree(bundle)
    return Export(
        checkpoint=name,
        profile=profile,
        read_mb=round(read / MB, 1),
        written_mb=round(written / MB, 1),
        seconds=round(finished.seconds, 3),
        read_mb_per_second=round(read / MB / finished.seconds, 1),
        peak_mb=finished.peak_mb,
    )


def draw(viaduct: Path, work: Path, profile: str, ep: str, repeats: int) -> Drawing | None:
    """One cold and some warm runs; None where the provider has no device."""
    say(f"draw with {profile} on {ep}")
    caches = work / f"shaders-{profile}-{ep}"
    caches.mkdir()
    # Mesa's and NVIDIA's: each driver reads its own.
    env = os.environ | {"MESA_SHADER_CACHE_DIR": str(caches), "__GL_SHADER_DISK_CACHE_PATH": str(caches)}
    command = [viaduct, "generate", "-b", work / f"klein-emoji-{profile}", "-p", "red apple", "--seed", "1000"]
    command += ["-o", work / "picture.png", "--force", "--ep", ep, "--json", "--progress", "none"]
    cold = run(command, env)
    if cold.code == NO_DEVICE:
        say(f"  left out: {cold.stderr.strip()}")
        return None
    require(command, cold)
    warm = [checked(command, env) for _ in range(repeats)]
    return Drawing(
        profile=profile,
        ep=ep,
        adapter=json.loads(cold.stdout)["adapter"],
        cold_seconds=round(cold.seconds, 2),
        warm_seconds=round(statistics.median(one.seconds for one in warm), 2),
        warm_runs=[round(one.seconds, 2) for one in warm],
        peak_mb=max(one.peak_mb for one in warm),
    )


def ratios(drawings: list[Drawing]) -> dict[str, float]:
    """Warm times of this run against each other."""
    warm = {(row.profile, row.ep): row.warm_seconds for row in drawings}
    pairs = {
        **{f"webgpu/cpu, {profile}": ((profile, "webgpu"), (profile, "cpu")) for profile in DRAWN},
        **{f"q8/f32, {ep}": (("q8", ep), ("f32", ep)) for ep in ("cpu", "webgpu")},
    }
    return {name: round(warm[a] / warm[b], 2) for name, (a, b) in pairs.items() if a in warm and b in warm}


def machine() -> dict:
    cpu = next((line.split(":")[1].strip() for line in read_lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    load = [round(x, 1) for x in os.getloadavg()]
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gb": round(memory / 1e9), "load": load, "os": platform.release()}


def read_lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def print_table(report: dict) -> None:
    m = report["machine"]
    print(f"{report['viaduct']}, {report['date']}, {m['cores']} cores of {m['cpu']}, {m['memory_gb']} GB, load {m['load'][0]}\n")
    print(f"{'export':<12} {'profile':<8} {'read':>9} {'written':>10} {'time':>8} {'read/s':>10} {'peak':>9}")
    for r in report["exports"]:
        bound = "<" if r["peak_mb"] <= report["peak_floor_mb"] else " "
        print(
            f"{r['checkpoint']:<12} {r['profile']:<8} {r['read_mb']:>6.1f} MB {r['written_mb']:>7.1f} MB "
            f"{r['seconds']:>6.2f} s {r['read_mb_per_second']:>5.0f} MB/s {bound}{r['peak_mb']:>5.1f} MB"
        )
    print(f"\n{'s/image':<12} {'profile':<8} {'cold':>9} {'warm':>10} {'peak':>10}  adapter")
    for r in report["drawings"]:
        print(
            f"{r['ep']:<12} {r['profile']:<8} {r['cold_seconds']:>7.2f} s {r['warm_seconds']:>8.2f} s "
            f"{r['peak_mb']:>7.1f} MB  {r['adapter']}"
        )
    print(f"\n{'ratio of warm times':<21}")
    for name, value in report["ratios"].items():
        print(f"{name:<21} {value:>8.2f}")


def say(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":
    main()
