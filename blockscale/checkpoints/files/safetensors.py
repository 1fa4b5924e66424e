"""One safetensors file: its header, checked in full, and its tensors, mapped one at a time.

The file is 8 bytes (n, little endian), n bytes of JSON, then the data.  Every tensor has a dtype, a
shape and the two ends of its bytes in the data; the tensors tile the data without hole or overlap,
so that a truncated or stretched file is seen before any tensor is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from blockscale.base.errors import CheckpointError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # the bytes: an exponent with bias 127
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F4": torch.uint8,  # two to a byte
}
"""Every dtype that the format knows and this package can size, and as what it is read."""
BITS = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()} | {"F4": 4}
"""Bits of one element."""
_PREFIX = 8
_MAX_HEADER = 400_000_000
"""Bytes; the reference stops at 1e8, which 10^6 tensors with long names pass."""
_MAX_VALUES = 40_000_000
"""Commas and brackets of a JSON text: 10^6 tensors have 10^7; each takes some 70 bytes."""
_MAX_DIMS = 16
_MAX_ELEMENTS = 1 << 60
_MAX_NAME = 1000
_MAPPED = 1 << 20
"""Tensors from this size on are mapped; a process may only hold some 65,000 maps."""
_SHOWN = 80
"""Characters of a foreign value that a message repeats."""


def file_dtype(torch_name: str) -> str:
    """Return what the format calls a dtype of torch."""
    return next(name for name, known in DTYPES.items() if known == getattr(torch, torch_name))


class TensorInfo(NamedTuple):
    """Where one tensor is: its bytes are ``[start, stop)`` of the file ``path``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor's bytes."""
        return self.stop - self.start

    def piece(self, first: int, last: int, of: int, shape: tuple[int, ...]) -> TensorInfo:
        """Return the pieces ``first`` to ``last`` out of ``of`` equal ones, as a tensor."""
        size = self.nbytes // max(1, of)
        start, stop = self.start + first * size, self.start + last * size
        return self._replace(shape=shape, start=start, stop=stop)

    def refused(self, text: str) -> CheckpointError:
        """Return the error that tells of this tensor: which file, its name, then ``text``."""
        return CheckpointError(f"{self.path}: {shown(self.name)} {text}")


def shown(value: object) -> str:
    """Return a foreign value as a message can show it: short and on one line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


@contextmanager
def opened(path: Path, remedy: str) -> Iterator[BinaryIO]:
    """Open a file to be read; CheckpointError: it is none, or cannot be read."""
    if not path.is_file():  # before it is opened: a pipe would wait for ever
        raise CheckpointError(f"{path} is no regular file; {remedy}")
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the tensors of the file by name, and its metadata.

    Raises:
        CheckpointError: the file breaks a rule of the format; the message says which.
    """
    with opened(path, "give a .safetensors file") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(_PREFIX)
        if len(prefix) < _PREFIX:
            raise CheckpointError(
                f"{path} has {size} bytes, but a safetensors file begins with {_PREFIX} bytes of "
                "header length; copy it again"
            )
        length, limit = int.from_bytes(prefix, "little"), min(size - _PREFIX, _MAX_HEADER)
        if length > limit:
            raise CheckpointError(
                f"{path}: the header length is {length}, but at most {limit} bytes can be a header "
                "here; the file is truncated or no safetensors file, so copy it again"
            )
        text = file.read(length)
    entries = parse_json(text, f"{path}: the header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: __metadata__ is {shown(metadata)}, but must be an object")
    return _tensors(path, entries, _PREFIX + length, size), metadata


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in ``text``, in which no key occurs twice.

    Raises:
        CheckpointError: it is none.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise CheckpointError(
                f"{where} has the name {shown(twice)} twice, so it is not clear which one counts; "
                "save the file again with each name once"
            )
        return made

    values = sum(text.count(mark) for mark in b",[{")
    if values > _MAX_VALUES:
        raise CheckpointError(
            f"{where} has {values} values, but at most {_MAX_VALUES} are read; it is no such file "
            "of a checkpoint"
        )
    try:
        made = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is no JSON ({type(error).__name__}: {str(error)[:_SHOWN]}); copy the file "
            "again"
        ) from None
    if not isinstance(made, dict):
        raise CheckpointError(f"{where} is {shown(made)}, but must be a JSON object")
    return made


