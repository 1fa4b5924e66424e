"""Rows of an MoE layer between ranks: two functions of a GPU, and the sum on a CPU.

``tile`` of a bucket is the number of threads that share a row.
"""

from __future__ import annotations

from tvm.tirx import PrimFunc

from blockscale.base.targets import BULK_COPIES
from blockscale.catalog.registry import Bucket, Road, register
from blockscale.schedules.moe import exchange as schedules
from blockscale.specs.exchange import EpCombine, EpDispatch, EpReduce
from blockscale.tir.moe import exchange as tir

FEW = 132
"""Rows that leave SMs of an H200 without any: more threads share one, a CTA sends back one slot,
and one kernel of so many CTAs gives back and adds up.  Its CTAs wait for each other, so they fit
the smallest Hopper GPU: 78 SMs, of which each holds two."""

BUCKETS = (Bucket(8, FEW, 512), Bucket(1024, None, 256))

MANY = 8 * FEW
"""CTAs of kernels for more rows."""


def _dispatch(spec: EpDispatch, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    few = bucket.limit is not None
    return tir.dispatch(spec, bucket.tile, FEW if few else MANY, rows)


def _combine(spec: EpCombine, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    if bucket.limit is not None:
        return tir.combine(spec, bucket.tile, (FEW, None), 1, rows)
    return tir.combine(spec, bucket.tile, (MANY, MANY), spec.top_k, rows)


register(
    EpDispatch,
    cuda=Road(
        buckets=lambda spec: BUCKETS,
        body=_dispatch,
        sketches=lambda spec, bucket, level: schedules.dispatch_sketches(),
        needs=frozenset({BULK_COPIES}),
    ),
)
register(
    EpCombine,
    cuda=Road(
        buckets=lambda spec: BUCKETS,
        body=_combine,
        sketches=lambda spec, bucket, level: schedules.combine_sketches(bucket.limit is None),
        needs=frozenset({BULK_COPIES}),
    ),
)
register(
    EpReduce,
    cpu=Road(
        body=lambda spec, bucket, level, rows: tir.reduce(spec, rows),
        sketches=lambda spec, bucket, level: schedules.reduce_sketches(),
    ),
)
