"""FlashInfer's quantisers of batches and of experts, each with scales of its own."""

from __future__ import annotations

import torch

from blockscale.compat.flashinfer import recipes
from blockscale.compat.flashinfer.errors import public
from blockscale.compat.flashinfer.recipes import UNSET, NVFP44Over6Config
from blockscale.compat.flashinfer.scales import DTYPES, contiguous, float32
from blockscale.ops import checks
from blockscale.ops.fused.act import ActOp

Tensor = torch.Tensor

_FI = "flashinfer"
_U8 = torch.uint8
_BATCHED = ActOp("flashinfer.nvfp4_batched_quantize", "none", True, _FI, _U8)
_GROUPED = ActOp("flashinfer.scaled_fp4_grouped_quantize", "none", True, _FI, _U8)
_EXPERTS = ActOp("flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize", "silu", True, _FI, _U8)


def _run(
    op: ActOp, a: Tensor, mask: Tensor | None, g: Tensor, recipe: NVFP44Over6Config | None
) -> tuple[Tensor, ...]:
    """Return codes and scales, with a recipe that is resolved."""
    options = 16, None, "128x4", None, "one", recipes.searched(recipe)
    return op.run(options, (contiguous(a), mask, None, None, g, ()))


def _per_expert(where: str, global_scale: Tensor, x: Tensor) -> Tensor:
    """Return one global scale per expert, as float32 on the device of ``x``."""
    checks.tensor(where, "a", contiguous(x), DTYPES, dims=3)
    g = float32(where, "a_global_sf", global_scale, x)
    if g.numel() not in (1, x.shape[0]):
        raise ValueError(
            f"{where}: a_global_sf has {g.numel()} elements; pass one per expert, {x.shape[0]}"
        )
    return g.expand(x.shape[0]).contiguous()


@public
def nvfp4_batched_quantize(
    a: Tensor,
    a_global_sf: Tensor,
    sf_vec_size: int = 16,
    nvfp4_4over6: NVFP44Over6Config | None = UNSET,
) -> tuple[Tensor, Tensor]:
    """Return NVFP4 codes [B, M, K / 2] and scales [B, padded size], both uint8, of ``a`` [B, M, K].

    The scales of each batch are in the 128x4 layout of their own; ``a_global_sf`` multiplies.
    ``a`` is bfloat16, float16 or float8_e4m3fn; ``nvfp4_4over6`` as in `fp4_quantize`.
    """
    where = "flashinfer.nvfp4_batched_quantize"
    if sf_vec_size != 16:
        raise NotImplementedError(f"{where}: sf_vec_size={sf_vec_size}; NVFP4 has 16")
    recipe = recipes.of_call(where, nvfp4_4over6, a)
    packed, scale = _run(_BATCHED, a, None, _per_expert(where, a_global_sf, a), recipe)
    return packed, scale.view(_U8).reshape(a.shape[0], -1)


def _logical(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the views of codes and scales that FlashInfer's grouped GEMM takes."""
    experts, high, wide = scale.shape
    tiles = scale.reshape(experts, high // 128, wide // 4, 32, 4, 4)
    return packed.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)


@public
def scaled_fp4_grouped_quantize(
    a: Tensor,
    mask: Tensor,
    a_global_sf: Tensor,
    nvfp4_4over6: NVFP44Over6Config | None = UNSET,
) -> tuple[Tensor, Tensor]:
    """Return NVFP4 codes and scales of the first ``mask[e]`` rows of each expert.

    Args:
        a: [l, m, k] bfloat16 or float16.
        mask: [l] int32.
        a_global_sf: [l] float32, multiplies.
        nvfp4_4over6: as in `fp4_quantize`.

    Returns:
        Views: codes (m, k / 2, l) uint8, in memory [l, m, k / 2]; scales (32, 4, rm, 4, rk, l)
        float8_e4m3fn, in memory [l, rm, rk, 32, 4, 4], rm = ceil(m / 128), rk = ceil(k / 64).
    """
    return _experts(_GROUPED, a, mask, a_global_sf, nvfp4_4over6)


@public
def silu_and_mul_scaled_nvfp4_experts_quantize(
    a: Tensor,
    mask: Tensor,
    a_global_sf: Tensor,
    nvfp4_4over6: NVFP44Over6Config | None = UNSET,
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of ``silu(gate) * up`` as `scaled_fp4_grouped_quantize` does.

    ``a`` is [l, m, 2 k]: gate, then up.
    """
    return _experts(_EXPERTS, a, mask, a_global_sf, nvfp4_4over6)


def _experts(
    op: ActOp, a: Tensor, mask: Tensor, global_scale: Tensor, setting: NVFP44Over6Config | None
) -> tuple[Tensor, Tensor]:
    recipe = recipes.of_call(op.name, setting, a)
    packed, scale = _run(op, a, mask, _per_expert(op.name, global_scale, a), recipe)
    return _logical(packed, scale)
