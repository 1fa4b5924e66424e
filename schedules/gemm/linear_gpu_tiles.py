"""Which tiles a linear layer may have on a GPU for a number of rows of x.

Few of them, each a kernel that nvcc compiles for a second.  Few rows of x are bound by the weight's
bytes: many CTAs load at once, and K is divided among slices and CTAs until there are enough.  Many
rows are bound by tensor cores: high and wide tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil

from blockscale.base.sizes import ceil_div, round_up
from blockscale.base.targets import BULK_COPIES, CTA_RESERVED, GPU_TARGETS, TCGEN05, WGMMA, Gpu
from blockscale.schedules.gemm import linear_tensor_tiles as tensor
from blockscale.schedules.gemm.linear_clocks import (
    CLUSTER,
    DECODING,
    FEW_CLUSTER,
    WAITING,
    ctas,
    meeting,
)
from blockscale.specs import Linear
from blockscale.specs.plans.linear import TILE_K, LinearTile
from blockscale.specs.plans.moe import byte_sums, scale_bytes

SMS = GPU_TARGETS["sm_90a"].sms
"""Of an H100 SXM or H200; cards of other architectures have about as many, and fewer."""

FILLED = 0.6
"""CTAs for each SM that the default with mma.sync has at least; and at most one, where there is
such a tile: of 160 CTAs of 5120 x 2880 some SMs had two, and one row took 1.3 times as long as of
80."""

MOST_STAGES = {"mma": 16, "wgmma": 8, "tcgen05": 8}
"""Of the ring; deeper gains nothing."""

MMA = {
    8: (
        *((256, 2, 8, 1, 8), (128, 2, 4, 1, 8), (128, 2, 4, 2, 8), (64, 2, 4, 2, 8)),
        *((64, 2, 4, 1, 8), (64, 2, 4, 2, 4), (64, 2, 2, 4, 4), (64, 2, 2, 8, 2)),
        *((64, 1, 8, 2, 8), (32, 1, 4, 4, 4), (128, 2, 2, 1, 4)),
    ),
    16: ((128, 2, 2, 1, 4), (64, 2, 2, 2, 4), (64, 2, 2, 4, 4), (64, 2, 2, 8, 2)),
    32: ((128, 4, 2, 1, 2), (64, 2, 2, 2, 4), (64, 2, 2, 4, 4)),
    64: ((128, 4, 2, 1, 2), (64, 4, 2, 2, 2), (64, 4, 2, 4, 2)),
}
"""Rows of w, warps, slices, CTAs and blocks of 64 k with mma.sync, by rows of x; highest first."""

ONE_WAVE = ((128, 2, 4, 2, 8), (64, 2, 4, 2, 8))
"""The same of 9 to 16 rows of x beside wgmma, where the SMs take all CTAs at once, and each has
`ONE_WAVE_STAGES` stages of K: 0.86 to 0.95 of wgmma's time on an H200."""

ONE_WAVE_STAGES = 4

MMA_ALONE = {
    8: ((128, 2, 2, 1, 4), (128, 4, 2, 1, 4), (64, 1, 8, 1, 8), (32, 1, 8, 1, 8), (16, 1, 8, 1, 8)),
    16: ((128, 2, 2, 1, 4), (64, 2, 4, 1, 4), (32, 1, 8, 1, 8), (16, 1, 8, 1, 8)),
    32: ((128, 4, 2, 1, 2), (64, 2, 4, 1, 4), (32, 1, 4, 1, 4), (16, 1, 8, 1, 8)),
    64: ((128, 4, 2, 1, 2), (64, 4, 2, 1, 2), (32, 2, 2, 1, 2), (16, 1, 4, 1, 4)),
}
"""The same where no cluster can divide K: lower tiles, and more slices; not measured."""

