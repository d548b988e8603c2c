#!/usr/bin/env python3
"""Reads a large model and writes it again; fails unless that takes little memory and about the time of `cp`.

    python3 tools/bench/round_trip.py MODEL.onnx --program target/release/examples/round_trip

MODEL.onnx must be alone with its data in its folder, which is out of the page cache when a run starts; a run ends when the
copy is on the disk. `cp` and the program take turns, and the best of `--repeats` counts for each, so that what else the
machine does weighs on both alike. Exit code 3 when the program's peak (VmHWM, pages of mapped files included) is above
`--most-mib`, or when it is both slower than `--least-mb-s` and takes more than `--times` the time of `cp`.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from measure import MB, Finished, drop_from_page_cache, require, run

BAR_MISSED = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--program", type=Path, required=True, help="takes two paths: the model to read, the one to write")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-mib", type=float, default=300)
    parser.add_argument("--least-mb-s", type=float, default=200)
    parser.add_argument("--times", type=float, default=1.3)
    arguments = parser.parse_args()
    source = arguments.model.parent
    total = sum(path.stat().st_size for path in source.iterdir())
    copies, trips = [], []
    for _ in range(arguments.repeats):
        copies.append(to_disk(source, lambda out: ["cp", *source.iterdir(), out]))
        trips.append(to_disk(source, lambda out: [arguments.program, arguments.model, out / "model.onnx"]))
        print(f"cp {copies[-1].seconds:.1f} s, round trip {trips[-1].seconds:.1f} s, load {os.getloadavg()[0]:.0f}", flush=True)
    seconds = min(trip.seconds for trip in trips)
    times = seconds / min(copy.seconds for copy in copies)
    peak, rate = max(trip.peak_mb for trip in trips), total / MB / seconds
    print(f"{rate:.0f} MB/s, {times:.2f} x cp, peak {peak:.0f} MB")
    if peak * MB > arguments.most_mib * 2**20:
        sys.exit(fail(f"the peak is above {arguments.most_mib:.0f} MiB"))
    if rate < arguments.least_mb_s and times > arguments.times:
        sys.exit(fail(f"below {arguments.least_mb_s:.0f} MB/s, and above {arguments.times} x cp"))


def to_disk(source: Path, command) -> Finished:
    """Runs the command that `command` makes for an output folder, until its files are on the disk."""
    with tempfile.TemporaryDirectory(prefix="round-trip-", dir=source.parent) as folder:
        out = Path(folder)
        os.sync()
        drop_from_page_cache(source)
        line = command(out)
        finished = run(line)
        require(line, finished)
        finished.seconds += run(["sync", *out.iterdir()]).seconds
    return finished


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return BAR_MISSED


if __name__ == "__main__":
    main()
