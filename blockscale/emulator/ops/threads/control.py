"""Addresses of other spaces and CTAs, pauses and hints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.machine.memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.ops.core import address, register, window
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.syntax import Instr, Sym

BASES = {
    "shared": SHARED_WINDOW,
    "local": LOCAL_WINDOW,
    "param": PARAM_WINDOW,
    "global": 0,
    "const": 0,
}


def space_word(ins: Instr) -> str:
    """Return the state space named by cvta or isspacep, without its sub-window."""
    for mod in ins.mods:
        word = mod.partition("::")[0]
        if word in BASES:
            return word
    raise PtxError(f"{ins.opcode} names no state space")


@register("cvta", operands=2)
def cvta(c: Operands, ins: Instr) -> Callable[..., None]:
    """cvta and cvta.to (9.7.9.20)."""
    space = space_word(ins)
    base = np.uint64(BASES[space])
    get, put = address(c, ins.operands[1]), c.dest(ins.operands[0], "u8")
    source = ins.operands[1]
    if isinstance(source, Sym) and c.place(source)[0] == "kernel param":
        base = np.uint64(PARAM_WINDOW)
    if "to" in ins.mods:
        return lambda g, m: put(g, m, get(g) - base)
    return lambda g, m: put(g, m, get(g) + base)


@register("isspacep", operands=2)
def isspacep(c: Operands, ins: Instr) -> Callable[..., None]:
    """isspacep (9.7.9.19)."""
    space = space_word(ins)
    number = {"global": 0, "const": 0, "shared": 1, "local": 2, "param": 3}[space]
    own = "shared::cta" in ins.mods or "shared" in ins.mods
    get, put = address(c, ins.operands[1]), c.dest(ins.operands[0], "?")
    variables = c.machine.program.module.variables.values()
    spans = [(c.machine.places[v.name][1], v.size) for v in variables if v.space == "const"]

    def run(g: Gang, m: np.ndarray | None) -> None:
        at = get(g)
        yes = window(at) == number
        if number == 1 and own:
            yes &= ((at >> np.uint64(24)) & np.uint64(0xFF)).astype(np.int64) == g.lane_rank
        if number == 0 and spans:
            const = np.zeros(g.n, bool)
            for first, size in spans:
                const |= (at >= np.uint64(first)) & (at < np.uint64(first + size))
            yes &= const if space == "const" else ~const
        elif space == "const":
            yes = np.zeros(g.n, bool)
        put(g, m, yes)

    return run


@register("mapa", operands=3)
def mapa(c: Operands, ins: Instr) -> Callable[..., None]:
    """mapa (9.7.9.22): the address of the same variable in another CTA of the cluster."""
    wide = "u8" if ins.mods[-1] == "u64" else "u4"
    get, put = address(c, ins.operands[1]), c.dest(ins.operands[0], wide)
    rank = c.lanes_source(ins.operands[2], "u4")

    def run(g: Gang, m: np.ndarray | None) -> None:
        r = rank(g)  # a rank that the cluster does not have fails where the address is used
        value = (get(g) & ~np.uint64(0xFF000000)) | (r.astype(np.uint64) << np.uint64(24))
        put(g, m, value.astype(wide))

    return run


@register("getctarank", operands=2)
def getctarank(c: Operands, ins: Instr) -> Callable[..., None]:
    """getctarank (9.7.9.23)."""
    get, put = address(c, ins.operands[1]), c.dest(ins.operands[0], "u4")
    return lambda g, m: put(g, m, ((get(g) >> np.uint64(24)) & np.uint64(0xFF)).astype(np.uint32))


@register("griddepcontrol", operands=0, waits=True)
@register("nanosleep", operands=1, waits=True)
def pause(c: Operands, ins: Instr) -> Callable[..., Any]:
    """griddepcontrol (one grid at a time: dependencies are done), nanosleep: others go first."""

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        g.time += 10
        return True

    return run


@register("setmaxnreg", "pmevent", "brkpt", "vprintf", "__assertfail")
def hint(c: Operands, ins: Instr) -> Callable[..., None]:
    """Register budgets and debugging: no effect on values."""
    if ins.base == "__assertfail":

        def fail(g: Gang, m: np.ndarray | None) -> None:
            raise IllegalOperation("a device-side assertion failed", lane=int(g.lanes(m)[0]))

        return fail
    if ins.base == "setmaxnreg":
        count = getattr(ins.operands[0], "value", 24)
        if not 24 <= int(count) <= 256 or int(count) % 8:
            raise PtxError(f"setmaxnreg {count}: 24 to 256 in steps of 8 (PTX ISA 9.7.19.5)")
    return lambda g, m: None
