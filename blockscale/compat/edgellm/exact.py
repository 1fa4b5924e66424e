"""Edge-LLM's decode passes in float16, rounding for rounding as release 0.7 computes them.

A strip is TB rows of a weight.  Products are rounded twice, half(half(a * s) * e2m1); 32 rows (a
warp) are added as a tree with distances 16, 8, 4, 2, 1, warps in ascending order from 0, and each
strip is added to the output, which is half.  The original adds with atomics, in any order; here
strips and slots go in ascending order.  Of silu, exp is the correctly rounded float32 (computed in
float64 and rounded).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blockscale.base import edgellm_index as index
from blockscale.compat.edgellm.tensor import Nvfp4Tensor, byte_values, e2m1_values, scale_halfs

Tensor = torch.Tensor

_A16_STRIPS = (256, 128, 96, 64)
_A4_STRIPS = (256, 192, 128, 96, 64)
WARP = 32
LIMIT = 50.0


def strip_rows(rows: int, other: int | None = None) -> int:
    """Return TB, the rows of a strip; ``other``: W4A4, where TB divides both sizes."""
    sizes = (rows,) if other is None else (rows, other)
    candidates: Sequence[int] = _A16_STRIPS if other is None else _A4_STRIPS
    return next(tb for tb in candidates if all(size % tb == 0 for size in sizes))


def activated(activation: str, value: Tensor) -> Tensor:
    """Return relu2 or silu of float32 numbers, in float32."""
    if activation == "relu2":
        positive = torch.where(value > 0, value, torch.zeros_like(value))
        return positive * positive
    value = value.clamp(-LIMIT, LIMIT)
    return value / (1 + torch.exp(-value.double()).float())


def add_row(out: Tensor, a: Tensor, payload: Tensor, scales: Tensor, tb: int) -> None:
    """Add ``a @ w`` to ``out`` [N]; ``a`` [K], payload [K, N / 2], scales [K / 16, N]."""
    for first in range(0, len(a), tb):
        part = slice(first, first + tb)
        scale = scale_halfs(scales[first // index.BLOCK : (first + tb) // index.BLOCK])
        product = a[part, None] * scale.repeat_interleave(index.BLOCK, 0)
        product = product * e2m1_values(byte_values(payload[part])).half()
        lanes = product.reshape(tb // WARP, WARP, -1)
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        total = torch.zeros_like(out)
        for warp in lanes[:, 0]:
            total = total + warp
        out += total


def up(
    x: Tensor | Nvfp4Tensor, payload: Tensor, scales: Tensor, factor: Tensor, ids: Tensor
) -> Tensor:
    """Return z [T, K_top, I] float16; ``factor`` [E]: global scales, ``ids`` [T, K_top]."""
    hidden, columns = payload.shape[1], scales.shape[2]
    if isinstance(x, Nvfp4Tensor):
        tb = strip_rows(hidden, columns)
        assert x.tiles is not None
        tokens, tiles, _ = x.tiles
        axes = torch.arange(tokens), torch.arange(tiles), torch.zeros(1, dtype=torch.int64)
        act = x.activation_elements(torch.meshgrid(*axes, indexing="ij")).reshape(tokens, hidden)
        act = act if x.global_scale is None else act * x.global_scale[0]
    else:
        tb, act = strip_rows(hidden), x.float()
    z = torch.zeros(*ids.shape, columns, dtype=torch.float16, device=payload.device)
    for t, slots in enumerate(ids.tolist()):
        for j, e in enumerate(slots):
            if 0 <= e < len(payload):
                add_row(z[t, j], (act[t] * factor[e]).half(), payload[e], scales[e], tb)
    return z


def down(
    z: Tensor,
    payload: Tensor,
    scales: Tensor,
    factor: Tensor,
    ids: Tensor,
    weights: Tensor,
    activation: str,
    w4a4: bool,
) -> Tensor:
    """Return out [T, H] float16 of z [T, K_top, I]."""
    rows, columns = payload.shape[1], scales.shape[2]
    tb = strip_rows(rows, columns if w4a4 else None)
    gated = activated(activation, z.float())
    out = torch.zeros(len(z), columns, dtype=torch.float16, device=payload.device)
    for t, slots in enumerate(ids.tolist()):
        for j, e in enumerate(slots):
            if 0 <= e < len(payload):
                a = ((gated[t, j] * weights[t, j]) * factor[e]).half()
                add_row(out[t], a, payload[e], scales[e], tb)
    return out
