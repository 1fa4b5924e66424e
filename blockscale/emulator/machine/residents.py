"""Who is resident: clusters enter in waves, are ganged as the seed says, and retire.

How warps are ganged changes speed and order, never a correct kernel's results: PTX promises no
order between warps but that of barriers.
"""

from __future__ import annotations

import numpy as np

from blockscale.emulator.machine.gangs import Gang, Machine
from blockscale.emulator.machine.grid import LANES, Cluster, Cta, Warp, unravel
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.ptx.syntax import Instr
from blockscale.emulator.tcgen05.layout import CELLS

GANG_WARPS = 128  # more lanes per array gain nothing
POISON = 0xFFFFFFFF  # what nobody has written: a NaN as a float
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
        m.slot_ended[index] = False
        for w in range(m.cta_warps):
            i = index * m.cta_warps + w
            cta.warps.append(Warp(i, w, cta, rank * m.cta_warps + w))
            m.warps[i] = cta.warps[-1]
        cluster.ctas.append(cta)
        poison(m, index)
    m.clusters[slot] = cluster
    per = m.cluster_ctas * m.cta_warps
    return np.arange(slot * per, (slot + 1) * per)


def poison(m: Machine, index: int) -> None:
    """Make the memories of CTA slot `index` new: nobody has written them."""
    stride = m.shared.stride
    m.shared.bytes[index * stride : (index + 1) * stride] = 0xFF
    if m.shared_shadow is not None:
        cells = stride // m.traits.granule
        m.shared_shadow.reset(slice(index * cells, (index + 1) * cells))
    if m.tmem_shadow is not None:
        m.tmem[index].fill(POISON)
        m.tmem_shadow.reset(slice(index * CELLS, (index + 1) * CELLS))


def retire(m: Machine) -> None:
    """Let go of clusters whose warps have left and whose asynchronous work is done."""
    for slot, cluster in enumerate(m.clusters):
        if cluster is not None and cluster.live == 0 and not m.engine.busy(cluster):
            leave_behind(m, cluster)
            m.clusters[slot] = None


def unread_stores(m: Machine, cta: Cta) -> None:
    """Report bulk stores that a CTA leaves behind without having waited for their reads."""
    for warp in cta.warps:
        groups = [g for lane in warp.bulk_groups.values() for g in lane]
        know = m.clocks.know[cta.cluster.slot, warp.agent]  # .read has been waited for
        pending = [op for group in [*groups, *warp.bulk_open.values()] for op in group]
        left = [op for op in pending if know[op.agent] < op.clock]
        if left:
            m.hazards.add(
                "unwaited bulk copy", "warning",
                f"CTA {cta.coords} ends without having waited for the bulk store of line "
                f"{left[0].line}, which may still read its shared memory: "
                "cp.async.bulk.wait_group.read comes first (PTX ISA 9.7.9.25.4.5)",
                line=left[0].line, warp=warp.index,
            )  # fmt: skip


def cta_exits(m: Machine, cta: Cta, ins: Instr | None) -> None:
    """Check that no CTA may still use the shared memory of one that ends (PTX ISA 9.7.13.3)."""
    m.slot_ended[cta.slot] = True
    unread_stores(m, cta)
    shadow = m.shared_shadow
    if shadow is None or m.cluster_ctas == 1:
        return
    cells = m.shared.stride // m.traits.granule
    span = np.arange(cta.slot * cells, (cta.slot + 1) * cells)
    clocks = m.clocks
    agents = np.array([w.agent for w in cta.warps])
    know, _ = clocks.both(cta.cluster.slot, agents)
    for met in (w.met for w in cta.warps if w.met is not None):  # relaxed arrivals will do
        np.maximum(know[: len(met[0])], met[0], out=know[: len(met[0])])
    for first in (0, clocks.cp_async, clocks.tcgen05_st, clocks.store):  # its own work ends with it
        know[first + agents] = np.iinfo(np.int32).max
    know[clocks.tensor + cta.rank] = np.iinfo(np.int32).max
    found = shadow.look(span[shadow.dirty[span]], know)
    if found is not None:
        line = ins.line if ins is not None else None
        m.hazards.conflict(
            found, f"the end of CTA rank {cta.rank}", "shared memory", line or 0,
            cta.warps[0].index,
            int(span[shadow.dirty[span]][found[1]]) % cells * m.traits.granule,
        )  # fmt: skip


def leave_behind(m: Machine, cluster: Cluster) -> None:
    """Report what a cluster leaves behind (9.7.16.7: tensor memory must be freed); forget it."""
    for cta in cluster.ctas:
        for column, count in cta.allocations.items():
            m.hazards.add(
                "tmem not freed", "error",
                f"CTA {cta.coords} ends with {count} TMEM columns from {column} still allocated; "
                "execute "
                "tcgen05.dealloc before the last warp leaves (PTX ISA 9.7.16.7.1)",
                line=m.tmem_lines.get((cta.slot, column)), warp=cta.warps[0].index,
            )  # fmt: skip
        if cta.uncommitted is not None:
            m.hazards.add(
                "uncommitted tensor work", "warning",
                f"CTA {cta.coords} ends, and no tcgen05.commit followed the tcgen05.mma of line "
                f"{cta.uncommitted}: nobody can have waited for it (PTX ISA 9.7.16.10)",
                line=cta.uncommitted, warp=cta.warps[0].index,
            )  # fmt: skip
    stride = m.shared.stride
    slots = {cta.slot for cta in cluster.ctas}
    for key in [k for k in m.mbarriers if k // stride in slots]:
        del m.mbarriers[key]
    for key in [k for k in m.ended if k // stride in slots]:
        del m.ended[key]
    for warp in cluster.warps:
        m.cluster_waits.pop(warp.index, None)
    for spot in [k for k in m.sync if isinstance(k, tuple) and k[0] == cluster.slot]:
        del m.sync[spot]
