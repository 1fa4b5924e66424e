"""Cells of tensor memory that matrices D, A and the scale factors of tcgen05.mma occupy.

Data path layouts (PTX ISA 9.7.16.10.5); lane and 32-bit column of element (row, n), rows of this
CTA:

    A  M = 256, cta_group::2         row, n                          CTA c has rows 128 c and up
    B  M = 128, cta_group::2         row + 64 (n // (N / 2)), n % (N / 2)      rows 64 c and up
    D  M = 128, cta_group::1         row, n
    E  M = 64, .ws                   row + 64 (n // (N / 2)), n % (N / 2)
    F  M = 64                        row % 16 + 32 (row // 16), n    (+ 16 with lane 16)
    G  M = 32, .ws                   row + 32 (n // (N / 4)), n % (N / 4)

The manual gives these as figures; the formulas are those of CUTLASS
(cute/atom/mma_traits_sm100_frag.hpp). A word of D holds one value, an f16 in its low half
(9.7.16.10.4.1). A in tensor memory is packed: 32-bit words along K, rows in the lanes of D; where a
layout folds N into the upper lanes (B, E, G), each part of the data path reads A from its own
lanes, so A is there in 2 or 4 copies (CUTLASS: "Duplicated").

Scale factors (9.7.16.10.7): row r of A (or column r of B) lies in lane r % 32 of all four 32-lane
partitions ("duplicated to all 32 lane partitions"), in word r // 32; its bytes are the factors
along K, from the byte that the scale factor id names. With Layout B each half of the data path
needs its own half of N: columns N / 2 and up lie in lanes 64 to 127 from word 0 (CUTLASS:
ScaleFactorDuplicated2by2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockscale.emulator.errors import IllegalOperation

LANES = 128
COLUMNS = 512
CELLS = LANES * COLUMNS  # of one CTA
PARTITION = 32  # lanes a warp can reach

Index = NDArray[np.int16]


class Cells(NamedTuple):
    """Tensor memory cells: arrays of one shape, the lane and the 32-bit column of each."""

    lane: Index
    column: Index


@dataclass(frozen=True, eq=False)
class ScaleCells:
    """Words of scale factors: copy p in lanes 32 p and up; bytes `first` to `first + count - 1`."""

    lane: Index  # [4, rows]
    column: Index  # [4, rows]
    first: int
    count: int


def layout_name(m: int, cta_group: int, ws: bool = False) -> str:
    """Return the Layout ID of a dense MMA: the table of PTX ISA 9.7.16.10.5."""
    return {
        (256, 2, False): "A",
        (128, 2, False): "B",
        (128, 1, False): "D",
        (128, 1, True): "D",
        (64, 1, True): "E",
        (64, 1, False): "F",
        (32, 1, True): "G",
    }[m, cta_group, ws]


FOLDS = {"A": 1, "B": 2, "D": 1, "E": 2, "F": 1, "G": 4}
"""Parts of N that lie side by side in the lanes."""


@lru_cache(maxsize=256)
def accumulator_cells(m: int, n: int, cta_group: int = 1, ws: bool = False) -> Cells:
    """Return the cells of D [rows of this CTA, n], the same in both CTAs of a pair."""
    name = layout_name(m, cta_group, ws)
    rows = m // cta_group
    folds = FOLDS[name]
    row, column = np.arange(rows)[:, None], np.arange(n)[None, :]
    lane = _lane_of_row(row, name) + column // (n // folds) * (LANES // folds)
    return make_cells(lane, column % (n // folds))


@lru_cache(maxsize=64)
def operand_a_cells(m: int, row_bytes: int, cta_group: int = 1, ws: bool = False) -> Cells:
    """Return the cells of A [copies, rows of this CTA, words]: copy p is read for part p of N."""
    name = layout_name(m, cta_group, ws)
    rows, folds = m // cta_group, FOLDS[name]
    copy = np.arange(folds)[:, None, None]
    row = np.arange(rows)[None, :, None]
    word = np.arange(row_bytes // 4)[None, None, :]
    return make_cells(_lane_of_row(row, name) + copy * (LANES // folds) + 0 * word, word)


@lru_cache(maxsize=64)
def scale_a_cells(m: int, cta_group: int, count: int, scale_id: int) -> ScaleCells:
    """Return where the factors of A's rows of this CTA are: [4, rows]."""
    return _scale_cells(m // cta_group, count, scale_id, "A")


@lru_cache(maxsize=256)
def scale_b_cells(m: int, n: int, cta_group: int, count: int, scale_id: int) -> ScaleCells:
    """Return where the factors of B's columns are: [4, n], with Layout B [4, n / 2].

    Each CTA of a pair holds the factors of all n columns. With Layout B copies 0 and 1 are columns
    0 to n / 2 - 1, copies 2 and 3 the others.
    """
    folds = FOLDS[layout_name(m, cta_group)]
    return _scale_cells(n // folds, count, scale_id, "B")


def scale_count(kind: str, block: int, k: int) -> int:
    """Return the scale factors per row: scale_vec::NX has N (PTX ISA 9.7.16.10.7.1, Table 56)."""
    legal = {"mxf8f6f4": (32,), "mxf4": (32,), "mxf4nvf4": (16, 32)}[kind]
    if block not in legal:
        raise IllegalOperation(
            f".kind::{kind} scales blocks of {' or '.join(map(str, legal))} elements, not of "
            f"{block} (PTX ISA 9.7.16.10.7.1, Table 57)"
        )
    return k // block


def check_scale_id(operand: str, count: int, scale_id: int) -> None:
    """Raise unless the factors lie in one word: 1X any byte, 2X bytes 0 or 2, 4X byte 0."""
    if scale_id % count or scale_id + count > 4:
        legal = {1: "0 to 3", 2: "0 or 2", 4: "0"}[count]
        raise IllegalOperation(
            f"the scale factor id of {operand} is {scale_id} and must be {legal} with "
            f"scale_vec::{count}X (PTX ISA 9.7.16.10.7.2)"
        )


def _scale_cells(rows: int, count: int, scale_id: int, operand: str) -> ScaleCells:
    check_scale_id(operand, count, scale_id)
    row = np.arange(rows)[None, :]
    copy = np.arange(LANES // PARTITION)[:, None]
    cells = make_cells(row % PARTITION + copy * PARTITION, row // PARTITION + 0 * copy)
    return ScaleCells(cells.lane, cells.column, scale_id, count)


def _lane_of_row(row: NDArray[np.int64], name: str) -> NDArray[np.int64]:
    return row % 16 + 32 * (row // 16) if name == "F" else row


def make_cells(lane: NDArray[np.int64], column: NDArray[np.int64]) -> Cells:
    """Return read-only cells of the arrays' common shape."""
    lane, column = np.broadcast_arrays(lane, column)
    result = Cells(np.ascontiguousarray(lane, np.int16), np.ascontiguousarray(column, np.int16))
    result.lane.setflags(write=False)
    result.column.setflags(write=False)
    return result
