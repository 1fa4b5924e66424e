"""Which bytes one tensor copy moves: `plan` (PTX ISA 5.5.3 "Tiled Mode", 9.7.9.25.5).

A `Transfer` lists units of up to 16 bytes: their global addresses, whether they lie inside the
tensor, and their shared addresses after the swizzle. The pattern of a box depends on the map and on
the low bits of the shared address only, so it is kept; a plan adds the box's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.tma import payload as bytes_of
from blockscale.emulator.tma.modes import PADDED, DataType, Interleave, OobFill, Swizzle, spelling
from blockscale.emulator.tma.reduction import combine, tensor_element
from blockscale.emulator.tma.swizzle import PERIOD, granule, swizzled
from blockscale.emulator.tma.tensormap import TensorMap
from blockscale.emulator.tma.tiling import Tiling

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
SHARED_ALIGNMENT = 128  # of the shared address of every tensor copy
_OFFSET = 0xFFFFFF  # the part of a shared address that counts bytes within a CTA
_ROWS = 4  # of tile::gather4 and tile::scatter4
_NAN = np.array([0xF7, 0x7F] * 8, np.uint8)  # OOB-NaN is 0x7FF7 in every 16 bits (measured, sm_120)


@dataclass(frozen=True, eq=False)
class Pattern:
    """The part of a plan that does not depend on the coordinates or on the base addresses."""

    global_offset: Ints  # [units] bytes from the box's origin
    shared_offset: Ints  # [units] bytes from the shared address, after the swizzle
    inner: int  # units of one row
    distinct: bool  # no byte of global memory occurs twice


@dataclass(frozen=True, eq=False)
class Transfer:
    """One tensor copy: unit i moves `unit` bytes between global_address[i] and shared_address[i].

    Loads write all units to shared memory (`fill` where not inside); stores and reductions touch
    only the units that are inside. `inside` is None if all are. With 16U6_ALIGN16B a store packs 16
    bytes of shared memory into 12 of global memory, hence `global_unit`.
    """

    tiling: Tiling
    load: bool
    unit: int
    global_unit: int
    global_address: Ints
    shared_address: Ints
    inside: NDArray[np.bool_] | None
    distinct: bool
    warnings: tuple[str, ...] = field(default=())

    @property
    def tx_bytes(self) -> int:
        """What the copy adds to complete_tx: bytes of the whole box, filled ones included.

        The gaps of 16U4_ALIGN16B and 16U6_ALIGN16B do not count (measured, sm_120).
        """
        return self.global_address.size * self.global_unit

    @property
    def moved_bytes(self) -> int:
        """Bytes of global memory that the copy reads or writes."""
        count = self.global_address.size if self.inside is None else int(self.inside.sum())
        return count * self.global_unit

    def inside_addresses(self) -> Ints:
        """Global addresses of the units inside the tensor [units]."""
        return self.global_address if self.inside is None else self.global_address[self.inside]

    def global_bytes(self) -> Ints:
        """Address of every byte of global memory that is read or written [bytes]."""
        return bytes_of.spread(self.inside_addresses(), self.global_unit)

    def shared_bytes(self) -> Ints:
        """Shared address of every byte read or written; loads leave the bytes between alone."""
        chosen = self.shared_address
        if self.inside is not None and not self.load:
            chosen = chosen[self.inside]
        return bytes_of.spread(chosen, self.unit)

    def read_global(self, memory: Bytes, base: int) -> Bytes:
        """Load: the bytes for shared memory [units, unit]; memory[0] has address `base`."""
        if self.inside is None:
            data = bytes_of.gather(memory, self.global_address - base, self.unit)
            return self._converted(data)
        data = np.zeros((self.global_address.size, self.unit), np.uint8)
        if self.tiling.oob_fill != OobFill.NONE:
            data[:] = np.resize(_NAN, self.unit)
        found = bytes_of.gather(memory, self.global_address[self.inside] - base, self.unit)
        data[self.inside] = self._converted(found)
        return data

    def write_shared(self, memory: Bytes, data: Bytes) -> None:
        """Load: put the bytes into the destination CTA's shared memory (index 0 is address 0)."""
        bytes_of.scatter(memory, self.shared_address & _OFFSET, data)

    def read_shared(self, memory: Bytes) -> Bytes:
        """Store: the bytes for global memory [units, global_unit]; also of units outside."""
        data = bytes_of.gather(memory, self.shared_address & _OFFSET, self.unit)
        return bytes_of.pack_b6(data) if self.unit != self.global_unit else data

    def write_global(self, memory: Bytes, base: int, data: Bytes) -> None:
        """Store: write the units that are inside the tensor."""
        chosen = data if self.inside is None else data[self.inside]
        bytes_of.scatter(memory, self.inside_addresses() - base, chosen)

    def reduce_global(self, memory: Bytes, base: int, data: Bytes, operation: str) -> None:
        """cp.reduce.async.bulk.tensor: combine the units inside the tensor with memory."""
        element, ftz = tensor_element(self.tiling, operation)
        starts = self.inside_addresses() - base
        chosen = data if self.inside is None else data[self.inside]
        while starts.size:  # overlapping strides name a unit several times: once a round
            first = np.arange(starts.size)
            if not self.distinct:
                first = np.unique(starts, return_index=True)[1]
            old = bytes_of.gather(memory, starts[first], self.unit)
            new = combine(operation, element, old, chosen[first], ftz=ftz)
            bytes_of.scatter(memory, starts[first], new)
            starts, chosen = np.delete(starts, first), np.delete(chosen, first, axis=0)

    def _converted(self, data: Bytes) -> Bytes:
        tf32 = self.tiling.dtype in (DataType.TFLOAT32, DataType.TFLOAT32_FTZ)
        return bytes_of.round_tf32(data) if tf32 else data


