"""What `blockscale convert --layout` writes for one weight, and the way back to the plain meaning.

Block scales of a matrix [N, K / block] by layout; codes stay [N, K / 2]:

* "128x4": [up to 128, up to 4], the order of tcgen05 and cuBLAS; padding is zero.
* "deepgemm": int32 [K / block / 4, N up to 4], four blocks to a word, rows innermost.
* "marlin": [K / block, N] in Marlin's order (`blockscale.layouts.MARLIN_ORDER`).

"trtllm" (INT4) also moves the codes: [K, N / 2] as `blockscale.int4.preprocess_weights` makes them,
scales [K / group, N], and the zeros that TensorRT-LLM adds, (8 - z) * scale, in their dtype; the
integer zero points are kept, as the zeros are rounded.  Names of all of these differ from those of
plain tensors, so that no other reader takes them for plain ones.  Experts: `schemes.tiles`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from blockscale.base.errors import CheckpointError
from blockscale.base.formats import QUANTIZED
from blockscale.base.sizes import round_up
from blockscale.checkpoints.entry import Entry, Tensors, named
from blockscale.checkpoints.files.safetensors import TensorInfo, read, shown
from blockscale.checkpoints.moves import as_bytes
from blockscale.checkpoints.weight import Weight
from blockscale.ops import layouts
from blockscale.ops.int4.layout import (
    interleave_scales,
    layout_of,
    preprocess_weights,
    unprocess_weights,
    zeros_of_points,
)

Tensor = torch.Tensor

SCHEME = "blockscale-layout"
LINEAR = "linear"
_ONE_NUMBER = ("global_scale", "global_divisor", "input_scale")
LAYOUTS = {
    LINEAR: ("nvfp4", "mxfp4", "int4"),
    "128x4": ("nvfp4", "mxfp4"),
    "deepgemm": ("nvfp4", "mxfp4"),
    "marlin": ("nvfp4", "mxfp4", "int4"),
    "tiles64": ("nvfp4", "mxfp4", "int4"),
    "trtllm": ("int4",),
}
"""Layouts, and the formats that each has a meaning for."""
OF_EXPERTS = ("tiles64", "deepgemm", "trtllm")
"""Layouts that hold all experts of a layer in one tensor."""
SCALES_ONLY = ("128x4", "deepgemm", "marlin")
_WORD, _ROWS, _MARLIN, _COLUMN = 4, 128, 64, 32
_STRIP = 256
"""Columns of INT4 codes that are turned at a time."""


class Kernel(NamedTuple):
    """For which kernels of TensorRT-LLM: compute capability, and "a16" or "a8" activations."""

    sm: int = 80
    activation: str = "a16"


@dataclass(frozen=True)
class Laid(Entry):
    """A weight in a layout; ``parts`` have the roles that `lay` gives, ``facts`` the rest."""

    layout: str = LINEAR
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors of the weight; gate and up each have half of theirs."""
        share = 2 if self.facts.get("role") in ("gate", "up") and self.facts["gated"] else 1
        return super().nbytes // share


# ---- Scales -------------------------------------------------------------------------------------


