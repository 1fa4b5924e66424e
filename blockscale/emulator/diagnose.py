"""Where a gang is, and why nothing goes on: the places and the text of errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import residents
from .errors import Deadlock, EmulationError, Place
from .gang import LANES, Gang
from .grid import Cta

STALE = 2_000_000  # steps without progress or motion: a livelock

if TYPE_CHECKING:
    from .machine import Machine


def place(m: Machine, gang: Gang, lane: int | None) -> Place:
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
    entry = m.warps[gang.warps[warp_at]]
    if entry is not None:
        cta, warp = entry.cta.coords, entry.number
    return Place(
        m.program.name, ins.line if ins else None, ins.opcode if ins else None, cta, warp, at
    )


def located(m: Machine, error: EmulationError, gang: Gang) -> EmulationError:
    """Return `error` with the place where `gang` is."""
    if error.place is not None and error.place.kernel is None:
        error.place = None
    return error.at(place(m, gang, error.lane))


def check_progress(m: Machine) -> None:
    """Raise when nothing but polling has happened for long, or too much altogether."""
    if m.executed > m.max_instructions:
        many = f"more than {m.max_instructions} warp-instructions"
        dead(m, f"{many}; raise max_instructions if the kernel is that long")
    now = (m.progress, m.motion)
    if now == m.last_look:
        if m.engine.pending:
            m.engine.run_one()
        elif m.waiting and any(c is None for c in m.clusters):
            residents.launch_wave(m)
        else:
            dead(m, "the warps only poll, and nothing changes (livelock)")
    m.last_look = now
    m.look = m.steps + STALE


def dead(m: Machine, why: str) -> None:
    """Raise Deadlock with every warp's place."""
    lines = []
    for gang in m.gangs:
        for f in gang.fragments:
            ins = m.units[f.at].instr or (m.units[f.at].instrs or [None])[0]
            for w in gang.active_warps(f.mask):
                warp = m.warps[gang.warps[w]]
                if warp is not None and len(lines) < 64:
                    text = f"line {ins.line} {ins.opcode}" if ins else "?"
                    why_here = waits_for(m, warp.cta, f.reason) or "running"
                    lines.append(f"  CTA {warp.cta.coords} warp {warp.number}: {text}: {why_here}")
    raise Deadlock(f"deadlock: {why}\n" + "\n".join(lines)).at(Place(m.program.name))


def waits_for(m: Machine, cta: Cta, reason: str) -> str:
    """Return `reason`, with the state of the mbarrier that it names."""
    word, _, at = reason.partition(" ")
    if word != "mbarrier":
        return reason
    b = m.mbarriers.get(cta.slot * m.shared.stride + int(at.split()[0], 16))
    return reason if b is None else f"{reason} {b.state_text()}"
