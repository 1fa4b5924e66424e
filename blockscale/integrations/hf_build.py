"""From a job of `hf_plan` to the module, one at a time: weights are read, quantised, prepared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.experts.experts import Experts
from blockscale.checkpoints.weight import Weight
from blockscale.integrations.hf_experts import ModelExperts
from blockscale.integrations.hf_fused import GatedMlp, Part, Shared
from blockscale.integrations.hf_plan import DenseJob, ExpertsJob, Job, MergedJob
from blockscale.nn.linear import Linear, Options, bias_of, int4_layer, load, stacked_biases
from blockscale.nn.prepared import own

Tensor = torch.Tensor

_CODES = 15
_CHUNK = 1 << 21
"""Values that are quantised at a time."""


def build(ckpt: Checkpoint, job: Job, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Return the module of ``job``, its weights on ``device``.

    Raises:
        CheckpointError: data are none of their format, or no kernel takes them.
        ValueError: sizes that no kernel takes.
    """
    if isinstance(job, DenseJob):
        return _dense(ckpt, job, device, dtype)
    if isinstance(job, ExpertsJob):
        return _experts(ckpt, job, device, dtype)
    if job.fmt == "int4":
        return _int4(ckpt, job, device, dtype)
    made = load(ckpt, job.source, Options(job.fmt, dtype), device)
    return made.to(device)


def put(
    model: Any, ckpt: Checkpoint, job: Job, device: torch.device, dtype: torch.dtype
) -> list[Job]:
    """Put what ``job`` makes into the model; return the jobs that were done.

    Those are the parts of a `MergedJob`, if their data do not fit into one weight; errors: `build`.
    """
    if not isinstance(job, MergedJob):
        model.set_submodule(job.module, build(ckpt, job, device, dtype).eval())
        return [job]
    if not _joinable(ckpt, job):
        return [done for part in job.parts for done in put(model, ckpt, part, device, dtype)]
    layer = _merged(ckpt, job, device, dtype).eval()
    parent, _, leaf = job.module.rpartition(".")
    if job.gated:
        model.set_submodule(parent, GatedMlp(layer, model.get_submodule(parent).down_proj).eval())
        return [job]
    model.get_submodule(parent).add_module(leaf, layer)
    shared = Shared(layer, job.sizes)
    for number, part in enumerate(job.parts):
        model.set_submodule(part.module, Part(shared, number).eval())
    return [job]


def _joinable(ckpt: Checkpoint, job: MergedJob) -> bool:
    """Return whether the parts have the same order of groups and factors of their input."""
    first, *others = (ckpt.weight(part.source) for part in job.parts)
    names = ("group_index", "pre_quant_scale")
    pairs = [(getattr(first, n), getattr(other, n)) for n in names for other in others]
    return all(a is b is None or (a is not None and a.equal(b)) for a, b in pairs)


def _merged(ckpt: Checkpoint, job: MergedJob, device: torch.device, dtype: torch.dtype) -> Linear:
    names = [part.source for part in job.parts]
    if job.fmt != "int4":
        options = Options(job.fmt, dtype, job.activation, job.gated)
        return load(ckpt, names, options, device).to(device)
    plain = [ckpt.weight(name) for name in names]
    weights = [to_int4(weight, job.group) for weight in plain]
    return int4_layer(weights, stacked_biases(ckpt, plain), Options(dtype=dtype), device).to(device)


