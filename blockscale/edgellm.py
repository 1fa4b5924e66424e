"""TensorRT Edge-LLM's NVFP4 tensors and decode ops: ``bs.edgellm``.

The tensor view is in `blockscale.edgellm_tensor`, its layout in `.edgellm_index`, packers in
`.edgellm_pack`, the ops in `.edgellm_ops` and their float16 arithmetic in `.edgellm_exact`.
"""

from blockscale.edgellm_ops import decode_down, decode_moe, decode_up
from blockscale.edgellm_pack import (
    decode_scales,
    dequantize_weight,
    pack_weight,
    quantize_activation,
    scale_values,
    unpack_weight,
)
from blockscale.edgellm_tensor import Nvfp4Tensor

__all__ = [
    "Nvfp4Tensor",
    "decode_down",
    "decode_moe",
    "decode_scales",
    "decode_up",
    "dequantize_weight",
    "pack_weight",
    "quantize_activation",
    "scale_values",
    "unpack_weight",
]
