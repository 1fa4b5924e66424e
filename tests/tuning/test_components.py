"""The loop is MetaSchedule's: each component of ours serves it, and gives way to TVM's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.builder import PyBuilder
from tvm.s_tir.meta_schedule.cost_model import PyCostModel, XGBModel
from tvm.s_tir.meta_schedule.feature_extractor import PyFeatureExtractor, RandomFeatureExtractor
from tvm.s_tir.meta_schedule.measure_callback import PyMeasureCallback
from tvm.s_tir.meta_schedule.runner import PyRunner
from tvm.s_tir.meta_schedule.search_strategy import PySearchStrategy
from tvm.s_tir.meta_schedule.space_generator import PySpaceGenerator, ScheduleFn

from blockscale.base import host
from blockscale.tuning.components import nursery, pool, search
from blockscale.tuning.components.builder import WorkerBuilder
from blockscale.tuning.components.features import (
    DecisionFeatures,
    PerTask,
    decision_model,
)
from blockscale.tuning.components.nursery import Nursery
from blockscale.tuning.components.runner import WorkerRunner
from blockscale.tuning.components.search import DecisionSearch
from blockscale.tuning.components.sketches import Sketches
from blockscale.tuning.loop import Context
from blockscale.tuning.worker import Measurement, Unscheduled, packed
from tests.kit.fake_workload import EXPORTER, FakeSpec, FakeWorkload
from tests.kit.paths import without_torch

LEVEL = host.level()
WORKLOAD = FakeWorkload(FakeSpec(), rows=4)
POINTS = 3 * 4
SPIES = {
    "space": (PySpaceGenerator, ["_initialize_with_tune_context", "generate_design_space"]),
    "strategy": (
        PySearchStrategy,
        ["_initialize_with_tune_context", "pre_tuning", "generate_measure_candidates"]
        + ["notify_runner_results", "post_tuning"],
    ),
    "extractor": (PyFeatureExtractor, ["extract_from"]),
    "cost_model": (PyCostModel, ["update", "predict"]),
    "builder": (PyBuilder, ["build"]),
    "runner": (PyRunner, ["run"]),
}


def spy(kind: str, inner, calls: list[str]):
    """Return a component that hands everything on to ``inner``, and says what was called."""
    base, names = SPIES[kind]

    def method(name):
        def call(self, *args):
            calls.append(name)
            return getattr(inner, name)(*args)

        return call

    own = {"__init__": lambda self: None, **{name: method(name) for name in names}}
    own |= {name: [] for name in ("sch_rules", "postprocs")} | {"mutator_probs": {}}
    return derived_object(type("Spy", (base,), own))()


@derived_object
class Count(PyMeasureCallback):
    def __init__(self):
        self.errors: list[str | None] = []

    def apply(self, scheduler, task_id, candidates, built, ran):
        self.errors += [b.error_msg or r.error_msg for b, r in zip(built, ran, strict=True)]


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    log = tmp_path_factory.mktemp("workers") / "log"
    with pool.Workers([pool.Worker(log) for _ in range(2)], [pool.Worker(log)]) as own:
        yield own


def context(space, strategy):
    return Context(WORKLOAD.mod(LEVEL), WORKLOAD.target(LEVEL), "a", space, strategy, 1)


class Loop:
    """One call of `tune_tasks` with components of ours, but for those that are given."""

    def __init__(self, workers, tmp_path, **given):
        self.sketches = given.get("sketches") or Sketches(WORKLOAD, LEVEL)
        self.count, self.database = Count(), ms.database.JSONDatabase(work_dir=str(tmp_path))
        self.part = {
            "space": self.sketches,
            "strategy": DecisionSearch(self.sketches, 1),
            "extractor": DecisionFeatures(self.sketches),
            "builder": WorkerBuilder(workers, EXPORTER, tmp_path),
            "runner": WorkerRunner(workers),
            "scheduler": "round-robin",
        }
        self.part |= given
        self.part.setdefault(
            "cost_model",
            XGBModel(extractor=self.part["extractor"], num_warmup_samples=4, num_tuning_cores=1),
        )
        self.context = context(self.part["space"], self.part["strategy"])

    def run(self, tmp_path, trials=POINTS, batch=4):
        ms.tune_tasks(
            tasks=[self.context],
            task_weights=[1.0],
            work_dir=str(tmp_path),
            max_trials_global=trials,
            num_trials_per_iter=batch,
            builder=self.part["builder"],
            runner=self.part["runner"],
            database=self.database,
            cost_model=self.part["cost_model"],
            measure_callbacks=[
                ms.measure_callback.AddToDatabase(),
                self.count,
                ms.measure_callback.UpdateCostModel(),
            ],
            task_scheduler=self.part["scheduler"],
        )
        assert self.count.errors
        assert set(self.count.errors) == {None}
        return self


def test_our_components_serve_a_tune_tasks_of_ones_own(workers, tmp_path):
    loop = Loop(workers, tmp_path).run(tmp_path, trials=100)
    records = loop.database.get_all_tuning_records()
    assert len({str(record.trace) for record in records}) == len(records) == POINTS


def test_the_loop_calls_each_component(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "_LAST", 1)
    calls: dict[str, list[str]] = {kind: [] for kind in SPIES}
    loop = Loop(workers, tmp_path)
    inner = loop.part | {"extractor": spy("extractor", loop.part["extractor"], calls["extractor"])}
    inner["cost_model"] = XGBModel(extractor=inner["extractor"], num_warmup_samples=4)
    spies = {kind: spy(kind, inner[kind], calls[kind]) for kind in SPIES if kind != "extractor"}
    # Batches are smaller than what is left when the model could be asked.
    Loop(workers, tmp_path, sketches=loop.sketches, **spies).run(tmp_path, batch=2)
    assert {kind: set(called) for kind, called in calls.items()} == {
        kind: set(names) for kind, (_, names) in SPIES.items()
    }


@pytest.mark.parametrize(
    "given",
    [
        lambda: {"strategy": ms.search_strategy.ReplayTrace(), "scheduler": "gradient"},
        lambda: {
            "strategy": ms.search_strategy.EvolutionarySearch(population_size=8),
            "extractor": RandomFeatureExtractor(feature_size=3),
        },
        lambda: {"cost_model": ms.cost_model.RandomModel()},
        lambda: {
            "space": ScheduleFn(WORKLOAD.space(LEVEL), [], [], {}),
            "strategy": ms.search_strategy.ReplayTrace(),
        },
        pytest.param(  # their processes register all of TVM's intrinsics
            lambda: {
                "builder": ms.builder.LocalBuilder(max_workers=2, timeout_sec=250.0),
                "runner": ms.runner.LocalRunner(timeout_sec=250.0),
            },
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["replay-trace", "evolutionary", "random-model", "space", "builder"],
)
def test_tvms_own_take_their_place(workers, tmp_path, given):
    Loop(workers, tmp_path, **given()).run(tmp_path, trials=4)


def test_each_task_has_a_model_which_learns_when_it_is_asked():
    """Stand-ins are what it learns and ranks here; that of another task knows nothing."""
    space = Sketches(WORKLOAD, LEVEL)
    models = {name: decision_model(space) for name in "ab"}
    both = PerTask(models)
    told = context(space, DecisionSearch(space))
    points = space.space.all()
    candidates = list(map(space.stand_in, points))
    seconds = [1e-6 * (1 + point[1][1]) for point in points]
    for start in (0, 6):
        part = slice(start, start + 6)
        results = [ms.runner.RunnerResult([s], None) for s in seconds[part]]
        both.update(told, candidates[part], results)
    assert models["a"].data_size == 0
    scores = both.predict(told, candidates)
    assert (models["a"].data_size, models["b"].data_size) == (POINTS, 0)
    order = sorted(range(POINTS), key=lambda i: -scores[i])
    assert [points[i][1][1] for i in order] == sorted(point[1][1] for point in points)


def test_a_worker_draws_a_space(workers):
    """And the search does it itself where the worker could not."""
    own, far, lost = (Sketches(WORKLOAD, LEVEL) for _ in range(3))
    mod = packed(WORKLOAD.mod(LEVEL))
    far.begin(workers, mod)
    [job] = workers.to_build
    assert far.space.all() == own.space.all()
    assert far.space is job.answer.value
    assert [far.space.trace(p) for p in far.space.all()] == list(
        map(own.space.trace, own.space.all())
    )
    lost.begin(workers, mod)
    workers.to_build.pop().end(pool.Answer(None, "crashed with SIGSEGV"))
    assert lost.space.all() == own.space.all()


def waits(seconds):
    time.sleep(seconds)
    return os.getpid()


def dies(way):
    time.sleep(60 if way == "hangs" else 0.3)
    if way == "crashes":
        os.abort()
    return Measurement((), "run: no context", broken=way == "is broken")


def runs(path):
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return os.getpid()


def one_measurer(folder):
    return pool.Workers([pool.Worker(folder / "log")], [pool.Worker(folder / "log")], False)


def all_done(own, jobs):
    assert own.wait(lambda: all(job.done() for job in jobs))
    return [job.answer for job in jobs]


THREADS = "(lambda os: len(os.listdir(f'/proc/{os.getppid()}/task')))(__import__('os'))"
IMPORTED = "[name in __import__('sys').modules for name in ('torch', 'tvm_ffi')]"


@pytest.mark.parametrize("needs", ["tvm", "torch"])
def test_workers_are_forks_of_one_process_that_has_one_thread(tmp_path, needs):
    """With more it may not fork."""
    builders = [pool.Worker(tmp_path / "log", needs) for _ in range(3)]
    with pool.Workers(builders, []) as own:
        own.to_build += (jobs := [pool.Job(os.getppid, ()) for _ in builders])
        own.to_build += (threads := [pool.Job(eval, (THREADS,))])
        [forker] = {answer.value for answer in all_done(own, jobs)}
        assert forker != os.getpid()
        assert [answer.value for answer in all_done(own, threads)] == [1]


def test_cuda_is_left_to_the_forks(tmp_path):
    """Where tvm_ffi was imported before the fork, torch has looked for GPUs: it refuses them."""
    with pool.Workers([], [pool.Worker(tmp_path / "log", "torch")]) as own:
        own.to_measure.append(asked := pool.Job(eval, (IMPORTED,)))
        assert [answer.value for answer in all_done(own, [asked])] == [[True, False]]


@pytest.fixture
def light(tmp_path, monkeypatch):
    """Return workers of a nursery of their own."""
    monkeypatch.setattr(pool, "Nursery", Nursery)
    own = [pool.Worker(tmp_path / "log", "json") for _ in range(2)]
    return pool.Workers(own[:1], own[1:], False)


WAITS_ONCE = "path.exists() or (path.touch(), __import__('time').sleep(60))"
ENDS_ITS_NURSERY = (
    "(lambda os: os.kill(os.getppid(), 9) or __import__('time').sleep(9))(__import__('os'))"
)


def begun(own, path):
    deadline = time.monotonic() + 10
    while not path.exists() and time.monotonic() < deadline:
        own.step(0.01)
    assert path.exists()


def test_a_nursery_that_died_is_followed_by_another(light, tmp_path):
    """Which does the same job: the candidate is not to blame."""
    with light as own:
        own.to_build.append(asked := pool.Job(os.getppid, ()))
        [answer] = all_done(own, [asked])
        own.to_build.append(killed := pool.Job(eval, (WAITS_ONCE, {"path": tmp_path / "begun"})))
        own.to_build.append(asked := pool.Job(os.getppid, ()))
        begun(own, tmp_path / "begun")
        os.kill(answer.value, signal.SIGKILL)
        done, again = all_done(own, [killed, asked])
        assert done == pool.Answer(True)
        assert again.value != answer.value


def test_who_ends_every_nursery_is_to_blame(light):
    with light as own:
        own.to_build.append(job := pool.Job(eval, (ENDS_ITS_NURSERY,)))
        assert all_done(own, [job])[0].error == "crashed"
        own.to_build.append(other := pool.Job(os.getpid, ()))
        assert all_done(own, [other])[0].error is None


@pytest.mark.parametrize("then", [signal.SIGSTOP, None], ids=["twice", "once"])
def test_a_nursery_that_hangs_when_it_is_ready_is_followed_by_another(light, monkeypatch, then):
    """Nobody waits for ever: not for how a candidate ended, not for a session's end."""
    monkeypatch.setattr(nursery, "_ANSWER_S", 0.5)
    began = time.monotonic()
    with light as own:
        own.to_build.append(asked := pool.Job(os.getppid, ()))
        [answer] = all_done(own, [asked])
        os.kill(answer.value, signal.SIGSTOP)
        own.to_build.append(late := pool.Job(time.sleep, (60.0,), 0.1))
        [ended] = all_done(own, [late])
        assert ended.error == "timeout: killed after 0.1 s"
        own.to_build.append(asked := pool.Job(os.getppid, ()))
        [again] = all_done(own, [asked])
        assert again.value != answer.value
        if then:
            os.kill(again.value, then)
    assert time.monotonic() - began < 10


