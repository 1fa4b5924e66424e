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
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm.s_tir.meta_schedule import tune_tasks
from tvm.s_tir.meta_schedule.database import MemoryDatabase, TuningRecord
from tvm.s_tir.meta_schedule.measure_callback import AddToDatabase, UpdateCostModel
from tvm.s_tir.meta_schedule.search_strategy import SearchStrategy

from blockscale.base import host
from blockscale.base.targets import kind
from blockscale.building.records import LogError, sentence
from blockscale.building.space import replay
from blockscale.building.store import Lock, Store, folder_of
from blockscale.specs import Spec
from blockscale.tuning.components.builder import WorkerBuilder
from blockscale.tuning.components.features import cost_model as make_model
from blockscale.tuning.components.pool import Job, Worker, Workers
from blockscale.tuning.components.runner import WorkerRunner
from blockscale.tuning.components.search import DecisionSearch
from blockscale.tuning.components.sketches import Sketches
from blockscale.tuning.fleet import Fleet
from blockscale.tuning.loop import BestBet, Context, Session, Turns
from blockscale.tuning.modelled import stands_in
from blockscale.tuning.progress import Display
from blockscale.tuning.site import Site
from blockscale.tuning.task import Task, modules_of

if TYPE_CHECKING:
    from blockscale.catalog import Workload

STRATEGIES = ("decisions", "evolutionary", "replay-trace")

_MODELLED = (
    "no GPU here runs code for {level}: candidates are built, and a model of a B200 ({model}) says "
    "what they take; nothing is measured"
)
_LEAST_S = 0.1
"""Of the shortest session."""
_GRACE_S = 1.0
"""How far past its deadline a session may finish what runs on the CPU."""
_TURNS = 3
"""Batches of a workload at once where building and measuring go on side by side."""
_PARENTS = 16
"""Best records of earlier sessions that TVM's own strategies start from."""
_NO_LIMIT = 1 << 30
"""Trials for TVM's loop, which counts those of a default schedule that is known, too."""