def scale_spec(layout: str, dtype: str, rows: int, blocks: int) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape of block scales [rows, blocks] in a layout."""
    if layout == "128x4":
        return dtype, (round_up(rows, _ROWS), round_up(blocks, _WORD))
    if layout == "deepgemm":
        return "I32", (blocks // _WORD, round_up(rows, _WORD))
    return dtype, (blocks, rows) if layout == "marlin" else (rows, blocks)


def lay_scales(layout: str, scale: Tensor, permute: bool = False) -> Tensor:
    """Return block scales [rows, blocks] as a layout has them."""
    rows, blocks = scale.shape
    if layout == "128x4":
        shape = round_up(rows, _ROWS), round_up(blocks, _WORD)
        wide = torch.zeros(shape, dtype=torch.uint8, device="cpu")
        wide[:rows, :blocks] = scale.view(torch.uint8)
        tiles = wide.view(-1, 4, 32, wide.shape[1] // _WORD, _WORD).permute(0, 3, 2, 1, 4)
        return tiles.reshape(wide.shape).view(scale.dtype)
    if layout == "deepgemm":
        words = layouts.deepgemm_scales(scale, permute=permute).T
        shape = words.shape[0], round_up(rows, _WORD)
        wide = torch.zeros(shape, dtype=torch.int32, device="cpu")
        wide[:, :rows] = words
        return wide
    if layout == "marlin":
        across = as_bytes(scale).T.contiguous().view(scale.dtype)
        return layouts.marlin_scales(across, _order(across))
    return scale


def plain_scales(
    layout: str, laid: Tensor, rows: int, blocks: int, permute: bool = False
) -> Tensor:
    """Return block scales [rows, blocks] of those that `lay_scales` made; words as bytes."""
    if layout == "128x4":
        raw = laid.view(torch.uint8)
        tiles = raw.reshape(-1, raw.shape[1] // _WORD, 32, 4, _WORD).permute(0, 3, 2, 1, 4)
        return tiles.reshape(raw.shape)[:rows, :blocks].contiguous().view(laid.dtype)
    if layout == "deepgemm":
        return layouts.undo_deepgemm_scales(laid[:, :rows].T, permute=permute)
    if layout == "marlin":
        across = layouts.undo_marlin_scales(laid, _order(laid))
        return as_bytes(across).T.contiguous().view(laid.dtype)
    return laid


def _order(across: Tensor) -> str:
    """Return the order of Marlin's for scales [G, N]."""
    if across.element_size() == 1:
        return "e4m3"
    return "column" if across.shape[0] == 1 else "group"


# ---- INT4 ---------------------------------------------------------------------------------------


