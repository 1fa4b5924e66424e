"""Hostile files, in processes of their own: ``python -m tests.kit.fuzz ptx --count 2500 --seed 1``.

What reads such a file may refuse it with the errors that it documents, or take it.  It may not
crash, take more than `SECONDS` of a core (or wait for `WAIT`) or `BYTES` more than the process had
at the start, nor raise anything else.  Input `i` of a seed is the same in every run (``--first i
--count 1``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.kit.paths import ROOT, without_torch

SECONDS = 10
WAIT = 600
"""Seconds by the clock, which count what others do on the machine."""
BYTES = 2 << 30
BATCH = 250
"""Inputs of one process."""
LONGEST = 10_000
"""Characters of a message, whatever is in the file; a deadlock lists the places of 64 warps."""
TARGETS = {  # a module with ERRORS, what it may raise, and attempt(rng, folder)
    "ptx": "tests.emulator.launching.hostile_ptx",
    "logs": "tests.building.hostile_logs",
    "checkpoints": "tests.checkpoints.hostile_checkpoints",
}


@dataclass
class Result:
    """How many inputs ended how, and what should not have happened, with its input's number."""

    ends: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)


def run(kind: str, *, seed: int = 0, first: int = 0, count: int) -> Result:
    """Try inputs `first` to `first + count`."""
    result, at, end = Result(), first, first + count
    while at < end:
        command = [sys.executable, "-m", "tests.kit.fuzz", kind, "--child", f"--seed={seed}"]
        command += [f"--first={at}", f"--count={min(BATCH, end - at)}"]
        env = without_torch() if kind == "logs" else None
        made = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        lines = [json.loads(line) for line in made.stdout.splitlines() if line.startswith("[")]
        for number, name, finding in lines:
            result.ends[name] += 1
            if finding:
                result.findings.append(f"{kind}, seed {seed}, input {number}: {finding}")
        at += len(lines)
        if made.returncode:
            assert "ready" in made.stdout, made.stderr
            why = signal.strsignal(-made.returncode) if made.returncode < 0 else "exit"
            result.ends["killed"] += 1
            tail = made.stderr[-2000:]
            result.findings.append(f"{kind}, seed {seed}, input {at}: killed ({why}) {tail}")
            at += 1
    return result


def addresses() -> int:
    """Bytes of addresses that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def child(kind: str, seed: int, first: int, count: int) -> None:
    """Try inputs in this process; one line of JSON for each."""
    target = import_module(TARGETS.get(kind, kind))
    with tempfile.TemporaryDirectory() as name:
        with_errors(target, random.Random(0), Path(name) / "warm")  # imports, threads, caches
        resource.setrlimit(resource.RLIMIT_AS, (addresses() + BYTES,) * 2)
        print("ready", flush=True)
        for number in range(first, first + count):
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # their signals end the process
            signal.setitimer(signal.ITIMER_REAL, WAIT)
            rng = random.Random(f"{kind} {seed} {number}")
            ended, finding = with_errors(target, rng, Path(name) / str(number))
            for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
                signal.setitimer(timer, 0)
            print(json.dumps([number, ended, finding]), flush=True)


def with_errors(target, rng: random.Random, folder: Path) -> tuple[str, str]:
    """Return how one input ended, and what is wrong with that."""
    folder.mkdir()
    try:
        return target.attempt(rng, folder), ""
    except target.ERRORS as error:
        text = str(error)
        long = f"a message of {len(text)} characters: {text[:200]}"
        return type(error).__name__, long if len(text) > LONGEST else ""
    except BaseException as error:
        return type(error).__name__, traceback.format_exc(limit=-6)


VALUES = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "{", "{}", "\0", "\ud800", "x" * 100_000, [], {}, [[]], {"x": 1}, [0] * 1000),
)


def changed_json(rng: random.Random, value: Any) -> Any:
    """Return a JSON value with one of the values inside of it changed."""
    parts: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, list):
        parts = list(enumerate(value))
    if not parts or rng.random() < 0.1:
        deep: Any = 1
        for _ in range(rng.choice([30, 300, 900])):
            deep = [deep]
        if isinstance(value, int) and rng.random() < 0.3:
            return value + rng.choice([-1, 1, 1000])
        return rng.choice([*VALUES, deep])
    key, part = rng.choice(parts)
    made = dict(value) if isinstance(value, dict) else list(value)
    kind = rng.random()
    if kind < 0.06:
        del made[key]
    elif kind < 0.1 and isinstance(made, list):
        made.insert(key, part)
    elif kind < 0.1:
        made[rng.choice(["", "x", "workload", "dtype", "\0"])] = part
    else:
        made[key] = changed_json(rng, part)
    return made


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return bytes with some of them changed, removed, doubled, or cut off."""
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(made) + 1)
        end = min(len(made), at + rng.choice([1, 2, 8, 100]))
        match rng.randrange(5):
            case 0:
                made[at:end] = rng.randbytes(end - at)
            case 1:
                del made[at:end]
            case 2:
                made[at:at] = made[at:end] * rng.choice([1, 100])
            case 3:
                made[at:at] = rng.choice([b"[", b"{", b'"', b"9", b"\0", b"\xff"]) * (
                    rng.choice([1, 500, 50_000])
                )
            case _:
                made[at:end] = bytes(b ^ 1 << rng.randrange(8) for b in made[at:end])
    return bytes(made[: rng.randrange(len(made) + 1)] if rng.random() < 0.1 else made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", help=f"{', '.join(TARGETS)}, or a module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--child", action="store_true", help="in this process")
    given = parser.parse_args()
    if given.child:
        child(given.kind, given.seed, given.first, given.count)
        sys.stdout.flush()
        os._exit(0)  # threads of libraries may hang at the end under the limit
    result = run(given.kind, seed=given.seed, first=given.first, count=given.count)
    print(*result.findings, sep="\n\n")
    print(f"{given.count} inputs of seed {given.seed}: {dict(result.ends)}")
    raise SystemExit(bool(result.findings))


if __name__ == "__main__":
    main()
