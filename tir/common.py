"""What the op files share: 64-bit constants, tile counts, activation loads, fixed sizes."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.tirx import PrimFunc

from blockscale.tir import formats


def i64(value: int) -> PrimExpr:
    """Constant of type int64: all extents are 64-bit, so that large tensors do not overflow."""
    return tirx.IntImm("int64", value)


def tiles_of(extent: PrimExpr, tile: int) -> PrimExpr:
    """Number of tiles of ``tile`` that cover ``extent``."""
    return extent if tile == 1 else tirx.floordiv(extent + i64(tile - 1), i64(tile))


def widen(value: PrimExpr) -> PrimExpr:
    """Activation ``value`` (float32, float16 or bfloat16) as float32, exactly."""
    if str(value.ty.dtype).startswith("bfloat16"):
        word = tirx.Cast("int32", tirx.reinterpret("uint16", value))
        return formats.from_bits(word << tirx.const(16, "int32"))
    return formats.cast(value, "float32")


def fix_shape(func: PrimFunc, param: str, shape: tuple[int, ...]) -> PrimFunc:
    """Return ``func`` with the symbols in the shape of its buffer ``param`` fixed to ``shape``."""
    names = [var.name for var in func.params]
    var = func.params[names.index(param)]
    static = tirx.decl_buffer([i64(size) for size in shape], var.dtype, name=param)
    return func.specialize({var: static})


def keep_params(func: PrimFunc, names: list[str]) -> PrimFunc:
    """Return ``func`` with only the parameters called ``names``; it must not use the others."""
    kept = [var for var in func.params if var.name in names]
    assert [var.name for var in kept] == names
    return PrimFunc(kept, func.body, func.ret_type, func.attrs)
