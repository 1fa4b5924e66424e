"""Named barriers of a CTA and the barrier of a cluster (PTX ISA 9.7.13.1, .3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.machine.clocks import union
from blockscale.emulator.machine.gangs import Gang, Machine
from blockscale.emulator.machine.grid import LANES, Barrier, Cluster, Cta
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.ops.core import converged, known_modifiers, register, split_keys
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.syntax import Instr

LAST = 15  # of a CTA's named barriers
VOTES = {"popc": 0, "and": 1, "or": 2}  # where `Barrier.result` has them
MODIFIERS = {"cta", "sync", "arrive", "red", "aligned", *VOTES}
CLUSTER_MODIFIERS = {"cluster", "arrive", "wait", "aligned", "release", "relaxed", "acquire"}


class Round:
    """Where a fragment stands at a barrier: per warp, the barrier and the generation."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[Barrier, int]] = {}


def arrive(
    g: Gang,
    machine: Machine,
    w: int,
    barrier: Barrier,
    lanes: np.ndarray,
    first: int,
    size: int,
    line: int,
    relaxed: bool = False,
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
            "a thread arrives twice at a barrier that has not completed (PTX ISA 9.7.13.1); it "
            "must wait "
            "for the barrier first",
            lane=w * LANES + int(np.flatnonzero(spot & lanes)[0]),
        )
    spot |= lanes
    cluster, agent = int(g.w_cluster[w]), int(g.w_agent[w])
    mine = machine.clocks.both(cluster, agent)
    machine.clocks.release(cluster, agent)
    if not relaxed:
        barrier.vector = union(barrier.vector, mine)
    else:
        barrier.came = union(barrier.came, mine)
        if (told := machine.clocks.told.get((cluster, agent))) is not None:
            barrier.vector = union(barrier.vector, told)
    if machine.watch is not None:
        barrier.seen = machine.watch.came(g, w, barrier.seen)
    barrier.time = max(barrier.time, g.time)


def complete(machine: Machine, barrier: Barrier) -> None:
    """End a barrier's generation."""
    barrier.generation += 1
    barrier.done, barrier.done_time = barrier.vector, barrier.time
    barrier.all_came, barrier.came = barrier.came, None
    barrier.told, barrier.seen = barrier.seen, None
    barrier.arrived = None
    votes = barrier.votes
    barrier.result = (sum(votes), all(votes), any(votes))
    barrier.votes = []
    machine.progress += 1


def warps_arrived(machine: Machine, barrier: Barrier, cta: Cta) -> int:
    """Return how many warps have arrived with all their live lanes.

    Where all threads of the CTA are waited for, warps that have left are not.
    """
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