WGMMA_SHAPES = {
    8: ((128, 4, 1), (64, 4, 2), (64, 4, 8)),
    16: ((128, 4, 1), (64, 4, 2), (64, 4, 4), (64, 4, 8)),
    32: ((256, 8, 1), (128, 4, 1), (64, 4, 2), (64, 4, 8)),
    64: ((256, 8, 1), (128, 4, 1), (128, 8, 2), (64, 4, 2), (64, 4, 4), (64, 4, 8)),
    128: ((256, 8, 1), (128, 8, 1), (128, 8, 2), (64, 4, 2), (64, 4, 4)),
}
"""Rows of w, warps and CTAs with wgmma, by rows of x of a tile up to 256; highest first.

Of this table and `MMA`, the best of some 1,000 tiles on an H200 for 1 to 4096 rows of four shapes;
`MMA` of 8 rows, and `ONE_WAVE`, of 13,000 for 1 to 128 rows of 36 matrices (2026-11-27).
"""

MORE_MMA = {
    8: (
        *((256, 4, 2, 4, 4), (256, 4, 4, 1, 4), (128, 2, 2, 4, 4), (128, 2, 4, 2, 4)),
        *((128, 2, 4, 4, 4), (128, 2, 4, 4, 8), (128, 4, 2, 1, 4), (128, 4, 2, 2, 4)),
        *((64, 1, 8, 1, 8), (64, 2, 4, 1, 4), (64, 2, 4, 4, 8), (64, 2, 8, 2, 8)),
        *((64, 4, 2, 1, 4), (64, 4, 2, 2, 4)),
    ),
    16: (
        *((256, 4, 2, 1, 4), (256, 4, 2, 4, 4), (128, 2, 2, 1, 4), (128, 2, 4, 1, 8)),
        *((128, 2, 8, 1, 8), (128, 2, 8, 2, 8), (128, 4, 2, 2, 4), (128, 4, 2, 4, 4)),
        *((64, 1, 8, 2, 8), (64, 2, 2, 4, 4), (64, 2, 8, 2, 8)),
    ),
}
MORE_WGMMA = {
    8: ((256, 8, 1), (128, 4, 2), (64, 4, 1), (64, 4, 4)),
    16: ((256, 8, 1), (128, 8, 1), (128, 4, 2), (128, 4, 4), (64, 4, 1)),
    32: ((256, 8, 2), (128, 8, 1), (128, 4, 2), (128, 4, 4), (64, 4, 1), (64, 4, 4)),
    64: ((256, 8, 2), (128, 8, 1), (128, 4, 2), (128, 4, 4), (64, 4, 1)),
    96: ((256, 8, 1), (128, 8, 1), (128, 8, 2), (128, 4, 1), (64, 4, 2)),
    128: ((256, 8, 2), (128, 4, 1), (128, 4, 2), (64, 4, 1)),
}
MORE_WIDTHS = ((32, ()), (64, (32,)), (256, (96,)))
"""What the search tries beyond these where CTAs may be clusters; no default is one of them."""

WIDTHS = ((8, (8,)), (16, (16,)), (32, (32,)), (64, (64,)), (256, (128, 64)))
"""Rows of x of a tile, up to so many rows of x; of more rows it is `MANY_WIDTHS`."""

MANY_SHAPES = (
    *((256, 8, 1), (128, 8, 1), (128, 8, 2)),
    *((64, 4, 1), (64, 4, 2), (64, 4, 4)),
)
MORE_SHAPES = ((256, 8, 2), (128, 4, 1), (64, 4, 8))
MANY_WIDTHS = (256, 240, 224, 208, 192, 176, 160, 152, 144, 128, 112, 96, 80, 64)
"""Rows of w, warps and CTAs of tiles of more rows of x, and their rows of x: the width with which
tiles fill the SMs, without rows that nobody asked for, differs from one number of rows to the next.
No default is of `MORE_SHAPES`.  Of 1,300 tiles for 320 to 4096 rows of six sizes and three formats
on an H200 the least `_cost` of the others took 1.006 times as long as the best (geometric mean)."""

MANY_TRIED = 8, 4
"""Of these tiles are tried, in both orders, those of least `_cost`, and so many more."""

MANY_DEPTH = 3
"""Stages of their ring, at least: of 160 rows of x and two CTAs, whose sums need the memory of the
others, tiles of two stages took 1.5 times their `_cost`."""


