"""How the functions that apply an activation and quantise, also per expert, reach their kernels.

Arithmetic: `fused.act_quantize`.  Calls go the two ways of `fused.norm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import is_grad_enabled

from blockscale.base.sizes import ceil_div, round_up
from blockscale.ops import checks, dispatch, torch_ops
from blockscale.ops.checks import FP4, SCALE_DTYPES, SCALE_FORMAT
from blockscale.runtime import jit
from blockscale.specs import ActQuantize, Quantize

Tensor = torch.Tensor

LAYOUTS = ("linear", "128x4", "8x4")
_FORMAT_NAMES = {(16, "e4m3"): "nvfp4", (32, "ue8m0"): "mxfp4"}


@dataclass(frozen=True, eq=False)  # compared by identity: it is in the key of every call
class ActOp:
    """One of the functions that quantise activations.

    Attributes:
        name: of the function.
        activation: see `ActQuantize`.
        grouped: whether the input is [experts, rows, ...], with a mask and a scale per expert.
        convention: what the global scale means.
        codes: the dtype of codes that are allocated.
        flat: whether scales in a tiled layout are allocated with one dimension.
    """

    name: str
    activation: str
    grouped: bool = False
    convention: str = "divide"
    codes: torch.dtype = FP4
    flat: bool = True


class ActArguments(NamedTuple):
    """The arguments of `act`."""

    input: Tensor
    mask: Tensor | None
    y_fp4: Tensor | None
    block_scale: Tensor | None
    global_scale: Tensor | None
    block_size: int
    scale_format: str | None
    layout: str
    enable_pdl: bool | None
    scalars: tuple[float, ...]


def act(
    op: ActOp,
    input: Tensor,
    mask: Tensor | None,
    y_fp4: Tensor | None,
    block_scale: Tensor | None,
    global_scale: Tensor | None,
    block_size: int,
    scale_format: str | None,
    layout: str,
    enable_pdl: bool | None,
    scalars: tuple[float, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Run ``op`` on plain tensors; arguments and errors as in `silu_and_mul_fp4quant`."""
    key = None
    try:
        cuda = input.is_cuda
        key = (op, input.dtype, cuda, block_size, scale_format, layout)
        run = jit.recall(key)
        if run is not None and not (input.requires_grad and is_grad_enabled()):
            codes, scale = y_fp4, block_scale
            if codes is None or scale is None:
                codes, scale = _outputs(
                    op, input, y_fp4, block_scale, block_size, scale_format, layout, op.codes
                )
            rows = scale
            if layout != "linear" and scale.dim() == 1:
                rows = checks.tiles(scale, round_up(ceil_div(2 * codes.shape[-1], block_size), 4))
            tail = dispatch.launch_flags(cuda, enable_pdl)
            if op.grouped:
                mask = _mask(input) if mask is None else mask
                run(input, mask, global_scale, *scalars, codes, rows, *tail)
            else:
                run(input, global_scale, *scalars, codes, rows, *tail)
            return codes, scale
    except (TypeError, ValueError, AttributeError, IndexError):
        pass  # the checks below say it in our words
    given = ActArguments(
        *(input, mask, y_fp4, block_scale, global_scale, block_size, scale_format, layout),
        *(enable_pdl, scalars),
    )
    return _act_in_full(op, given, key)


def _mask(input: Tensor) -> Tensor:
    """Return the mask that says that every row is in use."""
    return torch.full((input.shape[0],), input.shape[1], dtype=torch.int32, device=input.device)


def _padded(rows: int, blocks: int, layout: str) -> tuple[int, int]:
    tile = 8 if layout == "8x4" else 128
    return round_up(rows, tile), round_up(blocks, 4)


def _lead(op: ActOp, x: Tensor) -> tuple[tuple[int, ...], int]:
    """Return the leading dimensions of ``x``, and the columns of what is quantised."""
    *lead, cols = x.shape
    return tuple(lead), cols if op.activation == "none" else cols // 2