def turned(packed: Tensor) -> Tensor:
    """Return codes [N, K / 2] as [K, N / 2], or the reverse: two neighbours to a byte."""
    rows, half = packed.shape
    out = torch.empty((2 * half, rows // 2), dtype=torch.uint8, device="cpu")
    for start in range(0, rows, _STRIP):
        strip = packed[start : start + _STRIP]
        codes = torch.stack((strip & 15, strip >> 4), -1).view(len(strip), -1).T
        out[:, start // 2 : (start + len(strip)) // 2] = codes[:, 0::2] | codes[:, 1::2] << 4
    return out


def trtllm_spec(
    rows: int, inner: int, groups: int, dtype: str, kernel: Kernel, moe: bool
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of an INT4 matrix for TensorRT-LLM, by role."""
    made: dict[str, tuple[str, tuple[int, ...]]] = {
        "codes": ("U8", (inner, rows // 2)),
        "scale": (dtype, (groups, rows)),
        "zeros": (dtype, (groups, rows)),
        "zero": ("U8", (groups, rows)),
    }
    if moe and kernel == Kernel(90, "a8"):
        i = next(i for i in (4, 2, 1) if groups % i == 0)
        made["scale_interleaved"] = ("BF16", (groups // i, rows * i))
    return made


def lay_trtllm(
    packed: Tensor, scale: Tensor, zero: Tensor | None, kernel: Kernel, moe: bool
) -> dict[str, Tensor]:
    """Return an INT4 matrix as TensorRT-LLM reads it, by role: see `trtllm_spec`.

    Columns are converted a strip at a time, of which each is one piece of the result.
    """
    rows, half = packed.shape
    codes = torch.empty(2 * half * (rows // 2), dtype=torch.uint8, device="cpu")
    for start in range(0, rows, _STRIP):
        strip = turned(packed[start : start + _STRIP]) ^ 0x88
        view = strip[None] if moe else strip
        made = preprocess_weights(view, sm=kernel.sm, activation=kernel.activation, moe=moe)
        codes[start * half : start * half + made.numel()] = made.reshape(-1)
    points = torch.full_like(scale, 8, dtype=torch.uint8) if zero is None else zero
    laid = scale.T.contiguous()
    point = points.T.contiguous()
    found = {
        "codes": codes.view(2 * half, rows // 2),
        "scale": laid,
        "zeros": zeros_of_points(point, laid),
        "zero": point,
    }
    if moe and kernel == Kernel(90, "a8"):
        group = 2 * half // laid.shape[0]
        found["scale_interleaved"] = interleave_scales(laid[None], group, sm=90)[0]
    return found


def plain_trtllm(
    parts: Mapping[str, Tensor], kernel: Kernel, moe: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [N, K / 2], scales and zero points [N, K / group]."""
    codes = parts["codes"][None] if moe else parts["codes"]
    plain = unprocess_weights(codes, sm=kernel.sm, activation=kernel.activation, moe=moe)
    packed = turned((plain[0] if moe else plain) ^ 0x88)
    return packed, parts["scale"].T.contiguous(), parts["zero"].T.contiguous()


# ---- One weight ---------------------------------------------------------------------------------


def check(
    layout: str,
    name: str,
    fmt: str,
    sizes: tuple[int, int, int],
    kernel: Kernel,
    *,
    moe: bool = False,
) -> None:
    """Raise CheckpointError unless a matrix [N, K] with K / block scales a row has the layout."""
    rows, inner, blocks = sizes
    if fmt not in LAYOUTS[layout]:
        known = [key for key, formats in LAYOUTS.items() if fmt in formats]
        raise CheckpointError(
            f"{name} is {fmt}, for which layout {layout!r} has no meaning; choose one of "
            f"{', '.join(known)}, or leave the weight linear: --keep"
        )
    needs = [("K / block", blocks, _WORD)] if layout == "deepgemm" else []
    if layout == "deepgemm" and moe:
        needs.append(("N", rows, _ROWS))
    if layout == "marlin":
        one = fmt == "int4" and blocks == 1
        needs.append(("N", rows, _COLUMN if one else _MARLIN))
    if layout == "trtllm":
        form = layout_of(sm=kernel.sm, activation=kernel.activation, moe=moe)
        needs += [("N", rows, math.lcm(form.n_multiple, 16)), ("K", inner, form.block)]
    for what, size, multiple in needs:
        if size % multiple:
            raise CheckpointError(
                f"{name} has {what}={size}, but layout {layout!r} needs a multiple of {multiple}; "
                "choose another layout, or leave the weight linear: --keep"
            )


def find(tensors: Tensors, said: Mapping[str, Any]) -> Iterator[Laid]:
    """Yield the weights in a layout but experts; ``said`` is what config.json says on layouts."""
    kernel = kernel_of(said)
    for info in list(tensors.by_name.values()):
        for layout in SCALES_ONLY:
            if info.name.endswith(f"_scale_{layout}"):
                yield _scaled(tensors, info, info.name.removesuffix(f"_scale_{layout}"), layout)
        if info.name.endswith(".weight_trtllm"):
            yield _int4(tensors, info, kernel)


def kernel_of(facts: Mapping[str, Any]) -> Kernel:
    """Return what the configuration says on TensorRT-LLM's kernels."""
    sm, activation = facts.get("sm", 80), facts.get("activation", "a16")
    if type(sm) is not int or activation not in ("a16", "a8"):
        raise CheckpointError(
            f"the configuration says sm={shown(sm)} and activation={shown(activation)}, but must "
            "name a compute capability and 'a16' or 'a8'; convert the checkpoint again"
        )
    return Kernel(sm, activation)


def _need(tensors: Tensors, lead: TensorInfo, name: str) -> TensorInfo:
    if name not in tensors:
        raise lead.refused(
            f"is there without {shown(name)}; copy all files of the checkpoint, or convert it again"
        )
    return tensors.by_name[name]


def _scaled(tensors: Tensors, scale: TensorInfo, base: str, layout: str) -> Laid:
    """Return a weight whose scales alone are in a layout."""
    dense = base.endswith(".weight")
    name = base if dense else base.removesuffix("_weight")
    lead = _need(tensors, scale, name)
    parts = tensors.take(lead, block_scale=scale.name, **named(base.removesuffix("weight")))
    *head, rows, half = lead.shape if len(lead.shape) in (2, 3) else (0, 0)
    zero = parts.get("zero")
    if layout == "marlin":
        blocks = scale.shape[-2] if len(scale.shape) > 1 else 0
        group = 2 * half // max(1, blocks)
        dtype = "U8" if zero is None else scale.dtype
        fmt = "int4" if zero else "nvfp4" if scale.dtype == "F8_E4M3" else "mxfp4"
    else:
        fmt = "nvfp4" if "global_scale" in parts else "mxfp4"
        group, dtype = QUANTIZED[fmt].block, scale.dtype
        blocks = 2 * half // group
    wanted = scale_spec(layout, scale.dtype, rows, blocks)[1]
    whole = lead.dtype == "U8" and blocks > 0 and group * blocks == 2 * half
    if not whole or scale.shape != (*head, *wanted) or not dtype:
        raise scale.refused(
            f"is {scale.dtype} {list(scale.shape)}, which does not fit {lead.dtype} "
            f"{list(lead.shape)} of {shown(lead.name)} in layout {layout!r}; convert the "
            "checkpoint again"
        )
    return Laid(name, fmt, SCHEME, parts, (*head, rows, 2 * half), group, layout=layout)


def _int4(tensors: Tensors, codes: TensorInfo, kernel: Kernel) -> Laid:
    """Return a dense INT4 weight in the layout of TensorRT-LLM."""
    parts = {"codes": codes}
    for role in ("scale", "zeros", "zero"):
        parts[role] = _need(tensors, codes, f"{codes.name}_{role}")
    inner, half = codes.shape if len(codes.shape) == 2 else (0, 0)
    scale = parts["scale"]
    groups = scale.shape[0] if scale.shape else 0
    if (
        not groups
        or inner % groups
        or any(parts[role].shape != (groups, 2 * half) for role in ("scale", "zeros", "zero"))
    ):
        raise codes.refused(
            f"is {list(codes.shape)} with scales {list(scale.shape)}, but must be [K, N / 2] with "
            "[K / group, N]; convert it again"
        )
    pre = codes.name.removesuffix("weight_trtllm") + "pre_quant_scale"
    if pre in tensors:
        parts["pre_quant_scale"] = tensors.by_name[pre]
    tensors.used.update(part.name for part in parts.values())
    name = codes.name.removesuffix("_trtllm")
    facts = {"kernel": kernel}
    shape = (2 * half, inner)
    return Laid(name, "int4", SCHEME, parts, shape, inner // groups, layout="trtllm", facts=facts)


def undo(entry: Laid) -> Weight:
    """Return the weight of an entry that `find` made, as if no layout had been asked for."""
    parts = {role: read(info) for role, info in entry.parts.items()}
    if entry.layout == "trtllm":
        packed, scale, zero = plain_trtllm(parts, entry.facts["kernel"], moe=False)
        return Weight(
            *(entry.name, "int4", entry.shape, None, packed, scale, None, zero, entry.group),
            pre_quant_scale=parts.get("pre_quant_scale"),
        )
    rows, blocks = entry.shape[-2], entry.shape[-1] // entry.group
    laid = parts["block_scale"]
    lead = laid.view(-1, *laid.shape[-2:])
    plain = [as_bytes(plain_scales(entry.layout, each, rows, blocks)) for each in lead]
    scale = torch.stack(plain).view(*entry.shape[:-1], blocks)
    if entry.fmt != "mxfp4":
        scale = scale.view(torch.float8_e4m3fn if entry.fmt == "nvfp4" else laid.dtype)
    single: Any = {
        role: of_experts(parts[role], entry.shape) for role in _ONE_NUMBER if role in parts
    }
    return Weight(
        *(entry.name, entry.fmt, entry.shape, None, parts["packed"], scale),
        zero=parts.get("zero"),
        group_size=entry.group,
        group_index=parts.get("group_index"),
        pre_quant_scale=parts.get("pre_quant_scale"),
        **single,
    )


def of_experts(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a global scale of a weight [..., N, K] as [], [E], or [E, 2] of gate and up."""
    if value.numel() == 1:
        return value.reshape(())
    return value.reshape(-1, 2) if value.numel() == 2 * shape[0] else value.flatten()
