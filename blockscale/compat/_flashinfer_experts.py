"""FlashInfer's functions that quantise a batch, or the rows that experts use."""

from __future__ import annotations

import torch

from blockscale.compat._flashinfer_scales import contiguous
from blockscale.ops import checks
from blockscale.ops.dispatch import traced
from blockscale.ops.fused.act import ActOp, act, define_act, traced_act

Tensor = torch.Tensor

_U8 = torch.uint8
_BATCHED = define_act(ActOp("flashinfer.nvfp4_batched_quantize", "none", True, "flashinfer", _U8))
_GROUPED = define_act(
    ActOp("flashinfer.scaled_fp4_grouped_quantize", "none", True, "flashinfer", _U8)
)
_EXPERTS = define_act(
    ActOp("flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize", "silu", True, "flashinfer", _U8)
)


def _per_expert(where: str, global_scale: Tensor, x: Tensor) -> Tensor:
    """Return one global scale per expert, as float32 on the device of ``x``."""
    checks.tensor(where, "a", contiguous(x), checks.SIXTEEN_BIT, dims=3)
    if global_scale.numel() not in (1, x.shape[0]):
        raise ValueError(
            f"{where}: a_global_sf has {global_scale.numel()} elements; pass one per expert, "
            f"{x.shape[0]}"
        )
    g = global_scale.to(device=x.device, dtype=torch.float32).reshape(-1)
    return g.expand(x.shape[0]).contiguous()


def nvfp4_batched_quantize(
    a: Tensor, a_global_sf: Tensor, sf_vec_size: int = 16
) -> tuple[Tensor, Tensor]:
    """Return NVFP4 codes [B, M, K / 2] and scales [B, padded size], both uint8, of ``a`` [B, M, K].

    The scales of each batch are in the 128x4 layout of their own; ``a_global_sf`` multiplies.
    """
    where = "flashinfer.nvfp4_batched_quantize"
    if sf_vec_size != 16:
        raise NotImplementedError(f"{where}: sf_vec_size={sf_vec_size}; NVFP4 has 16")
    g = _per_expert(where, a_global_sf, a)
    run = traced_act if traced(a) else act
    packed, scale = run(_BATCHED, contiguous(a), None, None, None, g, 16, None, "128x4", None)
    return packed, scale.view(_U8).reshape(a.shape[0], -1)


def _logical(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the views of codes and scales that FlashInfer's grouped GEMM takes."""
    experts, high, wide = scale.shape
    tiles = scale.reshape(experts, high // 128, wide // 4, 32, 4, 4)
    return packed.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)


def scaled_fp4_grouped_quantize(
    a: Tensor, mask: Tensor, a_global_sf: Tensor
) -> tuple[Tensor, Tensor]:
    """Return NVFP4 codes and scales of the first ``mask[e]`` rows of each expert.

    Args:
        a: [l, m, k] bfloat16 or float16.
        mask: [l] int32.
        a_global_sf: [l] float32, multiplies.

    Returns:
        Views: codes (m, k / 2, l) uint8, in memory [l, m, k / 2]; scales (32, 4, rm, 4, rk, l)
        float8_e4m3fn, in memory [l, rm, rk, 32, 4, 4], rm = ceil(m / 128), rk = ceil(k / 64).
    """
    g = _per_expert(_GROUPED.name, a_global_sf, a)
    run = traced_act if traced(a) else act
    return _logical(*run(_GROUPED, contiguous(a), mask, None, None, g, 16, None, "128x4", None))


def silu_and_mul_scaled_nvfp4_experts_quantize(
    a: Tensor, mask: Tensor, a_global_sf: Tensor
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of ``silu(gate) * up`` as `scaled_fp4_grouped_quantize` does.

    ``a`` is [l, m, 2 k]: gate, then up.
    """
    g = _per_expert(_EXPERTS.name, a_global_sf, a)
    run = traced_act if traced(a) else act
    return _logical(*run(_EXPERTS, contiguous(a), mask, None, None, g, 16, None, "128x4", None))