def _tensors(path: Path, entries: dict[str, Any], base: int, size: int) -> dict[str, TensorInfo]:
    found = {name: _tensor(path, name, entry, base) for name, entry in entries.items()}
    at, before = base, "the header"
    for info in sorted(found.values(), key=lambda t: (t.start, t.stop)):
        if info.stop > size:
            raise CheckpointError(
                f"{path}: tensor {shown(info.name)} ends at byte {info.stop}, but the file has "
                f"{size} bytes; it was truncated, so copy it again"
            )
        if info.start != at:
            what = "overlaps" if info.start < at else "leaves a hole after"
            raise CheckpointError(
                f"{path}: tensor {shown(info.name)} starts at byte {info.start} and {what} "
                f"{before}, which ends at byte {at}; tensors must lie back to back, so save the "
                "file again"
            )
        at, before = info.stop, shown(info.name)
    if at != size:
        raise CheckpointError(
            f"{path}: the tensors end at byte {at}, but the file has {size} bytes; what follows "
            "belongs to no tensor, so copy the file again"
        )
    return found


def _tensor(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    def refused(text: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {shown(name)}{text}")

    if not name.isprintable() or len(name) > _MAX_NAME:
        raise refused(
            f" has a name of {len(name)} characters, but names must have at most {_MAX_NAME}, all "
            "printable; rename it"
        )
    if type(entry) is not dict or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise refused(f" is {shown(entry)}, but needs dtype, shape and data_offsets; save it again")
    dtype, shape, ends = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise refused(
            f" has dtype {shown(dtype)}, but must have one of {', '.join(BITS)}; convert it"
        )
    if not _naturals(shape) or len(shape) > _MAX_DIMS:
        raise refused(
            f" has shape {shown(shape)}, but must have a list of at most {_MAX_DIMS} integers that "
            "are not negative; save it again"
        )
    if not _naturals(ends) or len(ends) != 2 or ends[0] > ends[1]:
        raise refused(
            f" has data_offsets {shown(ends)}, but must have [begin, end] with 0 <= begin <= end; "
            "save it again"
        )
    bits = prod(shape) * BITS[dtype]
    if not bits and prod(d for d in shape if d) >= _MAX_ELEMENTS:
        raise refused(
            f" has shape {shown(shape)}, whose dimensions other than 0 must multiply to less than "
            "2^60; save it again"
        )
    if bits != 8 * (ends[1] - ends[0]):
        raise refused(
            f", {dtype} {shown(shape)}, has {ends[1] - ends[0]} bytes, but must have {bits / 8:g}; "
            "save it again"
        )
    return TensorInfo(name, dtype, tuple(shape), path, base + ends[0], base + ends[1])


def _naturals(values: Any) -> bool:
    return type(values) is list and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def read(info: TensorInfo, *, mapped: bool = True) -> torch.Tensor:
    """Return the tensor, on the CPU; a large one is mapped, and its pages go with it.

    ``mapped=False``: in memory of its own.

    Writing to it changes no file.

    Raises:
        CheckpointError: the file is shorter than when its header was read.
    """
    dtype = DTYPES[info.dtype]
    if not info.nbytes:
        return torch.empty(info.shape, dtype=dtype, device="cpu")
    raw = torch.from_numpy(_bytes(info, mapped))
    if raw.data_ptr() % dtype.itemsize:  # the header's length need not be a multiple of 8
        raw = raw.clone()
    shape = info.shape
    if info.dtype == "F4":
        shape = (*shape[:-1], shape[-1] // 2) if shape and shape[-1] % 2 == 0 else (info.nbytes,)
    return raw.view(dtype).view(shape)


def _bytes(info: TensorInfo, mapped: bool) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if mapped and info.nbytes >= _MAPPED:
        try:
            found = np.memmap(
                info.path, dtype=np.uint8, mode="c", offset=info.start, shape=(info.nbytes,)
            )
        except (ValueError, OSError) as error:
            raise _changed(info, str(error)) from error
        return found.view(np.ndarray)
    made = np.empty(info.nbytes, dtype=np.uint8)
    try:
        with info.path.open("rb", buffering=0) as file:
            file.seek(info.start)
            got = file.readinto(made.data) if info.nbytes else 0
    except OSError as error:
        raise _changed(info, str(error)) from error
    if got != info.nbytes:
        raise _changed(info, f"{got} of {info.nbytes} bytes")
    return made


def _changed(info: TensorInfo, why: str) -> CheckpointError:
    return CheckpointError(
        f"{info.path}: tensor {shown(info.name)} can no longer be read ({why}); the file changed "
        "after it was opened, so open the checkpoint again"
    )
