"""INT4 and INT8 weights as TensorRT-LLM's mixed GEMMs read them: ``bs.int4``.

The byte layout is in `blockscale.int4_layout`, scales and numbers in `blockscale.int4_values`.
"""

from blockscale.int4_layout import (
    ARCHITECTURES,
    WeightLayout,
    layout_of,
    preprocess_weights,
    unprocess_weights,
)
from blockscale.int4_ops import grouped_mm, linear
from blockscale.int4_values import (
    dequantize,
    interleave_scales,
    uninterleave_scales,
    zeros_of_points,
)
from blockscale.int4_weight import Int4Weight, prepare

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
