"""The tcgen05 GEMM kernel where its roles meet others: tile order, odd offsets, PDL, peers."""

from __future__ import annotations

import re

import numpy as np
import pytest

from blockscale import emulator
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.pipe.emit import emit
from blockscale.specs.plans.gemm import GemmPlan
from tests.kit import gemm_harness as harness
from tests.kit.pairwise import each, few


def order_in_python(plan: GemmPlan, row_tiles: int, col_tiles: int) -> list[tuple[int, int]]:
    """Bands of ``group`` along one index, in a band the index that does not run goes first."""
    x_is_row = not plan.swap
    runs_row = x_is_row if plan.raster == "x" else not x_is_row
    run, other = (row_tiles, col_tiles) if runs_row else (col_tiles, row_tiles)
    found = []
    for band in range(0, other, plan.group):
        for along in range(run):
            for across in range(band, min(band + plan.group, other)):
                found.append((along, across) if runs_row else (across, along))
    return found


@each(swap=[False, True], raster=["x", "y"], group=[1, 2, 4])
def test_order_of_tiles(swap: bool, raster: str, group: int) -> None:
    """``raster`` is the index that runs along a band of ``group`` tiles of the other index."""
    plan = harness.plan(n=640, swap=swap, raster=raster, group=group)
    (order,) = set(re.findall(r"bs_order<[^>]+>", emit(harness.kernel(plan), "gemm")))
    text = f"""#include "gemm_tiles.cuh"
extern "C" __global__ void order(int *out, int row_tiles, int col_tiles) {{
  int row, col;
  {order}(threadIdx.x, row_tiles, col_tiles, row, col);
  out[2 * threadIdx.x] = row, out[2 * threadIdx.x + 1] = col;
}}"""
    ptx = compile_cuda_source(text, "sm_100a", ptx=True).image.decode()
    row_tiles, col_tiles = 7, 5
    out = np.full(2 * row_tiles * col_tiles, -1, np.int32)
    threads = row_tiles * col_tiles
    emulator.launch(
        ptx, entry="order", grid=1, block=threads, args=[out, row_tiles, col_tiles]
    ).check()
    got = [(int(row), int(col)) for row, col in out.reshape(-1, 2)]
    assert got == order_in_python(plan, row_tiles, col_tiles)


def test_offsets_beyond_a(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the last expert that a does not have are not stored."""
    plan = harness.plan(experts=2, n=64, k=128, mma_n=64)
    launch = emulator.launch

    def beyond(*given, args, **options):
        args[-2][-1] += 100
        return launch(*given, args=args, **options)

    monkeypatch.setattr(harness.emulator, "launch", beyond)
    result = harness.run(plan, [40, 23])
    harness.judge(plan, result)


@pytest.mark.parametrize(
    ("swap", "stages"), few([(False, 2), (True, 5), (True, 2), (False, 4)], every=4)
)
def test_spread_by_pairs(swap: bool, stages: int) -> None:
    """Both CTAs of a pair spread their 4-bit rows before the leader multiplies."""
    plan = harness.plan(
        fmt="mxfp8xmxfp4", n=300, k=416, swap=swap, cta_group=2, mma_n=64, stages=stages
    )
    for seed in range(2):
        harness.judge(plan, harness.run(plan, 150, seed=seed))


@pytest.mark.parametrize("experts", [0, 2])
def test_waits_for_the_kernel_before(experts: int) -> None:
    """Nothing that a kernel before may have written is read ahead of griddepcontrol.wait."""
    ptx = harness.ptx(harness.plan(experts=experts, n=64, k=128, store="tma"))
    lines = ptx[ptx.index(".entry gemm") :].splitlines()
    waits = [i for i, line in enumerate(lines) if "griddepcontrol.wait" in line]
    launches = [i for i, line in enumerate(lines) if "griddepcontrol.launch_dependents" in line]
    touched = re.compile(r"\b(ld|st)\.(volatile\.)?global|cp\.async\.bulk|\bld\.v?[0-9.a-z]*nc")
    first = next(i for i, line in enumerate(lines) if touched.search(line))
    loads = [i for i, line in enumerate(lines) if "cp.async.bulk.tensor" in line and "mbar" in line]
    assert len(waits) == len(launches) == 1
    assert waits[0] < first
    assert launches[0] > max(loads)


@pytest.mark.parametrize("swap", few([False, True]))
def test_narrow_rows_by_tma(swap: bool) -> None:
    """Rows of 32 bytes in shared memory, and their swizzle."""
    plan = harness.plan(
        n=72, k=128, out_dtype="bfloat16", swap=swap, store="tma", mma_n=64, epi_cols=16
    )
    harness.judge(plan, harness.run(plan, 70, bias=True))


@pytest.mark.parametrize("swap", few([True, False]))
def test_experts_share_k(swap: bool) -> None:
    """Split-K of a grouped GEMM: one tile a cluster, clusters without a tile come and go."""
    plan = harness.plan(
        experts=3, n=72, k=384, swap=swap, split_k=3, acc_stages=1, mma_n=64, out_dtype="bfloat16"
    )
    harness.judge(plan, harness.run(plan, [0, 70, 5], alpha=True))


def test_fences_that_only_hardware_misses() -> None:
    """Barriers are visible to TMA and to peers; tensor memory is read and written after waits."""
    ptx = harness.ptx(harness.plan(n=64, k=128, cta_group=2, mma_n=64))
    lines = ptx[ptx.index(".entry gemm") :].splitlines()

    def at(what: str) -> list[int]:
        return [i for i, line in enumerate(lines) if what in line]

    starts = at("barrier.cluster.wait")
    assert at("mbarrier.init")[-1] < at("fence.mbarrier_init")[0] < starts[0]
    (alloc,) = at("tcgen05.alloc")
    assert starts[0] < alloc < starts[1]  # both CTAs of a pair have started when one allocates
    waits, fences = at("mbarrier.try_wait"), at("tcgen05.fence::after_thread_sync")
    for what in ("tcgen05.mma", "tcgen05.ld"):
        first = at(what)[0]
        wait = max(i for i in waits if i < first)
        assert any(wait < fence < first for fence in fences), what
    assert starts[-1] < at("tcgen05.dealloc")[0]
