"""Tuning with the model of a B200: candidates are built, not run, and records say so everywhere."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from blockscale import catalog
from blockscale.building import builder, logs, records
from blockscale.building.commit import commit
from blockscale.building.space import Space, new_schedule, replay
from blockscale.building.store import folder_of, read_history
from blockscale.cli import build as cli_build
from blockscale.lower import nvcc
from blockscale.lower.pipe import facts as pipe_facts
from blockscale.lower.pipe.facts import plan as read
from blockscale.specs import MmFp4
from blockscale.specs.plans import b200
from blockscale.tuning import modelled, site, task, tuner
from blockscale.tuning.worker import SPEC
from tests.kit import fake_gpu
from tests.kit.fake_workload import DECODE, FakeSpec, FakeWorkload, from_meta

ARCH = "sm_100a"
WORKLOAD = FakeWorkload(FakeSpec(), rows=4)
EXPORTER = "tests.kit.fake_workload:export_plan"
POINTS = 3 * 4
MODEL = modelled.model_name()


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(tuner, "stands_in", lambda level, workloads: level in modelled.LEVELS)
    monkeypatch.setattr(site, "gpu", fake_gpu)
    monkeypatch.setattr(site, "_GPU_NEEDS", "tvm")
    monkeypatch.setattr(task, "_SUSPECT", math.inf)


def run(work_dir: Path, **options):
    options = {"seconds": 60.0, "progress": False, "exporter": EXPORTER, "target": ARCH} | options
    return tuner.tune([WORKLOAD], work_dir=work_dir, workers=2, **options)


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modelled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "stands_in", lambda *_: True)
        patch.setattr(task, "_SUSPECT", math.inf)
        result = run(folder)
    assert result.trials == POINTS + 1
    assert result.model == MODEL
    return folder


def test_times_are_the_models(work_dir):
    lines = read_history(folder_of(work_dir, "row_sum", ARCH))
    assert {line["model"] for line in lines} == {MODEL}
    assert not any(line["failed"] for line in lines)
    wanted = {b200.time_us(replace(DECODE, stages=stages), 4).us for stages in (2, 3, 4, 6)}
    assert sorted({line["us"] for line in lines}) == pytest.approx(sorted(wanted), rel=1e-4)


def test_every_record_names_the_model(work_dir):
    found = records.read_records(folder_of(work_dir, "row_sum", ARCH))
    assert {record.model for record in found} == {MODEL}
    assert all(math.isfinite(record.us) for record in found)
    meta = records.read_meta(folder_of(work_dir, "row_sum", ARCH))
    assert meta["machine"]["modelled"] is True
    assert meta["machine"]["model"] == MODEL
    assert "gpu" not in meta["machine"]


def test_a_second_session_goes_on(work_dir):
    again = run(work_dir)
    assert again.trials == 0
    assert math.isfinite(again.best[WORKLOAD.tag])


def test_logs_say_modelled(work_dir, tmp_path):
    assert commit(work_dir, tmp_path).keys() == {WORKLOAD.tag}
    [entry] = records.read_meta(folder_of(tmp_path, "row_sum", ARCH))["workloads"].values()
    assert entry["modelled"] is True
    assert entry["model"] == MODEL
    assert {"best_modelled_us", "default_modelled_us"} <= entry.keys()
    assert not {"best_us", "default_us", "gpu", "cpu"} & entry.keys()
    assert logs.check([tmp_path], from_meta) == []
    hit = logs.find(WORKLOAD, ARCH, [tmp_path])
    assert hit is not None
    assert hit.model == MODEL


def test_a_log_that_hides_the_model_is_a_problem(work_dir, tmp_path):
    commit(work_dir, tmp_path)
    path = folder_of(tmp_path, "row_sum", ARCH) / records.META
    meta = json.loads(path.read_text())
    del meta["workloads"][WORKLOAD.tag]["modelled"]
    path.write_text(json.dumps(meta))
    [problem, *_] = logs.check([tmp_path], from_meta)
    assert "disagrees with meta.json on whether its time is modelled" in str(problem)


def test_a_manifest_says_modelled(work_dir, monkeypatch):
    class Spec:
        name = "row_sum"

    monkeypatch.setattr(FakeWorkload, "limit", lambda self, level: None, raising=False)
    monkeypatch.setattr(builder.catalog, "workloads", lambda spec, level: [WORKLOAD])
    _, [bucket] = builder._traces(Spec(), ARCH, [work_dir])
    assert "us" not in bucket
    assert bucket["modelled_us"] > 0
    assert bucket["tuned"]


def measured(tmp_path, work_dir=None):
    """Tune on the stand-in for a GPU, into ``work_dir``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "stands_in", lambda *_: False)
        patch.setattr(fake_gpu, "describe", fake_gpu.describe_any)
        folder = work_dir or tmp_path / "measured"
        return folder, run(folder, exporter="tests.kit.fake_workload:export", trials=4)


def test_measured_records_come_before_modelled_ones(work_dir, tmp_path):
    commit(work_dir, tmp_path / "logs")
    folder, result = measured(tmp_path)
    assert result.model is None
    commit(folder, tmp_path / "logs")
    [entry] = records.read_meta(folder_of(tmp_path / "logs", "row_sum", ARCH))["workloads"].values()
    assert "modelled" not in entry
    assert entry["best_us"] == pytest.approx(result.best[WORKLOAD.tag], abs=1e-3)
    found = records.read_records(folder_of(tmp_path / "logs", "row_sum", ARCH))
    assert {record.model for record in found} == {None}
    assert commit(work_dir, tmp_path / "logs") == {}  # and the modelled ones do not come back
    assert logs.check([tmp_path / "logs"], from_meta) == []


