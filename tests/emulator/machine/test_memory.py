"""ld and st: sizes, vectors, state spaces, qualifiers; variables and their initial values."""

from __future__ import annotations

import numpy as np
import pytest

from blockscale import emulator
from tests.emulator import kit
from tests.emulator.kit import SEEDS

THREADS = 70  # three warps, the last one not full


def data(seed, count=THREADS * 8):
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


LOADS = [
    "ld.global", "ld", "ld.weak.global", "ld.volatile.global", "ld.relaxed.gpu.global",
    "ld.acquire.cta.global", "ld.acquire.sys.global", "ld.mmio.relaxed.sys.global", "ld.global.nc",
    "ld.global.ca", "ld.global.cg", "ld.global.cs", "ld.global.lu", "ld.global.cv", "ldu.global",
    "ld.global.L1::no_allocate", "ld.global.nc.L1::no_allocate.L2::256B", "ld.global.L2::128B",
    "ld.global.L1::evict_last", "ld.relaxed.cluster.global.L1::evict_first",
]  # fmt: skip
STORES = [
    "st.global", "st", "st.weak.global", "st.volatile.global", "st.relaxed.gpu.global",
    "st.release.cluster.global", "st.mmio.relaxed.sys.global", "st.global.wb", "st.global.cg",
    "st.global.cs", "st.global.wt", "st.global.L1::no_allocate", "st.global.L1::evict_last",
]  # fmt: skip


@pytest.mark.parametrize("load", LOADS)
def test_loads_of_every_spelling(load):
    x = data(1)
    got = kit.values(
        f"mad.wide.u32 %d0, %t, 4, %a0; {load}.b32 %r0, [%d0+8]; st.global.b32 [%o], %r0;",
        x, block=THREADS, count=THREADS,
    )  # fmt: skip
    assert (got == x[2 : THREADS + 2]).all()


@pytest.mark.parametrize("store", STORES)
def test_stores_of_every_spelling(store):
    got = kit.values(f"{store}.b32 [%o], %t;", block=THREADS, count=THREADS)
    assert (got == np.arange(THREADS)).all()


def test_cache_policies_are_accepted():
    x = data(2)
    body = """
        createpolicy.fractional.L2::evict_last.b64 %d5, 1.0;
        mad.wide.u32 %d0, %t, 4, %a0;
        ld.global.L2::cache_hint.b32 %r0, [%d0], %d5;
        prefetch.global.L2 [%d0];
        st.global.L2::cache_hint.b32 [%o], %r0, %d5;
    """
    assert (kit.values(body, x) == x[:32]).all()


@pytest.mark.parametrize("kind", ["b8", "u8", "s8", "b16", "u16", "s16"])
@pytest.mark.parametrize("reg", [16, 32, 64])
@pytest.mark.parametrize("seed", SEEDS)
def test_narrow_values_widen_by_their_type(kind, reg, seed):
    """PTX ISA 9.7.9.8: .s types are sign-extended to the register, .u and .b zero-extended."""
    size = int(kind[1:])
    x = data(seed).view(f"{'i' if kind[0] == 's' else 'u'}{size // 8}")[:THREADS]
    name = {16: "%b0", 32: "%r0", 64: "%d1"}[reg]
    wide = {16: "cvt.u64.u16 %d1, %b0;", 32: "cvt.u64.u32 %d1, %r0;", 64: ""}[reg]
    body = f"""
        mad.wide.u32 %d0, %t, {size // 8}, %a0;
        ld.global.{kind} {name}, [%d0];
        {wide} st.global.b64 [%o8], %d1;
    """
    got = kit.values(body, x, block=THREADS, count=THREADS, dtype=np.uint64, seed=seed)
    assert (got == x.astype(np.int64).view(np.uint64) & np.uint64((1 << reg) - 1)).all()


@pytest.mark.parametrize("reg", ["%b0", "%r0", "%d1"])
def test_narrow_stores_take_the_low_bits(reg):
    x = data(3)[:32]
    body = f"""
        mad.wide.u32 %d0, %t, 4, %a0; ld.global.b32 %r0, [%d0];
        cvt.u16.u32 %b0, %r0; cvt.u64.u32 %d1, %r0;
        sub.u64 %d2, %o, 0; mul.wide.u32 %d3, %t, 3; sub.u64 %d2, %d2, %d3;
        st.global.u8 [%d2], {reg};
    """
    out = np.zeros(32, np.uint8)
    kit.run(body, x, out)
    assert (out == x.astype(np.uint8)).all()


VECTORS = [
    (kind, n) for kind in ("b8", "b16", "b32", "b64") for n in (2, 4, 8)
    if not (n == 8 and kind != "b32")
]  # fmt: skip


