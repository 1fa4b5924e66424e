"""mma.sync against the manual's formulas, one loop per element; all shapes, types, random bits."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from blockscale.emulator import formats
from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.mma.sync import lookup
from tests.emulator.reference import mma as manual

F8F6F4 = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
PLAIN = [
    *(f"m16n8k{k}.row.col.{d}.f16.f16.{d}" for k in (8, 16) for d in ("f16", "f32")),
    *(f"m16n8k{k}.row.col.f32.bf16.bf16.f32" for k in (8, 16)),
    *(f"m16n8k{k}.row.col.f32.tf32.tf32.f32" for k in (4, 8)),
    *(
        f"m16n8k{k}.row.col.{d}.{a}.{b}.{d}"
        for k, d, a, b in itertools.product((16, 32), ("f16", "f32"), F8F6F4[:2], F8F6F4[:2])
    ),
    *(
        f"{shape}.row.col{sat}.s32.{a}.{b}.s32"
        for shape in ("m8n8k16", "m16n8k16", "m16n8k32")
        for sat, a, b in (("", "s8", "u8"), (".satfinite", "u8", "s8"), ("", "s8", "s8"))
    ),
    *(
        f"{shape}.row.col{sat}.s32.{a}.{b}.s32"
        for shape in ("m8n8k32", "m16n8k32", "m16n8k64")
        for sat, a, b in (("", "s4", "u4"), (".satfinite", "u4", "s4"))
    ),
    *(
        f"{shape}.row.col.s32.b1.b1.s32.{op}.popc"
        for shape in ("m8n8k128", "m16n8k128", "m16n8k256")
        for op in ("xor", "and")
    ),
    "m8n8k4.row.col.f64.f64.f64.f64",
    *(f"m16n8k{k}.row.col.f64.f64.f64.f64" for k in (4, 8, 16)),
    *(
        f"kind::f8f6f4.m16n8k32.row.col.{d}.{a}.{b}.{d}"
        for d, a, b in [
            *(("f32", a, b) for a in F8F6F4 for b in F8F6F4),
            ("f16", "e2m1", "e5m2"),
            ("f16", "e3m2", "e2m3"),
        ]
    ),
]
SCALED = [
    *(
        (f"kind::mxf8f6f4.block_scale{v}.m16n8k32.row.col.f32.{a}.{b}.f32.ue8m0", 1)
        for a, b, v in [
            ("e4m3", "e5m2", ".scale_vec::1X"),
            ("e2m1", "e3m2", ""),
            ("e2m3", "e2m1", ".scale_vec::1X"),
        ]
    ),
    ("kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0", 2),
    ("m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0", 2),
    ("kind::mxf4nvf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0", 2),
    ("kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0", 4),
    ("m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3", 4),
]


def opcode(tail):
    return f"mma.sync.aligned.{tail}"


def random_registers(rng, op, warps=2):
    """Random bits for a, b, c: a first warp of any, a second without NaN and inf; f64: normal."""
    ab = np.uint64 if op.ab_kind == "f64" else np.uint32
    a, b = (
        rng.integers(0, np.iinfo(ab).max, (warps, 32, n), dtype=ab, endpoint=True)
        for n in (op.a, op.b)
    )
    if ab is np.uint64:
        a, b = (rng.normal(size=x.shape).view(np.uint64) for x in (a, b))
        return a, b, rng.normal(size=(warps, 32, op.c)).view(np.uint64)
    c = rng.integers(0, 2**32, (warps, 32, op.c), dtype=np.uint32)
    if op.opcode.c_type == "f32" and rng.integers(2):
        c = rng.normal(size=c.shape).astype(np.float32).view(np.uint32)
    # Random bits of f16 and tf32 are NaN or infinity too often for a dot product to say much.
    if op.opcode.a_type in ("f16", "bf16", "tf32"):
        calm = {"f16": 0xBFFFBFFF, "bf16": 0xBFFFBFFF, "tf32": 0xBFFFFFFF}[op.opcode.a_type]
        a[1], b[1] = a[1] & np.uint32(calm), b[1] & np.uint32(calm)
    elif op.opcode.a_type in ("e4m3", "e5m2") and not op.opcode.kind:
        a[1], b[1] = a[1] & np.uint32(0xBFBFBFBF), b[1] & np.uint32(0xBFBFBFBF)
    return a, b, c


def check_warp(op, a, b, c, got, scale_a=None, scale_b=None):
    """One warp's D registers against loops over the manual's formulas."""
    code = op.opcode
    bits = code.element_bits
    shape = f"m{op.m}n{op.n}k{op.k}"

    def number(fmt):
        if code.kind in ("f8f6f4", "mxf8f6f4"):
            if fmt == "e2m1":
                return lambda x: manual.value(fmt, x >> 2 & 15)
            if fmt in ("e2m3", "e3m2"):
                return lambda x: manual.value(fmt, x & 63)
        return lambda x: manual.value(fmt, x)

    left = manual.collect(manual.A[shape, bits], a, bits, (op.m, op.k), number(code.a_type))
    right = manual.collect(manual.B[shape, bits], b, bits, (op.k, op.n), number(code.b_type))
    if scale_a is not None:
        chunk = op.k // scale_a.shape[1]
        for j in range(op.k):
            left[:, j] *= scale_a[:, j // chunk]
            right[j] *= scale_b[:, j // chunk]
    acc_bits = {"f16": 16, "f64": 64}.get(code.c_type, 32)
    for lane, i in itertools.product(range(32), range(op.m * op.n // 32)):
        row, col = manual.c_place(op.m, lane >> 2, lane % 4, i)
        x, y = left[row], right[:, col]
        old = manual.value(code.c_type, manual.code_of(c[lane], i, acc_bits))
        new = manual.code_of(got[lane], i, acc_bits)
        if code.d_type == "s32":
            total = int(sum(x != y) if code.bit_op == "xor" else sum(x * y)) + int(old)
            if code.saturate:
                total = min(max(total, -(2**31)), 2**31 - 1)
            assert new == total % 2**32
            continue
        want, biggest = manual.dot(x.tolist(), y.tolist(), old)
        if code.d_type == "f64":
            # The reference rounds its products, too: half a unit in the last place of each term.
            error = 2.0**-53 * (op.k + 2) * max(biggest, abs(want))
            assert abs(manual.value("f64", new) - want) <= error
        else:
            check_rounded(code.d_type, new, want, biggest)


def check_rounded(fmt, new, want, biggest):
    """new is want rounded once; a float64 sum may be off by 2**-48 of its biggest term first."""
    dtype, bits = (np.float16, np.uint16) if fmt == "f16" else (np.float32, np.uint32)
    with np.errstate(all="ignore"):
        if np.isnan(want):
            assert new == {"f16": 0x7FFF, "f32": 0x7FFFFFFF}[fmt]
        elif np.isinf(want):
            assert new == int(dtype(want).view(bits))
        else:
            low, high = (dtype(want + s * 2.0**-48 * biggest) for s in (-1, 1))
            assert low <= bits(new).view(dtype) <= high


@pytest.mark.parametrize("tail", PLAIN)
def test_every_shape_and_type(tail):
    """D of random registers is what loops over the manual's row and col formulas give."""
    op = lookup(opcode(tail))
    rng = np.random.default_rng(len(tail))
    a, b, c = random_registers(rng, op)
    before = [x.copy() for x in (a, b, c)]
    got = op.fn(a, b, c)
    assert got.shape == (2, 32, op.d)
    assert got.dtype == (np.uint64 if op.d_kind == "f64" else np.uint32)
    for warp in range(2):
        check_warp(op, a[warp], b[warp], c[warp], got[warp])
    assert all((x == y).all() for x, y in zip((a, b, c), before, strict=True))


