"""How a tensor intrinsic is made: its operands, said once, and two bodies.

`describe` makes two functions of them which differ in nothing but the body of their root block:
the *desc*, plain loops in the expressions of the ops, and the *impl*, the instruction.  A body
takes the operands' buffers in order.  It is a `T.inline`, or a function that emits statements or
returns the expression to evaluate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from itertools import compress
from typing import Any, NamedTuple, ParamSpec

from tvm.ir import Expr as PrimExpr
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import PrimFunc

from blockscale.tir.common import i64

Body = Callable[..., Any]
"""What fills the root block."""


class Operand(NamedTuple):
    """A buffer that an intrinsic reads ("r"), writes ("w") or updates ("rw")."""

    name: str
    shape: tuple[PrimExpr, ...]
    dtype: str
    access: str = "r"
    scope: str = "global"
    align: int = -1
    """Of its address, in bytes; -1 is TVM's own choice."""
    strided: bool = False
    """Rows may lie any distance apart."""

    def bind(self) -> T.Buffer:
        """Add the parameter to the function that is being built; return its buffer."""
        strides = [T.int64(), i64(1)] if self.strided else None
        buffer = T.match_buffer(
            T.arg(self.name.lower(), T.handle()),
            self.shape,
            self.dtype,
            strides=strides,
            scope=self.scope,
            align=self.align,
            offset_factor=1,
        )
        IRBuilder.name(self.name, buffer)
        return buffer


_makers: dict[str, Callable[[], None]] = {}
"""What registers an intrinsic, by name: those that are described and not registered."""
_describing = False

P = ParamSpec("P")


def intrinsic(factory: Callable[P, str]) -> Callable[P, str]:
    """Decorate a function that calls `describe`: it is called once for the same arguments."""
    described = cache(factory)

    @wraps(factory)
    def named(*args: P.args, **kwargs: P.kwargs) -> str:
        name = described(*args, **kwargs)  # type: ignore[arg-type]
        if not _describing:
            registered([name])
        return name

    return named


def describe(
    name: str, operands: Sequence[Operand], desc: Body, impl: Body, reads: str | None = None
) -> str:
    """Describe a tensor intrinsic, again if need be; return its name, for `Schedule.tensorize`.

    TVM knows it once the `intrinsic` that describes it has returned; its two functions are made
    then, which takes longer than to describe it.

    ``reads``: names of the operands in the order in which the op's block reads them; without it
    those that are updated, and then those that are read only.
    """
    order = reads.split() if reads else _reads(operands)

    def make() -> None:
        made = (_function(operands, body, order) for body in (desc, impl))
        TensorIntrin.register(name, *made, override=True)

    _makers[name] = make
    return name


@contextmanager
def describing() -> Iterator[None]:
    """Let intrinsics be described and not registered: `registered` then takes those in use."""
    global _describing
    before, _describing = _describing, True
    try:
        yield
    finally:
        _describing = before


def registered(names: Iterable[str]) -> None:
    """Register those of these intrinsics that are described; other names are passed over."""
    for name in names:
        make = _makers.pop(name, None)
        if make is not None:
            make()


def _reads(operands: Sequence[Operand]) -> list[str]:
    return [op.name for access in ("rw", "r") for op in operands if op.access == access]


def _function(operands: Sequence[Operand], body: Body, reads: list[str]) -> PrimFunc:
    @T.prim_func(s_tir=True)
    def function():
        _fill(operands, body, reads)

    return function


def _fill(operands: Sequence[Operand], body: Body, reads: list[str]) -> None:
    """Emit the parameters and the root block of an intrinsic."""
    buffers = {operand.name: operand.bind() for operand in operands}
    whole = {
        op.name: buffers[op.name][tuple(slice(0, extent) for extent in op.shape)] for op in operands
    }
    with T.sblock("root"):
        T.reads(*(whole[name] for name in reads))
        T.writes(*(whole[op.name] for op in operands if "w" in op.access))
        value = body(*buffers.values())
        if value is not None:
            T.evaluate(value)


@contextmanager
def nest(block: str, kinds: str, *extents: PrimExpr) -> Iterator[list[PrimExpr | int]]:
    """Emit loops around ``block``; yield its axes, spatial ("S") or reduced ("R").

    For a loop of one iteration TVM leaves no axis, which is 0 here, and the loop itself only where
    there is no other.
    """
    several = [int(extent) > 1 for extent in extents]
    kept = list(compress(extents, several))
    make = [T.axis.spatial if kind == "S" else T.axis.reduce for kind in compress(kinds, several)]
    with T.grid(*(kept or extents)) as loops, T.sblock(block):
        each = [loops] if len(kept) < 2 else loops
        axes = iter([axis(*of) for axis, *of in zip(make, kept, each, strict=False)])
        yield [next(axes) if one else 0 for one in several]


def copy(
    name: str,
    shape: tuple[PrimExpr, ...],
    dtype: str,
    scopes: tuple[str, str],
    move: Callable[[T.Buffer, T.Buffer], PrimExpr],
    table: bool = False,
) -> str:
    """Register and name: ``target = source``, between buffers of ``scopes``.

    Args:
        move: call that copies, of the target and the source.
        table: the op finds the source by a number in a table, which the copy reads too.
    """

    def desc(source: T.Buffer, *others: T.Buffer) -> None:
        *tables, target = others
        with nest("copy", "S" * len(shape), *shape) as axes:
            at = tuple(axes)
            if table:
                T.reads(source[at], tables[0][0])
                T.writes(target[at])
            T.buffer_store(target, source[at], at)

    def impl(source: T.Buffer, *others: T.Buffer) -> PrimExpr:
        return move(others[-1], source)

    given = [Operand("E", (i64(1),), "int32")] if table else []
    source = Operand("S", shape, dtype, scope=scopes[0])
    target = Operand("D", shape, dtype, "w", scopes[1])
    return describe(name, [source, *given, target], desc, impl)
