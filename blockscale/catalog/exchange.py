"""Rows of an MoE layer between ranks: two functions of a GPU, and the sum on a CPU.

``tile`` of a bucket is the number of threads that share a row.
"""

from __future__ import annotations

from blockscale.base.targets import BULK_COPIES
from blockscale.catalog.registry import Bucket, Road, register
from blockscale.schedules.moe import exchange as schedules
from blockscale.specs.exchange import CHUNK_ELEMENTS, EpCombine, EpDispatch, EpReduce
from blockscale.tir.moe import exchange as tir

FEW = 132
"""Rows that leave SMs of an H200 without any: more threads share one, a CTA sends back one slot."""

BUCKETS = (Bucket(8, FEW, 512), Bucket(1024, None, 256))


def _ahead(spec: EpDispatch, threads: int) -> int:
    """Chunks of a thread whose loads come first: all of a row, at most four."""
    return max(1, min(4, -(-spec.hidden // (CHUNK_ELEMENTS * threads))))


register(
    EpDispatch,
    cuda=Road(
        buckets=lambda spec: BUCKETS,
        body=lambda spec, bucket, level, rows: tir.dispatch(
            spec, bucket.tile, _ahead(spec, bucket.tile), rows
        ),
        sketches=lambda spec, bucket, level: schedules.dispatch_sketches(),
        needs=frozenset({BULK_COPIES}),
    ),
)
register(
    EpCombine,
    cuda=Road(
        buckets=lambda spec: BUCKETS,
        body=lambda spec, bucket, level, rows: tir.combine(
            spec, bucket.tile, spec.top_k if bucket.limit is None else 1, rows
        ),
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
