"""Tuning the GEMMs of MoE layers: the flow with a stand-in for the GPU, and how one measures."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from blockscale import catalog, emulator
from blockscale.building import logs, records
from blockscale.building.commit import commit
from blockscale.building.space import new_schedule
from blockscale.building.store import folder_of
from blockscale.catalog import moe as catalog_moe
from blockscale.lower.warp.derive import derive
from blockscale.schedules.steps import preferred
from blockscale.specs import Spec
from blockscale.specs.plans.moe import E4M3, MoeGemm, scale_bytes
from blockscale.tuning import exporter, gpu, moe, site, worker
from blockscale.tuning.tuner import tune
from blockscale.tuning.worker import Timing
from tests.kit import fake_moe_gpu
from tests.kit.moe_harness import blocks_of, kernel, plan

NAME = "fused_moe_nvfp4_e8_k2_h512_i256_swiglu_tiles64_bf16"
SPEC = Spec.parse(NAME)
ARCH = "sm_90a"
SMALL = MoeGemm("nvfp4", 16, False, "bfloat16", "swiglu", 3, 128, 128, 2)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A work folder of a layer's GEMMs at 8 and 512 tokens, and what the session found."""
    work_dir = tmp_path_factory.mktemp("tuned")
    found = [w for w in catalog.workloads(SPEC, ARCH) if w.rows in (8, 512)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "gpu", fake_moe_gpu)
        patch.setattr(site, "_GPU_NEEDS", "tvm")
        patch.setattr(moe, "measure", fake_moe_gpu.measure)
        result = tune(
            found, target=ARCH, seconds=60, trials_each=6, work_dir=work_dir, workers=2,
            progress=False, exporter="tests.kit.fake_moe_gpu:export",
        )  # fmt: skip
    return work_dir, result


def test_the_default_comes_first_and_every_trial_is_kept(tuned):
    work_dir, result = tuned
    assert len(result.best) == 4
    assert result.trials == 24
    for tag in result.best:
        lines = [h for h in result.history if h["workload"] == tag]
        assert [h["kind"] for h in lines] == ["default"] + ["search"] * 5
        assert not any(h["failed"] for h in lines)
        assert result.best[tag] == min(h["us"] for h in lines)
    found = records.read_records(folder_of(work_dir, "fused_moe", ARCH))
    assert len({(r.workload, r.key) for r in found}) == 24


def test_committed_logs_choose_the_plans(tuned, tmp_path):
    """The best record of each workload is found, says which GEMM it is, and makes the buckets."""
    work_dir, result = tuned
    assert commit(work_dir, tmp_path, top_k=2) == pytest.approx(result.best)
    meta = json.loads((tmp_path / "fused_moe" / ARCH / "meta.json").read_text())
    assert {entry["part"] for entry in meta["workloads"].values()} == {1, 2}
    assert logs.check([tmp_path]) == []
    traces = {}
    for work in catalog.workloads(SPEC, ARCH):
        hit = logs.find(work, ARCH, [tmp_path])
        assert (hit is not None) == (work.tag in result.best)
        if hit is not None:
            traces[work.tag] = hit.trace
            assert hit.us == pytest.approx(result.best[work.tag])
    for bucket in catalog_moe.bodies(SPEC, ARCH, traces):
        for part, tokens in ((1, {24: 8, 1536: 512}.get(bucket.limit)),):
            if tokens is not None:
                us = 1e6 * fake_moe_gpu.seconds(fake_moe_gpu.plan_of(bucket[part]), tokens)
                assert us == pytest.approx(result.best[f"{NAME}_gemm{part}_m{tokens}"])


def test_logged_workloads():
    """An entry of meta.json names its GEMM."""
    for work in catalog.workloads(SPEC, ARCH):
        assert catalog.logged(work.entry()) == work


def scheduled(tmp_path, number):
    """Return a scheduled GEMM and where its candidate's file belongs."""
    work = catalog.workloads(SPEC, ARCH)[2]
    sch = new_schedule(work.mod(ARCH))
    work.sketches(ARCH)[number](sch, preferred)
    session = tmp_path / ".session"
    session.mkdir(exist_ok=True)
    return sch.mod["main"], session / f"{number}.so"


