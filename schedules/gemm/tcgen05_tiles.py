"""What a tcgen05 GEMM may be: tiles for a number of rows, and what is left to choose in each.

A tile is a `GemmPlan` whose decisions of shape are made (they name tensor intrinsics, so each is a
sketch of its own).  The others are options, each open whatever the others are; `GemmPlan.illegal`
says what hardware and kernel forbid, and `Options.refused` keeps its reasons.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from blockscale.base.formats import GEMM
from blockscale.base.sizes import ceil_div
from blockscale.base.targets import GPU_TARGETS
from blockscale.specs.plans.gemm import LANES, RASTERS, GemmPlan

SMS = GPU_TARGETS["sm_100a"].sms
"""SMs of a B200; fewer tiles than these leave SMs idle, and K is split."""

SWAP_ROWS = 256
"""Most rows with which a may be Y."""

SHAPES = 6
"""Shapes of tiles that are tried for many rows; scheduling each takes 0.2 s."""

STAGES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24)
"""Depths of the ring that are tried, and the deepest that shared memory holds."""

GROUPS = (1, 2, 4, 8, 16)
"""Clusters of the other index that share what the L2 cache holds."""


@dataclass(frozen=True)
class Options:
    """What is left to choose in a tile: candidates of each decision, and what is preferred."""

    candidates: dict[str, tuple[int, ...]]
    preferred: dict[str, int]
    refused: dict[str, str]
    """Why a candidate, such as "stages=6", is not among them."""

    @property
    def count(self) -> int:
        """Number of plans."""
        return prod(len(values) for values in self.candidates.values())


def decided(tile: GemmPlan, decisions: dict[str, int]) -> GemmPlan:
    """Return ``tile`` with ``decisions`` as they are sampled: a raster as its number."""
    named: dict[str, int | str] = dict(decisions)
    if "raster" in decisions:
        named["raster"] = RASTERS[decisions["raster"]]
    return replace(tile, **named)  # type: ignore[arg-type]


def _grid(tile: GemmPlan, rows: int) -> tuple[int, int]:
    """Tiles along X and Y; of a grouped GEMM, of the experts that are likely to have rows."""
    tokens = ceil_div(rows, tile.tile_rows)
    if tile.experts:
        busy = min(tile.experts, rows)
        tokens = busy * ceil_div(ceil_div(rows, tile.experts), tile.tile_rows)
    cols = ceil_div(tile.n, tile.tile_cols)
    return (cols, tokens) if tile.swap else (tokens, cols)


def options(tile: GemmPlan, rows: int) -> Options:
    """Return what is left to choose in ``tile`` for about ``rows`` rows."""
    x_tiles, y_tiles = _grid(tile, rows)
    group = tile.cta_group
    wanted: dict[str, tuple[int, ...]] = {"stages": STAGES, "acc_stages": (1, 2)}
    if tile.split_k > 1:
        fits = [s for s in (2, 4, 8) if s == 2 or x_tiles * y_tiles * s <= 2 * SMS]
        wanted = {"stages": STAGES, "split_k": tuple(fits)}
    elif not tile.experts:
        wanted["cluster_x"] = tuple(c for c in (1, 2, 4) if c % group == 0)
        wanted["cluster_y"] = (1, 2)
        # A cluster beyond the tiles of an index would have idle CTAs.
        for name, tiles in (("cluster_x", x_tiles * group), ("cluster_y", y_tiles)):
            wanted[name] = tuple(c for c in wanted[name] if c <= tiles)
    if tile.split_k == 1 and min(x_tiles, y_tiles) > 1:
        wanted["raster"], wanted["group"] = (0, 1), GROUPS
    return _legal(tile, wanted, _preferences(tile, x_tiles * y_tiles))


def _preferences(tile: GemmPlan, tiles: int) -> dict[str, int]:
    """Choices that need no search."""
    splits = [s for s in (2, 4, 8) if tiles * s <= SMS]
    return {
        "stages": STAGES[-1],
        "acc_stages": 2 if tiles > SMS // tile.cta_group else 1,
        "split_k": splits[-1] if splits else 2,
        "cluster_x": tile.cta_group,
        "cluster_y": 1,
        "raster": 0,
        "group": 8,
    }


def _legal(
    tile: GemmPlan, wanted: dict[str, tuple[int, ...]], preferred: dict[str, int]
) -> Options:
    """Keep the candidates that are legal; no decision of these bears on another's legality."""
    kept: dict[str, tuple[int, ...]] = {}
    refused: dict[str, str] = {}
    for name, values in wanted.items():
        legal = []
        for value in values:
            reason = decided(tile, {name: value}).illegal()
            if reason is None:
                legal.append(value)
            else:
                refused[f"{name}={value}"] = reason
        kept[name] = tuple(legal)
    deepest = kept["stages"][-1]
    while replace(tile, stages=deepest + 1).illegal() is None and deepest < STAGES[-1]:
        deepest += 1
    kept["stages"] = tuple(dict.fromkeys((*kept["stages"], deepest)))
    return Options(kept, preferred, refused)


