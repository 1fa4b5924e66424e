"""Tensor intrinsics of block-scaled mma.sync (sm_120a): what a warp does with its part of a tile.

Each is a *desc* in plain loops and an *impl* that names the device functions of
``native/gemm/scaled_mma.cuh`` which `blockscale.lower.sync` prints.  Scope "local" is registers,
spread over the lanes of warps as MMAs want them (PTX ISA 9.7.14.3, 9.7.14.5).

Of 32 rows of X a warp has two tiles of 16, of rows of Y tiles of 8.  Scales of both are words of a
128x4 tile: lane 4 g + t has those of the rows g + 8 t of each 32.  Of X, t is 0 and 1 in the first
tile of 16 rows (thread-id 0), 2 and 3 in the second (thread-id 1); of Y, t is the number of the
tile of 8 (thread-id t).  The MMA takes the bytes of a word that byte-id says.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.base.formats import GEMM, UE8M0
from blockscale.tir.common import i64
from blockscale.tir.gemm.tiles import ATOM_BYTES
from blockscale.tir.intrin.cuda import blocks as cuda_blocks
from blockscale.tir.intrin.operands import Operand, copy, describe, intrinsic
from blockscale.tir.intrin.tcgen05 import element_format, format_of, product_name, scaled_product
from blockscale.tir.intrin.tma import SMEM

HEADER = '#include "scaled_mma.cuh"\n'
"""What declares the device functions."""

LOCAL = "local"

ROWS = 32
"""Rows of X of a warp."""

call = partial(cuda_blocks.call, header=HEADER)


class Mma(NamedTuple):
    """What a warp multiplies in a step: X [32, step] times Y [n, step] transposed."""

    fmt: str
    n: int
    row_bytes: int
    """Of a row of X and Y in shared memory, which is their swizzle."""
    swap: bool

    @property
    def name(self) -> str:
        """See `product_name`."""
        return product_name("sync", ROWS, self.n, self.fmt, self.row_bytes, self.swap)


def register_named(text: str) -> None:
    """Register the intrinsics that ``text`` names."""
    product = r"\bsync_mma_(\w+?)_32x(\d+)x\d+_((?:e\dm\d){2})f32_sw(\d+)(_swap)?\b"
    for kind, n, codes, row_bytes, swap in set(re.findall(product, text)):
        mma(Mma(format_of(kind, codes), int(n), int(row_bytes), bool(swap)))
    if "sync_scales" in text:
        scales()
    for columns in set(re.findall(r"\bsync_stage_32x(\d+)\b", text)):
        stage(int(columns))
    for columns in set(re.findall(r"\bsync_row_32x(\d+)\b", text)):
        row_of(int(columns))


@intrinsic
def mma(shape: Mma) -> str:
    """Register and name: d += (x * sfx) (y * sfy)^T by a warp, in mma.sync of 16 x 8 each.

    Buffers in the order of the op: a, a's scales, b, b's scales, d [32, n].
    """
    rows, cols = (shape.n, ROWS) if shape.swap else (ROWS, shape.n)
    row = GEMM[shape.fmt]
    desc, (a, sa, b, sb, d) = scaled_product(shape.fmt, rows, cols, shape.swap)
    operands = (
        a._replace(scope=SMEM),
        sa._replace(scope=LOCAL),
        b._replace(scope=SMEM),
        sb._replace(scope=LOCAL),
        d._replace(scope=LOCAL),
    )

    def issue(
        a: T.Buffer, a_scale: T.Buffer, b: T.Buffer, b_scale: T.Buffer, d: T.Buffer
    ) -> PrimExpr:
        turn = -1 if shape.swap else 1
        formats = (element_format(row.kind, code) for code in (row.a, row.b)[::turn])
        numbers = (ROWS, shape.n, *formats, int(row.scale is UE8M0))
        return call(
            f"bs_sync_mma_{row.kind}",
            d.access_ptr("rw"),
            *(
                call(f"bs_sync_rows<{shape.row_bytes}>", tile.access_ptr("r"), dtype="uint32")
                for tile in (a, b)[::turn]
            ),
            call("bs_sync_shape", *numbers, dtype="uint32"),
            *(tile.access_ptr("r") for tile in (a_scale, b_scale)[::turn]),
        )

    return describe(shape.name, operands, desc, issue)


@intrinsic
def scales() -> str:
    """Register and name: a 128x4 tile of scales to registers of the warps that need them.

    Bytes 16 r + 4 q to 16 r + 4 q + 3 are a word, of row 32 q + r, which a lane has; of X a warp
    keeps one q, of Y as many as the tile has rows of 32.
    """
    M, N = i64(32), i64(16)

    @T.inline
    def desc(S, D):
        for i, j in T.grid(M, N):
            with T.sblock("copy"):
                vi, vj = T.axis.remap("SS", [i, j])
                D[vi, vj] = S[vi * N + vj]

    def impl(S: T.Buffer, D: T.Buffer) -> PrimExpr:
        return call("bs_sync_scales", D.access_ptr("w"), S.access_ptr("r"))

    source = Operand("S", (i64(ATOM_BYTES),), "uint8", scope=SMEM)
    target = Operand("D", (M, N), "uint8", "w", LOCAL)
    return describe("sync_scales", (source, target), desc, impl)


@intrinsic
def stage(columns: int) -> str:
    """Register and name: sums of a warp's rows, from the MMAs' registers to shared memory."""
    return _moved(f"sync_stage_{ROWS}x{columns}", columns, (LOCAL, SMEM), "stage")


@intrinsic
def row_of(columns: int) -> str:
    """Register and name: a row of these to each thread of the warp, which it may then store."""
    return _moved(f"sync_row_{ROWS}x{columns}", columns, (SMEM, LOCAL), "row")


def _moved(name: str, columns: int, scopes: tuple[str, str], what: str) -> str:
    def move(target: T.Buffer, source: T.Buffer) -> PrimExpr:
        return call(f"bs_sync_{what}<{columns}>", target.access_ptr("w"), source.access_ptr("r"))

    return copy(name, (i64(ROWS), i64(columns)), "float32", scopes, move)
