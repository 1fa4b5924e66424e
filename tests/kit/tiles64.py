"""The layout "tiles64" said once more, element by element: orders of rows, and how to read it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BITS = {
    "e2m1": {
        0: {3: 15, 2: 8, 1: 7, 0: 6},
        1: {3: 12, 2: 5, 1: 4, 0: 3},
        2: {3: 9, 2: 2, 1: 1, 0: 0},
        3: {3: 13, 2: 11, 1: 10, 0: 14},
    },
    "int4": {a: {b: 4 * a + b for b in range(4)} for a in range(4)},
    "e2m1e": {
        0: {3: 7, 2: 2, 1: 1, 0: 0},
        1: {3: 3, 2: 10, 1: 9, 0: 8},
        2: {3: 15, 2: 6, 1: 5, 0: 4},
        3: {3: 11, 2: 14, 1: 13, 0: 12},
    },
}
"""Where the bits of the codes a0..a3 are in a half of a word."""

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def slow_natural(at: int) -> int:
    """Return what row ``at`` of the layout holds: q, t, b of 32 rows become t, q, b."""
    q, t, b = at % 32 // 8, at % 8 // 2, at % 2
    return at // 32 * 32 + 8 * t + 2 * q + b


def slow_position(at: int, gated: bool) -> tuple[int, bool]:
    """Return the output position of a gated product's row ``at``, and whether it is the up row."""
    if not gated:
        return slow_natural(at), False
    u, t, b = at % 32 // 16, at % 8 // 2, at % 2
    return at // 32 * 16 + 4 * t + 2 * u + b, at % 16 >= 8


def codes_of(packed: Array, kind: str, linear: bool = False) -> NDArray[np.int64]:
    """Return codes [R, K] of bytes [R / 64, K / 64, 2048]; ``linear``: of a linear layer."""
    rows, cols = packed.shape[:2]
    words = np.ascontiguousarray(packed).view("<u4").reshape(rows, cols, 4, 32, 4).astype(np.int64)
    row, k = np.indices((64 * rows, 64 * cols))
    m, high, g = row % 64 // 16, row % 16 // 8, row % 8
    t, j, i, turn = k % 64 // 16, k % 16 // 4, k % 4, 0
    if linear:  # MMAs take 16 neighbours, of which thread j has 2 j, + 1, + 8, + 9
        j, i, turn = k % 8 // 2, k % 2 + 2 * (k % 16 // 8), g // 2
    word = words[row // 64, k // 64, m, 4 * g + (t + turn) % 4, j] >> (16 * (i % 2))
    place = np.array([[BITS[kind][a][b] for b in range(4)] for a in range(4)])[high + 2 * (i // 2)]
    return sum((word >> place[..., bit] & 1) << bit for bit in range(4))


def values_of(
    packed: Array,
    scale: Array,
    fmt: str,
    group: int,
    zeros: bool,
    dtype: str | None,
    layout: str = "tiles64",
) -> NDArray[np.float64]:
    """Return the values [R, K] of a linear layer's weight in a layout of tiles, all rows.

    Without global scale.
    """
    if layout == "tiles64e":
        codes = codes_of(packed, "int4" if fmt == "int4" else "e2m1e")
    else:
        codes = codes_of(packed, "int4" if fmt == "int4" else "e2m1", linear=True)
    row, k = np.indices(codes.shape)
    m, high, g, block = row % 64 // 16, row % 16 // 8, row % 8, k // 64
    if fmt == "nvfp4":
        lanes = scale.reshape(*scale.shape[:2], 4, 32, 2)
        byte = lanes[row // 64, block, m, 4 * g + k % 64 // 16, high].astype(np.int64)
        if layout == "tiles64e":  # rounded to E4M3, whose byte the scale is
            exact = e2m1(codes) * e4m3(byte & 0x7F)
            return exact.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0**-6
        factor = (1 + byte % 8 / 8) * 2.0 ** (byte // 8 - 13)
    elif fmt == "mxfp4":
        halves = scale.reshape(*scale.shape[:2], 4, 8, 2, 2)
        byte = halves[row // 64, block, m, g, k % 64 // 32, high].astype(np.int64)
        factor = 2.0 ** (byte - 237)
    else:
        wide, parts = max(1, 64 // group), 2 if zeros else 1
        kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
        floats = np.ascontiguousarray(scale).view(kinds[dtype or ""])
        shaped = floats.reshape(*scale.shape[:2], 4, 8, wide, 2, parts).astype(np.float64)
        place = (row // 64, k // max(64, group), m, g, k % 64 // group if wide > 1 else 0 * k, high)
        zero = shaped[(*place, 1)] if zeros else 8.0
        return (codes - zero) * shaped[(*place, 0)]
    return e2m1(codes) * factor


def e2m1(codes: Array) -> NDArray[np.float64]:
    """Return the values of codes."""
    return np.where(codes >= 8, -1.0, 1.0) * E2M1[codes % 8]


def e4m3(byte: Array) -> NDArray[np.float64]:
    """Return the values of E4M3 bytes."""
    return byte.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def weight_of(weights: Any) -> NDArray[np.float64]:
    """Return [N, K] of a `LinearWeights` in a layout of tiles, global scales included."""
    w = weights
    dtype = None if w.dtype is None else str(w.dtype).removeprefix("torch.")
    dtype = "bfloat16" if w.layout == "tiles64e" else dtype
    whole = values_of(
        w.packed.numpy(), w.block_scale.numpy(), w.fmt, w.group, w.zeros, dtype, w.layout
    )  # fmt: skip
    factors = w.global_scale.double().numpy()
    out, cols = np.full((w.n, w.k), np.nan), w.n // 2
    for at, values in enumerate(whole):
        p, up = slow_position(at, w.gated)
        row = p + cols * up
        if p < (cols if w.gated else w.n):
            out[row] = values[: w.k] * factors[at if w.layout == "tiles64e" else int(up)]
        else:
            assert not values.any(), "padding"
        assert not values[w.k :].any(), "padding"
    assert not np.isnan(out).any()
    return out
