"""What a kernel is called, what it takes and returns: one frozen dataclass per op.

A spec is the identity of an exported function.  It is valid by construction, knows its symbol
name, and lists its parameters in the order of the exported function.  This module imports neither
tvm nor torch, so that the process that only *calls* kernels can name and check them;
`blockscale.tir` turns a spec into TensorIR.
"""

from __future__ import annotations

from blockscale.specs.edgellm import EdgeDown, EdgeUp
from blockscale.specs.exchange import EpCombine, EpDispatch, EpReduce
from blockscale.specs.fused import ActQuantize, NormQuantize
from blockscale.specs.gemm import GroupedMmActFp4Quant, GroupedMmFp4, Linear, MmFp4
from blockscale.specs.int4 import Int4Dequantize, Int4Mm
from blockscale.specs.layout import Relayout
from blockscale.specs.moe import FusedMoe, MoeRoute
from blockscale.specs.quant import Dequantize, Quantize, ScaleSweep, Swizzle, Unswizzle
from blockscale.specs.spec import (
    DTYPE_SUFFIX,
    NAME_EXAMPLES,
    SPECS,
    Layout,
    Param,
    Rounding,
    Spec,
    register,
)

__all__ = [
    "DTYPE_SUFFIX",
    "NAME_EXAMPLES",
    "SPECS",
    "ActQuantize",
    "Dequantize",
    "EdgeDown",
    "EdgeUp",
    "EpCombine",
    "EpDispatch",
    "EpReduce",
    "FusedMoe",
    "GroupedMmActFp4Quant",
    "GroupedMmFp4",
    "Int4Dequantize",
    "Int4Mm",
    "Layout",
    "Linear",
    "MmFp4",
    "MoeRoute",
    "NormQuantize",
    "Param",
    "Quantize",
    "Relayout",
    "Rounding",
    "ScaleSweep",
    "Spec",
    "Swizzle",
    "Unswizzle",
]

# The order of the list of names, and of trying them.
register(Linear, Quantize, Dequantize, Swizzle, Unswizzle, ScaleSweep, NormQuantize, ActQuantize)
register(MmFp4, GroupedMmFp4, GroupedMmActFp4Quant, FusedMoe, MoeRoute, EdgeUp, EdgeDown, Relayout)
register(Int4Mm, Int4Dequantize, EpDispatch, EpCombine, EpReduce)
