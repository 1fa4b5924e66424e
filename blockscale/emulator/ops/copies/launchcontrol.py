"""Cluster launch control: a running cluster takes over a waiting one (PTX ISA 9.7.13.18)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from blockscale.emulator.machine.engine import Op
from blockscale.emulator.machine.gangs import Gang, Machine
from blockscale.emulator.machine.grid import MBarrier, unravel
from blockscale.emulator.ops.copies.issuer import Issuer, begin_load, blame, finish_load, touch
from blockscale.emulator.ops.core import address, register
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.syntax import Instr, items_of

ANSWER = 16  # bytes
SECTION = "9.7.13.18.1"


@register("clusterlaunchcontrol.try_cancel", operands=2)
def try_cancel(c: Operands, ins: Instr) -> Callable[..., None]:
    """clusterlaunchcontrol.try_cancel (9.7.13.18.1), also with .multicast::cluster::all."""
    to, mbar = address(c, ins.operands[0]), address(c, ins.operands[1])
    everybody = any(m.startswith("multicast") for m in ins.mods)

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            with blame(int(lane)):
                who = Issuer(g, int(lane))
                start(
                    who, int(to(g)[lane]) & 0xFFFFFFFF, int(mbar(g)[lane]) & 0xFFFFFFFF, everybody
                )

    return run


def start(who: Issuer, at: int, bar: int, everybody: bool) -> None:
    """Put one request in flight."""
    machine = who.machine
    who.own(at, "the answer's address", SECTION)
    who.own(bar, "the mbarrier", SECTION)
    who.absolute(at, ANSWER)
    ctas = who.cluster.ctas if everybody else [who.cta]
    low = (at & 0xFFFFFF) + np.arange(ANSWER)
    places = [low + cta.slot * machine.shared.stride for cta in ctas]
    barriers: list[MBarrier] = [who.barrier(bar, cta) for cta in ctas]
    for place in places:
        begin_load(who, place)

    def happen(o: Op) -> None:
        answer = cancel(machine)
        for place, b in zip(places, barriers, strict=True):
            machine.shared.bytes[place] = answer.view(np.uint8)
            touch(who, o, place, True, "clusterlaunchcontrol.try_cancel")
            finish_load(who, o, b, ANSWER)

    o = Op("bulk", who.cta, who.line, happen, bytes=ANSWER * len(ctas), label="try_cancel")
    who.claim(o)
    who.start(o)


def cancel(machine: Machine) -> np.ndarray:
    """Take a cluster off the queue and return the answer: its first CTA's coordinates, and 1."""
    answer = np.zeros(4, np.uint32)
    if machine.waiting:
        number = machine.waiting.popleft()
        x, y, z = (a // b for a, b in zip(machine.grid, machine.cluster, strict=True))
        answer[:3] = np.array(unravel(number, (x, y, z))) * machine.cluster
        answer[3] = 1
    return answer


@register("clusterlaunchcontrol.query_cancel", operands=2)
def query_cancel(c: Operands, ins: Instr) -> Callable[..., None]:
    """clusterlaunchcontrol.query_cancel (9.7.13.18.2): read an answer of try_cancel.

    The coordinates of a request that failed are undefined: all bits set.
    """
    _, row = c.reg(ins.operands[1])
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    if "is_canceled" in ins.opcode:
        put = c.dest(ins.operands[0], "?")
        return lambda g, m: put(g, m, (g.u8[row + 1] >> half) != 0)
    items = items_of(ins.operands[0])
    first = 0
    for i, name in enumerate("xyz"):
        if f"get_first_ctaid::{name}" in ins.opcode:
            first = i
    puts = [c.dest(i, "u4") for i in items]

    def run(g: Gang, m: np.ndarray | None) -> None:
        words = [g.u8[row] & low, g.u8[row] >> half, g.u8[row + 1] & low]
        won = (g.u8[row + 1] >> half) != 0
        for i, put in enumerate(puts):
            word = words[first + i] if first + i < len(words) else low
            put(g, m, np.where(won, word, low).astype(np.uint32))

    return run
