"""Specs of what moves rows between ranks: names, sizes, schedules; the sum on a CPU."""

import numpy as np
import pytest
import torch
from tvm.s_tir import Schedule

from blockscale import catalog
from blockscale.specs import EpCombine, EpDispatch, EpReduce, Spec
from blockscale.specs.exchange import row_bytes, symmetric, symmetric_bytes
from tests.kit.kernels import call, compiled

SPECS = [
    EpDispatch(4, 8, 2, 64),
    EpCombine(2, 8, 3, 48, "float16"),
    EpReduce(8, 3, 24, "float32"),
    EpDispatch(2, 8, 2, 96, act_fmt="nvfp4"),
    EpDispatch(4, 8, 2, 48, "float16", "fp8"),
    EpCombine(3, 8, 2, 96, sums=True),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_names_and_json(spec):
    assert Spec.parse(spec.name) == spec
    assert Spec.from_json(spec.to_json()) == spec


def test_sizes_of_the_buffer():
    """As docs/ep.md has them, parts one after the other and aligned."""
    ranks, capacity, top_k, hidden = 3, 5, 2, 24
    parts = symmetric(ranks, capacity, top_k, hidden)
    sizes = {name: size for name, (_, size) in parts.items()}
    assert sizes == {"cells": 48, "ids": 120, "weights": 120, "rows": 720, "slots": 480}
    sums = symmetric(ranks, capacity, top_k, hidden, sums=True)
    assert sums == parts | {"slots": (parts["slots"][0], 720)}
    ends = [at + size for at, size in parts.values()]
    assert all(at % 256 == 0 for at, _ in parts.values())
    assert all(end <= at for end, (at, _) in zip(ends, list(parts.values())[1:], strict=False))
    assert 0 <= symmetric_bytes(ranks, capacity, top_k, hidden) - ends[-1] < 256
    ids = 4 * 512 * 8 * 4
    assert symmetric_bytes(4, 512, 8, 7168) == 2 * ids + 2 * (4 + 8) * 512 * 7168 + 256
    assert symmetric_bytes(4, 512, 8, 7168, None, True) == 2 * ids + 2 * (4 + 4) * 512 * 7168 + 256


def test_bytes_of_rows():
    """DeepSeek-V3's: a half and 28 % of the 16 bits; whole multiples of 16."""
    assert [row_bytes(7168, form) for form in (None, "fp8", "nvfp4")] == [14336, 7184, 4032]
    assert [row_bytes(96, form) for form in (None, "fp8", "nvfp4")] == [192, 112, 64]
    sizes = {name: size for name, (_, size) in symmetric(3, 5, 2, 96, "nvfp4").items()}
    assert sizes == {"cells": 48, "ids": 120, "weights": 120, "rows": 960, "slots": 1920}
    assert symmetric_bytes(3, 5, 2, 96, "nvfp4") == 256 + 256 + 256 + 1024 + 2048


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: EpDispatch(33, 64, 2, 64), "ranks=33 is more than 32"),
        (lambda: EpDispatch(2, 64, 2, 60), "hidden=60 is not a multiple of 8"),
        (lambda: EpDispatch(2, 64, 2, 72, act_fmt="fp8"), "hidden=72 is not a multiple of 16"),
        (lambda: EpDispatch(2, 64, 2, 80, act_fmt="nvfp4"), "hidden=80 is not a multiple of 32"),
        (lambda: EpDispatch(2, 64, 2, 64, act_fmt="mxfp8"), "act_fmt='mxfp8' is not known"),
        (lambda: EpCombine(2, 64, 2, 64, "float32"), "dtype='float32' has no kernel"),
        (lambda: EpReduce(64, 65, 64), "top_k=65 is more than 64"),
    ],
)
def test_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("spec", [*SPECS[:2], *SPECS[3:]], ids=lambda spec: spec.name)
def test_workloads_have_schedules(spec):
    """Every bucket's static instance, as a tuner takes it."""
    for workload in catalog.workloads(spec, "sm_90a"):
        sch = Schedule(workload.mod("sm_90a"))
        workload.default(sch, "sm_90a")
        kernels = sum("blockIdx.x" in line for line in sch.mod.script().splitlines())
        assert kernels == 1 + (spec.op == "ep_combine" and workload.rows > 8)


def test_neither_kernel_has_a_cpu_road():
    with pytest.raises(TypeError, match="has no TensorIR"):
        catalog.workloads(SPECS[0], "plain")


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_sums_of_slots(rows):
    """Ascending, in float32; slots without an expert are left out whatever they hold."""
    spec, made = SPECS[2], np.random.default_rng(rows)
    slots = made.standard_normal((rows, 3, 24)).astype(np.float32)
    ids = made.integers(-1, 10, (rows, 3)).astype(np.int32)
    weights = made.random((rows, 3)).astype(np.float32)
    there = (ids >= 0) & (ids < 8)
    slots[~there] = np.nan
    truth = np.zeros((rows, 24))
    for t, j in zip(*np.nonzero(there), strict=True):
        truth[t] += weights[t, j].astype(np.float64) * slots[t, j]
    given = [torch.from_numpy(value) for value in (slots, ids, weights)]
    (out,) = call(compiled(spec, "plain"), given, [torch.full((rows, 24), float("nan"))])
    assert np.abs(out.numpy() - truth).max(initial=0) < 1e-6
