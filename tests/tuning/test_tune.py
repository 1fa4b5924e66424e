"""The tuner: what it finds, what it survives, what it leaves behind."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tvm.s_tir.meta_schedule.runner import RunnerResult
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

from blockscale.base import host
from blockscale.building import logs, records
from blockscale.building.commit import commit
from blockscale.building.space import Space, replay, trace_json
from blockscale.building.store import Lock, Store, folder_of
from blockscale.tuning import task, worker
from blockscale.tuning.components.features import decision_model
from blockscale.tuning.components.search import DecisionSearch
from blockscale.tuning.components.sketches import Sketches
from blockscale.tuning.loop import Context, Session
from blockscale.tuning.task import Task
from blockscale.tuning.tuner import Interrupted, tune
from blockscale.tuning.worker import Applied, Argument, Measurement
from tests.kit import fake_workload
from tests.kit.fake_workload import COLS, EXPORTER, FakeSpec, FakeWorkload
from tests.kit.paths import without_torch

LEVEL = host.level()
POINTS = 3 * 4
"""Points of the space with 4 rows: tiles (4,1) (2,2) (1,4) x steps 1, 2, 4, 8."""


def small(cols: int = COLS) -> FakeWorkload:
    return FakeWorkload(FakeSpec(cols), rows=4)


def run(workload: FakeWorkload, work_dir: Path, **options):
    options = {"seconds": 60.0, "progress": False, "exporter": EXPORTER} | options
    return tune([workload], work_dir=work_dir, **options)


@pytest.fixture(scope="module", autouse=True)
def _no_rechecks():
    """A default is measured again when it seems slow: the machine's load must not decide here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "_SUSPECT", math.inf)
        patch.setattr(worker, "measure", fake_workload.measure)
        yield


def database(work_dir: Path) -> Path:
    return folder_of(work_dir, "row_sum", LEVEL)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A work folder whose space is exhausted, and the result of the second of two sessions."""
    work_dir = tmp_path_factory.mktemp("tuned")
    seen: list[dict] = []
    first = run(small(), work_dir, trials=5, progress=seen.append)
    second = run(small(), work_dir)
    return work_dir, first, second, seen


def test_ctrl_c_while_a_trial_is_written_down_counts_it(tmp_path, monkeypatch):
    def append(store, *args):
        written(store, *args)
        signal.raise_signal(signal.SIGINT)

    written = Store.append
    monkeypatch.setattr(Store, "append", append)
    with pytest.raises(Interrupted) as caught:
        run(small(), tmp_path)
    lines = (database(tmp_path) / "database_tuning_record.json").read_bytes().count(b"\n")
    assert caught.value.result.trials == lines == 1


def test_the_first_trial_is_the_default_and_the_limit_of_trials_holds(tuned):
    _, first, _, seen = tuned
    assert first.trials == 5
    assert first.history == seen
    assert [line["trial"] for line in first.history] == [0, 1, 2, 3, 4]
    assert first.history[0]["kind"] == "default"
    assert first.default == {small().tag: first.history[0]["us"]}
    best = [line["best_us"] for line in first.history]
    assert best == sorted(best, reverse=True)
    assert (
        first.best == {small().tag: best[-1]} == {small().tag: min(h["us"] for h in first.history)}
    )


def test_a_second_session_goes_on_and_measures_no_point_twice(tuned):
    work_dir, first, second, _ = tuned
    assert first.trials + second.trials == POINTS + 1
    assert second.history[0]["trial"] == 5
    found = records.read_records(database(work_dir))
    assert len({r.key for r in found}) == POINTS + 1
    assert len(found) == first.trials + second.trials
    assert second.best[small().tag] == min(r.us for r in found)
    assert run(small(), work_dir).trials == 0


def test_a_strategy_that_knows_no_end_ends(tmp_path):
    """TVM's ReplayTrace draws with replacement, for ever."""
    result = run(FakeWorkload(rows=2), tmp_path, seconds=None, trials=99, strategy="replay-trace")
    assert 1 < result.trials <= 2 * 4 + 1


