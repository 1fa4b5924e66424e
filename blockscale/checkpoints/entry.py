"""One weight of a checkpoint as headers tell of it: `Entry`; and what its rules share.

A rule (`schemes.fp4`, `schemes.int4`, `schemes.fp8`) gets the tensor that leads a weight, takes
those that belong to it, and checks names, dtypes and shapes; no data are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockscale.base.formats import MOE, QUANTIZED
from blockscale.checkpoints.files.safetensors import TensorInfo, shown

FLOATS = ("F16", "BF16", "F32")
SCALE_BYTES = ("U8", "F8_E8M0")
PLAIN = ("bf16", "f16", "f32")
"""Formats of plain weights that can be quantised: dtypes in small letters."""
CODES = tuple(MOE)
"""Formats of 4 bits."""
NAMES = {
    "global_scale": "weight_scale_2",
    "global_divisor": "weight_global_scale",
    "zero": "weight_zero",
    "group_index": "weight_group_index",
    "input_scale": "input_scale",
    "pre_quant_scale": "pre_quant_scale",
}
"""By role, what stands after "P." in the names of tensors beside P.weight: ModelOpt's and ours."""


@dataclass(frozen=True)
class Entry:
    """One weight: its format, the scheme that stores it, its tensors by role, its dense shape.

    ``shape`` ends in [N, K] of y = W x; ``group`` is how many values along K share a block scale;
    ``block``, of FP8, is how many rows and columns do.
    """

    name: str
    fmt: str
    scheme: str
    parts: dict[str, TensorInfo]
    shape: tuple[int, ...]
    group: int = 0
    transposed: bool = False
    block: tuple[int, int] | None = None

    def group_in(self, fmt: str) -> int:
        """Return how many values along K share a block scale once the weight is ``fmt``."""
        return QUANTIZED[fmt].block if fmt in QUANTIZED else self.group

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors of the weight."""
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True)
class Facts:
    """What decides how data are read, beyond names and shapes.

    ``gptq_v2``: zeros of GPTQ are stored as they are, and not less one.  ``gptq_words``: one was
    taken from the eight zeros of a word by one subtraction, which borrows.  ``interleaved``: gate
    and up rows alternate, as the model is gpt-oss, or as `blockscale convert` wrote.  ``model`` and
    ``hidden``: the model's type and the width of its layers, where the configuration says them.
    """

    gptq_v2: bool = False
    gptq_words: bool = False
    interleaved: bool = False
    model: str = ""
    hidden: int = 0


class Tensors:
    """All tensors by name, and which of them a weight has taken."""

    def __init__(self, tensors: dict[str, TensorInfo], config: dict[str, Any]) -> None:
        self.by_name = tensors
        self.config = config
        self.used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def take(self, lead: TensorInfo, **names: str) -> dict[str, TensorInfo]:
        """Return the tensors of one weight by role; those that there are not are left out."""
        parts = {"packed": lead}
        parts.update({role: self.by_name[n] for role, n in names.items() if n in self.by_name})
        self.used.update(part.name for part in parts.values())
        return parts

    def first(self, *names: str) -> str:
        """Return the first of ``names`` that there is, else the first of all."""
        return next((name for name in names if name in self.by_name), names[0])


def named(stem: str, *roles: str) -> dict[str, str]:
    """Return the names of the tensors of ``roles`` (none: of all of `NAMES`) beside a weight."""
    return {role: stem + NAMES[role] for role in roles or NAMES}


def need(lead: TensorInfo, parts: dict[str, TensorInfo], role: str, name: str) -> TensorInfo:
    """Return the tensor of a role without which the weight has no values."""
    if role not in parts:
        raise lead.refused(
            f"is a {lead.dtype} weight without {shown(name)}, so it has no values; copy all files "
            "of the checkpoint"
        )
    return parts[role]


def check_dtype(info: TensorInfo, allowed: Sequence[str], more: str = "") -> None:
    """Refuse a tensor of another dtype."""
    if info.dtype not in allowed:
        raise info.refused(
            f"has dtype {info.dtype}, but must have {' or '.join(allowed)}{more}; convert the "
            "checkpoint again"
        )


def byte_shape(info: TensorInfo) -> tuple[int, ...]:
    """Return the shape of two codes a byte; the dtype F4 counts codes, the others bytes."""
    if info.dtype != "F4":
        return info.shape
    if not info.shape or info.shape[-1] % 2:
        raise info.refused(
            f"is F4 {list(info.shape)}, but its last dimension must be even: two codes are one "
            "byte; convert the checkpoint again"
        )
    return (*info.shape[:-1], info.shape[-1] // 2)


def weight_groups(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each of compressed-tensors' ``config_groups`` says on weights."""
    groups = config.get("config_groups")
    found = groups.values() if isinstance(groups, dict) else ()
    said = [group.get("weights") for group in found if isinstance(group, dict)]
    return [weights for weights in said if isinstance(weights, dict)]


def ones_dropped(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without its dimensions of 1."""
    return tuple(d for d in shape if d != 1)


def alternates(entry: Entry, facts: Facts) -> bool:
    """Return whether gate and up rows take turns in a weight that has both."""
    leaf = entry.name.removesuffix(".weight").rpartition(".")[2]
    return facts.interleaved or entry.scheme == "gpt-oss" or leaf == "mlp1_weight"
