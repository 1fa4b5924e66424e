"""Write one safetensors file: the header first, then one tensor after the other; whole or not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from blockscale.base.files import NewFile
from blockscale.checkpoints.files.safetensors import BITS

Tensor = torch.Tensor

_ALIGN = 64
"""Of the data, so that mapped tensors are aligned as the kernels like it where sizes allow it."""
_WRITE = 1 << 24
"""Bytes of one write: pages of a mapped source are read just before they are written."""


class Output(NamedTuple):
    """A tensor that will be written: known before its data are."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor's bytes."""
        return prod(self.shape) * BITS[self.dtype] // 8


def header_bytes(outputs: Iterable[Output]) -> bytes:
    """Return all bytes of the file before the data."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for out in outputs:
        ends = [at, at + out.nbytes]
        entries[out.name] = {"dtype": out.dtype, "shape": out.shape, "data_offsets": ends}
        at = ends[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


class ShardWriter:
    """Writes the tensors of one file, whole or in pieces; `close` gives the file its name.

    Until then the bytes are in a file beside it, whose name no reader looks for.
    """

    def __init__(self, path: Path, outputs: list[Output]) -> None:
        self._path, self._left = path, sum(out.nbytes for out in outputs)
        head = header_bytes(outputs)
        self._starts, at = {}, len(head)
        for out in outputs:
            self._starts[out.name] = at
            at += out.nbytes
        self._new = NewFile(path)
        self._put(memoryview(head), 0)

    def write(self, out: Output, value: Tensor, at: int = 0) -> None:
        """Write a piece of a tensor, which begins ``at`` bytes after the tensor does."""
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert at + raw.nbytes <= out.nbytes, (out, value.shape, value.dtype, at)
        self._put(raw.data, self._starts[out.name] + at)
        self._left -= raw.nbytes

    def _put(self, view: memoryview, at: int) -> None:
        while len(view):
            done = os.pwrite(self._new.file.fileno(), view[:_WRITE], at)
            view, at = view[done:], at + done

    def close(self) -> None:
        """Bring the bytes to the disk, then give the file its name."""
        assert self._left == 0, (self._path, self._left)
        self._new.commit()

    def abandon(self) -> None:
        """Remove what was written so far; after `close`: do nothing."""
        self._new.abandon()
