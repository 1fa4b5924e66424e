"""Torch functions on 4-bit weights: the linear layer, and the search for block scales.

Formats and rounding: `blockscale.tir.gemm.linear`, `.scale_sweep`.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch

from blockscale.ops import call, checks
from blockscale.ops.call import Checked
from blockscale.ops.checks import dtype_name
from blockscale.ops.quant import FORMATS
from blockscale.specs import BLOCK_SIZE, Linear, ScaleSweep

Tensor = torch.Tensor


def fp8_scale_candidates(device: str | torch.device = "cpu") -> Tensor:
    """Return the candidate scales [126] float32: positive finite E4M3 values / 448, ascending."""
    values = torch.arange(1, 127, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
    return (values / 448.0).to(device)


@cache
def _candidates(device: torch.device) -> Tensor:
    """Return the candidates on a device, made once: a copy to a GPU would hold up the caller."""
    return fp8_scale_candidates(device)


def nvfp4_fp8_scale_sweep(
    x: Tensor,
    global_amax: Tensor,
    block_size: int = 16,
    candidates: Tensor | None = None,
) -> Tensor:
    """Return for each block the amax (float32 [n_blocks]) whose scale has the least squared error.

    Pass it to `quantize` as ``block_amax``, with ``global_scale = global_amax / (448 * 6)``.

    Args:
        x: any shape, float32, bfloat16 or float16, contiguous; blocks are consecutive elements.
        global_amax: one element, any float dtype.
        block_size: elements per block; the number of elements must be a multiple of it.
        candidates: [count] float32, tried in order, the first best wins; None:
            `fp8_scale_candidates`.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: block_size, shape, device or stride.
    """
    return _SWEEP.run((block_size,), (x, global_amax, candidates))


class _Sweep(call.Op[Tensor]):
    def recorded(self, options: Any, given: Any) -> Tensor:
        x, global_amax, candidates = given
        made: Tensor = call.operator(self.name)(x, global_amax, *options, candidates)
        return made

    def check(self, options: Any, given: Any) -> Checked:
        (block_size,), (x, global_amax, candidates) = options, given
        blocks = _check_sweep(x, global_amax, block_size, candidates)
        if candidates is None:
            candidates = _candidates(x.device)
        best = torch.empty(blocks, dtype=torch.float32, device=x.device)
        g = global_amax.detach().to(torch.float32).reshape(1)
        arguments = x.reshape(blocks, block_size), g, candidates, best
        return Checked(ScaleSweep(dtype_name(x.dtype), int(block_size)), arguments, best)


_SWEEP = _Sweep("nvfp4_fp8_scale_sweep")


def _check_sweep(x: Tensor, global_amax: Tensor, block_size: int, candidates: Tensor | None) -> int:
    """Return the number of blocks."""
    where = "nvfp4_fp8_scale_sweep"
    checks.tensor(where, "x", x, checks.ACTIVATIONS, dims=0)
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(
            f"{where}: block_size={block_size!r} is not a positive integer; NVFP4 uses 16"
        )
    if x.numel() % block_size:
        raise ValueError(
            f"{where}: x has {x.numel()} elements, which is not divisible by "
            f"block_size={block_size}; pad the rows, or choose another block_size"
        )
    floats = (*checks.ACTIVATIONS, torch.float64)
    checks.tensor(where, "global_amax", global_amax, floats, dims=0)
    checks.one_element(where, "global_amax", global_amax.detach().to(torch.float32), "x", x)
    if candidates is not None:
        checks.beside(where, "candidates", candidates, (torch.float32,), "x", x, dims=0)
        if candidates.dim() != 1 or not candidates.numel():
            raise ValueError(
                f"{where}: candidates has shape {list(candidates.shape)}, but must be a vector of "
                "at least one scale; see fp8_scale_candidates()"
            )
    return x.numel() // int(block_size)


def linear(
    x: Tensor,
    packed: Tensor,
    block_scale: Tensor,
    fmt: str = "nvfp4",
    global_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``x @ w.T + bias`` [..., N] in the dtype of x, w the dequantised weight [N, K].

    The sum is accumulated in float32; global scale and bias are applied to it before the one
    rounding.

    Args:
        x: [..., K] float32, bfloat16 or float16.
        packed: [N, K / 2] uint8 or float4_e2m1fn_x2.
        block_scale: [N, K / block], linear layout.
        fmt: "nvfp4" or "mxfp4".
        global_scale: [1] float32; None: 1.
        bias: [N] float32, bfloat16 or float16; None: 0.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: an unknown format, shape, device or stride.
    """
    shape = getattr(packed, "shape", None)
    return _LINEAR.run((fmt, shape), (x, packed, block_scale, global_scale, bias))


