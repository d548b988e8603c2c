#!/usr/bin/env python3
"""Runs a command and says how long it took and how much memory it needed.

    python3 tools/bench/measure.py [--cold FOLDER] [--below-mb N] -- COMMAND ...

`--cold` drops a folder's files from the page cache first. Peak memory is VmHWM, pages of mapped files included; it is never less than
this program's own peak, some 17 MB. Exit code 3 when the peak is not below `--below-mb`, else the command's.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

MB = 1e6
BAR_MISSED = 3


@dataclass
class Finished:
    """A command that has ended."""

    code: int
    seconds: float
    peak_mb: float
    cpu_seconds: float
    stdout: str = ""
    stderr: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cold", type=Path, metavar="FOLDER", help="drop its files from the page cache first")
    parser.add_argument("--below-mb", type=float, metavar="N", help="fail unless the peak is below this")
    parser.add_argument("command", nargs="+", help="after --")
    arguments = parser.parse_args()
    if arguments.cold:
        drop_from_page_cache(arguments.cold)
    finished = wait(subprocess.Popen(arguments.command))
    print(f"{finished.seconds:.1f} s, CPU {finished.cpu_seconds:.1f} s, peak {finished.peak_mb:.0f} MB")
    if finished.code == 0 and arguments.below_mb is not None and finished.peak_mb >= arguments.below_mb:
        print(f"error: the peak is not below {arguments.below_mb:.0f} MB", file=sys.stderr)
        sys.exit(BAR_MISSED)
    sys.exit(finished.code)


def drop_from_page_cache(folder: Path) -> int:
    """Makes the next reader fetch every file from the disk; the bytes of all files."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total += path.stat().st_size
    return total


def run(command: list, env: dict | None = None, most_seconds: float | None = None) -> Finished:
    """Runs to the end, which the command is asked for after `most_seconds`, and keeps what it said."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        child = subprocess.Popen([str(part) for part in command], env=env, stdout=stdout, stderr=stderr)
        finished = wait(child) if most_seconds is None else wait_at_most(child, most_seconds)
        for file in (stdout, stderr):
            file.seek(0)
        finished.stdout, finished.stderr = stdout.read(), stderr.read()
        return finished


def checked(command: list, env: dict | None = None) -> Finished:
    """`run` for a command that must succeed."""
    finished = run(command, env)
    require(command, finished)
    return finished


def require(command: list, finished: Finished) -> None:
    if finished.code != 0:
        line = " ".join(str(part) for part in command)
        sys.exit(f"error: {line}\nended with {finished.code}:\n{finished.stderr}")


def wait_at_most(child: subprocess.Popen, seconds: float) -> Finished:
    """Asks the child to end after this time, and when this program is ended itself."""
    end = threading.Timer(seconds, child.terminate)
    end.start()
    try:
        return wait(child)
    except BaseException:
        child.terminate()
        child.wait()
        raise
    finally:
        end.cancel()


def wait(child: subprocess.Popen) -> Finished:
    started = time.monotonic()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.monotonic() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    return Finished(child.returncode, seconds, round(usage.ru_maxrss * 1024 / MB, 1), usage.ru_utime + usage.ru_stime)


if __name__ == "__main__":
    main()
