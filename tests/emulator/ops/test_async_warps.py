"""ldmatrix, stmatrix, movmatrix, mma.sync and wgmma through the machine."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import kit
from tests.emulator.kit.async_ptx import LEADER, SYNC, bulk, caught, init, refused, silent, wait

pytestmark = pytest.mark.usefixtures("seeds")

RNG = np.random.default_rng(13)

# warp matrices --------------------------------------------------------------------------------
TILE = """
    .shared .align 128 .b8 buf[2048];
    mov.u32 %r0, buf;
    and.b32 %r1, %x, 31;
    shl.b32 %r1, %r1, 4;
    shr.u32 %r2, %x, 5;
    shl.b32 %r2, %r2, 10;
    add.u32 %r0, %r0, %r2;
    add.u32 %r2, %r0, %r1;
    mad.wide.u32 %d0, %t, 16, %a0;
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d0];
    st.shared.v4.b32 [%r2], {%r4, %r5, %r6, %r7};
    bar.warp.sync 0xffffffff;
"""
OUT = "mad.wide.u32 %d1, %t, 16, %a1; st.global.v4.b32 [%d1], {%r10, %r11, %r12, %r13};"


def matrices():
    """Four 8 x 8 matrices of 16-bit items for each of two warps."""
    return RNG.integers(0, 2**16, (2, 4, 8, 8)).astype(np.uint16)


def fragments(x):
    """Return registers [warps, lanes, matrices]: lane l holds row l / 4, items 2 (l % 4), + 1."""
    pairs = np.ascontiguousarray(x).view(np.uint32)  # [2, 4, 8, 4]
    return pairs.transpose(0, 2, 3, 1).reshape(2, 32, 4)


def both(x):
    return lambda: (x.copy(), kit.words(256))


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix(trans):
    x = matrices()
    body = (
        TILE + f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r2];"
    )
    want = fragments(x.transpose(0, 1, 3, 2) if trans else x)

    def judge(_, y):
        assert (y.reshape(2, 32, 4) == want).all()

    silent(body + OUT, both(x), judge, block=64, seeds=range(6))
    refused("misaligned", body.replace("}, [%r2];", "}, [%r2 + 8];") + OUT, both(x), block=64)
    odd = body.replace("ldmatrix", "setp.lt.u32 %p3, %x, 16; @%p3 ldmatrix")
    refused("16 of the warp's 32 threads", odd + OUT, both(x), block=64)


def test_ldmatrix_looks_at_no_padding():
    """Of 16 codes of 4 bits the 8 bytes behind them: nobody needs to have written these."""
    load = "ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b4x16_p64 {%r10, %r11, %r12, %r13}, [%r2];"
    half = TILE.replace("st.shared.v4.b32 [%r2], {%r4, %r5, %r6, %r7}", "st.shared.b64 [%r2], %d2")
    half = half.replace("bar.warp", "bar.warp", 1).replace(
        "st.shared.b64", "mov.b64 %d2, {%r4, %r5}; st.shared.b64"
    )
    x = matrices()
    codes = x.view(np.uint8).reshape(2, 4, 8, 16)[..., :8]
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(2, 32, 4, 4)

    def judge(_, y):
        got = y.view(np.uint8).reshape(2, 32, 4, 4)
        assert (got.transpose(0, 2, 1, 3).reshape(2, 32, 4, 4) == nibbles).all()

    silent(half + load + OUT, both(x), judge, block=64, seeds=range(2))
    late = half.replace("st.shared.b64 [%r2], %d2", "st.shared.b32 [%r2 + 8], %r4")
    found = kit.run(late + load + OUT, *both(x)(), block=64)
    assert {h.kind for h in found.hazards} == {"uninitialised read"}


def test_stmatrix_and_movmatrix():
    x = matrices()
    body = (
        TILE
        + """ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r2];
    movmatrix.sync.aligned.m8n8.trans.b16 %r10, %r10; bar.warp.sync 0xffffffff;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {%r11, %r12, %r13, %r10};
    bar.warp.sync 0xffffffff; ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r2];"""
    )
    want = np.stack([x[:, 1], x[:, 2], x[:, 3], x[:, 0].transpose(0, 2, 1)], 1)

    def judge(_, y):
        assert (y.view(np.uint16).reshape(2, 4, 8, 8) == want).all()

    silent(body + OUT, both(x), judge, block=64, seeds=range(6))


def test_mma_sync_of_one_of_two_warps():
    """Warp 1 goes another way: its registers are garbage and matter to nobody."""
    a, b = (RNG.integers(-4, 5, shape).astype(np.float16) for shape in ((16, 16), (8, 16)))
    tiles = np.stack([a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:]])
    other = np.concatenate([b[:, :8][None], b[:, 8:][None], np.zeros((2, 8, 8), np.float16)])
    both_tiles = np.stack([tiles, other]).astype(np.float16)
    make = lambda: (both_tiles.copy(), kit.words(128, np.nan, np.float32))  # noqa: E731
    body = (
        TILE
        + """bar.sync 0; setp.ge.u32 %p1, %x, 32; @%p1 bra OUT;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r2];
    add.u32 %r3, %r2, 1024;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r3]; mov.u32 %r24, 0;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r30, %r31, %r32, %r33},
        {%r10, %r11, %r12, %r13}, {%r20, %r21}, {%r24, %r24, %r24, %r24};
    mad.wide.u32 %d1, %t, 16, %a1; st.global.v4.b32 [%d1], {%r30, %r31, %r32, %r33}; OUT:"""
    )
    want = a.astype(np.float64) @ b.astype(np.float64).T

    def judge(_, y):
        got = y.reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
        assert (got == want).all()

    silent(body, make, judge, block=64, seeds=range(10))


# wgmma ----------------------------------------------------------------------------------------
D = [f"%s{i}" for i in range(4)]
A_BYTES, B_BYTES = 64 * 32, 8 * 32


def image(x):
    """Return [rows, 16] halves as 8 x 16 byte tiles, all rows of a 16-byte column first."""
    return np.ascontiguousarray(x.reshape(len(x), 2, 8).transpose(1, 0, 2))


def operand(reg, base, rows):
    word = (rows * 16 >> 4) << 16 | (128 >> 4) << 32
    return f"""shr.u32 %r60, {base}, 4; and.b32 %r60, %r60, 0x3fff; cvt.u64.u32 {reg}, %r60;
    or.b64 {reg}, {reg}, {word};"""


WGMMA = (
    """.shared .align 128 .b8 buf[4096]; .shared .align 8 .b64 bar; .reg .b32 %s<4>;
    mov.u32 %r0, buf; mov.u32 %r9, bar;"""
    + init("%r9", 2) + bulk("%r0", "%a0", A_BYTES, "%r9") + f"add.u32 %r1, %r0, {A_BYTES};"
    + bulk("%r1", "%a1", B_BYTES, "%r9") + operand("%d20", "%r0", 64) + operand("%d21", "%r1", 8)
    + wait("%r9")
    + """mov.u32 %s0, 0; mov.u32 %s1, 0; mov.u32 %s2, 0; mov.u32 %s3, 0; setp.eq.u32 %p1, %x, %x;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%s0, %s1, %s2, %s3},
        %d20, %d21, %p1, 1, 1, 0, 0;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%s0, %s1, %s2, %s3},
        %d20, %d21, %p1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    mad.wide.u32 %d1, %t, 16, %a2; st.global.v4.b32 [%d1], {%s0, %s1, %s2, %s3};"""
)  # fmt: skip
HA, HB = (RNG.integers(-4, 5, (rows, 16)).astype(np.float16) for rows in (64, 8))


def wgmma_args():
    return image(HA), image(HB), np.full(512, np.nan, np.float32)


def test_wgmma():
    """Two products into the same registers, then one wait."""
    want = 2 * (HA.astype(np.float64) @ HB.astype(np.float64).T)

    def judge(a, b, y):  # warp, lane / 4, lane % 4, row half, column
        got = y.reshape(4, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(64, 8)
        assert (got == want).all()

    options = {"block": 128, "target": "sm_90a"}
    silent(WGMMA, wgmma_args, judge, **options)
    waits = "wgmma.wait_group.sync.aligned 0;"
    after = f"{waits} {SYNC} {LEADER} @%p0 st.shared.b32 [%r0], %x;"  # nobody reads it any more
    silent(WGMMA.replace(waits, after), wgmma_args, judge, seeds=range(5), **options)
    caught("wait_group", WGMMA.replace(waits, ""), wgmma_args, **options)
    over = WGMMA.replace(waits, "st.shared.b32 [%r0], %x;" + waits)
    caught("unwaited tensor work", over, wgmma_args, **options)
    caught("unwaited bulk copy", WGMMA.replace(wait_of(WGMMA), ""), wgmma_args, **options)
    part = WGMMA.replace(
        "wgmma.fence", f"setp.lt.u32 %p2, %x, 64; {SYNC} @!%p2 bra OUT; wgmma.fence"
    )
    refused("deadlock|warpgroup|four warps", part + "OUT:", wgmma_args, **options)


def wait_of(body):
    """Return the first wait loop."""
    start = body.index("W", body.index("[%a1]"))
    return body[start : body.index(";", body.index("bra W", start)) + 1]
