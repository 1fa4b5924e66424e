"""Tensor intrinsics of a grouped 4-bit GEMM on Hopper: what one instruction does with a tile.

Each is a *desc* in plain loops (the expressions of `blockscale.tir.moe.tiles`) and an *impl* that
calls the function of ``blockscale/native/moe_*.cuh`` which issues the instruction.  Scope "local"
is registers: a fragment is spread over the lanes of a warp (16 rows) or of a warpgroup (64 rows)
as the MMA wants it (PTX ISA 9.7.14.5.8, 9.7.15.5.2).
"""

from __future__ import annotations

import re
from functools import partial

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.base.formats import MOE
from blockscale.tir.common import i64
from blockscale.tir.intrin.cuda import blocks as cuda_blocks
from blockscale.tir.intrin.fragments import SHORT, SMEM, decoding, product
from blockscale.tir.intrin.operands import copy, intrinsic

HEADER = '#include "moe_gemm.cuh"\n'
"""What declares the device functions."""

ROW = 64
"""Elements of a row of x that are copied at a time: 128 bytes, a swizzle atom's row."""

_NAMES = {
    "bulk": r"cp_async_bulk_(\d+)x(\d+)_([a-z]+\d+)",
    "row": r"cp_async_row64_(bf16|f16)(_gather)?",
    "decode": rf"decode_({'|'.join(MOE)})_g(\d+)(z?)_16x64_(bf16|f16)",
    "mma": r"mma_m16n8k16_(bf16|f16)f32",
    "wgmma": r"wgmma_m64n(\d+)k16_(bf16|f16)f32",
}
"""The names of the intrinsics."""


def register_named(text: str) -> list[str]:
    """Register the intrinsics that ``text`` names; return their names."""
    dtypes = {short: dtype for dtype, short in SHORT.items()}
    makers = {
        "bulk": lambda m: bulk_copy(int(m[1]), int(m[2]), m[3]),
        "row": lambda m: row_copy(dtypes[m[1]], bool(m[2])),
        "decode": lambda m: decode(m[1], int(m[2]), bool(m[3]), dtypes[m[4]]),
        "mma": lambda m: mma(dtypes[m[1]]),
        "wgmma": lambda m: wgmma(int(m[1]), dtypes[m[2]]),
    }
    found = {
        match[0]: kind
        for kind, pattern in _NAMES.items()
        for match in re.finditer(rf"\b{pattern}\b", text)
    }
    made = []
    for name, kind in sorted(found.items()):
        match = re.fullmatch(_NAMES[kind], name)
        assert match is not None, "it was found by this pattern"
        made.append(makers[kind](match))
    return made


call = partial(cuda_blocks.call, header=HEADER)
"""Call of the device function of this name."""


# ---- Loads --------------------------------------------------------------------------------------


@intrinsic
def bulk_copy(blocks: int, count: int, dtype: str) -> str:
    """Register and name: copy codes or scales of the expert's matrix to shared memory.

    cp.async.bulk (PTX ISA 9.7.9.25.4.1) of contiguous bytes: ``count`` elements, or of 64 rows
    ``blocks`` blocks of so many.
    """
    size = T.int32(blocks * count * cuda_blocks.BYTES[dtype])

    def move(target: T.Buffer, source: T.Buffer) -> PrimExpr:
        return call("bs_bulk_load", target.access_ptr("w"), source.access_ptr("r"), size)

    shape = (i64(blocks), i64(count)) if blocks > 1 else (i64(count),)
    name = f"cp_async_bulk_{blocks}x{count}_{dtype}"
    return copy(name, shape, dtype, ("global", SMEM), move, table=True)


@intrinsic
def row_copy(dtype: str, gather: bool) -> str:
    """Register and name: copy 64 elements of a row of x to a row of 128 bytes in shared memory.

    Eight lanes' cp.async of 16 bytes (PTX ISA 9.7.9.25.3.1), swizzled by the row.  With ``gather``
    it is the row of the slot's token.
    """
    name = f"cp_async_row64_{SHORT[dtype]}{'_gather' if gather else ''}"
    move = partial(cuda_blocks.moved, "bs_cp_async_row", header=HEADER)
    return copy(name, (i64(ROW),), dtype, ("global", SMEM), move, table=gather)


# ---- Decoding -----------------------------------------------------------------------------------


@intrinsic
def decode(fmt: str, group: int, zeros: bool, dtype: str) -> str:
    """Register and name: decode 16 rows x 64 k to the A fragments of four steps, in registers.

    A lane's four words are its rows g and g + 8; `native/moe/moe_decode.cuh` says how.
    """
    name = f"decode_{fmt}_g{group}{'z' if zeros else ''}_16x64_{SHORT[dtype]}"
    return decoding(name, (fmt, group, zeros), dtype, partial(call, "bs_moe_decode"), raw=False)


# ---- Products -----------------------------------------------------------------------------------


@intrinsic
def mma(dtype: str) -> str:
    """Register and name: mma.sync of 16 rows of weights and 8 tokens (PTX ISA 9.7.14.5.14)."""
    name = f"mma_m16n8k16_{SHORT[dtype]}f32"
    return product(name, (16, 8, 16), dtype, partial(call, "bs_mma16816"), SMEM)


@intrinsic
def wgmma(tokens: int, dtype: str) -> str:
    """Register and name: wgmma of 64 rows of weights, in registers (PTX ISA 9.7.15.5.2)."""
    name = f"wgmma_m64n{tokens}k16_{SHORT[dtype]}f32"
    issue = partial(call, f"bs_wgmma_m64k16<{tokens}>")
    return product(name, (64, tokens, 16), dtype, issue, SMEM)