@pytest.mark.parametrize(("kind", "n"), VECTORS)
@pytest.mark.parametrize("space", ["global", "shared", "local", ""])
@pytest.mark.parametrize("seed", [0, 3])
def test_vectors(kind, n, space, seed):
    """Vectors go through every space and come back reversed; lanes that are masked keep theirs."""
    size = int(kind[1:]) // 8
    if size * n == 32 and space != "global":
        with pytest.raises(emulator.PtxError, match="and 16 elsewhere are the most"):
            kit.run(f"ld{'.' if space else ''}{space}.v{n}.{kind} %r0, [%a0];", data(0))
        return
    reg = {1: "%b", 2: "%b", 4: "%r", 8: "%d"}[size]
    first = 10
    down = ", ".join(f"{reg}{first + i}" for i in range(n))
    up = ", ".join(f"{reg}{first + i}" for i in reversed(range(n)))
    bytes_ = size * n
    module = ".shared .align 32 .b8 buffer[4096];" if space in ("shared", "") else ""
    place = f"mov.u64 %d2, buffer; mad.wide.u32 %d2, %x, {bytes_}, %d2;"
    if space == "":
        place += "cvta.shared.u64 %d2, %d2;"
    if space == "local":
        place = ".local .align 32 .b8 mine[64]; mov.u64 %d2, mine;"
    if space == "global":
        place = f"mad.wide.u32 %d2, %t, {bytes_}, %a1;"
    dot = f".{space}" if space else ""
    body = f"""
        and.b32 %r1, %x, 3; setp.ne.u32 %p0, %r1, 2;
        mad.wide.u32 %d0, %t, {bytes_}, %a0;
        mad.wide.u32 %d1, %t, {bytes_}, %a1;
        {place}
        @%p0 ld.global.v{n}.{kind} {{{down}}}, [%d0];
        @%p0 st{dot}.v{n}.{kind} [%d2], {{{up}}};
        @%p0 ld{dot}.v{n}.{kind} {{{down}}}, [%d2];
        @%p0 st.global.v{n}.{kind} [%d1], {{{down}}};
    """
    x = data(seed).view(f"u{size}")[: 64 * n].copy()
    out = np.full(64 * n, 7, f"u{size}")
    report = kit.run(body, x, out, block=64, seed=seed, module=module)
    assert not report.hazards
    want = x.reshape(64, n)[:, ::-1].copy()
    want[np.arange(64) % 4 == 2] = 7
    assert (out.reshape(64, n) == want).all()


@pytest.mark.parametrize(("kind", "n"), [("f32", 4), ("s32", 2), ("b128", 1), ("u64", 4)])
def test_wide_items(kind, n):
    """32-byte loads (v4.u64), 128-bit registers, a sink among the destinations."""
    x = data(4)
    if kind == "b128":
        body = """mad.wide.u32 %d0, %t, 16, %a0; mad.wide.u32 %d1, %t, 16, %a1;
            ld.global.b128 %q0, [%d0]; mov.b128 %q1, %q0; mov.b128 {%d3, %d4}, %q1;
            mov.b128 %q2, {%d4, %d3}; st.global.b128 [%d1], %q2;"""
        out = np.zeros(128, np.uint32)
        kit.run(body, x, out)
        assert (out.reshape(32, 2, 2) == x[:128].reshape(32, 2, 2)[:, ::-1]).all()
        return
    reg = "%d" if kind == "u64" else "%r"
    size = 8 if kind == "u64" else 4
    names = [f"{reg}{10 + i}" for i in range(n)]
    body = f"""mad.wide.u32 %d0, %t, {size * n}, %a0; mov.b32 %r11, 0; mov.b64 %d11, 0;
        ld.global.v{n}.{kind} {{{", ".join(["_", *names[1:]])}}}, [%d0];
        mad.wide.u32 %d1, %t, {size}, %a1; st.global.{kind} [%d1], {names[-1]};"""
    out = np.zeros(32, f"u{size}")
    kit.run(body, x, out)
    assert (out == x.view(f"u{size}")[: 32 * n].reshape(32, n)[:, -1]).all()


def test_offsets_wrap_and_may_be_negative():
    x = data(5)
    body = """
        mad.wide.u32 %d0, %t, 4, %a0; add.u64 %d0, %d0, 64;
        ld.global.b32 %r0, [%d0+-64]; ld.global.b32 %r1, [%d0+-60];
        mov.u64 %d2, sh; cvt.u32.u64 %r5, %d2; mad.lo.u32 %r5, %x, 4, %r5; add.u32 %r5, %r5, 16;
        st.shared.b32 [%r5+-16], %r0; ld.shared.b32 %r2, [%r5+-16]; add.u32 %r1, %r1, %r2;
        st.global.b32 [%o], %r1;
    """
    got = kit.values(body, x, module=".shared .align 4 .b32 sh[40];")
    assert (got == x[:32] + x[1:33]).all()


MODULE = """
.global .align 8 .b32 table[4] = {1, 2, 3, 4};
.const .align 4 .f32 weights[3] = {0f3F800000, 0f40000000, 2.5};
.global .align 1 .b8 text[6] = {104, 101, 108, 108, 111, 0};
.const .align 8 .u64 where[2] = {generic(table), generic(table)+8};
.global .align 4 .b32 counter;
.global .align 2 .s16 deep[2][2] = {{-1, 2}, {-3}};
.const .b32 constant = 77;
"""