FEW_ROWS, FEW_TOKENS = 128, 64
"""Rows of x, and those of a tile, up to which `_cost` lets CTAs with wgmma share SMs."""

FEW_IDLE = 0.25
"""The part of SMs without a CTA, in the last wave, that is lost."""

SURELY = {4: 112, 8: 112}
"""SMs with which clusters of so many CTAs can count, one CTA an SM: the SMs of an H200 come in GPCs
of which not all have a multiple of them.  128 CTAs in clusters of four took 9.9 us where an SM held
one of them (64 rows, 2048 x 4096, a ring of eight stages), and 6.6 us where it held two."""

MULTICAST_ROWS = 2048
"""Rows of x from which two CTAs load them for each other.  On H200s, NVFP4, five sizes: 0.98 of the
time with 2048 rows (geometric mean), 0.99 with 3072, 0.97 with 4096, 0.95 with 8192; 1.00 and 0.99
with 1024 and 1536, and 1.01 to 1.07 times as long with up to 512."""

COLS_ROWS = 4096
"""Rows of x from which tiles of rows of w may follow each other; see `_rasters`."""

BYTE_ROWS = 256
"""Rows of x from which a bucket may multiply in 8 bits, where a layer can: of 64 and 128 that took
1.04 to 1.5 times as long as 16 bits of the same numbers on an H200."""

BYTE_SHAPES = (
    *((256, 8, 1), (256, 8, 2), (128, 8, 1), (128, 8, 2), (128, 8, 4)),
    *((64, 4, 1), (64, 4, 2), (64, 4, 4), (64, 4, 8)),
)
"""Rows of w, warps and CTAs of operands of 8 bits."""

BYTE_DECODING = 3.0
"""Clocks in which an SM decodes 64 k of a row of w to E4M3 and adds up sums apart: in MoE layers on
an H200 a stage of 256 rows and 128 k took some 1,750, whatever the number of tokens."""

FAST_DECODING = 2.0
"""The same where MMAs sum up all of K: 1,540 of a stage with 152 tokens, of which MMAs 1,216."""

GROUP_ROWS = 512
"""The same of int4, whose groups have sums of their own: of 256 rows 8 bits took 1.16 times as long
as 16 bits on an H200, or more."""

GROUP_SHAPES = ((128, 8, 1),)
GROUP_WIDTHS = (128, 112, 96, 80, 64)
"""Rows of w, warps and CTAs of theirs, and rows of x.  Of 8192 x 8192 and 512 to 4096 rows tiles of
256 x 104 took 1.05 to 1.5 times as long as 128 x 128 on an H200, other ones of 256 longer."""

GROUP_CLOCKS = {(128, False): 1.3, (128, True): 1.6, (64, False): 2.1, (64, True): 2.4}
"""Clocks for each row of w and 64 k in which an SM decodes, scales sums and adds them up, by group
and zero points (groups of 64 with them: not measured).  On an H200 none of it hid behind products:
calls of 8192 x 8192 took 0.84 of the time without decoding, 0.86 without scaling, 0.71 without
either."""

GROUP_WAITING = 70
"""Of those, instead of `WAITING`."""

QUANTISING = (12000, 1.5e-3)
"""Clocks of the kernel that quantises rows, and for each element: 7 us, and bytes from memory."""

BYTE_TRIED = 8
"""Of these tiles are tried, those of least `_cost`."""

BYTE_WIDTHS = (160, 152, 144, 128, 112, 96, 80, 64, 48, 32)
"""Rows of x of a tile of theirs; the sums of a stage take registers of their own."""


MEASURED = (128, 256, 1024, 4096)
"""Rows for which what `_cost` says of 8 and of 16 bits was compared with an H200's times."""


def multiplies_bytes(spec: Linear, rows: int, arch: Gpu) -> bool:
    """Whether about ``rows`` rows are multiplied as E4M3: by `_cost` it takes no longer.

    Asked for the next of `MEASURED`: in between it would change with how tiles fill the SMs.
    """
    groups = spec.fmt == "int4"
    if spec.layout != "tiles64e" or rows < (GROUP_ROWS if groups else BYTE_ROWS):
        return False
    rows = next((known for known in MEASURED if rows <= known), MEASURED[-1])
    eight, sixteen = _of_bytes(spec, rows, arch), _of_words(spec, rows, arch)
    words = [_cost(spec, tile, rows) for tile in sixteen if tile.unit == "wgmma"]
    before = QUANTISING[0] + QUANTISING[1] * rows * spec.k if groups else 0
    return bool(eight) and before + _cost(spec, eight[0], rows) <= min(words)


