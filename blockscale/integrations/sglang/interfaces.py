"""What this room uses of SGLang, in one place; a release that lacks any of it is refused by name.

Names that are no part of its documented interface are marked; another release may move them.
"""

from __future__ import annotations

from typing import Any

from blockscale.integrations.interfaces import Engine

NEWEST = "0.5.23"
"""The release that is tested; see docs/engines.md."""

_ENGINE = Engine(
    "sglang",
    NEWEST,
    f"pip install 'sglang=={NEWEST}', or leave this plugin out: SGLANG_PLUGINS=none",
)
_of = _ENGINE.of

_MOE = "sglang.srt.layers.moe"
_QUANT = "sglang.srt.layers.quantization"
_SCHEMES = f"{_QUANT}.compressed_tensors.schemes"

_ENGINE.module("sglang")

QUANTIZATION_METHODS: dict[str, Any] = _of(_QUANT, "QUANTIZATION_METHODS")
# Not documented: the same of CPUs with AMX.
CPU_QUANTIZATION_METHODS: dict[str, Any] = _of(_QUANT, "CPU_QUANTIZATION_METHODS")

MoeRunner = _of(f"{_MOE}.moe_runner.runner", "MoeRunner")
DispatchMoeRunnerCore = _of(f"{_MOE}.moe_runner.base", "DispatchMoeRunnerCore")
MoeQuantInfo = _of(f"{_MOE}.moe_runner.base", "MoeQuantInfo")
register_moe_runner_core = _of(f"{_MOE}.moe_runner.runner", "register_moe_runner_core")
resolve_moe_runner_backend = _of(f"{_MOE}.utils", "resolve_moe_runner_backend")
get_moe_runner_backend = _of(f"{_MOE}.utils", "get_moe_runner_backend")
get_moe_a2a_backend = _of(f"{_MOE}.utils", "get_moe_a2a_backend")
StandardCombineInput = _of(f"{_MOE}.token_dispatcher.standard", "StandardCombineInput")
# Not documented: ids and weights of a token in one word, which some models make.
unpack_topk = _of(f"{_MOE}.moe_runner.marlin", "_fused_unpack_packed_topk")

CONFIGS: dict[str, Any] = {
    "modelopt_fp4": _of(f"{_QUANT}.modelopt_quant", "ModelOptFp4Config"),
    "modelopt_mixed": _of(f"{_QUANT}.modelopt_quant", "ModelOptMixedPrecisionConfig"),
    "compressed-tensors": _of(
        f"{_QUANT}.compressed_tensors.compressed_tensors", "CompressedTensorsConfig"
    ),
    "mxfp4": _of(f"{_QUANT}.mxfp4", "Mxfp4Config"),
}
"""Configurations by the names that SGLang has for them; each gives a layer its method."""

METHODS: dict[type, str] = {
    _of(f"{_QUANT}.modelopt_quant", "ModelOptFp4LinearMethod"): "linear-modelopt",
    _of(f"{_QUANT}.modelopt_quant", "ModelOptNvFp4A16LinearMethod"): "linear-modelopt",
    _of(_SCHEMES, "CompressedTensorsW4A16Fp4"): "linear-ct-nvfp4",
    _of(_SCHEMES, "CompressedTensorsW4A4Fp4"): "linear-ct-nvfp4",
    _of(_SCHEMES, "CompressedTensorsWNA16"): "linear-ct-int4",
    _of(f"{_QUANT}.modelopt_quant", "ModelOptNvFp4FusedMoEMethod"): "modelopt",
    _of(_SCHEMES, "CompressedTensorsW4A16Nvfp4MoE"): "ct-nvfp4",
    _of(_SCHEMES, "CompressedTensorsW4A4Nvfp4MoE"): "ct-nvfp4",
    _of(f"{_QUANT}.mxfp4", "Mxfp4MoEMethod"): "sglang-gpt-oss",
}
"""Methods, and schemes of compressed-tensors, by what their parameters look like."""
