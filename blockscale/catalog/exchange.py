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

SMS = 132
"""Of an H200: up to as many rows, more threads share one."""

MANY = 8 * SMS
"""CTAs of kernels that send more rows.  Those of a kernel after such a one are on the GPU while it
waits for other ranks, so they are few: what others wait for must find place beside them."""

SENDING = (Bucket(8, SMS, 512), Bucket(1024, None, 256))

WAITING = 78
"""CTAs that give back and add up in one kernel.  They wait for each other, so there are no more
than SMs of the smallest Hopper GPU."""

RETURNING = (Bucket(8, 32, 512), Bucket(1024, None, 256))
"""By rows that came, or tokens whose results are stored already: few of them one kernel returns, a
CTA a slot, which saves a launch."""


def _dispatch(spec: EpDispatch, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    few = bucket.limit is not None
    return tir.dispatch(spec, bucket.tile, SMS if few else MANY, rows)


def _combine(spec: EpCombine, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    few = bucket.limit is not None
    adding = tir.Grid(2 * SMS, 2 * bucket.tile)
    if spec.stored:
        return tir.collect(spec, tir.Grid(WAITING, bucket.tile) if few else adding, few, rows)
    if few:
        return tir.combine(spec, tir.Grid(WAITING, bucket.tile), None, 1, rows)
    giving = tir.Grid(MANY, bucket.tile)
    return tir.combine(spec, giving, adding, spec.top_k, rows)


def _kernels(spec: EpCombine, bucket: Bucket) -> tuple[str, ...]:
    """Return the names of a combine's kernels in TensorIR."""
    if bucket.limit is not None:
        return ("collect",) if spec.stored else ("combine",)
    return ("tell" if spec.stored else "give_back", "reduce")


register(
    EpDispatch,
    cuda=Road(
        buckets=lambda spec: SENDING,
        body=_dispatch,
        sketches=lambda spec, bucket, level: schedules.dispatch_sketches(),
        needs=frozenset({BULK_COPIES}),
    ),
)
register(
    EpCombine,
    cuda=Road(
        buckets=lambda spec: RETURNING,
        body=_combine,
        sketches=lambda spec, bucket, level: schedules.combine_sketches(_kernels(spec, bucket)),
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
