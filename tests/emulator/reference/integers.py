"""Integers of PTX types as Python integers, and the comparison with a model lane by lane."""

import numpy as np

from blockscale.emulator.alu import lookup

N = 400
INTS = ("u16", "u32", "u64", "s16", "s32", "s64")


def width(t):
    return int(t.lstrip("usbf"))


def wrap(value, t):
    """A Python integer modulo 2**bits, signed for s types."""
    bits = width(t)
    value %= 1 << bits
    return value - (1 << bits) if t[0] == "s" and value >> (bits - 1) else value


def clamp(value, t):
    bits = width(t)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if t[0] == "s" else (0, (1 << bits) - 1)
    return max(low, min(high, value))


def numbers(t, seed, n=N):
    """Edges of the type, small and random numbers."""
    bits = width(t)
    rng = np.random.default_rng(seed)
    edges = [
        0,
        1,
        2,
        3,
        -1,
        -2,
        1 << (bits - 1),
        (1 << (bits - 1)) - 1,
        (1 << (bits - 1)) + 1,
        1 << (bits // 2),
    ]
    edges += [31, 32, 33, 63, 64, 65, 255, 256]
    large = [int(v) for v in rng.integers(0, 1 << 63, n)]
    pool = (
        edges * 4
        + [v * 2 + 1 for v in large[: n // 4]]
        + [v >> int(s) for v, s in zip(large, rng.integers(0, 63, n), strict=True)]
    )
    return [wrap(pool[i], t) for i in rng.integers(0, len(pool), n)]


def array(values, dtype):
    if dtype == "?":
        return np.array(values, bool)
    unsigned = np.array([v % (1 << (8 * int(dtype[1]))) for v in values], dtype=np.uint64)
    return unsigned.astype(f"u{dtype[1]}").view(dtype)


def check(opcode, types, model, seed=0, n_dst=1, given=None):
    """Compare every lane with `model(*ints)`; types: those of the sources ('p' a predicate)."""
    alu = lookup(opcode, n_dst)
    given = given or [
        [bool(v & 1) for v in numbers("u16", 90 + i)] if t == "p" else numbers(t, seed + 7 * i)
        for i, t in enumerate(types)
    ]
    ins = [array(v, d) for v, d in zip(given, alu.ins + ("?",) * alu.reads_cc, strict=True)]
    with np.errstate(all="ignore"):
        outs = alu.fn(*ins)
        single = alu.fn(*[x[5] for x in ins])
    outs = outs if isinstance(outs, tuple) else (outs,)
    single = single if isinstance(single, tuple) else (single,)
    dtypes = alu.outs + ("?",) * alu.writes_cc
    for k, (out, one, dtype) in enumerate(zip(outs, single, dtypes, strict=True)):
        assert out.dtype == np.dtype(dtype)
        for lane, args in enumerate(zip(*given, strict=True)):
            r = model(*args)
            r = r[k] if isinstance(r, tuple) else r
            got = out[lane]
            ok = (
                bool(got) == bool(r)
                if dtype == "?"
                else int(got.view(f"u{dtype[1]}")) == r % (1 << (8 * int(dtype[1])))
            )
            assert ok, (opcode, args, got, r)
        assert np.ravel(one)[0] == out[5]
