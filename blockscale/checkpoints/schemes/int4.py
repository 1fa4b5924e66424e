"""Rules of INT4 weights: AWQ, GPTQ, compressed-tensors' pack-quantized, ModelOpt, and our own.

All mean (code - zero) * scale in groups along K; where a scheme stores no zeros, they are 8.
"""

from __future__ import annotations

from typing import Any

from blockscale.base.errors import CheckpointError
from blockscale.base.sizes import ceil_div
from blockscale.checkpoints.entry import FLOATS, Entry, Tensors, check_dtype, need
from blockscale.checkpoints.files.safetensors import TensorInfo, shown

WORD = 8
"""Codes of one int32."""
_WORD_BITS = 32


def words(tensors: Tensors, info: TensorInfo, base: str) -> Entry:
    """Return AWQ's or GPTQ's weight of which ``info`` holds the codes; shapes tell which it is."""
    config = tensors.config
    names = {"block_scale": "scales", "zero": "qzeros", "group_index": "g_idx"}
    parts = tensors.take(info, **{role: f"{base}.{n}" for role, n in names.items()})
    scale = need(info, parts, "block_scale", base + ".scales")
    if "zero" not in parts and config.get("sym") is not True and _has_zeros(config):
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
    awq = two and cols * WORD == out
    inner = rows if awq else rows * WORD
    zeros_fit = zero is None or zero.shape == (groups, ceil_div(out, WORD))
    fits = two and (awq or cols == out) and groups > 0
    if not fits or not zeros_fit or inner % 2:
        raise CheckpointError(
            f"{info.path}: {shown(info.name)} is {list(info.shape)} with scales "
            f"{list(scale.shape)} and zeros {list(zero.shape) if zero else 'left out'}, but must "
            "be [K, N / 8] (AWQ) or [K / 8, N] (GPTQ) with [K / group, N] and [K / group, N / 8]; "
            "copy it again"
        )
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
        packed = (*lead[:-1], ceil_div(lead[-1], WORD), scale.shape[-1])
        fits = zero.shape == (packed if zero.dtype == "I32" else scale.shape)
        check_dtype(zero, ("I32", "I8"))
    if not fits:
        raise CheckpointError(
            f"{info.path}: {shown(info.name)} is {list(info.shape)} with scales "
            f"{list(scale.shape)} and zeros {list(zero.shape) if zero else 'left out'}, but must "
            "be [N, K / 8] with [N, K / group] and [N / 8, K / group], or these of each expert; "
            "copy it again"
        )
    inner = WORD * info.shape[-1]
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
        input_scale=base + "input_scale",
        pre_quant_scale=base + "pre_quant_scale",
    )
    _whole_groups(info, p[-1], s[-1])
    shape = (*s[:-1], p[-1])
    return Entry(info.name, "int4", "modelopt", parts, shape, p[-1] // s[-1])


def ours(tensors: Tensors, info: TensorInfo, base: str) -> Entry:
    """Return INT4 as `blockscale convert` writes it."""
    parts = tensors.take(
        info,
        block_scale=base + "weight_scale",
        zero=base + "weight_zero",
        group_index=base + "weight_group_index",
        input_scale=base + "input_scale",
        pre_quant_scale=base + "pre_quant_scale",
    )
    scale = need(info, parts, "block_scale", base + "weight_scale")
    zero = parts["zero"]
    check_dtype(scale, FLOATS)
    check_dtype(zero, ("U8",))
    *lead, half = info.shape or (0,)
    groups = scale.shape[-1] if scale.shape else 0
    if (*lead, groups) != scale.shape or zero.shape != scale.shape or not lead:
        raise CheckpointError(
            f"{info.path}: {shown(info.name)} is {list(info.shape)} with scales "
            f"{list(scale.shape)} and zeros {list(zero.shape)}, but must be [..., N, K / 2] "
            "with [..., N, K / group] twice; copy it again"
        )
    _whole_groups(info, 2 * half, groups)
    _check_index(parts.get("group_index"), 2 * half)
    shape = (*lead, 2 * half)
    return Entry(info.name, "int4", "blockscale", parts, shape, 2 * half // groups)


def _has_zeros(config: dict[str, Any]) -> bool:
    return config.get("zero_point") is not False


def _whole_groups(info: TensorInfo, inner: int, groups: int) -> None:
    if not groups or inner % groups or inner % 2:
        raise CheckpointError(
            f"{info.path}: {shown(info.name)} has K={inner} and {groups} groups, but K must be "
            "even and a multiple of the groups: a last group that is not full is not supported; "
            "quantise it with another group size"
        )


def _check_index(index: TensorInfo | None, inner: int) -> None:
    if index is not None and (index.shape != (inner,) or index.dtype not in ("I32", "I64")):
        raise CheckpointError(
            f"{index.path}: {shown(index.name)} is {index.dtype} {list(index.shape)}, but must "
            f"be I32 [{inner}], one group of each input; copy it again"
        )


def _refuse_other_bits(info: TensorInfo, zero: TensorInfo, out: int) -> None:
    """Refuse codes of 2, 3 or 8 bits, which zeros tell: N of them are bits * N / 32 words."""
    if len(zero.shape) == 2 and out and zero.shape[1] * WORD != out:
        bits = _WORD_BITS * zero.shape[1] / out
        if bits in (2, 3, 8):
            raise CheckpointError(
                f"{info.path}: {shown(info.name)} has bits={bits:.0f}, as its zeros say, but only "
                "4 bits are read; export it so"
            )


def _refuse_eight_bits(info: TensorInfo, config: dict[str, Any]) -> None:
    groups = config.get("config_groups")
    found = [g.get("weights") for g in _objects(groups)]
    bits = {w.get("num_bits") for w in found if isinstance(w, dict) and w.get("type") == "int"}
    if len(bits) == 1 and type(only := bits.pop()) is int and only != WORD // 2:
        raise CheckpointError(
            f"{info.path}: {shown(info.name)} has num_bits={only}, as the configuration says, but "
            "only 4 bits are read; export it so"
        )


def _objects(values: Any) -> list[dict[str, Any]]:
    return [v for v in values.values() if isinstance(v, dict)] if isinstance(values, dict) else []


def _refuse_other_versions(info: TensorInfo, config: dict[str, Any]) -> None:
    bits, version = config.get("bits", 4), str(config.get("version", "gemm")).lower()
    if (bits != 4 and not config.get("dynamic")) or (
        config.get("quant_method") == "awq" and version != "gemm"
    ):
        raise CheckpointError(
            f"{info.path}: {shown(info.name)} has bits={shown(bits)}, version={shown(version)}, "
            "but only 4 bits in AWQ's version gemm or GPTQ's layout are read; export it so"
        )
    form = str(config.get("checkpoint_format", "gptq")).lower()
    if config.get("is_marlin_format") is True:
        form = "marlin"
    if form not in ("gptq", "gptq_v2", "gemm"):
        raise CheckpointError(
            f"{info.path}: {shown(info.name)} is stored for {shown(form)}, but only "
            "checkpoint_format gptq and gptq_v2 are read; export it so"
        )
