"""Addresses, fences, launch control, and what happens at a kernel's ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import IllegalOperation, PtxError
from ..memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW
from ..syntax import Instr, Sym
from .core import address, register, window

if TYPE_CHECKING:
    from ..compiler import Compiler
    from ..gang import Fragment, Gang
    from ..grid import Cluster, Cta
    from ..machine import Machine

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


@register("cvta")
def cvta(c: Compiler, ins: Instr) -> Callable[..., None]:
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


@register("isspacep")
def isspacep(c: Compiler, ins: Instr) -> Callable[..., None]:
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


@register("mapa")
def mapa(c: Compiler, ins: Instr) -> Callable[..., None]:
    """mapa (9.7.9.22): the address of the same variable in another CTA of the cluster."""
    wide = "u8" if ins.mods[-1] == "u64" else "u4"
    get, put = address(c, ins.operands[1]), c.dest(ins.operands[0], wide)
    rank = c.lanes_source(ins.operands[2], "u4")

    def run(g: Gang, m: np.ndarray | None) -> None:
        r = rank(g)  # a rank that the cluster does not have fails where the address is used
        value = (get(g) & ~np.uint64(0xFF000000)) | (r.astype(np.uint64) << np.uint64(24))
        put(g, m, value.astype(wide))

    return run


@register("getctarank")
def getctarank(c: Compiler, ins: Instr) -> Callable[..., None]:
    """getctarank (9.7.9.23)."""
    get, put = address(c, ins.operands[1]), c.dest(ins.operands[0], "u4")
    return lambda g, m: put(g, m, ((get(g) >> np.uint64(24)) & np.uint64(0xFF)).astype(np.uint32))


@register("membar", "fence", "tcgen05.fence", "wgmma.fence")
def fence(c: Compiler, ins: Instr) -> Callable[..., None]:
    """Fences: only fence.proxy.async changes what the model tracks (9.7.13.4)."""
    if "proxy" not in ins.mods or not any(m.startswith("async") for m in ins.mods):
        return lambda g, m: None
    clocks = c.machine.clocks

    def run(g: Gang, m: np.ndarray | None) -> None:
        for w in g.active_warps(m):
            clocks.fence(int(g.w_cluster[w]), int(g.w_agent[w]))

    return run


@register("griddepcontrol", waits=True)
@register("nanosleep", waits=True)
def pause(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """griddepcontrol (one grid at a time: dependencies are done), nanosleep: others go first."""

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        g.time += 10
        return True

    return run


@register("setmaxnreg", "pmevent", "brkpt", "vprintf", "__assertfail")
def hint(c: Compiler, ins: Instr) -> Callable[..., None]:
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


def place_globals(machine: Machine) -> None:
    """Give module variables of .global and .const space their addresses and initial values."""
    later = []
    for var in machine.program.module.variables.values():
        if var.space not in ("global", "const"):
            continue
        data = np.zeros(max(var.size, 1), np.uint8)
        if var.init is not None:
            data[: len(var.init)] = np.frombuffer(var.init, np.uint8)
        machine.places[var.name] = ("global", machine.memory.add(data.size, var.name, data))
        later.append((var, data))
    for var, data in later:
        for at, sym in var.pointers:
            place = machine.places.get(sym.name)
            if place is not None:
                data[at : at + 8] = np.array([place[1] + sym.offset], np.uint64).view(np.uint8)


def unread_stores(machine: Machine, cta: Cta) -> None:
    """Report bulk stores that a CTA leaves behind without having waited for their reads."""
    for warp in cta.warps:
        groups = [g for lane in warp.bulk_groups.values() for g in lane]
        know = machine.clocks.know[cta.cluster.slot, warp.agent]  # .read has been waited for
        pending = [op for group in [*groups, *warp.bulk_open.values()] for op in group]
        left = [op for op in pending if know[op.agent] < op.clock]
        if left:
            machine.hazards.add(
                "unwaited bulk copy", "warning",
                f"CTA {cta.coords} ends without having waited for the bulk store of line "
                f"{left[0].line}, which may still read its shared memory: "
                "cp.async.bulk.wait_group.read comes first (PTX ISA 9.7.9.25.4.5)",
                line=left[0].line, warp=warp.index,
            )  # fmt: skip


def cta_exits(machine: Machine, cta: Cta, ins: Instr | None) -> None:
    """Check that no CTA may still use the shared memory of one that ends (PTX ISA 9.7.13.3)."""
    unread_stores(machine, cta)
    shadow = machine.shared_shadow
    if shadow is None or machine.cluster_ctas == 1:
        return
    cells = machine.shared.stride // machine.traits.granule
    span = np.arange(cta.slot * cells, (cta.slot + 1) * cells)
    clocks = machine.clocks
    agents = np.array([w.agent for w in cta.warps])
    know, _ = clocks.both(cta.cluster.slot, agents)
    for first in (0, clocks.cp_async, clocks.tcgen05_st, clocks.store):  # its own work ends with it
        know[first + agents] = np.iinfo(np.int32).max
    know[clocks.tensor + cta.rank] = np.iinfo(np.int32).max
    found = shadow.look(span[shadow.dirty[span]], know)
    if found is not None:
        line = ins.line if ins is not None else None
        machine.hazards.conflict(
            found, f"the end of CTA rank {cta.rank}", "shared memory", line or 0,
            cta.warps[0].index,
            int(span[shadow.dirty[span]][found[1]]) % cells * machine.traits.granule,
        )  # fmt: skip


def at_exit(machine: Machine, cluster: Cluster) -> None:
    """Report what a cluster leaves behind (9.7.16.7: tensor memory must be freed)."""
    for cta in cluster.ctas:
        for column, count in cta.allocations.items():
            machine.hazards.add(
                "tmem not freed", "error",
                f"CTA {cta.coords} ends with {count} TMEM columns from {column} still allocated; "
                "execute "
                "tcgen05.dealloc before the last warp leaves (PTX ISA 9.7.16.7.1)",
                line=machine.tmem_lines.get((cta.slot, column)), warp=cta.warps[0].index,
            )  # fmt: skip
        if cta.uncommitted is not None:
            machine.hazards.add(
                "uncommitted tensor work", "warning",
                f"CTA {cta.coords} ends, and no tcgen05.commit followed the tcgen05.mma of line "
                f"{cta.uncommitted}: nobody can have waited for it (PTX ISA 9.7.16.10)",
                line=cta.uncommitted, warp=cta.warps[0].index,
            )  # fmt: skip
    stride = machine.shared.stride
    slots = {cta.slot for cta in cluster.ctas}
    for key in [k for k in machine.mbarriers if k // stride in slots]:
        del machine.mbarriers[key]
    for key in [k for k in machine.ended if k // stride in slots]:
        del machine.ended[key]
    for warp in cluster.warps:
        machine.cluster_waits.pop(warp.index, None)
    for spot in [k for k in machine.sync if isinstance(k, tuple) and k[0] == cluster.slot]:
        del machine.sync[spot]