def legal_tiles(spec: Linear, rows: int, arch: Gpu) -> list[LinearTile]:
    """Return the tiles that are tried, the default's first."""
    if multiplies_bytes(spec, rows, arch):
        return _of_bytes(spec, rows, arch)
    return _of_words(spec, rows, arch)


def _of_words(spec: Linear, rows: int, arch: Gpu) -> list[LinearTile]:
    """Return the tiles of operands of 16 bits, the default's first."""
    wide, bulk = WGMMA in arch.features, BULK_COPIES in arch.features
    if wide and rows > WIDTHS[-1][0]:
        return _of_many(spec, rows, arch)
    widths = next((tokens for most, tokens in WIDTHS if rows <= most), WIDTHS[-1][1])
    found: list[LinearTile] = []
    for tokens in widths:
        few = LinearTile("mma", 0, min(tokens, 64), 0, 0, 0, 0)
        few = few if bulk else replace(few, copies="async")
        mma = [_shaped(few, *shape) for shape in (MMA if bulk else MMA_ALONE)[few.tokens]]
        many = _with_wgmma(tokens, WGMMA_SHAPES)
        if not wide or tokens == 8:
            found += [*mma, *(many if wide and rows > 1 else [])]
        else:
            fewest = ONE_WAVE if tokens == 16 else ()
            found += [*(_shaped(few, *shape) for shape in fewest), *many]
    legal = _legal(spec, rows, arch, found)
    first = _default(spec, rows, legal)
    more = _legal(spec, rows, arch, _more(widths, rows)) if wide else []
    if TCGEN05 in arch.features:
        more = _legal(spec, rows, arch, tensor.tensor_tiles(rows))
        more = sorted(more, key=lambda tile: tensor.cost(spec, tile, rows, arch))[: tensor.TRIED]
        first = min((first, *more), key=lambda tile: tensor.cost(spec, tile, rows, arch))
    return list(dict.fromkeys((first, *legal, *more)))


def _of_many(spec: Linear, rows: int, arch: Gpu) -> list[LinearTile]:
    """Return the tiles of operands of 16 bits of many rows: those of least `_cost`.

    Each in both orders, the better one also with the other choice of who loads rows of x.
    """
    found: list[LinearTile] = []
    for shapes, tried in zip((MANY_SHAPES, MORE_SHAPES), MANY_TRIED, strict=True):
        made = [
            LinearTile("wgmma", height, tokens, warps, 1, ctas, 2)
            for height, warps, ctas in shapes
            for tokens in MANY_WIDTHS
        ]
        legal = _legal(spec, rows, arch, made)
        legal = [tile for tile in legal if depths(spec, tile, rows, arch)[0] >= MANY_DEPTH]
        found += sorted(legal, key=lambda tile: _cost(spec, tile, rows))[:tried]
    chosen: list[LinearTile] = []
    for tile in found:
        first, second = (replace(tile, raster=raster) for raster in _rasters(spec, rows, 2))
        better, other = _multicast(spec, arch, first, rows)
        chosen += [better, _multicast(spec, arch, second, rows)[0], other]
    return list(dict.fromkeys(chosen))


def _rasters(spec: Linear, rows: int, item: int) -> tuple[str, str]:
    """Return along which tiles follow each other, the better one first.

    What they have in common comes once from memory; the other operand does if it stays in the L2
    cache, where it is to be the smaller one.  Of 4096 and 8192 rows, five sizes in NVFP4, "cols"
    with multicast took 0.95 and 0.91 of the time of "rows" without on an H200, "rows" with it 0.97
    and 0.95; up to 3072 rows "cols" took 0.99 to 1.03 times as long as "rows".

    Args:
        spec: layer.
        rows: of x.
        item: bytes of an element of x.
    """
    x = rows * spec.k * item
    block = TILE_K * TILE_K // 2 + scale_bytes(spec.fmt, spec.group, spec.zero)
    w = spec.padded_n * spec.padded_k // TILE_K**2 * block
    return ("cols", "rows") if rows >= COLS_ROWS and x >= w else ("rows", "cols")