def test_the_history_on_disk_has_every_trial(tuned):
    work_dir, first, second, _ = tuned
    lines = (database(work_dir) / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["us"] for line in lines] == [
        line["us"] for line in first.history + second.history
    ]


@pytest.mark.parametrize(
    ("trap", "error"),
    [
        ("build", "build: RuntimeError: trap: no such instruction"),
        ("crash", "build: crashed with SIGSEGV"),
        ("fault", "run: crashed with SIGSEGV"),
        ("hang", "build: timeout: killed after 2.0 s"),
        ("wrong", "wrong result: 2 of 2 elements of 'y' differ from the default schedule's"),
    ],
)
def test_a_failing_candidate_is_counted_and_does_not_stop_the_tuning(tmp_path, trap, error):
    workload = FakeWorkload(FakeSpec(trap=trap), rows=2)  # 2 tiles x 4 steps
    result = run(workload, tmp_path, timeouts=(2.0 if trap == "hang" else 30.0, 30.0))
    failed = [line for line in result.history if line["failed"]]
    assert [line["error"] for line in failed] == [error] * 2
    assert all(line["us"] == math.inf for line in failed)
    assert result.failed == {workload.tag: 2}
    assert result.trials == 2 * 4 + 1
    assert math.isfinite(result.best[workload.tag])
    assert sum(math.isinf(r.us) for r in records.read_records(database(tmp_path))) == 2


def test_the_time_limit_holds_with_candidates_that_hang(tmp_path):
    started = time.monotonic()
    result = run(FakeWorkload(FakeSpec(trap="hang")), tmp_path, seconds=3.0)
    assert time.monotonic() - started < 3.0 + 3.0
    assert result.elapsed_s < 3.0 + 3.0


_TUNE_FOR_EVER = """
from tests.kit.fake_workload import *
from blockscale.tuning.tuner import tune
from blockscale.tuning import task
task._SUSPECT = float("inf")
tune([FakeWorkload(rows=1024)], seconds=600, work_dir={work_dir!r}, exporter=EXPORTER)
"""


def test_kill_9_loses_no_finished_trial(tmp_path):
    code = _TUNE_FOR_EVER.format(work_dir=str(tmp_path))
    options = {"stderr": subprocess.PIPE, "text": True, "env": without_torch()}
    process = subprocess.Popen([sys.executable, "-c", code], **options)
    path = database(tmp_path) / records.RECORDS
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < 4:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = _children(process.pid)
    assert workers
    with pytest.raises(RuntimeError, match=f"process {process.pid} is tuning here"):
        run(FakeWorkload(rows=1024), tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finished = records.read_records(path.parent)
    assert len(finished) >= 4
    result = run(FakeWorkload(rows=1024), tmp_path, trials=3)
    assert result.history[0]["trial"] == len(finished)
    after = records.read_records(path.parent)
    assert after[: len(finished)] == finished
    assert len(after) == len(finished) + 3
    assert len({r.key for r in after}) == len(after)
    assert not [pid for pid in workers if _alive(pid)]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_kill_9_at_random_moments(tmp_path):
    """The database opens, the session resumes, and no trial is made twice or lost."""
    code = _TUNE_FOR_EVER.format(work_dir=str(tmp_path))
    path, rng, known = database(tmp_path) / records.RECORDS, Random(20), []
    for _ in range(20):
        options = {"stderr": subprocess.DEVNULL, "env": without_torch()}
        process = subprocess.Popen([sys.executable, "-c", code], **options)
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        deadline = time.monotonic() + 60
        while not path.exists() or path.read_bytes().count(b"\n") <= lines:
            if process.poll() is not None or time.monotonic() > deadline:
                break  # the space is exhausted
            time.sleep(0.01)
        time.sleep(rng.random())
        process.kill()
        process.wait()
        if path.exists():
            records.repair_tail(path.parent, lambda text: None)
            after = records.read_records(path.parent)
            assert after[: len(known)] == known
            known = after
    result = run(FakeWorkload(rows=1024), tmp_path)
    after = records.read_records(path.parent)
    assert after[: len(known)] == known
    assert len(after) == len(known) + result.trials
    assert len({record.key for record in after}) == len(after)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def _copy(tuned, tmp_path: Path) -> Path:
    import shutil

    work_dir = tmp_path / "work"
    shutil.copytree(tuned[0], work_dir)
    return work_dir


def test_a_torn_last_line_is_dropped_with_a_message_and_a_copy(tuned, tmp_path):
    work_dir = _copy(tuned, tmp_path)
    path = database(work_dir) / records.RECORDS
    whole = path.read_bytes()
    torn = whole + whole.splitlines()[-1][:200]
    path.write_bytes(torn)
    said: list[str] = []
    records.repair_tail(path.parent, said.append)
    assert path.read_bytes() == whole
    assert path.with_name(f"{records.RECORDS}.torn").read_bytes() == torn
    [message] = said
    assert message.startswith(f"{path}:{len(torn.splitlines())}: dropped a torn last line")
    assert f"{records.RECORDS}.torn" in message


def test_a_torn_line_is_repaired_when_tuning_goes_on(tuned, tmp_path, capfd):
    work_dir = _copy(tuned, tmp_path)
    path = database(work_dir) / records.RECORDS
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])  # the last trial is lost, and made again
    assert run(small(), work_dir).trials == 1
    assert "dropped a torn last line" in capfd.readouterr().err
    assert len({r.key for r in records.read_records(path.parent)}) == POINTS + 1


