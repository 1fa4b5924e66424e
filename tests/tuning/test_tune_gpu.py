"""Tuning for a GPU: the flow of candidates, with a stand-in for the GPU, and how one measures."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from tvm.tirx import Var

from blockscale import catalog
from blockscale.base.targets import runs_on
from blockscale.building import logs, records
from blockscale.building.commit import commit
from blockscale.building.space import replay, trace_json
from blockscale.building.store import Store, folder_of, folders, level_of
from blockscale.specs import Spec
from blockscale.tuning import gpu, site, task, worker
from blockscale.tuning.components.pool import Worker
from blockscale.tuning.components.sketches import Sketches
from blockscale.tuning.tuner import tune
from blockscale.tuning.worker import Argument, Timing, unpacked
from tests.kit import fake_gpu
from tests.kit.fake_workload import EXPORTER, FakeSpec, FakeWorkload, from_meta

ARCH = "sm_90a"
POINTS = 3 * 4


@pytest.fixture(scope="module", autouse=True)
def _stand_in():
    """A default is measured again when it seems slow: the machine's load must not decide here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "gpu", fake_gpu)
        patch.setattr(site, "_GPU_NEEDS", "tvm")
        patch.setattr(task, "_SUSPECT", math.inf)
        yield


def small(trap: str = "none", rows: int = 4, cols: int = 512) -> FakeWorkload:
    return FakeWorkload(FakeSpec(cols, trap), rows=rows)


