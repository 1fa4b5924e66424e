"""What else MetaSchedule's loop asks for: whose turn it is, and what becomes of the results."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule import TuneContext, _ffi_api
from tvm.s_tir.meta_schedule.database import PyDatabase
from tvm.s_tir.meta_schedule.logging import get_logging_func
from tvm.s_tir.meta_schedule.measure_callback import PyMeasureCallback
from tvm.s_tir.meta_schedule.task_scheduler import PyTaskScheduler

from blockscale.tuning.session import Session
from blockscale.tuning.task import Task
from blockscale.tuning.worker import Measurement

_POLL_S = 0.01

_QUIET = logging.getLogger("blockscale.tuning")
_QUIET.addHandler(logging.NullHandler())
_QUIET.propagate = False


class Context(TuneContext):
    """A `TuneContext`; the class of TVM registers all of its own intrinsics first, for 20 s."""

    def __init__(self, task: Task, space: Any, strategy: Any, seed: int) -> None:
        quiet = get_logging_func(_QUIET)
        told = (task.mod, task.target, space, strategy, task.tag, 1, seed + 1, quiet)
        self.__init_handle_by_constructor__(_ffi_api.TuneContext, *told)
        _ffi_api.TuneContextInitialize(self)


@derived_object
class BestBet(PyTaskScheduler):
    """Default schedules of every task first, then the task that promises most.

    Args:
        session: whose limits end the loop.
        turns: the strategies (`task.Turns`) of the contexts, in their order.
        ahead: most trials on their way at once; 0: those of one batch.
    """

    def __init__(self, session: Session, turns: Sequence[Any], ahead: int) -> None:
        self._session, self._turns, self._ahead = session, turns, ahead

    def next_task_id(self) -> int:
        """Return which context is next; -1: the session is over, and what runs is joined."""
        loop, workers = self._outer(), self._session.workers
        while not workers.over():
            for number, turn in enumerate(self._turns):
                if turn.flying:
                    loop.touch_task(number)
            flying = [i for i, turn in enumerate(self._turns) if turn.flying]
            under_way = sum(len(self._turns[i].flying) for i in flying)
            found = self._next() if not flying or under_way < self._ahead else None
            if found is not None:
                loop.touch_task(found)  # its last batch may have been empty
                return found
            if not flying:
                break
            records = [loop.tasks_[i] for i in flying]
            if not workers.wait(partial(_any_ended, records)):
                time.sleep(_POLL_S)  # another's runner, which has its own processes
        return -1

    def _next(self) -> int | None:
        """Return the context of the best bet; None if none may have a trial now."""
        idle = [(i, turn.task) for i, turn in enumerate(self._turns) if not turn.flying]
        for number, task in idle:
            if task.fresh and task.trials < self._session.limits.each:
                return number
        ready = [(i, t) for i, t in idle if t.ready and not t.exhausted]
        open_ = [(i, t) for i, t in ready if self._session.room(t) > 0]
        return max(open_, key=lambda pair: pair[1].promise)[0] if open_ else None


def _any_ended(records: Sequence[Any]) -> bool:
    futures = (record.runner_futures for record in records)
    return any(f is not None and all(each.done() for each in f) for f in futures)


@derived_object
class Recorder(PyMeasureCallback):
    """Writes down what the runner has not written down: builds that failed, results of others."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def apply(self, scheduler: Any, task_id: int, candidates: Any, built: Any, ran: Any) -> None:
        """Finish the trials of a batch."""
        for candidate, build, run in zip(candidates, built, ran, strict=True):
            trial = self._session.trial_by(candidate)
            if trial is None:
                continue
            error = build.error_msg or run.error_msg
            times = tuple(float(s) for s in run.run_secs or ())
            self._session.end(trial, Measurement(times, error and str(error)))
            if build.artifact_path is not None:
                self._session.drop(str(build.artifact_path))


@derived_object
class Folders(PyDatabase):
    """The databases of all tasks, which have one (`Store`) for each op, as one."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    def _all(self) -> list[Any]:
        return list({id(t.store): t.store.database for t in self._tasks}.values())

    def _of(self, mod: Any) -> Any:
        return next((d for d in self._all() if d.has_workload(mod)), self._all()[0])

    def has_workload(self, mod: Any) -> bool:
        """Return whether the module of a workload is known."""
        return bool(self._of(mod).has_workload(mod))

    def commit_workload(self, mod: Any) -> Any:
        """Return the entry of a workload."""
        return self._of(mod).commit_workload(mod)

    def commit_tuning_record(self, record: Any) -> None:
        """Add a record to the database of its workload."""
        self._of(record.workload.mod).commit_tuning_record(record)

    def get_top_k(self, workload: Any, top_k: int) -> list[Any]:
        """Return the best records of a workload."""
        return list(self._of(workload.mod).get_top_k(workload, top_k))

    def get_all_tuning_records(self) -> list[Any]:
        """Return every record."""
        return [record for each in self._all() for record in each.get_all_tuning_records()]

    def __len__(self) -> int:
        """Return the number of records."""
        return sum(map(len, self._all()))
