"""TensorRT Edge-LLM's NVFP4 tensors and decode ops: ``bs.edgellm``.

The tensor view is in `blockscale.compat.edgellm.tensor`, its layout in `base.edgellm_index`,
packers and words in `.pack`, the ops in `.ops`.
"""

from blockscale.compat.edgellm.ops import decode_down, decode_moe, decode_up
from blockscale.compat.edgellm.pack import (
    code_word,
    decode_scales,
    dequantize_weight,
    pack_weight,
    quantize_activation,
    scale_values,
    scale_word,
    unpack_weight,
)
from blockscale.compat.edgellm.tensor import Nvfp4Tensor

__all__ = [
    "Nvfp4Tensor",
    "code_word",
    "decode_down",
    "decode_moe",
    "decode_scales",
    "decode_up",
    "dequantize_weight",
    "pack_weight",
    "quantize_activation",
    "scale_values",
    "scale_word",
    "unpack_weight",
]
