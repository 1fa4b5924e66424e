"""What `save_pretrained` writes: the tensors that `blockscale convert` would, and what they are.

Codes and scales come out of the modules, so that the folder they were read from may be gone; names
are those that the checkpoint had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from blockscale.checkpoints.entry import NAMES
from blockscale.integrations.hf_experts import ModelExperts
from blockscale.integrations.hf_plan import ExpertsJob, Job, MergedJob
from blockscale.nn import Int4Linear, Linear
from blockscale.ops.moe.weights import MoeWeights

Tensor = torch.Tensor


def tensors_of(model: Any, jobs: Iterable[Job]) -> dict[str, Tensor]:
    """Return the tensors of all modules that ``jobs`` made, by their names in a checkpoint."""
    found: dict[str, Tensor] = {}
    for job in jobs:
        module = model.get_submodule(job.module)
        if isinstance(job, ExpertsJob):
            assert isinstance(module, ModelExperts)
            found |= _experts(module.moe.weights, job)
        elif isinstance(module, Linear):
            parts = job.parts if isinstance(job, MergedJob) else (job,)
            sizes = job.sizes if isinstance(job, MergedJob) else None
            for part, roles in zip(parts, _rows_of(module, sizes), strict=True):
                found |= _parts(part.source, roles)
    return {name: value.detach().cpu().contiguous().clone() for name, value in found.items()}


def quantization(model: Any, jobs: Iterable[Job], plain: Iterable[str]) -> dict[str, Any]:
    """Return what config.json says on them; ``plain``: names of weights that are not quantised."""
    formats, groups = set(), set()
    for job in jobs:
        module = model.get_submodule(job.module)
        if isinstance(module, ModelExperts):
            formats.add(module.moe.weights.fmt)
            groups.add(module.moe.weights.group)
        elif isinstance(module, Int4Linear):
            formats.add("int4")
            groups.add(module.prepared.group)
        elif isinstance(module, Linear):
            formats.add(module.fmt)
            groups.add(module.weights.group)
    size = {"group_size": groups.pop()} if len(groups) == 1 else {}
    if formats == {"int4"}:
        return {"quant_method": "blockscale", "bits": 4, **size}
    algo = formats.pop().upper() if len(formats) == 1 else "MIXED_PRECISION"
    return {"quant_method": "modelopt", "quant_algo": algo, "ignore": sorted(plain), **size}


def _parts(name: str, roles: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the tensors of one weight by name; ``packed`` has that of the weight itself."""
    base = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
    named = {"packed": name, "block_scale": f"{base}weight_scale"}
    named |= {role: base + leaf for role, leaf in NAMES.items()}
    named["bias"] = f"{name.removesuffix('.weight')}.bias"
    return {named[role]: value for role, value in roles.items() if value is not None}


def _rows_of(layer: Linear, sizes: tuple[int, ...] | None) -> Iterator[dict[str, Tensor | None]]:
    """Yield the tensors of a layer by role, those of ``sizes`` rows after each other; None: all."""
    tops: list[Tensor]
    if isinstance(layer, Int4Linear):
        rows = layer.prepared.to_rows()
        whole = {"group_index": rows.group_index, "pre_quant_scale": rows.pre_quant_scale}
        fmt, scale, tops = "int4", rows.scale, []
        by_row = {"packed": rows.packed, "zero": _points(rows.zero, scale), "bias": rows.bias}
    else:
        weights = layer.weights.to_linear()
        whole = {"pre_quant_scale": layer.pre_quant_scale}
        fmt, scale, tops = weights.fmt, weights.block_scale, [*weights.global_scale]
        by_row = {"packed": weights.packed, "bias": weights.bias}
    sizes = (len(scale),) if sizes is None else sizes
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        mine = slice(start, start + size)
        at = {1: 0, 2: number}.get(len(tops), start)  # one, of gates and of ups, or of each row
        block: Tensor = scale[mine]
        top: Tensor | None = None
        if tops:
            block, top = _scales(fmt, block, tops[at])
        rows_of = {name: None if value is None else value[mine] for name, value in by_row.items()}
        yield {**rows_of, "block_scale": block, "global_scale": top, **whole}


def _points(zero: Tensor | None, scale: Tensor) -> Tensor:
    """Return the zeros of int4, which are 8 where there are none."""
    return torch.full(scale.shape, 8, dtype=torch.uint8) if zero is None else zero


def _scales(fmt: str, scale: Tensor, top: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return block scales as they are stored, and a global scale where the format has one.

    ``top`` broadcasts to the rows of the scales; of mxfp4 it is a power of two, which is taken in.
    """
    if fmt == "nvfp4":
        return scale.view(torch.float8_e4m3fn), top.float()
    if fmt == "mxfp4":
        shift = torch.log2(top).round().int()
        used = scale.int() + shift.reshape(*shift.shape, *(1,) * (scale.dim() - shift.dim()))
        return used.clamp(0, 254).to(torch.uint8), None
    return scale, None


# ---- Experts ------------------------------------------------------------------------------------


def _experts(weights: MoeWeights, job: ExpertsJob) -> dict[str, Tensor]:
    linear = weights.to_linear()
    found: dict[str, Tensor] = {}
    for role, names in job.names.items():
        found |= _role(linear, job, role, names)
    for role, names in job.biases.items():
        value = linear.w2_bias if role == "down" else linear.w13_bias
        assert value is not None
        rows = _rows(value, job, role, linear)
        found |= dict(zip(names, [rows] if role in job.whole else rows, strict=True))
    return found


def _role(
    weights: MoeWeights, job: ExpertsJob, role: str, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return the tensors of gate, up, both, or down: of all experts, or one by one."""
    stem = "w2" if role == "down" else "w13"
    values = {leaf: getattr(weights, f"{stem}{leaf}") for leaf in ("", "_scale", "_zero")}
    parts = {
        leaf: None if value is None else _rows(value, job, role, weights)
        for leaf, value in values.items()
    }
    top = weights.w2_global if role == "down" else weights.w13_global
    if role in ("gate", "up"):
        top = top[:, 1 if role == "up" and weights.gated else 0]
    elif role == "gate_up" and bool((top[:, 0] == top[:, 1]).all()):
        top = top[:, 0]
    whole = role in job.whole
    found: dict[str, Tensor] = {}
    for e, name in enumerate(names):
        mine = {k: v if v is None or whole else v[e] for k, v in parts.items()}
        codes, scale = mine[""], mine["_scale"]
        assert codes is not None
        assert scale is not None
        scale, factor = _scales(weights.fmt, scale, top if whole else top[e])
        zero = _points(mine["_zero"], scale) if weights.fmt == "int4" else None
        roles = {"packed": codes, "block_scale": scale, "global_scale": factor, "zero": zero}
        found |= _parts(name, roles)
    return found


def _rows(value: Tensor, job: ExpertsJob, role: str, weights: MoeWeights) -> Tensor:
    """Return the rows of one role, in the order that the checkpoint has."""
    inner = weights.intermediate
    if role == "gate":
        return value[:, :inner]
    if role == "up" and weights.gated:
        return value[:, inner:]
    if role == "gate_up" and job.alternating:
        gate, up = value.chunk(2, dim=1)
        return torch.stack([gate, up], 2).flatten(1, 2)
    return value