def test_one_work_folder_keeps_both_apart(tmp_path):
    run(tmp_path, trials=5)
    _, result = measured(tmp_path, tmp_path)
    assert result.history[0]["kind"] == "default"  # not known: it was modelled
    found = records.read_records(folder_of(tmp_path, "row_sum", ARCH))
    assert sorted({str(record.model) for record in found}) == sorted(["None", MODEL])
    hit = logs.find(WORKLOAD, ARCH, [tmp_path])
    assert hit is not None
    assert hit.model is None
    assert hit.us == pytest.approx(result.best[WORKLOAD.tag])


def test_the_user_is_told(tmp_path, capfd):
    run(tmp_path, trials=1)
    told = capfd.readouterr().err
    assert f"a model of a B200 ({MODEL}) says what they take; nothing is measured" in told


def test_only_what_the_model_knows_is_modelled(monkeypatch):
    monkeypatch.setattr(modelled, "_has_gpu", lambda arch: False)
    assert not modelled.stands_in(ARCH, [WORKLOAD])
    assert not modelled.stands_in("sm_90a", [])
    assert modelled.stands_in(ARCH, [])
    monkeypatch.setattr(modelled, "_has_gpu", lambda arch: True)
    assert not modelled.stands_in(ARCH, [])


def test_a_library_shows_how_many_buckets_are_modelled():
    buckets = [{"tuned": True, "us": 1.0}, {"tuned": True, "modelled_us": 2.0}, {"tuned": False}]
    assert cli_build._tuned(buckets[:1]) == "1 of 1"
    assert cli_build._tuned(buckets) == "2 of 3, 1 modelled"


GEMM = MmFp4(n=512, k=512, fmt="nvfp4")


def scheduled(rows: int):
    """Return a GEMM's workload and its default schedule for any number of rows."""
    workload = next(w for w in catalog.workloads(GEMM, ARCH) if w.rows == rows)
    sch = new_schedule(workload.symbolic(ARCH))
    workload.default(sch, ARCH)
    return workload, sch


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_a_gemm_is_built_and_timed(tmp_path):
    workload, sch = scheduled(catalog.workloads(GEMM, ARCH)[0].rows)
    mod = type(sch.mod)({"main": sch.mod["main"].with_attr(SPEC, "[]")})
    modelled.export(mod, str(catalog.target(ARCH)), tmp_path / "1.so")
    found = json.loads((tmp_path / "1.so").read_text())
    assert [kernel["spills"] for kernel in found["kernels"]] == [0]
    us = b200.time_us(read(sch.mod["main"]), workload.rows).us
    [seconds] = modelled.measure(str(tmp_path / "1.so"), workload.rows).run_secs
    assert seconds * 1e6 == pytest.approx(us, rel=1e-4)


def test_machine_code_that_spills_is_no_candidate(tmp_path, monkeypatch):
    _, sch = scheduled(catalog.workloads(GEMM, ARCH)[0].rows)
    mod = type(sch.mod)({"main": sch.mod["main"].with_attr(SPEC, "[]")})
    spilled = nvcc.Compiled(b"", ({"name": "kernel", "spills": 8},))
    monkeypatch.setattr(nvcc, "compile_cuda_source", lambda *_: spilled)
    with pytest.raises(RuntimeError, match="ptxas spills 8 bytes of registers for sm_100a"):
        modelled.export(mod, str(catalog.target(ARCH)), tmp_path / "1.so")
    assert not (tmp_path / "1.so").exists()


def test_workloads_of_a_gemm_do_not_share_records():
    """Tiles are padded, so different numbers of rows may be the same loops: times must not mix."""
    mods = [w.mod(ARCH) for w in catalog.workloads(GEMM, ARCH)]
    assert len({logs.workload_digest(mod) for mod in mods}) == len(mods)


def test_the_cost_model_sees_decisions_by_name():
    workload = catalog.workloads(GEMM, ARCH)[-1]
    space = Space(workload.mod(ARCH), workload.space(ARCH), 1, workload.facts(ARCH))
    names = sorted({name for design in space.designs for name in design.facts})
    rng = Random(1)
    points = [space.random(rng) for _ in range(6)]
    for point, row in zip(points, space.features(points), strict=True):
        plan = read(replay(workload.mod(ARCH), space.trace(point)).mod["main"])
        assert plan.illegal() is None
        wanted = pipe_facts.named(plan)
        got = dict(zip(names, row, strict=True))
        assert got == pytest.approx({name: math.log2(1 + v) for name, v in wanted.items()})


def test_designs_trade_their_choices():
    workload = catalog.workloads(GEMM, ARCH)[-1]
    space = Space(workload.mod(ARCH), workload.space(ARCH), 1, workload.facts(ARCH))
    rng = Random(1)
    for _ in range(50):
        first, second = space.random(rng), space.random(rng)
        child = space.cross(first, second, rng)
        assert child[0] == second[0]
        parent, made = space._named(first), space._named(child)
        for choice, decision in zip(space.designs[child[0]].choices, child[1], strict=True):
            assert decision in choice.options
            offered = {values[0] for values in choice.values}
            if first[0] != second[0] and parent.get(choice.name) in offered:
                assert made[choice.name] == parent[choice.name]


def test_logs_of_two_workloads_with_the_same_ir_are_a_problem(work_dir, tmp_path):
    commit(work_dir, tmp_path)
    path = folder_of(tmp_path, "row_sum", ARCH) / records.META
    meta = json.loads(path.read_text())
    meta["workloads"]["twin"] = meta["workloads"][WORKLOAD.tag]
    path.write_text(json.dumps(meta))
    found = [str(problem) for problem in logs.check([tmp_path], from_meta)]
    assert any(f"'{WORKLOAD.tag}' and 'twin' are the same TensorIR" in text for text in found)