def _int4(ckpt: Checkpoint, job: Job, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    plain = ckpt.weight(job.source)
    weight, bias = to_int4(plain, job.group), bias_of(ckpt, plain)
    return int4_layer([weight], bias, Options(dtype=dtype), device).to(device)


def _experts(
    ckpt: Checkpoint, job: ExpertsJob, device: torch.device, dtype: torch.dtype
) -> torch.nn.Module:
    experts = ckpt.experts(job.source)
    if job.fmt == "int4":
        both = to_int4(experts.gate_up, job.group), to_int4(experts.down, job.group)
        experts = replace(experts, gate_up=both[0], down=both[1])
    elif job.fmt is not None:
        experts = experts.quantized(job.fmt)
    layout = "tiles64" if device.type == "cuda" else "linear"
    weights = experts.prepare(dtype, layout, activation=job.act.activation, device=device)
    if layout == "linear":  # tensors may still lie in the file, which may be written anew
        weights = weights.of(weights.meta(), {name: own(v) for name, v in weights.tensors()})
    return ModelExperts(weights, job.act).to(device)


def _dense(
    ckpt: Checkpoint, job: DenseJob, device: torch.device, dtype: torch.dtype
) -> torch.nn.Module:
    """Return the model's own module with the values of FP8 weights, rounded to ``dtype``."""
    module: Any = job.stock
    if isinstance(module, torch.nn.Linear):
        weight = ckpt.weight(job.source)
        bias = bias_of(ckpt, weight)
        values = {"weight": weight.dequantize(dtype), "bias": bias}
    else:
        values = _dense_experts(ckpt.experts(job.source), module, dtype)
    for name, value in values.items():
        found = None
        if value is not None:
            found = torch.nn.Parameter(value.to(device, dtype), requires_grad=False)
        setattr(module, name, found)
    return job.stock


def _dense_experts(experts: Experts, module: Any, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Return the parameters of a module of experts as it has them."""
    up, down = experts.dequantize(dtype)
    assert up is not None
    assert down is not None
    rows = [up, experts.gate_up_bias]
    if module.has_gate and not module.is_concatenated:
        rows = [None if value is None else _alternating(value) for value in rows]
    weights = [rows[0], down]
    if module.is_transposed:
        weights = [None if w is None else w.transpose(1, 2).contiguous() for w in weights]
    first = "gate_up_proj" if module.has_gate else "up_proj"
    found = {first: weights[0], "down_proj": weights[1]}
    if module.has_bias:
        found |= {f"{first}_bias": rows[1], "down_proj_bias": experts.down_bias}
    return found


def _alternating(rows: Tensor) -> Tensor:
    """Return [E, rows, ...] whose first half is gates with gate and up in turns."""
    gate, up = rows.chunk(2, dim=1)
    return torch.stack([gate, up], 2).flatten(1, 2)


def to_int4(weight: Weight, group: int) -> Weight:
    """Return a weight [..., N, K] as codes of 4 bits, ``(code - zero) * scale``.

    ``group`` values share a scale, (largest - smallest) / 15 of them and of 0, and a zero.  Scales
    are bfloat16 numbers, which GPU kernels need not round.
    """
    *lead, cols = weight.shape
    packed = torch.empty((*lead, cols // 2), dtype=torch.uint8)
    scale = torch.empty((*lead, cols // group), dtype=torch.float32)
    zero = torch.empty(scale.shape, dtype=torch.uint8)
    outs = packed.view(-1, cols // 2), scale.view(-1, cols // group), zero.view(-1, cols // group)
    step = max(1, _CHUNK // cols)
    for start in range(0, len(outs[0]), step):
        values = weight.rows(start, start + step)
        low, high = values.view(len(values), -1, group).aminmax(dim=-1)
        low, high = low.clamp(max=0), high.clamp(min=0)
        steps = ((high - low) / _CODES).bfloat16().float().clamp(min=1e-30)
        point = (-low / steps).round().clamp(0, _CODES)
        grouped = values.view(len(values), -1, group) / steps[..., None]
        codes = (grouped.round() + point[..., None]).clamp(0, _CODES).to(torch.uint8).flatten(1)
        made = codes[:, 0::2] | codes[:, 1::2] << 4, steps, point.to(torch.uint8)
        for out, value in zip(outs, made, strict=True):
            out[start : start + step] = value
    return Weight(
        *(weight.name, "int4", weight.shape),
        packed=packed,
        block_scale=scale,
        zero=zero,
        group_size=group,
        gate_up=weight.gate_up,
    )
