"""Edge-LLM's decode ops on torch tensors: up, down, and both.

What is computed: `edgellm.passes`; with ``exact_fp16``, in float16, rounding for rounding, what
release 0.7 computes.  There a strip is TB rows of a weight.  Products are rounded twice,
half(half(a * s) * e2m1); 32 rows (a warp) are added as a tree with distances 16, 8, 4, 2, 1, warps
in ascending order from 0, and each strip is added to the output, which is half.  The original adds
with atomics, in any order; here strips and slots go in ascending order.  Of silu, exp is the
correctly rounded float32 (computed in float64 and rounded).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blockscale.base import edgellm_index as index
from blockscale.compat.edgellm.tensor import Nvfp4Tensor, byte_values, e2m1_values, scale_halfs
from blockscale.ops import call, checks
from blockscale.ops.checks import dtype_name
from blockscale.specs.edgellm import ACTIVATIONS, EdgeDown, EdgeUp

Tensor = torch.Tensor

_A16_STRIPS = (256, 128, 96, 64)
_A4_STRIPS = (256, 192, 128, 96, 64)
WARP = 32
LIMIT = 50.0

_MOST_TOKENS = 65535
"""What the grid of a GPU kernel takes in its second and third direction."""


def decode_up(
    x: Tensor | Nvfp4Tensor,
    up: Nvfp4Tensor,
    decode_scales: Tensor,
    topk_ids: Tensor,
    *,
    exact_fp16: bool = False,
) -> Tensor:
    """Return z [T, K_top, I] float32: x times the up weight of each of a token's experts.

    Slots whose expert is not among [0, E) are zero.  The sum is float32, weights are exact, and the
    global scales of up (and x) multiply it at the end.

    Args:
        x: [T, H] float16, bfloat16 or float32 (W4A16), or a view of NVFP4 activations with linear
            scale words (W4A4), as `quantize_activation` makes it.
        up: `Nvfp4Tensor.up_weights`; its block_scale is not read.
        decode_scales: [E, H / 16, I] uint8, see `decode_scales`.
        topk_ids: [T, K_top] int32 or int64.
        exact_fp16: the original's float16 arithmetic, rounding for rounding, z float16; slow.

    Raises:
        TypeError: an argument of another type or dtype.
        ValueError: shape, strides or device.
    """
    where = "decode_up"
    payload, scales, factor = _weights(where, up, decode_scales)
    experts, hidden, half = payload.shape
    x_scale: Tensor | None = None
    if isinstance(x, Nvfp4Tensor):
        given, x_scale = _activation(where, x, hidden)
    else:
        given = checks.tensor(where, "x", x, checks.ACTIVATIONS)
        if x.dim() != 2 or x.shape[1] != hidden:
            raise ValueError(
                f"{where}: x has shape {list(x.shape)}, but must have [T, {hidden}], a row for "
                "each token, as long as an expert has rows"
            )
    checks.same_device(where, "x", given, "up", payload)
    ids = _ids(where, topk_ids, len(given), experts, payload)
    if exact_fp16:
        return exact_up(x, payload, scales, factor, ids)
    z = torch.empty(*ids.shape, 2 * half, dtype=torch.float32, device=payload.device)
    if not z.numel():
        return z
    rest = (payload, scales, factor, ids, z)
    if isinstance(x, Nvfp4Tensor):
        g = None if x.global_scale is None else x.global_scale[:1]
        kernel = call.kernel(EdgeUp(hidden, 2 * half, "nvfp4"), payload.device)
        kernel(given, x_scale, g, *rest)
    else:
        spec = EdgeUp(hidden, 2 * half, dtype_name(given.dtype))
        call.kernel(spec, payload.device)(given, *rest)
    return z


def decode_down(
    z: Tensor,
    down: Nvfp4Tensor,
    decode_scales: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: str = "relu2",
    exact_fp16: bool = False,
    w4a4: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return out [T, H]: the sum over slots of weight * (activation(z) times the down weight).

    Args:
        z: [T, K_top, I] float32, bfloat16 or float16.
        down: `Nvfp4Tensor.down_weights`; its block_scale is not read.
        decode_scales: [E, I / 16, H] uint8.
        topk_ids: [T, K_top] int32 or int64; slots outside of [0, E) add nothing.
        topk_weights: [T, K_top], any float dtype.
        activation: "relu2" or "silu"; neither is gated.
        exact_fp16: the original's float16 arithmetic, out float16; slow.
        w4a4: the original's strips where the up pass had NVFP4 activations; without exact_fp16 it
            makes no difference.
        dtype: of out: float32, bfloat16 or float16, rounded once.

    Raises:
        TypeError: an argument of another type or dtype.
        ValueError: an unknown option, shape, strides or device.
    """
    where = "decode_down"
    checks.choice(where, "activation", activation, ACTIVATIONS)
    if dtype not in checks.ACTIVATIONS:
        raise TypeError(f"{where}: dtype={dtype} is not float32, bfloat16 or float16; choose one")
    payload, scales, factor = _weights(where, down, decode_scales)
    experts, rows, half = payload.shape
    checks.beside(where, "z", z, checks.ACTIVATIONS, "down", payload)
    ids = _ids(where, topk_ids, len(z), experts, payload)
    rest = ": a row for each entry of topk_ids, as long as an expert has rows"
    checks.sized(where, "z", z, [[*ids.shape, rows]], rest)
    checks.beside(where, "topk_weights", topk_weights, checks.ACTIVATIONS, "down", payload)
    checks.sized(where, "topk_weights", topk_weights, [ids.shape], ", that of topk_ids")
    weights = topk_weights.float()
    if exact_fp16:
        return exact_down(z, payload, scales, factor, ids, weights, activation, w4a4)
    out = torch.empty(len(z), 2 * half, dtype=dtype, device=payload.device)
    if not ids.numel():
        return out.zero_()
    partial = torch.empty(*ids.shape, 2 * half, dtype=torch.float32, device=payload.device)
    spec = EdgeDown(2 * half, rows, activation, dtype_name(dtype))
    kernel = call.kernel(spec, payload.device)
    kernel(z.float(), payload, scales, factor, ids, weights, partial, out)
    return out