class CtaBarrier:
    """One bar or barrier.cta instruction: .sync, .arrive or .red."""

    def __init__(self, c: Operands, ins: Instr) -> None:
        known_modifiers(ins, MODIFIERS)
        self.kind = next((m for m in ins.mods if m in ("sync", "arrive", "red")), None)
        if self.kind is None:
            raise PtxError(f"{ins.opcode}: one of .sync, .arrive, .red is missing")
        operands = list(ins.operands)
        self.put = self.vote = None
        self.red = ""
        if self.kind == "red":
            self.red = next((m for m in ins.mods if m in VOTES), "")
            if not self.red or len(operands) < 3:
                raise PtxError(f"{ins.opcode}: .popc, .and or .or, and d, a{{, b}}, p are wanted")
            self.put = c.dest(operands.pop(0), "u4" if self.red == "popc" else "?")
            self.vote = c.lanes_source(operands.pop(), "?")
        if not operands or (self.kind == "arrive" and len(operands) < 2):
            raise PtxError(f"{ins.opcode}: the barrier (and with .arrive the threads) are missing")
        self.number = c.lanes_source(operands[0], "u4")
        self.count = c.lanes_source(operands[1], "u4") if len(operands) > 1 else None
        self.aligned = ins.base == "bar" or "aligned" in ins.mods
        self.line = ins.line

    def barrier(self, g: Gang, m: np.ndarray | None, w: int, first: int) -> Barrier:
        """Return the barrier that warp position `w` names, its thread count agreed upon."""
        part = slice(w * LANES, (w + 1) * LANES)
        active = g.by_warp(m)[w]
        numbers = self.number(g)[part][active]
        counts = self.count(g)[part][active] if self.count is not None else None
        if (numbers != numbers[0]).any() or (counts is not None and (counts != counts[0]).any()):
            raise IllegalOperation(
                "lanes of one warp name different barriers or thread counts; they must agree (PTX "
                "ISA 9.7.13.1)",
                lane=first,
            )
        which, threads = int(numbers[0]), None if counts is None else int(counts[0])
        if which > LAST:
            raise IllegalOperation(
                f"barrier {which}: a CTA has barriers 0 to {LAST} (PTX ISA 9.7.13.1)", lane=first
            )
        if threads is not None and (threads % LANES or threads == 0):
            raise IllegalOperation(
                f"a barrier of {threads} threads: the number must be a multiple of {LANES}, and "
                "not 0 "
                "(PTX ISA 9.7.13.1)",
                lane=first,
            )
        b = g.machine.warp(g.warps[w]).cta.barriers.setdefault(which, Barrier())
        if b.arrived is not None and b.expected != threads:
            raise IllegalOperation(
                f"barrier {which} is waited for by {threads or 'all'} threads here and by "
                f"{b.expected or 'all'} at line {b.line}; the numbers must agree (PTX ISA "
                "9.7.13.1)",
                lane=first,
            )
        b.expected = threads
        return b

    def enter(self, g: Gang, m: np.ndarray | None, f: Fragment) -> None:
        """Let the lanes arrive."""
        machine, active = g.machine, g.by_warp(m)
        f.wait = Round()
        touched: dict[int, tuple[Barrier, Cta, int]] = {}
        for w in g.active_warps(m):
            warp = machine.warp(g.warps[w])
            first = int(w) * LANES + int(active[w].argmax())
            b = self.barrier(g, m, int(w), first)
            f.wait.entries[int(g.warps[w])] = (b, b.generation)
            threads = len(warp.cta.warps) * LANES
            arrive(g, machine, int(w), b, active[w], warp.number * LANES, threads, self.line)
            if self.vote is not None:
                votes = self.vote(g)[w * LANES : (w + 1) * LANES][active[w]]
                b.votes += [bool(x) for x in votes]
            touched[id(b)] = (b, warp.cta, first)
        for b, cta, first in touched.values():
            check(machine, b, cta, first)

    def leave(self, g: Gang, m: np.ndarray | None, f: Fragment) -> Any:
        """Go on when the barrier has completed."""
        active = g.active_warps(m)
        entries = [f.wait.entries[int(g.warps[w])] for w in active]
        if not all(b.generation != generation for b, generation in entries):
            f.reason = f"barrier {int(self.number(g)[g.lanes(m)[0]])}"
            return held_up(g, f, active, entries)
        for w, (b, _) in zip(active, entries, strict=True):
            know(g, int(w), b)
        if self.put is not None:
            values = np.zeros(g.n, np.uint32 if self.red == "popc" else bool)
            for w, (b, _) in zip(active, entries, strict=True):
                values[w * LANES : (w + 1) * LANES] = b.result[VOTES[self.red]]
            self.put(g, m, values)
        return True


@register("bar", "barrier", waits=True)
def barrier(c: Operands, ins: Instr) -> Callable[..., Any]:
    """bar and barrier.cta: .sync, .arrive, .red (9.7.13.1); threads are counted by whole warps."""
    this = CtaBarrier(c, ins)

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> Any:
        if f.wait is None:
            if this.aligned and not converged(g, m, f):
                return False
            this.enter(g, m, f)
        return True if this.kind == "arrive" else this.leave(g, m, f)

    return run


def held_up(g: Gang, f: Fragment, active: np.ndarray, entries: list[tuple[Barrier, int]]) -> Any:
    """Return the answer of warps that wait for barriers, some of which may have completed."""

    def completed() -> bool:
        return any(b.generation != generation for b, generation in entries)

    f.until = completed
    ready = np.array([b.generation != generation for b, generation in entries])
    return split_keys(g, active, ready)


def know(g: Gang, w: int, b: Barrier) -> None:
    """Let warp position `w` know what those knew who came to the barrier."""
    if b.done is not None:  # nobody told anything: all arrivals were relaxed
        g.machine.clocks.join(int(g.w_cluster[w]), int(g.w_agent[w]), b.done)
    if b.told is not None and g.machine.watch is not None:
        g.machine.watch.went(g, w, b.told)
    g.time = max(g.time, b.done_time)
    g.flow = None