def test_damage_in_the_middle_is_an_error_that_names_the_line(tuned, tmp_path):
    work_dir = _copy(tuned, tmp_path)
    path = database(work_dir) / records.RECORDS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b'[0, [[["Get\n', *lines[1:]]))
    before = path.read_bytes()
    with pytest.raises(records.LogError, match=r"database_tuning_record.json:2: the line is not"):
        run(small(), work_dir)
    assert path.read_bytes() == before


def test_two_tuners_do_not_share_a_work_folder(tmp_path):
    with Lock(tmp_path, "tuning"), pytest.raises(RuntimeError, match=f"process {os.getpid()} is"):
        run(small(), tmp_path)


def test_a_folder_that_cannot_be_locked_says_so(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(RuntimeError, match=r"cannot be locked \(No locks available\); use one on"):
        Lock(tmp_path, "tuning")


@pytest.mark.parametrize("known", [True, False])
def test_without_its_default_a_workload_is_given_up(tuned, tmp_path, capfd, known):
    """Known from an earlier session, it runs for its outputs; a queued seed must not be those."""
    commit(tuned[0], tmp_path / "logs")
    if known:
        run(small(), tmp_path / "work", trials=1)
    options = {
        "seed_logs": [tmp_path / "logs"],
        "exporter": "tests.kit.fake_workload:export_no_default",
    }
    result = run(small(), tmp_path / "work", **options)
    assert [line["kind"] for line in result.history] == ([] if known else ["default"])
    message = f"{small().tag}: not tuned, since its default schedule failed"
    assert capfd.readouterr().err.count(message) == 1


def argument(name, dtype="float32", storage=None):
    return Argument(name, dtype, (128, 1536), True, storage)


class Held(worker.Held):
    """What is run are its results."""

    load = run = lambda self, results: results
    times = None


def differs(got, want, of=None):
    return Held([of or argument("y")], [want]).differs([got])


@pytest.fixture(scope="module")
def product():
    """Return a matrix with elements that cancel, and the same with another rounding."""
    rng = np.random.default_rng(0)
    want = (rng.standard_normal((128, 1536)) * np.exp2(rng.integers(-9, 9, (128, 1)))).astype("f4")
    noise = rng.uniform(-1e-3, 1e-3, want.shape) * np.abs(want).max(axis=1, keepdims=True)
    return want, (want + noise).astype("f4")


def test_rounding_is_no_difference(product):
    want, got = product
    assert differs(got, want) is None
    assert differs(got.astype("float16"), want.astype("float16")) is None
    assert differs(want[:, :0], want[:, :0]) is None
    spoilt = want.copy()
    spoilt[3, 4] = np.nan  # both
    assert differs(spoilt, spoilt) is None


@pytest.mark.parametrize("column", [0, 1535])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, 0.0, "half"])
def test_one_wrong_column_is_found(product, column, wrong):
    """It is less than a thousandth of the output."""
    want, got = product[0], product[0].copy()
    got[:, column] = want[:, column] / 2 if wrong == "half" else wrong
    assert re.match(r"wrong result: 1\d\d of 196608 elements of 'y'", differs(got, want))


