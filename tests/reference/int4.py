"""INT4 and INT8 weights of TensorRT-LLM in NumPy: step by step, as its own code goes about it."""

import numpy as np

ROWS = {
    (
        "a16",
        4,
    ): "0 1 8 9 16 17 24 25 2 3 10 11 18 19 26 27 4 5 12 13 20 21 28 29 6 7 14 15 22 23 30 31",
    (
        "a8",
        4,
    ): "0 1 2 3 16 17 18 19 4 5 6 7 20 21 22 23 8 9 10 11 24 25 26 27 12 13 14 15 28 29 30 31",
    ("a16", 8): "0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15",
}
SLOTS = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}
INTERLEAVE = {("a16", 4): (4, 64), ("a8", 4): (2, 128), ("a16", 8): (2, 64)}
STEPS = {"full": (1, 1, 1), "no columns": (1, 0, 1), "transpose": (0, 0, 0)}


def codes(packed, bits):
    """Return the unsigned codes [E, K, N] of bytes."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], -1)


def preprocess(packed, activation, bits, steps):
    """Return the bytes after row permutation, transpose, column interleave, bias and slots."""
    permute, interleave, bias = STEPS[steps]
    q = codes(packed, bits)
    e, k, n = q.shape
    if permute:
        table = np.array(ROWS[activation, bits].split(), int)
        at = np.arange(k)
        q = q[:, at // len(table) * len(table) + table[at % len(table)]]
    q = q.transpose(0, 2, 1)
    if interleave:
        columns, rows = INTERLEAVE[activation, bits]
        q = q.reshape(e, n // columns, columns, k // rows, rows).transpose(0, 1, 3, 2, 4)
    q = q.reshape(-1, 32 // bits)
    if bias:
        q = (q ^ (1 << (bits - 1)))[:, SLOTS[bits]]
    q = q.reshape(-1)
    made = q if bits == 8 else q[0::2] | q[1::2] << 4
    return made.astype(np.uint8).reshape(packed.shape)


def signed(packed, bits):
    """Return the numbers [E, K, N] that codes stand for."""
    q = codes(packed, bits).astype(np.int64)
    return np.where(q >= 1 << (bits - 1), q - (1 << bits), q)


def dequantize(packed, scale, zero, group, bits=4):
    """Return q * scale + zero [E, K, N] in float64; scale and zero are [E, G, N]."""
    q = signed(packed, bits)
    at = np.arange(q.shape[1]) // group
    value = q * scale.astype(np.float64)[:, at]
    return value if zero is None else value + zero.astype(np.float64)[:, at]


# ---- Products (specification, sections 4, 6, 7) --------------------------------------------------


def e4m3_values():
    """Return every finite value of E4M3, ascending."""
    steps = [m / 8 * 2.0**-6 for m in range(8)]
    steps += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    finite = np.array(steps[:-1])  # the last code is NaN
    return np.concatenate([-finite[:0:-1], finite])


def to_e4m3(x):
    """Return the nearest value of E4M3, ties to the even mantissa, saturating at 448."""
    known = e4m3_values()
    x = np.clip(np.asarray(x, np.float64), -448, 448)
    above = np.clip(np.searchsorted(known, x), 1, len(known) - 1)
    low, high = known[above - 1], known[above]
    zero = len(known) // 2
    even = (np.abs(above - zero) % 2) == 0  # codes of a sign count up from zero
    take_high = (high - x < x - low) | ((high - x == x - low) & even)
    return np.where(x == low, low, np.where(take_high, high, low))


def product(x, q, scale, zero, group, alpha=1.0, bias=0.0):
    """Return alpha * x @ (q * scale + zero) + bias in float64; all of one expert, [K, N]."""
    at = np.arange(len(q)) // group
    w = q * scale.astype(np.float64)[at]
    if zero is not None:
        w = w + zero.astype(np.float64)[at]
    return alpha * (x.astype(np.float64) @ w) + bias
