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
"""Rows that leave SMs of an H200 without any: more threads share one, a CTA sends back one slot."""

BUCKETS = (Bucket(8, FEW, 512), Bucket(1024, None, 256))

SENDING, WAITING = (FEW, 4 * FEW), (FEW, 2 * FEW)
"""CTAs of a dispatch and of a combine, by bucket.  All of a combine wait for other ranks at the
same time, so they fit the smallest Hopper GPU (78 SMs, of which each holds four or more)."""


def _dispatch(spec: EpDispatch, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    few = bucket.limit is not None
    return tir.dispatch(spec, bucket.tile, SENDING[not few], rows)


def _combine(spec: EpCombine, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    few = bucket.limit is not None
    return tir.combine(spec, bucket.tile, WAITING[not few], 1 if few else spec.top_k, rows)


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
        sketches=lambda spec, bucket, level: schedules.combine_sketches(),
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
