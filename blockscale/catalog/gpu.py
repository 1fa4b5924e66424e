"""GPU kernels of the catalog: size buckets, TensorIR and search spaces by spec."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.target import Target

from blockscale.catalog.bucket import Bucket
from blockscale.lower import cuda
from blockscale.lower.gemm.kernel import GEMM_TARGETS
from blockscale.lower.gemm.maps import SPREAD_ALIGNMENT, spreads_codes
from blockscale.schedules.edgellm import gpu as gpu_edgellm
from blockscale.schedules.fused import gpu as gpu_fused
from blockscale.schedules.gemm import tcgen05 as sm100
from blockscale.schedules.layout import gpu as gpu_relayout
from blockscale.schedules.quant import gpu as gpu_memory
from blockscale.schedules.quant import gpu_sweep
from blockscale.schedules.steps import Sketch
from blockscale.specs import (
    ActQuantize,
    Dequantize,
    EdgeDown,
    EdgeUp,
    FusedMoe,
    GroupedMmFp4,
    Int4Mm,
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
from blockscale.tir.edgellm.passes_threads import down_rows, up_rows
from blockscale.tir.fused.act_quantize_threads import act_rows
from blockscale.tir.fused.norm_quantize_threads import norm_rows
from blockscale.tir.gemm.tiles import gemm_tiles
from blockscale.tir.layout.plan import gpu_plans
from blockscale.tir.layout.relayout import tiles
from blockscale.tir.quant.blocks_threads import dequantize, quantize
from blockscale.tir.quant.scale_sweep import scale_sweep_threads
from blockscale.tir.quant.swizzle_threads import swizzle, unswizzle

NORM_BUCKETS = (Bucket(8, 64), Bucket(256, 512), Bucket(1024, 2048), Bucket(8192, None))
"""Decode (fewer rows than SMs), one wave of CTAs, a few, many."""

LATE_WEIGHT_HIDDEN, LATE_WEIGHT_ROWS = 16384, 1024
"""From where a norm's weights are loaded after the reduction: registers keep CTAs off an SM.

On an H200, 8192 rows, in the tuner: of 16384 215 us instead of 231, but of 4096 59.2 us, not 56.8.
"""

ACT_BUCKETS = (Bucket(16, 64), Bucket(4096, None))
"""Decode and prefill."""

BLOCK_BUCKETS = (Bucket(64, 256), Bucket(8192, None))
"""A few rows, many rows."""

COPY_BUCKETS = (Bucket(8192, None),)
"""One schedule for every size."""

GEMM_BUCKETS = (
    *(Bucket(16, 32), Bucket(64, 64), Bucket(128, 128), Bucket(256, 256)),
    *(Bucket(1024, 1024), Bucket(8192, None)),
)
"""Up to 256 rows the weight's rows are the MMA's, as tiles of 128 tokens would be padding; above,
tiles of tokens fill the SMs, and then do so several times."""

GROUPED_ROWS = (16, 64, 256)
"""Rows of an expert, on average, for which a grouped GEMM has buckets; each ends at twice as many,
the last one never."""

TUNED_COLS = 8192
"""Columns of the static instance on which an op with any number of columns is tuned."""

SWIZZLED_ROWS, SWIZZLED_COLS = 262144, 256
"""Scales in the static instance of swizzle, in 64 MiB, more than an L2 cache.

