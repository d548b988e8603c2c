#!/usr/bin/env python3
"""Measures `viaduct pull` beside curl, from the same server to the same disk; fails when it takes too long or too much memory.

    python3 tools/bench/download.py [--viaduct FILE] [--hub-server FILE] [--mebibytes N] [--repeats N]

The server of the tests serves random bytes on this machine, once as one file and once as four. curl, curl into nothing and
the pull into an empty cache take turns, and medians count; what was written before is on the disk, and gone, when a run starts.

    server        curl into /dev/null: the most that server and connection give
    curl          curl into a file. It ends when the bytes are in the page cache: neither on the disk, nor checked
    curl, sync    the same until they are on the disk
    ... sha256    the same until they are hashed, too
    pull          the pull, which ends when they are checked and on the disk

Exit code 1 when the pull takes more than `--times` the time of curl alone, which brings several files at once, too, or when its peak
memory (VmHWM) is more than `--most-mib` above that of the pull of one small file. All on one machine: with fewer than four free cores
the server, the receiving and the hashing thread take turns. `out/bench-download.json` has every run.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measure import Finished, checked, require, wait

ROOT = Path(__file__).resolve().parents[2]
ID = "bench/download"
MIB = 2**20
SMALL = MIB
BLOCK = 16 * MIB
COLUMNS = {"server": "server", "curl": "curl", "sync": "curl, sync", "sha256": "... sha256", "pull": "pull"}


def main() -> None:
    arguments = parse_arguments()
    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    # What is served, what curl writes or the cache, and as much again for what the system has not freed yet.
    needed, free = 3 * arguments.mebibytes * MIB, shutil.disk_usage(out).free
    if free < needed:
        sys.exit(f"error: {out} has {free >> 20} MiB free, and {needed >> 20} are needed")
    # Beside the results and not in /tmp, which may lie in memory.
    with tempfile.TemporaryDirectory(prefix="bench-download-", dir=out) as work:
        report = measure_all(arguments, Path(work))
    print_table(report)
    (out / "bench-download.json").write_text(json.dumps(report, indent=1) + "\n")
    missed = bars_missed(report, arguments)
    for line in missed:
        print(f"error: {line}", file=sys.stderr)
    sys.exit(1 if missed else 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    release = ROOT / "target/release"
    parser.add_argument("--viaduct", type=Path, default=release / "viaduct", help="the program to measure")
    parser.add_argument("--hub-server", type=Path, default=release / "hub-server", help="the server of the tests")
    parser.add_argument("--mebibytes", type=int, default=1024, help="bytes of a repository (default 1024)")
    parser.add_argument("--repeats", type=int, default=5, help="runs, of which the median counts (default 5)")
    parser.add_argument("--times", type=float, default=1.2, help="the longest a pull may take, in times of curl's (default 1.2)")
    parser.add_argument("--most-mib", type=float, default=64, help="the most memory above a small pull's (default 64)")
    arguments = parser.parse_args()
    for program in (arguments.viaduct, arguments.hub_server):
        if not program.is_file():
            parser.error(f"{program} is missing; `make build build-hub-server` makes it")
    if not shutil.which("curl"):
        parser.error("curl is missing")
    return arguments


def measure_all(arguments: argparse.Namespace, work: Path) -> dict:
    small = make_repository(work / "small", 1, SMALL)
    with serving(arguments.hub_server, small) as endpoint:
        baseline = min(pull(arguments.viaduct, endpoint, work)[1] for _ in range(arguments.repeats))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "viaduct": checked([arguments.viaduct, "--version"]).stdout.strip(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "mebibytes": arguments.mebibytes,
        "baseline_mib": round(baseline, 1),
        "downloads": [measure(arguments, work, count) for count in (1, 4)],
    }


def measure(arguments: argparse.Namespace, work: Path, count: int) -> dict:
    """Rounds of all ways to bring a repository of so many files."""
    source = make_repository(work / f"of-{count}", count, arguments.mebibytes * MIB // count)
    runs: dict[str, list[float]] = {name: [] for name in COLUMNS}
    peaks = []
    with serving(arguments.hub_server, source) as endpoint:
        for turn in range(arguments.repeats):
            say(f"{count} files, turn {turn + 1} of {arguments.repeats}")
            runs["server"].append(fetch(endpoint, source, None))
            for name, seconds in curl_to_disk(endpoint, source, work).items():
                runs[name].append(seconds)
            finished, peak = pull(arguments.viaduct, endpoint, work)
            runs["pull"].append(finished.seconds)
            peaks.append(peak)
    shutil.rmtree(source)
    seconds = {name: round(statistics.median(times), 3) for name, times in runs.items()}
    return {
        "files": count,
        "seconds": seconds,
        "times_curl": round(seconds["pull"] / seconds["curl"], 2),
        "times_curl_sync": round(seconds["pull"] / seconds["sync"], 2),
        "peak_mib": round(max(peaks), 1),
        "runs": {name: [round(time, 3) for time in times] for name, times in runs.items()},
    }


def make_repository(folder: Path, count: int, size: int) -> Path:
    """Files of random bytes, which no compression shortens."""
    folder.mkdir()
    for i in range(count):
        with open(folder / f"{i}.bin", "wb") as file:
            for begin in range(0, size, BLOCK):
                file.write(os.urandom(min(BLOCK, size - begin)))
    return folder


@contextmanager
def serving(program: Path, folder: Path) -> Iterator[str]:
    """Serves a folder, which the server reads once before it answers: afterwards it is in the page cache."""
    server = subprocess.Popen([program, folder, "--id", ID], stdout=subprocess.PIPE, text=True)
    try:
        endpoint = server.stdout.readline().strip()
        if not endpoint:
            sys.exit(f"error: {program} does not start")
        yield endpoint
    finally:
        server.kill()
        server.wait()


def fetch(endpoint: str, source: Path, out: Path | None) -> float:
    """Seconds of curl for all files, at once if there are several."""
    command = ["curl", "--silent", "--show-error", "--fail", "--location", "--parallel"]
    for name in names(source):
        command += [f"{endpoint}/{ID}/resolve/main/{name}", "--output", str(out / name) if out else "/dev/null"]
    os.sync()
    return checked(command).seconds


def curl_to_disk(endpoint: str, source: Path, work: Path) -> dict[str, float]:
    """Seconds of curl alone, until all is on the disk, and until it is checked as well."""
    with tempfile.TemporaryDirectory(prefix="curl-", dir=work) as folder:
        files = [Path(folder) / name for name in names(source)]
        curl = fetch(endpoint, source, Path(folder))
        sync = curl + checked(["sync", *files]).seconds
        begin = time.monotonic()
        for path in files:
            with open(path, "rb") as file:
                hashlib.file_digest(file, "sha256")
        return {"curl": curl, "sync": sync, "sha256": sync + time.monotonic() - begin}


def pull(viaduct: Path, endpoint: str, work: Path) -> tuple[Finished, float]:
    """A pull into an empty cache, and its peak memory in MiB."""
    os.sync()
    with tempfile.TemporaryDirectory(prefix="cache-", dir=work) as cache:
        settings = {"HF_HOME": cache, "HF_HUB_CACHE": f"{cache}/hub", "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
        command = [str(viaduct), "pull", "--all", ID, "--progress", "none"]
        with tempfile.TemporaryFile("w+") as output:
            child = subprocess.Popen(command, env=os.environ | settings, stdout=output, stderr=output)
            peak = Peak(child.pid)
            finished = wait(child)
            output.seek(0)
            finished.stderr = output.read()
        require(command, finished)
        return finished, peak.mib()


class Peak(threading.Thread):
    """Looks at a process's VmHWM until it ends. What `wait` tells is never less than this program's own peak."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.status, self.kib = Path(f"/proc/{pid}/status"), 0
        self.start()

    def run(self) -> None:
        while (kib := self.look()) is not None:
            self.kib = max(self.kib, kib)
            time.sleep(0.005)

    def look(self) -> int | None:
        try:
            lines = self.status.read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)

    def mib(self) -> float:
        self.join()
        return self.kib / 1024


