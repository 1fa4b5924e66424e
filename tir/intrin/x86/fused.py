"""x86 intrinsics of the fused ops: the sum of the squares of 16 elements.

`blockscale.tir.intrin.x86.width` says what a *desc* and an *impl* are.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.tir.common import i64
from blockscale.tir.fused import norm_quantize
from blockscale.tir.intrin.operands import Operand, describe, intrinsic

_GROUP = norm_quantize.GROUP


def _square(h: PrimExpr, lanes: int) -> PrimExpr:
    """Squares that no later sum is fused with: LLVM would make one operation of both."""
    vector = f"float32x{lanes}"
    return T.call_llvm_pure_intrin(vector, f"llvm.arithmetic.fence.v{lanes}f32", h * h)


def _fold(values: PrimExpr, lanes: int) -> PrimExpr:
    """Sum of the lower and the upper half of ``values``; a number for two lanes."""
    half = lanes // 2
    low, high = ([tirx.const(start + i, "int32") for i in range(half)] for start in (0, half))
    return tirx.Shuffle([values], low) + tirx.Shuffle([values], high)


@intrinsic
def square_sum(block: int) -> str:
    """Register and name: the sums of the squares of each 16 of ``block`` neighbours, in order."""
    size, groups, group = i64(block), i64(block // _GROUP), i64(_GROUP)
    one, half = block == _GROUP, _GROUP // 2
    operands = (
        Operand("H", (size,), "float32"),
        Operand("S", (groups,), "float32", "w"),
    )

    @T.inline
    def desc(H, S):
        for g in range(groups):
            with T.sblock("square_sum"):
                if one:  # TVM binds no variable to a loop of one iteration
                    S[i64(0)] = norm_quantize.square_sum(lambda j: H[i64(j)])
                else:
                    vg = T.axis.spatial(groups, g)
                    S[vg] = norm_quantize.square_sum(lambda j: H[vg * group + i64(j)])

    def summed(H: tirx.Buffer, g: PrimExpr) -> PrimExpr:
        low, high = (H.vload([g * group + i64(start)], f"float32x{half}") for start in (0, half))
        values, lanes = _square(low, half) + _square(high, half), half
        while lanes > 1:
            values, lanes = _fold(values, lanes), lanes // 2
        return values

    @T.inline
    def impl(H, S):
        for g in T.unroll(groups):
            S[g] = summed(H, g)

    return describe(f"square_sum_{block}", operands, desc, impl)
