"""The tcgen05 GEMM kernel in the emulator: every format and every kind of plan against float64.

A float32 result may differ by 1e-5 of its row: the tensor core's sums are float32, and sums of 512
products of random signs lose less than 1e-6.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockscale.base.formats import GEMM
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.pipe.emit import emit
from blockscale.lower.pipe.maps import tensor_maps
from blockscale.specs.plans.gemm import GemmPlan, PlanError
from tests.kit import gemm_harness as harness
from tests.kit.pairwise import each, few, seeds, those

ROWS, COLUMNS, DEPTHS = (1, 7, 128, 200, 257), (64, 256, 384), (128, 512, 448)

STRUCTURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "store_tma": {"store": "tma", "raster": "y", "acc_stages": 1},
    "pair": {"cta_group": 2, "mma_n": 256, "acc_stages": 1, "epi_cols": 64},
    "pair_tma": {"cta_group": 2, "mma_n": 64, "store": "tma", "group": 2},
    "overlap": {"mma_n": 256, "stages": 2, "epi_cols": 16, "store": "tma"},
    "swap": {"swap": True, "mma_n": 32},
    "swap_pair": {"swap": True, "cta_group": 2, "mma_n": 192, "store": "tma"},
    "multicast": {"cluster_x": 2, "cluster_y": 2, "mma_n": 64},
    "multicast_pair": {"cta_group": 2, "cluster_x": 4, "cluster_y": 2, "swap": True, "mma_n": 64},
    "split": {"split_k": 2, "mma_n": 192, "acc_stages": 1, "epi_cols": 64, "stages": 2},
    "split_swap": {"split_k": 3, "swap": True, "mma_n": 64, "acc_stages": 1},
}


def run(plan: GemmPlan, rows: Any, **options: Any) -> None:
    """Run a plan and fail unless it is right."""
    harness.judge(plan, harness.run(plan, rows, **options))


SPILLS = (("sm_100a", "nvfp4"), ("sm_100f", "mxfp8xmxfp4"))
"""Three targets together are built in test_gemm_library.py."""


def matrix_case(number: int, fmt: str, m: int, n: int, k: int) -> tuple[str, GemmPlan]:
    """Return the plan of case ``number`` of formats and sizes: each takes the next structure."""
    names = list(STRUCTURES)
    for name in names[number % len(names) :] + names:
        try:
            return name, harness.plan(fmt=fmt, n=n, k=k, **STRUCTURES[name])
        except PlanError:  # K has fewer stages than split-K has CTAs
            continue
    raise AssertionError("no structure is legal")


def committed() -> list[tuple[str, int, int, int]]:
    """Return formats and sizes: every format with every M, N and K."""
    found = []
    for i, fmt in enumerate(GEMM):
        for j, m in enumerate(ROWS):
            found.append((fmt, m, COLUMNS[(i + j) % 3], DEPTHS[(i + 2 * j) % 3]))
    return found


def by_default(number: int) -> bool:
    """Each format once, with one row or more, in four structures; 5 and 10 have one row."""
    fmt, rows = divmod(number, len(ROWS))
    return rows == (4, 0, 0, 3)[fmt]


@those(by_default, number=range(len(committed())))
def test_formats_and_sizes(number: int) -> None:
    """Every format with every M, N and K of the issue, over all structures."""
    fmt, m, n, k = committed()[number]
    _, plan = matrix_case(number, fmt, m, n, k)
    run(plan, m, bias=number % 2 == 1, alpha=number % 3 > 0)


@pytest.mark.parametrize("name", few(list(STRUCTURES)))
def test_structures(name: str) -> None:
    """Every structure on ragged sizes, several tiles a cluster."""
    run(harness.plan(n=384, k=448, **STRUCTURES[name]), 257, bias=True, alpha=True)


@seeds(5)
@pytest.mark.parametrize("name", ["swap_pair", "multicast_pair", "split_swap"])
def test_interleavings(name: str, seed: int) -> None:
    """Five orders in which warps and asynchronous work may run, of `test_structures`."""
    run(harness.plan(n=384, k=448, **STRUCTURES[name]), 71, seed=seed, bias=True)


GROUPED: tuple[dict[str, Any], ...] = (
    {"fmt": "nvfp4", "store": "tma", "out_dtype": "bfloat16"},
    {"fmt": "nvfp4", "cta_group": 2, "mma_n": 64, "group": 2},
    {"fmt": "mxfp4", "swap": True, "mma_n": 64, "store": "tma"},
    {"fmt": "mxfp8xmxfp4", "swap": True, "cta_group": 2, "mma_n": 192, "raster": "y"},
)


@pytest.mark.parametrize("number", few(range(len(GROUPED))))
def test_grouped(number: int) -> None:
    """Experts with 0, 1, 128 and 300 rows, an alpha each."""
    plan = harness.plan(experts=4, n=200, k=256, **GROUPED[number])
    run(plan, [0, 1, 128, 300], alpha=True, clusters=3)


@each(swap=[False, True], store=["tma", "direct"])
def test_rows_of_no_expert(swap: bool, store: str) -> None:
    """Rows of d behind the last expert's are not written, in tiles that hold both."""
    plan = harness.plan(experts=2, n=72, k=128, swap=swap, store=store, mma_n=64)
    run(plan, [40, 23], spare=100)