def run(workloads, work_dir: Path, **options):
    options = {"seconds": 60.0, "progress": False, "exporter": EXPORTER, "target": ARCH} | options
    return tune(workloads, work_dir=work_dir, workers=2, **options)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A work folder of two workloads whose spaces are exhausted, and what the session found."""
    work_dir = tmp_path_factory.mktemp("tuned")
    return work_dir, run([small(), small(cols=256)], work_dir)


def test_every_point_is_measured_once_and_the_default_first(tuned):
    work_dir, result = tuned
    assert result.trials == 2 * (POINTS + 1)
    for workload in (small(), small(cols=256)):
        lines = [h for h in result.history if h["workload"] == workload.tag]
        assert [h["kind"] for h in lines] == ["default"] + ["search"] * POINTS
        assert not any(h["failed"] for h in lines)
        assert result.best[workload.tag] == min(h["us"] for h in lines)
    found = records.read_records(folder_of(work_dir, "row_sum", ARCH))
    assert len({(r.workload, r.key) for r in found}) == len(found) == result.trials
    assert not (work_dir / ".session").exists()


def test_logs_of_a_gpu_lie_beside_those_of_cpus(tuned, tmp_path):
    work_dir, result = tuned
    assert [path.name for path in folders(work_dir)] == [ARCH]
    assert commit(work_dir, tmp_path) == pytest.approx(result.best)
    meta = json.loads((tmp_path / "row_sum" / ARCH / "meta.json").read_text())
    assert meta["level"] == ARCH
    for entry in meta["workloads"].values():
        assert fake_gpu.MACHINE.items() <= entry.items()
        assert {"nvcc", "tvm", "tvm_ffi", "date", "best_us", "trials", "failed"} <= entry.keys()
        assert "cpu" not in entry
    hit = logs.find(small(), ARCH, [tmp_path])
    assert hit is not None
    assert hit.us == result.best[small().tag]
    assert logs.find(small(), "sm_100a", [tmp_path]) is None
    assert logs.find(small(), "avx2", [tmp_path]) is None
    assert (logs.entries(tmp_path), logs.check([tmp_path], from_meta)) == (2, [])
    again = run([small()], tmp_path / "new", trials=2, seed_logs=[tmp_path])
    assert [h["kind"] for h in again.history] == ["default", "committed"]


def test_what_is_measured_is_the_function_for_any_sizes(tmp_path):
    workload = catalog.workloads(Spec.parse("quantize_nvfp4_128x4_bf16"), ARCH)[0]
    tuning = task.Task(workload, ARCH, Store(tmp_path, print), [], print)
    space = Sketches(workload, ARCH).space
    [default] = tuning.baselines(9)
    traces = [space.trace(point) for point in space.all()[:3]]
    searched = [tuning.trials_of("search", default.candidate, trace) for trace in traces]
    for trial in [default, *chain(*searched)]:
        built, applied = tuning.to_build(trial).scheduled()
        rows, cols = built["main"].params[0].shape
        assert isinstance(rows, Var)
        assert isinstance(cols, Var)
        assert "threadIdx.x" in built.script()
        assert trace_json(applied.trace) == trial.trace
        assert applied.key == trial.key
    assert tuning.arguments()[0].shape == (workload.rows, 8192)


def test_what_is_built_is_the_function_for_any_sizes():
    workload = catalog.workloads(Spec.parse("quantize_nvfp4_128x4_bf16"), ARCH)[0]
    known, built = map(unpacked, task.modules_of(workload, ARCH))
    assert known["main"].params[0].shape[0] == workload.rows
    assert isinstance(built["main"].params[0].shape[0], Var)


def test_limits_of_trials_and_resuming(tmp_path):
    two = [small(rows=64), small(rows=64, cols=256)]
    first = run(two, tmp_path, trials_each=5)
    assert {h["workload"] for h in first.history} == {w.tag for w in two}
    assert first.trials == 10
    assert run(two, tmp_path, trials_each=5).trials == 0
    second = run(two, tmp_path, trials=3)
    assert second.trials == 3
    assert {h["kind"] for h in second.history} == {"search"}
    assert len(records.read_records(folder_of(tmp_path, "row_sum", ARCH))) == 13


@pytest.mark.parametrize(
    ("trap", "error"),
    [
        ("build", "build: RuntimeError: trap: no such instruction"),
        ("crash", "build: crashed with SIGSEGV"),
        ("fault", "run: crashed with SIGSEGV"),
        ("wrong", "wrong result: 2 of 2 elements of 'y' differ from the default schedule's"),
    ],
)
def test_a_failing_candidate_harms_no_other(tmp_path, trap, error):
    result = run([small(trap, rows=2)], tmp_path)
    assert [h["error"] for h in result.history if h["failed"]] == [error] * 2
    assert result.trials == 2 * 4 + 1
    assert math.isfinite(result.best[small(trap, rows=2).tag])


def test_a_hanging_candidate_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(fake_gpu, "measure", fake_gpu.measure_slowly)
    result = run([small()], tmp_path, trials=3, timeouts=(30.0, 2.0))
    assert [h["error"] for h in result.history] == [None, *["run: timeout: killed after 2.0 s"] * 2]


def test_a_default_that_fails_ends_its_workload_alone(tmp_path, capfd):
    options = {"exporter": "tests.kit.fake_workload:export_no_default"}
    result = run([small()], tmp_path, **options)
    assert [(h["kind"], h["failed"]) for h in result.history] == [("default", True)]
    assert capfd.readouterr().err.count("not tuned, since its default schedule failed") == 1


def test_a_workload_without_a_schedule_ends_alone(tmp_path, monkeypatch, capfd):
    def default(self, sch, level):
        if self.spec.cols == 256:
            raise NotImplementedError("tomorrow")

    monkeypatch.setattr(FakeWorkload, "default", default)
    result = run([small(cols=256), small()], tmp_path, trials=2)
    assert [h["workload"] for h in result.history] == [small().tag] * 2
    message = f"{small(cols=256).tag}: not tuned, since scheduling failed (NotImplementedError: tom"
    assert message in capfd.readouterr().err


def test_why_a_kernel_is_not_tuned_is_said_once(tmp_path, capfd):
    """And not before it is known whether there is a GPU at all."""
    kernel = [small("bodyless", rows) for rows in (4, 8, 16)]
    assert run([*kernel, small("bodyless", cols=256)], tmp_path).best == {}
    told = [line for line in capfd.readouterr().err.splitlines() if "not tuned" in line]
    why = "not tuned, since scheduling failed (TypeError: it has no body for GPUs)"
    assert told == [
        f"row_sum_c512_bodyless (3 workloads): {why}",
        f"row_sum_c256_bodyless_m4: {why}",
    ]
    with pytest.raises(RuntimeError, match="this machine's GPU does not run"):
        run(kernel, tmp_path, target="sm_100a")
    assert "not tuned" not in capfd.readouterr().err


def test_a_workload_without_arguments_ends_alone(tmp_path, monkeypatch, capfd):
    """A size may be left open in its static instance."""

    def arguments(self):
        if self.workload.spec.cols == 256:
            raise TypeError("how many?")
        return made(self)

    made = task.Task.arguments
    monkeypatch.setattr(task.Task, "arguments", arguments)
    result = run([small(cols=256), small()], tmp_path, trials=2)
    assert [h["workload"] for h in result.history] == [small().tag] * 2
    assert "not tuned, since scheduling failed (TypeError: how many?)" in capfd.readouterr().err


def test_the_first_build_waits_for_no_other_workload(tmp_path, monkeypatch):
    """Builders begin with the first default schedule, while those of others are prepared."""
    seen = []
    baselines, send = task.Task.baselines, Worker.send

    def prepare(tuning, most):
        seen.append("prepared" if tuning.first is None else "later")
        return baselines(tuning, most)

    def sent(process, job):
        seen.append(job.function.__name__)
        return send(process, job)

    monkeypatch.setattr(task.Task, "baselines", prepare)
    monkeypatch.setattr(Worker, "send", sent)
    run([small(cols=cols) for cols in (128, 256, 512)], tmp_path, trials_each=1)
    assert seen.count("prepared") == 3
    assert seen.index("build") < len(seen) - seen[::-1].index("prepared")


def test_a_gpu_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="level='sm_100a': this machine's GPU does not run"):
        run([small()], tmp_path, target="sm_100a")
    if not torch.cuda.is_available():
        monkeypatch.setattr(site, "gpu", gpu)
        monkeypatch.setattr(site, "_GPU_NEEDS", "torch")
        with pytest.raises(RuntimeError, match=r"sm_90a': torch .* finds no CUDA GPU here"):
            run([small()], tmp_path)
        with pytest.raises(RuntimeError, match="finds no CUDA GPU"):  # however little time there is
            run([small()], tmp_path, seconds=0.1)


def test_the_time_limit_holds(tmp_path):
    """Builds hang, so the space is not exhausted before."""
    result = run([small("hang")], tmp_path, seconds=3.0)
    assert 3.0 <= result.elapsed_s < 3.0 + 3.0


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_80", (8, 9), True),
        ("sm_89", (8, 0), False),
        ("sm_120a", (12, 0), True),
        ("avx2", (9, 0), False),
    ],
)
def test_which_code_runs_where(arch, capability, runs):
    assert runs_on(arch, *capability) is runs


def test_level_of_folders():
    assert level_of(Path("x/cpu-avx2")) == "avx2"
    assert level_of(Path("x/sm_90a")) == "sm_90a"
    assert level_of(Path("x/.sm_90a.123")) is None


@pytest.mark.parametrize(
    ("set_bytes", "sets"),
    [
        (1, gpu.MAX_CALLS),
        (1 << 20, 180),  # 3 x 60 MiB
        (50 << 20, 4),
        (1 << 30, 2),
        (5 << 30, 1),
        (20 << 30, 1),
    ],
)
def test_sets_of_arguments_exceed_l2_but_not_the_memory(set_bytes, sets):
    assert gpu.set_count(set_bytes, set_bytes, 60 << 20) == sets


@pytest.mark.parametrize(
    ("us", "sets", "launches"), [(2, 256, 256), (2, 7, 105), (15, 1, 20), (50, 3, 6), (900, 2, 2)]
)
def test_a_replay_is_long_enough_and_goes_round_over_all_sets(us, sets, launches):
    assert gpu.launch_count(us, sets) == launches


@pytest.mark.parametrize("replay_us", [60, 200, 900, 4000, 1e5])
def test_the_time_of_a_candidate_is_bounded(replay_us):
    warm, timed = gpu.replay_counts(replay_us)
    assert gpu.MIN_REPLAYS <= timed <= gpu.MAX_REPLAYS
    if replay_us < 1e4:
        assert (warm + timed) * replay_us < 1e5


# ---- on the CPU's torch


class Library:
    """What a measurement loads: ``main`` is the named function of this file."""

    functions: dict

    def __init__(self, path: str) -> None:
        self.path = path

    def __getitem__(self, name: str):
        assert name == "main"
        return self.functions[self.path]


ARGUMENTS = [
    Argument("input", "bfloat16", (8, 32), False, None),
    Argument("residual", "bfloat16", (8, 32), False, None),
    Argument("scale", "uint8", (8, 2), False, "e4m3 128x4"),
    Argument("mask", "int32", (2,), False, None, value=8),
    Argument("eps", "float32", None, False, None, value=0.5),
    Argument("packed", "uint8", (8, 16), True, "e2m1x2"),
    Argument("y", "float32", (8, 32), True, None),
    Argument("residual_out", "bfloat16", (8, 32), True, None, alias="residual"),
]


def compute(input, residual, scale, mask, eps, packed, y, residual_out):
    total = input + residual
    residual_out.copy_(total)
    y.copy_(total.float() * eps)
    packed.copy_((total.float().reshape(8, 16, 2).sum(-1) * 8).to(torch.uint8))


def to_torch(function):
    return lambda *args: function(
        *(a if isinstance(a, float) else torch.from_dlpack(a) for a in args)
    )


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Measure on the CPU: everything but streams, graphs and events."""

    def offset(*args):
        compute(*args)
        args[6][3, 4] += 1

    def unwritten(*args):
        y = args[6].clone()
        compute(*args)
        args[6][5:] = y[5:]

    def stray(*args):
        compute(*args)
        args[0][0, 0] = 100  # an input, which the next candidate reads

    def reads_late(*args):
        args[7].copy_(args[0] + args[1])
        args[6].copy_((args[0] + args[1]).float() * args[4])

    def fails(*args):
        raise RuntimeError("no such kernel\nmore")

    made = {"default": compute, "good": compute, **{f.__name__: f for f in (offset, unwritten)}}
    made |= {f.__name__: f for f in (stray, reads_late, fails)}
    Library.functions = {name: to_torch(function) for name, function in made.items()}
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "_on_stream", nullcontext)
    monkeypatch.setattr(gpu, "l2_bytes", lambda: 4096)
    monkeypatch.setattr(gpu, "crowded", lambda: True)
    monkeypatch.setattr(gpu.Held, "load", lambda self, path: Library(path)["main"])
    monkeypatch.setattr(gpu, "times", lambda *_: (1e-6,))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    worker.held.clear()
    yield
    worker.held.clear()