def test_a_small_row_is_compared_by_its_own_size(product):
    want, got = product[0], product[0].copy()
    row = np.abs(want).max(axis=1).argmin()
    got[row] = -want[row]
    assert differs(got, want) is not None


@pytest.mark.parametrize(
    ("of", "allowed"),
    [
        (argument("packed", "uint8", "e2m1x2"), True),
        (argument("block_scale", "uint8", "e4m3 128x4"), True),
        (argument("out", "uint8", "byte 128x4"), False),
        (argument("best_amax"), True),
        (argument("out"), False),
    ],
)
def test_ties_may_turn_in_codes_and_sweeps_only(of, allowed):
    want = np.ones((128, 1536), of.dtype)
    got = want.copy()
    got[0, :128] = 3
    assert (differs(got, want, of) is None) is allowed
    got[1, :128] = 3  # more than a thousandth
    assert differs(got, want, of) is not None


def test_a_nan_is_no_tie():
    want = np.ones((128, 1536), "float32")
    got = want.copy()
    got[5, 5] = np.nan
    assert "1 of 196608 elements of 'best_amax'" in differs(got, want, argument("best_amax"))


def test_a_level_that_this_machine_lacks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "features", lambda: frozenset({"sse4_2"}))
    monkeypatch.setattr(host, "level", lambda: "plain")
    with pytest.raises(
        ValueError, match=r"level='avx2' needs the CPU features .*which this machine"
    ):
        run(small(), tmp_path, target="avx2")


def test_a_committed_schedule_is_measured_right_after_the_default(tuned, tmp_path):
    committed = tmp_path / "logs"
    commit(tuned[0], committed)
    result = run(small(), tmp_path / "new", trials=2, seed_logs=[committed])
    assert [line["kind"] for line in result.history] == ["default", "committed"]
    [_, seed] = records.read_records(database(tmp_path / "new"))
    assert seed.key == records.read_records(database(committed))[0].key


def test_the_openmp_exporter_measures_what_is_shipped(tmp_path):
    both = [small(), small(cols=2 * COLS)]  # the second fails when it gets the first's library
    options = {"seconds": 60.0, "trials": 6, "timeouts": (30.0, 30.0), "progress": False}
    result = tune(both, work_dir=tmp_path, **options)
    assert [line["error"] for line in result.history] == [None] * 6
    assert {line["workload"] for line in result.history} == {w.tag for w in both}


def test_a_default_that_seems_slow_is_measured_once_more(tmp_path, monkeypatch):
    monkeypatch.setattr(task, "_SUSPECT", 0.0)
    result = run(small(), tmp_path, trials=4)
    kinds = [line["kind"] for line in result.history]
    assert kinds == ["default", "recheck", "search", "search"]
    assert result.default == {small().tag: min(line["us"] for line in result.history[:2])}


def test_workers_parse_and_the_workloads_are_read_once(tmp_path, monkeypatch):
    """What each takes of the search's only process is what a fleet waits for."""
    read, reads = records.read, []
    monkeypatch.setattr(records, "read", lambda f: (reads.append(f), read(f))[1])
    monkeypatch.setattr(FakeWorkload, "mod", None)  # in workers it is as it was
    both = [FakeWorkload(rows=rows) for rows in (4, 8)]
    options = {"seconds": 60.0, "trials": 4, "progress": False, "exporter": EXPORTER}
    for trials in (4, 8):
        result = tune(both, work_dir=tmp_path, trials_each=trials, **options)
        assert [line["error"] for line in result.history] == [None] * 4
        assert len(reads) == {4: 1, 8: 2}[trials]
    digests = [digest for digest, _ in read(database(tmp_path))[0]]
    assert len(digests) == len(set(digests)) == 2
    assert {r.workload for r in records.read_records(database(tmp_path))} == {0, 1}