@dataclass
class TuneResult:
    """What a tuning session found.

    ``history`` has one dict per trial of this session: workload, trial, elapsed_s, us (infinite
    when it failed), best_us, failed, kind ("default", "recheck", "committed",
    "search"), error, date.
    ``best`` and ``default`` are microseconds by workload (infinite: nothing was measured that
    worked) and ``failed`` numbers of trials, over all sessions in the work folder; ``trials`` is
    how many this session made.  ``illegal`` counts the
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
    strategy: str = "decisions",
    cost_model: str = "xgb",
    tracker: str | None = None,
    key: str | None = None,
) -> TuneResult:
    """Tune for at most ``seconds`` and ``trials``, whichever ends first; return what was found.

    Args:
        specs, target, seconds, trials, work_dir: as `blockscale.tune` takes them; and workloads.
        trials_each: most trials of one workload, those of earlier sessions in ``work_dir`` counted.
        seed_logs: folders of logs whose best schedules are tried first.
        seed: of the search.
        progress: True shows a live table on a terminal or plain lines elsewhere; a function is
            called with each line of the history.
        workers: builds at a time; one per core when None.  Measurements run one at a time.
        timeouts: seconds that a candidate may build and run; then it is killed and has failed.
            Where the default schedule takes long, candidates may run longer (`Task.limit_s`).
        exporter: how candidates are built (`worker.build`); by the level when None.
        strategy: "decisions", or MetaSchedule's own "evolutionary" or "replay-trace".
        cost_model: "xgb" or "random".
        tracker: ``host:port`` of TVM's RPC tracker: the servers (`blockscale.tuning.fleet`) that
            have registered there under ``key`` measure, and not this machine.

    Raises:
        ValueError: an unknown name, a level that this machine lacks, a damaged log or work folder,
            seconds below 0.1, a key without a tracker.
        RuntimeError: another process is tuning in ``work_dir``, the machine has no such GPU, or no
            server is left.
        Interrupted: Ctrl-C.
    """
    level = _checked_level(target, tracker)
    if seconds is None and trials is None:
        raise ValueError("tune: seconds and trials are both None, so it would never end; set one")
    if seconds is not None and not seconds >= _LEAST_S:  # nor NaN
        raise ValueError(
            f"tune: seconds={seconds} is no time to measure in; give {_LEAST_S} or more, or None"
        )
    if key is not None and tracker is None:
        raise ValueError(
            f"tune: key={key!r} names servers of a tracker, and there is none; give its address as "
            "tracker, or leave key out"
        )
    ends, most, each = (math.inf if n is None else n for n in (seconds, trials, trials_each))
    started = time.monotonic()
    deadline = started + ends
    if strategy not in STRATEGIES:
        raise ValueError(f"tune: strategy={strategy!r} is none of {', '.join(STRATEGIES)}")
    chosen = _resolve(specs, level)
    work_dir, width = Path(work_dir), workers or os.cpu_count() or 1
    display = Display(ends, quiet=progress is not True)
    with ExitStack() as stack:
        stack.enter_context(Lock(work_dir, "tuning"))
        folder, log = work_dir.resolve() / ".session", work_dir / "workers.log"
        shutil.rmtree(folder, ignore_errors=True)  # that of a killed tuner
        folder.mkdir()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        site = (
            Site(level, stands_in(level, chosen)) if tracker is None else Fleet(level, tracker, key)
        )
        both = [Worker(log) for _ in range(width)], site.measurers(log)
        crew = Workers(*both, site.exclusive, say=display.say, folder=folder)
        stack.enter_context(crew)
        stack.callback(display.stop)
        _catch_interrupts(crew, stack)
        site.ask(crew)

        def report(task: Task, line: dict[str, Any]) -> None:
            display.trial(task, line)
            if callable(progress):
                progress(line)

        session = Session(crew, site, report, started, most, each, timeouts)
        unfit: dict[tuple[str, str], list[str]] = {}
        for task in _opened(chosen, level, work_dir, seed_logs, site.model, crew, unfit):
            session.tasks.append(task)
            if crew.over() or time.monotonic() >= deadline:
                break
        machine = site.describe(crew)  # also when the time is over: is there a GPU at all?
        if machine is not None and time.monotonic() >= deadline:
            raise RuntimeError(
                f"tune: level={level!r}: the time was over before what measures was ready; give it "
                "60 s"
            )
        if crew.failure is None:
            _say_unfit(unfit, display.say)
        crew.until = deadline + (_GRACE_S if site.exclusive else 0.0)
        if site.model is not None:
            display.say(_MODELLED.format(level=level, model=site.model))
        for task in session.tasks:
            task.store.measured_on(machine)
        told = (exporter or site.exporter, folder, timeouts[0], session.module)
        if session.tasks and not crew.over():
            display.start()
            _run(session, WorkerBuilder(crew, *told, ahead=True), strategy, cost_model, seed)
    result = TuneResult(
        history=session.history,
        best={task.tag: task.best_us for task in session.tasks},
        default={task.tag: task.default_us for task in session.tasks},
        failed={task.tag: task.failed for task in session.tasks},
        illegal={task.tag: task.illegal for task in session.tasks},
        trials=len(session.history),
        elapsed_s=session.elapsed(),
        model=site.model,
    )
    if isinstance(crew.failure, KeyboardInterrupt):
        raise Interrupted(result) from None
    if crew.failure is not None:
        raise crew.failure
    return result


def _run(session: Session, builder: Any, strategy: str, cost_model: str, seed: int) -> None:
    """Run MetaSchedule's loop over the session's tasks."""
    workers, exclusive = session.workers, session.site.exclusive
    width, decisions = len(workers.builders), strategy == STRATEGIES[0]
    known = MemoryDatabase()  # what the session finds is on disk before TVM's loop hears of it
    spaces: dict[str, Any] = {}
    contexts, turns = [], []
    for task in session.tasks:
        space = spaces[task.tag] = Sketches(task.workload, task.level, seed, eager=not decisions)
        if decisions:
            told = [(record.trace, record.us) for record in task.known]
            inner = DecisionSearch(space, seed, told, schedules=False)
        else:
            inner = SearchStrategy.create(strategy)
            entry = known.commit_workload(task.mod)
            sound = [r for r in task.known if math.isfinite(r.us)]
            for r in sorted(sound, key=lambda r: r.us)[:_PARENTS]:
                trace = replay(task.mod, r.trace).trace
                known.commit_tuning_record(TuningRecord(trace, entry, [*r.run_secs], task.target))
        for _ in range(1 if exclusive or not decisions else _TURNS):
            turns.append(Turns(task, inner, session, space))
            contexts.append(Context(task.mod, task.target, task.tag, space, turns[-1], seed))
    tune_tasks(
        tasks=contexts,
        task_weights=[1.0] * len(contexts),
        work_dir="",
        max_trials_global=_NO_LIMIT,
        num_trials_per_iter=2 * width if exclusive else max(4, width // 2),
        builder=builder,
        runner=WorkerRunner(workers, session.job, session.finish),
        database=known,
        cost_model=make_model(cost_model, spaces),
        measure_callbacks=[*([] if decisions else [AddToDatabase()]), UpdateCostModel()],
        task_scheduler=BestBet(session, turns, 0 if exclusive else 3 * width),
    )


def _catch_interrupts(workers: Workers, stack: ExitStack) -> None:
    """Let Ctrl-C end the session when what it does is whole; TVM's loop would lose the error.

    A second one comes through at once.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def stop(*_: Any) -> None:
        workers.abandon(KeyboardInterrupt())
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    stack.callback(signal.signal, signal.SIGINT, before)


