"""tcgen05.mma, .cp, .commit through real PTX: operands from everywhere, and what may go wrong."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.emulator import kit
from tests.emulator.kit.async_ptx import (
    CLUSTER_SYNC,
    FENCE,
    LEADER,
    SYNC,
    bulk,
    caught,
    init,
    lines,
    refused,
    silent,
    wait,
)
from tests.emulator.ops.test_async_tmem import HEAD, WAIT_LD, WAIT_ST, alloc, free

pytestmark = pytest.mark.usefixtures("seeds")

RNG = np.random.default_rng(5)
M, N, K = 128, 16, 16
KB = 2 * K  # bytes of a row
A_BYTES, B_BYTES = M * KB, N * KB
NO_SWIZZLE = 1 << 46  # the constant of the descriptor


def image(x):
    """Return [rows, 16] halves as 8 x 16 byte tiles: all rows of a 16-byte column first."""
    return np.ascontiguousarray(x.reshape(len(x), 2, 8).transpose(1, 0, 2))


def descriptor(rows):
    """Return the operand descriptor without its address: LBO = rows * 16, SBO = 128 bytes."""
    return NO_SWIZZLE | (rows * 16 >> 4) << 16 | (128 >> 4) << 32


def idesc(m=M, n=N):
    """Return the instruction descriptor: f16 x f16 -> f32, both K-major."""
    return 1 << 4 | (n >> 3) << 17 | (m >> 4) << 24


def operand(reg, base, rows):
    """Make %d<reg> the descriptor of the tile at shared address `base`."""
    return f"""shr.u32 %r60, {base}, 4; and.b32 %r60, %r60, 0x3fff; cvt.u64.u32 {reg}, %r60;
    or.b64 {reg}, {reg}, {descriptor(rows)};"""


LOAD = init("%r9", 2) + "mov.u32 %r61, %r0;" + bulk("%r0", "%a0", A_BYTES, "%r9") + f"""
    add.u32 %r1, %r0, {A_BYTES};""" + bulk("%r1", "%a1", B_BYTES, "%r9")  # fmt: skip
FULL = wait("%r9")
MMA = f"""{LEADER} mov.u32 %r62, {idesc()}; setp.ne.u32 %p4, %x, %x;
    @%p0 tcgen05.mma.cta_group::1.kind::f16 [%r41], %d20, %d21, %r62, %p4;"""
COMMIT = "@%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r8];"
BEFORE = "tcgen05.fence::before_thread_sync;"
AFTER = "tcgen05.fence::after_thread_sync;"
DONE = wait("%r8") + AFTER
TOLD = f"{WAIT_ST} {BEFORE} {SYNC} {AFTER}"
REGS = ", ".join(f"%s{i}" for i in range(16))
SHOW = f"""tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{REGS}}}, [%r41]; {WAIT_LD}
    mad.wide.u32 %d1, %t, 64, %a2;""" + "".join(
    f"st.global.b32 [%d1 + {4 * i}], %s{i};" for i in range(16)
)
START = (
    HEAD + ".reg .b32 %s<16>;" + init("%r8").replace("%r8", "%r8") + alloc(32)
    + operand("%d20", "%r0", M) + f"add.u32 %r59, %r0, {A_BYTES};" + operand("%d21", "%r59", N)
)  # fmt: skip
GEMM = START + LOAD + FULL + MMA + COMMIT + DONE + SHOW + free(32)


def halves(rows):
    return RNG.integers(-8, 9, (rows, K)).astype(np.float16)


A, B = halves(M), halves(N)
WANT = A.astype(np.float64) @ B.astype(np.float64).T


def args():
    return image(A), image(B), np.full((M, N), np.nan, np.float32)


def right(a, b, c):
    assert (c == WANT).all()


def without(body, part, by=""):
    """Return `body` with one part replaced."""
    assert part in body
    return body.replace(part, by, 1)


check = functools.partial(silent, block=128)
caught = functools.partial(caught, block=128)
refused = functools.partial(refused, block=128)


def test_product_and_its_report():
    report = check(GEMM, args, right)
    assert report.engines["bulk"] == {"operations": 2, "bytes": A_BYTES + B_BYTES}
    assert report.engines["tensor core"] == {"operations": 1, "bytes": A_BYTES + B_BYTES}
    assert report.engines["tcgen05.ld"] == {"operations": 4, "bytes": M * N * 4}
    assert report.bytes["tmem"] == {"read": M * N * 4, "written": 0}
    assert report.bytes["global"]["written"] == M * N * 4
    assert report.tmem_columns_high_water == 32
    assert (
        report.instructions["tcgen05.mma.cta_group::1.kind::f16"] == 4
    )  # each warp, most of them predicated off


@pytest.mark.parametrize(
    ("pattern", "part", "by"),
    [
        ("unwaited bulk copy", FULL, ""),
        ("unwaited tensor work", DONE, ""),
        ("(?i)deadlock", COMMIT, ""),
        ("unwaited bulk copy", FULL + MMA, MMA + FULL),
        ("unwaited tensor work", COMMIT, f"{LEADER} @%p0 mbarrier.arrive.shared.b64 _, [%r8];"),
        ("unwaited tensor work", DONE, "st.shared.b32 [%r0], %x;" + DONE),
        ("tmem not freed", free(32), ""),
        ("tx", f"_, [%r9], {B_BYTES}", f"_, [%r9], {B_BYTES - 16}"),
    ],
)  # fmt: skip
def test_broken(pattern, part, by):
    caught(pattern, without(GEMM, part, by), args)


GENERIC = START + f"""
    mad.lo.u32 %r20, %x, 16, %r0; mad.wide.u32 %d2, %x, 16, %a0; setp.lt.u32 %p5, %x, 32;
    ld.global.v4.b32 {{%r24, %r25, %r26, %r27}}, [%d2];
    st.shared.v4.b32 [%r20], {{%r24, %r25, %r26, %r27}};
    ld.global.v4.b32 {{%r24, %r25, %r26, %r27}}, [%d2 + 2048];
    st.shared.v4.b32 [%r20 + 2048], {{%r24, %r25, %r26, %r27}};
    mad.wide.u32 %d3, %x, 16, %a1; @%p5 ld.global.v4.b32 {{%r24, %r25, %r26, %r27}}, [%d3];
    @%p5 st.shared.v4.b32 [%r20 + {A_BYTES}], {{%r24, %r25, %r26, %r27}};
    {FENCE} {SYNC}""" + MMA + COMMIT + DONE + SHOW + free(32)  # fmt: skip


def test_operands_by_ordinary_stores():
    check(GENERIC, args, right)
    caught("missing proxy fence", without(GENERIC, FENCE), args)
    caught("race|unwaited", without(GENERIC, FENCE + " " + SYNC, FENCE), args)
    late = without(GENERIC, f"{FENCE} {SYNC}", f"{SYNC} {LEADER} @%p0 {FENCE}")
    kit_ok = without(late, f"@%p0 {FENCE}", FENCE)
    check(kit_ok, args, right, seeds=range(3))  # everybody fences after the barrier: also right


def by_cp_async():
    """Return `GENERIC` with cp.async in place of loads and stores."""
    body = GENERIC
    for register, base, guard in (
        ("%d2", "", ""),
        ("%d2 + 2048", " + 2048", ""),
        ("%d3", f" + {A_BYTES}", "@%p5 "),
    ):
        values = "{%r24, %r25, %r26, %r27}"
        body = without(body, f"{guard}ld.global.v4.b32 {values}, [{register}];")
        body = without(
            body,
            f"{guard}st.shared.v4.b32 [%r20{base}], {values};",
            f"{guard}cp.async.cg.shared.global [%r20{base}], [{register}], 16;",
        )
    return body


def test_operands_by_cp_async():
    """cp.async writes through the generic proxy: the MMA needs the fence."""
    body = without(by_cp_async(), FENCE, "cp.async.wait_all; " + FENCE)
    check(body, args, right)
    outs = caught("missing proxy fence", without(body, FENCE), args)
    assert all((c == WANT).all() for _, _, c in outs)
    assert not kit.run(without(body, FENCE), *args(), block=128).ok
    caught("unwaited cp.async", without(body, "cp.async.wait_all;"), args)


@pytest.mark.parametrize("fence", [FENCE, ""], ids=["fence", "no fence"])
def test_operands_that_an_mbarrier_tells_of(fence):
    """cp.async.mbarrier.arrive: who has waited still needs the fence."""
    told = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r8];" + wait("%r8")
    body = without(by_cp_async(), f"{FENCE} {SYNC}", f"{told} {fence} {SYNC}")
    body = body.replace(COMMIT + DONE, COMMIT.replace("%r8", "%r9") + wait("%r9") + AFTER)
    body = without(body, init("%r8"), init("%r8", 128) + init("%r9"))
    if fence:
        check(body, args, right)
    else:
        caught("missing proxy fence", body, args)


def test_accumulate_and_disabled_lanes():
    """A second MMA adds; lanes whose bit is set keep what they had."""
    off = "mov.u32 %r32, 0; mov.u32 %r33, 0xf; mov.u32 %r34, 0; mov.u32 %r35, 0x80000000;"
    second = MMA.replace("%r62, %p4", "%r62, {%r32, %r33, %r34, %r35}, %p6")
    body = without(GEMM, MMA, MMA + off + "setp.eq.u32 %p6, %x, %x;" + second)
    want = 2 * WANT
    want[32:36] /= 2
    want[127] /= 2

    def judge(a, b, c):
        assert (c == want).all()

    check(body, args, judge, seeds=range(5))
    short = body.replace("{%r32, %r33, %r34, %r35}", "{%r32, %r33}")
    refused("disable-output-lane has 2 words", short, args)


def test_scaled_accumulator():
    """scale-input-d 2: D * 2^-2 + A B."""
    second = MMA.replace("%r62, %p4", "%r62, %p6, 2")
    body = without(GEMM, MMA, MMA + "setp.eq.u32 %p6, %x, %x;" + second)

    def judge(a, b, c):
        assert (c == WANT / 4 + WANT).all()

    check(body, args, judge, seeds=range(3))


A_REGS = ", ".join(f"%s{i}" for i in range(8))
TMEM_A = GEMM.replace("32;", "64;", 0).replace(
    MMA,
    """mad.wide.u32 %d2, %t, 32, %a3; add.u32 %r50, %r41, 16;"""
    + "".join(f"ld.global.b32 %s{i}, [%d2 + {4 * i}];" for i in range(8))
    + f"""tcgen05.st.sync.aligned.32x32b.x8.b32 [%r50], {{{A_REGS}}}; {TOLD}"""
    + MMA.replace("%d20", "[%r50]"),
)


def tmem_args():
    a, b, c = args()
    return a, b, c, A.copy()


def test_operand_a_in_tensor_memory():
    body = TMEM_A.replace("%t, 64, %a2", "%t, 64, %a2")

    def judge(a, b, c, plain):
        assert (c == WANT).all()

    check(body, tmem_args, judge, seeds=range(6))
    caught("unwaited tcgen05.st", body.replace(WAIT_ST, ""), tmem_args)
    caught("race|unwaited", without(body, f"{BEFORE} {SYNC}"), tmem_args)


@pytest.mark.parametrize(
    ("pattern", "part", "by"),
    [
        ("instruction descriptor", f"{idesc()};", f"{idesc(96)};"),
        ("N is 264", f"{idesc()};", f"{idesc(M, 264)};"),
        ("reaches from shared", f"%d20, {descriptor(M)};", f"%d20, {descriptor(M) | 0x3FFF};"),
        ("column .* has not allocated", "[%r41], %d20", "[%r63], %d20"),
        ("all tcgen05 instructions", "tcgen05.commit.cta_group::1", "tcgen05.commit.cta_group::2"),
        ("no mbarrier object", "b64 [%r8]", "b64 [%r0]"),
    ],
)  # fmt: skip
def test_rules(pattern, part, by):
    body = GEMM.replace("mov.u32 %r62", "add.u32 %r63, %r41, 480; mov.u32 %r62")
    error = refused(pattern, without(body, part, by), args)
    assert error.place.line is not None


@pytest.mark.parametrize(
    ("body", "part", "make"),
    [(GEMM, AFTER, args), (TMEM_A, BEFORE, tmem_args), (TMEM_A, AFTER, tmem_args)],
    ids=["mma before ld", "st before", "st after"],
)
def test_work_of_other_threads_needs_fences(body, part, make):
    """A warning, also where everything waits: what Triton makes has no such fences."""
    report = kit.run(lines(without(body, part)), *make(), block=128)
    assert {(h.kind, h.severity) for h in report.hazards} == {("missing tcgen05 fence", "warning")}
    first = report.hazards[0]
    assert "tcgen05.fence::after_thread_sync behind the wait" in first.message
    assert ("before_thread_sync" in first.message) == (body is TMEM_A)


# a pair of CTAs -------------------------------------------------------------------------------
N2 = 32
PAIR_ARGS = """mov.u32 %r30, %cluster_ctarank; setp.eq.and.u32 %p7, %r30, 0, %p0;"""
PAIR_LOAD = LOAD.replace("%a0", "%d30").replace("%a1", "%d31")
MMA2 = MMA.replace("group::1", "group::2").replace(str(idesc()), str(idesc(256, N2)))
MMA2 = MMA2.replace("@%p0", "@%p7")
PAIR = (
    START.replace("alloc.cta_group::1", "alloc.cta_group::2").replace("%s<16>;", "%s<32>;")
    + LEADER + PAIR_ARGS
    + f"mad.wide.u32 %d30, %r30, {A_BYTES}, %a0; mad.wide.u32 %d31, %r30, {B_BYTES}, %a1;"
    + CLUSTER_SYNC + PAIR_LOAD + FULL + CLUSTER_SYNC
    + MMA2
    + "mov.b16 %b0, 3; @%p7 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
    + ".multicast::cluster.b64 [%r8], %b0;"
    + DONE
    + "".join(
        f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%s{i}}}, [%r41 + {i}];" for i in range(N2)
    )
    + WAIT_LD + f"mad.wide.u32 %d1, %t, {4 * N2}, %a2;"
    + "".join(f"st.global.b32 [%d1 + {4 * i}], %s{i};" for i in range(N2))
    + CLUSTER_SYNC + free(32, 2)
)  # fmt: skip
A2, B2 = halves(2 * M), halves(N2)


def pair_args():
    a = np.stack([image(A2[:M]), image(A2[M:])])
    b = np.stack([image(B2[:N]), image(B2[N:])])
    return a, b, np.full((2 * M, N2), np.nan, np.float32)


def pair_right(a, b, c):
    assert (c == A2.astype(np.float64) @ B2.astype(np.float64).T).all()


def test_pair():
    check(PAIR, pair_args, pair_right, grid=2, cluster=2, seeds=range(8))
    caught(
        "deadlock",
        without(PAIR, "%b0, 3;", "%b0, 1;"),
        pair_args,
        grid=2,
        cluster=2,
        seeds=range(3),
    )
    refused("CTA mask 0x7", without(PAIR, "%b0, 3;", "%b0, 7;"), pair_args, grid=2, cluster=2)
    early = PAIR.replace(FULL + CLUSTER_SYNC, FULL, 1)
    caught("unwaited bulk copy|race|uninit", early, pair_args, grid=2, cluster=2)


def test_shift_in_order_with_the_pipe():
    """tcgen05.shift.down: rows 1 to 31 come one up, in order with the commit."""
    eight = ", ".join(["%t"] * 8)
    put = f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r41], {{{eight}}}; {TOLD}"
    body = (
        HEAD + init("%r8") + alloc(32) + put + LEADER
        + "@%p0 tcgen05.shift.cta_group::1.down [%r41];" + COMMIT + DONE
        + f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r50}}, [%r41 + 7]; {WAIT_LD}"
        + "st.global.b32 [%o], %r50;" + free(32)
    )  # fmt: skip

    def judge(y):
        want = np.arange(128)
        want[:31] += 1
        assert (y == want).all()

    make = lambda: (kit.words(128),)  # noqa: E731
    check(body, make, judge, seeds=range(5))
    caught("unwaited tensor work", without(body, DONE), make)
    caught("unwaited tcgen05.st", without(body, WAIT_ST), make)
