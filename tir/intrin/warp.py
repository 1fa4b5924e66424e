"""Tensor intrinsics of a GEMM whose 4-bit weights become fragments of warps.

These are multiplied by mma.sync or wgmma, or by tcgen05 once they are in tensor memory.

Each is a *desc* in plain loops and an *impl* that names the device function of
``blockscale/lower/native/mma.cuh`` that issues the instruction, whose further arguments
`blockscale.lower.warp` derives.  Scope "local" is registers: a fragment of 16 rows is spread over
the lanes of a warp as MMAs want it (PTX ISA 9.7.14.5.8); four warps issue a wgmma together, and
each has its own 16 of the 64 rows (9.7.15.5.2).  Scope "shared.tmem" is tensor memory: rows of the
weight are its lanes, of which a warp reaches 32, those of its number modulo 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.base.formats import MOE
from blockscale.specs.plans import tensor_memory
from blockscale.specs.plans.moe import E4M3
from blockscale.tir.common import i64
from blockscale.tir.intrin.cuda import blocks as cuda_blocks
from blockscale.tir.intrin.fragments import LOCAL, SHORT, decoding, product
from blockscale.tir.intrin.operands import Operand, copy, describe, intrinsic
from blockscale.tir.intrin.tma import SMEM, TMEM

HEADER = '#include "mma.cuh"\n'
"""What declares the device functions."""

ROW = 64
"""Channels of a row of x that are copied at a time: 128 bytes, a swizzle atom's row."""

_LONG = {short: dtype for dtype, short in SHORT.items()}

_ZEROS = ("", "z", "t")
"""Kinds of zeros in names; see `MoeGemm.zeros`."""

call = partial(cuda_blocks.call, header=HEADER)


def register_named(text: str) -> None:
    """Register the intrinsics that ``text`` names."""
    makers = {
        r"warp_bulk_(\d+)x(\d+)_([a-z]+\d+)(_of)?": (
            lambda m: bulk(int(m[1]), int(m[2]), m[3], bool(m[4]))
        ),
        r"warp_async_(\d+)x(\d+)_([a-z]+\d+)": lambda m: run(int(m[1]), int(m[2]), m[3]),
        r"warp_tma_(\d+)x64_(bf16|f16|e4m3)": lambda m: tma(int(m[1]), _LONG[m[2]]),
        r"warp_row64_(bf16|f16|e4m3)(_of)?": lambda m: row(_LONG[m[1]], bool(m[2])),
        rf"warp_decode_({'|'.join(MOE)})_g(\d+)([zt]?)_(bf16|f16|e4m3)(_[a-z]+)?": (
            lambda m: decode(m[1], int(m[2]), _ZEROS.index(m[3]), _LONG[m[4]], (m[5] or "")[1:])
        ),
        r"warp_fragment_(bf16|f16)": lambda m: fragment(_LONG[m[1]]),
        r"warp_matrices_(bf16|f16)": lambda m: matrices(_LONG[m[1]]),
        r"warp_mma_m16n8k64_(bf16|f16)": lambda m: mma(_LONG[m[1]]),
        r"warp_wgmma_m16n(\d+)k(?:16|32)_(bf16|f16|e4m3)": lambda m: wgmma(int(m[1]), _LONG[m[2]]),
        r"warp_tcgen05_st_16x64_(bf16|f16)": lambda m: store_fragment(_LONG[m[1]]),
        r"warp_tcgen05_m128n(\d+)k16_(bf16|f16)": lambda m: tcgen05(int(m[1]), _LONG[m[2]]),
        r"warp_tcgen05_ld_(\d+)x16": lambda m: load_sums(int(m[1])),
    }
    for name in sorted(set(re.findall(r"\bwarp_\w+", text))):
        for pattern, make in makers.items():
            found = re.fullmatch(pattern, name)
            if found is not None:
                make(found)


# ---- Loads --------------------------------------------------------------------------------------


@intrinsic
def bulk(blocks: int, count: int, dtype: str, table: bool = False) -> str:
    """Register and name: copy codes, scales or channels of a row of x to shared memory.

    cp.async.bulk (PTX ISA 9.7.9.25.4.1) of contiguous bytes: ``blocks`` of ``count`` elements.
    With ``table`` they are the expert's that a table names.
    """
    return _contiguous("bulk", blocks, count, dtype, table)


