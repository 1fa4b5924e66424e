"""Orders of rows and scales that others' kernels read, each with its way back.

The layouts are index maps (`base.index_maps`, `docs/layouts.md`); kernels made of them run
here.  128x4 and 8x4 layouts of block scales are padded with zeros, each expert for itself.

DeepGEMM's block scales, packed four to an int32 (byte j of word w: block 4w + j), rows innermost:

    word w of row r lies at w * rows + r;  its mega MoE first moves row r of every 128
    to 4 * (r % 32) + r // 32

Gate and up rows of a gated layer, granules of g rows in turns: row g * i + j of gate goes to
2g * i + j, of up to 2g * i + g + j.

Marlin's scales [G, N] change places in every 64 columns of a line ("group", "e4m3") or every 32 of
all scales ("column").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from blockscale.base import sizes
from blockscale.ops import call, checks
from blockscale.ops.quant import swizzle_scales, unswizzle_scales
from blockscale.specs import Relayout
from blockscale.specs.layout import LAYOUTS, MARLIN_ORDERS

Tensor = torch.Tensor

ROW_GROUP = 128
"""Rows that DeepGEMM's permutation keeps together."""

WORD = 4
"""Block scales of an int32, and the rows to which TMA's 16 bytes round up."""

VECTOR_BYTES = 16
"""Of which CUDA kernels take addresses to be multiples."""

SCALE_BYTES = tuple({dtype: None for held in checks.SCALES.values() for dtype in held})
"""Dtypes of block scales of one byte."""

GRANULES = (8, 16, 64)
"""Rows of gate, then of up, that kernels take in turns; "halves" keeps all gate rows first."""


def to_128x4(scales: Tensor) -> Tensor:
    """Return block scales in the 128x4 layout, [..., ceil_to(rows, 128), ceil_to(blocks, 4)].

    Every expert is padded with zeros for itself; of a matrix it is `blockscale.swizzle_scales`.

    Args:
        scales: one byte each, [rows, blocks] or [E, rows, blocks].
    """
    return _padded("layouts.to_128x4", scales, "128x4")


def from_128x4(laid: Tensor, rows: int, blocks: int) -> Tensor:
    """Return block scales [..., rows, blocks] of those that `to_128x4` made."""
    return _unpadded("layouts.from_128x4", laid, rows, blocks, "128x4")


def to_8x4(scales: Tensor) -> Tensor:
    """Return block scales in the 8x4 layout, [..., ceil_to(rows, 8), ceil_to(blocks, 4)].

    TensorRT-LLM's GEMMs of few rows read it; every expert is padded with zeros for itself.

    Args:
        scales: one byte each, [rows, blocks] or [E, rows, blocks].
    """
    return _padded("layouts.to_8x4", scales, "8x4")


def from_8x4(laid: Tensor, rows: int, blocks: int) -> Tensor:
    """Return block scales [..., rows, blocks] of those that `to_8x4` made."""
    return _unpadded("layouts.from_8x4", laid, rows, blocks, "8x4")


def grouped_128x4(scales: Tensor, offsets: Tensor) -> Tensor:
    """Return block scales of rows in groups as `grouped_mm_fp4` reads its ``a_scale``.

    Of the result [scale rows, ceil_to(blocks, 4)], each expert begins at a multiple of 128 rows,
    where the experts before it end.  How many rows there are follows from shapes alone, so that a
    GPU need not be waited for: rows + 127 of every expert, in whole tiles; the rest is zero.

    Args:
        scales: one byte each, [rows, blocks], sorted by expert; rows of no expert are left out.
        offsets: [E + 1] int32 or int64, rising: rows ``offsets[e] <= i < offsets[e + 1]``.
    """
    where = "layouts.grouped_128x4"
    checks.tensor(where, "scales", scales, SCALE_BYTES, 2)
    if scales.dim() != 2 or not scales.numel():
        raise ValueError(
            f"{where}: scales have shape {list(scales.shape)}, but must be [rows, blocks] with no "
            "empty axis; reshape them"
        )
    place, height = _grouped_rows(where, offsets, scales)
    spread = scales.new_zeros((height + 1, scales.shape[1]), dtype=torch.uint8)
    spread.index_copy_(0, place, scales.view(torch.uint8))
    return swizzle_scales(spread[:height]).view(scales.dtype)