def _checked_level(level: str | None, tracker: str | None) -> str:
    own = host.level()
    if level is None:
        return own
    if kind(level) == "cuda" or tracker is not None:  # what measures is asked
        return level
    if missing := host.lacking(level):
        raise ValueError(
            f"tune: level={level!r} needs the CPU features {', '.join(missing)}, which "
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


def _opened(
    chosen: Sequence[Workload],
    level: str,
    work_dir: Path,
    seed_logs: Sequence[Path | str],
    model: str | None,
    crew: Workers,
    unfit: dict[tuple[str, str], list[str]],
) -> Iterator[Task]:
    """Yield the tasks of ``chosen``, with what earlier sessions and logs know of them.

    Their modules are made by the crew.  An op that fails must not end the others' session:
    ``unfit`` gets the tags of what has no task, by kernel and reason.
    """
    from blockscale.building import logs

    stores: dict[str, Store] = {}
    say, jobs = crew.say, [Job(modules_of, (workload, level)) for workload in chosen]
    crew.to_build += jobs
    for workload, job in zip(chosen, jobs, strict=True):
        if not crew.wait(job.done):
            return
        assert job.answer is not None
        if job.answer.error is not None:
            unfit.setdefault((workload.spec.name, job.answer.error), []).append(workload.tag)
            continue
        try:
            if workload.op not in stores:
                folder = folder_of(work_dir, workload.op, level)
                stores[workload.op] = Store(folder, say, model)
            hits = [logs.find(workload, level, [d]) for d in seed_logs]
            seeds = [(hit.trace, hit.source) for hit in hits if hit]
            yield Task(workload, level, stores[workload.op], seeds, say, modules=job.answer.value)
        except LogError:
            raise
        except Exception as error:
            unfit.setdefault((workload.spec.name, sentence(error)), []).append(workload.tag)


def _say_unfit(unfit: dict[tuple[str, str], list[str]], say: Callable[[str], None]) -> None:
    """Say why workloads are not tuned: one sentence for those of a kernel and a reason."""
    for (name, why), tags in unfit.items():
        what = tags[0] if len(tags) == 1 else f"{name} ({len(tags)} workloads)"
        say(f"{what}: not tuned, since scheduling failed ({why})")
