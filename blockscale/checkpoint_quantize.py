"""The matrices that `blockscale convert` writes, before any layout: as stored, or quantised.

All weights of a group ({q, k, v}, {gate, up}) share the largest value of the group, so that kernels
may join them: a first pass finds it, and remembers it.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING

import torch

from blockscale.checkpoint_bundle import flat, one
from blockscale.checkpoint_entry import Entry
from blockscale.checkpoint_weight import Weight, load
from blockscale.errors import CheckpointError
from blockscale.safetensors_file import read

if TYPE_CHECKING:
    from blockscale.checkpoint_plan import Step
    from blockscale.checkpoints import Checkpoint

Tensor = torch.Tensor

_VALUES = 1 << 20
"""Values that are looked at, or quantised, at a time."""
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0


class Source:
    """A checkpoint, of which one matrix at a time is in memory."""

    def __init__(self, ckpt: Checkpoint) -> None:
        self._facts = ckpt.facts
        self._amax: dict[tuple[str, int], float] = {}

    def matrix(self, step: Step, entry: Entry, e: int) -> Weight:
        """Return the matrix of one entry of expert ``e``, as ``step`` says."""
        if step.action == "repack":
            return flat(load(entry, self._facts))
        members = step.shared if step.fmt == "nvfp4" else ()
        if step.bundle is not None:
            members = tuple(step.bundle.together(entry, e))
        amax = max(self.amax(member, e) for member in (entry, *members))
        weight = quantized(entry.name, _matrix(entry), step.fmt, amax)
        interleaved = step.facts.get("interleaved")
        return replace(weight, gate_up="interleaved" if interleaved else None)

    def amax(self, entry: Entry, e: int) -> float:
        """Return the largest magnitude of expert ``e``.

        Raises:
            CheckpointError: a value is NaN or infinite.
        """
        key = entry.name, e
        if key not in self._amax:
            single = one(entry, e) if len(entry.shape) == 3 and entry.shape[0] > 1 else entry
            data = _matrix(single)
            most = largest(data.T if single.transposed else data)
            if not isfinite(most):
                raise CheckpointError(
                    f"{entry.name} has values that are NaN or infinite, which no 4-bit format "
                    "holds; mend the weight, or leave it as it is: --keep"
                )
            self._amax[key] = most
        return self._amax[key]


def _matrix(entry: Entry) -> Tensor:
    """Return plain values [N, K], where K comes first in the file a transposed view."""
    data = read(entry.parts["data"])
    data = data[0] if data.dim() == 3 else data
    return data.T if entry.transposed else data


def largest(data: Tensor) -> float:
    """Return the largest magnitude of rows; NaN or inf, if there is any."""
    most = 0.0
    for part in data.split(max(1, _VALUES // max(1, data.shape[1]))):
        if part.numel():
            low, high = torch.aminmax(part)
            for end in (abs(float(low)), abs(float(high))):
                if not isfinite(end):
                    return end
                most = max(most, end)
    return most


def quantized(name: str, data: Tensor, fmt: str, amax: float) -> Weight:
    """Return plain values [N, K], possibly a transposed view, as codes of ``fmt``.

    The global scale of nvfp4 is amax / 2688; a block's is its amax / 6, to the nearest E4M3 (nvfp4)
    or up to a power of two (mxfp4): `blockscale.quantize`.
    """
    from blockscale.ops import quantize
    from blockscale.specs import BLOCK_SIZE

    rows, cols = data.shape
    top = None
    if fmt == "nvfp4":
        ratio = torch.tensor([amax], dtype=torch.float32) / (_E2M1_MAX * _E4M3_MAX)
        top = ratio if float(ratio) > 0 else torch.ones(1)
    packed = torch.empty((rows, cols // 2), dtype=torch.uint8)
    dtype = torch.float8_e4m3fn if fmt == "nvfp4" else torch.uint8
    scale = torch.empty((rows, cols // BLOCK_SIZE[fmt]), dtype=dtype)
    step = max(1, _VALUES // cols)
    for start in range(0, rows, step):
        part, stop = data[start : start + step].contiguous(), min(rows, start + step)
        quantize(part, fmt, top, packed=packed[start:stop], block_scale=scale[start:stop])
    return Weight(
        *(name, fmt, (rows, cols), None, packed, scale, None if top is None else top[0]),
        group_size=BLOCK_SIZE[fmt],
    )