def plan(
    tensor: TensorMap,
    coordinates: Sequence[int],
    shared_address: int,
    *,
    load: bool = True,
    mode: str = "tile",
) -> Transfer:
    """The transfer of the box at `coordinates` (innermost first; gather4: column, then four rows).

    `mode` is the load mode of the instruction: tile, tile::gather4 (loads), tile::scatter4
    (stores).
    """
    tiling = tensor.tiling
    _check_mode(tiling, coordinates, load, mode)
    _check_direction(tiling, coordinates, load)
    if shared_address % SHARED_ALIGNMENT:
        raise IllegalOperation(
            f"tensor copy: shared address {shared_address:#x} is not a multiple of "
            f"{SHARED_ALIGNMENT} (CUDA programming guide, tensor copy alignment); align the buffer "
            "to the period of its swizzle pattern (1024 bytes for 128B)"
        )
    four = mode != "tile"
    unit = _unit(tiling, coordinates[0], load)
    pattern = _pattern(tiling, unit, shared_address % PERIOD, four)
    address = tensor.address
    assert address is not None, "the machine binds or decodes the map before it plans a copy"
    if four:
        origin, inside = _four_rows(tiling, coordinates, unit, pattern.inner)
        global_address = np.repeat(origin, pattern.inner) + (pattern.global_offset + address)
    else:
        place = address + _place(tiling, coordinates)
        place = (place + (1 << 63)) % (1 << 64) - (1 << 63)  # far outside still fits 64 bits
        global_address = pattern.global_offset + place
        inside = _inside(tiling, coordinates, unit, pattern.inner)
    packs = not load and tiling.dtype == DataType.U6_ALIGN16B
    return Transfer(
        tiling,
        load,
        16 if packs else unit,
        unit,
        global_address,
        pattern.shared_offset + shared_address,
        inside,
        pattern.distinct and not (four and len(set(coordinates[1:])) < _ROWS),
        _warnings(tiling, coordinates[0]),
    )


def _check_mode(tiling: Tiling, coordinates: Sequence[int], load: bool, mode: str) -> None:
    if mode.startswith("im2col"):
        raise IllegalOperation(
            f"tensor copy: load mode .{mode} needs a map of cuTensorMapEncodeIm2col (corners, "
            "channels per pixel, pixels per column), and a TensorMap holds the arguments of "
            "cuTensorMapEncodeTiled; use .tile"
        )
    wanted = "tile::gather4" if load else "tile::scatter4"
    if mode not in ("tile", wanted):
        way = "load" if load else "store"
        raise IllegalOperation(
            f"tensor copy: .{mode} on a {way} (PTX ISA 9.7.9.25.5.2); use .tile or .{wanted}"
        )
    if mode == "tile":
        if len(coordinates) != tiling.rank:
            raise IllegalOperation(
                f"tensor copy: {len(coordinates)} coordinates for a map of rank {tiling.rank} "
                "(PTX ISA 9.7.9.25.5.2); the .dim of the instruction must be the map's rank"
            )
        return
    if tiling.rank != 2 or tiling.box_dim[1] != 1 or tiling.interleave != Interleave.NONE:
        raise IllegalOperation(
            f"tensor copy: .{mode} with a map of rank {tiling.rank}, box {tiling.box_dim} and "
            f"interleave {spelling(tiling.interleave)} (PTX ISA 5.5.3.4: rank 2, box_dim[1] = 1, "
            "no interleave); encode a map with box (columns, 1)"
        )
    if len(coordinates) != 1 + _ROWS:
        raise IllegalOperation(
            f"tensor copy: .{mode} takes a column and four rows, got {len(coordinates)} "
            "coordinates (PTX ISA 9.7.9.25.5.2); pass five"
        )