With 32 MiB another schedule won: lines that it wrote in halves met in the L2 cache."""

WORKSPACE_ALIGNMENT = 16
"""Of the memory that an MoE function divides: all its kernels load 16 bytes at a time."""

SWEEP_COLS = 4096
"""Columns of the weight on which the scale sweep is tuned."""


def target(level: str) -> Target:
    """Return the TVM target of GPU architecture ``level``."""
    return cuda.target(level)


def has_tensor_memory(spec: Spec) -> bool:
    """Whether kernels of ``spec`` use tcgen05 and are lowered by `blockscale.lower.gemm.kernel`."""
    return isinstance(spec, MmFp4 | GroupedMmFp4)


def buckets(spec: Spec) -> tuple[Bucket, ...]:
    """Return the size buckets of ``spec``, smallest first."""
    if isinstance(spec, NormQuantize):
        return NORM_BUCKETS
    if isinstance(spec, ActQuantize):
        return ACT_BUCKETS
    if isinstance(spec, MmFp4):
        return GEMM_BUCKETS
    if isinstance(spec, MoeRoute | Int4Mm):
        return ()  # nothing to choose; `lower.int4_plan` has chosen
    if isinstance(spec, GroupedMmFp4):
        *most, last = (rows * spec.experts for rows in GROUPED_ROWS)
        return (*(Bucket(rows, 2 * rows) for rows in most), Bucket(last, None))
    return BLOCK_BUCKETS if isinstance(spec, Quantize | Dequantize) else COPY_BUCKETS


def module(spec: Spec, bucket: Bucket, level: str, static: bool) -> tvm.IRModule:
    """Return the unscheduled function ``main``, for the bucket's static shape or for any sizes."""
    rows = bucket.rows
    shape = (rows, TUNED_COLS) if static else None
    if isinstance(spec, Quantize):
        func = quantize(spec, shape)
    elif isinstance(spec, Dequantize):
        func = dequantize(spec, shape)
    elif isinstance(spec, Swizzle):
        func = swizzle(spec, (SWIZZLED_ROWS, SWIZZLED_COLS) if static else None)
    elif isinstance(spec, Unswizzle):
        func = unswizzle(spec, (SWIZZLED_ROWS, SWIZZLED_COLS) if static else None)
    elif isinstance(spec, Relayout):
        func = tiles(spec, gpu_plans(spec.map), False, relayout_shape(spec) if static else None)
    elif isinstance(spec, ScaleSweep):
        func = scale_sweep_threads(spec, rows * SWEEP_COLS // spec.block_size if static else None)
    elif isinstance(spec, NormQuantize):
        late = spec.hidden >= LATE_WEIGHT_HIDDEN and rows >= LATE_WEIGHT_ROWS
        func = norm_rows(spec, rows if static else None, late)
    elif isinstance(spec, ActQuantize):
        func = act_rows(spec, _act_shape(spec, rows) if static else None)
    elif isinstance(spec, EdgeUp | EdgeDown):
        func = up_rows(spec) if isinstance(spec, EdgeUp) else down_rows(spec)
    elif isinstance(spec, MmFp4 | GroupedMmFp4):
        func = _gemm(spec, rows if static else None, level)
    else:
        raise TypeError(
            f"{spec.name}: there is no GPU kernel of {spec.op} yet; build it for a CPU level"
        )
    return tvm.IRModule({"main": func})


def relayout_shape(spec: Relayout) -> tuple[int, ...]:
    """Shape of the static instance's plain tensor: 64 MiB, more than an L2 cache."""
    rows = TUNED_COLS // 2
    return (2 * rows, TUNED_COLS) if len(spec.symbols) == 2 else (2, rows, TUNED_COLS)


def _gemm(spec: MmFp4 | GroupedMmFp4, rows: int | None, level: str) -> tirx.PrimFunc:
    if level not in GEMM_TARGETS:
        raise TypeError(
            f"{spec.name}: there is no kernel of {spec.op} for {level}, which has no block-scaled "
            f"tcgen05.mma; build it for {', '.join(GEMM_TARGETS)}, or for a CPU level"
        )
    func = gemm_tiles(*_gemm_sizes(spec), rows)
    # Whole tiles are the same for several row counts, whose best schedules are not.
    return func if rows is None else func.with_attr("blockscale.rows", rows)


def alignments(spec: Spec) -> dict[str, int]:
    """Bytes of which the address of a parameter must be a multiple, where more than usual."""
    if isinstance(spec, MmFp4 | GroupedMmFp4) and spreads_codes(spec.fmt, spec.k):
        return {"b": SPREAD_ALIGNMENT}
    return {"workspace": WORKSPACE_ALIGNMENT} if isinstance(spec, FusedMoe | Int4Mm) else {}


def _gemm_sizes(spec: MmFp4 | GroupedMmFp4) -> tuple[str, str, int, int, int]:
    """Format, dtype of d, n, k, experts (0: not grouped)."""
    experts = spec.experts if isinstance(spec, GroupedMmFp4) else 0
    return spec.fmt, spec.out_dtype, spec.n, spec.k, experts


TUNED_EXPERTS = 8
"""Experts among which a static instance divides its rows."""


def _act_shape(spec: ActQuantize, rows: int) -> tuple[int, ...]:
    """Shape of the static instance's input."""
    cols = 2 * TUNED_COLS if spec.gated else TUNED_COLS
    return (TUNED_EXPERTS, rows // TUNED_EXPERTS, cols) if spec.grouped else (rows, cols)


def sketches(spec: Spec, bucket: Bucket, level: str) -> list[Sketch]:
    """Return the sketches of ``spec``, the one of the default schedule first."""
    if isinstance(spec, Quantize):
        return gpu_memory.quantize_sketches(spec)
    if isinstance(spec, Dequantize):
        return gpu_memory.dequantize_sketches(spec)
    if isinstance(spec, NormQuantize):
        return gpu_fused.norm_quantize_sketches(spec, bucket.rows)
    if isinstance(spec, ActQuantize):
        return gpu_fused.act_quantize_sketches(spec)
    if isinstance(spec, EdgeUp | EdgeDown):
        return gpu_edgellm.sketches(spec)
    if isinstance(spec, ScaleSweep):
        return gpu_sweep.scale_sweep_sketches(spec)
    if isinstance(spec, MmFp4 | GroupedMmFp4):
        return sm100.gemm_sketches(*_gemm_sizes(spec), bucket.rows)
    if isinstance(spec, Relayout):
        return gpu_relayout.relayout_sketches(spec, gpu_plans(spec.map))
    assert isinstance(spec, Swizzle | Unswizzle), "module() has refused the others"
    return gpu_memory.swizzle_sketches(spec)


def size(spec: Spec, func: tirx.PrimFunc) -> PrimExpr:
    """What the buckets of ``spec`` limit, in the symbols of ``func``: rows."""
    return func.params[0].shape[0]
