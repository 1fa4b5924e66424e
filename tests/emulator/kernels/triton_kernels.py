"""Triton kernels whose PTX for sm_100a the emulator has to run right; compiled without a GPU.

All sizes are compile-time constants, so that one kernel text is one shape.  Matrices are row-major;
``B`` of every product is [N, K]: C = A @ B^T.  ``_`` arguments of the PTX are Triton's two scratch
pointers, always null here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kit.compiled import folder

BLACKWELL = 100
PTX_VERSION = 90  # what CUDA 13.0's ptxas reads; the instructions do not depend on it

# A size a line would make the argument lists longer than the kernels.
# fmt: off


@triton.jit
def scaled_gemm(
    a, b, sa, sb, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, AF: tl.constexpr, BF: tl.constexpr,
):
    """Block-scaled C[M, N]: formats AF and BF ("e2m1", "e4m3"), one scale to V elements of K."""
    AP: tl.constexpr = 2 if AF == "e2m1" else 1
    BP: tl.constexpr = 2 if BF == "e2m1" else 1
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    ka = tl.arange(0, BK // AP)
    kb = tl.arange(0, BK // BP)
    ks = tl.arange(0, BK // V)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + m[:, None] * (K // AP) + (k // AP + ka)[None, :])
        y = tl.load(b + n[None, :] * (K // BP) + (k // BP + kb)[:, None])
        xs = tl.load(sa + m[:, None] * (K // V) + (k // V + ks)[None, :])
        ys = tl.load(sb + n[:, None] * (K // V) + (k // V + ks)[None, :])
        acc = tl.dot_scaled(x, xs, AF, y, ys, BF, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc)


@triton.jit
def gemm(
    a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):
    """C[M, N] float32 from f16 A[M, K] and B[N, K]; M, N and K need not be multiples of tiles."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        inside = k + ks < K
        x = tl.load(a + m[:, None] * K + (k + ks)[None, :], (m < M)[:, None] & inside[None, :], 0.0)
        y = tl.load(b + n[None, :] * K + (k + ks)[:, None], (n < N)[None, :] & inside[:, None], 0.0)
        acc = tl.dot(x, y, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc, (m < M)[:, None] & (n < N)[None, :])


@triton.jit
def one_product(
    a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr,
):
    """C[M, N] of B[K, N] and A[M, K], or A[K, M] if TURNED: operands with M and N innermost."""
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    if TURNED:
        x = tl.trans(tl.load(a + k[:, None] * M + m[None, :]))
    else:
        x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(x, y))


@triton.jit
def gemm_tma(
    a, b, c, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WS: tl.constexpr,
):
    """C from host tensor maps: TMA loads and stores; WS: one warp group a role."""
    m = tl.program_id(0) * BM
    n = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=WS):
        acc = tl.dot(a.load([m, k]), b.load([n, k]).T, acc)
    c.store([m, n], acc)


@triton.jit
def gemm_device_maps(
    a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):
    """C from tensor maps that the kernel writes (tensormap.replace) into Triton's scratch."""
    x = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    y = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    z = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    m = tl.program_id(0) * BM
    n = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(x.load([m, k]), y.load([n, k]).T, acc)
    z.store([m, n], acc)


