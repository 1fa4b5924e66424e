"""tcgen05.mma against sums and tensor memory written out element by element."""

import math
from fractions import Fraction

import numpy as np
import pytest

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.tcgen05.mma import check_zero_column_mask, plan_mma
from blockscale.emulator.tcgen05.opcode import parse_opcode

SIGNED_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
CODES = {
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "i8": {"u8": 0, "s8": 1},
    "f8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "mxf4": {"e2m1": 1},
}
CODES["mxf8f6f4"], CODES["mxf4nvf4"] = CODES["f8f6f4"], CODES["mxf4"]


def small(code, exponent_bits, mantissa_bits, bias):
    """A small float from its definition (no infinities or NaN among the codes the tests use)."""
    sign = -1 if code >> (exponent_bits + mantissa_bits) & 1 else 1
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = Fraction(code & ((1 << mantissa_bits) - 1), 1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * Fraction(2) ** (1 - bias)
    return sign * (1 + fraction) * Fraction(2) ** (exponent - bias)


DECODE = {
    "e2m1": lambda c: small(c, 2, 1, 1),
    "e2m3": lambda c: small(c, 2, 3, 1),
    "e3m2": lambda c: small(c, 3, 2, 3),
    "e4m3": lambda c: small(c, 4, 3, 7),
    "e5m2": lambda c: small(c, 5, 2, 15),
    "f16": lambda c: small(c, 5, 10, 15),
    "bf16": lambda c: small(c, 8, 7, 127),
    "tf32": lambda c: small(c >> 13, 8, 10, 127),
    "u8": lambda c: Fraction(c),
    "s8": lambda c: Fraction(c - 256 if c > 127 else c),
    "ue8m0": lambda c: Fraction(2) ** (c - 127),
    "ue4m3": lambda c: small(c & 127, 4, 3, 7),
}


def random_codes(rng, fmt, shape):
    """Codes of finite numbers of moderate size."""
    if fmt in ("f16", "bf16"):
        dtype = np.float16 if fmt == "f16" else np.float32
        values = rng.normal(size=shape).astype(dtype)
        return (
            values.view(np.uint16).astype(int)
            if fmt == "f16"
            else (values.view(np.uint32) >> 16).astype(int)
        )
    if fmt == "tf32":
        return rng.normal(size=shape).astype(np.float32).view(np.uint32).astype(int)
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(fmt, 8)
    codes = rng.integers(0, 1 << bits, shape)
    if fmt == "e4m3":
        codes = np.where(codes & 127 == 127, 0, codes)
    if fmt == "e5m2":
        codes = np.where(codes >> 2 & 31 == 31, 0x3C, codes)
    return codes


def pack_row(codes, kind, fmt):
    """Bytes of one K-major row in shared memory, element by element (9.7.16.10.4)."""
    if kind in ("mxf4", "mxf4nvf4"):
        return [int(codes[i]) | int(codes[i + 1]) << 4 for i in range(0, len(codes), 2)]
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6, "f16": 16, "bf16": 16, "tf32": 32}.get(fmt, 8)
    if bits in (4, 6):
        out = []
        for chunk in range(0, len(codes), 16):
            word = sum(int(code) << bits * i for i, code in enumerate(codes[chunk : chunk + 16]))
            out += list(word.to_bytes(16, "little"))
        return out
    return [b for code in codes for b in int(code).to_bytes(bits // 8, "little")]


def instruction(kind, m, n, a, b, d="f32", scale="", sfa=0, sfb=0, extra=0):
    bits = extra | CODES[kind][a] << 7 | CODES[kind][b] << 10 | n >> 3 << 17
    if scale:
        return bits | m >> 7 << 27 | (scale == "ue8m0") << 23 | sfa << 29 | sfb << 4
    return bits | m >> 4 << 24 | {"f16": 0, "f32": 1, "s32": 2}[d] << 4


class Case:
    """Random operands of one MMA, as codes, bytes and words, and its sum in fractions."""

    def __init__(self, opcode, m, n, a, b, d="f32", scale="", seed=0, **fields):
        self.rng = np.random.default_rng(seed)
        self.op = parse_opcode(opcode)
        self.kind = self.op.kind
        self.plan = plan_mma(self.op, instruction(self.kind, m, n, a, b, d, scale, **fields))
        k = {"f16": 16, "tf32": 8, "mxf4": 64, "mxf4nvf4": 64}.get(self.kind, 32)
        assert self.plan.k == k
        self.m, self.n, self.k, self.scale = m, n, k, scale
        self.a_format, self.b_format = a, b
        self.a = random_codes(self.rng, a, (m, k))
        self.b = random_codes(self.rng, b, (n, k))
        self.factors = k // self.op.block if scale else 0
        low, high = (120, 134) if scale == "ue8m0" else (0, 127)
        self.sfa = self.rng.integers(low, high, (m, self.factors))
        self.sfb = self.rng.integers(low, high, (n, self.factors))

    def raw(self, codes, fmt):
        rows = [pack_row(row, self.kind, fmt) for row in codes]
        return np.array(rows, dtype=np.uint8)

    def term(self, i, j):
        """A[i] . B[j] with scales, exactly."""
        total = Fraction(0)
        for x in range(self.k):
            product = DECODE[self.a_format](int(self.a[i, x])) * DECODE[self.b_format](
                int(self.b[j, x])
            )
            if self.scale:
                f = x // self.op.block
                product *= DECODE[self.scale](int(self.sfa[i, f]))
                product *= DECODE[self.scale](int(self.sfb[j, f]))
            total += product
        return total

    def scale_words(self, first):
        """TMEM uint32 [128, 16] of one CTA: A's factors from column 0, B's from column 8.

        Every one of four partitions has row r in lane r % 32, word r // 32 (9.7.16.10.7.2); with
        M = 128 over two CTAs partitions 2 and 3 start with column n / 2 of B.
        """
        memory = np.zeros((128, 16, 4), np.uint8)
        rows = self.plan.rows
        halves = 2 if (self.m, self.op.cta_group) == (128, 2) else 1
        for partition in range(4):
            for r in range(rows):
                lane = 32 * partition + r % 32
                for f in range(self.factors):
                    byte = self.plan.idesc.sfa_id + f
                    memory[lane, r // 32, byte] = self.sfa[first + r, f]
            offset = self.n // 2 if halves == 2 and partition >= 2 else 0
            for r in range(self.n // halves):
                lane = 32 * partition + r % 32
                for f in range(self.factors):
                    byte = self.plan.idesc.sfb_id + f
                    memory[lane, 8 + r // 32, byte] = self.sfb[offset + r, f]
        return memory.view(np.uint32)[..., 0]

    def run(self, d=None, rank=0, **options):
        """The words [rows, n] of the CTA of this rank."""
        plan = self.plan
        first = rank * plan.rows
        a = plan.decode_a(self.raw(self.a[first : first + plan.rows], self.a_format))
        b = plan.decode_b(self.raw(self.b, self.b_format))
        sfa = sfb = None
        if self.scale:
            words = self.scale_words(first)
            sfa = plan.decode_sfa(words[plan.sfa_cells.lane, plan.sfa_cells.column])
            sfb = plan.decode_sfb(words[plan.sfb_cells.lane, plan.sfb_cells.column + 8])
        return plan.multiply(d, a, b, sfa, sfb, **options)


MMA = "tcgen05.mma.cta_group::{}.kind::{}"
SCALED = [
    ("mxf4nvf4.block_scale.block16", "e2m1", "e2m1", "ue4m3", 0, 0),
    ("mxf4nvf4.block_scale.scale_vec::4X", "e2m1", "e2m1", "ue8m0", 0, 0),
    ("mxf4nvf4.block_scale.scale_vec::2X", "e2m1", "e2m1", "ue8m0", 2, 0),
    ("mxf4.block_scale", "e2m1", "e2m1", "ue8m0", 0, 2),
    ("mxf8f6f4.block_scale.scale_vec::1X", "e4m3", "e2m1", "ue8m0", 3, 1),
    ("mxf8f6f4.block_scale", "e5m2", "e3m2", "ue8m0", 0, 2),
    ("mxf8f6f4.block_scale.block32", "e2m3", "e4m3", "ue8m0", 1, 0),
]


@pytest.mark.parametrize(("kind", "a", "b", "scale", "sfa", "sfb"), SCALED)
@pytest.mark.parametrize(("group", "m", "n"), [(1, 128, 72), (2, 256, 48), (2, 128, 96)])
def test_block_scaled(kind, a, b, scale, sfa, sfb, group, m, n):
    case = Case(MMA.format(group, kind), m, n, a, b, scale=scale, sfa=sfa, sfb=sfb)
    for rank in range(group):
        got = case.run(rank=rank).view(np.float32)
        assert got.shape == (m // group, n)
        for i, j in zip(
            case.rng.integers(0, m // group, 60), case.rng.integers(0, n, 60), strict=True
        ):
            want = case.term(rank * (m // group) + i, j)
            assert got[i, j] == np.float32(float(want))


@pytest.mark.parametrize(
    ("kind", "a", "b", "d"),
    [
        ("f16", "f16", "f16", "f32"),
        ("f16", "bf16", "bf16", "f32"),
        ("f16", "f16", "f16", "f16"),
        ("tf32", "tf32", "tf32", "f32"),
        ("f8f6f4", "e4m3", "e5m2", "f32"),
        ("f8f6f4", "e2m1", "e3m2", "f16"),
        ("i8", "s8", "u8", "s32"),
    ],
)
@pytest.mark.parametrize(
    ("group", "m", "n"), [(1, 64, 32), (1, 128, 16), (2, 128, 64), (2, 256, 32)]
)
def test_plain(kind, a, b, d, group, m, n):
    """D = A B + D, negation of A (bit 13), every accumulator format."""
    negate = 0 if kind == "i8" else 1
    case = Case(MMA.format(group, kind), m, n, a, b, d, extra=negate << 13, seed=3)
    rows = m // group
    if d == "s32":
        old = case.rng.integers(-(2**31), 2**31, (rows, n)).astype(np.int32).view(np.uint32)
    elif d == "f16":
        old = case.rng.normal(size=(rows, n)).astype(np.float16).view(np.uint16).astype(np.uint32)
    else:
        old = case.rng.normal(size=(rows, n)).astype(np.float32).view(np.uint32)
    for rank in range(group):
        got = case.run(old, rank=rank)
        for i, j in zip(case.rng.integers(0, rows, 50), case.rng.integers(0, n, 50), strict=True):
            term = case.term(rank * rows + i, j) * (-1 if negate else 1)
            if d == "s32":
                assert int(got[i, j]) == (int(term) + int(old[i, j])) % 2**32
            elif d == "f16":
                before = float(old[i, j].astype(np.uint16).view(np.float16))
                assert got[i, j] == np.float16(float(term + Fraction(before))).view(np.uint16)
            else:
                before = Fraction(float(old[i, j].view(np.float32)))
                assert got[i, j].view(np.float32) == np.float32(float(term + before))


def test_scale_input_d_and_its_limits():
    case = Case(MMA.format(1, "f16"), 64, 16, "f16", "f16")
    old = case.rng.normal(size=(64, 16)).astype(np.float32)
    got = case.run(old.view(np.uint32), scale_d=5).view(np.float32)
    want = case.term(9, 4) + Fraction(float(old[9, 4])) / 32
    assert got[9, 4] == np.float32(float(want))
    with pytest.raises(IllegalOperation, match="scale-input-d is 16"):
        case.run(old.view(np.uint32), scale_d=16)
    other = Case(MMA.format(1, "f8f6f4"), 64, 16, "e4m3", "e4m3")
    with pytest.raises(IllegalOperation, match="exists for f16 and tf32"):
        other.run(scale_d=1)


def test_integer_saturation():
    """Bit 3 of the instruction descriptor: clamp instead of wrap."""
    case = Case(MMA.format(1, "i8"), 64, 16, "u8", "u8", "s32", extra=1 << 3)
    old = np.full((64, 16), 2**31 - 1, np.uint32)
    assert (case.run(old) == 2**31 - 1).all()
    wrapping = Case(MMA.format(1, "i8"), 64, 16, "u8", "u8", "s32")
    assert (wrapping.run(old).view(np.int32) < 0).any()


def test_nan_and_infinity():
    """UE8M0 0xFF and UE4M3 0x7F are NaN; overflow is infinity; NaN is written as 0x7FFFFFFF."""
    for kind, scale, code in (("mxf4", "ue8m0", 255), ("mxf4nvf4", "ue4m3", 127)):
        suffix = ".block_scale.block16" if kind == "mxf4nvf4" else ".block_scale.block32"
        case = Case(MMA.format(1, kind) + suffix, 128, 16, "e2m1", "e2m1", scale=scale)
        case.sfa[5, 1] = code
        got = case.run()
        assert (got[5] == 0x7FFFFFFF).all()
        assert np.isfinite(np.delete(got, 5, axis=0).view(np.float32)).all()
    case = Case(MMA.format(1, "mxf4") + ".block_scale", 128, 16, "e2m1", "e2m1", scale="ue8m0")
    case.a[:], case.b[:] = 7, 7
    case.b[3], case.sfa[:], case.sfb[:] = 15, 254, 254
    got = case.run().view(np.float32)
    assert (got[:, 3] == -math.inf).all()
    assert (np.delete(got, 3, axis=1) == math.inf).all()
    case = Case(MMA.format(1, "f16"), 64, 16, "f16", "f16")
    case.a[0, 0], case.b[0, 0], case.b[1, 0] = 0x7C00, 0, 0x3C00  # infinity * 0, infinity * 1
    got = case.run()
    assert got[0, 0] == 0x7FFFFFFF
    assert got[0, 1].view(np.float32) == math.inf


def test_a_partition_uses_its_own_scale_copy():
    """A copy that is missing in one partition spoils the 32 lanes of that partition only."""
    case = Case(MMA.format(1, "mxf4") + ".block_scale", 128, 64, "e2m1", "e2m1", scale="ue8m0")
    plan = case.plan
    a = plan.decode_a(case.raw(case.a, "e2m1"))
    b = plan.decode_b(case.raw(case.b, "e2m1"))
    words = case.scale_words(0)
    sfa = plan.decode_sfa(words[plan.sfa_cells.lane, plan.sfa_cells.column])
    right = case.run()
    words[64:96, 8:16] = 0x7F7F7F7F
    sfb = plan.decode_sfb(words[plan.sfb_cells.lane, plan.sfb_cells.column + 8])
    got = plan.multiply(None, a, b, sfa, sfb)
    assert (got[:64] == right[:64]).all()
    assert (got[96:] == right[96:]).all()
    assert (got[64:96] != right[64:96]).any(axis=1).all()


# layout -> lane and column of (row, n), by hand from the figures of 9.7.16.10.5
PLACES = {
    ("tcgen05.mma.cta_group::1.kind::f16", 128): lambda r, c, n: (r, c),
    ("tcgen05.mma.cta_group::1.kind::f16", 64): lambda r, c, n: (r + 16 * (r // 16), c),
    ("tcgen05.mma.cta_group::2.kind::f16", 256): lambda r, c, n: (r, c),
    ("tcgen05.mma.cta_group::2.kind::f16", 128): lambda r, c, n: (
        r + 64 * (c >= n // 2),
        c % (n // 2),
    ),
    ("tcgen05.mma.ws.cta_group::1.kind::f16", 128): lambda r, c, n: (r, c),
    ("tcgen05.mma.ws.cta_group::1.kind::f16", 64): lambda r, c, n: (
        r + 64 * (c >= n // 2),
        c % (n // 2),
    ),
    ("tcgen05.mma.ws.cta_group::1.kind::f16", 32): lambda r, c, n: (
        r + c // (n // 4) * 32,
        c % (n // 4),
    ),
}


@pytest.mark.parametrize(("opcode", "m"), PLACES)
def test_accumulator_and_operand_a_layouts(opcode, m):
    """D's cells, and A in tensor memory: read from the lanes of D, once for each part of N."""
    n = 64
    op = parse_opcode(opcode)
    plan = plan_mma(op, instruction("f16", m, n, "f16", "f16"), a_in_tmem=True)
    rng = np.random.default_rng(m)
    lanes = set()
    for r in range(plan.rows):
        for c in range(n):
            want = PLACES[opcode, m](r, c, n)
            assert (plan.d_cells.lane[r, c], plan.d_cells.column[r, c]) == want
            lanes.add(want)
    assert len(lanes) == plan.rows * n
    memory = np.zeros((128, 512), np.uint32)
    codes = {}
    folds = plan.a_cells.lane.shape[0]
    for fold in range(folds):  # another A in each copy, to see which one is used
        for r in range(plan.rows):
            lane = PLACES[opcode, m](r, fold * n // folds, n)[0]
            codes[fold, r] = random_codes(rng, "f16", 16)
            memory[lane, 10:18] = codes[fold, r].astype(np.uint16).view(np.uint32)
    words = memory[plan.a_cells.lane, plan.a_cells.column + 10]
    b_codes = random_codes(rng, "f16", (n, 16))
    b = plan.decode_b(np.array([pack_row(row, "f16", "f16") for row in b_codes], np.uint8))
    got = plan.multiply(None, plan.decode_a(words), b).view(np.float32)
    for r, c in zip(rng.integers(0, plan.rows, 40), rng.integers(0, n, 40), strict=True):
        a = codes[c // (n // folds), r]
        want = sum(
            DECODE["f16"](int(x)) * DECODE["f16"](int(y))
            for x, y in zip(a, b_codes[c], strict=True)
        )
        assert got[r, c] == np.float32(float(want))


def test_ashift_moves_rows_within_partitions():
    op = parse_opcode("tcgen05.mma.cta_group::1.kind::f16.ashift")
    plan = plan_mma(op, instruction("f16", 128, 16, "f16", "f16"), a_in_tmem=True)
    words = np.repeat(np.arange(128, dtype=np.uint16), 16).reshape(1, 128, 16).view(np.uint32)
    rows = plan.decode_a(words)[0, :, 0] * 2**24  # the code of a subnormal half counts 2^-24
    assert list(rows) == [r if r % 32 == 31 else r + 1 for r in range(128)]


def test_disabled_lanes():
    """One bit per lane of tensor memory; cta_group::2 has eight words, four for each CTA."""
    plan = plan_mma(parse_opcode(MMA.format(1, "f16")), instruction("f16", 64, 8, "f16", "f16"))
    keep = plan.keep_mask((1 << 3, 1 << 4, 0, 0x80000000), lane=16)
    assert [(r, c) for r, c in zip(*np.nonzero(keep), strict=True) if c == 0] == [(63, 0)]
    keep = plan.keep_mask((1 << 3, 1 << 4, 0, 0x80000000), lane=0)
    assert sorted({int(r) for r in np.nonzero(keep)[0]}) == [3, 20]
    pair = plan_mma(parse_opcode(MMA.format(2, "f16")), instruction("f16", 256, 16, "f16", "f16"))
    keep = pair.keep_mask((0, 0, 0, 0, 0, 1, 0, 0), rank=1)
    assert sorted({int(r) for r in np.nonzero(keep)[0]}) == [32]
    with pytest.raises(IllegalOperation, match="4 words and must have 8"):
        pair.keep_mask((0, 0, 0, 0))


def test_addresses():
    plan = plan_mma(parse_opcode(MMA.format(1, "f16")), instruction("f16", 64, 256, "f16", "f16"))
    assert plan.check_d_address(16 << 16 | 256) == (16, 256)
    with pytest.raises(IllegalOperation, match="needs columns 257 to 512"):
        plan.check_d_address(257)
    with pytest.raises(IllegalOperation, match="has lane 32, which must be 0 or 16"):
        plan.check_d_address(32 << 16)
    op = parse_opcode(MMA.format(1, "mxf4") + ".block_scale")
    plan = plan_mma(op, instruction("mxf4", 128, 256, "e2m1", "e2m1", scale="ue8m0"))
    assert plan.check_scale_address("B", 2 << 30 | 504) == (0, 504)
    with pytest.raises(IllegalOperation, match="scale factors of B"):
        plan.check_scale_address("B", 505)


def test_zero_column_mask():
    check_zero_column_mask(0)
    with pytest.raises(IllegalOperation, match="masks columns of B"):
        check_zero_column_mask(1 << 39)


def test_transposed_tf32_needs_its_swizzle():
    op = parse_opcode(MMA.format(1, "tf32"))
    plan = plan_mma(op, instruction("tf32", 128, 64, "tf32", "tf32", extra=1 << 15))
    with pytest.raises(IllegalOperation, match="it must be 128B with 32B atomicity"):
        plan.a_offsets(1 << 46 | 2 << 61)
    assert plan.a_offsets(1 << 46 | 1 << 61).shape == (128, 32)
    assert plan.b_offsets(1 << 46 | 2 << 61).shape == (64, 32)
