"""CPU kernels of the catalog: size buckets, TensorIR and search spaces by spec."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.target import Target
from tvm.tirx import PrimFunc

from blockscale.catalog.bucket import Bucket
from blockscale.schedules.edgellm import cpu as cpu_edgellm
from blockscale.schedules.fused import cpu as cpu_fused
from blockscale.schedules.gemm import cpu as cpu_gemm
from blockscale.schedules.gemm import cpu_linear as cpu
from blockscale.schedules.int4 import cpu as cpu_int4
from blockscale.schedules.layout import cpu as cpu_relayout
from blockscale.schedules.moe import cpu as cpu_moe
from blockscale.schedules.quant import cpu as cpu_elementwise
from blockscale.schedules.steps import Sketch
from blockscale.specs import (
    ActQuantize,
    Dequantize,
    EdgeDown,
    EdgeUp,
    FusedMoe,
    GroupedMmFp4,
    Int4Dequantize,
    Int4Mm,
    Linear,
    MmFp4,
    MoeRoute,
    NormQuantize,
    Quantize,
    Relayout,
    ScaleSweep,
    Spec,
    Swizzle,
    Unswizzle,
)
from blockscale.specs.int4 import TILES
from blockscale.tir.block_grid import BlockGrid
from blockscale.tir.edgellm.passes import edge_down, edge_up
from blockscale.tir.fused.act_quantize import act_quantize
from blockscale.tir.fused.norm_quantize import norm_quantize
from blockscale.tir.gemm.grouped_mm import grouped_gemm
from blockscale.tir.gemm.linear import linear
from blockscale.tir.gemm.mm import gemm
from blockscale.tir.int4.dequantize import int4_dequantize
from blockscale.tir.int4.mm import int4_mm
from blockscale.tir.layout.plan import cpu_plans
from blockscale.tir.layout.relayout import tiles
from blockscale.tir.moe.fused_moe import ROW_TILES, fused_moe
from blockscale.tir.moe.route import moe_route
from blockscale.tir.quant.dequantize import dequantize
from blockscale.tir.quant.quantize import TILE, quantize
from blockscale.tir.quant.scale_sweep import scale_sweep
from blockscale.tir.quant.swizzle import swizzle, unswizzle

TARGETS: dict[str, dict[str, Any]] = {
    "avx512bf16": {"mcpu": "x86-64-v4", "mattr": ["+avx512bf16"]},
    "avx512": {"mcpu": "x86-64-v4"},
    "avx2": {"mcpu": "x86-64-v3"},
    "plain": {},
}
"""LLVM options by CPU level (`blockscale.base.host.level`)."""

LANE_BITS = {"avx512bf16": 3, "avx512": 3, "avx2": 3, "plain": 2}
"""32-bit words of a vector when elements are reordered, as powers of two.

