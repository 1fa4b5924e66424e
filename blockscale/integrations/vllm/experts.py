"""Experts of vLLM: a method that vLLM chose for a layer goes on with our weights and kernels.

vLLM picks the kernels of experts out of a closed list, so there is nothing to register them with.
What is registered are its own configurations, each extended by a look at the method that it gives a
layer of experts: where our kernels fit, the method stays as it is for loading, by which class names
are known, and after loading it runs `BlockscaleExperts` in vLLM's modular kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from blockscale.integrations import layers, stored_experts
from blockscale.integrations.layers import Activation
from blockscale.integrations.vllm.interfaces import (
    CONFIGS,
    METHODS,
    UNQUANTIZED,
    FusedMoEExpertsModular,
    FusedMoEKernel,
    FusedMoEMethodBase,
    MoEActivation,
    TopKWeightAndReduceNoOP,
    envs,
    make_prepare_finalize,
    mk,
    register_quantization_config,
)
from blockscale.integrations.vllm.linear import fits_device
from blockscale.specs.moe import ALPHA, LIMIT

Tensor = torch.Tensor

_BLOCKS = {"nvfp4": 16, "mxfp4": 32, "int4": 32}


def activation_of(config: Any) -> Activation | None:
    """Return what is between the GEMMs of a `FusedMoEConfig`; None: no kernel has it."""
    alpha, beta, limit = config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit
    kind = config.activation
    if kind == MoEActivation.SILU and not beta:
        return Activation("swiglu", 1.0 if alpha is None else alpha, limit)
    if kind == MoEActivation.SWIGLUOAI:  # vLLM's kernel has these constants
        return Activation("swiglu_oai", ALPHA["swiglu_oai"], LIMIT["swiglu_oai"])
    if kind == MoEActivation.SWIGLUOAI_UNINTERLEAVE and beta in (0, 1) and limit is not None:
        name = "swiglu_oai" if beta else "swiglu"
        return Activation(name, 1.0 if alpha is None else alpha, limit)
    if kind == MoEActivation.GELU_TANH:
        return Activation("gelu_tanh")
    if kind == MoEActivation.RELU2_NO_MUL:
        return Activation("relu2")
    return None


class BlockscaleExperts(FusedMoEExpertsModular):
    """Both GEMMs of all experts, and the weighted sum, in one call of `blockscale.fused_moe`."""

    held: Any = None
    """The module with the weights."""

    @staticmethod
    def activation_format() -> Any:
        """Return that rows are those of tokens."""
        return mk.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Activations stay 16-bit."""
        return True

    @staticmethod
    def _supports_current_device() -> bool:
        return fits_device()[0]

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True  # `fits` looks at the method instead

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True  # `activation_of` looks at it, with its constants

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.enable_eplb

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Return that tokens are summed up already."""
        return TopKWeightAndReduceNoOP()

    def moe_problem_size(
        self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor
    ) -> tuple[int, int, int, int, int]:
        """Return experts, tokens, rows of w13, hidden size and top k."""
        weights = self.held.weights
        return weights.experts, a1.size(0), weights.rows, a1.size(-1), topk_ids.size(1)

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return shapes of workspaces, of which none is needed, and of the result."""
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the sums [T, H] into ``output``; tokens of others' experts are left out."""
        if expert_map is not None:  # -1: an expert of another rank; ids may be -1 already
            found = expert_map[topk_ids.clamp(min=0).long()]
            topk_ids = torch.where(topk_ids < 0, topk_ids, found.to(topk_ids.dtype))
        factors = topk_weights.float()
        if apply_router_weight_on_input:
            factors = torch.ones_like(factors)
        made = self.held(hidden_states, topk_ids=topk_ids, topk_weights=factors)
        output.copy_(made)


