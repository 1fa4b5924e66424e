"""Look up the schedule that won: ``<dir>/<op>/<level>/`` -> the best trace for a workload.

A level is a CPU's vector width (folder ``cpu-<level>``) or a GPU architecture (``sm_90a``); a log
serves every machine of the level.  MetaSchedule's own query ignores the target, so the
folder chooses the level and each record's target is compared here.  A log misses silently when the
IR of an op changes, and a record whose trace no longer applies is passed over with a warning;
`check` finds both, without running anything.  Importing this module does not import tvm.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockscale.base.targets import is_gpu, same_width
from blockscale.building import records
from blockscale.building.records import LogError, Record, sentence
from blockscale.building.store import folder_of, folders, level_of, target_key

if TYPE_CHECKING:
    from blockscale.catalog import Workload

__all__ = ["LogError", "LogHit", "Problem", "check", "committed", "entries", "find"]

LOGGER = logging.getLogger("blockscale")


def committed() -> Path:
    """Return the folder of the tuning logs that come with the package."""
    from blockscale import tuning_logs

    return Path(next(iter(tuning_logs.__path__)))


@dataclass(frozen=True)
class LogHit:
    """The best record of a workload: its trace, median microseconds, and the file and line.

    ``model`` names the model that the time comes from; None: it was measured.
    """

    trace: Any
    us: float
    source: str
    model: str | None = None


@dataclass(frozen=True)
class Problem:
    """What is wrong with a log, and where."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class _Folder:
    """The log of one op at one level, read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        workloads, self.records = records.read(path)
        self.digests = [digest for digest, _ in workloads]
        self._by_digest: dict[str, list[Record]] = {digest: [] for digest in self.digests}
        for record in self.records:
            self._by_digest[self.digests[record.workload]].append(record)

    def of(self, mod: Any) -> list[Record]:
        """Return the records of the workload that is structurally equal to ``mod``."""
        digest = workload_digest(mod)
        number = next((i for i, d in enumerate(self.digests) if d == digest), None)
        if number is None:
            return []
        return self._by_digest[digest]

    def source(self, record: Record) -> str:
        """Return file and line of ``record``."""
        return f"{self.path / records.RECORDS}:{record.line}"


@lru_cache(maxsize=64)
def _read(path: str, _stamp: tuple[int, ...]) -> _Folder:
    return _Folder(Path(path))


def _folder(path: Path) -> _Folder | None:
    """Return the log in ``path``, kept in memory until its files change; None without one."""
    stamps: list[int] = []
    for name in (records.PACKED_WORKLOADS, records.WORKLOADS, records.RECORDS):
        try:
            stat = (path / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            stamps += [0, 0, 0]
            continue
        stamps += [stat.st_mtime_ns, stat.st_size, stat.st_ino]
    return _read(str(path), tuple(stamps)) if any(stamps) else None


def workload_digest(mod: Any) -> str:
    """Return MetaSchedule's structural hash of ``mod``, as written in its database."""
    import tvm_ffi

    return str(tvm_ffi.structural_hash(mod))


def find(workload: Workload, level: str, dirs: Sequence[Path | str]) -> LogHit | None:
    """Return the best record of ``workload`` that applies, in the first of ``dirs`` with one.

    Records tuned at ``level`` come first, on a CPU then those of the other levels of its vector
    width: a trace matches only if the function is the same.  Put a work folder before the committed
    logs: its times come from this machine.  In a folder measured records come before modelled ones.

    Raises:
        LogError: a log is damaged; the message names file and line.
    """
    made = cache(lambda: workload.mod(level))  # of 30 ms, for folders that have any log of the op
    for root in dirs:
        for logged in (level,) if is_gpu(level) else same_width(level):
            hit = _find_in(Path(root), workload, made, logged)
            if hit is not None:
                return hit
    return None


def _find_in(root: Path, workload: Workload, made: Callable[[], Any], logged: str) -> LogHit | None:
    """Return the best record in ``root`` that was tuned at level ``logged`` and applies.

    ``made`` returns the workload's function.
    """
    from blockscale.building.space import replay

    folder = _folder(folder_of(root, workload.op, logged))
    if folder is None:
        return None
    wanted = target_key(workload.target(logged).export())
    mod = made()
    fitting = [r for r in folder.of(mod) if math.isfinite(r.us) and target_key(r.target) == wanted]
    for record in sorted(fitting, key=lambda r: (r.model is not None, r.us)):
        try:
            trace = replay(mod, record.trace).trace
        except Exception as error:
            LOGGER.warning(
                "%s: passed over: the trace does not apply to %s (%s); tune it again",
                folder.source(record),
                workload.tag,
                sentence(error),
            )
            continue
        return LogHit(trace, record.us, folder.source(record), record.model)
    return None


