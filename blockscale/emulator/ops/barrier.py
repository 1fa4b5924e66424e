"""Named barriers of a CTA and the barrier of a cluster (PTX ISA 9.7.13.1, .3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..clocks import union
from ..errors import IllegalOperation
from ..gang import LANES
from ..grid import Barrier, Cluster, Cta
from ..syntax import Instr
from .core import converged, register

if TYPE_CHECKING:
    from ..compiler import Compiler
    from ..gang import Fragment, Gang
    from ..machine import Machine


class Round:
    """Where a fragment stands at a barrier: per warp, the barrier and the generation it waits for."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[Barrier, int]] = {}


def arrive(
    g: Gang, machine: Machine, w: int, barrier: Barrier, lanes: np.ndarray, first: int, size: int, line: int
) -> None:
    """Let lanes of warp position `w` arrive: `first` is the warp's place among `size` threads."""
    if barrier.arrived is None:
        barrier.arrived = np.zeros(size, bool)
        barrier.vector = None
        barrier.time = 0.0
        barrier.line = line
    spot = barrier.arrived[first : first + LANES]
    if (spot & lanes).any():
        raise IllegalOperation(
            "a thread arrives twice at a barrier that has not completed (PTX ISA 9.7.13.1); it must wait "
            "for the barrier first",
            lane=w * LANES + int(np.flatnonzero(spot & lanes)[0]),
        )
    spot |= lanes
    cluster, agent = int(g.w_cluster[w]), int(g.w_agent[w])
    barrier.vector = union(barrier.vector, machine.clocks.both(cluster, agent))
    machine.clocks.release(cluster, agent)
    barrier.time = max(barrier.time, g.time)


def complete(machine: Machine, barrier: Barrier) -> None:
    """End a barrier's generation."""
    barrier.generation += 1
    barrier.done, barrier.done_time = barrier.vector, barrier.time
    barrier.arrived = None
    votes = barrier.votes
    barrier.result = (sum(votes), all(votes), any(votes))
    barrier.votes = []
    machine.progress += 1


def warps_arrived(g: Gang, barrier: Barrier, cta: Cta) -> int:
    """Return how many warps have arrived with all their live lanes.

    Where all threads of the CTA are waited for, warps that have left are not.
    """
    machine = g.machine
    assert barrier.arrived is not None
    full = barrier.arrived[: len(cta.warps) * LANES].reshape(-1, LANES)
    count = 0
    for i, warp in enumerate(cta.warps):
        if not full[i].any() or (warp.exited and barrier.expected is None):
            continue
        if full[i].all():
            count += 1
            continue
        live = machine.live_lanes(warp)
        count += bool((full[i] | ~live).all())
    return count


