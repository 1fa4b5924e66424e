"""A kernel as a program: units, registers, variables; who follows whom, where lanes meet again.

Divergent lanes meet at the immediate post-dominator of the branch, which is where compilers put the
hardware's convergence barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from blockscale.emulator.errors import PtxError
from blockscale.emulator.ptx.syntax import Instr, Module, Var

MOST_STEPS = 1 << 22  # from branch to branch; the search is quadratic where branches are at random
SHORT = 64  # instructions, or units


@dataclass
class Unit:
    """Instructions up to a tail; `tail` is "next", "bra", "brx", "exit", "stop" or "trap"."""

    index: int
    instrs: list[Instr] = field(default_factory=list)
    tail: str = "next"
    instr: Instr | None = None  # the branch, or the instruction that may wait
    targets: list[int] = field(default_factory=list)
    next: int = -1
    meet: int | None = None  # where lanes that part here meet again
    simple: bool = False  # a short branch without waiting inside: warps need not be parted
    run: list[Callable[..., None] | None] = field(default_factory=lambda: [None, None])
    stop: Callable[..., Any] | None = None
    weight: int = 0  # steps that its instructions count as
    hits: int = 0  # warps that ran it
    seen: int = 0  # hits when progress was looked at last

    @property
    def everything(self) -> list[Instr]:
        """Its instructions, the tail's included."""
        return [*self.instrs, self.instr] if self.instr is not None else self.instrs


@dataclass
class Program:
    """A kernel: units, register classes and where its variables lie."""

    name: str
    units: list[Unit]
    regs: dict[str, tuple[str, int]]  # register -> (class, row); classes "p", 1, 2, 4, 8 bytes
    counts: dict[str, int]
    params: list[Var]
    param_offsets: list[int]
    param_bytes: int
    places: dict[str, tuple[str, int]]  # variable -> (space, offset); but not the global ones
    static_shared: int
    local_bytes: int
    module: Module
    directives: dict[str, list[int]]


def successors(unit: Unit) -> list[int]:
    """Return the units that may follow `unit`; -1 is the end of the kernel."""
    guarded = unit.instr is not None and unit.instr.guard is not None
    if unit.tail == "bra":
        return [*unit.targets, unit.next] if guarded else list(unit.targets)
    if unit.tail == "brx":
        return [*unit.targets, unit.next] if guarded else list(unit.targets)
    if unit.tail in ("exit", "trap"):
        return [-1, unit.next] if guarded else [-1]
    return [unit.next]


def find_meeting_points(units: list[Unit]) -> None:
    """Fill in `meet` (immediate post-dominators) and `simple` of every branch."""
    count = len(units)
    succ = [[s if s >= 0 else count for s in successors(u)] for u in units] + [[]]
    pred: list[list[int]] = [[] for _ in range(count + 1)]
    for i, following in enumerate(succ):
        for s in following:
            pred[s].append(i)
    order: list[int] = []  # post-order of the reversed graph from the exit
    seen = [False] * (count + 1)
    stack: list[tuple[int, int]] = [(count, 0)]
    seen[count] = True
    while stack:
        node, i = stack.pop()
        if i < len(pred[node]):
            stack.append((node, i + 1))
            child = pred[node][i]
            if not seen[child]:
                seen[child] = True
                stack.append((child, 0))
        else:
            order.append(node)
    rank = {node: i for i, node in enumerate(order)}
    idom: dict[int, int] = {count: count}
    changed, left = True, MOST_STEPS
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            new: int | None = None
            for s in succ[node]:
                if s in idom:
                    left -= 1
                    new, left = (s, left) if new is None else meet(idom, rank, s, new, left)
            if new is not None and idom.get(node) != new:
                idom[node] = new
                changed = True
    for unit in units:
        if unit.tail in ("bra", "brx"):
            point = idom.get(unit.index)
            unit.meet = None if point is None or point == count else point
            unit.simple = unit.meet is not None and short(units, unit)


def meet(idom: dict[int, int], rank: dict[int, int], a: int, b: int, left: int) -> tuple[int, int]:
    """Return the nearest common post-dominator of `a` and `b`, and what is left of the steps."""
    while a != b:
        if rank[a] > rank[b]:
            a, b = b, a
        while rank[a] < rank[b]:
            a = idom[a]
            left -= 1
        if left < 0:
            raise PtxError(
                f"the branches are so entangled that where they meet takes over {MOST_STEPS} "
                "steps to find; no compiler makes such code"
            )
    return a, left


def short(units: list[Unit], branch: Unit) -> bool:
    """Return True when nothing between `branch` and its meeting point waits or loops."""
    todo, seen, size = [s for s in successors(branch) if s != branch.meet], set(), 0
    while todo:
        i = todo.pop()
        if i < 0 or i in seen:
            continue
        if i == branch.index:
            return False
        seen.add(i)
        unit = units[i]
        size += len(unit.instrs)
        if max(size, len(seen)) > SHORT or unit.tail in ("stop", "trap"):
            return False
        following = [s for s in successors(unit) if s != branch.meet]
        if any(s in seen or s <= i for s in following):
            return False
        todo += following
    return True
