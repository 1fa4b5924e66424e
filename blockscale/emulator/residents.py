"""Who is resident: clusters enter in waves, are ganged as the seed says, and retire.

How warps are ganged changes speed and order, never a correct kernel's results: PTX promises no
order between warps but that of barriers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import ops
from .gang import LANES, Fragment, Gang
from .grid import Cluster, Cta, Dim, Warp

if TYPE_CHECKING:
    from .machine import Machine

GANG_WARPS = 128  # more lanes per array gain nothing
MOST_PARTED = 64  # warps that enter together: above, ganging them one by one would take all day


def launch_wave(m: Machine) -> None:
    """Make as many clusters resident as there is room for, ganged as the seed says."""
    slots = [i for i, c in enumerate(m.clusters) if c is None]
    fresh: list[np.ndarray] = []
    for slot in slots:
        if not m.waiting:
            break
        fresh.append(enter(m, slot, m.waiting.popleft()))
    if not fresh:
        return
    for group in partition(m, np.concatenate(fresh)):
        gang = Gang(m, np.sort(group))
        gang.make_registers(m.program.counts, m.program.local_bytes, m.rng)
        mask = np.ones(gang.n, bool)
        if m.threads % LANES:
            number = np.repeat(m.warp_table["number"][gang.warps], LANES)
            mask = number * LANES + np.tile(np.arange(LANES), gang.W) < m.threads
            gang.live &= mask
        fragment = Fragment(0, mask, None)
        gang.refresh(fragment)
        gang.fragments.append(fragment)
        m.gangs.append(gang)


def partition(m: Machine, warps: np.ndarray) -> list[np.ndarray]:
    """Return how the seed gangs warps together: all, by itself, or at random."""
    most = GANG_WARPS
    if m.traits.asynchronous:  # its warps will part soon: parting many at once is what costs
        most = m.cta_warps
    mode = 0 if m.seed == 0 else int(m.rng.integers(0, 3))
    if len(warps) > MOST_PARTED:
        mode = 0
    if mode == 0:
        whole = max(most // m.cta_warps, 1) * m.cta_warps
        return [warps[i : i + whole] for i in range(0, len(warps), whole)]
    if mode == 1:
        return [warps[i : i + 1] for i in range(len(warps))]
    order = m.rng.permutation(warps)
    cuts = np.sort(m.rng.integers(1, max(len(warps), 2), 3))
    return [part for part in np.split(order, cuts) if len(part)]


def enter(m: Machine, slot: int, number: int) -> np.ndarray:
    """Make cluster `number` resident in `slot`; return its warps."""
    m.clocks.reset(slot)
    x, y, z = m.cluster
    coords = unravel(number, (m.grid[0] // x, m.grid[1] // y, m.grid[2] // z))
    cluster = Cluster(slot, number, coords)
    for rank in range(m.cluster_ctas):
        inside = unravel(rank, m.cluster)
        at = (coords[0] * x + inside[0], coords[1] * y + inside[1], coords[2] * z + inside[2])
        index = slot * m.cluster_ctas + rank
        cta = Cta(index, rank, at, cluster)
        m.slot_coords[index] = at
        m.slot_cluster[index] = inside
        for w in range(m.cta_warps):
            i = index * m.cta_warps + w
            cta.warps.append(Warp(i, w, cta, rank * m.cta_warps + w))
            m.warps[i] = cta.warps[-1]
        cluster.ctas.append(cta)
        poison(m, index)
    m.clusters[slot] = cluster
    per = m.cluster_ctas * m.cta_warps
    return np.arange(slot * per, (slot + 1) * per)


def unravel(number: int, sizes: Dim) -> Dim:
    """Return the coordinates of the `number`-th place of a box, x fastest (PTX ISA 10)."""
    return number % sizes[0], number // sizes[0] % sizes[1], number // (sizes[0] * sizes[1])


def poison(m: Machine, index: int) -> None:
    """Make the memories of CTA slot `index` new: nobody has written them."""
    stride = m.shared.stride
    m.shared.bytes[index * stride : (index + 1) * stride] = 0xFF
    if m.shared_shadow is not None:
        cells = stride // m.traits.granule
        m.shared_shadow.reset(slice(index * cells, (index + 1) * cells))
    if m.tmem_shadow is not None:
        cells = m.tmem[index].size
        m.tmem[index].fill(0xFFFFFFFF)
        m.tmem_shadow.reset(slice(index * cells, (index + 1) * cells))


def retire(m: Machine) -> None:
    """Let go of clusters whose warps have left and whose asynchronous work is done."""
    for slot, cluster in enumerate(m.clusters):
        if cluster is not None and cluster.live == 0 and not m.engine.busy(cluster):
            ops.at_exit(m, cluster)
            m.clusters[slot] = None
