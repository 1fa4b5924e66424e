"""Schedules of products of INT4 weights for tensor cores: those of an MoE layer's GEMM 2.

Where experts share the rows, the tiles are those that win for MoE layers (`moe.wgmma_tiles`).  One
weight meets all rows: there the default weighs how many tiles the SMs take at a time.
"""

from __future__ import annotations

from functools import partial

from tvm.s_tir import Schedule

from blockscale.base.sizes import ceil_div
from blockscale.base.targets import GPU_TARGETS, TCGEN05, WGMMA, Gpu
from blockscale.schedules.gemm import warps
from blockscale.schedules.moe import wgmma_tiles
from blockscale.schedules.moe.wgmma_tiles import HOPPER, WGMMA_STAGES
from blockscale.schedules.steps import Choose, Sketch
from blockscale.specs.int4 import Int4Mm
from blockscale.specs.plans import PREFIX, tensor_memory
from blockscale.specs.plans.moe import MMA_TOKENS, WGMMA_TOKENS, MoeGemm, MoeTile
from blockscale.tir.int4.tiles import gemm_of

MMA_ROWS = 16
"""Rows up to which mma.sync is as fast: for 64 it took 32 us and wgmma 11 (N = K = 4096, H200)."""

FEW_SHAPES, FEW_FILLED = ((128, 2, 4), (64, 2, 4), (32, 2, 4), (16, 8, 8)), 0.7
"""Rows, slices and blocks of 64 k of a stage with mma.sync, for up to `MMA_ROWS` on Hopper.

And tiles for each SM that they should make: weights come as fast as SMs ask for them.  Defaults of
14 workloads take 1.01 of the best one's time in the mean, by the two below 1.12 (H200, 2026-11-23).
"""

MMA_SHAPES, FILLED = ((64, 2, 4), (64, 2, 2), (32, 4, 4), (16, 8, 8)), 0.9
"""The same of GPUs without wgmma, where nothing was measured."""

MORE_MMA = (
    *((128, 2, 4), (64, 2, 2), (64, 4, 4), (64, 4, 8), (32, 4, 4), (32, 8, 8)),
    *((32, 2, 4), (16, 4, 4), (16, 8, 4)),
)
"""What the search tries beyond these."""

WGMMA_ROWS = {256: 20, 128: 25, 64: 34}
"""Rows with wgmma, and what a product of a row costs.

Of 42 dense workloads whose tiles all were measured (H200, 2026-11-23), defaults by these numbers
take 1.002 of the best one's time in the mean; by those of MoE layers (20, 23, 26) 1.026.
"""

DECODING, DECODING_ZEROS = 32, 48
"""What decoding a tile's weights costs, in rows of x that could be multiplied meanwhile."""


def int4_sketches(spec: Int4Mm, rows: int, level: str) -> list[Sketch]:
    """Sketches of `int4_tiles` for about ``rows`` rows of x, the default's first."""
    arch, gemm = GPU_TARGETS[level], gemm_of(spec)
    if spec.experts:
        found = wgmma_tiles.legal_tiles(gemm, rows, arch)
    else:
        found = dense_tiles(gemm, rows, arch)
    return [
        partial(int4_mm, spec=spec, tile=tile, stages=_depths(spec, tile, rows, arch))
        for tile in found
    ]


def int4_mm(
    sch: Schedule, choose: Choose, spec: Int4Mm, tile: MoeTile, stages: tuple[int, ...]
) -> None:
    """Schedule the product in the shape of ``tile``; of ``stages`` its ring's depth is chosen."""
    gemm = gemm_of(spec)
    weight = warps.Weight(gemm.fmt, gemm.group, gemm.zeros, gemm.dtype)
    k_loop = warps.by_rows(sch, weight, tile, table=spec.experts > 0)
    sch.annotate(k_loop, f"{PREFIX}stages", choose(sch, list(stages), stages[0]))


