"""What this room uses of vLLM, in one place; a release that lacks any of it is refused by name.

Names that are no part of its documented interface are marked; another release may move them.
"""

from __future__ import annotations

from typing import Any

from blockscale.integrations.interfaces import Engine

OLDEST, NEWEST = "0.32", "0.33"
"""The releases that are tested; see docs/engines.md."""

_ENGINE = Engine(
    "vllm",
    f"{OLDEST} and {NEWEST}",
    f"pip install 'vllm>={OLDEST},<0.34', or leave this plugin out: VLLM_PLUGINS=''",
)
_of = _ENGINE.of

_LINEAR = "vllm.model_executor.kernels.linear"
_MOE = "vllm.model_executor.layers.fused_moe"
_QUANT = "vllm.model_executor.layers.quantization"
_TENSORS = f"{_QUANT}.compressed_tensors"

_ENGINE.module("vllm")

current_platform = _of("vllm.platforms", "current_platform")
PlatformEnum = _of("vllm.platforms", "PlatformEnum")
scalar_types = _of("vllm.scalar_type", "scalar_types")

# ---- Linear layers ------------------------------------------------------------------------------

LINEAR = _ENGINE.module(_LINEAR)
register_linear_kernel = _of(_LINEAR, "register_linear_kernel")
NvFp4LinearKernel = _of(f"{_LINEAR}.nvfp4.base", "NvFp4LinearKernel")
NvFp4LinearLayerConfig = _of(f"{_LINEAR}.nvfp4.base", "NvFp4LinearLayerConfig")
MxFp4LinearKernel = _of(f"{_LINEAR}.mxfp4.base", "MxFp4LinearKernel")
MPLinearKernel = _of(_LINEAR, "MPLinearKernel")
# Not documented: which activations an MXFP4 checkpoint asks for.
kMxfp4Dynamic = _of(f"{_QUANT}.utils.quant_utils", "kMxfp4Dynamic")

# Not documented: the lists that registering adds to, at their end; the first that fits is taken.
LISTS: dict[str, Any] = {
    "nvfp4": _of(_LINEAR, "_POSSIBLE_NVFP4_KERNELS"),
    "mxfp4": _of(_LINEAR, "_POSSIBLE_MXFP4_KERNELS"),
    "mp": _of(_LINEAR, "_POSSIBLE_KERNELS"),
}
# Not documented: what takes Marlin for weight-only NVFP4, whatever is registered; the modules that
# call it; and what the user asks for.
INIT_NVFP4 = "init_nvfp4_linear_kernel"
INIT_NVFP4_USERS = [
    LINEAR,
    _ENGINE.module(f"{_QUANT}.modelopt"),
    _ENGINE.module(f"{_TENSORS}.schemes.compressed_tensors_w4a4_nvfp4"),
]
for _user in INIT_NVFP4_USERS:
    _of(_user.__name__, INIT_NVFP4)
linear_backend = _of(_LINEAR, "_get_linear_backend")
envs = _ENGINE.module("vllm.envs")

# ---- Experts ------------------------------------------------------------------------------------

mk = _ENGINE.module(f"{_MOE}.modular_kernel")
FusedMoEExpertsModular = _of(f"{_MOE}.modular_kernel", "FusedMoEExpertsModular")
FusedMoEKernel = _of(f"{_MOE}.modular_kernel", "FusedMoEKernel")
FusedMoEMethodBase = _of(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase")
MoEActivation = _of(f"{_MOE}.activation", "MoEActivation")
TopKWeightAndReduceNoOP = _of(f"{_MOE}.topk_weight_and_reduce", "TopKWeightAndReduceNoOP")
UNQUANTIZED = _of(f"{_MOE}.config", "FUSED_MOE_UNQUANTIZED_CONFIG")
make_prepare_finalize = _of(f"{_MOE}.all2all_utils", "maybe_make_prepare_finalize")
register_quantization_config = _of(_QUANT, "register_quantization_config")

_GPTQ = _of(f"{_QUANT}.auto_gptq", "AutoGPTQConfig")
_AWQ = _of(f"{_QUANT}.auto_awq", "AutoAWQConfig")

CONFIGS: dict[str, Any] = {
    "modelopt_fp4": _of(f"{_QUANT}.modelopt", "ModelOptNvFp4Config"),
    "modelopt_mixed": _of(f"{_QUANT}.modelopt", "ModelOptMixedPrecisionConfig"),
    "compressed-tensors": _of(f"{_TENSORS}.compressed_tensors", "CompressedTensorsConfig"),
    "mxfp4": _of(f"{_QUANT}.mxfp4", "Mxfp4Config"),
    "gpt_oss_mxfp4": _of(f"{_QUANT}.mxfp4", "GptOssMxfp4Config"),
    **dict.fromkeys(("auto_gptq", "gptq", "gptq_marlin"), _GPTQ),
    **dict.fromkeys(("auto_awq", "awq", "awq_marlin"), _AWQ),
}
"""Configurations by the names that vLLM has for them; each gives a layer its method."""

_CT_MOE = f"{_TENSORS}.compressed_tensors_moe"
METHODS: dict[str, Any] = {
    "modelopt": _of(f"{_QUANT}.modelopt", "ModelOptNvFp4FusedMoE"),
    "ct-nvfp4": _of(
        f"{_CT_MOE}.compressed_tensors_moe_w4a4_nvfp4", "CompressedTensorsW4A4Nvfp4MoEMethod"
    ),
    "ct-mxfp4": _of(
        f"{_CT_MOE}.compressed_tensors_moe_w4a4_mxfp4", "CompressedTensorsW4A4Mxfp4MoEMethod"
    ),
    "ct-int4": _of(f"{_CT_MOE}.compressed_tensors_moe_wna16", "CompressedTensorsWNA16MoEMethod"),
    "gpt-oss": _of(f"{_QUANT}.mxfp4", "GptOssMxfp4MoEMethod"),
    "gptq": _of(f"{_QUANT}.auto_gptq", "AutoGPTQMoEMethod"),
    "awq": _of(f"{_QUANT}.auto_awq", "AutoAWQMoEMethod"),
}
"""Methods of experts by what their parameters look like."""
