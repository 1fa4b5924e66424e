"""Products of INT4 weights, and their values."""

from __future__ import annotations

from dataclasses import replace

from tvm.s_tir import Schedule
from tvm.tirx import PrimFunc

from blockscale.base.targets import BULK_COPIES
from blockscale.catalog.gemm import GPU_ROWS
from blockscale.catalog.moe import MOE_BUCKETS, WORKSPACE_ALIGNMENT, tile_of
from blockscale.catalog.registry import Bucket, Road, Workload, register
from blockscale.lower.int4 import kernel
from blockscale.lower.warp import facts as warp_facts
from blockscale.lower.warp.derive import derive
from blockscale.schedules.int4 import cpu, wgmma
from blockscale.schedules.steps import preferred
from blockscale.specs import Int4Dequantize, Int4Mm
from blockscale.specs.int4 import TILES
from blockscale.tir.int4.dequantize import int4_dequantize
from blockscale.tir.int4.mm import int4_mm
from blockscale.tir.int4.tiles import int4_tiles

ROWS = ((1, 1, 1), (8, 8, 4), (128, None, 8))
"""Rows of a weight, on average: tuned at, used up to, in tiles of."""


MANY_ROWS = 4096
"""Rows for which the kernel of any number is tuned."""


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


def _gpu_buckets(spec: Int4Mm) -> tuple[Bucket, ...]:
    """By rows: for one weight numbers up to which tiles differ, for experts as MoE layers do."""
    if spec.experts:
        return MOE_BUCKETS
    return (*(Bucket(rows, rows) for rows in GPU_ROWS), Bucket(MANY_ROWS, None))


def _tiles(spec: Int4Mm, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    """Return the unscheduled product in whole tiles."""
    if spec.layout != TILES:
        raise TypeError(
            f"{spec.name}: the weight is in layout {spec.layout!r}, which GPU kernels do not read; "
            f"build the spec with layout={TILES!r}, or for a CPU level"
        )
    return int4_tiles(spec, rows)


def _sizes(spec: Int4Mm, rows: int) -> dict[str, int]:
    return {"rows": rows, "bytes": spec.workspace_bytes(rows), "scales": spec.matrices}


def _kin(spec: Int4Mm, part: int | None) -> list[Int4Mm]:
    """Return the products whose kernels are as fast as its own, after that which copies rows."""
    plain = replace(spec, dtype="bfloat16", out_dtype="bfloat16", activation="a16", pre_quant=False)
    return [plain] if plain != spec else []


def _adopt(sch: Schedule, own: Workload, level: str, of: PrimFunc) -> None:
    """Schedule the product as another one is."""
    made = derive(of)
    assert isinstance(own.spec, Int4Mm)
    wgmma.int4_mm(sch, preferred, own.spec, tile_of(made), (made.stages,))


register(
    Int4Mm,
    cpu=Road(
        buckets=_buckets,
        body=_product,
        sketches=lambda spec, bucket, level: cpu.int4_sketches(spec, level, bucket.tile),
    ),
    cuda=Road(
        buckets=_gpu_buckets,
        body=_tiles,
        sketches=lambda spec, bucket, level: wgmma.int4_sketches(spec, bucket.rows, level),
        lower=lambda spec, arch, bodies, name: kernel.sources(bodies, spec, arch, name),
        facts=lambda level: warp_facts.decisions,
        sizes=_sizes,
        kin=_kin,
        adopt=_adopt,
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
