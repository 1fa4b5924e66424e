"""Running a launch: whose turn it is; units, branches, waits; warps that part become gangs.

`run_fragment` is the emulator's inner loop: a unit's straight-line part is one call of a compiled
function for all lanes, and only its tail is interpreted here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from blockscale.emulator.errors import EmulationError, IllegalOperation
from blockscale.emulator.launching.compiler import Compiler
from blockscale.emulator.launching.ticker import Ticker
from blockscale.emulator.machine import diagnose, residents
from blockscale.emulator.machine.gangs import Gang, Machine
from blockscale.emulator.machine.grid import LANES, Launch
from blockscale.emulator.machine.memory import RESERVED, GlobalMemory
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.ops.threads.barrier import recheck
from blockscale.emulator.ptx.program import Program, Unit
from blockscale.emulator.ptx.syntax import Reg
from blockscale.emulator.report import Report

PATIENCE = 128  # units that a part of a warp may run without progress before the others go on
QUANTUM = 256  # units that a gang runs in its turn with seed 0
VAIN = 2000  # tests of mbarriers by all that is left, after which nothing will change


class Execution(Machine):
    """A machine that runs its launch: the seed chooses whose turn it is, and for how long."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        memory: GlobalMemory,
        params: bytes,
        ticker: Ticker,
    ) -> None:
        super().__init__(program, launch, memory, params)
        self.compiler = Compiler(program, self)
        self.ticker = ticker
        self.polled = (-1, 0)  # progress when only polls could go on, and how often they did

        self.turning = self.loop()
        self.began = time.perf_counter()
        self.woken = 0  # progress that was that of other devices

    def run(self) -> Report:
        """Run the launch to its end."""
        with np.errstate(all="ignore"):
            while self.go(QUANTUM):
                pass
        return self.report

    def go(self, turns: int) -> bool:
        """Run for some turns of gangs; return whether there is more to do."""
        more = False
        try:
            more = all(next(self.turning, False) for _ in range(turns))
        except EmulationError as error:
            error.report = self.report
            found = [*self.report.errors, *self.report.warnings][:3]
            before = "; ".join(f"{h.kind} (line {h.line})" for h in found)
            if before:
                error.args = (f"{error.args[0]}; before it: {before}",)
            raise
        finally:
            if not more:
                self.ticker.end()
                self.count(time.perf_counter() - self.began)
        return more

    @property
    def advanced(self) -> int:
        """Progress of its own."""
        return self.progress - self.woken

    def wake(self) -> None:
        """Let everything that is held up look again: another device has gone on."""
        self.progress += 1
        self.woken += 1

    def loop(self) -> Iterator[bool]:
        """Run until every cluster has come and gone; yield True after every turn."""
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
                if let_poll(self):
                    continue
                if self.gangs and not self.alone:
                    yield True
                    continue
                if self.gangs:
                    diagnose.dead(self, "no warp can go on and nothing asynchronous is pending")
                break
            self.turns += 1
            self.ticker.tick(self)
            if self.seed == 0:
                gang = ready[self.turns % len(ready)]
                quantum = QUANTUM
            else:
                gang = ready[int(rng.integers(len(ready)))]
                quantum = int(rng.integers(1, 65))
            run_gang(self, gang, quantum)
            engine.maybe()
            if not self.gangs:
                self.finish_wave()
            yield True

    def finish_wave(self) -> None:
        """All warps have left: drain the engines, retire, launch the next wave."""
        while self.engine.pending:
            self.engine.run_one()
        residents.retire(self)
        residents.launch_wave(self)

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


def run_gang(m: Execution, gang: Gang, quantum: int) -> None:
    """Run a gang's fragments until they are all held up, or for `quantum` units."""
    while quantum > 0 and gang.fragments:
        fragment = next((f for f in reversed(gang.fragments) if may_go(m, f)), None)
        if fragment is None:
            gang.ready = m.progress
            return
        parted = len(gang.fragments) > 1 or fragment.token is not None
        turn, before = (min(quantum, PATIENCE) if parted else quantum), m.progress
        left = run_fragment(m, gang, fragment, turn)
        quantum -= turn - left
        if gang not in m.gangs:  # it was split
            return
        if parted and left <= 0 and fragment in gang.fragments:
            make_way(m, gang, fragment, turn, before)
    if not gang.fragments:
        m.gangs.remove(gang)
        m.progress += 1
    elif not any(may_go(m, f) for f in gang.fragments):
        gang.ready = m.progress


