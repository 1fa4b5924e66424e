"""The machine: keeps clusters resident, runs gangs and asynchronous work by seed.

Time is adversarial: the seed chooses how warps are ganged and interleaved, and when each
asynchronous operation happens between its issue and the last legal moment (when nothing else can
go on).  The machine holds the state of one launch; `residents` lets clusters in and out,
`execute` runs gangs, `diagnose` explains why nothing goes on.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from . import diagnose, execute, ops, residents
from .clocks import Clocks, Shadow, Vector
from .compiler import Compiler
from .engine import Engine
from .errors import EmulationError
from .gang import LANES, REGISTERS, Fragment, Gang
from .grid import Cluster, Launch, Waiting, Warp
from .hazards import Hazards
from .memory import RESERVED, GlobalMemory, SharedMemory
from .program import Program
from .report import Report
from .specials import SMS
from .tcgen05.layout import CELLS, COLUMNS
from .tcgen05.layout import LANES as TMEM_LANES

SHADOW_BYTES = 1 << 30  # most that the shadows of resident CTAs may take
QUANTUM = 256  # units that a gang runs in its turn with seed 0


class Machine:
    """One launch."""

    def __init__(
        self, program: Program, launch: Launch, memory: GlobalMemory, params: bytes
    ) -> None:
        self.program, self.memory, self.params = program, memory, params
        self.grid, self.block, self.cluster = launch.grid, launch.block, launch.cluster
        self.dynamic_smem, self.seed = launch.dynamic_smem, launch.seed
        self.max_instructions = launch.max_instructions
        self.threads, self.cta_warps = launch.threads, launch.cta_warps
        self.cluster_ctas, self.total = launch.cluster_ctas, launch.clusters
        self.report = Report(
            kernel=program.name,
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            seed=launch.seed,
        )
        self.rng = np.random.default_rng(launch.seed)
        self.places: dict[str, tuple[str, int]] = {}  # variables of the module: (space, address)
        self.traits = ops.Traits.of(program)
        self.resident = self.room()
        self.make_memories()
        self.hazards = Hazards(self)
        self.engine = Engine(self)
        self.compiler = Compiler(program, self)
        self.units = program.units
        self.gangs: list[Gang] = []
        self.clusters: list[Cluster | None] = [None] * self.resident
        self.waiting = Waiting(self.total)  # clusters not launched yet
        self.mbarriers: dict[int, Any] = {}
        self.ended: dict[int, int] = {}  # offset of an mbarrier -> line of its mbarrier.inval
        self.cluster_waits: dict[int, int] = {}  # warp -> generation of its cluster's barrier
        self.tmem_lines: dict[tuple[int, int], int] = {}  # (slot, column) -> line of the allocation
        self.sync: dict[tuple[int, int], Vector] = {}  # (cluster, address) -> what was released
        self.progress = 0  # counts what may wake somebody
        self.executed = 0  # warp-instructions
        self.motion = 0  # counts loads that came to another address: no polling
        self.turns = 0  # of gangs
        self.steps = 0  # instructions of gangs
        self.look = diagnose.LOOK  # at so many steps: has anything happened?
        self.moved = 0  # steps when something had
        self.moved_turn = 0
        self.last_look = (0, 0)  # progress and motion then

    def room(self) -> int:
        """Return how many clusters are resident at once: bounded by SMs and by shadow memory."""
        traits = self.traits
        cells = 0
        if traits.shared:
            cells += (self.program.static_shared + self.dynamic_smem) // traits.granule
        if traits.tcgen05:
            cells += CELLS
        per_cta = cells * (15 + 4 * min(self.cta_warps + 2, 10))  # if it touches all of it
        most = max(SHADOW_BYTES // max(per_cta * self.cluster_ctas, 1), 1)
        return int(max(1, min(self.total, SMS // self.cluster_ctas, most)))

    def make_memories(self) -> None:
        """Make shared memory, TMEM, their shadows, the clocks and the table of warps."""
        program, count = self.program, self.resident * self.cluster_ctas
        end = program.static_shared + self.dynamic_smem
        self.shared = SharedMemory(count, RESERVED, end, self.traits.granule)
        per = self.cta_warps * self.cluster_ctas
        self.clocks = Clocks(self.resident, per, self.cluster_ctas)
        track = self.traits.shared and (per > 1 or self.traits.asynchronous)
        cells = count * self.shared.stride // self.traits.granule
        self.shared_shadow = Shadow(cells) if track else None
        self.tmem = np.zeros((0, TMEM_LANES, COLUMNS), np.uint32)
        self.tmem_shadow: Shadow | None = None
        if self.traits.tcgen05:
            self.tmem = np.zeros((count, TMEM_LANES, COLUMNS), np.uint32)
            self.tmem_shadow = Shadow(count * CELLS)
        index = np.arange(count * self.cta_warps)
        slot = index // self.cta_warps
        self.warp_table = {
            "cluster": slot // self.cluster_ctas,
            "rank": slot % self.cluster_ctas,
            "slot": slot,
            "slot0": slot // self.cluster_ctas * self.cluster_ctas,
            "agent": index % per,
            "number": index % self.cta_warps,
        }
        self.warps: list[Warp | None] = [None] * len(index)
        self.slot_coords = np.zeros((count, 3), np.uint32)
        self.slot_cluster = np.zeros((count, 3), np.uint32)

    def warp(self, index: int | np.integer) -> Warp:
        """Return the resident warp with an index of the warp table."""
        warp = self.warps[index]
        assert warp is not None, "the warp's cluster has not entered"
        return warp

    def run(self) -> Report:
        """Run the launch to its end."""
        began = time.perf_counter()
        try:
            with np.errstate(all="ignore"):
                self.loop()
        except EmulationError as error:
            error.report = self.report
            found = [*self.report.errors, *self.report.warnings][:3]
            before = "; ".join(f"{h.kind} (line {h.line})" for h in found)
            if before:
                error.args = (f"{error.args[0]}; before it: {before}",)
            raise
        finally:
            self.count(time.perf_counter() - began)
        return self.report

    def loop(self) -> None:
        """Run until every cluster has come and gone."""
        engine, rng = self.engine, self.rng
        residents.launch_wave(self)
        while self.gangs or self.waiting or engine.pending:
            ready = [g for g in self.gangs if g.ready != self.progress]
            if not ready:
                if engine.pending:
                    engine.run_one()
                    continue
                residents.retire(self)
                if self.waiting and any(c is None for c in self.clusters):
                    residents.launch_wave(self)
                    continue
                if self.gangs:
                    diagnose.dead(self, "no warp can go on and nothing asynchronous is pending")
                break
            self.turns += 1
            if self.seed == 0:
                gang = ready[self.turns % len(ready)]
                quantum = QUANTUM
            else:
                gang = ready[int(rng.integers(len(ready)))]
                quantum = int(rng.integers(1, 65))
            execute.run_gang(self, gang, quantum)
            engine.maybe()
            if not self.gangs:
                self.finish_wave()

    def finish_wave(self) -> None:
        """All warps have left: drain the engines, retire, launch the next wave."""
        while self.engine.pending:
            self.engine.run_one()
        residents.retire(self)
        residents.launch_wave(self)

    def split(self, gang: Gang, keys: np.ndarray) -> None:
        """Replace a gang by one gang per key."""
        at = self.gangs.index(gang)
        values = np.unique(keys)
        self.gangs[at : at + 1] = [gang.select(np.flatnonzero(keys == key)) for key in values]

    def merge(self, gangs: list[Gang]) -> None:
        """Make one gang of several that are at the same place without divergence."""
        order = np.argsort(np.concatenate([g.warps for g in gangs]))
        first = gangs[0]
        new = Gang(self, np.concatenate([g.warps for g in gangs])[order])
        lanes = (order[:, None] * LANES + np.arange(LANES)).reshape(-1)
        for name in REGISTERS:
            parts = np.concatenate([getattr(g, name) for g in gangs], axis=1)
            setattr(new, name, np.ascontiguousarray(parts[:, lanes]))
        new.local = np.concatenate([g.local for g in gangs])[lanes]
        new.cc = np.concatenate([g.cc for g in gangs])[lanes]
        new.live = np.concatenate([g.live for g in gangs])[lanes]
        new.rows()
        new.time = max(g.time for g in gangs)
        fragment = Fragment(first.fragments[0].at, np.ones(new.n, bool), None, full=True)
        new.fragments.append(fragment)
        for gang in gangs:
            self.gangs.remove(gang)
        self.gangs.append(new)
        self.progress += 1

    def live_lanes(self, warp: Warp) -> np.ndarray:
        """Return which lanes of a warp have not left the kernel."""
        for gang in self.gangs:
            at = np.flatnonzero(gang.warps == warp.index)
            if len(at):
                return gang.live[at[0] * LANES : (at[0] + 1) * LANES]
        return np.zeros(LANES, bool)

    def count(self, seconds: float) -> None:
        """Fill in the report's totals."""
        report = self.report
        self.hazards.flush()
        for unit in self.units:
            if unit.hits:
                for ins in unit.everything:
                    report.instructions[ins.opcode] += unit.hits
            unit.hits = 0
        report.warp_instructions = sum(report.instructions.values())
        report.wall_seconds = seconds
        report.smem_bytes = max(self.shared.high - RESERVED, 0)
        self.engine.fill(report)