def _scale_shapes(
    op: ActOp, lead: tuple[int, ...], blocks: int, layout: str
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that scales may have, the one that is allocated first."""
    if op.grouped:
        return ((lead[0], *_padded(lead[1], blocks, layout)),)
    if layout == "linear":
        return ((*lead, blocks),)
    padded = _padded(prod(lead), blocks, layout)
    flat = (padded[0] * padded[1],)
    return (flat, padded) if op.flat else (padded, flat)


def _outputs(
    op: ActOp,
    input: Tensor,
    y_fp4: Tensor | None,
    block_scale: Tensor | None,
    block_size: int,
    scale_format: str | None,
    layout: str,
    codes: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return codes and scales: those given, the others new."""
    lead, cols = _lead(op, input)
    if y_fp4 is None:
        y_fp4 = torch.empty((*lead, cols // 2), dtype=codes, device=input.device)
    if block_scale is None:
        dtype = SCALE_DTYPES[scale_format or SCALE_FORMAT[block_size]][0]
        shape = _scale_shapes(op, lead, cols // block_size, layout)[0]
        block_scale = torch.empty(shape, dtype=dtype, device=input.device)
    return y_fp4, block_scale


def _act_in_full(op: ActOp, given: ActArguments, key: Any) -> tuple[Tensor, Tensor]:
    """Check everything, run the kernel, and remember it under ``key``."""
    spec = _spec(op, given)
    x = given.input
    codes, scale = _outputs(
        *(op, x, given.y_fp4, given.block_scale, given.block_size, given.scale_format),
        *(given.layout, op.codes),
    )
    _check(op, given._replace(y_fp4=codes, block_scale=scale))
    lead, cols = _lead(op, x)
    flat = lead if op.grouped else (prod(lead),)
    blocks = cols // given.block_size
    g = given.global_scale
    arguments: list[Any] = [x.view(*flat, x.shape[-1])]
    if op.grouped:
        arguments.append(_mask(x) if given.mask is None else given.mask)
    elif g is not None:
        g = g.reshape(1)
    tiled = given.layout != "linear" and not op.grouped
    shape = _padded(flat[0], blocks, given.layout) if tiled else (*flat, blocks)
    arguments += [g, *map(float, given.scalars), codes.view(*flat, cols // 2)]
    arguments.append(scale if op.grouped else scale.view(shape))
    function = dispatch.kernel(spec, x.device)
    function(*arguments, *dispatch.launch_flags(x.is_cuda, given.enable_pdl))
    if key is not None:
        jit.remember(key, dispatch.direct(function))
    return codes, scale


def _spec(op: ActOp, given: ActArguments) -> ActQuantize | Quantize:
    """Return the spec of a call after the checks of its options and of ``input``."""
    where, block = op.name, given.block_size
    chosen = checks.scale_format(where, block, given.scale_format)
    checks.choice(where, "layout", given.layout, LAYOUTS)
    for i, value in enumerate(given.scalars):
        checks.number(where, ("alpha", "beta", "limit")[i], value)
    x = checks.tensor(where, "input", given.input, checks.SIXTEEN_BIT)
    if op.grouped and x.dim() != 3:
        raise ValueError(
            f"{where}: input has shape {list(x.shape)}, but must have 3 dimensions, [experts, "
            "rows, columns]; reshape it"
        )
    cols, halves = int(x.shape[-1]), 1 if op.activation == "none" else 2
    if cols % (halves * block):
        up = round_up(cols, halves * block)
        parts = f"two halves of a multiple of {block}" if halves == 2 else f"a multiple of {block}"
        raise ValueError(
            f"{where}: input has {cols} columns, but must have {parts}, the block size; pad the "
            f"rows to {up}"
        )
    dtype = checks.dtype_name(x.dtype)
    name = _FORMAT_NAMES.get((block, chosen))
    plain = op.activation == "none" and op.convention == "divide" and not op.grouped
    if plain and name is not None and given.layout != "8x4":
        return Quantize(name, dtype, given.layout)
    return ActQuantize(op.activation, block, chosen, dtype, given.layout, op.grouped, op.convention)


def _check(op: ActOp, given: ActArguments) -> None:
    """Check all tensors but ``input``, outputs included."""
    x, (lead, cols) = given.input, _lead(op, given.input)
    chosen = given.scale_format or SCALE_FORMAT[given.block_size]

    def check(name: str, value: object, allowed: tuple[torch.dtype, ...], *shapes: Any) -> None:
        checks.like(op.name, name, value, allowed, "input", x, *shapes)

    if given.mask is not None:
        check("mask", given.mask, (torch.int32,), lead[:1])
    if op.grouped and given.global_scale is not None:
        check("global_scale", given.global_scale, (torch.float32,), lead[:1])
    elif not op.grouped:
        checks.one_element(op.name, "global_scale", given.global_scale, "input", x)
    check("y_fp4", given.y_fp4, checks.PACKED, (*lead, cols // 2))
    shapes = _scale_shapes(op, lead, cols // given.block_size, given.layout)
    check("block_scale", given.block_scale, SCALE_DTYPES[chosen], *shapes)


def traced_act(
    op: ActOp,
    input: Tensor,
    mask: Tensor | None,
    y_fp4: Tensor | None,
    block_scale: Tensor | None,
    global_scale: Tensor | None,
    block_size: int,
    scale_format: str | None,
    layout: str,
    enable_pdl: bool | None,
    scalars: tuple[float, ...] = (),
) -> tuple[Tensor, Tensor]:
    """As `act`, by way of torch's operators."""
    scale_format = checks.scale_format(op.name, block_size, scale_format)
    # Inductor (torch 2.13) cannot allocate float4_e2m1fn_x2; it can view bytes as such.
    codes, scale = _outputs(
        op, input, y_fp4, block_scale, block_size, scale_format, layout, torch.uint8
    )
    torch_ops.operator(op.name)(
        *(input, mask, codes, scale, global_scale, block_size, scale_format, layout, enable_pdl),
        list(scalars),
    )
    return codes.view(op.codes) if y_fp4 is None else codes, scale


def define_act(op: ActOp) -> ActOp:
    """Register ``op`` with torch and return it."""

    def run(
        input: Tensor,
        mask: Tensor | None,
        y_fp4: Tensor,
        block_scale: Tensor,
        global_scale: Tensor | None,
        block_size: int,
        scale_format: str | None,
        layout: str,
        enable_pdl: bool | None,
        scalars: list[float],
    ) -> None:
        act(
            *(op, input, mask, y_fp4, block_scale, global_scale, block_size, scale_format),
            *(layout, enable_pdl, tuple(scalars)),
        )

    def fake(*arguments: Any) -> None:
        given = ActArguments(*arguments)
        _spec(op, given)
        _check(op, given)

    torch_ops.define(op.name, run, fake, ("y_fp4", "block_scale"))
    return op