@pytest.mark.parametrize(("tail", "vec"), SCALED)
def test_block_scale(tail, vec):
    """Every legal selector: scales come from the lanes and bytes of the manual's figures."""
    op = lookup(opcode(tail))
    rng = np.random.default_rng(vec)
    for byte_a, byte_b in itertools.product({1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[vec], repeat=2):
        thread_a, thread_b = int(rng.integers(2)), int(rng.integers(4))
        a, b, c = random_registers(rng, op, warps=1)
        sa, sb = (rng.integers(0, 2**32, (1, 32), dtype=np.uint32) for _ in range(2))
        if "ue8m0" in tail:  # scales near one, so that no term hides the others
            sa, sb = (x & 0x03030303 | 0x7C7C7C7C for x in (sa, sb))
        selectors = [byte_a, thread_a, byte_b, np.full((1, 32), thread_b, "u2")]
        got = op.fn(a, b, c, sa, *selectors[:2], sb, *selectors[2:])
        scale_a, scale_b = np.empty((16, vec)), np.empty((8, vec))
        for group, upper, j in itertools.product(range(8), range(2), range(vec)):
            word = int(sa[0, 4 * group + 2 * thread_a + upper])
            scale_a[group + 8 * upper, j] = manual.value(tail[-5:], word >> 8 * (byte_a + j) & 255)
            word = int(sb[0, 4 * group + thread_b])
            scale_b[group, j] = manual.value(tail[-5:], word >> 8 * (byte_b + j) & 255)
        check_warp(op, a[0], b[0], c[0], got[0], scale_a, scale_b)


def test_selectors_of_each_warp():
    """Warps in lockstep may hold different selectors in registers."""
    op = lookup(opcode(SCALED[0][0]))
    rng = np.random.default_rng(8)
    a, b, c = random_registers(rng, op, warps=2)
    scales = rng.integers(0x70, 0x80, (2, 2, 128), dtype=np.uint8).view(np.uint32)
    picks = [
        np.repeat(np.array([[i], [j]], "u2"), 32, 1) for i, j in ((3, 1), (0, 1), (2, 0), (3, 2))
    ]
    got = op.fn(a, b, c, scales[0], *picks[:2], scales[1], *picks[2:])
    for w in range(2):
        byte_a, thread_a, byte_b, thread_b = (int(pick[w, 0]) for pick in picks)
        one = slice(w, w + 1)
        alone = op.fn(
            a[one],
            b[one],
            c[one],
            scales[0, one],
            byte_a,
            thread_a,
            scales[1, one],
            byte_b,
            thread_b,
        )
        assert (got[one] == alone).all()


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ((1, 0, 0, 0), "byte-id-a is 1; with .scale_vec::2X it is one of 0, 2"),
        ((0, 2, 0, 0), "thread-id-a is 2"),
        ((0, 0, 3, 0), "byte-id-b is 3"),
        ((0, 0, 0, 4), "thread-id-b is 4"),
        ((0, 0, 0, np.arange(32).reshape(1, 32) % 4), "thread-id-b differs between lanes"),
    ],
)
def test_illegal_selectors(selector, message):
    op = lookup(opcode(SCALED[3][0]))
    a, b, c = random_registers(np.random.default_rng(0), op, warps=1)
    scale = np.zeros((1, 32), dtype=np.uint32)
    byte_a, thread_a, byte_b, thread_b = selector
    with pytest.raises(IllegalOperation, match=re.escape(message)):
        op.fn(a, b, c, scale, byte_a, thread_a, scale, byte_b, thread_b)


