"""Happens-before through memory: release and acquire at an address (PTX ISA 8.7, 8.8).

A relaxed or volatile access tells what its warp knew at its last fence, and what it is told counts
from its warp's next fence on.
"""

from __future__ import annotations

import numpy as np

from blockscale.emulator.machine.clocks import union
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.machine.grid import LANES
from blockscale.emulator.ptx.syntax import Instr


def releases(ins: Instr) -> bool:
    """Return whether an access releases by itself."""
    return "release" in ins.mods or "acq_rel" in ins.mods


def acquires(ins: Instr) -> bool:
    """Return whether an access acquires by itself."""
    return "acquire" in ins.mods or "acq_rel" in ins.mods


def _key(cluster: int, at: int) -> tuple[int, int]:
    """Return the key of an address: shared addresses mean something per cluster only."""
    return cluster, at & 0xFFFFFFFFFFFF if at >> 32 else at


def release(g: Gang, lanes: np.ndarray, at: np.ndarray) -> None:
    """What these warps have done so far is known to whoever acquires at the addresses."""
    if g.machine.shared_shadow is None and g.machine.tmem_shadow is None:
        return
    clocks, sync, explicit = g.machine.clocks, g.machine.sync, releases(g.ins)
    rows = lanes // LANES
    for w in np.unique(rows):
        cluster, agent = int(g.w_cluster[w]), int(g.w_agent[w])
        vector = clocks.both(cluster, agent) if explicit else clocks.told.get((cluster, agent))
        if vector is None:
            continue
        for spot in np.unique(at[rows == w]):
            key = _key(cluster, int(spot))
            old = sync.get(key)
            if old is not vector:
                sync[key] = vector if old is None else union(old, vector)
        if explicit:
            clocks.release(cluster, agent)


def acquire(g: Gang, lanes: np.ndarray, at: np.ndarray) -> None:
    """These warps know what was released at the addresses, or will after a fence."""
    clocks, sync = g.machine.clocks, g.machine.sync
    if not sync:
        return
    learn = clocks.join if acquires(g.ins) else clocks.owe
    rows = lanes // LANES
    for w in np.unique(rows):
        cluster, agent = int(g.w_cluster[w]), int(g.w_agent[w])
        for spot in np.unique(at[rows == w]):
            vector = sync.get(_key(cluster, int(spot)))
            if vector is not None:
                learn(cluster, agent, vector)
