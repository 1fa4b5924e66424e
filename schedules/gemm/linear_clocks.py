"""What an SM of an H200 takes of a linear layer's tile beside products, in clocks."""

from __future__ import annotations

from blockscale.base.sizes import ceil_div
from blockscale.specs import Linear
from blockscale.specs.plans.linear import LinearTile

DECODING = 4.2
"""Clocks in which an SM decodes 64 k of a row of w, and does what else does not overlap."""

WAITING = 120
"""Clocks for each 64 k that hide behind neither."""

CLUSTER = (860, 0.6)
"""Clocks that CTAs need to meet, and for each sum of another.

Of CTAs of which one added up all; with less, as they take turns now, the tiles of least cost were
slower: 1.05 times as long with 512 rows on an H200.
"""


FEW_CLUSTER = (400, 0.1)
"""The same of tiles of up to 64 rows of x and calls of up to 128: fitted to the fastest tiles of 13
matrices on an H200 (2026-11-27), whose CTAs take turns."""


def meeting(tile: LinearTile, clocks: tuple[float, float] = CLUSTER) -> float:
    """Return the clocks in which the CTAs of a cluster add up; 0: there is one."""
    others = tile.ctas - 1
    return clocks[0] + clocks[1] * tile.rows * tile.tokens * others if others else 0.0


def ctas(spec: Linear, tile: LinearTile, rows: int) -> int:
    """CTAs that all tiles make of ``rows`` rows of x."""
    return ceil_div(rows, tile.tokens) * ceil_div(spec.padded_n, tile.rows) * tile.ctas