@intrinsic
def run(blocks: int, count: int, dtype: str) -> str:
    """Register and name: the same copy by a warp, for architectures without bulk copies.

    cp.async (PTX ISA 9.7.9.25.3.1) of 16 bytes of each lane in turn.
    """
    return _contiguous("async", blocks, count, dtype)


def _contiguous(how: str, blocks: int, count: int, dtype: str, table: bool = False) -> str:
    shape = (i64(blocks), i64(count)) if blocks > 1 else (i64(count),)
    name = f"warp_{how}_{blocks}x{count}_{dtype}{'_of' if table else ''}"
    return copy(name, shape, dtype, ("global", SMEM), _moves(f"bs_warp_{how}"), table)


def _moves(function: str) -> Callable[[T.Buffer, T.Buffer], PrimExpr]:
    """Return what calls the device function, of the target and the source."""
    return lambda target, source: call(function, target.access_ptr("w"), source.access_ptr("r"))


@intrinsic
def row(dtype: str, table: bool) -> str:
    """Register and name: copy 64 positions of a row of x to a row of 128 bytes in shared memory.

    Eight lanes' cp.async of 16 bytes (PTX ISA 9.7.9.25.3.1), swizzled by the row as wgmma and
    ldmatrix read it; of E4M3 four lanes', to a row of 64 bytes.  With ``table`` it is the row that
    a table names.
    """
    name = f"warp_row64_{SHORT[dtype]}{'_of' if table else ''}"
    return copy(name, (i64(ROW),), dtype, ("global", SMEM), _moves("bs_warp_row"), table)


@intrinsic
def tma(rows: int, dtype: str) -> str:
    """Register and name: load 64 channels of rows of x to shared memory.

    cp.async.bulk.tensor (PTX ISA 9.7.9.25.5.2), to rows of 128 bytes (of E4M3 64) that are swizzled
    as wgmma and ldmatrix read them; rows and channels that there are not become zeros.
    """
    N, K, one = i64(rows), i64(ROW), i64(1)

    @T.inline
    def desc(S, D):
        for n, k in T.grid(N, K):
            with T.sblock("copy"):
                vn, vk = T.axis.remap("SS", [n, k])
                D[vn, vk] = S[vn, 0, vk]

    def impl(source: T.Buffer, target: T.Buffer) -> PrimExpr:
        return call("bs_warp_tma", target.access_ptr("w"), source.access_ptr("r"))

    operands = (
        Operand("S", (N, one, K), dtype),
        Operand("D", (N, K), dtype, "w", SMEM),
    )
    return describe(f"warp_tma_{rows}x64_{SHORT[dtype]}", operands, desc, impl)


@intrinsic
def fragment(dtype: str) -> str:
    """Register and name: 8 rows of 64 channels to the B fragments of four MMAs, in registers.

    A thread has 16 channels that are neighbours, of which each MMA takes four: of a word of codes,
    or of half of two words.
    """
    N, K, one = i64(8), i64(ROW), i64(1)

    @T.inline
    def desc(S, D):
        for n, p in T.grid(N, K):
            with T.sblock("fragment"):
                vn, vp = T.axis.remap("SS", [n, p])
                D[vn, vp] = S[vn, 0, vp]

    def impl(source: T.Buffer, target: T.Buffer) -> PrimExpr:
        return call("bs_warp_fragment", target.access_ptr("w"), source.access_ptr("r"))

    operands = (
        Operand("S", (N, one, K), dtype, scope=SMEM),
        Operand("D", (N, K), dtype, "w", LOCAL),
    )
    return describe(f"warp_fragment_{SHORT[dtype]}", operands, desc, impl)


@intrinsic
def matrices(dtype: str) -> str:
    """Register and name: 8 rows of 64 positions to the B fragments of four MMAs, in registers.

    Two ldmatrix of four matrices (PTX ISA 9.7.14.5.15): MMA j takes positions 16 j to 16 j + 15.
    """
    N, K = i64(8), i64(ROW)

    @T.inline
    def desc(S, D):
        for n, p in T.grid(N, K):
            with T.sblock("fragment"):
                vn, vp = T.axis.remap("SS", [n, p])
                D[vn, vp] = S[vn, vp]

    def impl(source: T.Buffer, target: T.Buffer) -> PrimExpr:
        return call("bs_warp_matrices", target.access_ptr("w"), source.access_ptr("r"))

    operands = (
        Operand("S", (N, K), dtype, scope=SMEM),
        Operand("D", (N, K), dtype, "w", LOCAL),
    )
    return describe(f"warp_matrices_{SHORT[dtype]}", operands, desc, impl)


