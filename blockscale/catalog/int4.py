"""Products of INT4 weights, and their values."""

from __future__ import annotations

from collections.abc import Mapping

from tvm.s_tir.schedule import Trace
from tvm.tirx import PrimFunc

from blockscale.base.targets import BULK_COPIES
from blockscale.catalog.moe import WORKSPACE_ALIGNMENT
from blockscale.catalog.registry import Bucket, Road, register
from blockscale.lower.cuda import Source
from blockscale.lower.int4 import kernel
from blockscale.lower.int4.plan import plans
from blockscale.schedules.int4 import cpu
from blockscale.specs import Int4Dequantize, Int4Mm
from blockscale.specs.int4 import TILES
from blockscale.tir.int4.dequantize import int4_dequantize
from blockscale.tir.int4.mm import int4_mm

ROWS = ((1, 1, 1), (8, 8, 4), (128, None, 8))
"""Rows of a weight, on average: tuned at, used up to, in tiles of."""


def _buckets(spec: Int4Mm) -> tuple[Bucket, ...]:
    """One row, a few, more: of each weight."""
    e = spec.matrices
    return tuple(Bucket(rows * e, most and most * e, tile) for rows, most, tile in ROWS)


def _product(spec: Int4Mm, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    """Return the unscheduled product, for ``rows`` rows or for any number of them."""
    if spec.layout == TILES:
        raise TypeError(
            f"catalog: {spec.name} has a weight in layout {TILES}, that of CUDA kernels; take "
            "Int4Mm(layout='plain') for a CPU"
        )
    return int4_mm(spec, cpu.form(spec, level), cpu.tiling(spec, level, bucket.tile), rows)


def _sources(spec: Int4Mm, arch: str, traces: Mapping[str, Trace | None]) -> Source:
    """The host and device code; the plans are chosen by rule, for there is nothing to search."""
    return kernel.sources(plans(spec, arch), spec, arch)


register(
    Int4Mm,
    cpu=Road(
        buckets=_buckets,
        body=_product,
        sketches=lambda spec, bucket, level: cpu.int4_sketches(spec, level, bucket.tile),
    ),
    cuda=Road(
        buckets=lambda spec: (),
        lower=_sources,
        needs=frozenset({BULK_COPIES}),
        alignments=lambda spec: {"workspace": WORKSPACE_ALIGNMENT},
    ),
)
register(
    Int4Dequantize,
    cpu=Road(
        body=lambda spec, bucket, level, experts: int4_dequantize(spec, experts),
        sketches=lambda spec, bucket, level: cpu.dequantize_sketches(),
        tuned=lambda spec, bucket: 1,
    ),
)