def decode_moe(
    x: Tensor | Nvfp4Tensor,
    up: Nvfp4Tensor,
    up_scales: Tensor,
    down: Nvfp4Tensor,
    down_scales: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: str = "relu2",
    exact_fp16: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return out [T, H]: `decode_up`, then `decode_down`."""
    z = decode_up(x, up, up_scales, topk_ids, exact_fp16=exact_fp16)
    return decode_down(
        z,
        down,
        down_scales,
        topk_ids,
        topk_weights,
        activation=activation,
        exact_fp16=exact_fp16,
        w4a4=isinstance(x, Nvfp4Tensor),
        dtype=dtype,
    )


def _weights(where: str, view: object, decode_scales: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return payload [E, K, N / 2] uint8, decode scales [E, K / 16, N] and global scales [E]."""
    if not isinstance(view, Nvfp4Tensor):
        raise TypeError(
            f"{where}: the weight is a {type(view).__name__}, not an Nvfp4Tensor; make one with "
            "Nvfp4Tensor.up_weights or down_weights"
        )
    if isinstance(decode_scales, Tensor) and decode_scales.dtype == torch.float8_e4m3fn:
        raise TypeError(
            f"{where}: decode_scales are float8_e4m3fn, but must be bytes S0E5M3; pass "
            "decode_scales(scales) of blockscale.edgellm"
        )
    scales = checks.tensor(where, "decode_scales", decode_scales, (torch.uint8,))
    if scales.dim() != 3 or scales.shape[2] % index.TILE or scales.shape[1] % index.LANES:
        raise ValueError(
            f"{where}: decode_scales has shape {list(scales.shape)}, but must have [E, K / 16, N], "
            f"K and N multiples of {index.TILE}; pad the weights"
        )
    experts, blocks, n = (int(size) for size in scales.shape)
    k, vectors = blocks * index.BLOCK, n // index.TILE * index.VECTORS
    strides = (k * vectors, vectors, index.VECTORS)
    if view.strides != strides or view.vectors != experts * k * vectors:
        raise ValueError(
            f"{where}: the weight has strides {list(view.strides)} and {view.vectors} vectors, but "
            f"decode_scales of shape {list(scales.shape)} belong to strides {list(strides)} and "
            f"{experts * k * vectors} vectors; pass a dense payload with its own scales"
        )
    checks.same_device(where, "decode_scales", scales, "the weight", view.payload)
    g = view.global_scale
    if g is not None and g.numel() not in (1, experts):
        raise ValueError(
            f"{where}: the weight has {g.numel()} global scales, but {experts} experts; pass one "
            "for each, or one for all"
        )
    if g is None:
        g = torch.ones(1, dtype=torch.float32, device=view.device)
    return view.payload.view(experts, k, n // 2), scales, g.expand(experts).contiguous()


def _activation(where: str, x: Nvfp4Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    """Return codes [T, H / 2] and bytes of scales [T, H / 16] of an activation's view."""
    tiles = hidden // index.TILE
    if x.tiles is None or x.tiles[1:] != (tiles, 1) or x.strides[1] != index.VECTORS:
        raise ValueError(
            f"{where}: x is a view of tiles {x.tiles}, but must be one of [T, {hidden}]; make it "
            "with Nvfp4Tensor.activation or quantize_activation"
        )
    tokens = x.tiles[0]
    scale = x.scale_bytes
    if scale is None or scale.numel() != tokens * hidden // index.BLOCK:
        raise ValueError(
            f"{where}: x has {0 if scale is None else scale.numel()} bytes of scales, but needs a "
            f"word for each of its {tokens * tiles} tiles; see quantize_activation"
        )
    return x.payload.view(tokens, hidden // 2), scale.view(tokens, hidden // index.BLOCK)


def _ids(where: str, topk_ids: object, tokens: int, experts: int, payload: Tensor) -> Tensor:
    """Return ids [T, K_top] int32, -1 for those that name no expert."""
    ids = checks.beside(
        where, "topk_ids", topk_ids, (torch.int32, torch.int64), "the weight", payload
    )
    if ids.dim() != 2 or len(ids) != tokens:
        raise ValueError(
            f"{where}: topk_ids has shape {list(ids.shape)}, but must have [{tokens}, K_top], a "
            "row for each token"
        )
    if payload.is_cuda and max(ids.shape) > _MOST_TOKENS:
        raise ValueError(
            f"{where}: topk_ids has shape {list(ids.shape)}, but a GPU kernel takes at most "
            f"{_MOST_TOKENS} tokens; divide the batch"
        )
    if ids.dtype == torch.int32:
        return ids
    return torch.where((ids >= 0) & (ids < experts), ids, -1).to(torch.int32)


# ---- In float16 ---------------------------------------------------------------------------------


def strip_rows(rows: int, other: int | None = None) -> int:
    """Return TB, the rows of a strip; ``other``: W4A4, where TB divides both sizes."""
    sizes = (rows,) if other is None else (rows, other)
    candidates: Sequence[int] = _A16_STRIPS if other is None else _A4_STRIPS
    return next(tb for tb in candidates if all(size % tb == 0 for size in sizes))


def exact_activation(activation: str, value: Tensor) -> Tensor:
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


def exact_up(
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


def exact_down(
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
    gated = exact_activation(activation, z.float())
    out = torch.zeros(len(z), columns, dtype=torch.float16, device=payload.device)
    for t, slots in enumerate(ids.tolist()):
        for j, e in enumerate(slots):
            if 0 <= e < len(payload):
                a = ((gated[t, j] * weights[t, j]) * factor[e]).half()
                add_row(out[t], a, payload[e], scales[e], tb)
    return out
