"""Limits of tcgen05 GEMM plans: just inside each and just outside, with the sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from blockscale.specs.plans.gemm import SMEM_BYTES, TMEM_COLUMNS, GemmPlan, PlanError
from tests.kit import gemm_harness as harness

SPLIT: dict[str, Any] = {"split_k": 4, "acc_stages": 1}
WIDE: dict[str, Any] = {"mma_n": 256, "block_k": 256, "stages": 2}

LIMITS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"cta_group": 3}, "cta_group=3 is neither 1 nor 2"),
    ({}, {"mma_n": 96}, "mma_n=96 is none of"),
    ({"block_k": 256}, {"block_k": 64}, "block_k=64 is none of"),
    ({"fmt": "mxfp8"}, {"block_k": 256}, r"block_k=256 is none of \(128,\)"),
    ({"stages": 2}, {"stages": 1}, "stages=1: loads overlap"),
    ({"experts": 1024}, {"experts": 1025}, "experts=1025 are more than 1024"),
    ({"cluster_x": 8}, {"cluster_x": 16}, "a cluster of 16 CTAs is larger than 8"),
    ({"cta_group": 2}, {"cluster_x": 3}, "cluster_x=3 is no multiple of cta_group=2"),
    (SPLIT, {"cluster_x": 2}, "split_k=4 takes the whole cluster"),
    (SPLIT, {"cta_group": 2, "cluster_x": 2, "split_k": 2}, "split_k=2 takes the whole cluster"),
    (SPLIT, {"split_k": 5}, "split_k=5 leaves CTAs without K"),
    (SPLIT, {"store": "tma"}, "split_k computes one tile"),
    (SPLIT, {"acc_stages": 2}, "split_k computes one tile"),
    ({"cluster_x": 4, "mma_n": 32}, {"cluster_x": 8}, "slice of 128 or 4 rows"),
    ({"experts": 2, "cta_group": 2}, {"cluster_x": 4}, "nothing to multicast"),
    ({"experts": 2}, {"cluster_y": 2}, "nothing to multicast"),
    ({}, {"acc_stages": 3}, "acc_stages=3 is neither 1 nor 2"),
    ({"epi_cols": 64}, {"epi_cols": 128}, "epi_cols=128 is not 16, 32 or 64"),
    ({"mma_n": 32}, {"epi_cols": 64}, "does not divide 32"),
    ({}, {"store": "stg"}, "store='stg' is neither"),
    ({"store": "tma"}, {"epi_cols": 64}, "rows of 256 bytes has no swizzle"),
    ({"store": "tma", "n": 36}, {"n": 37}, "n=37: rows of d are no multiple of 16"),
    ({}, {"raster": "z"}, "is no order of tiles"),
    ({}, {"group": 0}, "is no order of tiles"),
]


@pytest.mark.parametrize(("inside", "outside", "message"), LIMITS, ids=str)
def test_limits(inside: dict[str, Any], outside: dict[str, Any], message: str) -> None:
    """The first plan is legal, and what the second changes is not."""
    plan = harness.plan(**inside)
    with pytest.raises(PlanError, match=message):
        replace(plan, **outside).check()


def deepest(plan: GemmPlan) -> GemmPlan:
    """Return the plan with as many stages as are legal."""
    while replace(plan, stages=plan.stages + 1).illegal() is None:
        plan = replace(plan, stages=plan.stages + 1)
    return plan


def test_shared_memory() -> None:
    """227 KiB, of which the table of experts takes 16 bytes each."""
    assert SMEM_BYTES == 232448  # PTX ISA and CUDA's table of sm_100
    plan = deepest(harness.plan(mma_n=32, experts=1024))
    assert plan.smem_bytes <= 232448 < plan.smem_bytes + plan.stage_bytes
    assert deepest(harness.plan(mma_n=32)).stages > plan.stages
    with pytest.raises(PlanError, match="232448 are the limit; take fewer stages"):
        replace(plan, stages=plan.stages + 1).check()


def test_tensor_memory() -> None:
    """Accumulators share what scales need of 512 columns, whole steps of the epilogue."""
    plan = harness.plan(**WIDE)
    assert plan.scale_columns == 48
    assert (plan.overlap, plan.used_columns, plan.tmem_columns) == (64, 496, 512)
    assert replace(plan, epi_cols=64).overlap == 64
    assert replace(plan, epi_cols=16).overlap == 48
    assert replace(plan, acc_stages=1).overlap == 0
    assert replace(plan, mma_n=192).used_columns == 432 <= TMEM_COLUMNS
    assert harness.plan(mma_n=32).tmem_columns == 128


def test_rows_of_multicast_slices() -> None:
    """A slice of X, too, is whole atoms of 8 rows of a swizzle."""
    plan = replace(harness.plan(cluster_y=8), mma_n=32)
    assert plan.illegal() is None


def test_clusters_never_wait_for_tensor_memory() -> None:
    """CTAs of any kernels that fit into an SM's shared memory fit into its tensor memory."""
    small = harness.plan(mma_n=32, stages=2)
    assert small.launch_bytes == small.smem_bytes
    kinds: tuple[dict[str, Any], ...] = (
        {"cluster_y": 2},
        {"cluster_x": 2, "mma_n": 64, "block_k": 256},
        {"split_k": 2, "acc_stages": 1, "mma_n": 256},
        {"cta_group": 2, "cluster_x": 2, "mma_n": 192},
        {"cta_group": 2, "cluster_x": 2, "mma_n": 128, "stages": 8, "acc_stages": 1},
    )
    plans = [replace(small, **changes).check() for changes in kinds]
    assert sorted({plan.tmem_columns for plan in plans}) == [128, 256, 512]
    for plan in plans:
        assert plan.smem_bytes <= plan.launch_bytes <= SMEM_BYTES
        share = (plan.launch_bytes + 1024) / (228 * 1024)
        assert share >= plan.tmem_columns / TMEM_COLUMNS