def _multicast(
    spec: Linear, arch: Gpu, tile: LinearTile, rows: int
) -> tuple[LinearTile, LinearTile]:
    """Return a tile as it is and with CTAs that load rows of x for each other, the better first.

    Both are the same where there is one only.
    """
    pair = replace(tile, multicast=2)
    if pair.illegal(spec, arch) is not None:
        return tile, tile
    return (pair, tile) if rows >= MULTICAST_ROWS else (tile, pair)


def _of_bytes(spec: Linear, rows: int, arch: Gpu) -> list[LinearTile]:
    """Return the tiles of operands of 8 bits: of each shape and order those of least `_cost`."""
    groups = spec.fmt == "int4"
    shapes: Sequence[tuple[int, int, int]] = GROUP_SHAPES if groups else BYTE_SHAPES
    widths: Sequence[int] = GROUP_WIDTHS if groups else BYTE_WIDTHS
    made = [
        LinearTile(
            *("wgmma", height, tokens, warps, 1, ctas, blocks, raster),
            by_bytes=True,
            partial=part,
        )
        for height, warps, ctas in shapes
        for blocks, part in byte_sums(spec.fmt, spec.group, spec.fast_accum)
        for tokens in widths
        if tokens <= max(rows, 64)
        for raster in (_rasters(spec, rows, 1) if rows > 256 else ("rows",))
    ]
    legal = _legal(spec, rows, arch, made)
    # Of wide tiles with fast sums stages of two blocks were faster in MoE layers.
    found = sorted(
        legal,
        key=lambda tile: (
            _cost(spec, tile, rows),
            tile.blocks_k > 2 and not tile.partial and tile.tokens > 80,
        ),
    )[:BYTE_TRIED]
    # Where sums apart are added up, multicast took 0.99 to 1.02 times as long, of 4096 rows.
    pairs = [
        (tile,) if groups or tile.partial else _multicast(spec, arch, tile, rows) for tile in found
    ]
    return [*dict.fromkeys((*(pair[0] for pair in pairs), *(pair[-1] for pair in pairs)))]


def _with_wgmma(
    tokens: int, shapes: Mapping[int, Sequence[tuple[int, int, int]]]
) -> list[LinearTile]:
    return [
        LinearTile("wgmma", height, tokens, warps, 1, ctas, 2)
        for height, warps, ctas in shapes.get(tokens, ())
    ]


def _more(widths: Sequence[int], rows: int) -> list[LinearTile]:
    """Return the tiles that the search alone tries, of ``widths`` and `MORE_WIDTHS`."""
    others = next((tokens for most, tokens in MORE_WIDTHS if rows <= most), ())
    found: list[LinearTile] = []
    for tokens in (*widths, *others):
        few = LinearTile("mma", 0, tokens, 0, 0, 0, 0)
        found += [_shaped(few, *shape) for shape in MORE_MMA.get(tokens, ())]
        if rows > 1:
            known = WGMMA_SHAPES.get(tokens, ()) if tokens in others else ()
            found += _with_wgmma(tokens, {tokens: (*known, *MORE_WGMMA.get(tokens, ()))})
    return found


def _legal(spec: Linear, rows: int, arch: Gpu, tiles: Iterable[LinearTile]) -> list[LinearTile]:
    return [
        tile
        for tile in dict.fromkeys(tiles)
        if tile.illegal(spec, arch) is None and depths(spec, tile, rows, arch)
    ]


