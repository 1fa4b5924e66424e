"""Rules of INT4 weights: AWQ, GPTQ, compressed-tensors' pack-quantized, ModelOpt, and our own.

All mean (code - zero) * scale in groups along K; where a scheme stores no zeros, they are 8.
`values` brings what each stores to bytes [N, K / 2] and zeros [N, groups].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from blockscale.base.errors import CheckpointError
from blockscale.base.sizes import ceil_div
from blockscale.checkpoints.entry import (
    FLOATS,
    Entry,
    Facts,
    Tensors,
    check_dtype,
    named,
    need,
    weight_groups,
)
from blockscale.checkpoints.files.safetensors import TensorInfo, shown

Tensor = torch.Tensor

_WORD = 8
"""Codes of one int32."""
_WORD_BITS = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word of AWQ holds column ``_AWQ_ORDER[i]`` of its eight."""
_AWQ_COLUMNS = 512
_MIDDLE = 8
"""The zero of codes that were signed, or have no zeros."""
_SIGN_BITS = 0x88
_ONES = 0x11111111
_ROWS = 512


def words(tensors: Tensors, info: TensorInfo, base: str) -> Entry:
    """Return AWQ's or GPTQ's weight of which ``info`` holds the codes; shapes tell which it is."""
    config = tensors.config
    names = {"block_scale": "scales", "zero": "qzeros", "group_index": "g_idx"}
    parts = tensors.take(info, **{role: f"{base}.{n}" for role, n in names.items()})
    scale = need(info, parts, "block_scale", base + ".scales")
    if (
        "zero" not in parts
        and config.get("sym") is not True
        and config.get("zero_point") is not False
    ):
        need(info, parts, "zero", base + ".qzeros")
    check_dtype(info, ("I32",))
    check_dtype(scale, FLOATS)
    _refuse_other_versions(info, config)
    two = len(info.shape) == len(scale.shape) == 2
    rows, cols = info.shape if two else (0, 0)
    groups, out = scale.shape if two else (0, 0)
    zero = parts.get("zero")
    if zero is not None:
        check_dtype(zero, ("I32",))
        _refuse_other_bits(info, zero, out)
    awq = two and cols * _WORD == out
    inner = rows if awq else rows * _WORD
    zeros_fit = zero is None or zero.shape == (groups, ceil_div(out, _WORD))
    fits = two and (awq or cols == out) and groups > 0
    if not fits or not zeros_fit or inner % 2:
        wanted = "[K, N / 8] (AWQ) or [K / 8, N] (GPTQ) with [K / group, N] and [K / group, N / 8]"
        raise _misfit(info, scale, zero, wanted)
    _whole_groups(info, inner, groups)
    _check_index(parts.get("group_index"), inner)
    scheme = "awq" if awq else "gptq"
    return Entry(base + ".weight", "int4", scheme, parts, (out, inner), inner // groups)


def compressed_tensors(tensors: Tensors, info: TensorInfo, stem: str) -> Entry:
    """Return the weight whose int32 words are ``stem`` + "_packed": eight codes along K in each."""
    parts = tensors.take(
        info,
        block_scale=stem + "_scale",
        zero=stem + "_zero_point",
        group_index=stem + "_g_idx",
        dense_shape=stem + "_shape",
    )
    scale = need(info, parts, "block_scale", stem + "_scale")
    check_dtype(info, ("I32",))
    check_dtype(scale, FLOATS)
    lead = info.shape[:-1]
    fits = len(info.shape) in (2, 3) and scale.shape[:-1] == lead and 0 not in scale.shape
    zero = parts.get("zero")
    if fits and zero is not None:
        packed = (*lead[:-1], ceil_div(lead[-1], _WORD), scale.shape[-1])
        fits = zero.shape == (packed if zero.dtype == "I32" else scale.shape)
        check_dtype(zero, ("I32", "I8"))
    if not fits:
        wanted = "[N, K / 8] with [N, K / group] and [N / 8, K / group], or these of each expert"
        raise _misfit(info, scale, zero, wanted)
    inner = _WORD * info.shape[-1]
    _refuse_eight_bits(info, tensors.config)
    _whole_groups(info, inner, scale.shape[-1])
    _check_index(parts.get("group_index"), inner)
    group = inner // scale.shape[-1]
    shape = (*lead, inner)
    return Entry(stem, "int4", "compressed-tensors", parts, shape, group)


def modelopt(tensors: Tensors, info: TensorInfo, base: str) -> Entry | None:
    """Return ModelOpt's weight of bytes [N / 2, K], two outputs each; None: it is none.

    weight_scale_2 (W4A8_AWQ) is that of the values as FP8, which kernels divide by and multiply
    with again: it is no part of them.
    """
    scale = tensors.by_name.get(base + "weight_scale")
    p, s = info.shape, scale.shape if scale is not None else ()
    if scale is None or scale.dtype not in FLOATS or len(p) != len(s) or len(p) not in (2, 3):
        return None
    if s[:-1] != (*p[:-2], 2 * p[-2]) or not s[-1]:
        return None
    parts = tensors.take(
        info,
        block_scale=scale.name,
        fp8_scale=base + "weight_scale_2",
        **named(base, "input_scale", "pre_quant_scale"),
    )
    _whole_groups(info, p[-1], s[-1])
    shape = (*s[:-1], p[-1])
    return Entry(info.name, "int4", "modelopt", parts, shape, p[-1] // s[-1])


def ours(tensors: Tensors, info: TensorInfo, base: str) -> Entry:
    """Return INT4 as `blockscale convert` writes it."""
    parts = tensors.take(
        info,
        block_scale=base + "weight_scale",
        **named(base, "zero", "group_index", "input_scale", "pre_quant_scale"),
    )
    scale = need(info, parts, "block_scale", base + "weight_scale")
    zero = parts["zero"]
    check_dtype(scale, FLOATS)
    check_dtype(zero, ("U8",))
    *lead, half = info.shape or (0,)
    groups = scale.shape[-1] if scale.shape else 0
    if (*lead, groups) != scale.shape or zero.shape != scale.shape or not lead:
        raise _misfit(info, scale, zero, "[..., N, K / 2] with [..., N, K / group] twice")
    _whole_groups(info, 2 * half, groups)
    _check_index(parts.get("group_index"), 2 * half)
    shape = (*lead, 2 * half)
    return Entry(info.name, "int4", "blockscale", parts, shape, 2 * half // groups)


def _misfit(
    info: TensorInfo, scale: TensorInfo, zero: TensorInfo | None, wanted: str
) -> CheckpointError:
    return info.refused(
        f"is {list(info.shape)} with scales {list(scale.shape)} and zeros "
        f"{list(zero.shape) if zero else 'left out'}, but must be {wanted}; copy it again"
    )


def _whole_groups(info: TensorInfo, inner: int, groups: int) -> None:
    if not groups or inner % groups or inner % 2:
        raise info.refused(
            f"has K={inner} and {groups} groups, but K must be even and a multiple of the groups: "
            "a last group that is not full is not supported; quantise it with another group size"
        )


def _check_index(index: TensorInfo | None, inner: int) -> None:
    if index is not None and (index.shape != (inner,) or index.dtype not in ("I32", "I64")):
        raise index.refused(
            f"is {index.dtype} {list(index.shape)}, but must be I32 [{inner}], one group of each "
            "input; copy it again"
        )


def _refuse_other_bits(info: TensorInfo, zero: TensorInfo, out: int) -> None:
    """Refuse codes of 2, 3 or 8 bits, which zeros tell: N of them are bits * N / 32 words."""
    if len(zero.shape) == 2 and out and zero.shape[1] * _WORD != out:
        bits = _WORD_BITS * zero.shape[1] / out
        if bits in (2, 3, 8):
            raise info.refused(
                f"has bits={bits:.0f}, as its zeros say, but only 4 bits are read; export it so"
            )


def _refuse_eight_bits(info: TensorInfo, config: dict[str, Any]) -> None:
    bits = {w.get("num_bits") for w in weight_groups(config) if w.get("type") == "int"}
    if len(bits) == 1 and type(only := bits.pop()) is int and only != _WORD // 2:
        raise info.refused(
            f"has num_bits={only}, as the configuration says, but only 4 bits are read; export it "
            "so"
        )


def _refuse_other_versions(info: TensorInfo, config: dict[str, Any]) -> None:
    bits, version = config.get("bits", 4), str(config.get("version", "gemm")).lower()
    if (bits != 4 and not config.get("dynamic")) or (
        config.get("quant_method") == "awq" and version != "gemm"
    ):
        raise info.refused(
            f"has bits={shown(bits)}, version={shown(version)}, but only 4 bits in AWQ's version "
            "gemm or GPTQ's layout are read; export it so"
        )
    form = str(config.get("checkpoint_format", "gptq")).lower()
    if config.get("is_marlin_format") is True:
        form = "marlin"
    if form not in ("gptq", "gptq_v2", "gemm"):
        raise info.refused(
            f"is stored for {shown(form)}, but only checkpoint_format gptq and gptq_v2 are read; "
            "export it so"
        )


# ---- Values -------------------------------------------------------------------------------------


def values(entry: Entry, parts: dict[str, Tensor], facts: Facts) -> dict[str, Any]:
    """Return ``packed``, ``block_scale``, ``zero`` and ``group_index`` of a `Weight`.

    Raises:
        CheckpointError: indices name groups that there are not, or the shape is another one.
    """
    scale = parts["block_scale"]
    zero = parts.get("zero")
    if entry.scheme in ("awq", "gptq"):
        scale = scale.T.contiguous()
        packed, zero = _of_words(entry, parts, facts)
    elif entry.scheme == "compressed-tensors":
        _check_dense_shape(entry, parts.get("dense_shape"))
        packed = _bytes(parts["packed"]).flatten(-2)
        zero = _packed_zeros(entry, zero)
    elif entry.scheme == "modelopt":
        packed = _modelopt_codes(parts["packed"].view(torch.uint8))
    else:
        packed = parts["packed"]
    if zero is None:
        zero = torch.full_like(scale, _MIDDLE, dtype=torch.uint8)
    index = _group_index(entry, parts.get("group_index"))
    return {"packed": packed, "block_scale": scale, "zero": zero, "group_index": index}


def _of_words(entry: Entry, parts: dict[str, Tensor], facts: Facts) -> tuple[Tensor, Tensor | None]:
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
    packed = torch.empty((count * _WORD, inner // 2), dtype=torch.uint8, device="cpu")
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
    packed = torch.empty((len(flat), half, 2, inner // 2), dtype=torch.uint8, device="cpu")
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
    sizes = len(found) in (2, len(entry.shape)) and found[-2:] == list(entry.shape[-2:])
    if not sizes:  # the number of experts is that of the tensor, of which this may be a part
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
    linear = torch.arange(inner, device="cpu") // entry.group
    return None if torch.equal(index, linear) else index.int()
