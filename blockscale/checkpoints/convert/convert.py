"""Convert a checkpoint to this package's layout, one tensor at a time, so that it can be killed.

Weights of a plain checkpoint are quantised, 4-bit ones re-packed without rounding, and everything
else is copied.
Files appear whole, one after the other; the index and the configuration come last.  A run that
finds whole files of the same plan goes on after them; the bytes are those of an undisturbed run.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from blockscale.base import files
from blockscale.base.errors import CheckpointError
from blockscale.base.files import PARTIAL
from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.convert.plan import SHARD_BYTES, Options, Plan, Step, make_plan
from blockscale.checkpoints.convert.quantize import Source, rows_of
from blockscale.checkpoints.convert.writer import (
    Output,
    ShardWriter,
    header_bytes,
)
from blockscale.checkpoints.entry import NAMES, Entry, alternates
from blockscale.checkpoints.experts.modules import Bundle, one
from blockscale.checkpoints.experts.stack import gate_and_up
from blockscale.checkpoints.files.folder import CONFIGS, INDEX, RECORD, quantization_of
from blockscale.checkpoints.files.safetensors import read
from blockscale.checkpoints.schemes import fp8
from blockscale.checkpoints.schemes.layout import LINEAR, lay_scales, lay_trtllm
from blockscale.checkpoints.schemes.tiles import Matrices, lay_expert
from blockscale.checkpoints.weight import Weight
from blockscale.ops.moe import tiles as moe_tiles

Tensor = torch.Tensor

_OTHER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.bpe", "*.py")
"""Of a model in a folder of its own, beside the weights: tokenizer, templates, code of auto_map."""
_OF_A_MODEL = (
    *("generation_config.json", "chat_template.*", "*processor_config.json", "tokenizer*.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.tiktoken"),
    *("configuration_*.py", "modeling_*.py", "tokenization_*.py", "processing_*.py"),
)
"""The same, of a single file, whose folder may hold anything."""
_MAX_OTHER = 1 << 28


def convert(
    ckpt: Checkpoint,
    output: str | Path,
    fmt: str = "nvfp4",
    *,
    keep: tuple[str, ...] = (),
    shard_bytes: int = SHARD_BYTES,
    layout: str | None = None,
    target: str | None = None,
    activation: str = "a16",
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Plan:
    """Write ``ckpt`` to the folder ``output`` and return what was done.

    Args:
        fmt, keep, shard_bytes, layout, target, activation: see `plan.Options`.
        progress: called with the bytes of each weight that is done, also by an earlier run.

    Raises:
        ValueError: options that have no meaning.
        CheckpointError: the folder has other contents or cannot be written, weights are NaN or
            infinite, or a layout cannot hold one of them.
    """
    options = Options(fmt, keep, shard_bytes, layout, target, activation)
    return run(ckpt, Path(output), make_plan(ckpt, options), progress)


def run(
    ckpt: Checkpoint,
    output: Path,
    plan: Plan,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Plan:
    """Write what ``plan`` says, see `convert`."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with _locked(output):
            _begin(output, plan)
            files.remove_partial(output)
            source = Source(ckpt)
            for name, steps in zip(plan.names, plan.shards, strict=True):
                outputs = [out for step in steps for out in step.outputs.values()]
                if _whole(output / name, outputs):
                    progress(sum(step.nbytes for step in steps))
                    continue
                _write_shard(source, output / name, steps, progress)
            _finish(ckpt, output, plan)
    except OSError as error:
        where = error.filename or output
        raise CheckpointError(
            f"{where} cannot be written: {error.strerror}; make room, or mend what is wrong, and "
            "run the same command again: it goes on after the files that are whole"
        ) from error
    return plan


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Keep other runs out; the lock ends with the process, however that ends."""
    descriptor = os.open(output, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise CheckpointError(
            f"{output} is being written by another process; wait for it or choose another folder"
        ) from None
    finally:
        os.close(descriptor)


def _begin(output: Path, plan: Plan) -> None:
    record = output / RECORD
    if record.is_file():
        try:
            state = json.loads(record.read_bytes())
        except ValueError:
            state = {}
        if not isinstance(state, dict) or state.get("plan") != plan.digest:
            raise CheckpointError(
                f"{output} holds the conversion of another checkpoint, or with other options; "
                "choose another folder, or remove this one"
            )
        return
    names = [path.name for path in output.iterdir()]  # a run may have been killed at its first file
    others = [n for n in names if not (n.startswith(f".{RECORD}.") and n.endswith(PARTIAL))]
    if others:
        raise CheckpointError(
            f"{output} has other contents, e.g. {min(others)!r}; choose a folder that is new or "
            "empty"
        )
    _record(output, plan, "running")


def _record(output: Path, plan: Plan, state: str) -> None:
    facts = {
        "state": state,
        "plan": plan.digest,
        "format": plan.options.fmt,
        "layout": plan.options.chosen,
        "files": plan.names,
    }
    files.write(output / RECORD, json.dumps(facts, indent=1))


def _whole(path: Path, outputs: list[Output]) -> bool:
    """Return whether the file is there; its name came after its bytes were on the disk."""
    if not path.is_file():
        return False
    head = header_bytes(outputs)
    with path.open("rb") as file:
        same = file.read(len(head)) == head
    return same and path.stat().st_size == len(head) + sum(out.nbytes for out in outputs)


def _write_shard(
    source: Source, path: Path, steps: tuple[Step, ...], progress: Callable[[int], None]
) -> None:
    writer = ShardWriter(path, [out for step in steps for out in step.outputs.values()])
    try:
        for step in steps:
            for role, value, at in _pieces(source, step):
                writer.write(step.outputs[role], value, at)
            progress(step.nbytes)
        writer.close()
    finally:
        writer.abandon()


def _pieces(source: Source, step: Step) -> Iterator[tuple[str, Tensor, int]]:
    """Yield pieces of the outputs of a step: role, values, and after how many bytes they begin."""
    if step.action == "copy":
        yield from _copied(step.entries[0])
    elif step.bundle is not None:
        yield from _experts(source, step, step.bundle)
    else:
        entry = step.entries[0]
        experts = entry.shape[0] if len(entry.shape) == 3 else 1
        for e in range(experts):
            single = one(entry, e) if len(entry.shape) == 3 else entry
            weight = source.matrix(step, single, e)
            for role, value in _laid(step, weight):
                out = step.outputs[role]
                each = out.shape[:1] == (experts,) and len(entry.shape) == 3
                if each or e == 0:
                    yield role, value, e * (out.nbytes // experts) if each else 0


def _copied(entry: Entry) -> Iterator[tuple[str, Tensor, int]]:
    """Yield a weight as it is stored; experts [E, K, N] beside codes as [E, N, K]."""
    if not entry.transposed:
        for role, part in entry.parts.items():
            yield role, read(part), 0
        return
    at = 0
    for e in range(entry.shape[0]):
        for rows in rows_of(one(entry, e)):
            yield "data", rows, at
            at += rows.nbytes


def _experts(source: Source, step: Step, bundle: Bundle) -> Iterator[tuple[str, Tensor, int]]:
    for e in range(bundle.experts):
        found = {role: source.matrix(step, bundle.of(role, e), e) for role in bundle.roles}
        for role, weight in found.items():
            if f"{role}_input_scale" in step.outputs:
                assert weight.input_scale is not None
                yield f"{role}_input_scale", weight.input_scale.reshape(1), 4 * e
        if "gate_up" in found:
            gate, up = gate_and_up(found["gate_up"])
            expert = Matrices(gate, up, found["down"])
        else:
            expert = Matrices(found.get("gate"), found["up"], found["down"])
        del found
        for role, value in lay_expert(step.layout, step.facts, expert, step.kernel):
            yield role, value, e * (step.outputs[role].nbytes // bundle.experts)


def _laid(step: Step, weight: Weight) -> Iterator[tuple[str, Tensor]]:
    """Yield the outputs of one matrix by role."""
    scale, packed = weight.block_scale, weight.packed
    assert scale is not None
    assert packed is not None
    if step.layout == "trtllm":
        yield from lay_trtllm(packed, scale, weight.zero, step.kernel, False).items()
    else:
        yield "packed", packed
        yield "block_scale", lay_scales(step.layout, scale)
    for role in NAMES:
        if role not in step.outputs or (role == "zero" and step.layout == "trtllm"):
            continue
        value = getattr(weight, role)
        if role == "group_index" and value is None:  # it was given, but says nothing
            value = (
                torch.arange(weight.shape[-1], dtype=torch.int32, device="cpu") // weight.group_size
            )
        assert value is not None, role
        yield role, value


def _finish(ckpt: Checkpoint, output: Path, plan: Plan) -> None:
    _copy_others(ckpt, output)
    if len(plan.shards) > 1:
        pairs = zip(plan.names, plan.shards, strict=True)
        outputs = [
            (out, name) for name, steps in pairs for s in steps for out in s.outputs.values()
        ]
        size = sum(out.nbytes for out, _ in outputs)
        weight_map = {out.name: name for out, name in outputs}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        files.write(output / INDEX, json.dumps(index, indent=1))
    configs, said = ckpt.configs, _quantization(ckpt, plan)
    if said:  # else all is as it was, and so is what the source says of it
        config = {**configs.get("config.json", {}), "quantization_config": said}
        configs = {"config.json": config}
    for name, config in configs.items():
        files.write(output / name, json.dumps(config, indent=1))
    _record(output, plan, "complete")


def _quantization(ckpt: Checkpoint, plan: Plan) -> dict[str, Any]:
    """Return what config.json says on the weights that were written."""
    codes = [step for step in plan.steps if step.action != "copy"]
    if not codes:
        return {}
    copies = [step for step in plan.steps if step.action == "copy"]
    more: dict[str, Any] = {}
    if any(step.fmt == "fp8" for step in copies):
        more |= fp8.told(quantization_of(ckpt.configs))
    if any(alternates(entry, ckpt.facts) for step in codes for entry in step.entries):
        more["gate_up"] = "interleaved"
    formats = {step.fmt for step in codes}
    groups = {e.group_in(step.fmt) for step in codes for e in step.entries}
    ignored = [step.entries[0].name.removesuffix(".weight") for step in copies]
    only = formats.pop() if len(formats) == 1 else "mixed"
    algo = "MIXED_PRECISION" if only == "mixed" else only.upper()
    if plan.options.chosen != LINEAR:
        options = plan.options
        heads = {s.bundle.head: s.facts for s in codes if s.bundle is not None}
        version = moe_tiles.REVISION if options.chosen == "tiles64" else 1
        ours: dict[str, Any] = {
            "layout": options.chosen,
            "version": version,
            "target": options.target,
        }
        if options.chosen == "trtllm":
            ours.update(sm=options.kernel.sm, activation=options.kernel.activation)
        said = {"quant_method": "blockscale", "blockscale": {**ours, "experts": heads}}
    elif only == "int4":
        return {"quant_method": "blockscale", "bits": 4, **_one_group(groups), **more}
    else:
        said = {"quant_method": "modelopt"}
    return {**said, "quant_algo": algo, "ignore": ignored, **_one_group(groups), **more}


def _one_group(groups: set[int]) -> dict[str, int]:
    return {"group_size": groups.pop()} if len(groups) == 1 else {}


def _copy_others(ckpt: Checkpoint, output: Path) -> None:
    """Copy the tokenizer and the like: small files that say nothing on weights."""
    whole = ckpt.path.is_dir()
    source, patterns = (ckpt.path, _OTHER_FILES) if whole else (ckpt.path.parent, _OF_A_MODEL)
    for path in sorted({path for pattern in patterns for path in source.glob(pattern)}):
        name = path.name
        skipped = name in (*CONFIGS, RECORD) or name.endswith(".index.json")
        if skipped or not path.is_file() or path.stat().st_size > _MAX_OTHER:
            continue
        with path.open("rb") as old, files.NewFile(output / name) as new:
            shutil.copyfileobj(old, new)
