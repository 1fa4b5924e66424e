"""INT4 and INT8 weights as TensorRT-LLM's mixed GEMMs read them: ``bs.int4``.

The byte layout is in `int4.layout`, scales and numbers in `int4.values`.
"""

from blockscale.ops.int4.layout import (
    ARCHITECTURES,
    WeightLayout,
    layout_of,
    preprocess_weights,
    unprocess_weights,
)
from blockscale.ops.int4.products import grouped_mm, linear
from blockscale.ops.int4.values import (
    dequantize,
    interleave_scales,
    uninterleave_scales,
    zeros_of_points,
)
from blockscale.ops.int4.weight import Int4Weight, prepare

__all__ = [
    "ARCHITECTURES",
    "Int4Weight",
    "WeightLayout",
    "dequantize",
    "grouped_mm",
    "interleave_scales",
    "layout_of",
    "linear",
    "prepare",
    "preprocess_weights",
    "uninterleave_scales",
    "unprocess_weights",
    "zeros_of_points",
]