def from_grouped_128x4(laid: Tensor, offsets: Tensor, rows: int, blocks: int) -> Tensor:
    """Return block scales [rows, blocks] of those that `grouped_128x4` made; 0 for no expert's."""
    where = "layouts.from_grouped_128x4"
    checks.tensor(where, "laid", laid, SCALE_BYTES, 2)
    like = laid.new_empty((rows, 1))
    place, height = _grouped_rows(where, offsets, like)
    _holds(where, laid, (height, sizes.round_up(blocks, WORD)), rows, blocks)
    plain = unswizzle_scales(laid.view(torch.uint8), height, blocks)
    empty = plain.new_zeros((1, blocks))
    return torch.cat((plain, empty)).index_select(0, place).view(laid.dtype)


def deepgemm_scales(scales: Tensor, *, permute: bool = True) -> Tensor:
    """Return block scales as DeepGEMM reads them: int32 [..., rows, blocks / 4], rows innermost.

    The strides are (blocks / 4 * R, 1, R), R = rows up to a multiple of 4; rows in between are 0.

    Args:
        scales: one byte each, [rows, blocks] or [E, rows, blocks], blocks a multiple of 4.
        permute: move rows within every 128, as weights of mega MoE need; plain GEMMs do not.
    """
    where = "layouts.deepgemm_scales"
    _one_byte(where, "scales", scales)
    e, rows, blocks = _three(scales)
    if blocks % WORD:
        raise ValueError(
            f"{where}: scales have {blocks} blocks a row, which is not a multiple of {WORD}; pad K "
            "of the weight so that whole words come out"
        )
    if permute:
        _whole_groups(where, "scales", rows)
    pitch = sizes.round_up(rows, WORD)
    name = "deepgemm_permuted" if permute else "deepgemm"
    made = relayout(scales.view(e, rows, blocks), name, (e, pitch, blocks))
    words = made.view(e, blocks // WORD, pitch * WORD).view(torch.int32).transpose(1, 2)[:, :rows]
    return words if scales.dim() == 3 else words[0]


def undo_deepgemm_scales(words: Tensor, *, permute: bool = True) -> Tensor:
    """Return block scales, uint8 [..., rows, blocks], of which `deepgemm_scales` made ``words``."""
    where = "layouts.undo_deepgemm_scales"
    if not isinstance(words, torch.Tensor) or words.dtype != torch.int32:
        got = getattr(words, "dtype", type(words).__name__)
        raise TypeError(
            f"{where}: words are {got}, not a tensor of int32; pass packed block scales"
        )
    if words.dim() not in (2, 3):
        raise ValueError(f"{where}: words have shape {list(words.shape)}; pass [..., rows, words]")
    e, rows, columns = _three(words)
    if permute:
        _whole_groups(where, "words", rows)
    pitch = sizes.round_up(rows, WORD)
    laid = words.new_zeros((e, columns, pitch))
    laid[:, :, :rows] = words.reshape(e, rows, columns).transpose(1, 2)
    name = "deepgemm_permuted" if permute else "deepgemm"
    plain = relayout(laid, name, (e, rows, columns * WORD), inverse=True)
    return plain.view(*words.shape[:-1], columns * WORD)


def interleave_gate_up(value: Tensor, granule: int | str) -> Tensor:
    """Return rows [gate | up] in turns of ``granule``: gate 0.., up 0.., gate g.., up g...

    Args:
        value: codes, scales or biases, [2I, ...] or, of experts, [E, 2I, ...]: axis -2 holds the
            rows, but pass biases as [..., 2I, 1].
        granule: one of `GRANULES`, or "halves", which changes nothing.
    """
    rows, g = _gate_up("layouts.interleave_gate_up", value, granule)
    return _in_turns(value, rows, g, granule, inverse=False)


def deinterleave_gate_up(value: Tensor, granule: int | str) -> Tensor:
    """Return rows [gate | up] of those that `interleave_gate_up` made."""
    rows, g = _gate_up("layouts.deinterleave_gate_up", value, granule)
    return _in_turns(value, rows, g, granule, inverse=True)


def marlin_scales(scales: Tensor, order: str = "group") -> Tensor:
    """Return scales [..., G, N] in Marlin's order, in their own dtype.

    Args:
        scales: floats of 8 to 32 bits, or bytes; N is a multiple of 64, of 32 for "column".
        order: "group" for 16-bit scales of groups along K, "column" for one scale per column,
            "e4m3" for one-byte scales of groups.
    """
    return _marlin("layouts.marlin_scales", scales, order, inverse=False)


def undo_marlin_scales(scales: Tensor, order: str = "group") -> Tensor:
    """Return scales [..., G, N] of those that `marlin_scales` made."""
    return _marlin("layouts.undo_marlin_scales", scales, order, inverse=True)


def _marlin(where: str, scales: Tensor, order: str, inverse: bool) -> Tensor:
    """Return every piece of a line's scales in another order."""
    checks.choice(where, "order", order, MARLIN_ORDERS)
    checks.tensor(where, "scales", scales, (*checks.ACTIVATIONS, *SCALE_BYTES))
    bits = 8 * scales.element_size()
    name = f"marlin_{order}_{bits}"
    piece = LAYOUTS[name].multiples()[-1]
    if not scales.numel() or scales.shape[-1] % piece:
        up = sizes.round_up(max(1, scales.shape[-1]), piece)
        raise ValueError(
            f"{where}: scales have shape {list(scales.shape)}, but order={order!r} takes {piece} "
            f"of a line at a time; pad the columns to {up}"
        )
    flat = scales.view(torch.uint8).view(1, -1)
    return relayout(flat, name, flat.shape, inverse).view(scales.dtype).view(scales.shape)


def _in_turns(value: Tensor, rows: int, g: int, granule: int | str, inverse: bool) -> Tensor:
    """Return the rows of gate and up in turns, or back: copies of whole rows of bytes."""
    value = value.contiguous()
    if granule == "halves" or not value.numel():
        return value.clone()
    lines = value.view(-1, rows, value.shape[-1]).view(torch.uint8)
    made = relayout(lines, f"gate_up_{g}", lines.shape, inverse)
    return made.view(value.dtype).view(value.shape)


def _gate_up(where: str, value: Tensor, granule: int | str) -> tuple[int, int]:
    """Return rows and granule, after all checks."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{where}: value is {shape}, but needs axes [..., rows, columns]; add one")
    if granule != "halves" and granule not in GRANULES:
        known = ", ".join(map(str, GRANULES))
        raise ValueError(f"{where}: granule={granule!r} is not known; choose {known} or 'halves'")
    rows = value.shape[-2]
    g = max(rows // 2, 1) if granule == "halves" else int(granule)
    if not rows or rows % (2 * g):
        raise ValueError(
            f"{where}: value has {rows} rows, which is not a multiple of 2 * {g}: gate and up of "
            "the same number of whole granules; pad both with zeros"
        )
    return rows, g


def _padded(where: str, scales: Tensor, name: str) -> Tensor:
    """Return scales in a layout that pads."""
    _one_byte(where, "scales", scales)
    shape = LAYOUTS[name].padded(_three(scales))
    made = relayout(scales.view(_three(scales)), name, shape).view(scales.dtype)
    return made if scales.dim() == 3 else made[0]


def _unpadded(where: str, laid: Tensor, rows: int, blocks: int, name: str) -> Tensor:
    """Return the scales of a layout that pads."""
    _one_byte(where, "laid", laid)
    experts = laid.shape[0] if laid.dim() == 3 else 1
    _, *padded = LAYOUTS[name].padded((experts, rows, blocks))
    _holds(where, laid, tuple(padded), rows, blocks)
    shape = (experts, rows, blocks)
    made = relayout(laid.view(_three(laid)), name, shape, inverse=True).view(laid.dtype)
    return made if laid.dim() == 3 else made[0]


def _holds(where: str, laid: Tensor, padded: tuple[int, ...], rows: int, blocks: int) -> None:
    """ValueError unless the last axes are those of ``rows`` and ``blocks`` after padding."""
    if rows < 1 or blocks < 1 or tuple(laid.shape[-2:]) != padded:
        raise ValueError(
            f"{where}: laid has shape {list(laid.shape)}, but rows={rows} of blocks={blocks} make "
            f"{list(padded)}; pass the sizes before padding"
        )


def _grouped_rows(where: str, offsets: Tensor, scales: Tensor) -> tuple[Tensor, int]:
    """Return where each row goes, the last row for rows of no expert, and how many others are."""
    checks.beside(where, "offsets", offsets, (torch.int32, torch.int64), "scales", scales)
    if offsets.dim() != 1 or len(offsets) < 2:
        raise ValueError(
            f"{where}: offsets has shape {list(offsets.shape)}, but must be [E + 1]; pass the "
            "first row of each expert and the end of the last"
        )
    rows, experts = scales.shape[0], len(offsets) - 1
    tiles = (rows + (ROW_GROUP - 1) * experts) // ROW_GROUP
    ends = offsets.long()
    filled = (ends.diff() + (ROW_GROUP - 1)) // ROW_GROUP
    row = torch.arange(rows, device=offsets.device)
    expert = torch.searchsorted(ends, row, right=True) - 1
    inside = (expert >= 0) & (expert < experts)
    expert = expert.clamp(0, experts - 1)
    first = (filled.cumsum(0) - filled) * ROW_GROUP
    place = first[expert] + row - ends[expert]
    return torch.where(inside, place, tiles * ROW_GROUP), tiles * ROW_GROUP


def _one_byte(where: str, name: str, value: Tensor) -> None:
    """ValueError unless ``value`` is two or three axes of one-byte scales."""
    checks.tensor(where, name, value, SCALE_BYTES, 2)
    if value.dim() > 3 or not value.numel():
        raise ValueError(
            f"{where}: {name} have shape {list(value.shape)}, but must be [rows, blocks] or "
            "[E, rows, blocks] with no empty axis; reshape them"
        )


def _whole_groups(where: str, name: str, rows: int) -> None:
    """ValueError unless rows make whole groups of the permutation."""
    if rows % ROW_GROUP:
        up = sizes.round_up(rows, ROW_GROUP)
        raise ValueError(
            f"{where}: {name} have {rows} rows, but the permutation takes {ROW_GROUP} at a time; "
            f"pad them with zeros to {up}, or pass permute=False for a plain GEMM"
        )


def _three(value: Tensor) -> tuple[int, int, int]:
    """Return the sizes, one expert where there is no axis of them."""
    e, rows, columns = value.shape if value.dim() == 3 else (1, *value.shape)
    return e, rows, columns


# ---- The kernels --------------------------------------------------------------------------------


def relayout(
    source: Tensor,
    layout: str,
    shape: Sequence[int],
    inverse: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return uint8 of ``shape``: the elements of ``source`` in the order of a layout, or back.

    Args:
        source: any dtype, contiguous: the plain tensor [(experts), rows, cols], or, for the way
            back, the bytes of the layout in any shape.
        layout: a name of `blockscale.specs.layout.LAYOUTS`.
        shape: of the result, the last axis in bytes; the kernel's rules are the caller's.
        inverse: from the layout to the plain tensor.
        out: output, contiguous bytes; None: allocated.
    """
    return _RELAYOUT.run((layout, tuple(shape), inverse), (source, out))


class _Relayout(call.Op[Tensor]):
    def recorded(self, options: Any, given: Any) -> Tensor:
        layout, shape, inverse = options
        made = call.operator(self.name)(given[0], layout, list(shape), inverse)
        return call.copied(self.name, "out", given[1], made)

    def check(self, options: Any, given: Any) -> call.Checked:
        (layout, shape, inverse), (source, out) = options, given
        if out is None:
            out = source.new_empty(shape, dtype=torch.uint8)
        given = source.detach().view(torch.uint8)
        if given.is_cuda and given.data_ptr() % VECTOR_BYTES:
            given = given.clone()
        spec = Relayout(layout, inverse)
        if inverse and out.numel():
            given = given.view(spec.map.padded(out.shape) if spec.map.pads else out.shape)
        return call.Checked(spec if out.numel() else None, (given, out), out)


_RELAYOUT = _Relayout("relayout")


def _fake_relayout(source: Tensor, layout: str, shape: Sequence[int], *_: Any) -> Tensor:
    return source.new_empty(tuple(shape), dtype=torch.uint8)


call.define(
    "relayout",
    "(Tensor source, str layout, SymInt[] shape, bool inverse) -> Tensor",
    relayout,
    _fake_relayout,
)
