"""A Gluon kernel (Triton's lower language) of two CTAs: cta_group::2 MMA, or TMA multicast."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_mma,
    tcgen05_mma_barrier_count,
    tma,
)

from tests.emulator.kernels import triton_kernels as tk
from tests.kit.compiled import text
from tests.kit.paths import ROOT


@gluon.jit
def gemm_of_two(a, b, c, K: gl.constexpr, MULTICAST: gl.constexpr, PAIR: gl.constexpr):
    """C = A @ B^T, a cluster of two CTAs a tile; two stages of K along a ring."""
    M: gl.constexpr = a.block_type.shape[0]
    BK: gl.constexpr = a.block_type.shape[1]
    N: gl.constexpr = b.block_type.shape[0]
    STAGES: gl.constexpr = 2
    m = gl.program_id(0) * M
    n = gl.program_id(1) * N
    x = gl.allocate_shared_memory(a.dtype, [STAGES, M, BK], a.layout)
    y = gl.allocate_shared_memory(b.dtype, [STAGES, N, BK], b.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=PAIR)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    commits: gl.constexpr = tcgen05_mma_barrier_count([x.index(0), y.index(0)], MULTICAST, PAIR)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=commits)
    halves: gl.constexpr = TensorMemoryLayout([128, N], 1, cga_layout=[[1, 0]], two_ctas=PAIR)
    acc = allocate_tensor_memory(gl.float32, [M, N], halves)
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [m, i * BK], full.index(i), x.index(i), multicast=MULTICAST)
        tma.async_load(b, [n, i * BK], full.index(i), y.index(i), multicast=MULTICAST)
    for t in range(K // BK):
        s = t % STAGES
        right = y.index(s).permute((1, 0))
        mbarrier.wait(full.index(s), t // STAGES & 1)
        tcgen05_mma(
            x.index(s), right, acc, use_acc=t > 0, mbarriers=[empty.index(s)], multicast=MULTICAST
        )
        mbarrier.wait(empty.index(s), t // STAGES & 1)
        k = (t + STAGES) * BK
        bar = full.index(s)
        mbarrier.expect(bar, a.nbytes_per_cta + b.nbytes_per_cta, pred=k < K)
        tma.async_load(a, [m, k], bar, x.index(s), pred=k < K, multicast=MULTICAST)
        tma.async_load(b, [n, k], bar, y.index(s), pred=k < K, multicast=MULTICAST)
    out = gl.allocate_shared_memory(gl.float32, [M, N], c.layout)
    out.store(acc.load())
    fence_async_shared()
    tma.async_store(c, [m, n], out)
    tma.store_wait(0)


def build(k: int, m: int, n: int, *, pair: bool) -> tk.Compiled:
    """Return the PTX for tiles of m x n; both CTAs hold half of A and C.

    ``pair``: one MMA of both CTAs, each with half of B; else two MMAs, and B comes by multicast.
    Compiles in a process of its own, whose last words are a page of leaked references (Triton 3.9).
    """
    sizes = (str(k), str(m), str(n), str(int(pair)))

    def in_child() -> str:
        command = [sys.executable, "-W", "ignore", "-m", __name__, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    sources = [Path(module).read_text() for module in (__file__, tk.__file__)]
    fields = json.loads(text(in_child, triton.__version__, *sources, *sizes))
    return tk.Compiled(**fields | {"descriptors": tuple(fields["descriptors"])})


def _build(k: int, m: int, n: int, pair: bool) -> tk.Compiled:
    split, whole = [[1, 0]], [[0, 0]]
    layouts = (
        gl.NVMMASharedLayout(128, 16, 2, cga_layout=split),
        gl.NVMMASharedLayout(128, 16, 2, cga_layout=split if pair else whole),
        gl.NVMMASharedLayout(128, 32, 2, cga_layout=split),
    )
    shapes = (f"fp16[{m},64]", f"fp16[{n},64]", f"fp32[{m},{n}]")
    both = zip(shapes, layouts, strict=True)
    types = dict(zip("abc", (f"tensordesc<{s},{layout!r}>" for s, layout in both), strict=True))
    constants = {"K": k, "MULTICAST": not pair, "PAIR": pair}
    types |= dict.fromkeys(constants, "constexpr")
    options = {"num_warps": 4, "num_ctas": 2, "enable_fp_fusion": True}
    options |= {"ptx_version": tk.PTX_VERSION}
    source = GluonASTSource(gemm_of_two, types, constants)
    target = GPUTarget("cuda", tk.BLACKWELL, 32)
    return tk.compiled(source, target, options)


if __name__ == "__main__":
    k, m, n, pair = map(int, sys.argv[1:])
    print(json.dumps(asdict(_build(k, m, n, bool(pair)))))
