"""Which tiles of tcgen05 a linear layer may have, and what a model says that they take.

No such GPU has been measured.  The model has the data sheet's rate of tensor cores, and takes what
an H200's SM takes to decode; `blockscale tune` on a GPU decides better.
"""

from __future__ import annotations

from dataclasses import replace

from blockscale.base.sizes import ceil_div
from blockscale.base.targets import Gpu
from blockscale.schedules.gemm.linear_clocks import DECODING, WAITING, ctas, meeting
from blockscale.specs import Linear
from blockscale.specs.plans import tensor_memory
from blockscale.specs.plans.linear import LinearTile

FEWEST_ROWS = 32
"""Rows of x from which on these tiles are tried: fewer are bound by the weight's bytes, which more
CTAs of mma.sync load, with K divided among them."""

WIDTHS = (256, 224, 192, 160, 128, 96, 64, 32)
"""Rows of x of a tile."""

CTAS = (1, 2, 4, 8)
"""Of a cluster, which divide K."""

TRIED = 8
"""Of these tiles, those of least `cost`."""

FEWER_WARPS = 1.5
"""By how much longer four warps decode than eight, for they wait more."""

MACS = {"tcgen05": 4096, "mma": 1024}
"""Products of 16-bit numbers of an SM in a clock; of mma.sync those of an A100's."""

STORING = 0.15
"""Clocks for each sum of a tile that come back from tensor memory and are stored."""


def tensor_tiles(rows: int) -> list[LinearTile]:
    """Return the tiles for about ``rows`` rows of x, some of which may be illegal."""
    if rows < FEWEST_ROWS:
        return []
    narrowest = next((width for width in WIDTHS[::-1] if width >= rows), WIDTHS[0])
    made = [
        LinearTile("tcgen05", tensor_memory.ROWS, width, tensor_memory.WARPS, slices, ctas, 2)
        for width in WIDTHS
        if width <= narrowest
        for slices in (2, 1)
        for ctas in CTAS
    ]
    if rows <= WIDTHS[0]:
        return made
    return [replace(tile, raster=raster) for tile in made for raster in ("rows", "cols")]


def cost(spec: Linear, tile: LinearTile, rows: int, arch: Gpu) -> float:
    """Clocks of all tiles, about."""
    blocks = ceil_div(spec.padded_k, 64 * tile.ctas)
    product = tile.rows * tile.tokens * 64 / MACS[tile.unit]
    decoding = DECODING * tile.rows
    if tile.tensor:  # MMAs run by themselves
        decoding *= 1 if tile.slices == 2 else FEWER_WARPS
        time = blocks * (max(product, decoding) + WAITING) + STORING * tile.rows * tile.tokens
    else:
        time = blocks * (product + decoding + WAITING)
    return ceil_div(ctas(spec, tile, rows), arch.sms) * (time + meeting(tile))
