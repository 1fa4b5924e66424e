"""The matrices that `blockscale convert` writes, before any layout: as stored, or quantised.

All weights of a group ({q, k, v}, {gate, up}) share the largest value of the group, so that kernels
may join them: a first pass finds it, and remembers it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isfinite

import numpy as np
import torch

from blockscale.base.errors import CheckpointError
from blockscale.base.formats import QUANTIZED
from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.convert.plan import Step
from blockscale.checkpoints.entry import Entry
from blockscale.checkpoints.experts.modules import one
from blockscale.checkpoints.experts.stack import flat
from blockscale.checkpoints.files.safetensors import read
from blockscale.checkpoints.moves import transposed
from blockscale.checkpoints.schemes import fp4
from blockscale.checkpoints.schemes.kinds import load
from blockscale.checkpoints.weight import Weight

Tensor = torch.Tensor

_VALUES = 1 << 21
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
        weight = quantized(entry, step.fmt, amax)
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
            most = max(map(largest, stored_rows(single)), key=_order, default=0.0)
            if not isfinite(most):
                raise CheckpointError(
                    f"{entry.name} has values that are NaN or infinite, which no 4-bit format "
                    "holds; mend the weight, or leave it as it is: --keep"
                )
            self._amax[key] = most
        return self._amax[key]


def _order(value: float) -> float:
    """Return a key by which NaN is the largest."""
    return value if isfinite(value) else float("inf")


def stored_rows(entry: Entry) -> Iterator[Tensor]:
    """Yield some rows of a plain matrix after the other, as the file has them.

    Each is read by itself, into memory of its own: at 1 GB/s and more, where copying out of a map
    of a file whose data are not aligned took ten times as long on two busy cores.
    """
    info = entry.parts["data"]
    count, width = info.shape[-2:]
    step = max(1, _VALUES // max(1, width))
    for start in range(0, count, step):
        stop = min(count, start + step)
        yield read(info.piece(start, stop, count, (stop - start, width)), mapped=False)


def rows_of(entry: Entry) -> Iterator[Tensor]:
    """Yield some rows [n, K] of a plain matrix [N, K] after the other."""
    if not entry.transposed:
        yield from stored_rows(entry)
        return
    data = read(entry.parts["data"]).flatten(0, -2)  # [K, N]
    step = max(1, _VALUES // max(1, len(data)))
    for start in range(0, data.shape[1], step):
        yield transposed(data[:, start : start + step])


def largest(data: Tensor) -> float:
    """Return the largest magnitude of the values; NaN or inf, if there is any."""
    # as integers, since then one core does 17 GB/s: positive floats are ordered like them, and so
    # are negative ones without their sign
    signed, plain = (np.int32, np.uint32) if data.element_size() == 4 else (np.int16, np.uint16)
    bits = data.contiguous().view(torch.uint8).numpy()
    top = int(np.iinfo(signed).max)
    most = max(int(bits.view(signed).max()), 0)
    below = int(bits.view(plain).max())
    most = max(most, below & top if below > top else 0)
    return float(torch.from_numpy(np.array([most], signed)).view(data.dtype))


def quantized(entry: Entry, fmt: str, amax: float) -> Weight:
    """Return a plain matrix [N, K] as codes of ``fmt``.

    The global scale of nvfp4 is amax / 2688; a block's is its amax / 6, to the nearest E4M3 (nvfp4)
    or up to a power of two (mxfp4): `blockscale.quantize`.
    """
    shape, top = entry.shape[-2:], None
    if fmt == "nvfp4":
        ratio = torch.tensor([amax], dtype=torch.float32, device="cpu") / (_E2M1_MAX * _E4M3_MAX)
        top = ratio if float(ratio) > 0 else torch.ones_like(ratio)

    def pieces() -> Iterator[tuple[int, Tensor, Tensor | None]]:
        start = 0
        for part in rows_of(entry):
            yield start, part, top
            start += len(part)

    packed, scale = fp4.quantized(fmt, shape, pieces())
    return Weight(
        *(entry.name, fmt, shape, None, packed, scale, None if top is None else top[0]),
        group_size=QUANTIZED[fmt].block,
    )
