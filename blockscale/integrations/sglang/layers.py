"""Layers of SGLang: methods that it chose go on with our weights and kernels after loading.

A configuration gives each layer a method, which allocates the parameters of the checkpoint; of
compressed-tensors, a scheme in the layer does.  Where a kernel of ours fits, that object gets a
class of the same name that ends in it.  Experts run in SGLang's `MoeRunner`, on the runner core
that is registered under `BACKEND`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from blockscale.integrations import layers, stored_experts
from blockscale.integrations.layers import Activation
from blockscale.integrations.sglang.interfaces import (
    CONFIGS,
    CPU_QUANTIZATION_METHODS,
    METHODS,
    QUANTIZATION_METHODS,
    DispatchMoeRunnerCore,
    MoeQuantInfo,
    MoeRunner,
    StandardCombineInput,
    get_moe_a2a_backend,
    get_moe_runner_backend,
    register_moe_runner_core,
    resolve_moe_runner_backend,
    unpack_topk,
)
from blockscale.ops.linear.weights import prepare_linear_weights

Tensor = torch.Tensor

BACKEND = "blockscale"
"""Name of the runner of experts."""

LEAST, BELOW = (8, 0), (10, 0)
"""Compute capabilities: from A100's; below those whose tensor cores multiply 4-bit codes, on which
SGLang has kernels for these."""

_LINEAR = "linear-"


def fits_device() -> bool:
    """Return whether kernels of ours are taken here: on these GPUs, and where there is none."""
    if not torch.cuda.is_available():
        return True
    return LEAST <= torch.cuda.get_device_capability() < BELOW


# ---- Linear layers ------------------------------------------------------------------------------


def _one(scales: Tensor) -> Tensor:
    """Return the global scale [1] of a layer's parts, which SGLang wants to be the same."""
    return scales.float().max().reshape(1)


def _take_linear(layer: Any, kind: str) -> None:
    """Convert the weight of a layer, and release what it was made of."""
    if kind == "linear-ct-int4":
        points = getattr(layer, "weight_zero_point", None)
        weights = layers.prepared_int4(
            layer,
            layers.code_bytes(layer.weight_packed.data, 1),
            layer.weight_scale.data,
            None if points is None else layers.unpacked(points.data, 0),
            layer.weight_scale.dtype,
        )
        names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
        layers.hold_linear(layer, weights, names)
        return
    if kind == "linear-modelopt":
        codes, factor = layer.weight, _one(layer.weight_scale_2.data)
    else:  # compressed-tensors divides by its global scale
        codes, factor = layer.weight_packed, 1.0 / _one(layer.weight_global_scale.data)
    weights = prepare_linear_weights(
        *(codes.data, layer.weight_scale.data),
        global_scale=factor,
        bias=layers.bias_of(layer),
    )
    ends = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale")
    layers.hold_linear(layer, weights, (*ends, "input_scale", "input_global_scale"))


class _Linear:
    """Beside a method or a scheme of SGLang for linear layers."""

    kind: str

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Convert the weight."""
        _take_linear(layer, self.kind)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return [..., N] of x [..., K]."""
        held: layers.HeldLinear = getattr(layer, layers.HELD)
        return held.product(x, bias)

    apply_weights = apply  # as schemes call it


# ---- Experts ------------------------------------------------------------------------------------


@dataclass
class BlockscaleQuantInfo(MoeQuantInfo):
    """What the runner core needs besides tokens: the module with the weights."""

    held: Any


class BlockscaleRunnerCore(DispatchMoeRunnerCore):
    """Both GEMMs of all experts, and the weighted sum, in one call of `blockscale.fused_moe`."""

    @property
    def runner_backend(self) -> Any:
        """Return the registered name."""
        return resolve_moe_runner_backend(BACKEND)

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
    ) -> Any:
        """Return the sums [T, H]; ids outside of this rank's experts are left out."""
        x, chosen = dispatch_output.hidden_states, dispatch_output.topk_output
        if hasattr(chosen, "topk_weights"):
            ids, factors = chosen.topk_ids, chosen.topk_weights.float()
        else:
            ids, factors = unpack_topk(chosen.packed_topk_ids)
            factors = factors.float()
        if runner_config.apply_router_weight_on_input:
            x = (x.float() * factors).to(x.dtype)
            factors = torch.ones_like(factors)
        if runner_config.routed_scaling_factor is not None:
            factors = factors * runner_config.routed_scaling_factor
        made = quant_info.held(x, topk_ids=ids, topk_weights=factors)
        return StandardCombineInput(hidden_states=made)


