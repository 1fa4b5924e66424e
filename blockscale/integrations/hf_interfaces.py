"""What this room uses of transformers, in one place, and what is said where that is missing.

Names that are no part of its documented interface are marked; another release may move them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from blockscale.base.words import install

OLDEST, NEWEST = "5.17", "5.23"
"""The releases that are tested; see docs/engines.md."""

_EXTRA = "transformers"


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if error.name == top:
            raise ModuleNotFoundError(
                f"blockscale.integrations.transformers needs {top}, which is not installed; "
                f"{install(_EXTRA)}",
                name=top,
            ) from None
        if error.name and name.startswith(error.name):
            raise _too_old(name) from error
        raise


def _of(module: str, name: str) -> Any:
    """Return what ``module`` of transformers calls ``name``."""
    try:
        return getattr(_module(module), name)
    except AttributeError as error:
        raise _too_old(f"{module}.{name}") from error


def _too_old(missing: str) -> ImportError:
    version = _module("transformers").__version__
    return ImportError(
        f"blockscale.integrations.transformers: transformers {version} has no {missing}, but must "
        f"have what {OLDEST} and {NEWEST} have; install one of these, e.g. {install(_EXTRA)}"
    )


_module("transformers")

HfQuantizer = _of("transformers.quantizers.base", "HfQuantizer")
QuantizationConfigMixin = _of("transformers.utils.quantization_config", "QuantizationConfigMixin")
register_quantizer = _of("transformers.quantizers.auto", "register_quantizer")
register_quantization_config = _of("transformers.quantizers.auto", "register_quantization_config")
PreTrainedConfig = _of("transformers.configuration_utils", "PreTrainedConfig")

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