def test_no_model_is_asked_for_the_order_of_what_few_batches_measure():
    """Nor is one trained: it learns when it is asked."""
    workload = small()
    sketches = Sketches(workload, LEVEL)
    search = DecisionSearch(sketches, seed=3)
    Context(workload.mod(LEVEL), workload.target(LEVEL), "a", sketches, search)
    search.pre_tuning(99, 1, [], None, None)  # with a model it would have to be one
    for us in range(POINTS):
        [candidate] = search.generate_measure_candidates()
        search.notify_runner_results([candidate], [RunnerResult([(us + 1) * 1e-6], None)])
    assert len(search.known) == POINTS
    assert search.generate_measure_candidates() is None


def test_the_search_finds_the_best_point_without_measuring_all():
    workload = FakeWorkload(rows=1 << 20)
    space = Space(workload.mod(LEVEL), workload.space(LEVEL))
    assert space.size == 7 * 4  # the inner tile is at most 64

    def cost(point):
        (tile, step) = point[1]
        return 1 + abs(math.log2(tile[1]) - 4) + abs(step - 2)

    sketches = Sketches(workload, LEVEL)
    model, search = decision_model(sketches), DecisionSearch(sketches, seed=3)
    context = Context(workload.mod(LEVEL), workload.target(LEVEL), "a", sketches, search)
    search.pre_tuning(99, 4, [], None, model)
    for _ in range(5):
        found = search.generate_measure_candidates()
        points = [sketches.point(candidate) for candidate in found]
        results = [RunnerResult([cost(point) * 1e-6], None) for point in points]
        search.notify_runner_results(found, results)
        model.update(context, found, results)
    assert min(search.known.values()) == pytest.approx(1)
    assert len(search.known) == 20


def test_points_survive_the_way_through_a_trace():
    workload = FakeWorkload(rows=64)
    space = Space(workload.mod(LEVEL), workload.space(LEVEL))
    rng = Random(0)
    for point in [space.random(rng) for _ in range(20)]:
        assert space.point(space.trace(point)) == point
        other = space.mutate(point, rng)
        assert space.cross(point, other, rng) in space.all()
    features = space.features(space.all())
    assert len({tuple(row) for row in features}) == len(features) == space.size


def test_a_space_function_that_fails_says_where():
    workload = small()

    def broken(sch):
        sch.get_sblock("no_such_block")

    with pytest.raises(ValueError, match="search space: the space function failed for all"):
        Space(workload.mod(LEVEL), broken)


def test_nothing_to_tune_and_no_limit_are_errors(tmp_path):
    with pytest.raises(ValueError, match="no workloads given"):
        tune([], work_dir=tmp_path)
    with pytest.raises(ValueError, match="it would never end"):
        tune([small()], seconds=None, work_dir=tmp_path)


@pytest.mark.parametrize("seconds", [0, 0.05, math.nan])
def test_a_session_without_time_is_refused(tmp_path, seconds):
    with pytest.raises(ValueError, match=f"seconds={seconds} is no time .* give 0.1 or more"):
        run(small(), tmp_path, seconds=seconds)


def test_logs_found_in_the_work_folder(tuned):
    hit = logs.find(small(), LEVEL, [tuned[0]])
    assert hit is not None
    assert hit.us == tuned[2].best[small().tag]


def test_edgellms_passes_are_measured(tmp_path):
    """A GEMV of every expert, with its ids: one schedule, whose results are finite."""
    result = tune(["edgellm_down_h64_i64_silu_f32"], seconds=60, work_dir=tmp_path, progress=False)
    assert [(h["kind"], h["error"]) for h in result.history] == [("default", None)]
    [(tag, us)] = result.best.items()
    assert tag == "edgellm_down_h64_i64_silu_f32_m16"
    assert us > 0


