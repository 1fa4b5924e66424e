"""Hugging Face transformers on 4-bit weights: importing this module is all that is needed.

``import blockscale.integrations.transformers``; from then on `from_pretrained` of transformers
reads checkpoints of ModelOpt (NVFP4, MXFP4, INT4, mixed with FP8), compressed-tensors (NVFP4,
MXFP4, INT4), gpt-oss (MXFP4), AWQ and GPTQ (INT4) with `blockscale.checkpoints`, and puts
`blockscale.nn` modules into the model.  Nothing else of transformers changes; checkpoints of other
formats go to its own quantisers.  docs/engines.md has the rest.

Raises:
    ImportError: transformers is not installed, or too old.
"""

from __future__ import annotations

from blockscale.integrations import hf_attention, hf_config, hf_quantizer
from blockscale.integrations.hf_config import BlockscaleConfig
from blockscale.integrations.hf_fused import fusing
from blockscale.integrations.hf_quantizer import BlockscaleQuantizer

__all__ = ["BlockscaleConfig", "BlockscaleQuantizer", "fusing"]

hf_config.register()
hf_quantizer.register()
hf_attention.register()
