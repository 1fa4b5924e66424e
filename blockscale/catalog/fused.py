"""Normalising or activating, and quantising, in one pass."""

from __future__ import annotations

from blockscale.catalog.registry import CPU_COLS, CUDA_COLS, Bucket, Road, register
from blockscale.schedules.fused import cpu, gpu
from blockscale.specs import ActQuantize, NormQuantize
from blockscale.tir.fused.act_quantize import act_quantize
from blockscale.tir.fused.act_quantize_threads import act_rows, token_rows
from blockscale.tir.fused.norm_quantize import norm_quantize
from blockscale.tir.fused.norm_quantize_threads import norm_rows

NORM_BUCKETS = (Bucket(8, 64), Bucket(256, 512), Bucket(1024, 2048), Bucket(8192, None))
"""On a GPU: decode (fewer rows than SMs), one wave of CTAs, a few, many."""

LATE_WEIGHT_HIDDEN, LATE_WEIGHT_ROWS = 16384, 1024
"""From where a norm's weights are loaded after the reduction: registers keep CTAs off an SM.

On an H200, 8192 rows, in the tuner: of 16384 215 us instead of 231, but of 4096 59.2 us, not 56.8.
"""

ACT_BUCKETS = (Bucket(16, 64), Bucket(4096, None))
"""On a GPU: decode and prefill."""

TUNED_EXPERTS = 8
"""Experts among which a static instance divides its rows."""


def _late_weight(spec: NormQuantize, bucket: Bucket) -> bool:
    return spec.hidden >= LATE_WEIGHT_HIDDEN and bucket.rows >= LATE_WEIGHT_ROWS


def _act_shape(spec: ActQuantize, rows: int, cols: int) -> tuple[int, ...]:
    """Shape of the static instance's input."""
    cols = 2 * cols if spec.gated else cols
    return (TUNED_EXPERTS, rows // TUNED_EXPERTS, cols) if spec.grouped else (rows, cols)


register(
    NormQuantize,
    cpu=Road(
        body=lambda spec, bucket, level, rows: norm_quantize(spec, rows),
        sketches=lambda spec, bucket, level: cpu.norm_quantize_sketches(spec, level),
    ),
    cuda=Road(
        buckets=lambda spec: NORM_BUCKETS,
        body=lambda spec, bucket, level, rows: norm_rows(spec, rows, _late_weight(spec, bucket)),
        sketches=lambda spec, bucket, level: gpu.norm_quantize_sketches(spec, bucket.rows, level),
    ),
)
register(
    ActQuantize,
    cpu=Road(
        body=lambda spec, bucket, level, shape: act_quantize(spec, shape),
        sketches=lambda spec, bucket, level: cpu.act_quantize_sketches(spec, level),
        tuned=lambda spec, bucket: _act_shape(spec, bucket.rows, CPU_COLS),
    ),
    cuda=Road(
        buckets=lambda spec: ACT_BUCKETS,
        body=lambda spec, bucket, level, shape: (token_rows if spec.finds_scale else act_rows)(
            spec, shape
        ),
        sketches=lambda spec, bucket, level: gpu.act_quantize_sketches(spec),
        tuned=lambda spec, bucket: _act_shape(spec, bucket.rows, CUDA_COLS),
    ),
)
