"""Cases of control.cu, hopper.cu and sm120.cu, against plain Python and NumPy."""

from __future__ import annotations

import numpy as np

from tests.emulator.kernels.cuda_kernels import E2M1, UE4M3, Case, equal, nans, pack, tensor_map
from tests.emulator.kernels.kind_cases import FORMATS

Generator = np.random.Generator
I32, U32 = np.int32, np.uint32


def block_reduce(rng: Generator) -> Case:
    x = (rng.integers(-40, 200, 700) / 4).astype(np.float32)
    total, top, positive = np.zeros(1, np.float32), np.zeros(1, I32), np.zeros(1, U32)
    wanted = (x.astype(np.float64).sum(), x.view(I32).max(), (x > 0).sum())
    pairs = zip((total, top, positive), (np.array([w]) for w in wanted), strict=True)
    args = [x, len(x), total, top, positive]
    return Case("control", "block_reduce", args, equal(*pairs), grid=(3,), threads=96)


def warp_words(rng: Generator) -> Case:
    x = rng.integers(0, 9, 64).astype(I32)
    scan, votes = np.zeros(64, I32), np.zeros((64, 8), U32)
    want = np.zeros((64, 8), np.int64)
    for warp in range(2):
        values, rows = x[32 * warp :][:32], slice(32 * warp, 32 * warp + 32)

        def mask(bits):
            return sum(int(bit) << i for i, bit in enumerate(bits))

        lane = np.arange(32)
        want[rows, 0] = mask(values & 1)
        want[rows, 1] = int((values == 7).any()) | int((values >= 0).all()) << 1
        want[rows, 2] = [mask(values == v) for v in values]
        want[rows, 3] = values.sum()
        want[rows, 4] = values[lane & 24 | (lane ^ 5) & 7]
        want[rows, 5] = np.where(values & 1, mask((values & 1) & (values > 4)), 0)
        want[rows, 6] = np.bitwise_xor.reduce(values)
        want[rows, 7] = 2**32 - 1
    sums = x.reshape(2, 32).cumsum(1).reshape(64)
    judge = equal((scan, sums), (votes, want))
    return Case("control", "warp_words", [x, scan, votes], judge, grid=(2,), threads=32)


def histogram(rng: Generator) -> Case:
    x = rng.integers(0, 200, 1000).astype(np.uint8)
    x[::3] = 7
    bins, top = np.zeros(256, U32), np.zeros(1, np.float32)
    total, last = np.zeros(1), np.zeros(1, np.uint64)
    wanted = (np.bincount(x, minlength=256), [x.max() / 2], [x.sum() / 2], [999 << 32 | int(x[-1])])
    arrays = (bins, top, total, last)
    pairs = [(got, np.asarray(w)) for got, w in zip(arrays, wanted, strict=True)]
    args = [x, len(x), *arrays]
    return Case("control", "histogram", args, equal(*pairs), grid=(2,), threads=64)


def axpy(rng: Generator, ctas: int = 3, threads: int = 64) -> Case:
    """Multiples of 1/4: exact; the last CTA has work for half of its threads."""
    n = ctas * threads - threads // 2
    x, y = (rng.integers(-99, 100, 4 * n).astype(np.float32) / 4 for _ in range(2))
    judge = equal((y, x.astype(np.float64) * 1.5 + y))
    args = [x, y, np.float32(1.5), n]
    return Case("control", "axpy", args, judge, grid=(ctas,), threads=threads)