class _Adopted:
    """Beside a method of vLLM for experts: what it does once the weights are loaded."""

    kind: str

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        """Return the sizes, without what a kernel of vLLM's would pad them to."""
        sizes: tuple[int, int] = FusedMoEMethodBase.maybe_roundup_sizes(
            self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
        )
        return sizes

    @property
    def skip_forward_padding(self) -> bool:
        """Whether rows need no padding; see `has_unpadded_output`."""
        return False

    @property
    def has_unpadded_output(self) -> bool:
        """Whether rows of the result are shorter than those of x."""
        return False

    @property
    def supports_eplb(self) -> bool:
        """Whether experts may be moved between GPUs."""
        return False

    @property
    def is_monolithic(self) -> bool:
        """Whether the kernel chooses experts itself."""
        return False

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Return that no operand is quantised on the way to the kernel."""
        return UNQUANTIZED

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        """Convert the weights, release what they were made of, and build vLLM's kernel."""
        for bias in ("w13_bias", "w2_bias"):  # GPTQ's are there whether or not they were loaded
            if self.kind == "gptq" and bias not in layer._loaded_expert_biases:
                layers.release(layer, [bias])
        act = activation_of(self.moe)
        assert act is not None
        alternating = self.moe.activation == MoEActivation.SWIGLUOAI
        stored_experts.take(layer, self.kind, act, self.moe.in_dtype, alternating=alternating)
        self.moe_quant_config = UNQUANTIZED
        experts = BlockscaleExperts(moe_config=self.moe, quant_config=UNQUANTIZED)
        experts.held = getattr(layer, layers.HELD)
        between = make_prepare_finalize(
            moe=self.moe,
            quant_config=UNQUANTIZED,
            routing_tables=layer._expert_routing_tables(),
            allow_new_interface=True,
        )
        self.moe_kernel = FusedMoEKernel(between, experts)

    def apply(
        self: Any,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Return [T, H] of x [T, H]."""
        held = getattr(layer, layers.HELD)
        made: Tensor = self.moe_kernel.apply(
            *(x, held.w13, held.w2, topk_weights, topk_ids),
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
        return made


class Fit(NamedTuple):
    """Whether a layer of experts runs on our kernels."""

    kind: str | None
    reason: str = ""


def fits(method: Any) -> Fit:
    """Return how the experts of a method are stored if our kernels take them, else why not."""
    known = [kind for kind, cls in METHODS.items() if type(method) is cls]
    if not known:
        return Fit(None, f"{type(method).__name__} has no kernel")
    kind, config = known[0], method.moe
    fmt = stored_experts.STORED[kind].fmt
    if config.moe_backend != "auto":
        return Fit(None, f"moe_backend={config.moe_backend} is asked for")
    if BlockscaleExperts.__name__ in envs.VLLM_DISABLED_KERNELS:
        return Fit(None, "VLLM_DISABLED_KERNELS names it")
    batched = config.moe_parallel_config.use_batched_activation_format
    shape = mk.FusedMoEActivationFormat
    fit, reason = BlockscaleExperts.is_supported_config(
        BlockscaleExperts, config, None, None, shape.BatchedExperts if batched else shape.Standard
    )
    if not fit:
        return Fit(None, reason)
    if activation_of(config) is None:
        return Fit(None, f"activation {config.activation} has no kernel")
    if fmt == "int4" and not _int4_fits(kind, method):
        why = "only INT4 in groups of 32, 64 or 128 in order has a kernel, GPTQ without points"
        return Fit(None, why)
    for size in (config.hidden_dim, config.intermediate_size_per_partition):
        if size % _BLOCKS[fmt]:
            return Fit(None, f"{size} is not a multiple of {_BLOCKS[fmt]}")
    return Fit(kind)


def _int4_fits(kind: str, method: Any) -> bool:
    if kind == "ct-int4":
        plain = method.num_bits == 4 and method.actorder != "group"
        return plain and method.group_size in (32, 64, 128)
    config = method.quant_config
    bits = config.weight_bits if kind == "awq" else config.quant_type.size_bits
    plain = config.zero_point if kind == "awq" else config.is_sym and not config.desc_act
    return bits == 4 and config.group_size in (32, 64, 128) and bool(plain)


def adopt(method: Any) -> Any:
    """Return the method; if our kernels take its experts, it is of a class that runs them."""
    if isinstance(method, FusedMoEMethodBase):
        kind = fits(method).kind
        if kind is not None:
            cls: Any = type(method)
            method.__class__ = layers.ending_in(cls, _Adopted, kind)
            method.use_global_sf = False
    return method


@cache
def _extended(base: type) -> type:
    """Return a configuration of vLLM whose methods for experts are looked at here."""

    def get_quant_method(self: Any, layer: Any, prefix: str) -> Any:
        return adopt(base.get_quant_method(self, layer, prefix))  # type: ignore[attr-defined]

    return type(
        base.__name__, (base,), {"get_quant_method": get_quant_method, "__module__": __name__}
    )


EXTENDED = {name: _extended(base) for name, base in CONFIGS.items()}
globals().update({made.__name__: made for made in EXTENDED.values()})  # vLLM pickles configurations


def register() -> None:
    """Let vLLM find the extended configurations by the names of its own."""
    for name, made in EXTENDED.items():
        register_quantization_config(name)(made)
