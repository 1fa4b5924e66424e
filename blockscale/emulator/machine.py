"""The machine: loads a kernel, keeps clusters resident, runs gangs and asynchronous work by seed.

Time is adversarial: the seed chooses how warps are ganged and interleaved, and when each asynchronous
operation happens between its issue and the last legal moment (when nothing else can go on).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import ops
from .clocks import Clocks, Shadow
from .compiler import Compiler
from .engine import Engine
from .errors import Deadlock, EmulationError, IllegalOperation, Place
from .gang import LANES, Fragment, Gang
from .grid import Cluster, Cta, Warp
from .hazards import Hazards
from .memory import RESERVED, GlobalMemory, SharedMemory
from .parser import parse
from .program import Program, Unit, link, successors
from .report import Report
from .specials import special
from .ops.barrier import recheck
from .values import Buffers, pack

SMS = 148  # a B200
MAX_SHARED = 227 * 1024 + RESERVED
GANG_LANES = 4096  # more lanes per array gain nothing
SHADOW_BYTES = 512 << 20
MAX_INSTRUCTIONS = 50_000_000
STALE = 400_000  # warp-instructions without progress: a livelock
Dim = tuple[int, int, int]


class Machine:
    """One launch."""

    def __init__(
        self, program: Program, grid: Dim, block: Dim, cluster: Dim, dynamic_smem: int, seed: int,
        max_instructions: int, memory: GlobalMemory,
    ) -> None:  # fmt: skip
        self.program, self.grid, self.block, self.cluster = program, grid, block, cluster
        self.seed, self.max_instructions, self.memory = seed, max_instructions, memory
        self.dynamic_smem = dynamic_smem
        self.report = Report(
            kernel=program.name, grid=grid, block=block, cluster=cluster, seed=seed
        )
        self.rng = np.random.default_rng(seed)
        self.places: dict[str, tuple[str, int]] = {}
        self.params = b""
        self.check_launch()
        self.traits = ops.Traits.of(program)
        self.threads = block[0] * block[1] * block[2]
        self.cta_warps = -(-self.threads // LANES)
        self.cluster_ctas = cluster[0] * cluster[1] * cluster[2]
        self.total = grid[0] * grid[1] * grid[2] // self.cluster_ctas
        self.resident = self.room()
        self.make_memories()
        self.hazards = Hazards(self)
        self.engine = Engine(self)
        self.compiler = Compiler(program, self)
        self.gangs: list[Gang] = []
        self.clusters: list[Cluster | None] = [None] * self.resident
        self.waiting = deque(range(self.total))  # clusters not launched yet
        self.mbarriers: dict[int, Any] = {}
        self.cluster_waits: dict[int, int] = {}  # warp -> generation of its cluster's barrier
        self.tmem_lines: dict[tuple[int, int], int] = {}  # (slot, column) -> line of the allocation
        self.sync: dict[Any, Any] = {}  # address -> vector of what was released there
        self.progress = 0  # counts what may wake somebody
        self.executed = 0
        self.stale_at = 0
        self.stale_progress = 0
        self.units = program.units

    # set up -----------------------------------------------------------------------------------
    def check_launch(self) -> None:
        """Refuse launches that the driver would refuse."""
        name, d = self.program.name, self.program.directives
        threads = int(np.prod(self.block))
        if not 1 <= threads <= 1024 or min(self.block) < 1 or min(self.grid) < 1:
            raise EmulationError(
                f"{name}: block {self.block}, grid {self.grid}: 1 to 1024 threads, no zero"
            )
        wanted = d.get(".reqntid")
        if wanted and tuple(wanted + [1] * (3 - len(wanted))) != self.block:
            raise EmulationError(
                f"{name}: block {self.block} is not the kernel's .reqntid {wanted}"
            )
        most = d.get(".maxntid")
        if most and threads > int(np.prod(most)):
            raise EmulationError(f"{name}: {threads} threads exceed the kernel's .maxntid {most}")
        ctas = d.get(".reqnctapercluster")
        if ctas and tuple(ctas + [1] * (3 - len(ctas))) != self.cluster:
            if self.cluster != (1, 1, 1):
                raise EmulationError(
                    f"{name}: cluster {self.cluster} is not .reqnctapercluster {ctas}"
                )
            self.cluster = tuple(ctas + [1] * (3 - len(ctas)))  # type: ignore[assignment]
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise EmulationError(
                f"{name}: grid {self.grid} is not a multiple of the cluster {self.cluster}"
            )
        if int(np.prod(self.cluster)) > 16:
            raise EmulationError(f"{name}: a cluster of {self.cluster} has more than 16 CTAs")
        total = self.program.static_shared + self.dynamic_smem
        if total > MAX_SHARED:
            raise EmulationError(
                f"{name}: {total - RESERVED} bytes of shared memory exceed the {MAX_SHARED - RESERVED} of an SM"
            )

    def room(self) -> int:
        """Return how many clusters are resident at once."""
        traits = self.traits
        per_cta = 0
        if traits.shared:
            cells = (self.program.static_shared + self.dynamic_smem) // traits.granule
            per_cta += cells * (16 + 4 * (self.cta_warps + 4))
        if traits.tcgen05:
            per_cta += 128 * 512 * (20 + 4 * (self.cta_warps + 2))
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
        self.shared_shadow = (
            Shadow(count * self.shared.stride // self.traits.granule) if track else None
        )
        self.tmem = np.zeros((0, 128, 512), np.uint32)
        self.tmem_shadow: Shadow | None = None
        if self.traits.tcgen05:
            self.tmem = np.full((count, 128, 512), 0xFFFFFFFF, np.uint32)
            self.tmem_shadow = Shadow(count * 128 * 512)
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

    def special(self, gang: Gang, name: str) -> Any:
        """Return a special register's value for a gang."""
        return special(self, gang, name)

    # clusters ---------------------------------------------------------------------------------
    def launch_wave(self) -> None:
        """Make as many clusters resident as there is room for, ganged as the seed says."""
        slots = [i for i, c in enumerate(self.clusters) if c is None]
        fresh: list[np.ndarray] = []
        for slot in slots:
            if not self.waiting:
                break
            fresh.append(self.enter(slot, self.waiting.popleft()))
        if not fresh:
            return
        for group in self.partition(np.concatenate(fresh)):
            gang = Gang(self, np.sort(group))
            gang.make_registers(self.program.counts, self.program.local_bytes, self.rng)
            mask = np.ones(gang.n, bool)
            if self.threads % LANES:
                number = np.repeat(self.warp_table["number"][gang.warps], LANES)
                mask = number * LANES + np.tile(np.arange(LANES), gang.W) < self.threads
                gang.live &= mask
            fragment = Fragment(0, mask, None)
            gang.refresh(fragment)
            gang.fragments.append(fragment)
            self.gangs.append(gang)

    def partition(self, warps: np.ndarray) -> list[np.ndarray]:
        """Return how the seed gangs warps together: all, by itself, or at random."""
        most = max(GANG_LANES // LANES, 1)
        if self.traits.asynchronous:  # its warps will part soon: parting many at once is what costs
            most = self.cta_warps
        mode = 0 if self.seed == 0 else int(self.rng.integers(0, 3))
        if len(warps) > 64:
            mode = 0  # one by one would take all day
        if mode == 0:
            whole = max(most // self.cta_warps, 1) * self.cta_warps
            return [warps[i : i + whole] for i in range(0, len(warps), whole)]
        if mode == 1:
            return [warps[i : i + 1] for i in range(len(warps))]
        order = self.rng.permutation(warps)
        cuts = np.sort(self.rng.integers(1, max(len(warps), 2), 3))
        return [part for part in np.split(order, cuts) if len(part)]

    def enter(self, slot: int, number: int) -> np.ndarray:
        """Make cluster `number` resident in `slot`; return its warps."""
        self.clocks.reset(slot)
        sizes = [g // c for g, c in zip(self.grid, self.cluster, strict=True)]
        coords = (number % sizes[0], number // sizes[0] % sizes[1], number // (sizes[0] * sizes[1]))
        cluster = Cluster(slot, number, coords)
        c = self.cluster
        for rank in range(self.cluster_ctas):
            inside = (rank % c[0], rank // c[0] % c[1], rank // (c[0] * c[1]))
            at = tuple(a * n + b for a, n, b in zip(coords, c, inside, strict=True))
            index = slot * self.cluster_ctas + rank
            cta = Cta(index, rank, at, cluster)  # type: ignore[arg-type]
            self.slot_coords[index] = at
            self.slot_cluster[index] = inside
            for w in range(self.cta_warps):
                i = index * self.cta_warps + w
                cta.warps.append(Warp(i, w, cta, rank * self.cta_warps + w))
                self.warps[i] = cta.warps[-1]
            cluster.ctas.append(cta)
            stride = self.shared.stride
            self.shared.bytes[index * stride : (index + 1) * stride] = 0xFF
            if self.shared_shadow is not None:
                cells = stride // self.traits.granule
                self.shared_shadow.reset(slice(index * cells, (index + 1) * cells))
            if self.tmem_shadow is not None:
                self.tmem[index] = 0xFFFFFFFF
                self.tmem_shadow.reset(slice(index * 65536, (index + 1) * 65536))
        self.clusters[slot] = cluster
        per = self.cluster_ctas * self.cta_warps
        return np.arange(slot * per, (slot + 1) * per)

    def retire(self) -> None:
        """Let go of clusters whose warps have left and whose asynchronous work is done."""
        for slot, cluster in enumerate(self.clusters):
            if cluster is not None and cluster.live == 0 and not self.engine.busy(cluster):
                ops.at_exit(self, cluster)
                self.clusters[slot] = None

    # running ----------------------------------------------------------------------------------
    def run(self) -> Report:
        """Run the launch to its end."""
        began = time.perf_counter()
        try:
            with np.errstate(all="ignore"):
                self.loop()
        except EmulationError as error:
            error.report = self.report
            before = "; ".join(f"{h.kind} (line {h.line})" for h in self.report.errors[:3])
            if before:
                error.args = (f"{error.args[0]}; before it: {before}",)
            raise
        finally:
            self.count(time.perf_counter() - began)
        return self.report

    def loop(self) -> None:
        """Run until every cluster has come and gone."""
        engine, rng = self.engine, self.rng
        self.launch_wave()
        turn = 0
        while self.gangs or self.waiting or engine.pending:
            ready = [g for g in self.gangs if g.ready != self.progress]
            if not ready:
                if engine.pending:
                    engine.run_one()
                    continue
                self.retire()
                if self.waiting and any(c is None for c in self.clusters):
                    self.launch_wave()
                    continue
                if self.gangs:
                    self.dead("no warp can go on and nothing asynchronous is pending")
                break
            if self.seed == 0:
                turn += 1
                gang = ready[turn % len(ready)]
                quantum = 1 << 30
            else:
                gang = ready[int(rng.integers(len(ready)))]
                quantum = int(rng.integers(1, 65))
            self.run_gang(gang, quantum)
            engine.maybe()
            if not self.gangs:
                self.finish_wave()

    def finish_wave(self) -> None:
        """All warps have left: drain the engines, retire, launch the next wave."""
        while self.engine.pending:
            self.engine.run_one()
        self.retire()
        self.launch_wave()

    def run_gang(self, gang: Gang, quantum: int) -> None:
        """Run a gang's fragments until they are all held up, or for `quantum` units."""
        while quantum > 0 and gang.fragments:
            fragment = next((f for f in reversed(gang.fragments) if f.tried != self.progress), None)
            if fragment is None:
                break
            quantum = self.run_fragment(gang, fragment, quantum)
            if gang not in self.gangs:  # it was split
                return
        if not gang.fragments:
            self.gangs.remove(gang)
            self.progress += 1
        elif all(f.tried == self.progress for f in gang.fragments):
            gang.ready = self.progress

    def run_fragment(self, gang: Gang, fragment: Fragment, quantum: int) -> int:
        """Run a fragment until it is held up, ends, parts, or the quantum is used; return the rest."""
        units = self.units
        gang.fragment = fragment
        while quantum > 0:
            unit = units[fragment.at]
            quantum -= 1
            full = fragment.full
            mask = None if full else fragment.mask
            if unit.instrs and not fragment.entered:
                run = unit.run[full]
                if run is None:
                    run = unit.run[full] = self.compiler.compile(unit, full)
                warps = gang.W if full else int(fragment.mask.reshape(-1, LANES).any(1).sum())
                unit.hits += warps
                self.executed += warps * len(unit.instrs)
                gang.time += len(unit.instrs)
                try:
                    run(gang, mask)
                except EmulationError as error:
                    raise self.located(error, gang) from None
            if self.executed - self.stale_at > STALE:
                self.check_progress()
            fragment.entered = True  # a split or a wait comes back here; the instructions have run
            tail = unit.tail
            if tail == "next":
                fragment.at = unit.next
            elif tail == "bra":
                if not self.branch(gang, fragment, unit):
                    return quantum
            elif tail == "stop":
                if not self.stop(gang, fragment, unit):
                    return quantum
            elif not self.other_tail(gang, fragment, unit):
                return quantum
            fragment.entered = False
            token = fragment.token
            if token is not None and fragment.at == token.unit:
                gang.arrive(fragment)
                if fragment not in gang.fragments:
                    return quantum
        return 0

    def branch(self, gang: Gang, fragment: Fragment, unit: Unit) -> bool:
        """Take a branch; False: the fragment is no more."""
        instr = unit.instr
        assert instr is not None
        self.executed += gang.W
        unit.hits += 0 if unit.instrs else gang.W
        if instr.guard is None:
            fragment.at = unit.targets[0]
            return True
        row = self.program.regs[instr.guard[0].name][1]
        taken = gang.p[row]
        if instr.guard[1]:
            taken = ~taken
        if fragment.full:
            if taken.all():
                fragment.at = unit.targets[0]
                return True
            if not taken.any():
                fragment.at = unit.next
                return True
            taken = taken.copy()
        else:
            taken = taken & fragment.mask
            if not taken.any():
                fragment.at = unit.next
                return True
            if (taken == fragment.mask).all():
                fragment.at = unit.targets[0]
                return True
        if gang.W > 1 and not unit.simple:
            keys = self.directions(taken, fragment.mask)
            if keys is not None:
                self.split(gang, keys)
                return False
        gang.part(fragment, taken, unit.targets[0], unit.next, unit.meet)
        return False

    @staticmethod
    def directions(taken: np.ndarray, mask: np.ndarray) -> np.ndarray | None:
        """Return 0 (not taken), 1 (taken), 2 (both) or 3 (not here) per warp; None when all are 2 or 3."""
        t = taken.reshape(-1, LANES)
        m = mask.reshape(-1, LANES)
        some, rest = t.any(1), (m & ~t).any(1)
        keys = np.where(some & rest, 2, np.where(some, 1, np.where(rest, 0, 3)))
        return None if (keys == keys[0]).all() else keys

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
        for name in ("p2", "r1", "r2", "r4", "r8"):
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

    def other_tail(self, gang: Gang, fragment: Fragment, unit: Unit) -> bool:
        """Leave the kernel, trap, or branch by table; False: the fragment is no more."""
        mask = fragment.mask
        if unit.instr is not None and unit.instr.guard is not None:
            guard, negated = unit.instr.guard
            row = gang.p[self.program.regs[guard.name][1]]
            mask = mask & (~row if negated else row)
            if not mask.any():
                fragment.at = unit.next
                return True
        if unit.tail == "brx":
            return self.branch_table(gang, fragment, unit, mask)
        if unit.tail == "trap":
            gang.ins = unit.instr
            raise self.located(
                IllegalOperation(
                    "the kernel executed trap: it found a condition of its own broken"
                ),
                gang,
            )
        whole = mask is fragment.mask
        gang.leave(fragment, mask)
        for w in gang.active_warps(mask):
            if not gang.live[w * LANES : (w + 1) * LANES].any():
                warp = self.warps[gang.warps[w]]
                assert warp is not None
                warp.exited = True
                self.engine.warp_exits(warp, gang.time)
                recheck(self, warp.cta)
                if not warp.cta.live:
                    ops.cta_exits(self, warp.cta, unit.instr)
        self.progress += 1
        if not whole and fragment in gang.fragments:
            fragment.at = unit.next
            return True
        return False

    def branch_table(self, gang: Gang, fragment: Fragment, unit: Unit, mask: np.ndarray) -> bool:
        """brx.idx (PTX ISA 9.7.12.3)."""
        assert unit.instr is not None
        gang.ins = unit.instr
        index = self.compiler.lanes_source(unit.instr.operands[0], "u4")(gang)
        values = np.unique(index[mask])
        if values[-1] >= len(unit.targets):
            raise self.located(
                IllegalOperation(
                    f"brx.idx with index {values[-1]} and {len(unit.targets)} targets"
                ),
                gang,
            )
        if len(values) == 1 and mask is fragment.mask:
            fragment.at = unit.targets[int(values[0])]
            return True
        first = mask & (index == values[0])
        if gang.W > 1:
            keys = self.directions(first, fragment.mask)
            if keys is not None:
                self.split(gang, keys)
                return False
        gang.part(fragment, first, unit.targets[int(values[0])], fragment.at, unit.meet)
        return False

    def stop(self, gang: Gang, fragment: Fragment, unit: Unit) -> bool:
        """Try an instruction that may wait; False: it waits, or the gang was split."""
        instr = unit.instr
        assert instr is not None
        gang.ins = instr
        if unit.stop is None:
            try:
                unit.stop = self.compiler.handler(instr)
            except PtxErrors as error:
                raise self.located(error, gang) from None
        mask = None if fragment.full else fragment.mask
        if instr.guard is not None:
            row = gang.p[self.program.regs[instr.guard[0].name][1]]
            mask = (~row if instr.guard[1] else row) & fragment.mask
            if not mask.any():
                fragment.at = unit.next
                self.executed += 1
                return True
        before = self.progress  # converged() may merge fragments: then this one is tried again
        try:
            done = unit.stop(gang, mask, fragment)
        except EmulationError as error:
            raise self.located(error, gang) from None
        if done is True:
            unit.hits += gang.W if mask is None else len(gang.active_warps(mask))
            self.executed += gang.W
            gang.time += 1
            fragment.wait = None
            if fragment.reason:
                self.engine.waited(gang, fragment, instr)
            fragment.at = unit.next
            return True
        if done is not False:  # per warp: who is ready
            self.split(gang, np.asarray(done))
            return False
        if not fragment.began:
            fragment.began = gang.time
        fragment.tried = before
        if gang.W > 1 and mask is not None and len(gang.active_warps(mask)) < gang.W:
            keys = gang.by_warp(mask).any(1).astype(int)
            if len(np.unique(keys)) > 1:
                self.split(gang, keys)
        return False

    # troubles ---------------------------------------------------------------------------------
    def place(self, gang: Gang, lane: int | None) -> Place:
        """Return where a gang is."""
        ins = getattr(gang, "ins", None)
        cta = warp = at = None
        if lane is None and gang.fragment is not None:
            lanes = np.flatnonzero(gang.fragment.mask)
            first = int(lanes[0]) // LANES if len(lanes) else 0
            warp_at = first
        else:
            warp_at = (lane or 0) // LANES
            at = None if lane is None else lane % LANES
        entry = self.warps[gang.warps[warp_at]]
        if entry is not None:
            cta, warp = entry.cta.coords, entry.number
        return Place(
            self.program.name, ins.line if ins else None, ins.opcode if ins else None, cta, warp, at
        )

    def located(self, error: EmulationError, gang: Gang) -> EmulationError:
        """Return `error` with the place where `gang` is."""
        if error.place is not None and error.place.kernel is None:
            error.place = None
        return error.at(self.place(gang, error.lane))

    def check_progress(self) -> None:
        """Raise when nothing but spinning has happened for long."""
        if self.executed > self.max_instructions:
            self.dead(
                f"more than {self.max_instructions} warp-instructions; raise max_instructions, or it hangs"
            )
        if self.progress == self.stale_progress:
            if self.engine.pending:
                self.engine.run_one()
            elif self.waiting and any(c is None for c in self.clusters):
                self.launch_wave()
            else:
                self.dead(f"only polling for {STALE} warp-instructions (livelock)")
        self.stale_progress = self.progress
        self.stale_at = self.executed

    def dead(self, why: str) -> None:
        """Raise Deadlock with every warp's place."""
        lines = []
        for gang in self.gangs:
            for f in gang.fragments:
                ins = self.units[f.at].instr or (self.units[f.at].instrs or [None])[0]
                for w in gang.active_warps(f.mask):
                    warp = self.warps[gang.warps[w]]
                    if warp is not None and len(lines) < 64:
                        text = f"line {ins.line} {ins.opcode}" if ins else "?"
                        why_here = self.waits_for(warp.cta, f.reason) or "running"
                        lines.append(
                            f"  CTA {warp.cta.coords} warp {warp.number}: {text}: {why_here}"
                        )
        raise Deadlock(f"deadlock: {why}\n" + "\n".join(lines)).at(Place(self.program.name))

    def waits_for(self, cta: Cta, reason: str) -> str:
        """Return `reason`, with the state of the mbarrier that it names."""
        word, _, at = reason.partition(" ")
        if word != "mbarrier":
            return reason
        b = self.mbarriers.get(cta.slot * self.shared.stride + int(at.split()[0], 16))
        return reason if b is None else f"{reason} {b.state_text()}"

    def count(self, seconds: float) -> None:
        """Fill in the report's totals."""
        report = self.report
        self.hazards.flush()
        for unit in self.units:
            if unit.hits:
                for ins in unit.instrs:
                    report.instructions[ins.opcode] += unit.hits
                if unit.instr is not None:
                    report.instructions[unit.instr.opcode] += unit.hits
            unit.hits = 0
        report.warp_instructions = sum(report.instructions.values())
        report.wall_seconds = seconds
        report.smem_bytes = max(self.shared.high - RESERVED, 0)
        self.engine.fill(report)


PtxErrors = EmulationError


def run(
    ptx: str, entry: str | None, grid: Dim, block: Dim, cluster: Dim, dynamic_smem: int,
    params: bytes | Callable[[Program, GlobalMemory], bytes], regions: Sequence[tuple[int, np.ndarray]] = (),
    seed: int = 0, max_instructions: int = MAX_INSTRUCTIONS,
) -> Report:  # fmt: skip
    """Run one kernel on identity-mapped `regions` (address, bytes) with a packed parameter block."""
    program = link(parse(ptx), entry)
    memory = GlobalMemory()
    for address, data in regions:
        memory.add(data.size, f"the buffer at {address:#x}", data, address)
    block_bytes = params if isinstance(params, bytes) else params(program, memory)
    machine = Machine(
        program,
        dims(grid),
        dims(block),
        dims(cluster),
        dynamic_smem,
        seed,
        max_instructions,
        memory,
    )
    machine.params = block_bytes.ljust(program.param_bytes, b"\0")
    ops.place_globals(machine)
    memory.commit()
    try:
        return machine.run()
    finally:
        memory.write_back()


def dims(value: int | Sequence[int]) -> Dim:
    """Return three dimensions of an int or a short sequence."""
    values = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    return (*values, 1, 1, 1)[:3]  # type: ignore[return-value]


def launch(
    ptx: str,
    *,
    entry: str | None = None,
    grid: int | Sequence[int] = (1, 1, 1),
    block: int | Sequence[int] = (128, 1, 1),
    cluster: int | Sequence[int] = (1, 1, 1),
    dynamic_smem: int = 0,
    args: Sequence[Any] = (),
    seed: int = 0,
    max_instructions: int = MAX_INSTRUCTIONS,
) -> Report:
    """Run kernel `entry` of PTX text `ptx` and return its `Report`.

    Arrays among `args` are device buffers, changed in place; ints, floats, None (a null pointer) and
    bytes (structs) are by-value parameters, as are `TensorMap` and `Struct`.  `grid`, `block` and
    `cluster` are counted as in a CUDA launch, `dynamic_smem` in bytes.  `seed` chooses how warps are
    interleaved and when asynchronous work happens.  Raises `EmulationError` (PtxError,
    IllegalOperation, Deadlock) with the place and the rule; what does not stop a kernel but is wrong or
    doubtful is in `report.hazards`.
    """
    holder: list[Buffers] = []

    def params(program: Program, memory: GlobalMemory) -> bytes:
        holder.append(Buffers(memory))
        return pack(program, args, holder[0])

    try:
        return run(
            ptx,
            entry,
            dims(grid),
            dims(block),
            dims(cluster),
            dynamic_smem,
            params,
            (),
            seed,
            max_instructions,
        )
    finally:
        for buffers in holder:
            buffers.write_back()


__all__ = ["Machine", "launch", "run", "successors"]