def _shapes(rows: int, grouped: bool) -> list[tuple[bool, int, int]]:
    """(swap, cta_group, mma_n) that make sense for ``rows`` rows (of an expert).

    Tiles of 32 are offered only where there is one: the scales of a second would start at an odd
    column of tensor memory, which no kernel does that is known to run on hardware.  One of 64 does
    as few MMA columns as there are rows.
    """
    if rows <= 32 and not grouped:
        return [(True, 1, 32), (True, 2, 32), (True, 1, 64)]
    if rows <= 64:
        return [(True, 1, 64), (True, 2, 64), (True, 1, 128), (True, 2, 128)]
    if rows <= 128:
        swapped = [(True, 1, 128), (True, 1, 64), (True, 2, 128)]
        return [*swapped, *((False, 1, mma_n) for mma_n in (64, 128))]
    swapped = [(True, 1, 128), (True, 2, 256), (True, 2, 128)] if rows <= SWAP_ROWS else []
    return [*((False, group, n) for group in (2, 1) for n in (256, 192, 128, 64)), *swapped]


def _work(tile: GemmPlan, rows: int) -> int:
    """Guess of the time: MMA columns that an SM computes, and 64 a tile for loading its X.

    It orders shapes, of which the first is the default's; it has not been measured.
    """
    ctas = prod(_grid(tile, rows)) * tile.cta_group
    return ceil_div(ctas, SMS) * (tile.mma_n + 64)


def _epilogues(rows: int) -> tuple[tuple[str, int], ...]:
    """(store, epi_cols), best first."""
    if rows <= 64:
        return ("direct", 32), ("direct", 16), ("tma", 32)
    return ("tma", 64), ("tma", 32), ("direct", 32)


def tiles(
    fmt: str, out_dtype: str, n: int, k: int, experts: int, rows: int
) -> dict[GemmPlan, str | None]:
    """Return the tiles for about ``rows`` rows, the default's first, and why one is illegal.

    A tile with ``split_k`` 2 stands for all splits of K; there is one where tiles are fewer than
    SMs.
    """
    each = ceil_div(rows, experts) if experts else rows
    bases = [
        GemmPlan(
            fmt, out_dtype, n, k, experts, swap, group, mma_n, block_k=128, stages=2,
            cluster_x=group, cluster_y=1, split_k=1, acc_stages=1, epi_cols=32,
            store="direct", raster="x", group=1,
        )
        for swap, group, mma_n in _shapes(each, experts > 0)
    ]  # fmt: skip
    if each > LANES:
        bases = sorted(bases, key=lambda base: _work(base, rows))[:SHAPES]
    widths = (256, 128) if GEMM[fmt].a.bits == 4 else (128,)
    found: dict[GemmPlan, str | None] = {}
    for base in (replace(base, block_k=block_k) for base in bases for block_k in widths):
        few = prod(_grid(base, rows)) < SMS // 2
        if base.cta_group == 1 and few and k >= 4 * base.block_k:
            split = replace(base, split_k=2)
            found[split] = split.illegal()
        for store, cols in _epilogues(each):
            tile = replace(base, store=store, epi_cols=cols)
            found[tile] = tile.illegal()
    return found


def gated_tiles(fmt: str, block: int, n: int, k: int, experts: int, rows: int) -> list[GemmPlan]:
    """Return the legal tiles of a GEMM whose epilogue quantises in blocks, the default's first.

    A thread has a row of d, and whole blocks of it, gates and ups: a is X, K is not split, parts of
    a tile are whole blocks.  Tiles have more than one: TVM drops a loop over a single one.
    """
    bases = [
        GemmPlan(
            fmt, "uint8", n, k, experts, False, group, mma_n, block_k, stages=2,
            cluster_x=group, cluster_y=1, split_k=1, acc_stages=1, epi_cols=cols,
            store="direct", raster="x", group=1,
        )
        for group in (2, 1)
        for mma_n in (256, 192, 128, 64)
        for block_k in ((256, 128) if GEMM[fmt].a.bits == 4 else (128,))
        for cols in (64, 32)
        if cols >= 2 * block and mma_n > 2 * block
    ]  # fmt: skip
    legal = [base for base in bases if base.illegal() is None]
    return sorted(legal, key=lambda base: _work(base, rows))


def legal_tiles(
    fmt: str, out_dtype: str, n: int, k: int, experts: int, rows: int
) -> list[GemmPlan]:
    """Return the legal ones of `tiles`."""
    found = tiles(fmt, out_dtype, n, k, experts, rows)
    return [tile for tile, reason in found.items() if reason is None]