def test_processes_end_with_their_session(light):
    with light as own:
        own.to_build.append(forker := pool.Job(os.getppid, ()))
        own.to_measure.append(at_work := pool.Job(os.getpid, ()))
        answers = all_done(own, [forker, at_work])
    for answer in answers:
        with pytest.raises(ProcessLookupError):
            os.kill(answer.value, 0)


def test_a_worker_that_died_idle_loses_no_job(light):
    with light as own:
        own.to_measure.append(first := pool.Job(os.getpid, ()))
        [answer] = all_done(own, [first])
        os.kill(answer.value, signal.SIGKILL)
        own.measurers[0].pipe.poll(10)
        own.to_measure.append(second := pool.Job(os.getpid, ()))
        [again] = all_done(own, [second])
        assert again.error is None
        assert again.value != answer.value


def test_a_nursery_that_hangs_keeps_nobody(light):
    """As an import from a file system that does not answer."""
    began = time.monotonic()
    with light as own:
        os.kill(own.builders[0].nursery._process.pid, signal.SIGSTOP)
        own.to_build.append(pool.Job(os.getpid, ()))
        own.step(0.0)
    assert time.monotonic() - began < 5


def test_a_nursery_is_not_asked_more_than_its_socket_holds(monkeypatch, tmp_path):
    monkeypatch.setattr(nursery, "_MOST_WAITING", 2)
    monkeypatch.setattr(pool, "Nursery", Nursery)
    own = [pool.Worker(tmp_path / "log", "json") for _ in range(4)]
    with pool.Workers(own, []):
        assert len(own[0].nursery._waiting) == 2