def measured(library: str) -> tuple[bool, str | None]:
    result = gpu.measure(library, ARGUMENTS, Timing(), "default")
    return bool(result.run_secs), result.error


def test_candidates_are_compared_with_the_default(on_the_cpu):
    assert measured("default") == (True, None)
    assert measured("good") == (True, None)
    for name, error in (
        ("offset", "wrong result: 1 of 256 elements of 'y' differ from the default schedule's"),
        ("unwritten", "wrong result: 96 of 256 elements of 'y'"),
        ("reads_late", "wrong result: 1"),
    ):
        passed, found = measured(name)
        assert not passed
        assert error in found
        assert measured("good") == (True, None)


def test_a_stray_write_is_not_held_against_the_next_candidate(on_the_cpu):
    assert measured("stray") == (True, None)
    assert measured("good") == (True, None)


def test_what_cannot_run_ends_the_process(on_the_cpu):
    result = gpu.measure("fails", ARGUMENTS, Timing(), "default")
    assert (result.error, result.broken) == ("run: no such kernel", True)


def test_arguments_on_the_gpu(on_the_cpu):
    held = gpu.Held(ARGUMENTS, "default")
    nbytes = 2 * 8 * 32 * 2 + 16 + 8 + 128 + 8 * 32 * 4
    assert len(held.sets) == gpu.set_count(nbytes, nbytes, 4096) == 6
    rows = [[torch.from_dlpack(a) if not isinstance(a, float) else a for a in s] for s in held.sets]
    for row in rows:
        assert row[4] == 0.5
        assert row[1].data_ptr() == row[7].data_ptr()
        assert row[3].tolist() == [8, 8]
        tensors = [a for a in row if not isinstance(a, float)]
        assert [tuple(t.shape) for t in tensors] == [a.shape for a in ARGUMENTS if a.shape]
        assert all((row[i].data_ptr() - rows[0][i].data_ptr()) % 256 == 0 for i in range(4))
    pointers = {row[0].data_ptr() for row in rows}
    assert len(pointers) == 6
    assert rows[1][0].min() < 0 < rows[1][0].max()
    assert rows[1][2].min() >= 0x20
    assert rows[1][2].max() < 0x48


