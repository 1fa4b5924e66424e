"""Search for fast schedules of kernels on this machine, and keep the best of them as logs.

A trial is one schedule, built and measured in worker processes with the runtime that is shipped.
The first trial of a workload is its default schedule, the next one the log's, so the result is
never worse than either; what follows is proposed by a cost model over the decisions of MetaSchedule
traces.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockscale.base import host
from blockscale.base.targets import cpu, is_gpu, kind
from blockscale.building.store import Lock, Store, folder_of
from blockscale.specs import Spec
from blockscale.tuning.commit import commit
from blockscale.tuning.modelled import EXPORTER as MODELLED_EXPORTER
from blockscale.tuning.modelled import ModelledRunner, stands_in
from blockscale.tuning.pipeline import Pipeline
from blockscale.tuning.pool import Pool, Worker
from blockscale.tuning.progress import Display, Silent
from blockscale.tuning.session import Limits, Session
from blockscale.tuning.task import Task

if TYPE_CHECKING:
    from blockscale.catalog import Workload

__all__ = ["Interrupted", "TuneResult", "commit", "tune"]

EXPORTER = "blockscale.tuning.exporter:export_openmp"
GPU_EXPORTER = "blockscale.tuning.exporter:export_cuda"
"""``module:function (module, target, out)`` that a worker calls to build a candidate."""

_MODELLED = (
    "no GPU here runs code for {level}: candidates are built, and a model of a B200 ({model}) says "
    "what they take; nothing is measured"
)

_MEASUREMENTS = 5000
"""After so many the measuring process is replaced: candidates stay loaded in it."""


@dataclass
class TuneResult:
    """What a tuning session found.

    ``history`` has one dict per trial of this session: workload, trial, elapsed_s, us (infinite
    when it failed), best_us, failed, kind ("default", "recheck", "committed",
    "search"), error, date.
    ``best`` and ``default`` are microseconds by workload and ``failed`` numbers of trials, over all
    sessions in the work folder; ``trials`` is how many this session made.  ``illegal`` counts the
    points of each space that TensorIR refused to schedule in this session: they cost nothing and
    are no trials.  ``model`` names the model that all times come from, where no GPU measured them.
    """

    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, float] = field(default_factory=dict)
    default: dict[str, float] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    illegal: dict[str, int] = field(default_factory=dict)
    trials: int = 0
    elapsed_s: float = 0.0
    model: str | None = None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `tune`; ``result`` is what was found, all of it already on disk."""

    def __init__(self, result: TuneResult) -> None:
        super().__init__(f"tuning interrupted after {result.trials} trials; all are saved")
        self.result = result


def tune(
    specs: Iterable[Workload | Spec | str],
    *,
    target: str | None = None,
    seconds: float | None = 60.0,
    trials: int | None = None,
    trials_each: int | None = None,
    work_dir: Path | str = "logs",
    seed_logs: Sequence[Path | str] = (),
    seed: int = 0,
    progress: bool | Callable[[dict[str, Any]], None] = True,
    workers: int | None = None,
    timeouts: tuple[float, float] = (30.0, 10.0),
    exporter: str | None = None,
) -> TuneResult:
    """Tune for at most ``seconds`` and ``trials``, whichever ends first; return what was found.

    Args:
        specs: what to tune; a spec (or its name, or the name of an overload set) stands for all of
            its workloads.
        target: CPU vector level, or GPU architecture ("sm_90a"), to tune for; this machine's CPU
            when None.  The machine must have it, but tcgen05 GEMMs for sm_100a and sm_100f are
            ranked by a model of a B200 (`blockscale.tuning.modelled`) where there is none; their
            records and the result say so.
        seconds: time for everything, builds included; None for no limit.
        trials: number of new measurements over all workloads; None for no limit.
        trials_each: most trials of one workload, those of earlier sessions in ``work_dir`` counted.
        work_dir: where every trial is kept.  A second call with it goes on where the first ended,
            even when that was killed.  Give it to `blockscale.build` as one of its ``logs``.
        seed_logs: folders of logs whose best schedules are tried first.
        seed: of the search.
        progress: True shows a live table on a terminal or plain lines elsewhere; a function is
            called with each line of the history.
        workers: builds at a time; one per core when None.  Measurements run one at a time.
        timeouts: seconds that a candidate may build and run; then it is killed and has failed.
        exporter: how candidates are built, see `EXPORTER`; by the level when None.

    Raises:
        ValueError: an unknown name, a level that this machine lacks, a damaged log or work folder.
        RuntimeError: another process is tuning in ``work_dir``, or the machine has no such GPU.
        Interrupted: Ctrl-C.
    """
    level = _checked_level(target)
    limits = _limits(seconds, trials, trials_each, timeouts)
    chosen = _resolve(specs, level)
    flow = _flow(level, chosen)
    exporter = exporter or _exporter(flow)
    work_dir, width = Path(work_dir), workers or os.cpu_count() or 1
    display = Display(limits.left()) if progress is True else Silent()
    report = _reporter(display, progress)
    with ExitStack() as stack:
        stack.enter_context(Lock(work_dir, "tuning"))
        folder = stack.enter_context(_session_folder(work_dir))
        log = work_dir / "workers.log"
        tasks: list[Task] = []
        session = flow(tasks, limits, exporter, folder, report, display.say)
        machine: dict[str, Any] | None = None
        if isinstance(session, Pipeline):
            session.measurer = stack.enter_context(Worker(log, session.needs, _MEASUREMENTS))
        pool = stack.enter_context(Pool(width, log))
        stack.callback(display.stop)
        try:
            if isinstance(session, Pipeline):
                machine = session.describe(level)
            if session.model is not None:
                display.say(_MODELLED.format(level=level, model=session.model))
            say, model = display.say, session.model
            opener = _Opener(level, seed, work_dir, seed_logs, folder, say, machine, model)
            if isinstance(session, Pipeline):
                session.unopened, session.opener = iter(chosen), opener.open
            else:
                tasks += map(opener.open, chosen)
            display.start(tasks)
            session.run(pool, width)
        except KeyboardInterrupt:
            raise Interrupted(_result(session)) from None
    return _result(session)