def test_no_memory_for_a_fork_fails_a_worker(monkeypatch, capfd):
    monkeypatch.setattr(os, "fork", lambda: os.open("/no/such/file", 0))
    assert nursery._fork() is None
    assert "/no/such/file" in capfd.readouterr().err
    child = nursery.Child(Nursery("json"))
    child.born(None)
    assert (child.pid, child.wait(5.0)) == (None, None)


def test_openmp_runs_in_forks(light):
    """Nothing of it ran in the nursery, of whose threads they would have none."""
    lost = "__import__('blockscale.base.forks', fromlist=['forks']).threads_lost"
    with light as own:
        own.to_build.append(asked := pool.Job(eval, (f"(__import__('tvm_ffi'), {lost})[1]",)))
        assert [answer.value for answer in all_done(own, [asked])] == [False]


def leaves(folder):
    started = subprocess.Popen(["sleep", "60"])
    Path(folder, "left").write_text(str(started.pid))
    os.abort()


def test_what_a_crashed_worker_had_started_is_killed(workers, tmp_path):
    workers.to_measure.append(job := pool.Job(leaves, (str(tmp_path),)))
    assert all_done(workers, [job])[0].error == "crashed with SIGABRT"
    left, deadline = int((tmp_path / "left").read_text()), time.monotonic() + 5
    with suppress(FileNotFoundError):
        while "(sleep) Z" not in Path(f"/proc/{left}/stat").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)


