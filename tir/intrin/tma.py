"""Tensor intrinsics of TMA: loads of tiles to shared memory, stores from it.

Each is a *desc* in plain loops and an *impl* that calls the function of
``native/tcgen05.cuh``: of the addresses in it, that in global memory stands for a tensor
map and coordinates, and a load's barrier is left out.

Tiles of operands in shared memory are [rows, bytes] of packed codes; how the bytes lie there (the
swizzle, and for the 4-bit operand of kind mxf8f6f4 eight bytes of padding after eight of codes) is
between the TMA load, whose last argument is the bytes of a row there, and the MMA.  Scales are
128x4 tiles of 512 bytes.
"""

from __future__ import annotations

from functools import partial

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.tir.common import i64
from blockscale.tir.gemm.tiles import ATOM_BYTES
from blockscale.tir.intrin.cuda import blocks as cuda_blocks
from blockscale.tir.intrin.operands import copy, intrinsic

HEADER = '#include "tcgen05.cuh"\n'
"""What declares the device functions."""

SMEM, TMEM = "shared.dyn", "shared.tmem"


call = partial(cuda_blocks.call, header=HEADER)
"""Call of the device function of this name."""


def tile_copy(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    scopes: tuple[str, str],
    function: str,
    expert: bool = False,
    form: tuple[int, ...] = (),
) -> str:
    """Register and name: copy a tile between memories by ``function``.

    ``expert``: from the matrix that a table names; ``form``: how the tile lies in shared memory.
    """

    def move(target: T.Buffer, source: T.Buffer) -> PrimExpr:
        numbers = map(T.int32, form)
        return call(function, target.access_ptr("w"), source.access_ptr("r"), *numbers)

    full_name = f"{name}_expert" if expert else name
    return copy(full_name, tuple(map(i64, shape)), dtype, scopes, move, expert)


@intrinsic
def load(rows: int, tile_bytes: int, row_bytes: int, group: int, expert: bool = False) -> str:
    """Register and name: load ``rows`` rows to shared memory, swizzled over their width.

    Args:
        rows: of the tile.
        tile_bytes: of a row in global memory.
        row_bytes: of a row in shared memory, twice as many where kind mxf8f6f4 wants 4-bit codes
            padded (16U4_ALIGN16B, PTX ISA 5.5.1).
        group: CTAs of a pair that share the barrier.
        expert: load from the matrix that a table names.
    """
    kind = "" if tile_bytes == row_bytes else "_u4align16"
    name = f"tma_load_{rows}x{tile_bytes}{kind}_sw{row_bytes}_cg{group}"
    function = f"bs_tma_load_2d<{group}>"
    memories = ("global", SMEM)
    return tile_copy(name, (rows, tile_bytes), "uint8", memories, function, expert, (row_bytes,))


@intrinsic
def load_scales(group: int, expert: bool = False) -> str:
    """Register and name: load a 128x4 tile of scales to shared memory."""
    name, function = f"tma_load_scales_cg{group}", f"bs_tma_load_3d<{group}>"
    return tile_copy(name, (ATOM_BYTES,), "uint8", ("global", SMEM), function, expert)


@intrinsic
def store(rows: int, cols: int, dtype: str) -> str:
    """Register and name: store a tile of d from shared memory."""
    return tile_copy(
        f"tma_store_{rows}x{cols}_{dtype}", (rows, cols), dtype, (SMEM, "global"), "bs_tma_store_2d"
    )