def check(machine: Machine, b: Barrier, cta: Cta, lane: int | None = None) -> None:
    """Complete a barrier when all have come."""
    if b.arrived is None:
        return
    count = warps_arrived(machine, b, cta)
    if b.expected is None:
        if count >= cta.live:
            complete(machine, b)
    elif count * LANES == b.expected:
        complete(machine, b)
    elif count * LANES > b.expected:
        raise IllegalOperation(
            f"{count * LANES} threads have arrived at a barrier of {b.expected} (PTX ISA "
            "9.7.13.1); "
            "give it the number of threads that come",
            lane=lane,
        )


def recheck(machine: Machine, cta: Cta) -> None:
    """After a warp has left: barriers of all threads may be complete now."""
    for b in cta.barriers.values():
        if b.arrived is not None and b.expected is None and cta.live:
            check(machine, b, cta)
    check_cluster(machine, cta.cluster)


@register("barrier.cluster", operands=0, waits=True)
def barrier_cluster(c: Operands, ins: Instr) -> Callable[..., Any]:
    """barrier.cluster.arrive and .wait (9.7.13.3)."""
    known_modifiers(ins, CLUSTER_MODIFIERS)
    if ("arrive" in ins.mods) == ("wait" in ins.mods):
        raise PtxError(f"{ins.opcode}: one of .arrive and .wait is wanted")
    step = cluster_arrive if "arrive" in ins.mods else cluster_wait

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> Any:
        if "aligned" in ins.mods and not converged(g, m, f):
            return False
        return step(g, m, f, ins)

    return run


def cluster_arrive(g: Gang, m: np.ndarray | None, f: Fragment, ins: Instr) -> bool:
    """Let lanes arrive at the barrier of their cluster."""
    machine, active = g.machine, g.by_warp(m)
    clusters: dict[int, Cluster] = {}
    for w in g.active_warps(m):
        index, warp = int(g.warps[w]), machine.warp(g.warps[w])
        b = warp.cta.cluster.barrier
        if machine.cluster_waits.get(index, b.generation) != b.generation:
            raise IllegalOperation(
                "barrier.cluster.arrive again without barrier.cluster.wait in between (PTX ISA "
                "9.7.13.3); wait after every arrive",
                lane=int(w) * LANES + int(active[w].argmax()),
            )
        threads = len(warp.cta.warps) * LANES
        first = warp.cta.rank * threads + warp.number * LANES
        size, relaxed = threads * machine.cluster_ctas, "relaxed" in ins.mods
        arrive(g, machine, int(w), b, active[w], first, size, ins.line, relaxed)
        clusters[id(b)] = warp.cta.cluster
        machine.cluster_waits[index] = b.generation
    for cluster in clusters.values():
        check_cluster(machine, cluster)
    return True


def cluster_wait(g: Gang, m: np.ndarray | None, f: Fragment, ins: Instr) -> Any:
    """Let lanes go on when the barrier at which they arrived has completed."""
    machine, active = g.machine, g.active_warps(m)
    entries = []
    for w in active:
        warp = machine.warp(g.warps[w])
        if int(g.warps[w]) not in machine.cluster_waits:
            raise IllegalOperation(
                "barrier.cluster.wait without barrier.cluster.arrive before it (PTX ISA 9.7.13.3); "
                "arrive first",
                lane=int(w) * LANES + int(g.by_warp(m)[w].argmax()),
            )
        entries.append((warp.cta.cluster.barrier, machine.cluster_waits[int(g.warps[w])]))
    if not all(b.generation != generation for b, generation in entries):
        f.reason = "barrier of the cluster"
        return held_up(g, f, active, entries)
    here = g.by_warp(m)
    for w in active:
        warp = machine.warp(g.warps[w])
        know(g, int(w), warp.cta.cluster.barrier)
        if (came := warp.cta.cluster.barrier.all_came) is not None:
            warp.met = union(warp.met, came)
        live = g.live[w * LANES : (w + 1) * LANES]
        if (here[w] | ~live).all():  # lanes of a warp that has parted wait one after the other
            del machine.cluster_waits[int(g.warps[w])]
    return True


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