COMPILES = """
import sys
from pathlib import Path
from blockscale.tuning.components import pool
starts = "__import__('subprocess').run(['sh', '-c', 'echo $$ > {0}; exec sleep 60'])"
with pool.Workers([pool.Worker(Path("{0}.log"), "json")], []) as own:
    own.to_build.append(job := pool.Job(eval, (starts,)))
    own.wait(job.done)
"""


def test_what_workers_had_started_ends_with_the_tuner(tmp_path):
    """Its `kill -9` too."""
    path = tmp_path / "compiler"
    tuner = subprocess.Popen([sys.executable, "-c", COMPILES.format(path)], env=without_torch())
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    tuner.kill()
    tuner.wait()
    left = Path(f"/proc/{int(path.read_text())}/stat")
    with suppress(FileNotFoundError):
        while "(sleep) Z" not in left.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_temporary_files_lie_where_the_session_removes_them(light, tmp_path):
    """A compiler, which is told by the environment, leaves some when it is killed."""
    own = pool.Workers(light.builders, light.measurers, folder=tmp_path)
    asks = "[__import__('tempfile').gettempdir(), __import__('os').environ['TMPDIR']]"
    with own:
        own.to_build.append(job := pool.Job(eval, (asks,)))
        assert all_done(own, [job]) == [pool.Answer([str(tmp_path)] * 2)]