def _default(spec: Linear, rows: int, legal: Sequence[LinearTile]) -> LinearTile:
    """Return the highest tile of mma.sync with which CTAs fill the SMs; else the least `_cost`.

    Beside wgmma, of more than 8 rows, that is a tile of `ONE_WAVE`.
    """
    few = [tile for tile in legal if tile.unit == "mma"]
    many = [tile for tile in legal if tile.unit == "wgmma"]
    full = [tile for tile in few if ctas(spec, tile, rows) >= FILLED * SMS]
    once = [tile for tile in full if ctas(spec, tile, rows) <= SMS]
    if rows > 8 and many:
        once, full = [tile for tile in once if _deep_enough(spec, tile)], []
    if found := once or full:
        return found[0]
    if rows > 1 and many:
        return min(many, key=lambda tile: (_cost(spec, tile, rows), tile.tokens))
    return max(few, key=lambda tile: (ctas(spec, tile, rows), tile.ctas))


def _deep_enough(spec: Linear, tile: LinearTile) -> bool:
    """Whether a CTA of `ONE_WAVE` has enough stages of K."""
    return spec.padded_k >= 64 * tile.blocks_k * tile.ctas * ONE_WAVE_STAGES


def _cost(spec: Linear, tile: LinearTile, rows: int) -> float:
    """Clocks of a tile with wgmma, about; of 130 tiles on an H200 the least was within 5 %.

    Of few rows CTAs of four warps share an SM, and begin as others end. With this, and with
    `FEW_CLUSTER`, the default of 16, 32, 64 and 128 rows of 13 matrices is the tile that was the
    fastest on an H200 in 34 of 49 cases where that is one with wgmma; without both in 23.
    """
    blocks = ceil_div(spec.padded_k, 64 * tile.ctas)
    product, decoding = tile.rows * tile.tokens / 32, DECODING * tile.rows
    waiting = WAITING
    if tile.by_bytes and spec.fmt == "int4":
        product, waiting = product / 2, GROUP_WAITING
        product += GROUP_CLOCKS[spec.group, spec.zero] * tile.rows
        decoding = 0
    elif tile.by_bytes:
        clocks = BYTE_DECODING if tile.partial else FAST_DECODING
        product, decoding = product / 2, clocks * tile.rows
        if tile.rows < 256:  # in MoE layers on an H200 neither hid behind the other
            product += decoding
    time = blocks * (max(product, decoding) + waiting)
    few = rows <= FEW_ROWS and tile.tokens <= FEW_TOKENS and not tile.by_bytes
    shares = ctas(spec, tile, rows) / SMS
    waves = float(ceil(shares))
    if few and tile.warps == 4:
        waves = max(1.0, shares + FEW_IDLE * (waves - shares))
    return waves * (time + meeting(tile, FEW_CLUSTER if few else CLUSTER))


def _shaped(
    of: LinearTile, rows: int, warps: int, slices: int, ctas: int, blocks: int
) -> LinearTile:
    return replace(of, rows=rows, warps=warps, slices=slices, ctas=ctas, blocks_k=blocks)


def depths(spec: Linear, tile: LinearTile, rows: int, arch: Gpu) -> list[int]:
    """Return the depths of the ring that are tried, the preferred one first.

    As deep as lets the CTAs that there are share SMs, of up to 8 rows also one of the next launch,
    which begins early; no deeper than a CTA's stages of K.
    """
    needed = round_up(spec.padded_k, 512) // (64 * tile.blocks_k * tile.ctas)
    sms = SURELY.get(tile.ctas, SMS) if tile.unit == "wgmma" else SMS
    wanted = ceil_div(ctas(spec, tile, rows), sms)
    beside = tile.unit == "mma" and tile.tokens == 8 and tile.copies == "bulk"
    each = max(1, min(3, wanted + beside))
    if tile.consumer_registers or tile.tensor:  # which take all of an SM's, or of its tensor memory
        each = wanted = 1
    shares = (each, 2, 1, *(n for n in (3, 4) if n <= wanted))
    rooms = [arch.cta_shared if n == 1 else arch.sm_shared // n - CTA_RESERVED for n in shares]
    most = [min(needed, MOST_STAGES[tile.unit], tile.stages_in(spec, room)) for room in rooms]
    return [n for n in dict.fromkeys(most) if n >= 2] or [n for n in (2,) if most[2] >= 1 < needed]
