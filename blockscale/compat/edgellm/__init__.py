"""TensorRT Edge-LLM's NVFP4 tensors and decode ops: ``bs.edgellm``.

The tensor view is in `blockscale.compat.edgellm.tensor`, its layout in `.edgellm_index`, packers in
`.edgellm_pack`, words in `.edgellm_words`, the ops in `.edgellm_ops`, their float16 arithmetic in
`.edgellm_exact`.
"""

from blockscale.compat.edgellm.ops import decode_down, decode_moe, decode_up
from blockscale.compat.edgellm.pack import (
    decode_scales,
    dequantize_weight,
    pack_weight,
    quantize_activation,
    scale_values,
    unpack_weight,
)
from blockscale.compat.edgellm.tensor import Nvfp4Tensor
from blockscale.compat.edgellm.words import code_word, scale_word

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