16 words of a row go to so many lines of a layout that they leave the L1 cache half-written: INT8
weights of 235 MB took 174 ms with 16, 81 ms with 8 (two busy EPYC cores).
"""

LINEAR_BUCKETS = (Bucket(1, 1, 1), Bucket(4, 4, 4), Bucket(16, 48, 8), Bucket(128, None, 12))
"""Decode (one row), a few rows, small batches, prefill."""

FEW_ROWS = 8
"""Rows of an expert up to which lanes run along k, as for few rows of a linear layer."""

BLOCK_BUCKETS = (Bucket(1, TILE - 1, 1), Bucket(512, None, TILE))
"""Runs too short for a tile of blocks, and all others."""

COPY_BUCKETS = (Bucket(512, None, 1),)
"""One schedule for every size."""

TUNED_COLS = 4096
"""Columns of the static instance on which an op with any number of columns is tuned."""

TUNED_EXPERTS = 8
"""Experts among which a static instance divides its rows."""


def target(level: str) -> Target:
    """Return the TVM target of CPU ``level``; ValueError for an unknown level."""
    if level not in TARGETS:
        raise ValueError(
            f"target: level={level!r} is not one of {list(TARGETS)}; choose one of them"
        )
    return Target({"kind": "llvm", **TARGETS[level]})


def buckets(spec: Spec) -> tuple[Bucket, ...]:
    """Return the size buckets of ``spec``, smallest first."""
    if isinstance(spec, Linear | MmFp4):
        return LINEAR_BUCKETS
    if isinstance(spec, GroupedMmFp4):
        return grouped_buckets(spec)
    if isinstance(spec, FusedMoe):
        return moe_buckets(spec)
    if isinstance(spec, Int4Mm):
        return int4_buckets(spec)
    return BLOCK_BUCKETS if isinstance(spec, Quantize | Dequantize) else COPY_BUCKETS


def grouped_buckets(spec: GroupedMmFp4) -> tuple[Bucket, ...]:
    """Few rows an expert, on average, and more."""
    return (
        Bucket(4 * spec.experts, FEW_ROWS * spec.experts, 4),
        Bucket(64 * spec.experts, None, 8),
    )


def moe_buckets(spec: FusedMoe) -> tuple[Bucket, ...]:
    """Up to half a row an expert, on average: one by one; more: in pairs.

    More rows at a time want more registers than there are: 4 tokens of 8 experts, top 2, 1.46 ms in
    pairs, 1.83 ms alone; 128 tokens 37 ms, 49 ms, and by fours 53 ms (AMD EPYC, one free core).
    """
    one, two = ROW_TILES
    few = max(1, spec.experts // (2 * spec.top_k))
    return (Bucket(1, few, one), Bucket(16 * few, None, two))


INT4_ROWS = ((1, 1, 1), (8, 8, 4), (128, None, 8))
"""Rows of a weight, on average: tuned at, used up to, in tiles of."""


def int4_buckets(spec: Int4Mm) -> tuple[Bucket, ...]:
    """One row, a few, more: of each weight."""
    e = spec.matrices
    return tuple(Bucket(rows * e, most and most * e, tile) for rows, most, tile in INT4_ROWS)


def _compute(spec: Linear, bucket: Bucket, level: str) -> str:
    """Bfloat16 products where the CPU has them, they are exact, and lanes run along n."""
    fits = spec.dtype == "bfloat16" and spec.fmt == "nvfp4" and level == "avx512bf16"
    return "bfloat16" if fits and cpu.uses_panels(spec, level, bucket.tile) else "float32"


def module(spec: Spec, bucket: Bucket, level: str, static: bool) -> tvm.IRModule:
    """Return the unscheduled function ``main``, for the bucket's static shape or for any sizes."""
    rows = bucket.rows
    shape = (rows, _tuned_cols(spec, bucket)) if static else None
    if isinstance(spec, Linear):
        compute = _compute(spec, bucket, level)
        func = linear(spec, bucket.tile, compute, rows=rows if static else None)
    elif isinstance(spec, MmFp4 | GroupedMmFp4):
        func = _gemm(spec, bucket.tile, level, rows if static else None)
    elif isinstance(spec, Quantize):
        func = quantize(spec, bucket.tile, shape)
    elif isinstance(spec, Dequantize):
        func = dequantize(spec, bucket.tile, shape)
    elif isinstance(spec, Swizzle):
        func = swizzle(spec, shape)
    elif isinstance(spec, Unswizzle):
        func = unswizzle(spec, shape)
    elif isinstance(spec, Relayout):
        plans = cpu_plans(spec.map, LANE_BITS[level])
        func = tiles(spec, plans, True, relayout_shape(spec) if static else None)
    elif isinstance(spec, ScaleSweep):
        func = scale_sweep(spec, rows * TUNED_COLS // spec.block_size if static else None)
    elif isinstance(spec, NormQuantize):
        func = norm_quantize(spec, rows if static else None)
    elif isinstance(spec, ActQuantize):
        func = act_quantize(spec, _tuned_input(spec, rows) if static else None)
    elif isinstance(spec, FusedMoe):
        func = _moe(spec, bucket.tile, level, rows if static else None)
    elif isinstance(spec, MoeRoute):
        func = moe_route(spec, rows if static else None)
    elif isinstance(spec, EdgeUp | EdgeDown):
        func = edge_up(spec) if isinstance(spec, EdgeUp) else edge_down(spec)
    elif isinstance(spec, Int4Dequantize):
        func = int4_dequantize(spec, 1 if static else None)
    elif isinstance(spec, Int4Mm):
        func = _int4(spec, bucket.tile, level, rows if static else None)
    else:
        raise TypeError(
            f"catalog: {type(spec).__name__} has no TensorIR; add its op to catalog_cpu.py"
        )
    return tvm.IRModule({"main": func})


def relayout_shape(spec: Relayout) -> tuple[int, ...]:
    """Shape of the static instance's plain tensor: 16 MiB, of weights or of scales."""
    rows = TUNED_COLS // 2
    return (2 * rows, TUNED_COLS) if len(spec.symbols) == 2 else (2, rows, TUNED_COLS)


def _gemm(spec: MmFp4 | GroupedMmFp4, tile: int, level: str, rows: int | None) -> PrimFunc:
    """Return the unscheduled GEMM, for ``rows`` or for any number of them."""
    one = spec.matrix if isinstance(spec, GroupedMmFp4) else spec
    compute = cpu_gemm.compute_type(one, level, tile)
    if isinstance(spec, GroupedMmFp4):
        return grouped_gemm(spec, tile, compute, rows)
    return gemm(spec, tile, compute, rows)


def _moe(spec: FusedMoe, tile: int, level: str, rows: int | None) -> PrimFunc:
    """Return the unscheduled layer, for ``rows`` tokens or for any number of them."""
    if spec.layout != "linear":
        raise TypeError(
            f"catalog: {spec.name} has weights in layout {spec.layout}, that of CUDA kernels; take "
            "FusedMoe(layout='linear') for a CPU"
        )
    return fused_moe(spec, tile, cpu_moe.lanes(spec, level), rows)


def _int4(spec: Int4Mm, tile: int, level: str, rows: int | None) -> PrimFunc:
    """Return the unscheduled product, for ``rows`` rows or for any number of them."""
    if spec.layout == TILES:
        raise TypeError(
            f"catalog: {spec.name} has a weight in layout {TILES}, that of CUDA kernels; take "
            "Int4Mm(layout='plain') for a CPU"
        )
    tiling = cpu_int4.tiling(spec, level, tile)
    return int4_mm(spec, cpu_int4.form(spec, level), tiling, rows)


def _tuned_cols(spec: Spec, bucket: Bucket) -> int:
    """Columns of the static instance of a memory-bound op: its largest below the bucket's limit."""
    if bucket.limit is None or not isinstance(spec, Quantize | Dequantize):
        return TUNED_COLS
    return bucket.limit * spec.block


def _tuned_input(spec: ActQuantize, rows: int) -> tuple[int, ...]:
    """Shape of the static instance's input."""
    cols = 2 * TUNED_COLS if spec.gated else TUNED_COLS
    return (TUNED_EXPERTS, rows // TUNED_EXPERTS, cols) if spec.grouped else (rows, cols)


def sketches(spec: Spec, bucket: Bucket, level: str) -> list[Sketch]:
    """Return the sketches of ``spec``, the one of the default schedule first."""
    if isinstance(spec, Linear):
        return cpu.linear_sketches(spec, level, bucket.tile, _compute(spec, bucket, level))
    if isinstance(spec, MmFp4):
        return cpu_gemm.gemm_sketches(spec, level, bucket.tile)
    if isinstance(spec, GroupedMmFp4):
        return cpu_gemm.gemm_sketches(spec.matrix, level, bucket.tile)
    if isinstance(spec, Quantize):
        return cpu_elementwise.quantize_sketches(spec, level, bucket.tile)
    if isinstance(spec, Dequantize):
        return cpu_elementwise.dequantize_sketches(spec, level, bucket.tile)
    if isinstance(spec, Relayout):
        return cpu_relayout.relayout_sketches(spec, cpu_plans(spec.map, LANE_BITS[level]))
    if isinstance(spec, ScaleSweep):
        return cpu_elementwise.scale_sweep_sketches(spec, level)
    if isinstance(spec, NormQuantize):
        return cpu_fused.norm_quantize_sketches(spec, level)
    if isinstance(spec, ActQuantize):
        return cpu_fused.act_quantize_sketches(spec, level)
    if isinstance(spec, FusedMoe):
        return cpu_moe.moe_sketches(spec, level, bucket.tile)
    if isinstance(spec, MoeRoute):
        return cpu_moe.route_sketches()
    if isinstance(spec, EdgeUp | EdgeDown):
        return cpu_edgellm.sketches(spec, level)
    if isinstance(spec, Int4Dequantize):
        return cpu_int4.dequantize_sketches()
    if isinstance(spec, Int4Mm):
        return cpu_int4.int4_sketches(spec, level, bucket.tile)
    return cpu_elementwise.swizzle_sketches()


def size(spec: Spec, func: tirx.PrimFunc) -> PrimExpr:
    """What the buckets of ``spec`` limit, in the symbols of ``func``."""
    if isinstance(spec, Quantize | Dequantize):
        shapes = {param.name: param.shape for param in func.params}
        rows, cols = shapes["x" if isinstance(spec, Quantize) else "out"]
        return BlockGrid(spec.block, TILE, spec.layout == "128x4").blocks(rows, cols)
    return func.params[0].shape[0]