def _flow(level: str, chosen: Sequence[Workload]) -> type[Session]:
    """Return the kind of session: on the CPU, with a GPU, or with a model of one."""
    if not is_gpu(level):
        return Session
    return ModelledRunner if stands_in(level, chosen) else Pipeline


def _exporter(flow: type[Session]) -> str:
    if issubclass(flow, ModelledRunner):
        return MODELLED_EXPORTER
    return GPU_EXPORTER if issubclass(flow, Pipeline) else EXPORTER


def _limits(
    seconds: float | None,
    trials: int | None,
    each: int | None,
    timeouts: tuple[float, float],
) -> Limits:
    if seconds is None and trials is None:
        raise ValueError("tune: seconds and trials are both None, so it would never end; set one")
    limit = math.inf if seconds is None else seconds
    each_limit = math.inf if each is None else each
    return Limits(time.monotonic() + limit, trials, *timeouts, each_limit)


@contextmanager
def _session_folder(work_dir: Path) -> Iterator[Path]:
    """Make a folder for candidates, and remove it, as well as one that a killed tuner left."""
    folder = work_dir.resolve() / ".session"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _result(session: Session) -> TuneResult:
    return TuneResult(
        history=session.history,
        best={task.tag: task.best_us for task in session.tasks},
        default={task.tag: task.default_us for task in session.tasks},
        failed={task.tag: task.failed for task in session.tasks},
        illegal={task.tag: task.illegal for task in session.tasks},
        trials=len(session.history),
        elapsed_s=session.elapsed(),
        model=session.model,
    )


def _reporter(
    display: Display | Silent, progress: bool | Callable[[dict[str, Any]], None]
) -> Callable[[Task, dict[str, Any]], None]:
    def report(task: Task, line: dict[str, Any]) -> None:
        display.trial(task, line)
        if callable(progress):
            progress(line)

    return report


def _checked_level(level: str | None) -> str:
    own = host.level()
    if level is None:
        return own
    if kind(level) == "cuda":  # the measuring process asks the driver
        return level
    missing = set(cpu(level).features) - host.features()
    if missing:
        raise ValueError(
            f"tune: level={level!r} needs the CPU features {', '.join(sorted(missing))}, which "
            f"this machine lacks; tune for level={own!r} here, or on another machine"
        )
    return level


def _resolve(items: Iterable[Workload | Spec | str], level: str) -> list[Workload]:
    """Return the workloads that ``items`` stand for, each once, in order."""
    found: dict[str, Workload] = {}
    for item in items:
        specs = Spec.parse_all(item) if isinstance(item, str) else [item]
        for spec in specs:
            if isinstance(spec, Spec):
                from blockscale.catalog import workloads

                found.update((w.tag, w) for w in workloads(spec, level))
            else:
                found[spec.tag] = spec
    if not found:
        raise ValueError("tune: no workloads given; name at least one kernel")
    return list(found.values())


@dataclass
class _Opener:
    """Makes tasks of workloads; the stores of a folder are opened once."""

    level: str
    seed: int
    work_dir: Path
    seed_logs: Sequence[Path | str]
    folder: Path
    say: Callable[[str], None]
    machine: dict[str, Any] | None
    model: str | None
    _stores: dict[str, Store] = field(default_factory=dict)

    def open(self, workload: Workload) -> Task:
        """Return the task, with what earlier sessions and logs know of it."""
        from blockscale.building import logs

        if workload.op not in self._stores:
            folder = folder_of(self.work_dir, workload.op, self.level)
            self._stores[workload.op] = Store(folder, self.say, self.machine, self.model)
        hits = [logs.find(workload, self.level, [d]) for d in self.seed_logs]
        seeds = [(hit.trace, hit.source) for hit in hits if hit]
        task = Task(workload, self.level, seeds, self.folder)
        task.open(self._stores[workload.op], self.seed)
        return task