def names(source: Path) -> list[str]:
    return sorted(path.name for path in source.iterdir())


def bars_missed(report: dict, arguments: argparse.Namespace) -> list[str]:
    missed = []
    for row in report["downloads"]:
        above = row["peak_mib"] - report["baseline_mib"]
        if above > arguments.most_mib:
            missed.append(f"{row['files']} files: {above:.0f} MiB above a small pull; {arguments.most_mib:.0f} are allowed")
        if row["times_curl"] > arguments.times:
            missed.append(f"{row['files']} files: {row['times_curl']} times curl; {arguments.times} are allowed")
    return missed


def print_table(report: dict) -> None:
    print(
        f"{report['viaduct']}, {report['date']}, {report['cores']} cores, load {report['load']}; "
        f"{report['mebibytes']} MiB, peak of a small pull {report['baseline_mib']} MiB\n"
    )
    heads = [*COLUMNS.values(), "pull/curl", "/curl, sync", "above small"]
    print("files" + "".join(f"{head:>13}" for head in heads))
    for row in report["downloads"]:
        times = [f"{row['seconds'][name]:.2f} s" for name in COLUMNS]
        above = f"{row['peak_mib'] - report['baseline_mib']:.1f} MiB"
        cells = [*times, row["times_curl"], row["times_curl_sync"], above]
        print(f"{row['files']:>5}" + "".join(f"{cell:>13}" for cell in cells))


def say(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":
    main()
