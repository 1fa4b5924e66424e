"""INT4 and INT8 weights as TensorRT-LLM's mixed GEMMs read them: ``bs.int4``.

Layouts, scales and numbers are in `int4.layout`, weights for our kernels in `int4.weight`.
"""

from blockscale.ops.int4.layout import (
    ARCHITECTURES,
    WeightLayout,
    dequantize,
    interleave_scales,
    layout_of,
    preprocess_weights,
    uninterleave_scales,
    unprocess_weights,
    zeros_of_points,
)
from blockscale.ops.int4.products import grouped_mm, linear
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
