"""Happens-before through memory: release and acquire at an address (PTX ISA 8.7, 8.8)."""

from __future__ import annotations

import numpy as np

from blockscale.emulator.machine.clocks import union
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.machine.grid import LANES

MOST_ADDRESSES = 4  # a warp that touches more at once is counting, not signalling


def _spots(g: Gang, lanes: np.ndarray, at: np.ndarray) -> list[tuple[int, int]]:
    """Return (warp position, address) pairs of signalling accesses."""
    if g.machine.shared_shadow is None and g.machine.tmem_shadow is None:
        return []
    result = []
    rows = lanes // LANES
    for w in np.unique(rows):
        spots = np.unique(at[rows == w])
        if len(spots) <= MOST_ADDRESSES:
            result += [(int(w), int(a)) for a in spots]
    return result


def _key(g: Gang, w: int, at: int) -> tuple[int, int]:
    """Return the key of an address: shared addresses mean something per cluster only."""
    return int(g.w_cluster[w]), at & 0xFFFFFFFFFFFF if at >> 32 else at


def release(g: Gang, lanes: np.ndarray, at: np.ndarray) -> None:
    """What these warps have done so far is known to whoever acquires at the address."""
    clocks, sync = g.machine.clocks, g.machine.sync
    for w, spot in _spots(g, lanes, at):
        cluster, agent = int(g.w_cluster[w]), int(g.w_agent[w])
        key = _key(g, w, spot)
        sync[key] = union(sync.get(key), clocks.both(cluster, agent))
        clocks.release(cluster, agent)


def acquire(g: Gang, lanes: np.ndarray, at: np.ndarray) -> None:
    """These warps know what was released at the address."""
    clocks, sync = g.machine.clocks, g.machine.sync
    if not sync:
        return
    for w, spot in _spots(g, lanes, at):
        vector = sync.get(_key(g, w, spot))
        if vector is not None:
            clocks.join(int(g.w_cluster[w]), int(g.w_agent[w]), vector)
