"""Keep the best records of work folders, or of other logs, as a log: small, and replaced whole."""

from __future__ import annotations

import ctypes
import fcntl
import json
import lzma
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockscale.building import logs, records
from blockscale.building.logs import Problem
from blockscale.building.records import LogError, Record, sentence
from blockscale.building.store import (
    Lock,
    folders,
    level_of,
    module_of,
    read_history,
    this_machine,
)

if TYPE_CHECKING:
    from blockscale.catalog import Workload

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass
class _Log:
    """A log folder in memory: module text and records by structural hash, meta by tag."""

    modules: dict[str, str] = field(default_factory=dict)
    records: dict[str, list[Record]] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=lambda: {"format": 1, "workloads": {}})

    @staticmethod
    def read(folder: Path) -> _Log:
        """Return what ``folder`` holds; an empty log when it does not exist."""
        log = _Log()
        if not folder.is_dir() or not any(folder.glob("*.json")):
            return log
        workloads, found = records.read(folder)
        log.modules = dict(workloads)
        for record in found:
            log.records.setdefault(workloads[record.workload][0], []).append(record)
        log.meta = records.read_meta(folder)
        return log

    def write(self, folder: Path) -> None:
        """Write the three files of the log into ``folder``."""
        used = [entry["workload"] for entry in self.meta["workloads"].values()]
        kept = {digest: i for i, digest in enumerate(dict.fromkeys(used))}
        lines = [json.dumps([d, self.modules[d]], separators=(",", ":")) for d in kept]
        text = "".join(f"{line}\n" for line in lines)
        (folder / records.PACKED_WORKLOADS).write_bytes(lzma.compress(text.encode()))
        lines = [r.to_line(i) for d, i in kept.items() for r in self.records.get(d, [])]
        (folder / records.RECORDS).write_text("".join(f"{line}\n" for line in lines))
        (folder / records.META).write_text(json.dumps(self.meta, indent=1) + "\n")


@dataclass(frozen=True)
class Change:
    """A workload whose best time in a log improved, and where the two times come from.

    ``place`` is its folder in the log; ``entry`` is that of meta.json, ``old`` what it was before.
    """

    place: str
    tag: str
    us: float
    entry: dict[str, Any]
    old: dict[str, Any] | None
    source: Path


Unfit = Callable[[str, dict[str, Any]], str | None]
"""Level, entry of meta.json -> why its records are not taken; None: they are."""


def commit(work_dir: Path | str, logs_dir: Path | str, top_k: int = 3) -> dict[str, float]:
    """Merge the best ``top_k`` valid records per workload of ``work_dir`` into ``logs_dir``.

    A folder of the log is replaced as a whole.  A record that is there is replaced only by a faster
    one; records whose workload has a new IR, or whose trace no longer applies, are dropped.
    Returns the workloads whose best time improved, with it in microseconds.

    Raises:
        LogError: a folder is damaged; nothing was written to it.
        RuntimeError: another process is tuning in ``work_dir``.
    """
    work_dir = Path(work_dir)
    if not work_dir.is_dir():
        raise ValueError(f"commit: {work_dir} is not a folder; name the work folder of a tuning")
    changes, _ = _commit(work_dir, Path(logs_dir), top_k, lambda level, entry: None)
    return {change.tag: change.us for change in changes}


def merge(
    sources: Sequence[Path | str],
    logs_dir: Path | str,
    make: Callable[[dict[str, Any]], Workload] | None = None,
    top_k: int = 3,
) -> tuple[list[Change], list[Problem]]:
    """`commit` what several machines have tuned, work folders or logs, into ``logs_dir``.

    Of a workload the fastest record wins.  Returns what improved, and what was passed over: entries
    whose kernel has another IR today, which would displace those that fit.

    Args:
        make: as for `logs.check`.

    Raises:
        ValueError: a source has no entry, or is ``logs_dir``; or a workload was measured on two
            GPUs of different names, whose times do not compare.  Nothing was written.
        LogError, RuntimeError: as `commit`.
    """
    from blockscale import catalog

    roots, out = [Path(source) for source in sources], Path(logs_dir)
    for root in roots:
        if not logs.entries(root):
            raise ValueError(
                f"merge: {root} has no entry; name a folder that holds <op>/cpu-<level>/meta.json"
            )
        if root.resolve() == out.resolve():
            raise ValueError(f"merge: {root} is the folder to write as well; name the others only")
    _check_gpus([out, *roots])
    make = make or catalog.logged
    changes: list[Change] = []
    passed: list[Problem] = []
    for root in roots:
        found, unfit = _commit(
            root, out, top_k, lambda level, entry: _changed_since(level, entry, make)
        )
        changes, passed = changes + found, passed + unfit
    last = {(change.place, change.tag): change for change in changes}
    first = {(change.place, change.tag): change.old for change in reversed(changes)}
    return [replace(change, old=first[key]) for key, change in last.items()], passed