@triton.jit
def attention(
    q, k, v, o, scale, L: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    """O[L, D] = softmax(scale * Q K^T) V of one head, online softmax; f16 in, float32 out."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    x = tl.load(q + m[:, None] * D + d[None, :])
    acc = tl.zeros((BM, D), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for first in range(0, L, BN):
        n = first + tl.arange(0, BN)
        s = tl.dot(x, tl.load(k + n[None, :] * D + d[:, None])) * scale
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2((s - new[:, None]) * 1.4426950408889634)
        shrink = tl.exp2((top - new) * 1.4426950408889634)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        y = tl.load(v + n[:, None] * D + d[None, :])
        acc = tl.dot(p.to(tl.float16), y, acc)
        top = new
    tl.store(o + m[:, None] * D + d[None, :], acc / total[:, None])


@triton.jit
def reduce_rows(
    x, total, top, where, count, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):
    """Sum, maximum and its first index of each row of x[ROWS, columns]; count: positives in all."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    keep = (c < columns)[None, :] & (r >= 0)[:, None]
    value = tl.load(x + r[:, None] * columns + c[None, :], keep, float("-inf"))
    tl.store(total + r, tl.sum(tl.where(keep, value, 0.0), 1))
    best, index = tl.max(value, 1, return_indices=True)
    tl.store(top + r, best)
    tl.store(where + r, index)
    tl.atomic_add(count, tl.sum((value > 0).to(tl.int32)))


@triton.jit
def softmax(x, y, columns, WIDTH: tl.constexpr):
    """Row softmax of x[rows, columns], a row to a program."""
    row = tl.program_id(0)
    c = tl.arange(0, WIDTH)
    value = tl.load(x + row * columns + c, c < columns, float("-inf"))
    value = tl.exp(value - tl.max(value, 0))
    tl.store(y + row * columns + c, value / tl.sum(value, 0), c < columns)


@triton.jit
def scan_rows(x, y, columns, WIDTH: tl.constexpr):
    """Inclusive prefix sums of the int32 rows x[rows, columns]."""
    row = tl.program_id(0)
    c = tl.arange(0, WIDTH)
    value = tl.load(x + row * columns + c, c < columns, 0)
    tl.store(y + row * columns + c, tl.cumsum(value, 0), c < columns)


@triton.jit
def quantise_mxfp8(x, y, scale, BLOCKS: tl.constexpr):
    """MXFP8 of float32 x[blocks, 32]: E4M3 bytes, and one UE8M0 byte (rounded up) a block."""
    b = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = b[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(x + at)
    bits = (tl.max(tl.abs(value), 1) / 448.0).to(tl.int32, bitcast=True)
    exponent = ((bits + 0x007FFFFF) >> 23) & 0xFF
    step = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(scale + b, exponent.to(tl.uint8))
    tl.store(y + at, (value / step[:, None]).to(tl.float8e4nv))


# fmt: on
@dataclass(frozen=True)
class Compiled:
    """PTX of one kernel for one shape, with what a launch needs to know."""

    ptx: str
    entry: str
    threads: int
    cluster: int
    shared: int
    scratch: int
    """Bytes of global memory that each CTA wants for itself."""
    descriptors: tuple[dict[str, Any], ...]


def build(  # a kernel is named by the function, its pointer types and its constants
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    warps: int = 4,
    stages: int = 3,
    ctas: int = 1,
    aligned: bool = True,
    arch: int = BLACKWELL,
) -> Compiled:
    """Return the PTX of ``kernel``; ``signature`` has the types of the arguments that remain.

    ``aligned``: pointers are multiples of 16, as Triton finds them to be when it launches; with it
    come cp.async and wide loads.
    """
    types = signature | dict.fromkeys(constants, "constexpr")
    names = list(kernel.arg_names)
    pointers = [name for name, kind in signature.items() if kind.startswith("*") and aligned]
    known = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=known)
    options = {"num_warps": warps, "num_stages": stages, "ptx_version": PTX_VERSION}
    options |= {"num_ctas": ctas, "enable_fp_fusion": True}
    return compiled(source, GPUTarget("cuda", arch, 32), options)


def compiled(source: Any, target: GPUTarget, options: dict[str, Any]) -> Compiled:
    """Return the PTX of ``source``; Triton keeps it in the checkout, not in the user's cache."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder() / "triton")
        made = triton.compile(source, target=target, options=options)
    about = made.metadata
    descriptors = tuple(getattr(about, "tensordesc_meta", None) or ())
    threads, sizes = 32 * about.num_warps, (about.shared, about.global_scratch_size)
    ctas = options["num_ctas"]
    return Compiled(made.asm["ptx"], about.name, threads, ctas, *sizes, descriptors)


@cache
def gemm_kernel(shape: tuple[int, ...], element: str, arch: int = BLACKWELL) -> Compiled:
    """Return `gemm` for a shape (M, N, K, BM, BN, BK, warps, stages)."""
    types = {"a": f"*{element}", "b": f"*{element}", "c": "*fp32"}
    constants = dict(zip(("M", "N", "K", "BM", "BN", "BK"), shape[:6], strict=True))
    options = {"warps": shape[6], "stages": shape[7], "aligned": shape[2] % 8 == 0}
    return build(gemm, types, constants, arch=arch, **options)
