"""The two JSON files of a MetaSchedule database, read and repaired without tvm.

`database_workload.json` holds one ``[hash, module]`` a line; `database_tuning_record.json` one
``[workload index, [trace, run_secs, target, args_info]]`` a line, where a trace is
``[instructions, [[instruction index, decision], ...]]``.
"""

from __future__ import annotations

import json
import logging
import lzma
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOGGER = logging.getLogger("blockscale")

WORKLOADS = "database_workload.json"
PACKED_WORKLOADS = f"{WORKLOADS}.xz"
"""The same file in committed logs: a workload is 0.3 MB of JSON, and 4 kB so."""

RECORDS = "database_tuning_record.json"
META = "meta.json"
MODELLED = "modelled-"
"""What the key of a record's target begins with that names the model, if one made its run time."""
MOST_BYTES = 1 << 28
"""Bytes that are read of a file, packed ones unpacked; the largest committed log has 2^24.3."""

MOST_LEVELS = 64
"""Of lists and objects inside of each other."""

FAILED_S = 1e10
"""Run time that MetaSchedule writes for a candidate that failed."""


class LogError(ValueError):
    """A tuning log that cannot be read; the message names the file, the line and the remedy."""


@dataclass(frozen=True)
class Record:
    """One line of `database_tuning_record.json`."""

    workload: int
    trace: list[Any]
    run_secs: tuple[float, ...]
    target: Any
    args_info: Any
    line: int

    @property
    def us(self) -> float:
        """Median run time in microseconds; infinite when the candidate failed."""
        return median_us(self.run_secs)

    @property
    def model(self) -> str | None:
        """The model that made the run time; None when it was measured."""
        keys = self.target.get("keys", ()) if isinstance(self.target, dict) else ()
        names = (str(key) for key in keys if str(key).startswith(MODELLED))
        return next((name.removeprefix(MODELLED) for name in names), None)

    @property
    def key(self) -> str:
        """Text that is equal for equal traces."""
        return trace_key(self.trace)

    def to_line(self, workload: int) -> str:
        """Return the record as a line of JSON that points to workload ``workload``."""
        body = [self.trace, list(self.run_secs), self.target, self.args_info]
        return json.dumps([workload, body], separators=(",", ":"))


def median_us(run_secs: tuple[float, ...] | list[float]) -> float:
    """Median of ``run_secs`` in microseconds; infinite for none, failed or not finite ones."""
    if not run_secs or any(not math.isfinite(s) or s >= FAILED_S or s <= 0 for s in run_secs):
        return math.inf
    return statistics.median(run_secs) * 1e6