def _check_direction(tiling: Tiling, coordinates: Sequence[int], load: bool) -> None:
    """PTX ISA 9.7.9.25.5.1 and the load-only / store-only modes of cuTensorMapEncodeTiled."""
    kind, first = spelling(tiling.dtype), coordinates[0]
    if tiling.dtype in PADDED and first % 128:
        raise IllegalOperation(
            f"tensor copy: first coordinate {first} with {kind} must be a multiple of 128 "
            "(PTX ISA 9.7.9.25.5.1); start at a whole box"
        )
    if tiling.dtype == DataType.U4_ALIGN8B and first % 2:
        raise IllegalOperation(
            f"tensor copy: first coordinate {first} with {kind} starts within a byte "
            "(PTX ISA 5.5.3.1: boxes start on 16 bytes); use a multiple of 32"
        )
    if load:
        if tiling.dtype == DataType.U6_ALIGN16B and tiling.swizzle == Swizzle.B128_ATOM_64B:
            raise IllegalOperation(
                "tensor copy: a load of 16U6_ALIGN16B with swizzle 128B_ATOM_64B "
                "(cuTensorMapEncodeTiled: store only); use swizzle 128B"
            )
        return
    if min(coordinates) < 0:
        raise IllegalOperation(
            f"tensor copy: coordinates {tuple(coordinates)} of a store have a negative one "
            "(PTX ISA 9.7.9.25.5.1: must be non-negative); clip the tile in the kernel"
        )
    if tiling.dtype == DataType.U4_ALIGN16B or tiling.swizzle == Swizzle.B128_ATOM_32B_FLIP_8B:
        what = (
            kind if tiling.dtype == DataType.U4_ALIGN16B else f"swizzle {spelling(tiling.swizzle)}"
        )
        raise IllegalOperation(
            f"tensor copy: a store with {what} (PTX ISA 9.7.9.25.5.1: only loads); "
            "encode another map for the store"
        )


def _warnings(tiling: Tiling, first: int) -> tuple[str, ...]:
    if tiling.interleave != Interleave.NONE or first * tiling.bits % 128 == 0:
        return ()
    return (
        f"tensor copy: first coordinate {first} puts the box {first * tiling.bits // 8 % 16} bytes "
        "past a 16-byte boundary of global memory (PTX ISA 5.5.3.1 asks for 16)",
    )


def _unit(tiling: Tiling, first: int, load: bool) -> int:
    """The most bytes that lie together in global and in shared memory everywhere in the box."""
    if tiling.dtype in PADDED:
        return 2 * tiling.bits  # 16 elements
    if tiling.interleave != Interleave.NONE:
        return granule(tiling.swizzle)
    edges = first * tiling.bits // 8
    if first + tiling.box_dim[0] > tiling.global_dim[0]:
        edges |= tiling.global_dim[0] * tiling.bits // 8
    return min(edges & -edges or 16, granule(tiling.swizzle))


def _steps(tiling: Tiling) -> tuple[int, ...]:
    """Bytes of global memory from one element of the box to the next, dimensions 1 and up."""
    steps = list(tiling.element_strides[1:])
    if tiling.interleave != Interleave.NONE:
        steps[-2 if len(steps) > 1 else 0] = 1
    return tuple(step * size for step, size in zip(steps, tiling.global_strides, strict=True))