def test_rounding_is_no_difference():
    rng = torch.Generator().manual_seed(0)
    want = torch.randn(64, 96, generator=rng)
    noise = want.abs().amax(-1, keepdim=True) * (torch.rand(64, 96, generator=rng) - 0.5) * 2e-3
    assert worker.count_wrong(torch, want + noise, want) == (0, 0)
    special = want.clone()
    special[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    assert worker.count_wrong(torch, special + 1e-6, special) == (0, 0)
    assert worker.count_wrong(torch, want, special) == (3, 0)
    assert worker.count_wrong(torch, special, want) == (3, 3)
    codes = torch.arange(64, dtype=torch.uint8)
    assert worker.count_wrong(torch, codes, codes.flip(0)) == (64, 0)


def test_news_is_a_line(tmp_path, capfd):
    """The default, and what is better; no bar where there is no terminal."""
    result = run([small()], tmp_path, trials=6, progress=True)
    told = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"\[\d+/60 s\] {small().tag} trial 0: [\d.]+ us \(default\); "
        r"best ([\d.]+) us of \1, failed 0",
        told[0],
    )
    best = [h for h in result.history[1:] if h["us"] == h["best_us"]]
    assert best
    for line in best:
        assert sum(f"trial {line['trial']}: " in each for each in told) == 1


