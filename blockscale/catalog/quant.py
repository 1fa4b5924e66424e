"""Quantising, dequantising, scales between layouts, the sweep over scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.ir import Expr as PrimExpr
from tvm.tirx import PrimFunc

from blockscale.catalog.registry import CPU_COLS, CUDA_COLS, Bucket, Road, register
from blockscale.schedules.quant import cpu, gpu, gpu_sweep
from blockscale.specs import Dequantize, Quantize, ScaleSweep, Swizzle, Unswizzle
from blockscale.tir.block_grid import BlockGrid
from blockscale.tir.quant import blocks_threads as threads
from blockscale.tir.quant import swizzle, swizzle_threads
from blockscale.tir.quant.dequantize import dequantize
from blockscale.tir.quant.quantize import TILE, quantize
from blockscale.tir.quant.scale_sweep import scale_sweep, scale_sweep_threads

Made = Callable[..., Any]
"""Makes a body, or sketches."""

CPU_BLOCKS = (Bucket(1, TILE - 1, 1), Bucket(512, None, TILE))
"""Runs too short for a tile of blocks, and all others."""

CUDA_BLOCKS = (Bucket(64, 256), Bucket(8192, None))
"""A few rows, many rows."""

SWIZZLED_ROWS, SWIZZLED_COLS = 262144, 256
"""Scales in the static instance of swizzle, in 64 MiB, more than an L2 cache.

With 32 MiB another schedule won: lines that it wrote in halves met in the L2 cache."""

SWEEP_COLS = 4096
"""Columns of the weight on which the scale sweep is tuned on a GPU."""


def _columns(spec: Quantize | Dequantize, bucket: Bucket) -> tuple[int, int]:
    """Shape of the CPU's static instance: the largest below the bucket's limit."""
    cols = CPU_COLS if bucket.limit is None else bucket.limit * spec.block
    return bucket.rows, cols


def _blocks(spec: Quantize | Dequantize, func: PrimFunc) -> PrimExpr:
    """Blocks in a run."""
    shapes = {param.name: param.shape for param in func.params}
    rows, cols = shapes["x" if isinstance(spec, Quantize) else "out"]
    return BlockGrid(spec.block, TILE, spec.layout == "128x4").blocks(rows, cols)


def _blockwise(
    cpu_body: Made, cpu_sketches: Made, cuda_body: Made, cuda_sketches: Made
) -> dict[str, Road]:
    return {
        "cpu": Road(
            buckets=lambda spec: CPU_BLOCKS,
            body=lambda spec, bucket, level, shape: cpu_body(spec, bucket.tile, shape),
            sketches=lambda spec, bucket, level: cpu_sketches(spec, level, bucket.tile),
            tuned=_columns,
            size=_blocks,
        ),
        "cuda": Road(
            buckets=lambda spec: CUDA_BLOCKS,
            body=lambda spec, bucket, level, shape: cuda_body(spec, shape),
            sketches=lambda spec, bucket, level: cuda_sketches(spec),
            tuned=lambda spec, bucket: (bucket.rows, CUDA_COLS),
        ),
    }


def _swizzles(cpu_body: Made, cuda_body: Made) -> dict[str, Road]:
    return {
        "cpu": Road(
            body=lambda spec, bucket, level, shape: cpu_body(spec, shape),
            sketches=lambda spec, bucket, level: cpu.swizzle_sketches(),
            tuned=lambda spec, bucket: (bucket.rows, CPU_COLS),
        ),
        "cuda": Road(
            body=lambda spec, bucket, level, shape: cuda_body(spec, shape),
            sketches=lambda spec, bucket, level: gpu.swizzle_sketches(spec),
            tuned=lambda spec, bucket: (SWIZZLED_ROWS, SWIZZLED_COLS),
        ),
    }


register(
    Quantize, **_blockwise(quantize, cpu.quantize_sketches, threads.quantize, gpu.quantize_sketches)
)
register(
    Dequantize,
    **_blockwise(dequantize, cpu.dequantize_sketches, threads.dequantize, gpu.dequantize_sketches),
)
register(Swizzle, **_swizzles(swizzle.swizzle, swizzle_threads.swizzle))
register(Unswizzle, **_swizzles(swizzle.unswizzle, swizzle_threads.unswizzle))
register(
    ScaleSweep,
    cpu=Road(
        body=lambda spec, bucket, level, blocks: scale_sweep(spec, blocks),
        sketches=lambda spec, bucket, level: cpu.scale_sweep_sketches(spec, level),
        tuned=lambda spec, bucket: bucket.rows * CPU_COLS // spec.block_size,
    ),
    cuda=Road(
        body=lambda spec, bucket, level, blocks: scale_sweep_threads(spec, blocks),
        sketches=lambda spec, bucket, level: gpu_sweep.scale_sweep_sketches(spec),
        tuned=lambda spec, bucket: bucket.rows * SWEEP_COLS // spec.block_size,
    ),
)