@register("bar", "barrier", waits=True)
def barrier(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """bar and barrier.cta: .sync, .arrive, .red; threads are counted by whole warps."""
    kind = next(m for m in ins.mods if m in ("sync", "arrive", "red"))
    operands = list(ins.operands)
    put = red = vote = None
    if kind == "red":
        red = next(m for m in ins.mods if m in ("popc", "and", "or"))
        put = c.dest(operands.pop(0), "u4" if red == "popc" else "?")
        vote = c.lanes_source(operands.pop(), "?")
    number = c.lanes_source(operands[0], "u4")
    count = c.lanes_source(operands[1], "u4") if len(operands) > 1 else None

    aligned = ins.base == "bar" or "aligned" in ins.mods

    def enter(g: Gang, m: np.ndarray | None, f: Fragment) -> None:
        machine, numbers = g.machine, number(g)
        active = g.by_warp(m)
        f.wait = Round()
        touched: dict[int, tuple[Barrier, Cta]] = {}
        for w in g.active_warps(m):
            warp = machine.warps[g.warps[w]]
            first = w * LANES + int(active[w].argmax())
            which = int(numbers[first])
            if which > 15:
                raise IllegalOperation(f"barrier {which}: a CTA has barriers 0 to 15 (PTX ISA 9.7.13.1)", lane=first)
            b = warp.cta.barriers.setdefault(which, Barrier())
            threads = int(count(g)[first]) if count is not None else None
            if threads is not None and (threads % LANES or threads == 0):
                raise IllegalOperation(
                    f"a barrier of {threads} threads: the number must be a multiple of 32 (PTX ISA 9.7.13.1)", lane=first
                )
            if b.arrived is not None and b.expected != threads:
                raise IllegalOperation(
                    f"barrier {which} is waited for by {threads or 'all'} threads here and by "
                    f"{b.expected or 'all'} at line {b.line}; the numbers must agree",
                    lane=first,
                )
            b.expected = threads
            f.wait.entries[int(g.warps[w])] = (b, b.generation)
            arrive(g, machine, w, b, active[w], warp.number * LANES, len(warp.cta.warps) * LANES, ins.line)
            if vote is not None:
                b.votes += [bool(x) for x in vote(g)[w * LANES : (w + 1) * LANES][active[w]]]
            touched[id(b)] = (b, warp.cta)
        for b, cta in touched.values():
            check(g, b, cta)

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> Any:
        if f.wait is None:
            if aligned and not converged(g, m, f):
                return False
            enter(g, m, f)
        if kind == "arrive":
            return True
        machine = g.machine
        active = g.active_warps(m)
        entries = [f.wait.entries[int(g.warps[w])] for w in active]
        ready = np.array([b.generation != generation for b, generation in entries])
        if not ready.all():
            f.reason = f"barrier {int(number(g)[g.lanes(m)[0]])}"
            if not ready.any():
                return False
            keys = np.full(g.W, 2)
            keys[active] = ready
            return keys
        for w, (b, _) in zip(active, entries, strict=True):
            assert b.done is not None
            machine.clocks.join(int(g.w_cluster[w]), int(g.w_agent[w]), b.done)
            g.time = max(g.time, b.done_time)
            g.flow = None
        if put is not None:
            at = {"popc": 0, "and": 1, "or": 2}[red or ""]
            values = np.zeros(g.n, np.uint32 if red == "popc" else bool)
            for w, (b, _) in zip(active, entries, strict=True):
                values[w * LANES : (w + 1) * LANES] = b.result[at]
            put(g, m, values)
        return True

    return run


def check(g: Gang, b: Barrier, cta: Cta) -> None:
    """Complete a barrier when all have come."""
    if b.arrived is None:
        return
    count = warps_arrived(g, b, cta)
    if b.expected is None:
        if count >= cta.live:
            complete(g.machine, b)
    elif count * LANES == b.expected:
        complete(g.machine, b)
    elif count * LANES > b.expected:
        raise IllegalOperation(
            f"{count * LANES} threads have arrived at a barrier of {b.expected} (PTX ISA 9.7.13.1)"
        )


def recheck(machine: Machine, cta: Cta) -> None:
    """After a warp has left: barriers of all threads may be complete now."""
    g = machine.gangs[0] if machine.gangs else None
    for b in cta.barriers.values():
        if b.arrived is not None and b.expected is None and g is not None and cta.live:
            check(g, b, cta)
    check_cluster(machine, cta.cluster)


@register("barrier.cluster", waits=True)
def barrier_cluster(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """barrier.cluster.arrive and .wait (9.7.13.3)."""

    def enter(g: Gang, m: np.ndarray | None) -> None:
        machine, active = g.machine, g.by_warp(m)
        clusters: dict[int, Cluster] = {}
        for w in g.active_warps(m):
            warp = machine.warps[g.warps[w]]
            b = warp.cta.cluster.barrier
            cta_threads = len(warp.cta.warps) * LANES
            size = cta_threads * machine.cluster_ctas
            first = warp.cta.rank * cta_threads + warp.number * LANES
            arrive(g, machine, w, b, active[w], first, size, ins.line)
            clusters[id(b)] = warp.cta.cluster
            machine.cluster_waits[int(g.warps[w])] = b.generation
        for cluster in clusters.values():
            check_cluster(machine, cluster)


    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> Any:
        if "aligned" in ins.mods and not converged(g, m, f):
            return False
        if "arrive" in ins.mods:
            enter(g, m)
            return True
        machine = g.machine
        active = g.active_warps(m)
        ready = []
        for w in active:
            warp = machine.warps[g.warps[w]]
            if int(g.warps[w]) not in machine.cluster_waits:
                raise IllegalOperation("barrier.cluster.wait without an arrive before it", lane=int(w) * LANES)
            ready.append(warp.cta.cluster.barrier.generation != machine.cluster_waits[int(g.warps[w])])
        if not all(ready):
            f.reason = "barrier of the cluster"
            if not any(ready):
                return False
            keys = np.full(g.W, 2)
            keys[active] = ready
            return keys
        for w in active:
            warp = machine.warps[g.warps[w]]
            b = warp.cta.cluster.barrier
            assert b.done is not None
            machine.clocks.join(int(g.w_cluster[w]), int(g.w_agent[w]), b.done)
            g.time = max(g.time, b.done_time)
            g.flow = None
        return True

    return run


def check_cluster(machine: Machine, cluster: Cluster) -> None:
    """Complete a cluster's barrier when all live threads have come."""
    b = cluster.barrier
    if b.arrived is None:
        return
    arrived = b.arrived.reshape(-1, LANES)
    for i, warp in enumerate(cluster.warps):
        if warp.exited or arrived[i].all():
            continue
        if not arrived[i].any() or not (arrived[i] | ~machine.live_lanes(warp)).all():
            return
    complete(machine, b)
