"""Asynchronous work: operations in flight, in which order they happen, and their virtual time.

Operations of one stream happen in order (the tensor pipe of a CTA, a warp's cp.async, a warp's
tcgen05.st); streams are independent.  The seed chooses between three tempers: an operation happens
when it is issued ("eager"), at a random moment, or only when no warp can go on without it ("lazy").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from blockscale.emulator.machine.grid import Cluster, Cta, Warp
from blockscale.emulator.machine.state import Fragment, State, Warps
from blockscale.emulator.ptx.syntax import Instr
from blockscale.emulator.report import (
    COMPUTE,
    MMA,
    TRANSFER,
    WAIT_ASYNC,
    WAIT_BARRIER,
    WAIT_MBARRIER,
    Event,
    Report,
    engine_track,
    warp_track,
)

TEMPERS = ("lazy", "random", "eager")
MOST_EVENTS = 100_000
LATENCY = {"tma.load": 500, "tma.store": 300, "tma.reduce": 300, "bulk": 400, "cp.async": 400}


@dataclass(eq=False)
class Op:
    """One operation in flight."""

    engine: str
    cta: Cta
    line: int
    run: Callable[[Op], None]
    issued: float = 0.0
    cost: float = 1.0  # cycles of the engine
    bytes: int = 0
    label: str = ""
    flow: int = 0
    done: bool = False
    end: float = 0.0
    agent: int = -1
    clock: int = 0
    writes: Op | None = None  # its writes to global memory, where they happen later


class Engine:
    """All operations in flight."""

    def __init__(self, machine: State) -> None:
        self.machine = machine
        self.rng = machine.rng
        self.streams: dict[Hashable, deque[Op]] = {}
        self.pending = 0
        self.temper = TEMPERS[0 if machine.seed == 0 else int(self.rng.integers(len(TEMPERS)))]
        self.poison = machine.seed != 0 and bool(self.rng.integers(2))
        self.free: dict[tuple[int, str], float] = {}
        self.flows = 0
        self.counts: dict[int, int] = {}
        self.last: dict[int, float] = {}  # warp -> end of its last event
        self.latest = 0.0

    def issue(self, stream: Hashable, op: Op, time: float) -> Op:
        """Put an operation in flight at virtual `time`."""
        op.issued = time
        self.flows += 1
        op.flow = self.flows
        self.streams.setdefault(stream, deque()).append(op)
        self.pending += 1
        slot = op.cta.cluster.slot
        self.counts[slot] = self.counts.get(slot, 0) + 1
        if op.bytes or op.label:
            self.machine.report.operated(op.engine, op.bytes)
        if self.temper == "eager":
            while not op.done:
                self.run_from(stream)
        return op

    def new_stream(self) -> Hashable:
        """Return the key of a stream for one operation alone."""
        return ("alone", self.flows)

    def run_from(self, stream: Hashable) -> None:
        """Let the oldest operation of a stream happen."""
        queue = self.streams[stream]
        op = queue.popleft()
        if not queue:
            del self.streams[stream]
        self.pending -= 1
        self.counts[op.cta.cluster.slot] -= 1
        key = (op.cta.slot, op.engine)
        start = max(op.issued, self.free.get(key, 0.0))
        self.free[key] = start + op.cost
        op.end = start + op.cost + LATENCY.get(op.engine, 0)
        self.latest = max(self.latest, op.end)
        op.done = True
        op.run(op)
        if op.label or op.engine == "tensor core":  # a commit has no length, but waits point at it
            kind = MMA if op.engine == "tensor core" else TRANSFER
            track = engine_track(op.cta.slot, op.engine)
            self.event(Event(track, start, op.end, kind, op.label, op.line, op.flow))
        self.machine.progress += 1

    def finish(self, op: Op, stream: Hashable) -> None:
        """Let a stream happen up to and including `op`."""
        while not op.done:
            self.run_from(stream)

    def run_one(self) -> None:
        """Let one operation happen: the oldest with seed 0, else any."""
        keys = list(self.streams)
        at = 0 if self.machine.seed == 0 else int(self.rng.integers(len(keys)))
        self.run_from(keys[at])

    def maybe(self) -> None:
        """Between turns of the warps: let some work happen, if the temper is random."""
        if self.temper == "random" and self.pending:
            for _ in range(int(self.rng.integers(0, 3))):
                if self.pending:
                    self.run_one()

    def busy(self, cluster: Cluster) -> bool:
        """Return whether a cluster has work in flight."""
        return self.counts.get(cluster.slot, 0) > 0

    # timeline ---------------------------------------------------------------------------------
    def event(self, event: Event) -> None:
        """Keep an event for the timeline."""
        if len(self.machine.report.events) < MOST_EVENTS:
            self.machine.report.events.append(event)

    def waited(self, gang: Warps, fragment: Fragment, instr: Instr) -> None:
        """Record that a fragment has waited at `instr` from `began` to now."""
        kind = WAIT_ASYNC
        if fragment.reason.startswith("mbarrier"):
            kind = WAIT_MBARRIER
        elif instr.base in ("bar", "barrier"):
            kind = WAIT_BARRIER
        start, end = fragment.began, gang.time
        for w in gang.active_warps(fragment.mask):
            warp = self.machine.warp(gang.warps[w])
            track = warp_track(warp.cta.slot, warp.number)
            begin = self.last.get(warp.index, 0.0)
            if start > begin:
                self.event(Event(track, begin, start, COMPUTE))
            if end > start:
                self.event(Event(track, start, end, kind, instr.opcode, instr.line, gang.flow))
            self.last[warp.index] = end
        gang.flow = None
        fragment.reason, fragment.began = "", 0.0

    def warp_exits(self, warp: Warp, gang_time: float) -> None:
        """Record the last stretch of a warp."""
        begin = self.last.get(warp.index, 0.0)
        if gang_time > begin:
            self.event(Event(warp_track(warp.cta.slot, warp.number), begin, gang_time, COMPUTE))
        self.latest = max(self.latest, gang_time)

    def fill(self, report: Report) -> None:
        """Put the virtual time into the report."""
        report.cycles = self.latest