def test_a_kernel_is_compiled_once(tmp_path, monkeypatch):
    """Other candidates find its machine code; so does a later session."""
    calls = []

    class Compiled:
        image = b"code"

    def compile_cuda_source(text, arch):
        calls.append(text)
        return Compiled()

    monkeypatch.setattr("blockscale.lower.nvcc.compile_cuda_source", compile_cuda_source)
    for number in (0, 1, 0):
        func, out = scheduled(tmp_path, number)
        exporter._export_moe(func, ARCH, out)
        about, code = out.read_bytes().split(b"\n")
        made = derive(func)
        wanted = (made.cols_tile, made.rows_tile, made.threads, made.shared)
        assert moe.Launch(**json.loads(about)) == wanted
        assert code == b"code"
    assert len([*(tmp_path / "kernels").glob("*.cubin")]) == 2
    assert len(calls) == 2
    monkeypatch.setattr("blockscale.lower.nvcc.FLAGS", ("-O1",))
    exporter._export_moe(func, ARCH, out)
    assert len(calls) == 3


# ---- Operands -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [8, 16, 48, 160])
def test_blocks(tokens):
    """Those of the device's sort, which the harness has in other words."""
    rng = np.random.default_rng(tokens)
    ids = rng.integers(0, 7, (200, 3)).astype(np.int32)
    ids[ids == 4] = 5
    order, counts = moe.sorted_slots(ids, 7)
    want_order, want = blocks_of(ids, 7, tokens)
    assert np.array_equal(order, want_order)
    assert np.array_equal(moe.blocks_of(counts, tokens), want)


def test_routings_are_uniform_and_cold():
    """One token: no expert comes again before all had their turn; else distinct for each token."""
    calls = moe.routings(128, 8, 1)
    assert len(calls) == 16
    assert len(set(np.concatenate(calls).ravel())) == 128
    for tokens in (8, 64, 512):
        for ids in moe.routings(32, 8, tokens):
            assert ids.shape == (tokens, 8)
            assert all(len(set(row)) == 8 for row in ids)
    for experts, top_k, rows, k, tokens in (
        (128, 8, 1536, 2048, 1), (128, 8, 2048, 768, 8), (8, 2, 28672, 4096, 64),
    ):  # fmt: skip
        gemm = replace(SMALL, experts=experts, top_k=top_k, rows=rows, k=k)
        calls = moe.routings(experts, top_k, tokens)
        made = moe.operands(gemm, tokens)
        each, size = moe.weight_bytes(gemm, made, calls)
        expert = rows * k // 2 + rows * k // 16
        assert size == experts * expert
        touched = [np.unique(ids).size * expert for ids in calls]
        assert each == (sum(touched) if tokens == 1 else min(touched))
        assert gpu.set_count(each, size, 50 << 20, len(calls)) * each >= 3 * (50 << 20)