# ---- Decoding -----------------------------------------------------------------------------------


@intrinsic
def decode(fmt: str, group: int, zeros: int, dtype: str, order: str = "") -> str:
    """Register and name: decode 16 rows x 64 k to the A fragments of four MMAs, in registers.

    A word of codes is of rows g and g + 8.  A thread takes its own four: ``order`` "" of 16
    channels of each row; "positions" word j of the positions that MMA j takes of it; and "steps"
    those of its quad's threads that have the channels of MMA j, 16 j to 16 j + 15.  "bytes" is
    "positions" of layout "tiles64e", and to E4M3 the fragments of two MMAs (`moe_bytes.cuh`).
    `native/moe/moe_decode.cuh` says how, `tir.moe.tiles.left_over` what it leaves.
    """
    suffix = f"_{order}" if order else ""
    name = f"warp_decode_{fmt}_g{group}{_ZEROS[int(zeros)]}_{SHORT[dtype]}{suffix}"
    issue = partial(call, f"bs_warp_decode{suffix}")
    return decoding(name, (fmt, group, zeros), dtype, issue, order=order)


# ---- Products -----------------------------------------------------------------------------------


@intrinsic
def mma(dtype: str) -> str:
    """Register and name: 16 rows of w times 8 of x, four mma.sync (PTX ISA 9.7.14.5.14)."""
    name = f"warp_mma_m16n8k64_{SHORT[dtype]}"
    return product(name, (16, 8, 64), dtype, partial(call, "bs_warp_mma"), LOCAL)


def wgmma_k(dtype: str) -> int:
    """K of a wgmma: 32 bytes."""
    return 32 if dtype == E4M3 else 16


@intrinsic
def wgmma(tokens: int, dtype: str) -> str:
    """Register and name: a warp's part of a wgmma, with A in registers (PTX ISA 9.7.15.5.2)."""
    deep = wgmma_k(dtype)
    name = f"warp_wgmma_m16n{tokens}k{deep}_{SHORT[dtype]}"
    return product(name, (16, tokens, deep), dtype, partial(call, f"bs_warp_wgmma<{tokens}>"), SMEM)


# ---- Tensor memory ------------------------------------------------------------------------------

TENSOR_K = 16
"""K of a tcgen05.mma of 16-bit operands."""


@intrinsic
def store_fragment(dtype: str) -> str:
    """Register and name: a warp's A fragments of 16 rows x 64 k to tensor memory, 32 columns.

    tcgen05.st.16x128b.x8 (PTX ISA 9.7.16.8.4): its registers are those of four MMAs.
    """
    name = f"warp_tcgen05_st_16x64_{SHORT[dtype]}"
    shape = (i64(16), i64(ROW))
    return copy(name, shape, dtype, (LOCAL, TMEM), _moves("bs_warp_tcgen05_st"))


@intrinsic
def tcgen05(tokens: int, dtype: str) -> str:
    """Register and name: a tcgen05.mma, A and sums in tensor memory (PTX ISA 9.7.16.10.9.1)."""
    shape = (tensor_memory.ROWS, tokens, TENSOR_K)
    name = f"warp_tcgen05_m{tensor_memory.ROWS}n{tokens}k{TENSOR_K}_{SHORT[dtype]}"
    issue = partial(call, f"bs_warp_tcgen05_mma<{tokens}>")
    return product(name, shape, dtype, issue, SMEM, TMEM)


@intrinsic
def load_sums(tokens: int) -> str:
    """Register and name: a warp's sums of 16 rows of the weight, as mma.sync leaves them.

    tcgen05.ld.16x256b (PTX ISA 9.7.16.8.3) of 8 rows of x at a time.
    """
    name = f"warp_tcgen05_ld_{tokens}x16"
    shape = (i64(tokens), i64(16))
    return copy(name, shape, "float32", (TMEM, LOCAL), _moves("bs_warp_tcgen05_ld"))