@pytest.mark.parametrize("layouts", list(itertools.product(("row", "col"), repeat=2)))
@pytest.mark.parametrize("types", [("f16", "f16"), ("f32", "f16"), ("f32", "f32")])
def test_m8n8k4_is_four_products(layouts, types):
    """m8n8k4 with f16: four 8x8x4 products, each of eight lanes (section 9.7.14.5.1)."""
    op = lookup(opcode(f"m8n8k4.{layouts[0]}.{layouts[1]}.{types[0]}.f16.f16.{types[1]}"))
    rng = np.random.default_rng(3)
    a, b = (rng.normal(size=(1, 32, 4)).astype(np.float16) for _ in range(2))
    c = rng.normal(size=(1, 32, 8)).astype(np.dtype(types[1].replace("f", "float")))
    got = op.fn(a.view(np.uint32), b.view(np.uint32), c.view(np.uint32))
    got = got.view(np.float16 if types[0] == "f16" else np.float32).reshape(32, 8)
    left, right, old, new = (np.zeros(s) for s in ((4, 8, 4), (4, 4, 8), (4, 8, 8), (4, 8, 8)))
    for lane in range(32):
        part, within, high = lane % 16 // 4, lane % 4, 4 * (lane >= 16)
        for i in range(4):
            row, col = (within + high, i) if layouts[0] == "row" else (i + high, within)
            left[part, row, col] = a[0, lane, i]
            row, col = (within, i + high) if layouts[1] == "row" else (i, within + high)
            right[part, row, col] = b[0, lane, i]
        for i in range(8):
            places = {
                "f16": (within + high, i),
                "f32": ((lane & 1) + (i & 2) + high, (i & 4) + (lane & 2) + (i & 1)),
            }
            old[part][places[types[1]]] = c[0, lane, i]
            new[part][places[types[0]]] = got[lane, i]
    dtype = got.dtype
    assert (new == (left @ right + old).astype(dtype)).all()