def activation_of(config: Any) -> Activation | None:
    """Return what is between the GEMMs of a `MoeRunnerConfig`; None: no kernel has it."""
    limit = config.gemm1_clamp_limit
    if config.activation == "silu" and config.is_gated:
        if config.gemm1_alpha is not None:  # gate * sigmoid(alpha gate) * (up + 1)
            return None if limit is None else Activation("swiglu_oai", config.gemm1_alpha, limit)
        return Activation("swiglu", 1.0, config.swiglu_limit if limit is None else limit)
    if config.activation == "relu2" and not config.is_gated:
        return Activation("relu2")
    return None


class _Experts:
    """Beside a method or a scheme of SGLang for experts."""

    kind: str
    load_up_proj_weight_first = False
    # Of methods that pad for a kernel of SGLang's:
    enable_flashinfer_trtllm_moe = use_flashinfer_trtllm_weight_layout = False
    use_marlin = use_flashinfer = use_triton_kernels = False

    def create_moe_runner(self: Any, layer: Any, moe_runner_config: Any) -> None:
        """Make the runner that `apply` calls."""
        self.moe_runner_config = moe_runner_config
        self.runner = MoeRunner(resolve_moe_runner_backend(BACKEND), moe_runner_config)

    def get_moe_runner_backend(self: Any, layer: Any) -> Any:
        """Return the backend of the runner."""
        return self.runner.runner_backend

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        """Convert the weights, and release what they were made of."""
        config = self.moe_runner_config
        act = activation_of(config)
        assert act is not None
        alternating = self.kind == "sglang-gpt-oss" and config.gate_up_interleaved
        dtype = config.params_dtype or torch.get_default_dtype()
        stored_experts.take(layer, self.kind, act, dtype, alternating=alternating)

    def apply(self: Any, layer: Any, dispatch_output: Any) -> Any:
        """Return what the dispatcher combines."""
        info = BlockscaleQuantInfo(getattr(layer, layers.HELD))
        return self.runner.run(dispatch_output, info)

    apply_weights = apply  # as schemes call it


def fits_experts(layer: Any, kind: str) -> bool:
    """Return whether a layer of experts, whose parameters are ``kind``, has a kernel here."""
    config = layer.moe_runner_config
    backend = get_moe_runner_backend()
    free = backend.is_auto() or backend.is_marlin()  # SGLang's own choice on these GPUs
    block = 16 if stored_experts.STORED[kind].fmt == "nvfp4" else 32
    sizes = config.hidden_size, config.intermediate_size_per_partition
    return (
        free
        and get_moe_a2a_backend().is_none()
        and not config.no_combine
        and activation_of(config) is not None
        and all(size % block == 0 for size in sizes)
    )


def _fits_linear(holder: Any, kind: str) -> bool:
    if kind == "linear-ct-int4":
        group = holder.group_size
        return holder.pack_factor == 8 and not holder.has_g_idx and group > 0 and group % 32 == 0
    config = getattr(holder, "quant_config", None)
    return not getattr(config, "is_awq", False) and getattr(config, "group_size", 16) == 16


def adopt(method: Any, layer: Any) -> Any:
    """Return the method; if our kernels take the layer, it, or its scheme, is of another class."""
    scheme = getattr(layer, "scheme", None)
    holder = method if type(method) in METHODS else scheme
    kind = METHODS.get(type(holder))
    if kind is None or not fits_device():
        return method
    linear = kind.startswith(_LINEAR)
    if _fits_linear(holder, kind) if linear else fits_experts(layer, kind):
        ours: Any = _Linear if linear else _Experts
        cls: Any = type(holder)
        holder.__class__ = layers.ending_in(cls, ours, kind)
        for name in vars(ours):  # flags of an instance hide those of its class
            vars(holder).pop(name, None)
    return method


@cache
def extended(base: type) -> type:
    """Return a configuration of SGLang whose methods are looked at here."""

    def get_quant_method(self: Any, layer: Any, prefix: str) -> Any:
        return adopt(base.get_quant_method(self, layer, prefix), layer)  # type: ignore[attr-defined]

    return type(base.__name__, (base,), {"get_quant_method": get_quant_method})


def register() -> None:
    """Put the extended configurations in the place of SGLang's, once for all calls."""
    for name, base in CONFIGS.items():
        for known in (QUANTIZATION_METHODS, CPU_QUANTIZATION_METHODS):
            if known.get(name) is base:
                known[name] = extended(base)
    try:
        resolve_moe_runner_backend(BACKEND)
    except ValueError:
        register_moe_runner_core(BACKEND, BlockscaleRunnerCore)
