"""Steps that several schedules share."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Protocol

from tvm.ir import IRModule
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV
from tvm_ffi.serialization import from_json_graph_str, to_json_graph_str

from blockscale.specs.plans.moe import ATTRIBUTE


def unshared(mod: IRModule) -> IRModule:
    """Return ``mod``, or a copy of it that shares nothing a schedule would change.

    A schedule changes what is inside of an IfThenElse in place, in its module and in all others
    that share the statement, copies of the schedule included.  GEMMs of MoE layers have and get
    none; their tuning would spend a third of its time here.
    """
    if all(ATTRIBUTE in (func.attrs or {}) for func in mod.functions.values()):
        return mod
    # tvm.ir.load_json would rewrite the text for its version first, which takes twice as long
    return from_json_graph_str(to_json_graph_str(mod))


def last_loops(sch: Schedule, block: SBlockRV, count: int) -> list[LoopRV]:
    """Return the ``count`` innermost loops of ``block``."""
    return list(sch.get_loops(block))[-count:]


class Choose(Protocol):
    """How a sketch takes its decisions."""

    def __call__(self, sch: Schedule, candidates: list[int], prefer: int) -> ExprRV:
        """Return one of ``candidates``; ``prefer`` (or the nearest candidate) needs no search."""


Sketch = Callable[[Schedule, Choose], None]
"""One way to schedule an op, apart from its decisions."""


def sampled(sch: Schedule, candidates: list[int], prefer: int) -> ExprRV:
    """Sample one of ``candidates`` with equal probability: a decision of the search space."""
    return sch.sample_categorical(candidates, [1.0 / len(candidates)] * len(candidates))


def preferred(sch: Schedule, candidates: list[int], prefer: int) -> ExprRV:
    """Take the candidate nearest to ``prefer``: the default schedule."""
    nearest = min(range(len(candidates)), key=lambda i: abs(candidates[i] - prefer))
    uniform = [1.0 / len(candidates)] * len(candidates)
    return sch.sample_categorical(candidates, uniform, decision=nearest)


def vectorize_last(sch: Schedule, block: SBlockRV, extent: int, lanes: int) -> None:
    """Vectorise the innermost loop of ``block``, of ``extent`` iterations, by at most ``lanes``."""
    _, inner = sch.split(last_loops(sch, block, 1)[0], [None, gcd(extent, lanes)])
    sch.vectorize(inner)


def keep_in_registers(sch: Schedule, block: SBlockRV, unrolled: int) -> None:
    """Vectorise the innermost loop of ``block``, unroll the ``unrolled`` loops around it."""
    *outer, lane = last_loops(sch, block, unrolled + 1)
    sch.vectorize(lane)
    for loop in outer:
        sch.unroll(loop)