@pytest.mark.parametrize("rows", [23, 87])
def test_swapped_pair_takes_the_rows_that_are_left(rows: int) -> None:
    """N of the MMA is what is left, rounded up to 16; the peer's half begins in the middle."""
    run(harness.plan(n=72, k=128, swap=True, cta_group=2, mma_n=64), rows)


@pytest.mark.parametrize("swap", few([True, False]))
def test_narrow_split(swap: bool) -> None:
    """Split-K where a tile reaches beyond the columns of d."""
    plan = harness.plan(n=72, k=256, swap=swap, split_k=2, acc_stages=1, mma_n=64)
    run(plan, 40, bias=True, alpha=True)


def test_many_experts() -> None:
    """More experts than threads, most of them empty: one table row a thread is not enough."""
    rows = [0] * 400
    rows[3], rows[4], rows[191], rows[192], rows[399] = 5, 17, 1, 33, 2
    run(harness.plan(experts=400, n=64, k=128, swap=True, mma_n=32, stages=2), rows, alpha=True)


@pytest.mark.parametrize("experts", [0, 3])
def test_no_rows(experts: int) -> None:
    """M = 0 ends, and touches nothing."""
    plan = harness.plan(experts=experts, store="tma")
    run(plan, [0] * experts if experts else 0)


@each(dtype=["bfloat16", "float16"], swap=[False, True], store=["tma", "direct"])
def test_rounding(dtype: str, swap: bool, store: str) -> None:
    """16-bit results are the float64 result rounded to nearest."""
    plan = harness.plan(n=64, k=128, out_dtype=dtype, swap=swap, store=store, mma_n=64)
    run(plan, 40, bias=True, alpha=True)


@pytest.mark.parametrize("n", few([33, 34, 36, 40]))
def test_narrow_stores(n: int) -> None:
    """Rows of d that are aligned to 2, 4, 8 and 16 bytes."""
    run(harness.plan(n=n, k=128, out_dtype="bfloat16", mma_n=64), 40, bias=True)


@those(
    lambda k, swap: (k, swap) in ((32, False), (448, True)),
    k=[32, 96, 160, 448],
    swap=[False, True],
)
def test_ragged_spread(k: int, swap: bool) -> None:
    """4-bit rows that TMA cannot spread, since they are no multiple of 128 elements."""
    run(harness.plan(fmt="mxfp8xmxfp4", n=64, k=k, swap=swap, mma_n=64), 40)


@those(lambda arch, fmt: (arch, fmt) in SPILLS, arch=["sm_100a", "sm_103a", "sm_100f"], fmt=GEMM)
def test_compiles_without_spills(arch: str, fmt: str) -> None:
    """ptxas accepts the kernel for every target and spills nothing."""
    wide = {"cta_group": 2, "mma_n": 256, "store": "tma", "out_dtype": "bfloat16", "epi_cols": 64}
    plan = harness.plan(fmt=fmt, n=4096, k=7168, stages=4, acc_stages=1, **wide)
    (used,) = compile_cuda_source(emit(harness.kernel(plan), "gemm"), arch).resources
    assert used["spills"] == 0
    assert used["stack"] == 0


def test_every_decision_reaches_the_kernel() -> None:
    """Its text or its maps."""
    base = harness.plan(n=1024, k=2048, store="tma", cluster_x=2, cluster_y=2)
    changes: dict[str, Any] = {
        "fmt": "mxfp4", "out_dtype": "bfloat16", "n": 512, "k": 1024, "swap": True,
        "cta_group": 2, "mma_n": 256, "block_k": 256, "stages": 4, "cluster_x": 4, "cluster_y": 1,
        "acc_stages": 1, "epi_cols": 16, "store": "direct", "raster": "y", "group": 4,
    }  # fmt: skip
    fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
    for name, value in changes.items():
        other = GemmPlan(**(fields | {name: value})).check()
        assert printed(other) != printed(base), name
    assert tensor_maps(harness.kernel(base))[-1].box == (32, 32)


def printed(plan: GemmPlan) -> tuple[Any, ...]:
    """The kernel's text and maps."""
    kernel = harness.kernel(plan)
    return emit(kernel, "gemm"), tensor_maps(kernel)


def test_judge_sees_wrong_rows() -> None:
    """The judge of these tests fails on one wrong element and on one that was not written."""
    plan = harness.plan(n=64, k=128)
    result = harness.run(plan, 7)
    harness.judge(plan, result)
    for value in (np.nan, result.got[3, 5] * 1.01):
        result.got[3, 5] = value
        with pytest.raises(AssertionError, match="row 3"):
            harness.judge(plan, result)
