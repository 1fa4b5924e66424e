"""What a scheduled function says: tiles are those of the sums that MMAs add to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr

from blockscale.base.errors import LoweringError
from blockscale.lower.pipe.read import Dim, Raw, Reader, substituted
from blockscale.lower.sites import called


class WarpReader(Reader):
    """A scheduled GEMM of `blockscale.tir.intrin.warp`."""

    MMA, LOADS = "mma", ("warp_bulk", "warp_async")
    INTRINSICS = "blockscale.tir.intrin.warp"

    def _axes(self, raw: Sequence[Raw]) -> dict[str, int]:
        """Find which axis each loop over tiles runs along; return the sizes of tiles."""
        (mma,) = (r for r in raw if self.MMA in called(r.block.body)[0])
        (sums,) = (m.source for m in mma.block.match_buffers if str(m.buffer.name) == "D")
        mins = [substituted(r.min, mma.values) for r in sums.region]
        shape = sums.source.shape
        token = mins[-3] * shape[-2] + mins[-2]
        sizes: dict[str, int] = {}
        for axis, index in (("rows", token), ("cols", mins[-1])):
            sizes |= self._steps(Dim(axis, 1, None, 1), index)
        if "rows" not in sizes:
            raise LoweringError("no loop over tiles runs along rows of x")
        return {"cols": int(shape[-1])} | sizes  # one tile may hold all rows of w


# ---- Numbers ------------------------------------------------------------------------------------

_OPERATORS = {"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%"}


class Numbers:
    """Evaluates index expressions for given values of their variables."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Callable[..., int], list[Any]]] = {}

    def __call__(self, expr: PrimExpr, values: Mapping[Any, int]) -> int:
        """Return the value; variables that are not given are 0."""
        found = self._made.get(expr)
        if found is None:
            names: dict[Any, str] = {}
            text = _python(expr, names)
            found = eval(f"lambda {', '.join(names.values())}: {text}"), [*names]
            self._made[expr] = found
        function, variables = found
        return function(*(values.get(variable, 0) for variable in variables))


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