def test_overflow_and_saturation_of_integers():
    """.satfinite clamps, without it the sum wraps."""
    a = np.full((1, 32, 4), 0x7F7F7F7F, dtype=np.uint32)
    b = np.full((1, 32, 2), 0x7F7F7F7F, dtype=np.uint32)
    c = np.full((1, 32, 4), 0x7FFFFFFF, dtype=np.uint32)
    wrap = lookup(opcode("m16n8k32.row.col.s32.s8.s8.s32")).fn(a, b, c)
    clamp = lookup(opcode("m16n8k32.row.col.satfinite.s32.s8.s8.s32")).fn(a, b, c)
    assert (wrap == (0x7FFFFFFF + 32 * 127 * 127) % 2**32).all()
    assert (clamp == 0x7FFFFFFF).all()


def test_other_opcodes_are_none():
    assert lookup("add.f32") is None
    assert lookup("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16") is None


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ("m16n8k16.row.col.f32.f16.f16.f32.relu", "modifier .relu does not exist"),
        ("m16n8k8.row.f32.f16.f16.f32", "needs one shape, two layouts and the four types"),
        ("m16n8k32.row.col.f32.f16.f16.f32", "shape .m16n8k32 does not exist for .f16"),
        ("m16n8k16.col.col.f32.f16.f16.f32", "layouts .col.col"),
        ("m16n8k16.row.col.f16.f16.f16.f32", "must be the same"),
        ("m16n8k16.row.col.f32.f16.bf16.f32", "do not go together"),
        ("m16n8k16.row.col.satfinite.f32.f16.f16.f32", ".satfinite is for"),
        ("m16n8k128.row.col.s32.b1.b1.s32", ".xor.popc or .and.popc"),
        ("m16n8k32.row.col.kind::mxf8f6f4.f32.e4m3.e4m3.f32", ".block_scale, .scale_vec"),
        ("kind::i8.m16n8k32.row.col.f32.e4m3.e4m3.f32", ".kind::i8 does not exist"),
        (SCALED[-1][0].replace("4X", "8X"), ".scale_vec::8X does not exist"),
        (SCALED[-1][0].replace("4X", "2X"), "scale type .ue4m3 has no .scale_vec::2X"),
        (SCALED[-2][0].replace(".scale_vec::4X", ""), "needs .scale_vec::2X or .scale_vec::4X"),
    ],
)
def test_malformed_opcodes_name_what_is_wrong(tail, message):
    with pytest.raises(PtxError, match=re.escape(message)):
        lookup(opcode(tail))


def test_sparse_opcodes_say_so():
    with pytest.raises(PtxError, match="sparse matrices are not modelled"):
        lookup("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32")


@pytest.mark.parametrize("fmt", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "ue8m0", "ue4m3", "bf16"])
def test_formats_by_definition(fmt):
    """Every code decodes to the value that the format's definition gives, and back."""
    table = formats.table(fmt)
    want = [manual.value(fmt, code) for code in range(len(table))]
    assert np.array_equal(table, want, equal_nan=True)
    keep = np.isfinite(table) & ~((fmt == "ue4m3") & (np.arange(len(table)) > 127))
    assert (formats.encode(fmt, table[keep]) == np.flatnonzero(keep)).all()
    order = np.unique(table[np.isfinite(table)])
    middle = (order[1:] + order[:-1]) / 2
    codes = formats.encode(fmt, middle).astype(int)
    assert (codes % 2 == 0).all()  # ties go to the even code
    assert (np.abs(formats.table(fmt)[codes] - middle) == np.diff(order) / 2).all()
