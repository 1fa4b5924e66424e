"""Cases of kernels/movement.cu: transfers and layouts against NumPy indexing."""

from __future__ import annotations

import numpy as np

from tests.emulator.kernels.cuda_kernels import Case, equal, nans, tensor_map

Generator = np.random.Generator
I32, U32 = np.int32, np.uint32


def reduce_maps(rng: Generator) -> Case:
    """x [3, 24, 16] summed over its first axis by TMA, into what `out` holds."""
    x = rng.integers(-1000, 1000, (3, 24, 16)).astype(I32)
    out = rng.integers(-1000, 1000, (24, 16)).astype(I32)
    total = np.zeros(4, I32)
    maps = [tensor_map(x, "INT32", (16, 8, 1)), tensor_map(out, "INT32", (16, 8))]
    judge = equal((out, out + x.sum(0)), (total, x.sum() + 9 * np.arange(4)))
    return Case("movement", "reduce_maps", [*maps, total], judge, grid=(3, 3), threads=32)


def gather_rows(rng: Generator) -> Case:
    """Rows chosen by index; a row beyond the end is read as zero and written nowhere."""
    x, y = rng.standard_normal((40, 16)).astype(np.float32), nans(40, 16)
    source, target = rng.permutation(40)[:24].astype(I32), rng.permutation(40)[:24].astype(I32)
    source[5], target[9] = 40, 41
    want = y.copy()
    for a, b in zip(source, target, strict=True):
        if b < 40:
            want[b] = 2 * x[a] if a < 40 else 0
    maps = [tensor_map(z, "FLOAT32", (16, 1), "64B") for z in (x, y)]
    args = [*maps, source, target]
    return Case("movement", "gather_rows", args, equal((y, want)), grid=(6,), threads=64)


def ring(rng: Generator, size: int = 4) -> Case:
    """Clusters whose CTAs send everything to the next one."""
    x, y = rng.integers(0, 2**31, (2, size, 128)).astype(I32), np.zeros((2, size, 128), I32)
    counts = np.zeros(2 * size, U32)
    judge = equal((y, np.roll(x, 1, axis=1)), (counts, np.full(2 * size, 32)))
    args = [x, y, counts, size]
    return Case("movement", "ring", args, judge, grid=(2 * size,), threads=32, cluster=size)


def transpose(rng: Generator) -> Case:
    x = rng.integers(0, 2**16, (3, 16, 16)).astype(np.uint16)
    y = np.zeros_like(x)
    judge = equal((y, x.transpose(0, 2, 1)))
    return Case("movement", "transpose", [x, y], judge, grid=(3,), threads=32)


def tmem_shapes(rng: Generator) -> Case:
    """Cell (lane, column) of each warp's 32 lanes holds lane << 16 | column << 1 | 1."""
    out = np.zeros((4, 14, 32), U32)
    lane = np.arange(32)
    want = np.zeros((4, 14, 32), np.int64)
    for warp in range(4):

        def cell(row, column, first=32 * warp):
            return (first + row) << 16 | column << 1 | 1

        for i in range(4):  # 16x256b: rows 16.. of the warp
            want[warp, i] = cell(16 + lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2)
        for i in range(2):  # 16x128b: rows 0.., columns 4..
            want[warp, 4 + i] = cell(lane // 4 + 8 * i, 4 + lane % 4)
        for i in range(4):  # two columns' low halves a register
            low, high = (cell(lane, 2 * i + j) & 0xFFFF for j in range(2))
            want[warp, 6 + i] = high << 16 | low
        for i in range(4):  # rows 16.. were copied over rows 0..
            want[warp, 10 + i] = cell(np.where(lane < 16, lane + 16, lane), i)
    return Case("movement", "tmem_shapes", [out], equal((out, want)))


def steal(rng: Generator, ctas: int = 9) -> Case:
    visits, by = np.zeros(ctas, U32), np.full(ctas, 99, U32)
    once = equal((visits, np.ones(ctas)))

    def judge():
        return once() or (f"worked on by {by}" if (by >= ctas).any() else None)

    return Case("movement", "steal", [visits, by], judge, grid=(ctas,), threads=64)


ALL = (reduce_maps, gather_rows, ring, transpose, tmem_shapes, steal)
