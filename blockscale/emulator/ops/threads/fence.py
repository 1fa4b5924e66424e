"""Fences (PTX ISA 9.7.13.4): of memory accesses, of proxies, and those of tcgen05 and wgmma."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from blockscale.emulator.errors import PtxError
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.ops.core import register
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.syntax import Instr

SHARED = ("", ".shared::cta", ".shared::cluster")  # spaces of fence.proxy.async; .global is another
PLAIN = re.compile(
    r"membar\.(cta|gl|sys)"
    r"|fence(\.(sc|acq_rel|acquire|release))?\.(cta|cluster|gpu|sys)"
    r"|fence\.acquire\.sync_restrict::shared::cluster\.cluster"
    r"|fence\.release\.sync_restrict::shared::cta\.cluster"
    r"|fence\.mbarrier_init\.release\.cluster"
)
IGNORED = re.compile(
    r"(membar|fence)\.proxy\.alias|fence\.proxy\.async\.global"
    r"|fence\.proxy\.tensormap::generic\.(acquire|release)\.(cta|cluster|gpu|sys)"
)
TO_ASYNC = "fence.proxy.async::generic."
ONE_WAY = {  # halves of a fence of generic accesses with later ones of the async proxy
    TO_ASYNC + "release.sync_restrict::shared::cta.cluster": "proxy_release",
    TO_ASYNC + "acquire.sync_restrict::shared::cluster.cluster": "proxy_acquire",
}


@register("tcgen05.fence", operands=0)
def tensor_fence(c: Operands, ins: Instr) -> Callable[..., None]:
    """tcgen05.fence (9.7.16.11.1): orders accesses of tensor memory with those of other threads."""
    clocks = c.machine.clocks
    before = ins.opcode.endswith("::before_thread_sync")
    return by_warps(clocks.fence_before if before else clocks.fence_after)


@register("wgmma.fence", operands=0)
def warpgroup_fence(c: Operands, ins: Instr) -> Callable[..., None]:
    """wgmma.fence (9.7.15.7.1): `ptx.analysis` looks where one is missing."""
    return lambda g, m: None


@register("membar", "fence", operands=(0, 2))
def fence(c: Operands, ins: Instr) -> Callable[..., None]:
    """membar, fence and fence.proxy; those of global memory alone change nothing here."""
    clocks, opcode = c.machine.clocks, ins.opcode
    if opcode in [f"fence.proxy.async{space}" for space in SHARED]:
        return by_warps(clocks.fence)
    if opcode in ONE_WAY:
        return by_warps(getattr(clocks, ONE_WAY[opcode]))
    if IGNORED.fullmatch(opcode):
        return lambda g, m: None
    if not PLAIN.fullmatch(opcode):
        raise PtxError(
            f"{opcode} is no fence of PTX ISA 9.7.13.4; check its semantics, scope and proxy"
        )
    machine = c.machine
    acquires, releases = "release" not in ins.mods, "acquire" not in ins.mods

    def run(g: Gang, m: np.ndarray | None) -> None:
        for w in g.active_warps(m):
            clocks.memory_fence(int(g.w_cluster[w]), int(g.w_agent[w]), acquires, releases)
        if machine.watch is not None:
            machine.watch.fence(g, m, ins.mods)

    return run


def by_warps(act: Callable[[int, int], None]) -> Callable[..., None]:
    """Return a handler that does `act` (cluster, agent) for every warp that is there."""

    def run(g: Gang, m: np.ndarray | None) -> None:
        for w in g.active_warps(m):
            act(int(g.w_cluster[w]), int(g.w_agent[w]))

    return run
