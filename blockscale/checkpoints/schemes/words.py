"""INT4 codes and zeros as schemes store them, brought to bytes [N, K / 2] and zeros [N, groups]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blockscale.base.errors import CheckpointError

if TYPE_CHECKING:
    from blockscale.checkpoints.entry import Entry, Facts

Tensor = torch.Tensor

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word of AWQ holds column ``_AWQ_ORDER[i]`` of its eight."""
_AWQ_COLUMNS = 512
_WORD = 8
_MIDDLE = 8
"""The zero of codes that were signed, or have no zeros."""
_SIGN_BITS = 0x88
_ONES = 0x11111111
_ROWS = 512


def int4_parts(entry: Entry, parts: dict[str, Tensor], facts: Facts) -> dict[str, Any]:
    """Return ``packed``, ``block_scale``, ``zero`` and ``group_index`` of a `Weight`.

    Raises:
        CheckpointError: indices name groups that there are not, or the shape is another one.
    """
    scale = parts["block_scale"]
    zero = parts.get("zero")
    if entry.scheme in ("awq", "gptq"):
        scale = scale.T.contiguous()
        packed, zero = _words(entry, parts, facts)
    elif entry.scheme == "compressed-tensors":
        _check_dense_shape(entry, parts.get("dense_shape"))
        packed = _bytes(parts["packed"]).flatten(-2)
        zero = _packed_zeros(entry, zero)
    elif entry.scheme == "modelopt":
        packed = _modelopt_codes(parts["packed"].view(torch.uint8))
    else:
        packed = parts["packed"]
    if zero is None:
        zero = torch.full(scale.shape, _MIDDLE, dtype=torch.uint8)
    index = _group_index(entry, parts.get("group_index"))
    return {"packed": packed, "block_scale": scale, "zero": zero, "group_index": index}


def _words(entry: Entry, parts: dict[str, Tensor], facts: Facts) -> tuple[Tensor, Tensor | None]:
    words, zeros = parts["packed"], parts.get("zero")
    awq = entry.scheme == "awq"
    if awq:
        packed = _awq_codes(words)
    else:  # little endian: byte j of a word holds the rows 2 j and 2 j + 1
        packed = _bytes(words.T).flatten(-2)
    if zeros is None:
        return packed, None
    if awq:
        zero = _nibbles(zeros)[..., list(np.argsort(_AWQ_ORDER))]
    elif facts.gptq_words and not facts.gptq_v2:  # as GPTQModel undoes it: carries go up
        zero = _nibbles(zeros + _ONES)
    else:  # less one in 4 bits, and 16 is a zero point: 15 is stored for it
        zero = _nibbles(zeros) + (0 if facts.gptq_v2 else 1)
    return packed, zero.flatten(-2)[:, : entry.shape[0]].T.contiguous()


def _bytes(words: Tensor) -> Tensor:
    """Return uint8 [..., W, 4] of int32 [..., W]."""
    flat = words.reshape(-1).contiguous()  # flat: a dimension of 1 may keep a stride of its own
    return flat.view(torch.uint8).view(*words.shape, 4)


def _nibbles(words: Tensor) -> Tensor:
    """Return uint8 [..., W, 8], the nibbles of int32 [..., W] from the lowest on."""
    raw = _bytes(words)
    return torch.stack([raw & 15, raw >> 4], -1).flatten(-2)


def _awq_codes(words: Tensor) -> Tensor:
    """Return [N, K / 2] of AWQ's [K, N / 8], a strip of columns at a time."""
    inner, count = words.shape
    packed = torch.empty((count * _WORD, inner // 2), dtype=torch.uint8)
    for start in range(0, count, _AWQ_COLUMNS // _WORD):
        strip = _nibbles(words[:, start : start + _AWQ_COLUMNS // _WORD])
        codes = strip[..., list(np.argsort(_AWQ_ORDER))].flatten(1).T.contiguous()
        packed[start * _WORD : start * _WORD + len(codes)] = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed


def _packed_zeros(entry: Entry, zero: Tensor | None) -> Tensor | None:
    """Return zeros [..., N, G] of int32 [..., N / 8, G], or of signed ones, which lack 8."""
    if zero is None:
        return None
    if zero.dtype == torch.int8:
        wrong = (zero < -_MIDDLE) | (zero >= _MIDDLE)
        if wrong.any():
            raise CheckpointError(
                f"{entry.parts['zero'].path}: {entry.parts['zero'].name} has the value "
                f"{int(zero[wrong][0])}, but zeros of 4 bits lie between -8 and 7; copy it again"
            )
        return (zero + _MIDDLE).view(torch.uint8)
    rows = _nibbles(zero.transpose(-1, -2)).flatten(-2)[..., : entry.shape[-2]]
    return rows.transpose(-1, -2).contiguous()


def _modelopt_codes(raw: Tensor) -> Tensor:
    """Return codes + 8 as [..., N, K / 2] of signed ones [..., N / 2, K], two outputs a byte."""
    *lead, half, inner = raw.shape
    flat = raw.reshape(-1, half, inner)
    packed = torch.empty((len(flat), half, 2, inner // 2), dtype=torch.uint8)
    for e, one in enumerate(flat):
        for start in range(0, half, _ROWS):
            rows = one[start : start + _ROWS]
            even, odd = rows[:, 0::2], rows[:, 1::2]
            out = packed[e, start : start + _ROWS]
            out[:, 0] = ((even & 15) | (odd << 4)) ^ _SIGN_BITS
            out[:, 1] = ((even >> 4) | (odd & 0xF0)) ^ _SIGN_BITS
    return packed.view(*lead, 2 * half, inner // 2)


def _check_dense_shape(entry: Entry, said: Tensor | None) -> None:
    if said is None:
        return
    found = [int(v) for v in said.flatten()[:4]] if not said.is_floating_point() else []
    if found not in (list(entry.shape), list(entry.shape[-2:])):
        info = entry.parts["dense_shape"]
        raise CheckpointError(
            f"{info.path}: {info.name} says {found}, but words of eight codes of 4 bits and the "
            f"scales give {list(entry.shape)}; other bits, and rows that are no multiple of 8, are "
            "not supported: export it in 4 bits"
        )


def _group_index(entry: Entry, index: Tensor | None) -> Tensor | None:
    if index is None:
        return None
    inner, index = entry.shape[-1], index.long()
    groups = inner // entry.group
    low, high = (int(index.min()), int(index.max())) if index.numel() else (0, 0)
    if low == high == -1:  # compressed-tensors: not in act-order
        return None
    if not 0 <= low <= high < groups:
        raise CheckpointError(
            f"{entry.parts['group_index'].path}: {entry.parts['group_index'].name} has values from "
            f"{low} to {high}, but there are {groups} groups; copy the checkpoint again"
        )
    linear = torch.arange(inner) // entry.group
    return None if torch.equal(index, linear) else index.int()