def test_sizes():
    """Codes are half a byte; scales are those of `scale_bytes`."""
    for fmt, group, zeros in (("nvfp4", 16, False), ("mxfp4", 32, False), ("int4", 128, True),
                              ("int4", 64, False), ("int4", 32, True)):  # fmt: skip
        gemm = replace(SMALL, fmt=fmt, group=group, zeros=zeros, k=256)
        made = {each.name: each for each in moe.operands(gemm, 4)}
        assert np.prod(made["packed"].shape) == 3 * 128 * 256 // 2
        blocks = (3, 128 // 64, 2 if group == 128 else 4)
        assert made["block_scale"].shape == (*blocks, scale_bytes(fmt, group, zeros))
        assert made["block_scale"].dtype == "uint8"
        assert made["x"].shape == (4, 256)
        assert made["out"].shape == (8, 64)
        assert made["factor"].range == (2.0**-6, 2.0**-6)


def test_operands_of_8_bits():
    """Rows are E4M3 with a scale each, and each row of the weights has a factor."""
    gemm = replace(SMALL, fmt="mxfp4", group=32, k=256, bytewise=True, operand=E4M3)
    for part, rows in ((gemm, 4), (replace(gemm, activation="none"), 8)):
        made = {each.name: each for each in moe.operands(part, 4)}
        assert (made["x"].dtype, made["x"].shape) == ("uint8", (rows, 256))
        low, high = made["x"].range
        found = torch.arange(low, high, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        assert (found.min(), found.max()) == (2**-3, 3.75)
        assert made["row_scale"].shape == (rows,)
        assert made["factor"].shape == (3, 128)


# ---- A candidate --------------------------------------------------------------------------------


class Emulated:
    """A kernel whose launches the emulator runs, on the memory that arguments point to."""

    def __init__(self, of, gemm, held):
        self.kernel, self.code = kernel(of, gemm)
        self.held = held
        self.about = moe.Launch(of.rows, of.tokens, self.kernel.threads, self.kernel.shared)

    def launch(self, arguments, grid, stream):
        assert stream == 0
        held = self.held()
        tensors = [held.x, *held.weights[0], held.factor, None, held.row_scale, held.orders[0]]
        tensors += [*held.tables[0, self.about.tokens], held.out]
        pointers, numbers = arguments[:10], arguments[10:]
        for pointer, each in zip(pointers, tensors, strict=True):
            assert isinstance(pointer, ctypes.c_void_p)
            assert pointer.value == (None if each is None else each.data_ptr())
        arrays = [None if each is None else as_array(each) for each in tensors]
        report = emulator.launch(
            self.code, entry="moe", grid=min(grid, 2), block=self.about.threads,
            dynamic_smem=self.about.shared,
            args=[*arrays, *(number_of(number) for number in numbers)],
        )  # fmt: skip
        report.check()


def number_of(number):
    """Return a number as the emulator takes it."""
    return np.float32(number.value) if isinstance(number, ctypes.c_float) else int(number.value)


def as_array(of):
    """Return a tensor's memory as an array, which shares it."""
    return (of.view(torch.int16) if of.dtype in (torch.bfloat16, torch.float16) else of).numpy()


@pytest.fixture
def on_cpu(monkeypatch):
    """Operands in the memory of the CPU; nothing asks for a GPU."""

    class Stream:
        cuda_stream = 0

    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "l2_bytes", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu, "crowded", lambda: True)
    timed = []
    monkeypatch.setattr(gpu, "times", lambda run, sets, timing: timed.append(sets) or (1e-5,))
    yield timed
    worker.held.clear()


GEMMS = [
    SMALL,
    MoeGemm("int4", 128, False, "float16", "none", 3, 128, 128, 2),
    MoeGemm("int4", 32, True, "bfloat16", "relu2", 3, 64, 128, 2),
    MoeGemm("mxfp4", 32, False, "bfloat16", "swiglu_oai", 3, 128, 64, 2),
    *(
        MoeGemm("mxfp4", 32, 0, "bfloat16", act, 3, 128, 256, 2, bytewise=True, operand=E4M3)
        for act in ("swiglu", "none")
    ),
]


@pytest.mark.parametrize("gemm", GEMMS, ids=str)
def test_candidates_agree_with_the_default(gemm, on_cpu, monkeypatch):
    """Kernels of both units compute the same from what is measured on; a wrong one is found."""
    own = ("fmt", "group", "zeros", "dtype", "activation", "bytewise", "operand")
    fixed = {name: getattr(gemm, name) for name in own}
    more = {"unit": "wgmma", "rows": 64, "tokens": 16, "slices": 1}
    plans = {"default": plan(**fixed), "other": plan(**fixed, **more)}
    if gemm.operand:
        more |= {"rows": 128, "stages": 2}
        plans = {
            "default": plan(**fixed, **more | {"tokens": 8, "blocks_k": 4, "partial": 256}),
            "other": plan(**fixed, **more, partial=128),
        }

    def holding():
        return making[0]

    making = []
    first = moe.Held.run

    def run(self, kernel):
        making[:] = [self]
        return first(self, kernel)

    monkeypatch.setattr(moe.Held, "run", run)
    monkeypatch.setattr(
        moe.Kernel, "of", staticmethod(lambda library: Emulated(plans[library], gemm, holding))
    )
    good = moe.measure("other", gemm, 4, Timing(), "default")
    assert (good.run_secs, good.error, good.broken) == ((1e-5,), None, False)
    (held,) = worker.held.values()
    assert torch.isfinite(held.out.float()).all()
    assert held.out.float().abs().mean() > 1e-3
    assert (held.row_scale is None) == (not gemm.operand)  # as a layer calls it
    assert on_cpu == [held.calls()]
    # While a graph is captured, nothing may be copied to the GPU.
    assert {key for key in held.tables if key[1] == 16} == {(i, 16) for i in range(len(held.ids))}
    held._wanted[0][1, 3] += 1
    monkeypatch.setattr(moe, "Held", lambda *_: held)
    bad = moe.measure("other", gemm, 4, Timing(), "default")
    assert "1 of" in str(bad.error)
    assert "differ from the default schedule's" in str(bad.error)


def test_a_launch_that_fails_ends_the_process(on_cpu, monkeypatch):
    """Its context may be lost: the tuner starts another one."""

    def fail(library):
        raise RuntimeError("cuLaunchKernel: CUresult 700")

    monkeypatch.setattr(moe.Kernel, "of", staticmethod(fail))
    found = moe.measure("a", SMALL, 4, Timing(), "a")
    assert found.broken
    assert found.error == "run: cuLaunchKernel: CUresult 700"
