"""The GEMM kernels whose main loops are compared: ours by plan, tirx-kernels' by its configuration.

tirx-kernels is not needed: its figures lie in bench/results/.  Where its CUDA source is at hand
(docs/tcgen05_quality.md), `tirx` says how that kernel is launched and what it keeps where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import tvm

from blockscale.building.space import new_schedule
from blockscale.lower.pipe.check import checked
from blockscale.lower.pipe.derive import derive
from blockscale.lower.pipe.kernel import Kernel
from blockscale.schedules.gemm import tcgen05
from blockscale.specs.plans.gemm import GemmPlan
from blockscale.tir.gemm.tiles import gemm_tiles

SIZES = (1024, 4096, 8192)
"""M = N = K."""

OURS, TIRX = "blockscale", "tirx-kernels"
ENTRY = "nvfp4_gemm"
TIRX_ENTRY = "nvfp4_gemm_kernel_kernel"


@dataclass(frozen=True)
class Geometry:
    """What a kernel keeps where; bytes are those of one CTA, ``tile_*`` those of a cluster."""

    cluster: int
    tile_m: int
    tile_n: int
    block_k: int
    stages: int
    stage_bytes: int
    smem_bytes: int
    threads: int
    accumulators: int
    tmem_used: int
    tmem_allocated: int
    stage_loads: int
    """Bytes that a cluster reads per stage when each byte is read once."""
    mma_flops: int
    """Floating-point operations of one MMA instruction."""

    @property
    def in_flight(self) -> int:
        """Bytes of shared memory that loads may fill ahead of the MMAs."""
        return self.stages * self.stage_bytes

    @property
    def stage_flops(self) -> int:
        """Floating-point operations of a cluster per stage."""
        return 2 * self.tile_m * self.tile_n * self.block_k


def pair(
    size: int, mma_n: int, stages: int, acc_stages: int, epi_cols: int, group: int
) -> GemmPlan:
    """Return a kernel for M = N = K = size: one pair of CTAs, K 256 in a stage, a TMA store."""
    return GemmPlan(
        fmt="nvfp4",
        out_dtype="bfloat16",
        n=size,
        k=size,
        experts=0,
        swap=False,
        cta_group=2,
        mma_n=mma_n,
        block_k=256,
        stages=stages,
        cluster_x=2,
        cluster_y=1,
        split_k=1,
        acc_stages=acc_stages,
        epi_cols=epi_cols,
        store="tma",
        raster="x",
        group=group,
    )


def plan(size: int) -> GemmPlan:
    """Return our kernel for M = N = K = size: two accumulators, as many stages as fit."""
    made = pair(size, 128 if size < 2048 else 256, stages=2, acc_stages=2, epi_cols=32, group=8)
    while replace(made, stages=made.stages + 1).illegal() is None:
        made = replace(made, stages=made.stages + 1)
    return made.check()


@cache
def derived(made: GemmPlan) -> Kernel:
    """Return the kernel that is derived from the schedule of a plan."""
    func = gemm_tiles(made.fmt, made.out_dtype, made.n, made.k, made.experts)
    sch = new_schedule(tvm.IRModule({"main": func}))
    tcgen05.decided(sch, made)
    return checked(derive(sch.mod["main"]))


_PLAIN: Mapping[str, Any] = {
    "fmt": "nvfp4", "out_dtype": "bfloat16", "n": 4096, "k": 4096, "experts": 0, "swap": False,
    "cta_group": 1, "mma_n": 128, "block_k": 128, "stages": 4, "cluster_x": 1, "cluster_y": 1,
    "split_k": 1, "acc_stages": 2, "epi_cols": 32, "store": "tma", "raster": "x", "group": 1,
}  # fmt: skip
_PAIR = {"cta_group": 2, "cluster_x": 2, "mma_n": 256, "block_k": 256, "stages": 5, "group": 8}
_SWAP = {"swap": True, "mma_n": 64, "stages": 6}
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "pair, K 1024": {**_PAIR, "n": 1024, "k": 1024, "mma_n": 128, "stages": 7},
    "pair": _PAIR,
    "pair, 64 columns": {**_PAIR, "stages": 4, "epi_cols": 64},
    "single": {},
    "direct": {"store": "direct"},
    "direct, float32": {"store": "direct", "out_dtype": "float32", "stages": 3},
    "swap": {**_SWAP, "block_k": 256, "store": "direct"},
    "swap, TMA store": _SWAP,
    "swap, pair": {**_PAIR, "swap": True, "mma_n": 128, "stages": 6, "store": "direct"},
    "multicast": {"cluster_x": 2, "cluster_y": 2, "stages": 3},
    "multicast, pairs": {**_PAIR, "cluster_x": 4, "cluster_y": 2, "block_k": 128},
    "split-K": {"split_k": 4, "acc_stages": 1, "mma_n": 64, "stages": 6, "store": "direct"},
    "split-K, swap": {**_SWAP, "split_k": 4, "acc_stages": 1, "store": "direct"},
    "grouped": {**_PAIR, "experts": 64, "stages": 4},
    "grouped, swap": {**_SWAP, "experts": 64, "store": "direct"},
    "MXFP8": {"fmt": "mxfp8"},
    "MXFP4": {"fmt": "mxfp4"},
    "MXFP8 x MXFP4": {"fmt": "mxfp8xmxfp4"},
    "MXFP8 x MXFP4, spread": {"fmt": "mxfp8xmxfp4", "k": 4128},
    "partial stage": {"k": 4000},
}
STRUCTURES = {name: GemmPlan(**{**_PLAIN, **made}).check() for name, made in _CHANGES.items()}
"""Kernels with every feature that a plan may ask for, each in one plan at least."""


def geometry(made: GemmPlan, threads: int) -> Geometry:
    """Return what a plan says of its kernel."""
    once = made.cluster_x * made.x_bytes + made.cluster_y * made.mma_n * made.row_bytes
    scales = 512 * made.atoms_k * (made.cluster_x + made.cluster_y * made.y_atoms)
    return Geometry(
        cluster=made.cluster,
        tile_m=128 * made.cluster_x,
        tile_n=made.mma_n * made.cluster_y,
        block_k=made.block_k,
        stages=made.stages,
        stage_bytes=made.stage_bytes,
        smem_bytes=made.smem_bytes,
        threads=threads,
        accumulators=made.acc_stages,
        tmem_used=made.used_columns,
        tmem_allocated=made.tmem_columns,
        stage_loads=once + scales,
        mma_flops=2 * made.mma_m * made.mma_n * made.format.step,
    )


@dataclass(frozen=True)
class TirxConfig:
    """Rows of B of a CTA, columns of D in a store, stages and bytes of shared memory."""

    cta_n: int
    epilogue: int
    stages: int
    smem_bytes: int


TIRX_CONFIGS = {  # of tirx-kernels 0.1.2.post1; shared memory as its host code launches it
    1024: TirxConfig(64, 32, 5, 159_936),
    4096: TirxConfig(128, 32, 5, 211_136),
    8192: TirxConfig(128, 16, 4, 164_000),
}
TIRX_CTA_M, TIRX_BLOCK_K, TIRX_THREADS = 128, 256, 256


def tirx(size: int) -> Geometry:
    """Return the same of tirx-kernels' kernel for M = N = K = size."""
    config = TIRX_CONFIGS[size]
    row, atom_row = TIRX_BLOCK_K // 2, TIRX_BLOCK_K // 16
    tile_n = 2 * config.cta_n
    scales = (TIRX_CTA_M + tile_n) * atom_row
    return Geometry(
        cluster=2,
        tile_m=2 * TIRX_CTA_M,
        tile_n=tile_n,
        block_k=TIRX_BLOCK_K,
        stages=config.stages,
        stage_bytes=(TIRX_CTA_M + config.cta_n) * row + scales,
        smem_bytes=config.smem_bytes,
        threads=TIRX_THREADS,
        accumulators=1,
        tmem_used=tile_n + 16 * (1 + tile_n // 128),
        tmem_allocated=512,
        stage_loads=2 * (TIRX_CTA_M + config.cta_n) * row + (2 * TIRX_CTA_M + tile_n) * atom_row,
        mma_flops=2 * 256 * tile_n * 64,
    )