EDGE = ["edgellm_up_h64_i128_f16", "edgellm_up_h192_i64_nvfp4", "edgellm_down_h64_i192_relu2_f32"]


@pytest.mark.parametrize("name", EDGE)
def test_edgellms_passes_can_be_tuned(tmp_path, name):
    """Weights streamed or cached; what they are measured on reads every expert once."""
    [workload] = catalog.workloads(Spec.parse(name), ARCH)
    tuning = task.Task(workload, ARCH, Store(tmp_path, print), [], print)
    space = Sketches(workload, ARCH).space
    [default] = tuning.baselines(9)
    traces = [space.trace(point) for point in space.all()]
    assert len(traces) == 2
    assert default.trace in traces
    searched = [tuning.trials_of("search", default.candidate, trace) for trace in traces]
    assert sorted(map(len, searched)) == [0, 1]  # one is the default
    for trial in [default, *chain(*searched)]:
        built, _ = tuning.to_build(trial).scheduled()
        assert all(isinstance(size, Var) for size in built["main"].params[-1].shape[:1])
    arguments = {argument.name: argument for argument in tuning.arguments()}
    ids = arguments["topk_ids"].values
    experts = arguments["payload"].shape[0]
    assert ids.dtype == np.int32
    assert ids.shape == arguments["topk_ids"].shape
    assert sorted(ids.reshape(-1)) == sorted([*range(experts)] * (ids.size // experts))
    low, high = arguments["decode_scales"].range
    assert (low, high) == arguments.get("x_scale", arguments["decode_scales"]).range
    scales = (np.arange(low, high, dtype=np.uint16) << 7).view(np.float16)  # S0E5M3
    assert (scales[0], scales[-1]) == (2**-3, 2.0)


def test_a_work_folder_of_branches_is_gone_on_with(tmp_path):
    """TVM would apply both records to one module, whose branches the first one has changed."""
    [workload] = catalog.workloads(Spec.parse(EDGE[2]), ARCH)
    tuning = task.Task(workload, ARCH, Store(tmp_path, print), [], print)
    for point in Sketches(workload, ARCH).space.all():
        trace = replay(tuning.mod, Sketches(workload, ARCH).space.trace(point)).trace
        tuning.store.append(tuning.entry, trace, [1e-6], tuning.target, {})
    again = task.Task(workload, ARCH, Store(tmp_path, print), [], print)
    assert [record.us for record in again.known] == [pytest.approx(1.0)] * 2
    assert again.trials == 2
