"""Linear layers as users get them on GPUs: built into a library, host code and kernels emulated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blockscale import emulator
from blockscale.base.targets import CTA_RESERVED, GPU_TARGETS
from blockscale.catalog.gemm import LINEAR_GPU_BUCKETS
from blockscale.runtime.function_cuda import PROGRAMMATIC
from blockscale.specs import Linear
from tests.kit.gpu_library import library as gpu_library
from tests.kit.linear_harness import ACT, prepared, weight
from tests.kit.pairwise import few
from tests.reference import moe

PLAIN = Linear(192, 512, "nvfp4", "bfloat16", layout="tiles64")
FULL = Linear(
    256, 448, "mxfp4", "float16", layout="tiles64", activation="silu", gated=True, residual=True
)  # fmt: skip
SMS = 4


def library(of, arch="sm_90a"):
    """Return the library that has this function."""
    return gpu_library([of], arch)


def call(spec, rows, target="sm_90a", flags=PROGRAMMATIC, sms=SMS, arch=None):
    """Return the launches, y and what it should be; ``arch``: what it is built for."""
    made, gains = weight(spec, rows), np.array([0.5, 1.5][: 1 + spec.gated])
    w = prepared(spec, made, gains)
    dtype = getattr(torch, spec.dtype)
    x = torch.from_numpy(moe.random_hidden(rows, spec.k, spec.dtype, rows).astype(np.float32))
    bias = torch.linspace(-1, 1, spec.n)
    residual = [torch.linspace(-3, 3, rows * spec.cols).view(rows, -1).to(dtype)]
    y = torch.full((rows, spec.cols), float("nan"), dtype=dtype)
    given = [w.packed, w.block_scale, w.global_scale, bias, *residual[: spec.residual], y]
    run = emulator.run_module(
        library(spec, arch or target),
        spec.name,
        x.to(dtype),
        *given,
        flags,
        target=target,
        multiprocessors=sms,
    )
    run.check()
    hazards = [hazard.kind for report in run.reports for hazard in report.hazards]
    assert "programmatic launch" not in hazards
    sums = np.split(x.numpy().astype(np.float64) @ made.value.T, 1 + spec.gated, 1)
    shifts = np.split(bias.numpy(), 1 + spec.gated)
    parts = [s * g + b for s, g, b in zip(sums, gains, shifts, strict=True)]
    want = ACT[spec.activation](parts[0]) * (parts[1] if spec.gated else 1)
    want = want + (residual[0].double().numpy() if spec.residual else 0)
    return run.launches, y.double().numpy(), want


@pytest.mark.parametrize(("spec", "rows"), few([(PLAIN, 1), (PLAIN, 20), (FULL, 40), (FULL, 3)]))
def test_each_bucket(spec, rows):
    launches, got, want = call(spec, rows)
    [launch] = launches
    assert launch.programmatic
    limits = [bucket.limit for bucket in LINEAR_GPU_BUCKETS]
    assert any(launch.kernel.endswith(f"kernel{i}") for i in range(len(limits)))
    error = np.sqrt(((got - want) ** 2).sum(1) / (want**2).sum(1))
    assert error.max() < (4e-3 if spec.dtype == "bfloat16" else 1e-3)


def test_blackwell_multiplies_few_rows_by_warps_and_many_by_tcgen05():
    """One row and 300: a CTA of tcgen05 has an SM, and so its tensor memory, to itself."""
    half = GPU_TARGETS["sm_100a"].sm_shared // 2 - CTA_RESERVED
    kernels = []
    for rows in (1, 300):
        [launch], got, want = call(PLAIN, rows, target="sm_100a")
        error = np.sqrt(((got - want) ** 2).sum(1) / (want**2).sum(1))
        assert error.max() < 4e-3
        assert launch.programmatic
        kernels.append(launch.kernel)
    assert kernels[0] != kernels[1]
    assert launch.dynamic_smem > half


def test_a_bucket_ends_with_its_last_row():
    assert [bucket.limit for bucket in LINEAR_GPU_BUCKETS[:2]] == [1, 8]
    kernels = [call(PLAIN, rows)[0][0].kernel for rows in (1, 2, 8, 9)]
    assert [name[-1] for name in kernels] == list("0112")


@pytest.mark.parametrize(("sms", "alone"), [(6, True), (5, False)])
def test_ctas_have_an_sm_each_where_all_fit(sms, alone):
    """Else those of a kernel that begins early would share the SMs which become free first."""
    [launch], got, want = call(PLAIN, 16, sms=sms)
    assert launch.cluster[0] > 1
    assert launch.grid[0] == 6
    half = GPU_TARGETS["sm_90a"].sm_shared // 2 - CTA_RESERVED
    assert (launch.dynamic_smem > half) == alone
    assert np.abs(got - want).max() < 4e-3 * np.abs(want).max()


@pytest.mark.parametrize(("sms", "grid"), [(5, 4), (60, 52)])
def test_ctas_that_load_rows_for_each_other_are_launched_together(sms, grid):
    """Pairs of neighbours along the weight: all 26, or two that take tiles in turn."""
    [launch], got, want = call(FULL, 1537, sms=sms)
    assert (launch.cluster[0], launch.grid[0]) == (2, grid)
    error = np.sqrt(((got - want) ** 2).sum(1) / (want**2).sum(1))
    assert error.max() < 1e-3


def test_wrong_shapes_are_refused():
    x = torch.zeros((3, 500), dtype=torch.bfloat16)
    w = prepared(PLAIN, weight(PLAIN, 0), np.ones(1))
    y = torch.zeros((3, 192), dtype=torch.bfloat16)
    with pytest.raises(Exception, match="512"):
        emulator.run_module(
            library(PLAIN), PLAIN.name, x, w.packed, w.block_scale, w.global_scale, None, y,
            target="sm_90a", multiprocessors=SMS,
        )  # fmt: skip