def _place(tiling: Tiling, coordinates: Sequence[int]) -> int:
    """Byte offset of the box's first element from the tensor's address."""
    outer = list(coordinates[1:])
    if tiling.interleave != Interleave.NONE:
        outer[-2] //= tiling.slice_channels
        first = coordinates[0] * tiling.slice_bytes
    else:
        first = coordinates[0] * tiling.bits // 8
    return first + sum(at * step for at, step in zip(outer, tiling.global_strides, strict=True))


@lru_cache(maxsize=512)
def _pattern(tiling: Tiling, unit: int, phase: int, four: bool) -> Pattern:
    """Offsets of all units of a box whose shared address is `phase` modulo 1024."""
    inner = np.arange(0, tiling.inner_bytes, unit, dtype=np.int64)
    if tiling.dtype in PADDED:
        linear = np.arange(inner.size, dtype=np.int64) * 16
    else:
        linear = inner
    if tiling.interleave != Interleave.NONE:
        start = inner // tiling.slice_bytes * (tiling.slice_bytes * tiling.element_strides[0])
        inner = start + inner % tiling.slice_bytes
    rows = np.zeros(_ROWS if four else 1, np.int64)
    for count, step in () if four else zip(tiling.counts[1:], _steps(tiling), strict=True):
        rows = (np.arange(count, dtype=np.int64)[:, None] * step + rows[None, :]).ravel()
    pitch = inner.size * (16 if tiling.dtype in PADDED else unit)
    if tiling.interleave == Interleave.NONE:
        pitch = max(pitch, tiling.span)  # a short row takes a whole row of the pattern
    shared = (np.arange(rows.size, dtype=np.int64)[:, None] * pitch + linear[None, :]).ravel()
    place = (rows[:, None] + inner[None, :]).ravel()
    distinct = four or np.unique(place).size == place.size
    place.setflags(write=False)
    moved = swizzled(shared + phase, tiling.swizzle) - phase
    moved.setflags(write=False)
    return Pattern(place, moved, inner.size, bool(distinct))


def _four_rows(
    tiling: Tiling, coordinates: Sequence[int], unit: int, inner: int
) -> tuple[Ints, NDArray[np.bool_] | None]:
    """gather4, scatter4: (byte offset of each row, which units are inside)."""
    rows = np.array(coordinates[1:], np.int64)
    origin = rows * tiling.global_strides[0] + coordinates[0] * tiling.bits // 8
    valid = (rows >= 0) & (rows < tiling.global_dim[1])
    columns = _columns(tiling, coordinates[0], unit, inner)
    if columns is None:
        return origin, None if valid.all() else np.repeat(valid, inner)
    return origin, (valid[:, None] & columns[None, :]).ravel()


def _columns(tiling: Tiling, first: int, unit: int, inner: int) -> NDArray[np.bool_] | None:
    """Which units of a row are inside the tensor; None if all are."""
    if tiling.interleave != Interleave.NONE:
        at = np.arange(tiling.counts[0]) * tiling.element_strides[0] + first
        inside = (at >= 0) & (at < tiling.global_dim[0])
        return None if inside.all() else np.repeat(inside, inner // inside.size)
    if first >= 0 and first + tiling.box_dim[0] <= tiling.global_dim[0]:
        return None
    at = np.arange(inner, dtype=np.int64) * unit + first * tiling.bits // 8
    return (at >= 0) & (at < tiling.global_dim[0] * tiling.bits // 8)


def _inside(
    tiling: Tiling, coordinates: Sequence[int], unit: int, inner: int
) -> NDArray[np.bool_] | None:
    """Which units of the box are inside the tensor [units]; None if all are."""
    found = _columns(tiling, coordinates[0], unit, inner)
    whole = found is None
    mask = np.ones(inner, bool) if found is None else found
    counts = tiling.counts
    for axis in range(1, tiling.rank):
        first, step, size = coordinates[axis], tiling.element_strides[axis], tiling.global_dim[axis]
        if tiling.interleave != Interleave.NONE and axis == tiling.rank - 2:
            first, step = first // tiling.slice_channels, 1
            size = -(-size // tiling.slice_channels)
        if first >= 0 and first + (counts[axis] - 1) * step < size:
            mask = np.broadcast_to(mask, (counts[axis], mask.size)).ravel()
            continue
        at = np.arange(counts[axis], dtype=np.int64) * step + first
        mask = (((at >= 0) & (at < size))[:, None] & mask[None, :]).ravel()
        whole = False
    return None if whole else mask
