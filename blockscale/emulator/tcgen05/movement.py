"""Cells that tcgen05.ld, .st, .cp and .shift move (PTX ISA 9.7.16.2.3, 9.7.16.8, 9.7.16.9).

Thread t, register r of one repetition of a fragment (the manual's Figures 183 to 187; formulas as
in CUTLASS, cute/atom/copy_traits_sm100.hpp); repetition i adds i times the width to the column:

    32x32b    lane t                              column 0                         width 1
    16x64b    lane t // 4 + 8 (t % 2)             column (t // 2) % 2              width 2
    16x128b   lane t // 4 + 8 r                   column t % 4                     width 4
    16x256b   lane t // 4 + 8 (r // 2)            column 2 (t % 4) + r % 2         width 8
    16x32bx2  lane t % 16                         column immHalfSplitoff (t // 16) width 1

With .pack::16b (.unpack::16b) a register holds the low halves of two adjacent columns: every column
above counts twice, and register bits 0-15 are the even one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.tcgen05.descriptor import SmemDescriptor
from blockscale.emulator.tcgen05.layout import COLUMNS, LANES, PARTITION, Cells, make_cells
from blockscale.emulator.tcgen05.operand import Offsets, tile_offsets
from blockscale.emulator.tcgen05.unpack import E2M1_SHIFT, unpack_chunks

Words = NDArray[np.uint32]
# shape -> (registers, columns) of one repetition
FRAGMENTS = {
    "32x32b": (1, 1),
    "16x64b": (1, 2),
    "16x128b": (2, 4),
    "16x256b": (4, 8),
    "16x32bx2": (1, 1),
}
# shape -> (rows of shared memory, bytes of a row)
CP_SHAPES = {
    "128x256b": (128, 32),
    "4x256b": (4, 32),
    "128x128b": (128, 16),
    "64x128b": (64, 16),
    "32x128b": (32, 16),
}
SHIFT_ROWS, SHIFT_COLUMNS = 31, 8  # "31x256b (implicit)"


@lru_cache(maxsize=512)
def ld_cells(shape: str, num: int, packed: bool = False, split: int = 0) -> Cells:
    """Return the cells [32 threads, registers] of a load or store, relative to taddr.

    Packed: [32, registers, 2], the cell of the low and of the high half. `split` is
    immHalfSplitoff.
    """
    registers, width = FRAGMENTS[shape]
    thread = np.arange(32)[:, None]
    register = np.arange(registers)[None, :]
    if shape == "32x32b":
        lane, column = thread, 0 * thread
    elif shape == "16x64b":
        lane, column = thread // 4 + 8 * (thread % 2), thread // 2 % 2
    elif shape == "16x128b":
        lane, column = thread // 4 + 8 * register, thread % 4
    elif shape == "16x256b":
        lane, column = thread // 4 + 8 * (register // 2), 2 * (thread % 4) + register % 2
    else:
        lane, column = thread % 16, 0 * thread
    lane, column, _ = np.broadcast_arrays(lane, column, register)
    step = np.repeat(np.arange(num) * width, registers)[None, :]
    lane, column = np.tile(lane, (1, num)), np.tile(column, (1, num)) + step
    if packed:
        lane = np.repeat(lane[..., None], 2, axis=-1)
        column = 2 * column[..., None] + np.arange(2)
    if shape == "16x32bx2":
        second = (np.arange(32) // 16).reshape(-1, *[1] * (column.ndim - 1))
        column = column + split * second
    return make_cells(lane, column)


def check_ld_address(
    shape: str, num: int, packed: bool, split: int, address: int, warp: int
) -> int:
    """Return the first lane that a tcgen05.ld or .st by warp `warp` of its CTA touches, checked.

    A warp reaches lanes 32 (warp % 4) to 32 (warp % 4) + 31 (PTX ISA 9.7.16.8.1). An address with
    lane field 0 (or 16) means the warp's own partition: TVM leaves the field 0 in every warp.
    """
    lane, column = address >> 16, address & 0xFFFF
    own = PARTITION * (warp % 4)
    inside = lane - own if lane >= PARTITION else lane
    legal = (0,) if shape == "32x32b" else (0, 16)
    if inside not in legal:
        raise IllegalOperation(
            f"tcgen05.ld/st .{shape} of warp {warp}: address 0x{address:08x} has lane {lane}, and "
            f"the warp reaches lanes {own} to {own + PARTITION - 1} from "
            f"{' or '.join(str(own + i) for i in legal)} (PTX ISA 9.7.16.8.1); add (warp % 4) << "
            "21 to the address"
        )
    last = column + int(ld_cells(shape, num, packed, split).column.max())
    if last >= COLUMNS:
        raise IllegalOperation(
            f"tcgen05.ld/st .{shape}.x{num}: address 0x{address:08x} reaches column {last} of "
            f"{COLUMNS} (PTX ISA 9.7.16.1)"
        )
    return own + inside


def pack16(halves: Words) -> Words:
    """Return registers [..., r] from cells [..., r, 2] of a .pack::16b load."""
    return (halves[..., 0] & np.uint32(0xFFFF)) | (halves[..., 1] << np.uint32(16))


def unpack16(registers: Words) -> Words:
    """Return cells [..., r, 2] from registers [..., r] of an .unpack::16b store."""
    return np.stack([registers & np.uint32(0xFFFF), registers >> np.uint32(16)], axis=-1)


def reduce_columns(
    registers: Words, op: str, kind: str, absolute: bool = False, nan: bool = False
) -> Words:
    """Return redval [...] of tcgen05.ld.red over registers [..., r]; f32 skips NaN if not `nan`."""
    if kind != "f32":
        whole: NDArray[Any] = registers.view(np.int32) if kind == "s32" else registers
        return (whole.min(-1) if op == "min" else whole.max(-1)).view(np.uint32)
    values = registers.view(np.float32)
    values = np.abs(values) if absolute else values
    skipping, keeping = (np.fmin, np.minimum) if op == "min" else (np.fmax, np.maximum)
    result = (keeping if nan else skipping).reduce(values, axis=-1)
    return np.where(np.isnan(result), np.uint32(0x7FFFFFFF), result.view(np.uint32))


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """One tcgen05.cp in one CTA: shared bytes [rows, row_bytes] to cells [copies, rows, words]."""

    offsets: Offsets  # int32 [rows, row_bytes], addresses in each CTA's own shared memory
    lane: NDArray[np.int16]  # [copies, rows, words], relative to taddr's lane
    column: NDArray[np.int16]
    source_format: str

    def words(self, raw: NDArray[np.uint8]) -> Words:
        """Return words uint32 [rows, words] from bytes [rows, row_bytes], decompressed if asked."""
        if self.source_format == "b4x16_p64":
            raw = (unpack_chunks(raw, 4) << E2M1_SHIFT).astype(np.uint8)
        elif self.source_format == "b6x16_p32":
            raw = unpack_chunks(raw, 6)
        return np.ascontiguousarray(raw).view("<u4").astype(np.uint32, copy=False)


def cp_plan(shape: str, multicast: str, descriptor: int, source_format: str = "") -> CopyPlan:
    """Return what tcgen05.cp copies; with cta_group::2 each CTA copies from its own shared memory.

    The descriptor describes a K-major matrix with rows of 32 or 16 bytes. Multicast: warpx4 to all
    four 32-lane partitions; warpx2::02_13 rows 0-31 to partitions 0 and 2, 32-63 to 1 and 3;
    warpx2::01_23 rows 0-31 to 0 and 1, 32-63 to 2 and 3. 4x256b writes one lane per partition:
    lane, lane + 32, + 64, + 96 (CUTLASS: it refills the row that tcgen05.shift frees).
    Decompression keeps 16 elements in 16 bytes.
    """
    rows, row_bytes = CP_SHAPES[shape]
    offsets = tile_offsets(SmemDescriptor.decode(descriptor), rows, row_bytes)
    cells = _cp_cells(shape, multicast)
    return CopyPlan(offsets, cells.lane, cells.column, source_format)


@lru_cache(maxsize=16)
def _cp_cells(shape: str, multicast: str) -> Cells:
    rows, row_bytes = CP_SHAPES[shape]
    row = np.arange(rows)[None, :, None]
    word = np.arange(row_bytes // 4)[None, None, :]
    if multicast == "warpx4":
        lane = row + PARTITION * np.arange(4)[:, None, None]
    elif multicast == "warpx2::02_13":
        lane = row + 2 * PARTITION * np.arange(2)[:, None, None]
    elif multicast == "warpx2::01_23":
        first = row % PARTITION + 2 * PARTITION * (row // PARTITION)
        lane = first + PARTITION * np.arange(2)[:, None, None]
    elif shape == "4x256b":
        lane = row * PARTITION
    else:
        lane = row
    return make_cells(lane + 0 * word, word)


def check_cp_address(shape: str, address: int) -> tuple[int, int]:
    """Return (lane, column) of a tcgen05.cp destination; IllegalOperation when it does not fit."""
    lane, column = address >> 16, address & 0xFFFF
    limit = PARTITION if shape == "4x256b" else 1
    width = CP_SHAPES[shape][1] // 4
    if lane >= limit or column + width > COLUMNS:
        raise IllegalOperation(
            f"tcgen05.cp.{shape}: address 0x{address:08x} is lane {lane}, columns {column} to "
            f"{column + width - 1}; the lane must be {'below 32' if limit > 1 else '0'} and the "
            f"columns below {COLUMNS} (PTX ISA 9.7.16.9.2)"
        )
    return lane, column


@lru_cache(maxsize=1)
def shift_cells() -> tuple[Cells, Cells]:
    """Return (source, destination) cells [31, 8] of tcgen05.shift.down, relative to taddr.

    Row i takes row i + 1; row 31 keeps its value (PTX ISA 9.7.16.9.3: 32-byte elements, all rows
    but the last).
    """
    row, column = np.arange(SHIFT_ROWS)[:, None], np.arange(SHIFT_COLUMNS)[None, :]
    return make_cells(row + 1 + 0 * column, column), make_cells(row + 0 * column, column)


def check_shift_address(address: int) -> tuple[int, int]:
    """Return (lane, column) of tcgen05.shift; its lane must be a multiple of 32."""
    lane, column = address >> 16, address & 0xFFFF
    if lane % PARTITION or lane >= LANES or column + SHIFT_COLUMNS > COLUMNS:
        raise IllegalOperation(
            f"tcgen05.shift: address 0x{address:08x} is lane {lane}, column {column}; the lane "
            f"must be a multiple of 32 and 8 columns must follow (PTX ISA 9.7.16.9.3)"
        )
    return lane, column