def test_module_variables_and_their_initial_values():
    body = """
        ld.const.u64 %d1, [where+8]; ld.b32 %r1, [%d1+4];
        st.global.b32 [%a0], %r1;
        ld.const.f32 %r2, [weights+8]; st.global.b32 [%a0+4], %r2;
        ld.global.u8 %r3, [text+4]; st.global.b32 [%a0+8], %r3;
        ld.global.b32 %r4, [counter]; st.global.b32 [%a0+12], %r4;
        ld.global.s16 %r5, [deep+4]; st.global.b32 [%a0+16], %r5;
        ld.global.s16 %r5, [deep+6]; st.global.b32 [%a0+20], %r5;
        mov.u64 %d2, constant; ld.const.b32 %r6, [%d2]; st.global.b32 [%a0+24], %r6;
        ld.global.b32 %r7, [table+12]; st.global.b32 [%a0+28], %r7;
    """
    out = kit.words(8)
    kit.run(body, out, block=1, module=MODULE)
    want = [4, np.float32(2.5).view("u4"), ord("o"), 0, 0xFFFFFFFD, 0, 77, 4]
    assert out.tolist() == want


@pytest.mark.parametrize("seed", SEEDS)
def test_local_memory_is_per_thread(seed):
    body = """
        .local .align 8 .b8 stack[64];
        mov.u64 %d0, stack; cvta.local.u64 %d1, %d0;
        mov.u32 %r0, 0;
    FILL:
        mad.wide.u32 %d2, %r0, 4, %d0; mad.lo.u32 %r1, %t, 100, %r0; st.local.b32 [%d2], %r1;
        add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, 16; @%p0 bra FILL;
        and.b32 %r2, %t, 15; mad.wide.u32 %d3, %r2, 4, %d1;
        ld.u32 %r3, [%d3]; st.global.b32 [%o], %r3;
    """
    got = kit.values(body, block=96, grid=2, count=192, seed=seed)
    t = np.arange(192)
    assert (got == t * 100 + t % 16).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_generic_addresses_of_different_windows_in_one_instruction(seed):
    """Lanes of one warp read global, shared and local memory with one ld."""
    body = """
        .local .align 4 .b32 own;
        add.u32 %r0, %t, 1000; st.local.b32 [own], %r0;
        mov.u64 %d0, sh; mad.wide.u32 %d0, %x, 4, %d0; add.u32 %r1, %t, 2000;
        st.shared.b32 [%d0], %r1;
        cvta.shared.u64 %d0, %d0;
        mov.u64 %d1, own; cvta.local.u64 %d1, %d1;
        mad.wide.u32 %d2, %t, 4, %a0; cvta.global.u64 %d2, %d2;
        rem.u32 %r2, %t, 3;
        setp.eq.u32 %p0, %r2, 0; setp.eq.u32 %p1, %r2, 1;
        selp.b64 %d3, %d0, %d1, %p0; selp.b64 %d3, %d2, %d3, %p1;
        ld.u32 %r3, [%d3]; add.u32 %r3, %r3, 1; st.u32 [%d3], %r3; ld.u32 %r4, [%d3];
        st.global.b32 [%o], %r4;
    """
    x = np.arange(64, dtype=np.uint32)
    got = kit.values(body, x, block=64, count=64, seed=seed, module=".shared .align 4 .b32 sh[64];")
    t = np.arange(64)
    assert (got == np.choose(t % 3, [t + 2001, t + 1, t + 1001])).all()
    assert (x == np.where(t % 3 == 1, t + 1, t)).all()


def test_the_windows_know_each_other():
    body = """
        .local .b32 own; .shared .b32 sh;
        mov.u64 %d0, sh; cvta.shared.u64 %d1, %d0; mov.u64 %d2, own; cvta.local.u64 %d2, %d2;
        isspacep.shared %p0, %d1; isspacep.global %p1, %d1; isspacep.local %p2, %d2;
        isspacep.shared::cta %p3, %d1; isspacep.shared::cluster %p4, %d1; isspacep.global %p5, %a0;
        isspacep.local %p6, %a0;
        cvta.to.shared.u64 %d4, %d1; setp.eq.u64 %p8, %d4, %d0;
        mov.u32 %r0, 0;
        @%p0 or.b32 %r0, %r0, 1; @%p1 or.b32 %r0, %r0, 2; @%p2 or.b32 %r0, %r0, 4;
        @%p3 or.b32 %r0, %r0, 8; @%p4 or.b32 %r0, %r0, 16; @%p5 or.b32 %r0, %r0, 32;
        @%p6 or.b32 %r0, %r0, 64; @%p8 or.b32 %r0, %r0, 256;
        mov.u64 %d5, c0; cvta.const.u64 %d5, %d5; isspacep.const %p9, %d5; isspacep.const %p10, %a0;
        @%p9 or.b32 %r0, %r0, 512; @%p10 or.b32 %r0, %r0, 1024;
        st.global.b32 [%o], %r0;
    """
    got = kit.values(body, module=".const .b32 c0 = 1;")
    assert (got == 1 + 4 + 8 + 16 + 32 + 256 + 512).all()
