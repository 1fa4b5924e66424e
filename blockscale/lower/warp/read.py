"""What a scheduled function says: tiles are those of the sums that MMAs add to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.sym import Analyzer
from tvm.tirx import PrimFunc

from blockscale.base.errors import LoweringError
from blockscale.lower.pipe.read import Coordinates, Dim, Raw, Reader, Site, substituted, var
from blockscale.lower.sites import called
from blockscale.specs.plans.moe import ADDRESSED, AFTER, FAST
from blockscale.tir.common import i64
from blockscale.tir.gemm.tiles import EXPERT

MULTICAST = "clusterCtaIdx.y"
"""CTAs with neighbouring tiles, which load rows of x for each other."""

ORDER = "order"
"""Parameter of tables of rows: the number of a sorted row."""


class WarpCoordinates(Coordinates):
    """Coordinates, and what a tile's rows of x are where experts have them.

    Attributes:
        expert: of the tile.
        sorted: the number of a row of x among those of all experts.
        slot: what the table `ORDER` has for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.sorted, self.slot = var("expert"), var("sorted"), var("slot")

    @property
    def all(self) -> tuple[tirx.Var, ...]:
        """All of them."""
        return (*super().all, self.expert, self.sorted, self.slot)


class WarpReader(Reader):
    """A scheduled GEMM of `blockscale.tir.intrin.warp`.

    Attributes:
        grouped: whether tiles are found in a table of the experts' rows.
        padded: rows of x of a padded tile.
        after: what the kernel before it writes; None: it begins after that one.
        fast: whether sums of 8-bit operands may be those of MMAs.
        addressed: parameters that are tables of addresses of rows.
    """

    MMA, LOADS = "mma", ("warp_bulk", "warp_async")
    TILE_THREADS = (MULTICAST,)
    INTRINSICS = "blockscale.tir.intrin.warp"

    at: WarpCoordinates

    def __init__(self, func: PrimFunc) -> None:
        super().__init__(func)
        self.grouped = EXPERT in self.views
        after = (func.attrs or {}).get(AFTER)
        self.after = None if after is None else tuple(str(name) for name in after)
        self.fast = bool((func.attrs or {}).get(FAST, False))
        self.addressed = tuple(str(name) for name in (func.attrs or {}).get(ADDRESSED, ()))

    @staticmethod
    def coordinates() -> WarpCoordinates:
        """Return what expressions are to be in."""
        return WarpCoordinates()

    def _site(self, raw: Raw) -> Site:
        """A block whose operands are the expert's."""
        site = super()._site(raw)
        once = {loop.var: i64(0) for loop in site.loops if loop.extent == 1}
        for key, operand in site.operands.items():
            mins = tuple(
                replaced(substituted(index, once), self.of_table) for index in operand.mins
            )
            site.operands[key] = replace(operand, mins=mins)
        return site

    def of_table(self, load: Any) -> PrimExpr:
        """What stands for an element of a table: the expert is a coordinate, others stay."""
        if str(load.source.name) != EXPERT:
            return load
        tiles = self.padded // self.tile_size["rows"]  # of a padded one, whose expert is one
        if not is_zero(load.indices[0] - tirx.floordiv(self.at.tiles["rows"], i64(tiles))):
            raise LoweringError(f"{EXPERT}{list(load.indices)} is not the expert of the tile")
        return self.at.expert

    def _axes(self, raw: Sequence[Raw]) -> dict[str, int]:
        """Find which axis each loop over tiles runs along; return the sizes of tiles."""
        (mma,) = (r for r in raw if self.MMA in called(r.block.body)[0])
        (sums,) = (m.source for m in mma.block.match_buffers if str(m.buffer.name) == "D")
        mins = [substituted(r.min, mma.values) for r in sums.region]
        shape = sums.source.shape
        token = mins[-3] * shape[-2] + mins[-2]
        self.padded = int(shape[-2])
        sizes: dict[str, int] = {}
        for axis, index in (("rows", token), ("cols", mins[-1])):
            sizes |= self._steps(Dim(axis, 1, None, 1), index)
        if "rows" not in sizes:
            raise LoweringError("no loop over tiles runs along rows of x")
        return {"cols": int(shape[-1])} | sizes  # one tile may hold all rows of w


def replaced(expr: PrimExpr, by: Callable[[Any], PrimExpr]) -> PrimExpr:
    """An index with what ``by`` makes of the elements that it reads."""
    name = type(expr).__name__
    if name == "TensorLoad":
        return by(expr)
    if name == "Cast":
        return tirx.Cast(str(expr.ty), replaced(expr.value, by))
    if name in _OPERATORS or name in ("Max", "Min"):
        a, b = replaced(expr.a, by), replaced(expr.b, by)
        return expr if a.same_as(expr.a) and b.same_as(expr.b) else type(expr)(a, b)
    return expr


# ---- Numbers ------------------------------------------------------------------------------------

_OPERATORS = {"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%"}


class Numbers:
    """Evaluates index expressions for given values of their variables."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Callable[..., Any], list[Any]]] = {}
        self._columns: dict[Any, tuple[Callable[..., Any], list[Any]]] = {}

    def __call__(self, expr: PrimExpr, values: Mapping[Any, int]) -> int:
        """Return the value; variables that are not given are 0."""
        found = self._made.get(expr)
        if found is None:
            found = self._made[expr] = self._compiled(expr, {})
        function, variables = found
        return function(*(values.get(variable, 0) for variable in variables))

    def column(self, expr: PrimExpr, columns: Mapping[Any, np.ndarray]) -> Any:
        """Return the values where the variables have those of ``columns``; a number if all do."""
        found = self._columns.get(expr)
        if found is None:
            functions = {"max": np.maximum, "min": np.minimum}
            found = self._columns[expr] = self._compiled(expr, functions)
        function, variables = found
        return function(*(columns.get(variable, 0) for variable in variables))

    @staticmethod
    def _compiled(
        expr: PrimExpr, functions: dict[str, Any]
    ) -> tuple[Callable[..., Any], list[Any]]:
        names: dict[Any, str] = {}
        text = _python(expr, names)
        return eval(f"lambda {', '.join(names.values())}: {text}", functions), [*names]


def _python(expr: Any, names: dict[Any, str]) -> str:
    name = type(expr).__name__
    if name == "IntImm":
        return str(int(expr))
    if name == "Var":
        return names.setdefault(expr, f"v{len(names)}")
    if name == "Cast":
        return _python(expr.value, names)
    if name in ("Max", "Min"):
        return f"{name.lower()}({_python(expr.a, names)}, {_python(expr.b, names)})"
    if name not in _OPERATORS:
        raise LoweringError(f"an index has a {name}: {expr}; only sums and quotients are lowered")
    return f"({_python(expr.a, names)} {_OPERATORS[name]} {_python(expr.b, names)})"


def is_int(expr: Any) -> bool:
    """Whether an expression is a number."""
    return isinstance(expr, tirx.IntImm)


def is_zero(expr: Any) -> bool:
    """Whether an expression is 0 for all values of its variables."""
    found = Analyzer().simplify(expr)
    return is_int(found) and int(found) == 0