def test_who_measures_goes_on_while_nobody_looks(tmp_path):
    """The search takes answers when it has time."""
    with one_measurer(tmp_path) as own:
        own.to_measure.append(first := pool.Job(waits, (0.0,)))
        [answer] = all_done(own, [first])
        own.to_measure += (jobs := [pool.Job(touches, (str(tmp_path / f"{i}"),)) for i in range(3)])
        own.step(0.0)
        deadline = time.monotonic() + 10
        while not (tmp_path / "1").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / "1").exists()
        assert not (tmp_path / "2").exists()
        assert [each.value for each in all_done(own, jobs)] == [answer.value] * 3


def touches(path):
    Path(path).touch()
    return os.getpid()


def test_what_another_may_soon_begin_is_not_sent_ahead(tmp_path):
    """It would wait as long as a candidate that hangs."""
    both = [pool.Worker(tmp_path / "log") for _ in range(2)]
    with pool.Workers([pool.Worker(tmp_path / "log")], both, False) as own:
        own.to_measure += (firsts := [pool.Job(os.getpid, ()) for _ in range(2)])
        all_done(own, firsts)
        own.to_measure += [pool.Job(waits, (60.0,)), pool.Job(waits, (1.0,))]
        own.to_measure += [third := pool.Job(os.getpid, ()), fourth := pool.Job(os.getpid, ())]
        own.step(0.0)
        assert [each.following for each in both] == [third, None]
        assert own.to_measure == [fourth]


def test_nothing_is_sent_ahead_where_the_search_is_in_the_way(tmp_path):
    """A CPU has one measurement at a time, and nothing beside it."""
    with pool.Workers([pool.Worker(tmp_path / "log")], []) as own:
        own.to_measure += (jobs := [pool.Job(waits, (0.0,)) for _ in range(3)])
        while not all(job.done() for job in jobs):
            assert own.step(0.05)
            assert own.measurers[0].following is None


@pytest.mark.parametrize("way", ["hangs", "crashes", "is broken"])
def test_what_was_sent_ahead_survives_what_came_before(tmp_path, way):
    with one_measurer(tmp_path) as own:
        own.to_measure.append(first := pool.Job(waits, (0.0,)))
        [answer] = all_done(own, [first])
        path = tmp_path / "runs"
        bad, good = pool.Job(dies, (way,), 0.5), pool.Job(runs, (str(path),), 30.0)
        own.to_measure += [bad, good]
        own.step(0.0)
        assert own.measurers[0].following is good
        time.sleep(0.8)  # the search is busy
        wrong, right = all_done(own, [bad, good])
        said = {"hangs": "timeout: killed after 0.5 s", "crashes": "crashed with SIGABRT"}
        assert wrong.error == said.get(way)
        assert right.value != answer.value
        assert path.read_text() == f"{right.value}\n"


def test_the_time_of_what_was_sent_ahead_begins_when_it_does(tmp_path):
    with one_measurer(tmp_path) as own:
        own.to_measure.append(first := pool.Job(waits, (0.0,)))
        all_done(own, [first])
        own.to_measure += (jobs := [pool.Job(waits, (0.7,), 1.0) for _ in range(2)])
        assert [each.error for each in all_done(own, jobs)] == [None, None]


def export_and_count(module, target, out):
    """Write what is to be built, and that it was."""
    with (out.parent / "exports").open("a") as file:
        file.write("x")
    time.sleep(0.3)  # another builder would have begun
    out.write_text(module.script())


def test_what_comes_out_the_same_is_built_once(workers, tmp_path):
    """Buckets differ in what records know, and not in what is shipped."""
    space = Sketches(WORKLOAD, LEVEL).space
    first, second = (space.trace(point) for point in (space.all()[0], space.all()[-1]))
    known = [packed(FakeWorkload(FakeSpec(), rows=rows).mod(LEVEL)) for rows in (4, 8)]
    made = [
        Unscheduled(trace, mod, known[0], "[]")
        for trace, mod in [(first, known[0]), (first, known[1]), (second, known[0])]
    ]
    keys = iter(made)

    def module(mod, library):
        each = next(keys)
        return each, (repr(each.trace), each.shipped)

    own = WorkerBuilder(workers, f"{__name__}:export_and_count", tmp_path, module=module)
    asked = [ms.builder.BuilderInput(WORKLOAD.mod(LEVEL), WORKLOAD.target(LEVEL)) for _ in made]
    built = [Path(str(each.artifact_path)) for each in own.build(asked)]
    assert len(set(built)) == 3
    contents = [path.read_text() for path in built]
    assert contents[0] == contents[1] != contents[2]
    assert (tmp_path / "exports").read_text() == "xx"
