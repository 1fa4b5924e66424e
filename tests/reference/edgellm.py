"""Edge-LLM's decode passes in plain Python, number by number, and in float64; slow and obvious.

Written from the description of the original's arithmetic; it shares no code with the package.
float16 numbers are NumPy's: each operation is rounded once (products and sums of two are exact in
the float32 in which NumPy computes them, or round to the same number).
"""

import math

import numpy as np

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
f16, f32 = np.float16, np.float32


def e2m1(code):
    """Return the value of a code."""
    return -MAGNITUDES[code - 8] if code >= 8 else MAGNITUDES[code]


def code_at(packed, column):
    """Return code ``column`` of packed bytes."""
    byte = int(packed[column // 2])
    return byte >> 4 if column % 2 else byte & 15


def scale_half(byte):
    """Return the float16 whose bits are the byte's, seven up."""
    return np.array([int(byte) << 7], dtype=np.uint16).view(f16)[0]


def strip_w4a16(size):
    """Return the rows of a strip."""
    for tb in (256, 128, 96, 64):
        if size % tb == 0:
            return tb
    raise AssertionError(size)


def strip_w4a4(hidden, intermediate):
    """Return the rows of a strip of both passes."""
    for tb in (256, 192, 128, 96, 64):
        if hidden % tb == 0 and intermediate % tb == 0:
            return tb
    raise AssertionError((hidden, intermediate))


def warp_sum(values):
    """Return lane 0 after additions of the lane 16, 8, 4, 2, 1 further on."""
    lanes = list(values)
    for distance in (16, 8, 4, 2, 1):
        for lane in range(distance):
            lanes[lane] = f16(lanes[lane] + lanes[lane + distance])
    return lanes[0]


def add_expert(out, a, payload, scales, tb):
    """Add a GEMV to ``out``: strip by strip, column by column."""
    for strip in range(len(a) // tb):
        rows = range(strip * tb, (strip + 1) * tb)
        for n in range(len(out)):
            terms = []
            for j in rows:
                scaled = f16(a[j] * scale_half(scales[j // 16][n]))
                terms.append(f16(scaled * f16(e2m1(code_at(payload[j], n)))))
            block = f16(0)
            for warp in range(tb // 32):
                block = f16(block + warp_sum(terms[32 * warp : 32 * warp + 32]))
            out[n] = f16(out[n] + block)


def activation_w4a4(packed, words, g):
    """Return activations [H] in float32 of a token: codes, words (unsigned), global scale."""
    values = []
    for j in range(2 * len(packed)):
        word, block = int(words[j // 64]), j % 64 // 16
        place = (0, 2, 1, 3)[block]  # the second and the third byte are exchanged
        half = f16(scale_half((word >> (8 * place)) & 255) * f16(e2m1(code_at(packed, j))))
        values.append(f32(half) if g is None else f32(f32(half) * f32(g)))
    return values


def up_fp16(act, payload, scales, factor, ids, tb):
    """Return z [T, K_top, I] float16 of float32 activations [T][H]."""
    experts, columns = len(payload), scales.shape[2]
    z = np.zeros((len(ids), len(ids[0]), columns), f16)
    for t, slots in enumerate(ids):
        for j, e in enumerate(slots):
            if 0 <= e < experts:
                a = [f16(f32(f32(v) * f32(factor[e]))) for v in act[t]]
                add_expert(z[t, j], a, payload[e], scales[e], tb)
    return z


def gate(activation, v):
    """Return relu2 or silu of a float32 number, in float32."""
    if activation == "relu2":
        v = max(v, f32(0))
        return f32(v * v)
    v = min(max(v, f32(-50)), f32(50))
    return f32(v / f32(f32(1) + f32(math.exp(-float(v)))))


def down_fp16(z, payload, scales, factor, ids, weights, activation, tb):
    """Return out [T, H] float16."""
    experts, columns = len(payload), scales.shape[2]
    out = np.zeros((len(ids), columns), f16)
    for t, slots in enumerate(ids):
        for j, e in enumerate(slots):
            if 0 <= e < experts:
                a = []
                for v in z[t][j]:
                    weighted = f32(gate(activation, f32(v)) * f32(weights[t][j]))
                    a.append(f16(f32(weighted * f32(factor[e]))))
                add_expert(out[t], a, payload[e], scales[e], tb)
    return out


def weight(payload, scales):
    """Return a weight [..., K, N] in float64, without its global scale."""
    codes = np.stack((payload & 15, payload >> 4), -1).reshape(*payload.shape[:-1], -1)
    table = np.array([e2m1(code) for code in range(16)])
    halves = (scales.astype(np.uint16) << 7).view(f16).astype(np.float64)
    return table[codes] * np.repeat(halves, 16, -2)


def up(x, payload, scales, factor, ids):
    """Return z [T, K_top, I] in float64."""
    w = weight(payload, scales)
    z = np.zeros((*ids.shape, w.shape[2]))
    for t, j in np.ndindex(ids.shape):
        if 0 <= ids[t, j] < len(w):
            z[t, j] = x[t].astype(np.float64) @ w[ids[t, j]] * float(factor[ids[t, j]])
    return z


def down(z, payload, scales, factor, ids, weights, activation):
    """Return out [T, H] in float64."""
    w = weight(payload, scales)
    z = z.astype(np.float64)
    if activation == "relu2":
        g = np.maximum(z, 0) ** 2
    else:
        v = np.clip(z, -50, 50)
        g = v / (1 + np.exp(-v))
    out = np.zeros((len(ids), w.shape[2]))
    for t, j in np.ndindex(ids.shape):
        e = ids[t, j]
        if 0 <= e < len(w):
            out[t] += g[t, j] @ w[e] * float(factor[e]) * float(weights[t, j])
    return out


def row_error(got, want):
    """Return the relative error of each row, the last axis; rows of zeros must be zeros."""
    wide = got.astype(np.float64)
    size = np.linalg.norm(want, axis=-1)
    error = np.linalg.norm(wide - want, axis=-1)
    return np.where(size > 0, error / np.where(size > 0, size, 1), np.where(error > 0, np.inf, 0))