class Refusing(FakeWorkload):
    """Of three steps TensorIR refuses the first: twice 1 is less than the columns."""

    def space(self, level):
        def draw(sch):
            _, col = sch.get_loops(sch.get_sblock("row_sum"))
            sch.split(col, [2, sch.sample_categorical([1, 256, 512], [1 / 3] * 3)])

        return draw


def test_points_that_tensorir_refuses_are_no_trials(tmp_path, capfd):
    workload = Refusing()
    for trials in (3, 0):  # a later session is refused once more
        result = run(workload, tmp_path)
        assert (result.trials, result.failed) == (trials, {workload.tag: 0})
        assert result.illegal == {workload.tag: 1}
    assert len(records.read_records(folder_of(tmp_path, "row_sum", LEVEL))) == 3
    assert "refuse" not in capfd.readouterr().err


def test_a_search_that_is_only_refused_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(task, "_MOST_REFUSED", 1)
    result = run(Refusing(), tmp_path, workers=1)
    assert result.illegal == {Refusing().tag: 1}
    assert result.trials < 3 or result.history[-1]["kind"] == "search"


def test_a_trace_that_another_trial_has_is_no_trial(tmp_path):
    """TVM clips tiles: two proposals may come out the same."""
    workload = FakeWorkload(rows=4)
    tuning = Task(workload, LEVEL, Store(tmp_path, print), [], print)
    drawn = Sketches(workload, LEVEL).space
    sch = [replay(tuning.mod, drawn.trace(point)) for point in drawn.all()[:3]]
    made = MeasureCandidate(sch[0], [])
    [one], [two] = (tuning.trials_of("search", made, trace_json(s.trace)) for s in sch[:2])
    assert tuning.trials_of("search", made, one.trace) == []
    keys = [Applied.of(s.trace).key for s in sch]
    assert keys[:2] == [one.key, two.key]
    assert tuning.is_new(one, keys[0])
    assert not tuning.is_new(two, keys[0])
    assert tuning.is_new(two, keys[2])
    assert not tuning.is_new(one, keys[2])
    one.kind = "default"  # without whose end no other candidate begins
    assert tuning.is_new(one, keys[2])


def test_what_crashed_a_builder_is_never_applied_by_the_tuner(tmp_path):
    """Its trace is written down as it was proposed."""
    store = Store(tmp_path, print)
    store.open(FakeWorkload(rows=8), LEVEL)
    tuning = Task(FakeWorkload(), LEVEL, store, [], print)
    [default] = tuning.baselines(1)
    store.append(tuning.entry, default.candidate.sch.trace, (1e-6,), tuning.target, {})
    trace = json.loads(json.dumps(default.trace).replace("row_sum", "no_such_block"))
    [trial] = tuning.trials_of("search", default.candidate, trace)
    session = Session(None, None, lambda *_: None, 0.0, math.inf, math.inf, (30.0, 10.0))
    session._by_library["a.so"] = trial
    session.finish("a.so", Measurement((), "build: crashed with SIGKILL"))
    assert [line["error"] for line in session.history] == ["build: crashed with SIGKILL"]
    _, record = records.read_records(tmp_path)
    assert (record.workload, record.trace, record.us) == (1, trace, math.inf)
    again = Task(FakeWorkload(), LEVEL, Store(tmp_path, print), [], print)
    assert (again.trials, again.failed) == (2, 1)


def test_the_limit_of_a_run_follows_the_default(tmp_path):
    """A default of which nothing is known, or that takes long, may run for longer."""
    tuning = Task(FakeWorkload(), LEVEL, Store(tmp_path, print), [], print)
    found = []
    for default_us in (math.inf, 9.0, 1e6, 1e8):
        tuning.default_us = default_us
        found.append(tuning.limit_s(10.0))
    assert found == [120.0, 10.0, 100.0, 120.0]
