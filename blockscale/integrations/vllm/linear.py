"""Linear layers of vLLM: one kernel a format, registered before vLLM's own.

vLLM asks its kernels in order, `is_supported` of the GPU and `can_implement` of the layer; it calls
`process_weights_after_loading` once, and `apply_weights` in each forward.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from blockscale.integrations import layers
from blockscale.integrations.vllm.interfaces import (
    INIT_NVFP4,
    INIT_NVFP4_USERS,
    LINEAR,
    LISTS,
    MPLinearKernel,
    MxFp4LinearKernel,
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
    PlatformEnum,
    current_platform,
    envs,
    kMxfp4Dynamic,
    linear_backend,
    register_linear_kernel,
    scalar_types,
)
from blockscale.ops.linear.weights import prepare_linear_weights

Tensor = torch.Tensor

LEAST, BELOW = 80, 100
"""Compute capabilities: from A100's; below those whose tensor cores multiply 4-bit codes, on which
vLLM has kernels for these."""

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_MARK = "_blockscale"


def fits_device(capability: int | None = None) -> tuple[bool, str | None]:
    """Return whether kernels of ours are taken here, and why not.

    ``capability``: 90 for 9.0; None: that of the current platform.
    """
    if current_platform.is_cpu():
        return True, None
    if not current_platform.is_cuda():
        return False, "blockscale has kernels for CUDA and x86-64 CPUs"
    if capability is None:
        found = current_platform.get_device_capability()
        capability = None if found is None else found.to_int()
    if capability is None or not LEAST <= capability < BELOW:
        return False, f"blockscale is taken from {LEAST} to {BELOW - 1}, this is {capability}"
    return True, None


def _apply(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    held: layers.HeldLinear = getattr(layer, layers.HELD)
    return held.product(x, bias)


class BlockscaleNvFp4LinearKernel(NvFp4LinearKernel):
    """NVFP4 weights, 16-bit activations; scales of activations in the checkpoint are ignored."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """See `fits_device`."""
        return fits_device(compute_capability)

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Return that any layer is: sizes are not known yet."""
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert the weight, and release what it was made of."""
        weights = prepare_linear_weights(
            *(layer.weight.data, layer.weight_scale.data),
            global_scale=layer.weight_global_scale.data.float().reshape(1),
            bias=layers.bias_of(layer),
        )
        names = ("weight", "weight_scale", "weight_global_scale", "alpha")
        scales = ("input_global_scale", "input_global_scale_inv")
        layers.hold_linear(layer, weights, names + scales)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return [..., N] of x [..., K]."""
        return _apply(layer, x, bias)


class BlockscaleMxFp4LinearKernel(MxFp4LinearKernel):
    """MXFP4 weights, 16-bit activations."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """See `fits_device`."""
        return fits_device(compute_capability)

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Return whether activations are MXFP4, which may stay as they are, or not quantised."""
        if config.activation_quant_key not in (None, kMxfp4Dynamic):
            return False, f"activations must be MXFP4 or plain, not {config.activation_quant_key}"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert the weight, and release what it was made of."""
        weights = prepare_linear_weights(
            *(layer.weight.data, layer.weight_scale.data),
            fmt="mxfp4",
            bias=layers.bias_of(layer),
        )
        layers.hold_linear(layer, weights, ("weight", "weight_scale"))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return [..., N] of x [..., K]."""
        return _apply(layer, x, bias)


class BlockscaleInt4LinearKernel(MPLinearKernel):
    """INT4 weights with or without zero points: compressed-tensors, AWQ, GPTQ."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least compute capability."""
        return LEAST

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Return whether format, sizes and dtype of a layer have a kernel."""
        fits, reason = fits_device()
        if not fits:
            return fits, reason
        kinds = (scalar_types.uint4b8, scalar_types.uint4)
        if c.weight_type not in kinds or c.zero_points != (c.weight_type == scalar_types.uint4):
            return False, f"weights must be INT4, with zero points as uint4, not {c.weight_type}"
        if c.has_g_idx:
            return False, "weights whose groups are in another order (act-order) have no kernel"
        dtypes = (*_SIXTEEN_BIT, torch.float32) if current_platform.is_cpu() else _SIXTEEN_BIT
        if c.act_type not in dtypes or c.out_type not in (None, c.act_type):
            return False, f"activations must be one of {dtypes}, not {c.act_type}"
        k, _ = c.partition_weight_shape
        group = k if c.group_size == -1 else c.group_size
        if group % 32 or k % group:
            return False, f"groups must be multiples of 32 that divide K={k}, not of {group}"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert the weight, and release what it was made of."""
        codes, scale = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        points = None
        if self.config.zero_points:
            zero = getattr(layer, self.w_zp_name)
            points = layers.unpacked(zero.data, zero.packed_dim)
            points = points if zero.output_dim == 0 else points.mT.contiguous()
        weights = layers.prepared_int4(
            layer,
            layers.code_bytes(codes.data, codes.input_dim),
            scale.data if scale.output_dim == 0 else scale.data.mT,
            points,
            self.config.act_type,
        )
        names = (self.w_q_name, self.w_s_name, self.w_zp_name or "", "weight_shape")
        layers.hold_linear(layer, weights, filter(None, names))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return [..., N] of x [..., K]."""
        return _apply(layer, x, bias)


KERNELS = {
    "nvfp4": BlockscaleNvFp4LinearKernel,
    "mxfp4": BlockscaleMxFp4LinearKernel,
    "mp": BlockscaleInt4LinearKernel,
}
"""Kernels by vLLM's names of their kind."""


def _weight_only(original: Any) -> Any:
    """Return ``init_nvfp4_linear_kernel`` that has ours where vLLM would take Marlin by name."""

    @wraps(original)
    def init_nvfp4_linear_kernel(use_a16: bool = False) -> Any:
        kernel = BlockscaleNvFp4LinearKernel
        free = not envs.VLLM_BATCH_INVARIANT and kernel.__name__ not in envs.VLLM_DISABLED_KERNELS
        if use_a16 and free and linear_backend(quantization="nvfp4_w4a16") == "auto":
            fits, _ = kernel.is_supported()
            if fits:
                return kernel(NvFp4LinearLayerConfig())
        return original(use_a16)

    setattr(init_nvfp4_linear_kernel, _MARK, True)
    return init_nvfp4_linear_kernel


def register() -> None:
    """Put our kernels before vLLM's, for CUDA and CPUs; once, however often it is called."""
    for kind, kernel in KERNELS.items():
        for platform in (PlatformEnum.CUDA, PlatformEnum.CPU):
            if kernel not in LISTS[kind].get(platform, ()):
                register_linear_kernel(kernel, platform, kind)
                known = LISTS[kind][platform]
                known.insert(0, known.pop())
    original = getattr(LINEAR, INIT_NVFP4)
    if not hasattr(original, _MARK):
        made = _weight_only(original)
        for module in INIT_NVFP4_USERS:
            setattr(module, INIT_NVFP4, made)