def collatz(rng: Generator) -> Case:
    x = rng.integers(0, 1000, 150).astype(U32)
    x[:3] = 0, 1, 27
    steps, want = np.full(160, -9, I32), np.full(160, -9)
    for i, start in enumerate(x):
        value, count = int(start), 0
        while value > 1 and count <= 60:
            value, count = (3 * value + 1 if value % 2 else value // 2), count + 1
        want[i] = -1 if start == 0 else -2 if count > 60 else count
    args = [x, steps, len(x), 60]
    return Case("control", "collatz", args, equal((steps, want)), grid=(3,), threads=64)


def _wrap(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def _interpret(code: np.ndarray, start: int) -> int:
    """Do what the kernel's stack machine does, in Python integers that wrap at 32 bits."""
    stack, top, pc = [start, *range(1, 16)], 0, 0
    while pc < len(code):
        op, value, below = int(code[pc]), stack[top], stack[(top + 15) & 15]
        if op == 0:
            return value
        if op == 1:
            top = (top + 1) & 15
            stack[top] = pc
        elif op in (2, 3):
            stack[top] = _wrap(value + below if op == 2 else value - below)
        elif op == 4:
            stack[top] = _wrap(value * 3)
        elif op == 5:
            top = (top + 15) & 15
        elif op == 6:
            stack[top] = _wrap((value & 7) ** (pc & 7))
        elif op == 7:
            by = pc - 4
            quotient = (
                int(abs(value) // abs(by)) * (1 if (value < 0) == (by < 0) else -1) if by else 0
            )
            stack[top], stack[(top + 1) & 15] = quotient, value - quotient * by
        elif op == 8:
            pc += value & 1
        elif op == 9:
            bits = value & (2**32 - 1)
            stack[top] = bits.bit_count() - (32 - bits.bit_length())
        elif op == 10:
            top = (top + 1) & 15
            stack[top] = value
        else:
            stack[top] = ~value
        pc += 1
    return stack[top] ^ top


def interpret(rng: Generator) -> Case:
    code = rng.integers(1, 12, (70, 24)).astype(np.uint8)
    code[rng.random(code.shape) < 0.02] = 0
    start, out = rng.integers(-(2**31), 2**31, 70).astype(I32), np.zeros(70, I32)
    want = np.array([_interpret(row, int(x)) for row, x in zip(code, start, strict=True)])
    judge = equal((out, want))
    return Case("control", "interpret", [code, 24, start, out], judge, grid=(2,), threads=35)


def grid_rounds(rng: Generator) -> Case:
    values = np.zeros((2, 96), I32)
    values[0] = rng.integers(-9, 10, 96)
    start, want = values[0].astype(np.int64), [values[0].astype(np.int64), None]
    for round_ in range(5):
        start = start + np.roll(start, -32)
        want[(round_ + 1) % 2] = start
    clocks = np.full(96, -1, np.int64)
    both = equal((values, np.array(want)))

    def judge():
        return both() or ("a clock ran backwards" if (clocks < 0).any() else None)

    args = [values, np.zeros(1, U32), clocks, 5]
    return Case("control", "grid_rounds", args, judge, grid=(3,), threads=32)


def async_copy(rng: Generator) -> Case:
    """1500 floats of 2048: what lies behind them must not be read, zeros come instead."""
    x, y = rng.standard_normal(1500).astype(np.float32), nans(2048)
    want = np.zeros(2048)
    want[:1500] = x
    want = want[np.arange(2048) ^ 3]
    return Case("control", "async_copy", [x, y, 1500], equal((y, want)), grid=(2,), threads=64)


def gcd_labels(rng: Generator) -> Case:
    a, b = (rng.integers(0, 60000, 64).astype(U32) for _ in range(2))
    c = np.zeros(64, U32)
    want = np.gcd(a.astype(np.int64), b) * 65536 + np.gcd(a.astype(np.int64) + 1, b)
    want %= 2**32
    return Case("control", "gcd_labels", [a, b, c], equal((c, want)), grid=(2,), threads=32)


def jump_table(rng: Generator) -> Case:
    x = rng.integers(0, 2**32, 96, dtype=np.uint64)
    y, want = np.zeros(96, U32), x.copy()
    for _ in range(20):
        odd = (want * np.uint64(3) + np.uint64(1)) % 2**32
        even = np.where(want % 4 == 0, (want + np.uint64(5)) % 2**32, want // 2)
        want = np.where(want % 2, odd, even)
    args = [x.astype(U32), y, 20]
    return Case("control", "jump_table", args, equal((y, want)), grid=(2,), threads=48)


def mma_sync(rng: Generator, k: int = 104) -> Case:
    a, b = ((rng.integers(-16, 17, (rows, k)) / 8).astype(np.float16) for rows in (128, 64))
    c = nans(128, 64)
    judge = equal((c, a.astype(np.float64) @ b.astype(np.float64).T))
    return Case("hopper", "mma_sync", [a, b, c, 64, k], judge, grid=(2, 1))


def wgmma(rng: Generator, element: str = "f16") -> Case:
    k = 192 if element == "f16" else 384
    if element == "f16":
        a, b = ((rng.integers(-16, 17, (rows, k)) / 8).astype(np.float16) for rows in (64, 128))
        left, right = a.astype(np.float64), b.astype(np.float64)
        maps = [tensor_map(x, "FLOAT16", (64, 64), "128B") for x in (a, b)]
    else:
        table = FORMATS["e4m3"].values()
        codes = np.flatnonzero(np.abs(table) <= 4).astype(np.uint8) & 0xFE
        codes = codes[np.abs(table[codes]) >= 0.25]
        a, b = (rng.choice(codes, (rows, k)) for rows in (64, 128))
        left, right = table[a], table[b]
        maps = [tensor_map(x, "UINT8", (128, 64), "128B") for x in (a, b)]
    c = nans(64, 128)
    args = [*maps, c, 128, 3]
    shared = 4 * 8192 + 32
    judge = equal((c, left @ right.T))
    entry = f"wgmma_{element}"
    return Case("hopper", entry, args, judge, grid=(1, 2), threads=160, shared=shared)


def mma_nvfp4(rng: Generator) -> Case:
    k = 192
    sides = []
    for rows in (32, 16):
        codes = rng.integers(0, 16, (rows, k), dtype=np.uint8)
        scale = rng.choice(np.array(list(UE4M3), np.uint8), (rows, k // 16))
        factor = np.vectorize(UE4M3.get)(scale)
        sides.append((pack(codes), scale, E2M1[codes] * np.repeat(factor, 16, axis=1)))
    c = nans(32, 16)
    (a, sa, left), (b, sb, right) = sides
    args = [a, b, sa, sb, c, 16, k]
    return Case("sm120", "mma_nvfp4", args, equal((c, left @ right.T)), grid=(2, 2), threads=32)


def mma_mxfp8_fp4(rng: Generator) -> Case:
    k = 96
    table = FORMATS["e4m3"].values()
    a = rng.choice(np.flatnonzero((np.abs(table) <= 4) & (np.abs(table) >= 0.25)), (32, k))
    a, codes = a.astype(np.uint8), rng.integers(0, 16, (16, k), dtype=np.uint8)
    sa, sb = (rng.integers(125, 130, (rows, k // 32)).astype(np.uint8) for rows in (32, 16))
    left, right = (
        value * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=1)
        for value, scale in ((table[a], sa), (E2M1[codes], sb))
    )
    c = nans(32, 16)
    args = [a, pack(codes), sa, sb, c, 16, k]
    judge = equal((c, left @ right.T))
    return Case("sm120", "mma_mxfp8_fp4", args, judge, grid=(2, 2), threads=32)
