"""Happens-before by vector clocks: which access of shared memory or TMEM is ordered after which.

Agents of a cluster: its warps (generic proxy), then one agent per warp for cp.async, one per warp
for tcgen05.st, one per CTA for its tensor pipe (tcgen05.mma, .cp and .shift run in order), one per
warp for bulk copies in groups (waited for in order), then one per other bulk copy in flight.
``know[c, a, b]`` is the last clock of agent b that agent a of cluster c has synchronised with;
``fenced`` is the same for what a's asynchronous operations may see (PTX ISA 8: memory consistency
model, and 9.7.13 fence.proxy): it takes over `know` at every fence.proxy.async.  What a's accesses
of tensor memory build on, where other threads made it, is `ordered` by tcgen05.fence (9.7.16.6).

Races found this way do not depend on the order in which the emulator happens to run warps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

READERS = 32  # agents that read one memory; more need a copy of their clocks
NEVER = -1
NOBODY = NEVER - 1  # an agent to whom every other one is another
Vector = tuple[np.ndarray, np.ndarray]  # (know, fenced) of an agent, or of several together
Found = tuple[str, int, int, int]  # a conflict: kind, index into the cells, agent, line


class Clocks:
    """The vector clocks of every resident cluster."""

    def __init__(self, clusters: int, warps: int, ctas: int) -> None:
        self.warps = warps
        self.cp_async = warps
        self.tcgen05_st = 2 * warps
        self.tensor = 3 * warps
        self.store = 3 * warps + ctas
        self.bulk = 4 * warps + ctas
        self.agents = self.bulk + 16
        shape = (clusters, self.agents, self.agents)
        self.know = np.zeros(shape, np.int32)
        self.fenced = np.zeros(shape, np.int32)
        # Of each agent its clock at its last fence::before_thread_sync, of each warp what it knew
        # at its last fence::after_thread_sync, of each tensor pipe the warp that issues to it.
        self.before = np.zeros((clusters, self.agents), np.int32)
        self.after = np.zeros((clusters, warps, self.agents), np.int32)
        self.issuer = np.full((clusters, ctas), NEVER)
        # Of each warp its clock at its last fence.proxy.async::generic.release.
        self.offered = np.zeros((clusters, self.agents), np.int32)
        # By (cluster, warp): what it knew at its last releasing fence, which relaxed accesses tell;
        # what relaxed accesses told it, which it knows after its next acquiring fence.
        self.told: dict[tuple[int, int], Vector] = {}
        self.owed: dict[tuple[int, int], Vector] = {}
        self.used = [self.bulk] * clusters
        for cluster in range(clusters):
            self.reset(cluster)

    def reset(self, cluster: int) -> None:
        """Make cluster slot `cluster` new: nobody knows anything but his own beginning."""
        self.know[cluster] = 0
        self.fenced[cluster] = 0
        self.before[cluster] = self.after[cluster] = self.offered[cluster] = 0
        self.issuer[cluster] = NEVER
        for waiting in (self.told, self.owed):
            for agent in range(self.warps):
                waiting.pop((cluster, agent), None)
        diagonal = np.arange(self.agents)
        self.know[cluster, diagonal, diagonal] = 1
        self.used[cluster] = self.bulk

    def grow(self) -> None:
        """Double the room for bulk copies in flight."""
        old, self.agents = self.agents, self.agents + max(16, self.agents - self.bulk)
        for name in ("know", "fenced"):
            array = getattr(self, name)
            new = np.zeros((array.shape[0], self.agents, self.agents), np.int32)
            new[:, :old, :old] = array
            setattr(self, name, new)
        for name in ("before", "after", "offered"):
            array = getattr(self, name)
            new = np.zeros((*array.shape[:-1], self.agents), np.int32)
            new[..., :old] = array
            setattr(self, name, new)
        extra = np.arange(old, self.agents)
        self.know[:, extra, extra] = 1

    def vector(self, cluster: int, agent: int) -> np.ndarray:
        """Return a copy of what `agent` knows."""
        return self.know[cluster, agent].copy()

    def release(self, cluster: int, agents: np.ndarray | int) -> None:
        """Begin an epoch of `agents`: what they gave away does not cover what they do from now."""
        self.know[cluster, agents, agents] += 1

    def join(self, cluster: int, agent: int | np.ndarray, vector: Vector) -> None:
        """Let `agent` know all that `vector` (know, fenced) knows."""
        size = vector[0].shape[-1]
        mine = self.know[cluster, agent, :size]
        self.know[cluster, agent, :size] = np.maximum(mine, vector[0])
        mine = self.fenced[cluster, agent, :size]
        self.fenced[cluster, agent, :size] = np.maximum(mine, vector[1])

    def both(self, cluster: int, agent: int | np.ndarray) -> Vector:
        """Return copies of (know, fenced) of `agent`; of several agents: their union."""
        know, fenced = self.know[cluster, agent], self.fenced[cluster, agent]
        if know.ndim == 2:
            return know.max(0), fenced.max(0)
        return know.copy(), fenced.copy()

    def memory_fence(self, cluster: int, agent: int, acquires: bool, releases: bool) -> None:
        """fence: relaxed accesses before it have acquired, those after it release."""
        if acquires and (owed := self.owed.pop((cluster, agent), None)) is not None:
            self.join(cluster, agent, owed)
        if releases:
            self.told[cluster, agent] = self.both(cluster, agent)
            self.release(cluster, agent)

    def owe(self, cluster: int, agent: int, vector: Vector) -> None:
        """Note what a relaxed access told `agent`."""
        self.owed[cluster, agent] = union(self.owed.get((cluster, agent)), vector)

    def fence(self, cluster: int, agents: np.ndarray | int) -> None:
        """fence.proxy.async: what `agents` know, their asynchronous operations may see from now."""
        self.fenced[cluster, agents] = self.know[cluster, agents]
        self.release(cluster, agents)

    def proxy_release(self, cluster: int, agent: int) -> None:
        """fence.proxy.async::generic.release: what a warp did, other warps may fence (acquire)."""
        self.offered[cluster, agent] = self.know[cluster, agent, agent]
        self.release(cluster, agent)

    def proxy_acquire(self, cluster: int, agent: int) -> None:
        """fence.proxy.async::generic.acquire: a warp's asynchronous operations may see that."""
        told = np.minimum(self.know[cluster, agent], self.offered[cluster])
        fenced = self.fenced[cluster, agent]
        np.maximum(fenced, told, out=fenced)

    def fence_before(self, cluster: int, agent: int) -> None:
        """tcgen05.fence::before_thread_sync: what a warp did may be told to other threads."""
        for own in (agent, self.tcgen05_st + agent):
            self.before[cluster, own] = self.know[cluster, agent, own]
        self.release(cluster, agent)

    def fence_after(self, cluster: int, agent: int) -> None:
        """tcgen05.fence::after_thread_sync: a warp may build on what other threads told it."""
        self.after[cluster, agent] = self.know[cluster, agent]

    def issues(self, cluster: int, agent: int, rank: int) -> None:
        """Note that a warp issues to a tensor pipe."""
        if self.issuer[cluster, rank] not in (NEVER, agent):
            agent = NOBODY
        self.issuer[cluster, rank] = agent

    def ordered(self, cluster: int, agent: int, know: np.ndarray, pipe: bool) -> np.ndarray:
        """Return what accesses of tensor memory by a warp that knows ``know`` are ordered after.

        Its own, those of a pipe that it alone issues to, and what fences of both sides cover: a
        clock for each agent, as ``know`` [agents].  ``pipe``: work of a tensor pipe, which runs in
        order.  A commit covers what it tells of.
        """
        known = np.minimum(know, self.after[cluster, agent, : len(know)])
        for first in (0, self.tcgen05_st):
            others = slice(first, first + self.warps)
            known[others] = np.minimum(known[others], self.before[cluster, others])
            known[first + agent] = know[first + agent]
        pipes = slice(self.tensor, self.store)
        mine = (self.issuer[cluster] == agent) | pipe
        known[pipes] = np.where(mine, know[pipes], known[pipes])
        return known

    def learn(self, cluster: int, agent: int, other: int, clock: int) -> None:
        """Let `agent` know what `other` has done up to `clock`."""
        know = self.know[cluster, agent]
        know[other] = max(know[other], clock)

    def ended(self, vector: Vector, agent: int, clock: int) -> Vector:
        """Return what an operation's end tells: it is done, and what its issuer knew (`vector`)."""
        know, fenced = np.zeros((2, self.agents), np.int32)
        for new, old in ((know, vector[0]), (fenced, vector[1])):
            new[: len(old)] = old
            new[agent] = clock
        return know, fenced

    def claim(self, cluster: int, know: np.ndarray) -> tuple[int, int]:
        """Return (agent, clock) for a new bulk copy whose issuer knows `know`."""
        for agent in range(self.bulk, self.used[cluster]):
            last = self.know[cluster, agent, agent]
            if agent < know.shape[0] and know[agent] >= last:
                self.know[cluster, agent, agent] = last + 1
                return agent, int(last + 1)
        agent = self.used[cluster]
        if agent >= self.agents:
            self.grow()
        self.used[cluster] += 1
        self.know[cluster, agent, agent] = 1
        return agent, 1


