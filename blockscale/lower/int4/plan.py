"""The kernels of a product of INT4 weights on a GPU: a `MoePlan` by itself, for a number of rows.

The tiles are those that win for MoE layers (`moe.wgmma_tiles`) where experts share
the rows.  One weight meets all rows: there `chosen` weighs how many tiles the SMs take at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from blockscale.base.sizes import ceil_div
from blockscale.base.targets import GPU_TARGETS, WGMMA
from blockscale.schedules.moe.wgmma_tiles import (
    HOPPER,
    WGMMA_STAGES,
    depths,
    legal_tiles,
    stages_in,
)
from blockscale.specs.int4 import Int4Mm
from blockscale.specs.plans.moe import MMA_TOKENS, WGMMA_TOKENS, MoeGemm, MoePlan

LIMITS = (8, 16, 32, 64, 128, 256, 1024, None)
"""Rows up to which a dense product has a kernel of its own; None: any number."""

GROUPED_ROWS = ((1, 2), (8, 24), (64, 160), (512, 1536), (4096, None))
"""Rows for which a grouped product's tiles are chosen, and up to which they are used."""

MANY_ROWS = 4096
"""Rows for which the tiles of any number are chosen."""

MMA_ROWS = 16
"""Rows up to which mma.sync is as fast: for 64 it took 32 us and wgmma 11 (N = K = 4096, H200)."""

MMA_SHAPES = ((64, 2, 4), (64, 2, 2), (32, 4, 4), (16, 8, 8))
"""Rows, slices and blocks of 64 k of a stage with mma.sync, which CTAs share an SM with."""

WGMMA_ROWS = {256: 20, 128: 23, 64: 26}
"""Rows with wgmma, and what a product of a row costs: `sm90_tiles.WGMMA` has measured it."""

FILLED = 0.9
"""Tiles for each SM that few rows of x should make: weights come as fast as SMs ask for them."""

DECODING = 32
"""What decoding a tile's weights costs, in rows of x that could be multiplied meanwhile."""


@dataclass(frozen=True)
class Int4Plan(MoePlan):
    """A kernel of GEMM 2 whose rows keep their order.

    Attributes:
        term: zeros are added to products.
        single: there is one weight, and no table of tiles.
    """

    term: bool = False
    single: bool = False

    @property
    def zero_kind(self) -> int:
        """See `MoePlan.zero_kind`."""
        return 2 if self.term else int(self.zeros)

    @property
    def direct(self) -> bool:
        """See `MoePlan.direct`."""
        return True

    @property
    def one(self) -> bool:
        """See `MoePlan.one`."""
        return self.single


def _plan(spec: Int4Mm, unit: str, tokens: int, rows: int, slices: int, blocks: int) -> Int4Plan:
    return Int4Plan(
        unit=unit,
        fmt="int4",
        group=spec.group,
        zeros=spec.zero != "none",
        dtype=spec.dtype,
        activation="none",
        gather=False,
        rows=rows,
        tokens=tokens,
        slices=slices,
        stages=2,
        blocks_k=blocks,
        term=spec.zero == "term",
        single=spec.experts == 0,
    )


def plans(spec: Int4Mm, arch: str) -> list[tuple[int | None, Int4Plan]]:
    """Return the most rows (None: any number) and the kernel of each bucket, ascending."""
    if spec.experts == 0:
        return _merged([(most, chosen(spec, most or MANY_ROWS, arch)) for most in LIMITS])
    return _merged([(most, _grouped(spec, rows, arch)) for rows, most in GROUPED_ROWS])


def _merged(found: list[tuple[int | None, Int4Plan]]) -> list[tuple[int | None, Int4Plan]]:
    """Leave out what its successor equals."""
    kept = [pair for pair, after in pairwise(found) if pair[1] != after[1]]
    return [*kept, found[-1]]


def _grouped(spec: Int4Mm, rows: int, arch: str) -> Int4Plan:
    """Return the default of an MoE layer's GEMM 2 with as many rows."""
    gemm = MoeGemm(
        *("int4", spec.group, spec.zero != "none", spec.dtype, "none", spec.experts),
        *(spec.padded_n, spec.padded_k, 1),
    )
    tile = legal_tiles(gemm, rows, GPU_TARGETS[arch])[0]
    own = _plan(spec, tile.unit, tile.tokens, tile.rows, tile.slices, tile.blocks_k)
    return replace(own, stages=depths(own, GPU_TARGETS[arch])[0])


def chosen(spec: Int4Mm, rows: int, arch: str) -> Int4Plan:
    """Return the kernel of one weight for ``rows`` rows of x.

    Up to `MMA_ROWS`: mma.sync, the highest tiles that fill the SMs.  More: wgmma, least `_cost`.
    """
    room = GPU_TARGETS[arch]
    if rows <= MMA_ROWS or WGMMA not in room.features:
        tokens = next((t for t in MMA_TOKENS if t >= rows), MMA_TOKENS[-1])
        tiles = _legal([_plan(spec, "mma", tokens, *shape) for shape in MMA_SHAPES], arch)
        blocks = ceil_div(rows, tokens)
        full = [t for t in tiles if blocks * spec.padded_n >= FILLED * HOPPER.sms * t.rows]
        best = (full or tiles[-1:])[0]
    else:
        widths = [t for t in WGMMA_TOKENS if 32 <= t <= rows]
        shapes = [(width, tall) for tall in WGMMA_ROWS for width in widths]
        tiles = _legal([_plan(spec, "wgmma", *shape, 1, 2) for shape in shapes], arch)
        best = min(tiles, key=lambda tile: _cost(tile, spec, rows))
    return replace(best, stages=_depth(best, spec, rows, arch))


def _depth(tile: Int4Plan, spec: Int4Mm, rows: int, arch: str) -> int:
    """Return the depth of the ring: the most, where no CTA shares its SM."""
    room = GPU_TARGETS[arch]
    if ceil_div(rows, tile.tokens) * ceil_div(spec.padded_n, tile.rows) > HOPPER.sms:
        return depths(tile, room)[0]
    most = stages_in(tile, room.cta_shared)
    return min(most, WGMMA_STAGES) if tile.unit == "wgmma" else most


def _legal(tiles: list[Int4Plan], arch: str) -> list[Int4Plan]:
    return [tile for tile in tiles if tile.illegal() is None and depths(tile, GPU_TARGETS[arch])]


def _cost(tile: Int4Plan, spec: Int4Mm, rows: int) -> int:
    """How long a tile takes, times how many an SM has."""
    count = ceil_div(rows, tile.tokens) * ceil_div(spec.padded_n, tile.rows)
    return (
        ceil_div(count, HOPPER.sms) * tile.rows * (tile.tokens + DECODING) * WGMMA_ROWS[tile.rows]
    )
