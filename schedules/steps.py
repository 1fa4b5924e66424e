"""Steps that several schedules share."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any, Protocol

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


class Drawing(Schedule):
    """A schedule that knows whether a sketch may have looked at what it drew.

    Where none did, another draw takes the same branches, and shows no other design.  A loop's
    extent tells of a draw, and so does which loops are left where those of one iteration go.
    """

    __slots__ = ("drawn", "looked")

    def __init__(self, mod: IRModule, seed: int) -> None:
        super().__init__(mod, seed=seed, debug_mask="none", error_render_level="fast")
        self.drawn = self.looked = False

    def _look(self) -> None:
        self.looked = self.drawn

    def sample_categorical(self, *given: Any, **options: Any) -> ExprRV:
        """Draw one of several candidates."""
        self.drawn = True
        return super().sample_categorical(*given, **options)

    def sample_perfect_tile(self, *given: Any, **options: Any) -> list[ExprRV]:
        """Draw the factors of a loop."""
        self.drawn = True
        return super().sample_perfect_tile(*given, **options)

    def get(self, rand_var_or_sref: Any) -> Any:
        """Return the value of a variable."""
        self._look()
        return super().get(rand_var_or_sref)

    @property
    def mod(self) -> IRModule:
        """The module as it is scheduled so far."""
        self._look()
        return super().mod

    def compute_at(self, *given: Any, **options: Any) -> None:
        """Move a producer under a loop."""
        if not options.get("preserve_unit_loops"):
            self._look()
        super().compute_at(*given, **options)

    def reverse_compute_at(self, *given: Any, **options: Any) -> None:
        """Move a consumer under a loop."""
        if not options.get("preserve_unit_loops"):
            self._look()
        super().reverse_compute_at(*given, **options)


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