def may_go(m: Execution, fragment: Fragment) -> bool:
    """Return whether something has happened since a fragment was held up that may let it go."""
    return fragment.tried != m.progress and (fragment.until is None or fragment.until())


def let_poll(m: Execution) -> bool:
    """Let fragments that poll go on, as nothing else can; return whether there are any.

    False also where they have done nothing else for long: they will for ever.
    """
    progress, times = m.polled
    m.polled = m.progress, times + 1 if progress == m.progress else 1
    if m.polled[1] > VAIN:
        return False
    found = [(gang, f) for gang in m.gangs for f in gang.fragments if f.polls]
    for gang, fragment in found:
        fragment.tried, fragment.until, gang.ready = -1, None, -1
    return bool(found)


def make_way(m: Execution, gang: Gang, fragment: Fragment, turn: int, before: int) -> None:
    """Let the other lanes come next: a fragment that has run for long may be polling for them."""
    gang.fragments.remove(fragment)
    gang.fragments.insert(0, fragment)
    fragment.idle = fragment.idle + turn if m.progress == before == fragment.seen else 0
    fragment.seen = m.progress
    if fragment.idle >= PATIENCE:
        fragment.idle = 0
        gang.release(fragment)


def run_fragment(m: Execution, gang: Gang, fragment: Fragment, quantum: int) -> int:
    """Run a fragment until it is held up, ends, parts, or the quantum is used; return the rest."""
    units = m.units
    gang.fragment = fragment
    while quantum > 0:
        unit = units[fragment.at]
        quantum -= 1
        m.steps += 1
        full = fragment.full
        mask = None if full else fragment.mask
        if not fragment.entered and unit.tail != "stop":
            count = len(unit.instrs)
            warps = gang.W if full else int(fragment.mask.reshape(-1, LANES).any(1).sum())
            unit.hits += warps
            m.executed += warps * (count + 1)
            if count:
                run = unit.run[full]
                if run is None:
                    run = unit.run[full] = m.compiler.compile(unit, full)
                m.steps += unit.weight
                gang.time += count
                try:
                    run(gang, mask)
                except EmulationError as error:
                    raise diagnose.located(m, error, gang) from None
        if m.steps > m.look or m.executed > m.max_instructions:
            diagnose.check_progress(m)
        fragment.entered = True  # a split or a wait comes back here; the instructions have run
        tail = unit.tail
        if tail == "next":
            fragment.at = unit.next
        elif tail == "bra":
            if not branch(m, gang, fragment, unit):
                return quantum
        elif tail == "stop":
            if not stop(m, gang, fragment, unit):
                return quantum
        elif not other_tail(m, gang, fragment, unit):
            return quantum
        fragment.entered = False
        token = fragment.token
        if token is not None and fragment.at == token.unit:
            gang.arrive(fragment)
            if fragment not in gang.fragments:
                return quantum
    return 0


def guarded(m: Execution, gang: Gang, guard: tuple[Reg, bool]) -> np.ndarray:
    """Return which lanes a guard lets through; without negation the predicate's own row."""
    row = gang.p[m.program.regs[guard[0].name][1]]
    return ~row if guard[1] else row


def branch(m: Execution, gang: Gang, fragment: Fragment, unit: Unit) -> bool:
    """Take a branch; False: the fragment is no more."""
    instr = unit.instr
    assert instr is not None
    if instr.guard is None:
        fragment.at = unit.targets[0]
        return True
    taken = guarded(m, gang, instr.guard)
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
        keys = directions(taken, fragment.mask)
        if keys is not None:
            m.split(gang, keys)
            return False
    gang.part(fragment, taken, unit.targets[0], unit.next, unit.meet)
    return False