def _check_gpus(roots: Sequence[Path]) -> None:
    known: dict[tuple[str, str], tuple[str, Path]] = {}
    for folder in (folder for root in roots for folder in folders(root)):
        meta = records.read_meta(folder)
        for tag, entry in meta["workloads"].items():
            name = entry.get("gpu") or meta.get("machine", {}).get("gpu")
            if name is None:  # a CPU of the folder's level, or a model
                continue
            place = f"{folder.parent.name}/{folder.name}"
            other, where = known.setdefault((place, tag), (name, folder))
            if other != name:
                raise ValueError(
                    f"merge: {tag} was measured on {other} in {where} and on {name} in {folder}, "
                    "whose times do not compare; merge each GPU's logs into a folder of its own"
                )


def _changed_since(
    level: str, entry: dict[str, Any], make: Callable[[dict[str, Any]], Workload]
) -> str | None:
    """Return why the records of an entry are not for today's kernels; None: they are."""
    try:
        digest = logs.workload_digest(make(entry).mod(level))
    except Exception as error:
        return f"names no kernel: {sentence(error)}"
    return None if digest == entry["workload"] else "its IR has changed; tune it again"


def _commit(
    work_dir: Path, logs_dir: Path, top_k: int, unfit: Unfit
) -> tuple[list[Change], list[Problem]]:
    """Return what improved, and what was passed over; see `commit`."""
    changes: list[Change] = []
    passed: list[Problem] = []
    with _held(work_dir), _turn(logs_dir):
        _remove_fresh(logs_dir)
        for source in folders(work_dir):
            if not _packed(source):
                records.repair_tail(source, records.LOGGER.warning)
            target = logs_dir / source.parent.name / source.name
            log = _Log.read(target)
            found = _merge(log, source, top_k, unfit, passed)
            if found is not None:
                _replace(target, log)
                changes += found
    return changes, passed


def _packed(folder: Path) -> bool:
    """Return whether ``folder`` is one of a log, to which no tuner adds lines."""
    return (folder / records.PACKED_WORKLOADS).exists()


def _held(root: Path) -> AbstractContextManager[Any]:
    """Keep tuners out of a work folder; a log, which is replaced as a whole, gets no lock."""
    found = folders(root)
    return nullcontext() if found and all(map(_packed, found)) else Lock(root, "tuning")


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Wait until no other process commits to ``folder``; leaves no file in it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_fresh(logs_dir: Path) -> None:
    """Remove what was left of `_replace` by processes that were killed: nobody else has a turn."""
    for path in logs_dir.glob("*/.*.*"):
        if path.suffix[1:].isdecimal() and level_of(Path(path.stem[1:])) is not None:
            shutil.rmtree(path, ignore_errors=True)


