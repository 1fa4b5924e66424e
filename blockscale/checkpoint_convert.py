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
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from blockscale.checkpoint_folder import INDEX, RECORD
from blockscale.checkpoint_plan import Plan, Step, make_plan
from blockscale.checkpoint_weight import Weight
from blockscale.checkpoint_writer import (
    PARTIAL,
    Output,
    ShardWriter,
    header_bytes,
    sync_folder,
    write_atomic,
)
from blockscale.errors import CheckpointError
from blockscale.safetensors_file import read

if TYPE_CHECKING:
    from blockscale.checkpoints import Checkpoint

Tensor = torch.Tensor

FORMATS = ("nvfp4", "mxfp4")
SHARD_BYTES = 4 << 30
_ROW_VALUES = 1 << 20
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0
_OTHER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_MAX_OTHER = 1 << 28
_CONFIGS = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")


def convert(
    ckpt: Checkpoint,
    output: Path,
    fmt: str = "nvfp4",
    *,
    keep: tuple[str, ...] = (),
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Plan:
    """Write ``ckpt`` to the folder ``output`` and return what was done.

    Args:
        fmt: what weights of a plain checkpoint become; 4-bit weights keep their format.
        keep: patterns of names of weights that are copied as they are.
        shard_bytes: how many bytes of tensors a file has at most, if it has more than one.
        progress: called with the bytes of each weight that is done, also by an earlier run.

    Raises:
        CheckpointError: the folder has other contents, or weights are NaN or infinite.
    """
    if fmt not in FORMATS:
        raise ValueError(f"convert: fmt is {fmt!r}, but must be one of {', '.join(FORMATS)}")
    if shard_bytes <= 0:
        raise ValueError(f"convert: shard_bytes is {shard_bytes}, but must be positive")
    plan = make_plan(ckpt, fmt, keep, shard_bytes)
    output.mkdir(parents=True, exist_ok=True)
    with _locked(output):
        _begin(output, plan)
        for name, steps in zip(plan.names, plan.shards, strict=True):
            outputs = [out for step in steps for out in step.outputs]
            if _whole(output / name, outputs):
                progress(sum(step.nbytes for step in steps))
                continue
            _write_shard(ckpt, output / name, steps, fmt, progress)
        _finish(ckpt, output, plan)
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
    leftover = f".{RECORD}{PARTIAL}"  # a run that was killed before its first file
    others = [path.name for path in output.iterdir() if path.name != leftover]
    if others:
        raise CheckpointError(
            f"{output} has other contents, e.g. {min(others)!r}; choose a folder that is new or "
            "empty"
        )
    _record(output, plan, "running")


def _record(output: Path, plan: Plan, state: str) -> None:
    facts = {"state": state, "plan": plan.digest, "format": plan.fmt, "files": plan.names}
    write_atomic(output / RECORD, json.dumps(facts, indent=1).encode())


def _whole(path: Path, outputs: list[Output]) -> bool:
    """Return whether the file is there; its name came after its bytes were on the disk."""
    if not path.is_file():
        return False
    head = header_bytes(outputs)
    with path.open("rb") as file:
        same = file.read(len(head)) == head
    return same and path.stat().st_size == len(head) + sum(out.nbytes for out in outputs)


def _write_shard(
    ckpt: Checkpoint,
    path: Path,
    steps: tuple[Step, ...],
    fmt: str,
    progress: Callable[[int], None],
) -> None:
    writer = ShardWriter(path, [out for step in steps for out in step.outputs])
    try:
        for step in steps:
            for out, value in zip(step.outputs, _values(ckpt, step, fmt), strict=True):
                writer.write(out, value)
            progress(step.nbytes)
        writer.close()
    finally:
        writer.abandon()


def _values(ckpt: Checkpoint, step: Step, fmt: str) -> Iterator[Tensor]:
    if step.action == "copy":
        for part in step.entry.parts.values():
            yield read(part)
        return
    weight = ckpt[step.entry.name]
    if step.action == "quantize":
        yield from quantized(weight, fmt)
        return
    for role in step.roles:
        value = getattr(weight, role)
        if role == "group_index" and value is None:  # it was given, but says nothing
            value = torch.arange(weight.shape[-1], dtype=torch.int32) // weight.group_size
        yield value


def quantized(weight: Weight, fmt: str) -> tuple[Tensor, ...]:
    """Return packed codes, block scales and, for nvfp4, the global scale (multiplied).

    The global scale is amax / 2688; a block's is its amax / 6, to the nearest E4M3 (nvfp4) or up to
    a power of two (mxfp4): `blockscale.quantize`.

    Raises:
        CheckpointError: a value is NaN or infinite.
    """
    from blockscale.ops import quantize
    from blockscale.specs import BLOCK_SIZE

    data = weight.data
    assert data is not None
    rows, cols = data.shape
    step = max(1, _ROW_VALUES // cols)
    parts = [data[start : start + step] for start in range(0, rows, step)]
    ends = torch.stack([torch.stack(torch.aminmax(part)) for part in parts] or [torch.zeros(2)])
    amax = float(ends.float().abs().max())  # NaN, if there is any
    if not isfinite(amax):
        raise CheckpointError(
            f"{weight.name} has values that are NaN or infinite, which no 4-bit format holds; mend "
            "the weight, or leave it as it is: --keep"
        )
    top = None
    if fmt == "nvfp4":
        ratio = torch.tensor([amax], dtype=torch.float32) / (_E2M1_MAX * _E4M3_MAX)
        top = ratio if float(ratio) > 0 else torch.ones(1)
    packed = torch.empty((rows, cols // 2), dtype=torch.uint8)
    dtype = torch.float8_e4m3fn if fmt == "nvfp4" else torch.uint8
    scale = torch.empty((rows, cols // BLOCK_SIZE[fmt]), dtype=dtype)
    for start, part in zip(range(0, rows, step), parts, strict=True):
        stop = start + len(part)
        quantize(part, fmt, top, packed=packed[start:stop], block_scale=scale[start:stop])
    return (packed, scale) if top is None else (packed, scale, top[0])


def _finish(ckpt: Checkpoint, output: Path, plan: Plan) -> None:
    _copy_others(ckpt, output)
    if len(plan.shards) > 1:
        pairs = zip(plan.names, plan.shards, strict=True)
        outputs = [(out, name) for name, steps in pairs for s in steps for out in s.outputs]
        size = sum(out.nbytes for out, _ in outputs)
        weight_map = {out.name: name for out, name in outputs}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_atomic(output / INDEX, json.dumps(index, indent=1).encode())
    config = {**ckpt.configs.get("config.json", {})}
    config.pop("quantization_config", None)
    said = _quantization(plan)
    if said:
        config["quantization_config"] = said
    if config:
        write_atomic(output / "config.json", json.dumps(config, indent=1).encode())
    for path in output.glob(f".*{PARTIAL}"):
        path.unlink()
    _record(output, plan, "complete")


def _quantization(plan: Plan) -> dict[str, Any]:
    """Return what config.json says on the weights that were written."""
    steps = [step for shard in plan.shards for step in shard]
    codes = [step for step in steps if step.action != "copy"]
    if not codes:
        return {}
    formats = {step.entry.fmt if step.action == "repack" else plan.fmt for step in codes}
    groups = {step.outputs[0].shape[-1] * 2 // step.outputs[1].shape[-1] for step in codes}
    ignored = [s.entry.name.removesuffix(".weight") for s in steps if s.action == "copy"]
    only = formats.pop() if len(formats) == 1 else "mixed"
    if only == "int4":
        said: dict[str, Any] = {"quant_method": "blockscale", "bits": 4}
    else:
        algo = "MIXED_PRECISION" if only == "mixed" else only.upper()
        said = {"quant_method": "modelopt", "quant_algo": algo, "ignore": ignored}
    return {**said, "group_size": groups.pop()} if len(groups) == 1 else said


def _copy_others(ckpt: Checkpoint, output: Path) -> None:
    """Copy the tokenizer and the like: small files that say nothing on weights."""
    source = ckpt.path if ckpt.path.is_dir() else ckpt.path.parent
    for pattern in _OTHER_FILES:
        for path in sorted(source.glob(pattern)):
            name = path.name
            skipped = name in (*_CONFIGS, RECORD) or name.endswith(".index.json")
            if skipped or not path.is_file() or path.stat().st_size > _MAX_OTHER:
                continue
            temporary = output / f".{name}{PARTIAL}"
            shutil.copyfile(path, temporary)
            os.replace(temporary, output / name)
    sync_folder(output)
