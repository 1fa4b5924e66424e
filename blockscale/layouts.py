"""Orders of rows and scales that others' kernels read, each with its way back.

DeepGEMM's block scales, packed four to an int32 (byte j of word w: block 4w + j), rows innermost:

    word w of row r lies at w * rows + r;  its mega MoE first moves row r of every 128
    to 4 * (r % 32) + r // 32

Gate and up rows of a gated layer, granules of g rows in turns: row g * i + j of gate goes to
2g * i + j, of up to 2g * i + g + j.

Marlin's scales [G, N], by position in every 64 columns of a line ("group", "e4m3") or every 32 of
all scales ("column"): see `MARLIN_ORDER`.
"""

from __future__ import annotations

import torch

from blockscale import checks

Tensor = torch.Tensor

ROW_GROUP = 128
"""Rows that DeepGEMM's permutation keeps together."""

WORD = 4
"""Block scales of an int32, and the rows to which TMA's 16 bytes round up."""

SCALE_BYTES = tuple(dict.fromkeys((*checks.SCALES["nvfp4"], *checks.SCALES["mxfp4"])))
"""Dtypes of block scales of one byte."""

GRANULES = (8, 16, 64)
"""Rows of gate, then of up, that kernels take in turns; "halves" keeps all gate rows first."""

_PLAIN = tuple(i + 8 * j for i in range(8) for j in range(8))
MARLIN_ORDER = {
    # which scale of the piece comes p-th
    "group": _PLAIN,
    "column": tuple(2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)),
    # Marlin decodes four bytes in the order 0, 2, 1, 3
    "e4m3": tuple(_PLAIN[p // 4 * 4 + (0, 2, 1, 3)[p % 4]] for p in range(64)),
}


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
    aligned = scales if scales.storage_offset() % WORD == 0 else scales.clone()
    words = aligned.view(torch.uint8).view(torch.int32).view(e, rows, blocks // WORD)
    pitch = -(-rows // WORD) * WORD
    out = torch.zeros((e, blocks // WORD, pitch), dtype=torch.int32, device=scales.device)
    if permute:
        source = words.view(e, -1, WORD, ROW_GROUP // WORD, blocks // WORD).transpose(2, 3)
        words = source.reshape(words.shape)
    out[:, :, :rows] = words.transpose(1, 2)
    made = out.transpose(1, 2)[:, :rows]
    return made if scales.dim() == 3 else made[0]


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
    plain = words.reshape(e, rows, columns)
    if permute:
        _whole_groups(where, "words", rows)
        plain = plain.view(e, -1, ROW_GROUP // WORD, WORD, columns).transpose(2, 3)
    plain = plain.clone(memory_format=torch.contiguous_format).view(words.shape)
    return plain.view(torch.uint8)


def interleave_gate_up(value: Tensor, granule: int | str) -> Tensor:
    """Return rows [gate | up] in turns of ``granule``: gate 0.., up 0.., gate g.., up g...

    Args:
        value: codes, scales or biases, [2I, ...] or, of experts, [E, 2I, ...]: axis -2 holds the
            rows, but pass biases as [..., 2I, 1].
        granule: one of `GRANULES`, or "halves", which changes nothing.
    """
    rows, g = _gate_up("layouts.interleave_gate_up", value, granule)
    turned = value.unflatten(-2, (2, rows // (2 * g), g)).transpose(-4, -3)
    return turned.clone(memory_format=torch.contiguous_format).flatten(-4, -2)


def deinterleave_gate_up(value: Tensor, granule: int | str) -> Tensor:
    """Return rows [gate | up] of those that `interleave_gate_up` made."""
    rows, g = _gate_up("layouts.deinterleave_gate_up", value, granule)
    turned = value.unflatten(-2, (rows // (2 * g), 2, g)).transpose(-4, -3)
    return turned.clone(memory_format=torch.contiguous_format).flatten(-4, -2)


def marlin_scales(scales: Tensor, order: str = "group") -> Tensor:
    """Return scales [..., G, N] in Marlin's order, in their own dtype.

    Args:
        scales: floats of 8 to 32 bits, or bytes; N is a multiple of 64, of 32 for "column".
        order: "group" for 16-bit scales of groups along K, "column" for one scale per column,
            "e4m3" for one-byte scales of groups.
    """
    where = "layouts.marlin_scales"
    return _marlin(where, scales, order, _marlin_order(where, order))


def undo_marlin_scales(scales: Tensor, order: str = "group") -> Tensor:
    """Return scales [..., G, N] of those that `marlin_scales` made."""
    where = "layouts.undo_marlin_scales"
    return _marlin(where, scales, order, _marlin_order(where, order).argsort())


def _marlin_order(where: str, order: str) -> Tensor:
    """Return which scale of a piece comes p-th, after a check."""
    checks.choice(where, "order", order, tuple(MARLIN_ORDER))
    return torch.tensor(MARLIN_ORDER[order])


def _marlin(where: str, scales: Tensor, order: str, index: Tensor) -> Tensor:
    """Return every piece of a line's scales in the order ``index``."""
    checks.tensor(where, "scales", scales, (*checks.ACTIVATIONS, *SCALE_BYTES))
    piece = len(index)
    if not scales.numel() or scales.shape[-1] % piece:
        up = max(1, -(-scales.shape[-1] // piece)) * piece
        raise ValueError(
            f"{where}: scales have shape {list(scales.shape)}, but order={order!r} takes {piece} "
            f"of a line at a time; pad the columns to {up}"
        )
    # torch indexes no eight-bit floats
    plain = scales.view(torch.uint8) if scales.element_size() == 1 else scales
    made = plain.view(-1, piece).index_select(1, index.to(scales.device))
    return made.view(scales.shape).view(scales.dtype)


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
        up = -(-rows // ROW_GROUP) * ROW_GROUP
        raise ValueError(
            f"{where}: {name} have {rows} rows, but the permutation takes {ROW_GROUP} at a time; "
            f"pad them with zeros to {up}, or pass permute=False for a plain GEMM"
        )


def _three(value: Tensor) -> tuple[int, int, int]:
    """Return the sizes, one expert where there is no axis of them."""
    e, rows, columns = value.shape if value.dim() == 3 else (1, *value.shape)
    return e, rows, columns
