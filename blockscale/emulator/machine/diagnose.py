"""Where a gang is, and why nothing goes on: the places and the text of errors.

Too many instructions are an endless loop, or a kernel that is that long.
A *deadlock* is certain: no warp can go on and nothing asynchronous is pending.  A *livelock* is a
finding: for `STALE` steps nothing has completed, and memory was read, but only where it had been
read before.
"""

from __future__ import annotations

from blockscale.emulator.errors import Deadlock, EmulationError, InstructionLimit, Place
from blockscale.emulator.machine import residents, state
from blockscale.emulator.machine.gangs import Gang, Machine
from blockscale.emulator.machine.grid import LANES, Cta
from blockscale.emulator.ptx.program import Unit

STALE = 400_000  # steps without progress or motion: a livelock
POLLS = ("ld", "atom", "mbarrier.test_wait", "mbarrier.try_wait")  # what polling loops look with
MOST_LINES = 64  # places of warps in the message of a deadlock


def place(m: Machine, gang: Gang, lane: int | None) -> Place:
    """Return where a gang is; `lane` counts the gang's lanes, None: its first active warp."""
    spot, at = 0, None
    if lane is not None:
        spot, at = divmod(lane, LANES)
    elif gang.fragment is not None:
        spot = int(gang.fragment.mask.argmax()) // LANES
    warp, ins = m.warp(gang.warps[spot]), gang.ins
    return Place(
        m.program.name, ins.line or None, ins.opcode or None, warp.cta.coords, warp.number, at
    )


def located(m: Machine, error: EmulationError, gang: Gang) -> EmulationError:
    """Return `error` with the place where `gang` is."""
    if error.place is not None and error.place.kernel is None:
        error.place = None
    return error.at(place(m, gang, error.lane))


def check_progress(m: Machine) -> None:
    """Raise when nothing but polling has happened for long, or too much altogether."""
    if m.executed > m.max_instructions:
        raise InstructionLimit(
            f"gave up after max_instructions = {m.max_instructions} warp-instructions: an endless "
            f"loop; raise it if the kernel is that long\n{places(m)}"
        ).at(Place(m.program.name))
    m.look = m.steps + state.LOOK
    now = (m.progress, m.motion)
    ran = [u for u in m.units if u.hits != u.seen]
    for unit in ran:
        unit.seen = unit.hits
    if now != m.last_look or not any(polls(unit) for unit in ran):
        m.last_look, m.moved, m.moved_turn = now, m.steps, m.turns
    elif m.engine.pending:
        m.engine.run_one()
    elif m.waiting and any(c is None for c in m.clusters):
        residents.launch_wave(m)
    elif m.alone and m.steps - m.moved > STALE and m.turns - m.moved_turn > 4 * len(m.gangs):
        dead(m, "the warps only poll, and nothing changes (livelock)")


def polls(unit: Unit) -> bool:
    """Return whether a unit has an instruction that a polling loop may look with."""
    return any(i.opcode.startswith(POLLS) for i in unit.everything)


def dead(m: Machine, why: str) -> None:
    """Raise Deadlock with every warp's place."""
    raise Deadlock(f"deadlock: {why}\n{places(m)}").at(Place(m.program.name))


def places(m: Machine) -> str:
    """Return a line for every warp: where it is and what it waits for."""
    lines: list[str] = []
    for gang in m.gangs:
        for f in gang.fragments:
            instrs = [*filter(None, [m.units[f.at].instr]), *m.units[f.at].instrs]
            text = f"line {instrs[0].line} {instrs[0].opcode}" if instrs else "?"
            for w in gang.active_warps(f.mask):
                warp = m.warp(gang.warps[w])
                reason = waits_for(m, warp.cta, f.reason) or "running"
                lines.append(f"  CTA {warp.cta.coords} warp {warp.number}: {text}: {reason}")
    for cluster in filter(None, m.clusters):
        for cta in cluster.ctas:
            if cta.uncommitted is not None:
                lines.append(
                    f"  CTA {cta.coords}: no tcgen05.commit follows the tensor work of line "
                    f"{cta.uncommitted}"
                )
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"  and {len(lines) - MOST_LINES} more"]
    return "\n".join(lines)


def waits_for(m: Machine, cta: Cta, reason: str) -> str:
    """Return `reason`, with the state of the mbarrier that it names."""
    word, _, at = reason.partition(" ")
    if word != "mbarrier":
        return reason
    b = m.mbarriers.get(cta.slot * m.shared.stride + int(at.split()[0], 16))
    return reason if b is None else f"{reason} {b.state_text()}"