def entries(root: Path | str) -> int:
    """Return how many workloads the logs in ``root`` name; what cannot be read counts nothing."""
    count = 0
    for folder in folders(Path(root)):
        try:
            count += len(records.read_meta(folder)["workloads"])
        except LogError:
            continue
    return count


def check(
    dirs: Sequence[Path | str], make: Callable[[dict[str, Any]], Workload] | None = None
) -> list[Problem]:
    """Return everything that is wrong with the logs in ``dirs``; nothing is built or run.

    Every entry must parse, be named in `meta.json`, match the IR that its spec has today, be of the
    level's target, have finite times, and replay; every folder must have an entry.

    Args:
        dirs: folders with ``<op>/cpu-<level>/`` or ``<op>/sm_<number>/`` in them.
        make: turns an entry of `meta.json` into its workload; the catalogue's when None.
    """
    from blockscale import catalog

    found: list[Problem] = []
    for root in map(Path, dirs):
        if not root.is_dir():
            found.append(Problem(str(root), "is not a folder; name the folder of the logs"))
            continue
        before = len(found)
        for path in sorted({p.parent for p in root.glob("*/*/*.json")}):
            try:
                found += _check_folder(path, make or catalog.logged)
            except LogError as error:
                where, _, what = str(error).partition(": ")
                found.append(Problem(where, what))
        if len(found) == before and not entries(root):
            what = "has no entry; name a folder that holds <op>/cpu-<level>/meta.json"
            found.append(Problem(str(root), what))
    return found


def _check_folder(path: Path, make: Callable[[dict[str, Any]], Workload]) -> Iterator[Problem]:
    level = level_of(path)
    if level is None:
        return
    meta = records.read_meta(path)
    folder = _folder(path)
    if folder is None:
        yield Problem(str(path), "has a meta.json but no database; tune again")
        return
    begun = not (path / records.PACKED_WORKLOADS).exists()  # a tuner may go on in a work folder
    used: set[str] = set()
    owners: dict[str, str] = {}
    for tag, entry in meta["workloads"].items():
        owner = owners.setdefault(entry.get("workload", ""), tag)
        if owner != tag:
            what = f"'{owner}' and '{tag}' are the same TensorIR, so their times mix"
            yield Problem(f"{path / records.META}", f"{what}; tell them apart by an attribute")
        try:
            workload = make(entry)
            mod = workload.mod(level)
            target = target_key(workload.target(level).export())
        except Exception as error:
            yield Problem(f"{path / records.META}", f"'{tag}' names no kernel: {error}")
            continue
        used.add(entry.get("workload", ""))
        if workload.tag != tag:
            yield Problem(f"{path / records.META}", f"'{tag}' describes {workload.tag}")
        hits = folder.of(mod)
        known = workload_digest(mod) in folder.digests
        if not hits and not (known and begun):
            why = "it has none" if known else "its IR has changed"
            yield Problem(f"{path}", f"no record hits '{tag}': {why}; tune it again")
        for record in hits:
            yield from _check_record(folder, record, workload, level, mod, target)
            if (record.model is not None) != bool(entry.get("modelled")):
                what = "disagrees with meta.json on whether its time is modelled; commit again"
                yield Problem(folder.source(record), f"{tag}: {what}")
    for record in folder.records:
        if folder.digests[record.workload] not in used:
            yield Problem(
                folder.source(record), "belongs to no workload of meta.json; commit again"
            )


def _check_record(
    folder: _Folder, record: Record, workload: Workload, level: str, mod: Any, target: str
) -> Iterator[Problem]:
    from blockscale.building.space import replay

    tag = workload.tag
    where = folder.source(record)
    if not math.isfinite(record.us):
        yield Problem(where, f"{tag}: run times {list(record.run_secs)} are not valid; remove it")
    if target_key(record.target) != target:
        yield Problem(where, f"{tag}: is for target {target_key(record.target)}, not {target}")
    try:
        replay(mod, record.trace)
    except Exception as error:
        yield Problem(where, f"{tag}: the trace does not replay ({sentence(error)}); tune it again")