def union(a: Vector | None, b: Vector) -> Vector:
    """Return the union of two (know, fenced) vectors, which may differ in length."""
    if a is None:
        return b[0].copy(), b[1].copy()
    if a[0].shape == b[0].shape:
        return np.maximum(a[0], b[0]), np.maximum(a[1], b[1])
    size = max(a[0].shape[0], b[0].shape[0])
    out = []
    for x, y in zip(a, b, strict=True):
        new = np.zeros(size, np.int32)
        new[: x.shape[0]] = x
        np.maximum(new[: y.shape[0]], y, out=new[: y.shape[0]])
        out.append(new)
    return out[0], out[1]


class Access(NamedTuple):
    """Who accesses cells, and what he knows by then.

    `know` is [A], or [W, A] with the row of each cell in `rows`; an array of agents goes with the
    cells.  `fenced` is given by asynchronous operations: it must know writers below `generic` too.
    """

    agent: np.ndarray | int
    know: np.ndarray
    rows: np.ndarray | None = None
    fenced: np.ndarray | None = None
    generic: int = 0


class Seen:
    """Which agents have touched each cell of a memory, and at which of their clocks last."""

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self.rows = np.full(0, NEVER, np.int16)  # agent -> row of `clock`
        self.agents: list[int] = []
        # Pages that nobody touches cost nothing.
        self.clock = np.zeros((READERS, cells), np.int32)
        self.line = np.zeros(cells, np.int32)

    def reset(self, cells: slice | np.ndarray) -> None:
        """Forget everything about `cells`."""
        self.clock[: len(self.agents), cells] = 0

    def row(self, agents: np.ndarray | int) -> np.ndarray | int:
        """Return the rows of clock of `agents`, made where missing."""
        top = int(np.max(agents))
        if top >= self.rows.shape[0]:
            self.rows = np.concatenate(
                [self.rows, np.full(top + 1 - self.rows.shape[0], NEVER, np.int16)]
            )
        rows = self.rows[agents]
        if np.min(rows) < 0:
            for agent in np.unique(agents):
                if self.rows[agent] < 0:
                    self.rows[agent] = len(self.agents)
                    self.agents.append(int(agent))
            if len(self.agents) > self.clock.shape[0]:
                more = max(4, len(self.agents) - self.clock.shape[0], self.clock.shape[0])
                self.clock = np.concatenate([self.clock, np.zeros((more, self.cells), np.int32)])
            rows = self.rows[agents]
        return rows

    def note(
        self, cells: np.ndarray, agents: np.ndarray | int, clock: np.ndarray | int, line: int
    ) -> None:
        """Record accesses of `cells`."""
        row = self.row(agents)
        self.clock[row, cells] = clock
        self.line[cells] = line

    def unknown(
        self, cells: np.ndarray, by: Access, know: np.ndarray, below: int | None = None
    ) -> tuple[int, int, int] | None:
        """Return (index, agent, line) of an access that one who knows `know` is not ordered after.

        `below`: only accesses of agents with smaller numbers count.
        """
        if not self.agents:
            return None
        who = np.asarray(self.agents)
        last = self.clock[: len(self.agents)][:, cells]  # [agents, cells]
        if not last.any():
            return None
        known = _wide(know, int(who.max()) + 1)[..., who]
        known = known[:, None] if by.rows is None else known[by.rows].T
        bad = (last > known) & (who[:, None] != np.asarray(by.agent))
        if below is not None:
            bad &= who[:, None] < below
        if not bad.any():
            return None
        row, at = np.argwhere(bad)[0]
        return int(at), int(who[row]), int(self.line[cells[at]])