def directions(taken: np.ndarray, mask: np.ndarray) -> np.ndarray | None:
    """Return 0 (not taken), 1 (taken), 2 (both), 3 (not here) per warp; None when all agree."""
    t = taken.reshape(-1, LANES)
    m = mask.reshape(-1, LANES)
    some, rest = t.any(1), (m & ~t).any(1)
    keys = np.where(some & rest, 2, np.where(some, 1, np.where(rest, 0, 3)))
    return None if (keys == keys[0]).all() else keys


def other_tail(m: Execution, gang: Gang, fragment: Fragment, unit: Unit) -> bool:
    """Leave the kernel, trap, or branch by table; False: the fragment is no more."""
    mask = fragment.mask
    if unit.instr is not None and unit.instr.guard is not None:
        mask = mask & guarded(m, gang, unit.instr.guard)
        if not mask.any():
            fragment.at = unit.next
            return True
    if unit.tail == "brx":
        return branch_table(m, gang, fragment, unit, mask)
    if unit.tail == "trap":
        gang.ins = unit.instr or gang.ins
        error = IllegalOperation("the kernel executed trap: a condition of its own is broken")
        raise diagnose.located(m, error, gang)
    whole = mask is fragment.mask
    gang.leave(fragment, mask)
    for w in gang.active_warps(mask):
        if not gang.live[w * LANES : (w + 1) * LANES].any():
            warp = m.warp(gang.warps[w])
            warp.exited = True
            m.engine.warp_exits(warp, gang.time)
            recheck(m, warp.cta)
            if not warp.cta.live:
                residents.cta_exits(m, warp.cta, unit.instr)
    m.progress += 1
    if not whole and fragment in gang.fragments:
        fragment.at = unit.next
        return True
    return False


def branch_table(
    m: Execution, gang: Gang, fragment: Fragment, unit: Unit, mask: np.ndarray
) -> bool:
    """brx.idx (PTX ISA 9.7.12.3)."""
    assert unit.instr is not None
    gang.ins = unit.instr
    index = m.compiler.lanes_source(unit.instr.operands[0], "u4")(gang)
    values = np.unique(index[mask])
    if values[-1] >= len(unit.targets):
        error = IllegalOperation(
            f"brx.idx with index {values[-1]} and {len(unit.targets)} targets (PTX ISA 9.7.12.3); "
            "check the index before the branch"
        )
        raise diagnose.located(m, error, gang)
    if len(values) == 1 and mask is fragment.mask:
        fragment.at = unit.targets[int(values[0])]
        return True
    first = mask & (index == values[0])
    if gang.W > 1:
        keys = directions(first, fragment.mask)
        if keys is not None:
            m.split(gang, keys)
            return False
    gang.part(fragment, first, unit.targets[int(values[0])], fragment.at, unit.meet)
    return False


def stop(m: Execution, gang: Gang, fragment: Fragment, unit: Unit) -> bool:
    """Try an instruction that may wait; False: it waits, or the gang was split."""
    instr = unit.instr
    assert instr is not None
    gang.ins = instr
    if unit.stop is None:
        try:
            unit.stop = m.compiler.handler(instr)
        except EmulationError as error:
            raise diagnose.located(m, error, gang) from None
    mask = None if fragment.full else fragment.mask
    if instr.guard is not None:
        mask = guarded(m, gang, instr.guard) & fragment.mask
        if not mask.any():
            fragment.at = unit.next
            m.executed += 1
            return True
    fragment.until = None
    before = m.progress  # converged() may merge fragments: then this one is tried again
    try:
        done = unit.stop(gang, mask, fragment)
    except EmulationError as error:
        raise diagnose.located(m, error, gang) from None
    if done is True:
        unit.hits += gang.W if mask is None else len(gang.active_warps(mask))
        m.executed += gang.W
        gang.time += 1
        fragment.wait = None
        if fragment.reason:
            m.engine.waited(gang, fragment, instr)
        fragment.at = unit.next
        return True
    if done is not False:  # per warp: who is ready
        m.split(gang, np.asarray(done))
        return False
    if not fragment.began:
        fragment.began = gang.time
    fragment.tried = before
    if gang.W > 1 and mask is not None and len(gang.active_warps(mask)) < gang.W:
        keys = gang.by_warp(mask).any(1).astype(int)
        if len(np.unique(keys)) > 1:
            m.split(gang, keys)
    return False
