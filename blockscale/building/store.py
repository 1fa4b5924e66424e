"""What a tuner has on disk: a folder per op and level, with a MetaSchedule database in it.

Every finished trial is one appended line, so killing the tuner at any moment loses at most the
trial that was running.  `meta.json` says which workload of the database is which of ours;
`history.jsonl` says when each trial was made and why it failed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockscale.base import files, host
from blockscale.base.targets import is_gpu, log_folder
from blockscale.building import records
from blockscale.building.records import LogError

if TYPE_CHECKING:
    from blockscale.catalog import Workload

HISTORY = "history.jsonl"

_CPU = "cpu-"


def with_model(target: Any, model: str | None) -> Any:
    """Return ``target`` naming the model that makes run times, in a key that changes no code."""
    if model is None:
        return target
    from tvm.target import Target

    data = dict(target.export())
    return Target(data | {"keys": [*map(str, data["keys"]), f"{records.MODELLED}{model}"]})


def target_key(target: Any) -> str:
    """Return text that is equal for targets that run the same code.

    Left out: the number of cores (the log serves any machine of the level), names and keys.
    """
    data = json.loads(target) if isinstance(target, str) else dict(target)
    kept = {k: data[k] for k in ("kind", "arch", "mcpu", "mattr", "opt-level") if data.get(k)}
    if isinstance(kept.get("mattr"), Sequence) and not isinstance(kept["mattr"], str):
        kept["mattr"] = sorted(map(str, kept["mattr"]))
    return json.dumps(kept, sort_keys=True)


def module_of(digest: str, text: str) -> Any:
    """Return the module of a workload as a database has it; LogError: it is none."""
    from tvm.s_tir.meta_schedule import database

    try:
        return database.Workload.from_json([digest, text]).mod
    except Exception as error:
        raise LogError(
            f"workload {digest[:40]} is no module ({records.sentence(error)}); restore the log "
            "from version control, or delete it and tune again"
        ) from error


def folder_of(root: Path, op: str, level: str) -> Path:
    """Return ``root/<op>/cpu-<level>``, or ``root/<op>/sm_90a`` for a GPU."""
    return root / op / log_folder(level)


def level_of(folder: Path) -> str | None:
    """Return the level whose folder this is; None for a folder of something else."""
    if folder.name.startswith(_CPU):
        return folder.name.removeprefix(_CPU)
    return folder.name if is_gpu(folder.name) else None


def folders(root: Path) -> list[Path]:
    """Return the folders in ``root`` that hold a `meta.json`, one per op and level."""
    found = (path.parent for path in root.glob(f"*/*/{records.META}"))
    return sorted(path for path in found if level_of(path) is not None)


class Lock:
    """Exclusive use of a folder by one process, given up by the system even after ``kill -9``."""

    def __init__(self, folder: Path, doing: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ".lock"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(self._file, 64).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise RuntimeError(
                f"{folder}: process {owner} is {doing} here; only one may: wait for it, stop it, "
                "or use another folder"
            ) from error
        except OSError as error:
            os.close(self._file)
            raise RuntimeError(
                f"{folder}: the folder cannot be locked ({error.strerror}); use one on a file "
                "system with locks, such as a local disk"
            ) from error
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            os.close(self._file)


class _Lines:
    """A file of a database: TVM adds lines to one in memory, ``name``, and `save` to that on disk.

    TVM says nothing of a disk that is full, and its next line would follow half a one.
    """

    def __init__(self, path: Path, known: bytes = b"") -> None:
        """Let TVM read ``known``, until the first `take`."""
        self._path, self._memory = path, os.memfd_create(path.name)
        weakref.finalize(self, os.close, self._memory)
        self.name = f"/proc/self/fd/{self._memory}"
        Path(self.name).write_bytes(known)

    def take(self) -> bytes:
        """Return what is in memory, and empty it."""
        data = Path(self.name).read_bytes()
        os.ftruncate(self._memory, 0)
        return data

    def save(self) -> bool:
        """Append what TVM has added; return whether there is something."""
        data = self.take()
        _append(self._path, data)
        return bool(data)


def _append(path: Path, lines: bytes) -> None:
    try:
        if lines and not lines.endswith(b"\n"):  # no memory for all of it
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        files.append(path, lines)
    except OSError as error:
        raise RuntimeError(
            f"{path}: a line cannot be added ({error.strerror}), and no part of it is there; make "
            "room, and tune again: trials before it are kept"
        ) from error


class Store:
    """The records of one op at one level, in a tuner's work folder (which it has locked)."""

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None],
        model: str | None = None,
    ) -> None:
        """Open ``folder``: of its records those count that ``model`` made, or measured ones."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.model, self._say = folder, model, say
        records.repair_tail(folder, say)
        found, self._known = self._read()
        self._digests = [digest for digest, _ in found]
        path = folder / records.WORKLOADS
        self._workloads = _Lines(path, path.read_bytes() if found else b"")
        self._records = _Lines(folder / records.RECORDS)
        self.database = self._adding()
        with suppress(FileNotFoundError):
            self._cut_history()

    def _adding(self) -> Any:
        """Return a database that has read the workloads, and none of the records.

        TVM's would apply all of them, in several threads, to modules that they share.  Schedules
        change some statements in place (`unshared`): a folder with two records of a norm or of
        Edge-LLM's passes for a GPU did not open, or the process crashed.
        """
        from tvm.s_tir.meta_schedule.database import JSONDatabase

        try:
            made = JSONDatabase(self._workloads.name, self._records.name)
        except Exception as error:  # of a damaged workload
            raise LogError(
                f"{self.folder}: no database opens it ({records.sentence(error)}); delete the "
                "folder and tune again"
            ) from error
        self._workloads.take()
        return made

    def _read(self) -> tuple[list[tuple[str, str]], list[records.Record]]:
        if (self.folder / records.PACKED_WORKLOADS).exists():
            raise LogError(
                f"{self.folder / records.PACKED_WORKLOADS}: is of committed logs, which a database "
                "does not go on with; tune in a work folder of its own"
            )
        return records.read(self.folder)

    def _set_aside(self) -> None:
        """Move the records that no longer apply to another file; those that failed stay."""
        from blockscale.building.space import replays

        path = self.folder / records.RECORDS
        mods = [module_of(*item) for item in records.read_workloads(self.folder)]
        kept, unfit = "", ""
        for record in self._known:
            line = record.to_line(record.workload) + "\n"
            if math.isinf(record.us) or replays(mods[record.workload], record.trace):
                kept += line
            else:
                unfit += line
        with path.with_name(f"{records.RECORDS}.unfit").open("a") as file:
            file.write(unfit)
        files.write(path, kept)
        count = unfit.count("\n")
        self._say(f"{path}: records that no longer apply: {count}; moved to {path.name}.unfit")
        self._known = records.read_records(self.folder)

    def _cut_history(self) -> None:
        """Drop a torn last line."""
        path = self.folder / HISTORY
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def open(
        self, workload: Workload, level: str, mod: Any = None
    ) -> tuple[Any, list[records.Record]]:
        """Return the database's entry of ``workload`` and the records that it has.

        ``mod`` is its module, which takes 0.1 s to make, if there is one.  Where the best record
        no longer applies, all such are set aside.
        """
        from blockscale.building.space import replays

        mod = mod or workload.mod(level)
        entry = self.database.commit_workload(mod)
        digest = str(entry.as_json()[0])
        if self._workloads.save():
            self._digests.append(digest)
        if digest not in self._digests:  # tvm compares modules, and has found this one
            raise LogError(
                f"{self.folder / records.WORKLOADS}: has {workload.tag} under another hash than "
                f"{digest}, its own; delete the folder and tune again"
            )
        self._name(workload, level, digest)
        number = self._digests.index(digest)
        best = min(
            (r for r in self._known if r.workload == number), key=lambda r: r.us, default=None
        )
        if best is not None and not math.isinf(best.us) and not replays(mod, best.trace):
            self._set_aside()
        own = (r for r in self._known if r.workload == number)
        return entry, [r for r in own if r.model == self.model]

    def _name(self, workload: Workload, level: str, digest: str) -> None:
        """Enter in `meta.json` which workload of the database this is."""
        meta = self._meta()
        known = {**meta["workloads"], workload.tag: {"workload": digest, **workload.entry()}}
        self._write_meta(meta | {"op": workload.op, "level": level, "workloads": known})

    def measured_on(self, machine: dict[str, Any] | None) -> None:
        """Note the machine that measures from now on; None: this one's CPU.

        A folder may be committed on another machine, and then says where its times come from.
        """
        meta = self._meta()
        if machine is None and not is_gpu(meta["level"]):
            machine = meta.get("machine") or this_machine()
        if machine is not None:
            self._write_meta(meta | {"machine": machine})

    def _meta(self) -> dict[str, Any]:
        if (self.folder / records.META).exists():
            return records.read_meta(self.folder)
        return {"format": 1, "workloads": {}}

    def _write_meta(self, meta: dict[str, Any]) -> None:
        if meta != self._meta():
            files.write(self.folder / records.META, json.dumps(meta, indent=1) + "\n")

    def append(
        self, entry: Any, trace: Any, run_secs: Sequence[float], target: Any, line: dict[str, Any]
    ) -> None:
        """Add one finished trial to the database and ``line`` to the history.

        ``trace`` is TVM's, or JSON: of a candidate that failed, which to apply may crash or hang.
        """
        from tvm.s_tir.meta_schedule.database import TuningRecord

        from blockscale.building.space import new_schedule

        applied = new_schedule(entry.mod).trace if isinstance(trace, list) else trace
        arguments = argument_infos(entry.mod)
        times = list(run_secs) or [records.FAILED_S]
        self.database.commit_tuning_record(TuningRecord(applied, entry, times, target, arguments))
        data = self._records.take()
        if isinstance(trace, list):
            number, (_, *rest) = json.loads(data)
            data = json.dumps([number, [trace, *rest]]).encode() + b"\n"
        _append(self.folder / records.RECORDS, data)
        self.note(line)

    def note(self, line: dict[str, Any]) -> None:
        """Append ``line`` to the history alone (a trial without a trace)."""
        safe = {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in line.items()}
        _append(self.folder / HISTORY, json.dumps(safe).encode() + b"\n")


def this_machine() -> dict[str, Any]:
    """Return what logs say of this machine, whose CPU measures."""
    import tvm
    import tvm_ffi

    return {
        "cpu": host.cpu_model(),
        "cores": os.cpu_count(),
        "tvm": tvm.__version__,
        "tvm_ffi": tvm_ffi.__version__,
        "llvm": tvm.target.codegen.llvm_version_major(),
    }


def argument_infos(mod: Any) -> Any:
    """Return what MetaSchedule notes of the arguments; None with numbers or symbols among them.

    It knows tensors of known sizes only, and nothing reads the note.
    """
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.tirx import IntImm

    shapes = [getattr(param, "shape", None) for param in mod["main"].params]
    if not all(s is not None and all(isinstance(n, IntImm) for n in s) for s in shapes):
        return None
    return ArgInfo.from_entry_func(mod, False)


def _is_trial(line: Any) -> bool:
    match line:
        case {"workload": str(), "us": int() | float() | None, "kind": str(), "failed": bool()}:
            return isinstance(line.get("date", ""), str)
    return False


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the history of ``folder``; those that are none are left out."""
    found = []
    with suppress(FileNotFoundError):
        for line in (folder / HISTORY).read_text(errors="replace").splitlines():
            with suppress(ValueError):
                made = records.parse(line)
                if _is_trial(made):
                    found.append(made)
    return found