def dense_tiles(gemm: MoeGemm, rows: int, arch: Gpu) -> list[MoeTile]:
    """Return the tiles that are tried for one weight, the default's first.

    Up to `MMA_ROWS`: mma.sync, the highest tiles that fill the SMs.  More: wgmma, least `_cost`; or
    tcgen05, the widest tiles that fill the SMs.
    """
    hopper = WGMMA in arch.features
    if TCGEN05 in arch.features and rows > MMA_ROWS:
        widths = [t for t in wgmma_tiles.TENSOR_WIDTHS[::-1] if t <= max(rows, 32)]
        many = [MoeTile("tcgen05", tensor_memory.ROWS, width, 2, 2) for width in widths]
        found = _legal(gemm, many, arch)
        full = [t for t in found if _tiles(t, gemm, rows) >= FILLED * arch.sms]
        if full:
            return list(dict.fromkeys((full[0], *found)))
    if rows <= MMA_ROWS or not hopper:
        shapes, filled = (FEW_SHAPES, FEW_FILLED) if hopper else (MMA_SHAPES, FILLED)
        tokens = next((t for t in MMA_TOKENS if t >= rows), MMA_TOKENS[-1])
        few = [MoeTile("mma", high, tokens, *shape) for high, *shape in shapes]
        found = _legal(gemm, few, arch)
        blocks = ceil_div(rows, tokens)
        full = [t for t in found if blocks * gemm.rows >= filled * HOPPER.sms * t.rows]
        best = (full or found[-1:])[0]
        found += _legal(gemm, [MoeTile("mma", high, tokens, *s) for high, *s in MORE_MMA], arch)
    else:
        widths = [t for t in WGMMA_TOKENS if 32 <= t <= rows]
        many = [MoeTile("wgmma", high, width, 1, 2) for high in WGMMA_ROWS for width in widths]
        found = sorted(_legal(gemm, many, arch), key=lambda tile: _cost(tile, gemm, rows))
        best, found = found[0], found[:TRIED]
    return [best, *(tile for tile in found if tile != best)]


TRIED = 12
"""Tiles with wgmma that are tried: those of least `_cost`."""


def _depths(spec: Int4Mm, tile: MoeTile, rows: int, arch: Gpu) -> tuple[int, ...]:
    """Return the depths of the ring that are tried, the default's first.

    Where no CTA shares its SM the most, and of mma.sync on Hopper half of that: in 12 workloads of
    8 and 16 rows it was never slower, and at most 1.14 times as fast (H200, 2026-11-23).
    """
    gemm = gemm_of(spec)
    shared = wgmma_tiles.depths(gemm, tile, arch)
    if spec.experts or _tiles(tile, gemm, rows) > HOPPER.sms:
        return shared
    most = tile.stages_in(gemm, arch.cta_shared)
    if tile.unit == "wgmma":
        most = min(most, WGMMA_STAGES)
    elif WGMMA in arch.features:
        shared = (most, *shared)
        most = max(2, most // 2)
    return tuple(dict.fromkeys((most, *shared)))


def _legal(gemm: MoeGemm, tiles: list[MoeTile], arch: Gpu) -> list[MoeTile]:
    return [
        tile
        for tile in tiles
        if tile.illegal(gemm) is None and wgmma_tiles.depths(gemm, tile, arch)
    ]


def _tiles(tile: MoeTile, gemm: MoeGemm, rows: int) -> int:
    return ceil_div(rows, tile.tokens) * ceil_div(gemm.rows, tile.rows)


def _cost(tile: MoeTile, gemm: MoeGemm, rows: int) -> int:
    """How long a tile takes, times how many an SM has."""
    decoding = DECODING_ZEROS if gemm.zeros else DECODING
    each = tile.rows * (tile.tokens + decoding) * WGMMA_ROWS[tile.rows]
    return ceil_div(_tiles(tile, gemm, rows), HOPPER.sms) * each
