"""Weights of experts stacked, joined, split and turned, to [E, out, in] with gate rows first.

Bytes are moved, nothing is rounded: where global scales differ, each expert and each part keeps its
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.moves import as_bytes
from blockscale.checkpoints.weight import ROWS, Weight

Tensor = torch.Tensor

_SAME = ("fmt", "shape", "group_size", "block")
_ALIKE = ("fmt", "group_size", "block")
_TOPS = ("global_scale", "global_divisor")
_SINGLE = (*_TOPS, "input_scale")
_OF_K = ("group_index", "pre_quant_scale")
_PARTS = ("gate", "up")


def stack(name: str, experts: Sequence[Weight]) -> Weight:
    """Return the weight [E, N, K] of equal weights of each expert; scales stay of each expert.

    Raises:
        CheckpointError: the experts differ in format or shape, or in their order of groups.
    """
    shape = experts[0].shape
    if len(shape) == 2:
        return join(name, [(expert,) for expert in experts])
    for e, expert in enumerate(experts):
        _check(name, f"expert {e}", expert, "expert 0", experts[0], _SAME)
    values = [expert.data for expert in experts if expert.data is not None]
    if any(expert.scaled for expert in experts) or len(values) < len(experts):
        raise CheckpointError(
            f"{name}: an expert has shape {shape}, but must have [N, K]; read them one by one, "
            f"{experts[0].name!r}"
        )
    flat = torch.stack([as_bytes(value) for value in values])
    return replace(experts[0], name=name, shape=tuple(flat.shape), data=flat.view(values[0].dtype))


def join(name: str, experts: Sequence[tuple[Weight, ...]]) -> Weight:
    """Return the weight [E, rows, K] whose rows, of each expert, are those of its parts in turn.

    The global scale is [E], or [E, parts] where the parts of an expert have different ones.

    Raises:
        CheckpointError: experts or parts differ in format or shape, or in their order of groups.
    """
    first = experts[0][0]
    for e, parts in enumerate(experts):
        for part, model in zip(parts, experts[0], strict=True):
            _check(name, f"expert {e}", part, "expert 0", model, _SAME)
        for p, part in enumerate(parts[1:], 1):
            _check(name, f"{_PARTS[p]} of expert {e}", part, _PARTS[0], parts[0], _ALIKE)
            if part.shape[-1] != parts[0].shape[-1]:
                raise CheckpointError(
                    f"{name}: {_PARTS[p]} of expert {e} has shape {part.shape}, but {_PARTS[0]} "
                    f"has {parts[0].shape}, and both must have the same K; convert it again"
                )
    rows = sum(part.shape[-2] for part in experts[0])
    made: dict[str, Any] = {field: _rows(name, field, experts) for field in ROWS}
    made |= {field: _single(field, experts) for field in _SINGLE}
    made |= {field: _common(name, field, experts) for field in _OF_K}
    shape = (len(experts), rows, first.shape[-1])
    return replace(first, name=name, shape=shape, **made)


def gather(name: str, experts: Sequence[Weight]) -> Weight:
    """Return the weight [E, N, K] of weights [1, N, K] that are experts of one tensor."""
    made: dict[str, Any] = {}
    for field in ROWS:
        values = [getattr(expert, field) for expert in experts]
        if values[0] is not None:
            flat = torch.cat([as_bytes(value) for value in values])
            made[field] = flat.view(values[0].dtype)
    for field in _SINGLE:
        values = [getattr(expert, field) for expert in experts]
        if values[0] is not None:
            rows = [value.reshape(1, -1) for value in values]
            width = max(row.shape[1] for row in rows)  # 2 where gate and up differ
            table = torch.cat([row.expand(1, width) for row in rows])
            made[field] = table if width > 1 else table[:, 0]
    shape = (len(experts), *experts[0].shape[1:])
    return replace(experts[0], name=name, shape=shape, **made)


def single(weight: Weight, e: int) -> Weight:
    """Return expert ``e`` [N, K] of a weight [E, N, K], without a copy."""
    taken: dict[str, Any] = {}
    for field in (*ROWS, *_SINGLE):
        value = getattr(weight, field)
        whole = value is None or (field in _SINGLE and not value.dim())
        taken[field] = value if whole else value[e]
    for field in _OF_K:
        value = getattr(weight, field)
        taken[field] = value[e] if value is not None and value.dim() == 2 else value
    return replace(weight, shape=weight.shape[1:], **taken)


def _check(
    name: str, what: str, part: Weight, other: str, model: Weight, fields: Sequence[str]
) -> None:
    for field in fields:
        if getattr(part, field) != getattr(model, field):
            raise CheckpointError(
                f"{name}: {what} has {field} {getattr(part, field)}, but {other} has "
                f"{getattr(model, field)}; read them one by one, {part.name!r}"
            )


def _rows(name: str, field: str, experts: Sequence[tuple[Weight, ...]]) -> Tensor | None:
    """Return [E, rows, ...] of a field that has rows: each part is copied once."""
    values = [[getattr(part, field) for part in parts] for parts in experts]
    like = values[0][0]
    if like is None:
        return None
    block = experts[0][0].block
    if field == "block_scale" and block is not None and len(values[0]) > 1:
        odd = [part for part in experts[0][:-1] if part.shape[-2] % block[0]]
        if odd:
            raise CheckpointError(
                f"{name}: gate has {odd[0].shape[-2]} rows, no multiple of the {block[0]} that "
                f"share a scale, so gate and up cannot be one weight; read {odd[0].name!r}"
            )
    dtypes = {v.dtype for parts in values for v in parts}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"{name}: {field} has dtype {like.dtype} and {(dtypes - {like.dtype}).pop()}, but all "
            f"experts must have one; read them one by one, {experts[0][0].name!r}"
        )
    count = sum(len(v) for v in values[0])
    out = torch.empty((len(values), count, *like.shape[1:]), dtype=like.dtype, device="cpu")
    flat = as_bytes(out)
    for e, parts in enumerate(values):
        at = 0
        for part in parts:
            flat[e, at : at + len(part)] = as_bytes(part)
            at += len(part)
    return out


def _single(field: str, experts: Sequence[tuple[Weight, ...]]) -> Tensor | None:
    """Return [E], or [E, parts] where the parts of an expert differ; None unless all have one."""
    values = [[getattr(part, field) for part in parts] for parts in experts]
    found = [v for parts in values for v in parts if v is not None]
    if len(found) != sum(map(len, values)):
        return None
    table = torch.stack([v.reshape(()) for v in found]).view(len(values), -1)
    return table[:, 0].contiguous() if (table == table[:, :1]).all() else table


def _common(name: str, field: str, experts: Sequence[tuple[Weight, ...]]) -> Tensor | None:
    """Return what belongs to K: [K], or [E, K] where experts differ; their parts must not."""
    values = [[getattr(part, field) for part in parts] for parts in experts]
    like = values[0][0]
    for e, parts in enumerate(values):
        for value in parts:
            if not _equal(value, parts[0]) or (value is None) != (like is None):
                raise CheckpointError(
                    f"{name}: {field} of expert {e} is not that of the others (act-order, or "
                    "smoothing of gate apart from up), so they cannot be one weight; read them one "
                    f"by one, {experts[e][0].name!r}"
                )
    if like is None or all(_equal(parts[0], like) for parts in values):
        return like
    return torch.stack([parts[0] for parts in values])


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


# ---- Rows ---------------------------------------------------------------------------------------


def flat(weight: Weight) -> Weight:
    """Return the weight of one expert [1, N, K] as a matrix [N, K]."""
    if len(weight.shape) == 2:
        return weight
    return weight.moved(lambda value: value[0], shape=weight.shape[1:])


def gate_and_up(weight: Weight) -> tuple[Weight, Weight]:
    """Return gate and up of a matrix that holds both, in whichever order."""
    inner = weight.shape[0] // 2
    halves = slice(0, inner), slice(inner, None)
    if weight.gate_up == "interleaved":
        halves = slice(0, None, 2), slice(1, None, 2)
    shape = (inner, *weight.shape[1:])
    tops = {name: getattr(weight, name) for name in _TOPS}
    pairs = {k: v.flatten() for k, v in tops.items() if v is not None and v.numel() == 2}

    def part(p: int) -> Weight:
        own = {name: pair[p] for name, pair in pairs.items()}
        return weight.moved(lambda value: value[halves[p]], shape=shape, gate_up=None, **own)

    return part(0), part(1)


def turned(weight: Weight) -> Weight:
    """Return a weight of data [E, in, out] as [E, out, in]."""
    e, rows, cols = weight.shape
    return weight.moved(
        lambda value: as_bytes(value).transpose(1, 2).contiguous().view(value.dtype),
        shape=(e, cols, rows),
        block=weight.block and weight.block[::-1],
    )


def split_rows(rows: Tensor) -> Tensor:
    """Return [E, rows, ...] with the even rows first."""
    flat = as_bytes(rows)
    return torch.cat([flat[:, 0::2], flat[:, 1::2]], 1).view(rows.dtype)


def gate_first(weight: Weight) -> Weight:
    """Return the weight with the even rows, of gate, first."""
    if weight.block is not None and weight.block[0] > 1:
        raise CheckpointError(
            f"{weight.name}: gate and up alternate under scales of {weight.block[0]} rows each, "
            "which cannot be parted; use the BF16 checkpoint"
        )
    return weight.moved(split_rows, gate_up="halves")


def each(weight: Weight) -> Weight:
    """Return the weight with one global scale of each expert, also where one serves all."""
    experts = weight.shape[0]
    found = {name: getattr(weight, name) for name in _TOPS}
    single = {k: v.repeat(experts) for k, v in found.items() if v is not None and not v.dim()}
    return replace(weight, **single)
