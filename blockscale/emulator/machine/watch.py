"""Races on global memory of several devices at once: who wrote and read what, ordered after what.

Agents are the warps that a device has resident, one launch after the other.  ``know[a, b]`` is the
last clock of agent b that agent a is ordered after (PTX ISA 8: memory consistency model):

* launches of a device run in turn: a launch knows all that the ones before it did;
* a barrier of threads joins those who came;
* a release at an address is known to who acquires there: on the same device if both have the scope
  of the GPU or more, on another one if both have that of the system;
* relaxed accesses give what was known at the agent's last fence, and are known after its next one,
  as far as the scopes of both reach.

Accesses that synchronise (atomic, relaxed, acquire, release, volatile) do not race; of those that
do not, a conflict that is in no order is a race, even where the numbers happen to be right.  Of
every device the last reader of a word is remembered.  Asynchronous copies are not watched.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blockscale.emulator.machine.grid import LANES

WORD = 4
"""Bytes of a cell."""

NEVER = -1
GPU, SYSTEM = 1, 2
SCOPES = {"cta": 0, "cluster": 0, "gpu": GPU, "gl": GPU, "sys": SYSTEM}


def scope_of(mods: Any, default: int) -> int:
    """Return the scope that an instruction names."""
    return next((SCOPES[mod] for mod in mods if mod in SCOPES), default)


class Watch:
    """The clocks of all devices' warps, and who touched each word of global memory last."""

    def __init__(self, devices: int, warps: int, memory_bytes: int) -> None:
        self.devices, self.warps = devices, warps
        agents, cells = devices * warps, -(-memory_bytes // WORD)
        self.know = np.zeros((agents, agents), np.int32)
        np.fill_diagonal(self.know, 1)
        self.streams = np.zeros((devices, agents), np.int32)
        self.given: dict[tuple[int, int], np.ndarray] = {}  # (address, device; -1: system)
        self.fences: dict[tuple[int, int], np.ndarray] = {}  # (agent, scope): known at the last
        self.owed: dict[tuple[int, int], np.ndarray] = {}  # (agent, scope): after its next fence
        self.writer = np.full(cells, NEVER, np.int32)
        self.written = np.zeros(cells, np.int32)
        self.write_line = np.zeros(cells, np.int32)
        self.reader = np.full((devices, cells), NEVER, np.int32)
        self.read_at = np.zeros((devices, cells), np.int32)
        self.read_line = np.zeros((devices, cells), np.int32)
        self.known: set[tuple[Any, ...]] = set()

    def own(self, device: int) -> slice:
        """Return the agents of a device."""
        return slice(device * self.warps, (device + 1) * self.warps)

    def begin(self, device: int) -> None:
        """A launch begins: all its warps know what came before it in the stream."""
        rows = self.know[self.own(device)]
        np.maximum(rows, self.streams[device], out=rows)
        index = np.arange(device * self.warps, (device + 1) * self.warps)
        self.know[index, index] += 1
        for agent in index:
            for level in (GPU, SYSTEM):
                self.fences.pop((int(agent), level), None)
                self.owed.pop((int(agent), level), None)

    def end(self, device: int) -> None:
        """A launch has ended: the next one of its stream will know all that it did."""
        self.streams[device] = self.know[self.own(device)].max(0)

    def agents(self, g: Any) -> np.ndarray:
        """Return the agent of each warp of a gang."""
        found: np.ndarray = g.machine.device * self.warps + g.warps
        return found

    # Order -------------------------------------------------------------------------------------

    def came(self, g: Any, w: int, vector: np.ndarray | None) -> np.ndarray:
        """Return ``vector`` and what warp position ``w`` knows, as it comes to a barrier."""
        agent = int(self.agents(g)[w])
        mine = self.know[agent].copy()
        self.know[agent, agent] += 1
        return mine if vector is None else np.maximum(vector, mine)

    def went(self, g: Any, w: int, vector: np.ndarray) -> None:
        """Warp position ``w`` leaves a barrier."""
        row = self.know[int(self.agents(g)[w])]
        np.maximum(row, vector, out=row)

    def fence(self, g: Any, mask: np.ndarray | None, mods: Any) -> None:
        """Note a fence of ``mods``; a scope less than that of a GPU tells nobody else."""
        scope = scope_of(mods, GPU)
        for w in g.active_warps(mask):
            agent = int(self.agents(g)[w])
            row = self.know[agent]
            for reach in range(GPU, scope + 1):
                if "release" not in mods:
                    owed = self.owed.pop((agent, reach), None)
                    if owed is not None:
                        np.maximum(row, owed, out=row)
                if "acquire" not in mods:
                    self.fences[agent, reach] = row.copy()
            self.know[agent, agent] += 1

    def give(self, g: Any, lanes: np.ndarray, at: np.ndarray, mods: Any, default: int) -> None:
        """Note a store or atomic that others may acquire from."""
        scope = scope_of(mods, default)
        for agent, spot in self._spots(g, lanes, at):
            mine = None
            if "release" in mods or "acq_rel" in mods:
                mine = self.know[agent].copy()
                self.know[agent, agent] += 1
            for level, where in ((GPU, g.machine.device), (SYSTEM, -1)):
                vector = self.fences.get((agent, level)) if mine is None else mine
                if scope >= level and vector is not None:
                    old = self.given.get((spot, where))
                    self.given[spot, where] = vector if old is None else np.maximum(old, vector)

    def take(self, g: Any, lanes: np.ndarray, at: np.ndarray, mods: Any, default: int) -> None:
        """Note a load or atomic that may acquire."""
        scope = scope_of(mods, default)
        at_once = "acquire" in mods or "acq_rel" in mods
        for agent, spot in self._spots(g, lanes, at):
            for level, where in ((GPU, g.machine.device), (SYSTEM, -1)):
                vector = self.given.get((spot, where))
                if scope < level or vector is None:
                    continue
                if at_once:
                    np.maximum(self.know[agent], vector, out=self.know[agent])
                else:
                    old = self.owed.get((agent, level))
                    self.owed[agent, level] = vector if old is None else np.maximum(old, vector)

    def _spots(self, g: Any, lanes: np.ndarray, at: np.ndarray) -> list[tuple[int, int]]:
        agents = self.agents(g)[lanes // LANES]
        return sorted({(int(a), int(spot)) for a, spot in zip(agents, at, strict=True)})

    # Accesses ----------------------------------------------------------------------------------

    def access(
        self, g: Any, lanes: np.ndarray, offsets: np.ndarray, size: int, writes: bool
    ) -> None:
        """Check and record an access that does not synchronise; hazards go into the report."""
        count = max(size // WORD, 1)
        cells = ((offsets // WORD)[:, None] + np.arange(count)).reshape(-1)
        agent = np.repeat(self.agents(g)[lanes // LANES], count)
        line = g.ins.line or 0
        bad = self._unknown(agent, self.writer[cells], self.written[cells])
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            first = int(self.writer[cells[i]]), int(self.write_line[cells[i]]), "writes"
            self._report(g, lanes[i // count], first, "overwrites" if writes else "reads", line)
        own = self.know[agent, agent]
        if not writes:
            self.reader[g.machine.device, cells] = agent
            self.read_at[g.machine.device, cells] = own
            self.read_line[g.machine.device, cells] = line
            return
        for device in range(self.devices):
            bad = self._unknown(agent, self.reader[device, cells], self.read_at[device, cells])
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                at = cells[i]
                first = int(self.reader[device, at]), int(self.read_line[device, at]), "reads"
                self._report(g, lanes[i // count], first, "overwrites", line)
        self.writer[cells], self.written[cells] = agent, own
        self.write_line[cells] = line

    def _unknown(self, agent: np.ndarray, other: np.ndarray, clock: np.ndarray) -> np.ndarray:
        """Return where ``agent`` is not ordered after what ``other`` did at ``clock``."""
        there = (other != NEVER) & (other != agent)
        found: np.ndarray = there & (clock > self.know[agent, np.maximum(other, 0)])
        return found

    def _report(self, g: Any, lane: int, first: tuple[int, int, str], verb: str, line: int) -> None:
        machine, (agent, other, did) = g.machine, first
        device = agent // self.warps
        key = machine.device, device, line, other, verb
        if key in self.known:
            return
        self.known.add(key)
        across = device != machine.device
        machine.hazards.add(
            "race between devices" if across else "race on global memory",
            "error",
            f"device {machine.device} {verb} global memory that device {device} {did} (line "
            f"{other}), and nothing orders the two (PTX ISA 8.9); release after the first and "
            f"acquire before the second, with the scope {'.sys' if across else '.gpu'}",
            line=line,
            warp=int(g.warps[lane // LANES]),
            lane=int(lane % LANES),
            other_line=other,
        )
