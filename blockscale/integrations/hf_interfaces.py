"""What this room uses of transformers, in one place, and what is said where that is missing.

Names that are no part of its documented interface are marked; another release may move them.
"""

from __future__ import annotations

from typing import Any

from blockscale.base.words import install
from blockscale.integrations.interfaces import Engine

OLDEST, NEWEST = "5.17", "5.23"
"""The releases that are tested; see docs/engines.md."""

_ENGINE = Engine("transformers", f"{OLDEST} and {NEWEST}", install("transformers"))
_of = _ENGINE.of

_ENGINE.module("transformers")

HfQuantizer = _of("transformers.quantizers.base", "HfQuantizer")
QuantizationConfigMixin = _of("transformers.utils.quantization_config", "QuantizationConfigMixin")
register_quantizer = _of("transformers.quantizers.auto", "register_quantizer")
register_quantization_config = _of("transformers.quantizers.auto", "register_quantization_config")
PreTrainedConfig = _of("transformers.configuration_utils", "PreTrainedConfig")

AttentionInterface = _of("transformers", "AttentionInterface")
AttentionMaskInterface = _of("transformers", "AttentionMaskInterface")

# Not documented: what the names "sdpa" of both stand for.
sdpa_attention_forward = _of("transformers.integrations.sdpa_attention", "sdpa_attention_forward")
sdpa_mask = _of("transformers.masking_utils", "sdpa_mask")
# Not documented: the table that registering fills, which refuses a name it has already.
CONFIGS: dict[str, Any] = _of("transformers.quantizers.auto", "AUTO_QUANTIZATION_CONFIG_MAPPING")
# Not documented: how names in a checkpoint become names in a model, and back.
WeightConverter = _of("transformers.core_model_loading", "WeightConverter")
WeightRenaming = _of("transformers.core_model_loading", "WeightRenaming")
rename_source_key = _of("transformers.core_model_loading", "rename_source_key")
revert_weight_conversion = _of("transformers.core_model_loading", "revert_weight_conversion")
get_model_conversion_mapping = _of(
    "transformers.conversion_mapping", "get_model_conversion_mapping"
)
# Not documented, and only looked for: what marks a class of experts.
_of("transformers.integrations.moe", "use_experts_implementation")
