"""What a kernel is called, what it takes and returns: one frozen dataclass per op.

A spec is the identity of an exported function.  It is valid by construction, knows its symbol
name, and lists its parameters in the order of the exported function.  This module imports neither
tvm nor torch, so that the process that only *calls* kernels can name and check them;
`blockscale.tir` turns a spec into TensorIR.
"""

from __future__ import annotations

from blockscale.specs.edgellm import EdgeDown, EdgeUp, register_edgellm
from blockscale.specs.fused import ActQuantize, NormQuantize, register_fused
from blockscale.specs.gemm import (
    GroupedMmFp4,
    Linear,
    MmFp4,
    register_gemm,
    register_linear,
)
from blockscale.specs.int4 import Int4Dequantize, Int4Mm, register_int4
from blockscale.specs.layout import Relayout, register_layout
from blockscale.specs.moe import FusedMoe, MoeRoute, register_moe
from blockscale.specs.quant import (
    Dequantize,
    Quantize,
    ScaleSweep,
    Swizzle,
    Unswizzle,
    register_quant,
)
from blockscale.specs.spec import (
    DTYPE_SUFFIX,
    NAME_EXAMPLES,
    SPECS,
    Layout,
    Param,
    Rounding,
    Spec,
)

__all__ = [
    "DTYPE_SUFFIX",
    "NAME_EXAMPLES",
    "SPECS",
    "ActQuantize",
    "Dequantize",
    "EdgeDown",
    "EdgeUp",
    "FusedMoe",
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
register_linear()
register_quant()
register_fused()
register_gemm()
register_moe()
register_edgellm()
register_layout()
register_int4()