def _merge(
    log: _Log, source: Path, top_k: int, unfit: Unfit, passed: list[Problem]
) -> list[Change] | None:
    """Take the records of ``source`` into ``log``; add to ``passed`` what is not taken.

    Returns the best times that improved; None: the log need not be written.
    """
    from blockscale.building.space import replays

    work = _Log.read(source)
    history = read_history(source)
    healed = False
    better: list[Change] = []
    log.meta.update({k: work.meta[k] for k in ("format", "op", "level")})
    for tag, entry in work.meta["workloads"].items():
        digest = entry["workload"]
        if why := unfit(work.meta["level"], entry):
            passed.append(Problem(str(source / records.META), f"{tag[:80]!r} passed over: {why}"))
            continue
        new = [r for r in work.records.get(digest, []) if math.isfinite(r.us)]
        old_entry = log.meta["workloads"].get(tag)
        stale = old_entry is not None and old_entry["workload"] != digest
        known = [] if stale else log.records.get(digest, [])
        if digest not in work.modules:
            raise LogError(
                f"{source / records.META}: {tag[:80]!r} names a workload that the database lacks; "
                "delete the folder and tune again"
            )
        mod = module_of(digest, work.modules[digest])
        old = [r for r in known if replays(mod, r.trace)]
        merged = _best(mod, old + new, top_k)
        if not merged or merged == known:
            continue
        best, model = merged[0].us, merged[0].model
        before = min((r.us for r in old if r.model == model), default=math.inf)
        log.modules[digest] = work.modules[digest]
        log.records[digest] = merged
        healed |= len(old) < len(known)
        if best < before:
            about = _times(model, best=best)  # of a log, which says where they come from
            if not _packed(source):
                own = (line for line in history if line["workload"] == tag)
                lines = [line for line in own if line.get("model") == model]
                about = _summary(merged[0], lines, work.meta)
            now = log.meta["workloads"][tag] = entry | about
            place = f"{source.parent.name}/{source.name}"
            better.append(Change(place, tag, best, now, old_entry, source.parents[1]))
        elif tag in log.meta["workloads"]:  # a broken record may have been the best
            log.meta["workloads"][tag] |= _times(model, best=best)
    log.meta["workloads"] = dict(sorted(log.meta["workloads"].items()))
    return better if healed or better else None


def _best(mod: Any, found: list[Record], top_k: int) -> list[Record]:
    """Return the fastest ``top_k`` records that apply to ``mod``, one per trace.

    Times of different origin do not compare: measured ones count, else those of the last model.
    """
    from blockscale.building.space import replays

    models = {record.model: None for record in found}
    kept = None if None in models else next(reversed(models), None)
    by_trace: dict[str, Record] = {}
    for record in (r for r in found if r.model == kept):
        known = by_trace.get(record.key)
        if known is None or record.us < known.us:
            by_trace[record.key] = record
    applying = (r for r in sorted(by_trace.values(), key=lambda r: r.us) if replays(mod, r.trace))
    return list(islice(applying, top_k))


def _summary(best: Record, history: list[dict[str, Any]], meta: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of `meta.json` about where a workload's best time comes from.

    The machine is this one, unless the work folder, which travels, names the one that measured.
    """
    defaults = [
        h["us"] for h in history if h["kind"] in ("default", "recheck") and h["us"] is not None
    ]
    machine = meta.get("machine") or this_machine()
    if best.model is not None:
        machine = machine | {"modelled": True, "model": best.model}
    return {
        **_times(best.model, best=best.us, default=min(defaults) if defaults else None),
        "trials": len(history),
        "failed": sum(h["failed"] for h in history),
        "target": best.target,
        **machine,
        "date": max((h["date"][:10] for h in history if "date" in h), default=_today()),
    }


def _times(model: str | None, **us: float | None) -> dict[str, float | None]:
    """Return microseconds under names that say whether they were measured."""
    end = "us" if model is None else "modelled_us"
    return {f"{name}_{end}": None if v is None else round(v, 3) for name, v in us.items()}


def _today() -> str:
    return time.strftime("%Y-%m-%d")


def _replace(folder: Path, log: _Log) -> None:
    """Put ``log`` in the place of ``folder``: a reader, or a crash, sees the old or the new log."""
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        log.write(fresh)
        if not folder.exists():
            fresh.rename(folder)
        elif not _exchange(fresh, folder):  # a file system without it: file by file
            for name in (records.PACKED_WORKLOADS, records.RECORDS, records.META):
                os.replace(fresh / name, folder / name)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step (Linux); False where the system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    done = call(_AT_FDCWD, bytes(first), _AT_FDCWD, bytes(second), _RENAME_EXCHANGE)
    return bool(done == 0)