class _Linear(call.Op[Tensor]):
    def recorded(self, options: Any, given: Any) -> Tensor:
        x, packed, block_scale, global_scale, bias = given
        given = x, packed, block_scale, options[0], global_scale, bias
        made: Tensor = call.operator(self.name)(*given)
        return made

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        bias = given[4]
        if type(bias) in call.PLAIN and bias.dtype in checks.SIXTEEN_BIT:
            given = (*given[:4], bias.float())
        return given, None

    def check(self, options: Any, given: Any) -> Checked:
        x, packed, block_scale, g, bias = given
        n, k, scale = _check_linear(x, packed, block_scale, options[0], g, bias)
        out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
        rows = prod(x.shape[:-1])
        arguments = (
            *(x.reshape(rows, k), packed.view(torch.uint8), scale),
            None if g is None else g.reshape(1),
            None if bias is None else bias.float(),
            out.view(rows, n),
        )
        return Checked(Linear(n, k, options[0], dtype_name(x.dtype)), arguments, out)


_LINEAR = _Linear("linear")


def _check_linear(
    x: Tensor,
    packed: Tensor,
    block_scale: Tensor,
    fmt: str,
    global_scale: Tensor | None,
    bias: Tensor | None,
) -> tuple[int, int, Tensor]:
    """Return N, K and the scales as bytes [N, K / block]."""
    where = "linear"
    checks.choice(where, "fmt", fmt, FORMATS)
    checks.tensor(where, "x", x, checks.ACTIVATIONS)
    codes = checks.tensor(where, "packed", packed, checks.PACKED, dims=2)
    if codes.dim() != 2:
        raise ValueError(
            f"{where}: packed has shape {list(packed.shape)}, but a weight has 2 dimensions, "
            "[N, K / 2]"
        )
    n, k = int(codes.shape[0]), 2 * int(codes.shape[1])
    if x.shape[-1] != k:
        raise ValueError(
            f"{where}: x has {x.shape[-1]} columns, but packed of shape {list(packed.shape)} holds "
            f"rows of {k}; pass activations with {k} features"
        )
    checks.block_multiple(where, "packed", k, fmt)
    scale = checks.scales(where, block_scale, [n], k // BLOCK_SIZE[fmt], fmt, "linear")
    checks.same_device(where, "packed", packed, "x", x)
    checks.same_device(where, "block_scale", scale, "x", x)
    checks.one_element(where, "global_scale", global_scale, "x", x)
    if bias is not None:
        checks.beside(where, "bias", bias, checks.ACTIVATIONS, "x", x)
        checks.sized(where, "bias", bias, [[n]], ", one per row of packed")
    return n, k, scale


def _fake_sweep(x: Tensor, *given: Any) -> Tensor:
    return torch.empty((_check_sweep(x, *given),), dtype=torch.float32, device=x.device)


def _fake_linear(x: Tensor, *given: Any) -> Tensor:
    n, _, _ = _check_linear(x, *given)
    return torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)


call.define(
    "nvfp4_fp8_scale_sweep",
    "(Tensor x, Tensor global_amax, SymInt block_size=16, Tensor? candidates=None) -> Tensor",
    nvfp4_fp8_scale_sweep,
    _fake_sweep,
)
call.define(
    "linear",
    "(Tensor x, Tensor packed, Tensor block_scale, str fmt='nvfp4', Tensor? global_scale=None, "
    "Tensor? bias=None) -> Tensor",
    linear,
    _fake_linear,
)