class Shadow:
    """Who wrote and who read each cell of a memory last, and at which clock.

    `read`, `write`, `check_read`, `check_write` and `look` return None or the first conflict
    (`Found`); kinds:
    "write-write", "read-write" (a read that this write does not wait for), "write-read", "proxy"
    (ordered, but no fence.proxy.async between).  `dirty` cells have been initialised.
    """

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self.w_agent = np.full(cells, NEVER, np.int16)
        self.w_clock = np.zeros(cells, np.int32)
        self.w_line = np.zeros(cells, np.int32)
        self.reads = Seen(cells)
        self.strong: dict[str, Seen] = {}  # "read", "write": what synchronising accesses did
        self.dirty = np.zeros(cells, bool)
        self.swizzle: np.ndarray | None = None  # code of the tensor load's swizzle, 0: none
        self.objects: np.ndarray | None = None  # cells that an mbarrier object occupies

    def reset(self, cells: slice) -> None:
        """Forget everything about `cells`."""
        for strong in self.strong.values():
            strong.reset(cells)
        untouched = not self.reads.agents and not self.strong
        if untouched and not (self.w_agent[cells] != NEVER).any():
            return
        self.w_agent[cells] = NEVER
        self.w_clock[cells] = 0
        self.reads.reset(cells)
        self.dirty[cells] = False
        if self.swizzle is not None:
            self.swizzle[cells] = 0
        if self.objects is not None:
            self.objects[cells] = False

    def read(
        self, cells: np.ndarray, by: Access, clock: np.ndarray | int, line: int
    ) -> Found | None:
        """Check and record a read of `cells`; see the class."""
        found = self.check_read(cells, by)
        self.reads.note(cells, by.agent, clock, line)
        return found

    def write(
        self, cells: np.ndarray, by: Access, clock: np.ndarray | int, line: int
    ) -> Found | None:
        """Check and record a write of `cells`; see the class."""
        found = self.check_write(cells, by)
        self.record_write(cells, by.agent, clock, line)
        return found

    def check_read(self, cells: np.ndarray, by: Access) -> Found | None:
        """Return the first conflict of a read with what was recorded."""
        found = self._after_writer(cells, by, "write-read")
        return found or self._after_strong("write", cells, by, "write-read")

    def check_write(self, cells: np.ndarray, by: Access, strong: bool = False) -> Found | None:
        """Return the first conflict of a write with what was recorded.

        `strong`: of one that synchronises, which others that do so may come beside.
        """
        found = self._after_writer(cells, by, "write-write")
        if found is None:
            other = self.reads.unknown(cells, by, by.know)
            found = other and ("read-write", *other)
        if found is None and not strong:
            found = self._after_strong("write", cells, by, "write-write")
            found = found or self._after_strong("read", cells, by, "read-write")
        return found

    def synchronise(
        self, cells: np.ndarray, by: Access, clock: np.ndarray | int, line: int, write: bool
    ) -> Found | None:
        """Check and record an atomic, relaxed, acquiring, releasing or volatile access.

        Others of these may come beside it (morally strong, PTX ISA 8.7.1); weak ones race with it.
        """
        if write:
            found = self.check_write(cells, by, strong=True)
            self.dirty[cells] = True
            if self.swizzle is not None:
                self.swizzle[cells] = 0
        else:
            found = self._after_writer(cells, by, "write-read")
        seen = self.strong.setdefault("write" if write else "read", Seen(self.cells))
        seen.note(cells, by.agent, clock, line)
        return found

    def _after_strong(self, what: str, cells: np.ndarray, by: Access, kind: str) -> Found | None:
        seen = self.strong.get(what)
        if seen is None:
            return None
        found = seen.unknown(cells, by, by.know)
        if found is None and by.fenced is not None and what == "write":
            kind, found = "proxy", seen.unknown(cells, by, by.fenced, below=by.generic)
        return found and (kind, *found)

    def _after_writer(self, cells: np.ndarray, by: Access, kind: str) -> Found | None:
        writer, clock = self.w_agent[cells], self.w_clock[cells]
        bad = clock > _look(by.know, writer, by.rows)
        bad &= writer != by.agent
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            return kind, at, int(writer[at]), int(self.w_line[cells[at]])
        if by.fenced is not None:
            bad = clock > _look(by.fenced, writer, by.rows)
            bad &= (writer < by.generic) & (writer >= 0)
            if bad.any():
                at = int(np.flatnonzero(bad)[0])
                return "proxy", at, int(writer[at]), int(self.w_line[cells[at]])
        return None

    def record_write(
        self, cells: np.ndarray, agent: np.ndarray | int, clock: np.ndarray | int, line: int
    ) -> None:
        """Record a write."""
        self.w_agent[cells] = agent
        self.w_clock[cells] = clock
        self.w_line[cells] = line
        self.dirty[cells] = True
        if self.swizzle is not None:
            self.swizzle[cells] = 0

    def mark(self, cells: np.ndarray, code: int) -> None:
        """Note that a tensor load with swizzle `code` wrote `cells`."""
        if self.swizzle is None:
            self.swizzle = np.zeros(self.cells, np.int8)
        self.swizzle[cells] = code

    def occupy(self, cells: np.ndarray, there: bool) -> None:
        """Note that an mbarrier object occupies `cells`, or does not any more."""
        if self.objects is None:
            self.objects = np.zeros(self.cells, bool)
        self.objects[cells] = there

    def look(self, cells: np.ndarray, know: np.ndarray) -> Found | None:
        """Return the first access of `cells` that one who knows `know` is not ordered after."""
        return self.check_write(cells, Access(NOBODY, know)) if cells.size else None


def _wide(know: np.ndarray, size: int) -> np.ndarray:
    """Return `know` with at least `size` agents; those that were added later are unknown (0)."""
    if know.shape[-1] >= size:
        return know
    wide = np.zeros((*know.shape[:-1], size), np.int32)
    wide[..., : know.shape[-1]] = know
    return wide


def _look(know: np.ndarray, agents: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
    """Return know[agents], or know[rows, agents]."""
    agents = agents.astype(np.intp)
    know = _wide(know, int(agents.max(initial=0)) + 1)
    return know[agents] if rows is None else know[rows, agents]
