"""The state of one launch: its memories, its clocks, who is resident, what has happened so far.

Time is adversarial: the seed chooses how warps are ganged and interleaved, and when each
asynchronous operation happens between its issue and the last legal moment (when nothing else can
go on).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from blockscale.emulator.errors import EmulationError
from blockscale.emulator.machine.clocks import Clocks, Shadow, Vector
from blockscale.emulator.machine.grid import LANES, SMS, Cluster, Launch, Waiting, Warp
from blockscale.emulator.machine.memory import RESERVED, GlobalMemory, SharedMemory
from blockscale.emulator.machine.watch import Watch
from blockscale.emulator.ptx.analysis import Traits
from blockscale.emulator.ptx.program import Program
from blockscale.emulator.ptx.syntax import Instr
from blockscale.emulator.report import Report
from blockscale.emulator.tcgen05.layout import CELLS, COLUMNS
from blockscale.emulator.tcgen05.layout import LANES as TMEM_LANES

SHADOW_BYTES = 1 << 30  # most that the shadows of resident CTAs may take
REGISTER_BYTES = 1 << 29  # most that registers and local memory of resident CTAs may take
LOOK = 20_000  # steps from one look at progress to the next
NOTHING = Instr("", (), None, 0)  # what runs before the first instruction


class State:
    """What one launch has and what it has done; `Machine` adds the gangs that run on it."""

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
        self.traits = Traits.of(program)
        self.resident = self.room()
        self.make_memories()
        self.units = [replace(unit, run=[None, None]) for unit in program.units]
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
        self.look = LOOK  # at so many steps: has anything happened?
        self.moved = 0  # steps when something had
        self.moved_turn = 0
        self.last_look = (0, 0)  # progress and motion then
        self.device = 0  # of several that run at once
        self.alone = True  # no other device may still store what this one waits for
        self.watch: Watch | None = None  # finds races on global memory, of several devices
        self.timer: Callable[[], int] = time.time_ns  # %globaltimer

    def room(self) -> int:
        """Return how many clusters are resident at once: bounded by SMs and by memory."""
        traits, program = self.traits, self.program
        registers = sum(n if cls == "p" else int(cls) * n for cls, n in program.counts.items())
        per_thread = registers + program.local_bytes
        per_cluster = per_thread * LANES * self.cta_warps * self.cluster_ctas
        if per_cluster > REGISTER_BYTES:
            raise EmulationError(
                f"{program.name}: a cluster of {self.cluster_ctas} CTAs with {self.threads} "
                f"threads takes {per_cluster >> 20} MiB ({registers} bytes of registers and "
                f"{program.local_bytes} of local memory a thread); the emulator gives "
                f"{REGISTER_BYTES >> 20} MiB: launch fewer threads, or declare fewer registers"
            )
        cells = 0
        if traits.shared:
            cells += (self.program.static_shared + self.dynamic_smem) // traits.granule
        if traits.tcgen05:
            cells += CELLS
        per_cta = cells * (15 + 4 * min(self.cta_warps + 2, 10))  # if it touches all of it
        most = max(SHADOW_BYTES // max(per_cta * self.cluster_ctas, 1), 1)
        most = min(most, REGISTER_BYTES // max(per_cluster, 1))
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
        self.slot_ended = np.zeros(count, bool)  # others may no longer use its shared memory

    def warp(self, index: int | np.integer) -> Warp:
        """Return the resident warp with an index of the warp table."""
        warp = self.warps[index]
        assert warp is not None, "the warp's cluster has not entered"
        return warp


class Warps:
    """Warps that run in lockstep: who they are, where they lie, and which instruction runs.

    `table` is the machine's table of warps, `warps` are indices into it.
    """

    def __init__(self, table: dict[str, np.ndarray], warps: np.ndarray) -> None:
        self.warps = warps
        self.W = len(warps)
        self.n = LANES * self.W
        self.time = 0.0
        self.ins = NOTHING  # the instruction that runs
        self.flow: int | None = None  # the operation that ended the last wait
        self.w_cluster = table["cluster"][warps]
        self.w_agent = table["agent"][warps]
        self.w_slot = table["slot"][warps]
        self.w_rank = table["rank"][warps]
        first = table["slot0"][warps]  # the first slot of the warp's cluster
        self.lane_slot0 = np.repeat(first, LANES)
        self.lane_rank = np.repeat(self.w_rank, LANES)
        self.rank_bits = (self.lane_rank << 24).astype(np.uint32)
        self.lane_slot = np.repeat(self.w_slot, LANES)
        self.index = np.arange(self.n)

    def by_warp(self, mask: np.ndarray | None) -> np.ndarray:
        """Return the lanes of `mask` as [W, 32]."""
        if mask is None:
            return np.ones((self.W, LANES), bool)
        return mask.reshape(self.W, LANES)

    def active_warps(self, mask: np.ndarray | None) -> np.ndarray:
        """Return the positions of the warps that have a lane in `mask`."""
        if mask is None:
            return np.arange(self.W)
        return np.flatnonzero(mask.reshape(self.W, LANES).any(1))

    def lanes(self, mask: np.ndarray | None) -> np.ndarray:
        """Return the indices of the lanes in `mask`."""
        return self.index if mask is None else np.flatnonzero(mask)


@dataclass(eq=False)
class Token:
    """Lanes that meet at `unit`: `pending` are still on their way, `arrived` wait there."""

    unit: int
    pending: np.ndarray
    arrived: np.ndarray
    parent: Token | None


@dataclass(eq=False)
class Fragment:
    """Lanes (`mask`) that are at unit `at`; `wait` is the state of what holds them up."""

    at: int
    mask: np.ndarray
    token: Token | None
    wait: Any = None
    reason: str = ""
    tried: int = -1
    began: float = 0.0
    parked: bool = False
    entered: bool = False  # the unit's straight-line instructions have run
    full: bool = False  # all lanes of the gang
    idle: int = 0  # units run without any progress of the machine
    seen: int = -1  # that progress
    until: Callable[[], bool] | None = None  # cheap to ask: is trying again worth it?
    asked: tuple[int, int] = (-1, -1)  # a test of an mbarrier that failed: line, that progress
    polls: bool = False  # held up until something happens, though it need not be