def sentence(error: BaseException) -> str:
    """Return what ``error`` says on one line, with its type."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return (text if text.startswith(name) else f"{name}: {text}")[:300]


def canonical(value: Any, levels: int = MOST_LEVELS) -> Any:
    """Return ``value`` with index maps (JSON in a string), booleans and numbers in one spelling.

    TVM writes the probability 1.0 as 1.

    ValueError: such a string is no JSON, or lists lie deeper than ``levels``.
    """
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    if isinstance(value, str) and value.startswith("{"):
        return json.dumps(parse(value), separators=(",", ":"))
    if isinstance(value, list | dict) and not levels:
        raise ValueError(f"it nests deeper than {MOST_LEVELS} levels")
    if isinstance(value, list):
        return [canonical(item, levels - 1) for item in value]
    return value


def parse(text: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError: it is none."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def trace_key(trace: list[Any]) -> str:
    """Return text that is equal for equal traces."""
    return json.dumps(trace, separators=(",", ":"))


def _read(path: Path) -> bytes | None:
    """Return what a file holds, unpacked; None without one."""
    opened = lzma.open if path.suffix == ".xz" else open
    try:
        with opened(path, "rb") as file:
            data: bytes = file.read(MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise _damaged(path, f"is damaged ({sentence(error)})") from error
    if len(data) > MOST_BYTES:
        raise _damaged(path, f"holds more than {MOST_BYTES} bytes")
    return data


def _damaged(path: Path, what: str) -> LogError:
    return LogError(
        f"{path}: {what}; restore the folder from version control, or delete it and tune again"
    )


def _lines(path: Path, data: bytes, grows: bool) -> Iterator[tuple[int, Any]]:
    """Yield the lines and their numbers; ``grows``: a tuner adds lines, so the last may be torn."""
    lines = data.splitlines()
    torn = len(lines) if grows and not data.endswith(b"\n") else None
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            yield number, parse(raw)
        except ValueError as error:
            if number != torn:
                raise _broken(path, number, f"is not JSON ({error})") from error
            LOGGER.warning(
                "%s:%d: passed over: the last line is torn; the next 'blockscale tune' there "
                "drops it",
                path,
                number,
            )


def _broken(path: Path, number: int, what: str) -> LogError:
    return LogError(
        f"{path}:{number}: the line {what}; restore the folder from version control, "
        "or delete it and tune again"
    )


def read(folder: Path) -> tuple[list[tuple[str, str]], list[Record]]:
    """Return the workloads in ``folder``, ``(structural hash, module)``, and the records of these.

    Both files are of one moment, whoever replaces the folder or adds lines meanwhile.  A work
    folder has no records before its first trial has ended.

    Raises:
        LogError: names the file and line that is damaged, or the file that is missing.
    """
    while True:
        before = _entries(folder)
        found = _read(folder / RECORDS)  # first: a tuner adds a workload before its records
        packed = _read(folder / PACKED_WORKLOADS)
        grown = _read(folder / WORKLOADS) if packed is None else None
        if _entries(folder) == before:
            break
    workloads = grown if packed is None else packed
    if workloads is None and found is None:
        return [], []
    if workloads is None:
        raise _damaged(folder / WORKLOADS, f"the file is missing, as is {PACKED_WORKLOADS}")
    if found is None and packed is not None:
        raise _damaged(folder / RECORDS, "the file is missing")
    path = folder / (WORKLOADS if packed is None else PACKED_WORKLOADS)
    known = list(_workloads(path, workloads, packed is None))
    return known, list(_records(folder / RECORDS, found or b"", packed is None, len(known)))


def _entries(folder: Path) -> tuple[int, ...] | None:
    """Return numbers that change with the files that a folder has, but not with added lines."""
    try:
        stat = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns


def read_workloads(folder: Path) -> list[tuple[str, str]]:
    """Return the workloads that `read` finds."""
    return read(folder)[0]


def read_records(folder: Path) -> list[Record]:
    """Return the records that `read` finds."""
    return read(folder)[1]


def _workloads(path: Path, data: bytes, grows: bool) -> Iterator[tuple[str, str]]:
    for number, item in _lines(path, data, grows):
        match item:
            case [str() as digest, str() as module]:
                yield digest, module
            case _:
                raise _broken(path, number, "is not [hash, module]")


def _records(path: Path, data: bytes, grows: bool, known: int) -> Iterator[Record]:
    for number, item in _lines(path, data, grows):
        match item:
            case [
                int() as index,
                [[list(), list()] as trace, list() as secs, dict() | str() as target, args],
            ]:
                if not 0 <= index < known:
                    raise _broken(path, number, f"points to workload {index} of {known}")
                if not all(isinstance(s, int | float) for s in secs):
                    shown = repr(secs)[:80]
                    raise _broken(path, number, f"has run times {shown} that are not numbers")
                try:
                    trace, times = canonical(trace), tuple(map(float, secs))
                    dict(parse(target) if isinstance(target, str) else target)
                except (ValueError, TypeError, OverflowError) as error:
                    raise _broken(path, number, f"is no record ({sentence(error)})") from error
                yield Record(index, trace, times, target, args, number)
            case _:
                raise _broken(path, number, "is not [workload, [trace, times, target, arguments]]")


def read_meta(folder: Path) -> dict[str, Any]:
    """Return `meta.json` of ``folder``; LogError when it is missing or damaged."""
    path = folder / META
    try:
        meta = parse(path.read_text())
    except FileNotFoundError as error:
        raise LogError(
            f"{path}: the file is missing; a log without it cannot be trusted: restore the folder "
            "from version control, or delete it and tune again"
        ) from error
    except ValueError as error:
        raise _broken(path, getattr(error, "lineno", 1), f"is not JSON ({error})") from error
    match meta:
        case {"format": int(), "op": str(), "level": str(), "workloads": dict() as entries}:
            pass
        case _:
            raise _broken(path, 1, "has no format, op, level and table 'workloads'")
    for tag, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("workload"), str):
            raise _broken(path, 1, f"has an entry {tag[:80]!r} that names no workload")
    if not isinstance(meta.get("machine", {}), dict):
        raise _broken(path, 1, "has a machine that is no object")
    return meta


def repair_tail(folder: Path, say: Callable[[str], None]) -> None:
    """Drop the torn last line that a killed tuner left in a file of ``folder``.

    The file as found is kept beside it as ``<name>.torn``.  Damage elsewhere than in the last line
    is not a torn write and raises LogError.
    """
    for name in (WORKLOADS, RECORDS):
        path = folder / name
        if not path.exists():
            continue
        data = path.read_bytes()
        body, newline, last = data.rpartition(b"\n")
        if not last.strip():
            continue
        with suppress(ValueError, UnicodeDecodeError):
            parse(last)
            with path.open("ab") as file:  # whole line, only its newline is missing
                file.write(b"\n")
            continue
        path.with_name(f"{name}.torn").write_bytes(data)
        with path.open("r+b") as file:
            file.truncate(len(body) + len(newline))
        number = data.count(b"\n") + 1
        say(f"{path}:{number}: dropped a torn last line (the file as found: {name}.torn)")
