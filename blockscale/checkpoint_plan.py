"""What `blockscale convert` will write: every tensor's name, dtype and shape, from headers alone.

Names are those of ModelOpt: P.weight, P.weight_scale, P.weight_scale_2; INT4 adds P.weight_zero
and, in act-order, P.weight_group_index.  Weights whose name has no ".weight" (all experts in one
tensor) get X, X_weight_scale, …, with K last.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from blockscale.checkpoint_kinds import BLOCK, Entry
from blockscale.checkpoint_writer import Output

if TYPE_CHECKING:
    from blockscale.checkpoints import Checkpoint

KEPT = ("*embed*", "*lm_head*", "*norm*", "*router*", "*.gate.weight", "*shared_expert_gate*")
"""Weights that are never quantised: few bytes, or much loss."""
_CODE_FORMATS = ("nvfp4", "mxfp4", "int4")
_FORMAT_VERSION = 1
"""Goes up when the bytes change that the same checkpoint is converted to."""


@dataclass(frozen=True)
class Step:
    """One weight and what becomes of it: "quantize", "repack" or "copy"."""

    entry: Entry
    action: str
    outputs: tuple[Output, ...]
    roles: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes that are written."""
        return sum(out.nbytes for out in self.outputs)


@dataclass(frozen=True)
class Plan:
    """The files of a conversion; ``digest`` is equal for equal plans of equal sources."""

    fmt: str
    shards: tuple[tuple[Step, ...], ...]
    digest: str

    @property
    def names(self) -> list[str]:
        """Return the names of the files."""
        count = len(self.shards)
        if count == 1:
            return ["model.safetensors"]
        return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def make_plan(ckpt: Checkpoint, fmt: str, keep: tuple[str, ...], shard_bytes: int) -> Plan:
    """Return how ``ckpt`` is converted; plain weights become ``fmt``.

    Where any weight has 4 bits, whoever quantised it left the others out on purpose: they stay.
    """
    entries = list(ckpt.entries.values())
    done = any(entry.fmt in _CODE_FORMATS for entry in entries)
    keep = ("*",) if done else (*KEPT, *keep)
    steps = [_step(entry, fmt, keep) for entry in entries]
    shards: list[list[Step]] = []
    size = shard_bytes
    for step in steps:
        if size + step.nbytes > shard_bytes and size:
            shards.append([])
            size = 0
        shards[-1].append(step)
        size += step.nbytes
    source = [
        (role, *part[:3], part.path.name, part.start, part.path.stat().st_mtime_ns)
        for step in steps
        for role, part in step.entry.parts.items()
    ]
    facts = [_FORMAT_VERSION, fmt, source, vars(ckpt.facts), [len(s) for s in shards]]
    outputs = [out for step in steps for out in step.outputs]
    digest = hashlib.sha256(json.dumps([facts, outputs]).encode()).hexdigest()
    return Plan(fmt, tuple(tuple(shard) for shard in shards), digest)


def _step(entry: Entry, fmt: str, keep: tuple[str, ...]) -> Step:
    if entry.fmt in _CODE_FORMATS:
        return _codes(entry, entry.fmt, "repack")
    if _is_linear(entry, fmt) and not any(fnmatchcase(entry.name, rule) for rule in keep):
        return _codes(entry, fmt, "quantize")
    outputs = tuple(Output(part.name, part.dtype, part.shape) for part in entry.parts.values())
    return Step(entry, "copy", outputs, tuple(entry.parts))


def _is_linear(entry: Entry, fmt: str) -> bool:
    plain = entry.fmt in ("bf16", "f16", "f32") and entry.name.endswith(".weight")
    return (
        plain and len(entry.shape) == 2 and entry.shape[1] > 0 and entry.shape[1] % BLOCK[fmt] == 0
    )


def _codes(entry: Entry, fmt: str, action: str) -> Step:
    *lead, inner = entry.shape
    group = BLOCK.get(fmt, entry.group)
    blocks = (*lead, inner // group)
    dense = entry.name.endswith(".weight")
    base = entry.name if dense else entry.name + "_weight"
    scale = {"nvfp4": "F8_E4M3", "mxfp4": "U8"}.get(fmt) or entry.parts["block_scale"].dtype
    outputs = {
        "packed": Output(entry.name, "U8", (*lead, inner // 2)),
        "block_scale": Output(base + "_scale", scale, blocks),
    }
    if fmt == "nvfp4":
        outputs["global_scale"] = Output(base + "_scale_2", "F32", _experts(entry))
    if fmt == "int4":
        outputs["zero"] = Output(base + "_zero", "U8", blocks)
        if "group_index" in entry.parts:
            outputs["group_index"] = Output(base + "_group_index", "I32", (inner,))
    stem = base.removesuffix("weight")
    for role in ("input_scale", "input_divisor"):
        if role in entry.parts:
            shape = _stored(entry, role)
            outputs["input_scale"] = Output(stem + "input_scale", "F32", shape)
    if "pre_quant_scale" in entry.parts:
        part = entry.parts["pre_quant_scale"]
        outputs["pre_quant_scale"] = Output(stem + "pre_quant_scale", part.dtype, part.shape)
    return Step(entry, action, tuple(outputs.values()), tuple(outputs))


def _experts(entry: Entry) -> tuple[int, ...]:
    for role in ("global_scale", "global_divisor"):
        if role in entry.parts:
            return _stored(entry, role)
    return ()


def _stored(entry: Entry, role: str) -> tuple[int, ...]:
    count = entry.parts[role].nbytes // 4
    return (count,) if count > 1 else ()
