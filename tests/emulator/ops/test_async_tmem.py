"""Tensor memory through real PTX: allocation, loads and stores, MMAs, and what may go wrong."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import kit
from tests.emulator.kit.async_ptx import SYNC, caught, refused, silent

pytestmark = pytest.mark.usefixtures("seeds")

RNG = np.random.default_rng(3)
WARP0 = "shr.u32 %r40, %x, 5; setp.eq.u32 %p1, %r40, 0;"


def alloc(number, group=1, slot="slot"):
    """Warp 0 allocates; %r41 is the address."""
    return f"""{WARP0} mov.u32 %r42, {slot};
    @%p1 tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r42], {number}; {SYNC}
    ld.shared.b32 %r41, [%r42];"""


def free(number, group=1):
    return f"""{SYNC} @%p1 tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r41, {number};"""


HEAD = """
    .shared .align 16 .b8 buf[16384];
    .shared .align 8 .b64 bar;
    .shared .align 8 .b64 bar2;
    .shared .align 4 .b32 slot;
    mov.u32 %r0, buf;
    mov.u32 %r9, bar;
    mov.u32 %r8, bar2;
"""
ST = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r41], {%t};"
WAIT_ST, WAIT_LD = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"
LD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r50}, [%r41];"
PUT = "st.global.b32 [%o], %r50;"


def outputs(count=128):
    return lambda: (kit.words(count),)


def counted(y):
    assert (y == np.arange(y.size)).all()


# allocation -----------------------------------------------------------------------------------
RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
ROUND = HEAD + alloc(32) + ST + WAIT_ST + LD + WAIT_LD + PUT + free(32)


def test_round_trip():
    report = silent(ROUND, outputs(), counted, block=128)
    assert report.tmem_columns_high_water == 32
    assert report.bytes["tmem"] == {"read": 512, "written": 512}


def test_several_allocations():
    """128 + 64 + 64 columns, freed in another order, taken again."""
    takes = "".join(
        f"""@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4{i}], {n};"""
        for i, n in ((2, 128), (3, 64), (4, 64))
    )
    body = (
        HEAD.replace("slot;\n", "slot[8];\n", 1)
        + f"""{WARP0}
    mov.u32 %r42, slot; add.u32 %r43, %r42, 4; add.u32 %r44, %r42, 8; add.u32 %r45, %r42, 12;
    {takes} {SYNC} ld.shared.b32 %r46, [%r43]; {SYNC}
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r46, 64;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r45], 32; {SYNC}
    and.b32 %r47, %x, 3; mad.lo.u32 %r47, %r47, 4, %r42; ld.shared.b32 %r50, [%r47]; {PUT} {SYNC}
    ld.shared.b32 %r41, [%r42]; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r41, 128;
    ld.shared.b32 %r41, [%r44]; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r41, 64;
    ld.shared.b32 %r41, [%r45]; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r41, 32;"""
    )

    def judge(y):
        assert list(y[:4]) == [0, 128, 192, 128]

    report = silent(body, outputs(), judge, block=128)
    assert report.tmem_columns_high_water == 256


def test_allocation_blocks_until_columns_are_free():
    """Warp 1 asks for columns that warp 0 has; without the dealloc it waits for ever."""
    body = (
        HEAD
        + f"""{WARP0} mov.u32 %r42, slot; setp.eq.u32 %p2, %r40, 1;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r42], 512; {SYNC}
    ld.shared.b32 %r41, [%r42]; {SYNC}
    @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r42], 256;
    @%p2 bra NEXT;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r41, 512; bra OUT;
    NEXT: ld.shared.b32 %r41, [%r42]; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r41, 256;
    OUT:"""
    )
    silent(body, outputs(64), lambda y: None, block=64, seeds=range(10))
    stuck = body.replace("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r41, 512; bra", "bra")
    refused("deadlock.*(?s:.*)256 free TMEM columns", stuck, outputs(64), block=64)


@pytest.mark.parametrize(
    ("pattern", "old", "new"),
    [
        ("48 columns", "[%r42], 32", "[%r42], 48"),
        ("16 columns", "[%r42], 32", "[%r42], 16"),
        ("no allocation of this CTA", "%r41, 32;", "%r41, 64;"),
        ("no allocation of this CTA", free(32), free(32) + free(32)),
        ("after tcgen05.relinquish", f"{WARP0} mov", f"{RELINQUISH} {WARP0} mov"),
        ("same .cta_group", "tcgen05.dealloc.cta_group::1", "tcgen05.dealloc.cta_group::2"),
        ("column 32, which CTA", "x1.b32 {%r50}, [%r41]", "x1.b32 {%r50}, [%r41 + 32]"),
        ("column 600", "x1.b32 {%r50}, [%r41]", "x1.b32 {%r50}, [%r41 + 600]"),
        ("after tcgen05.dealloc", LD, free(32) + SYNC + LD),
        ("reaches lanes", "x1.b32 {%r50}, [%r41]", "x1.b32 {%r50}, [%r41 + 2097152]"),
        ("of the warp's 32 threads", "@%p1 tcgen05", "setp.lt.u32 %p1, %x, 16; @%p1 tcgen05"),
        ("differs between the lanes", LD, "add.u32 %r41, %r41, %x;" + LD),
    ],
)  # fmt: skip
def test_rules(pattern, old, new):
    assert old in ROUND
    error = refused(pattern, ROUND.replace(old, new, 1), outputs(), block=128)
    assert error.place.kernel == "kernel"


def test_not_freed():
    caught("tmem not freed", ROUND.replace(free(32), ""), outputs(), block=128)


def test_use_that_races_with_dealloc_is_a_warning():
    racing = ROUND.replace(SYNC + " @%p1 tcgen05.dealloc", "@%p1 tcgen05.dealloc")
    for seed in range(10):
        report = kit.run(racing, *outputs()(), block=128, seed=seed)
        assert report.ok
        assert {h.kind for h in report.hazards} & {
            "use after dealloc",
            "race",
            "unwaited tcgen05.st",
        }


def test_growing_allocation_is_doubtful():
    body = HEAD + alloc(32) + free(32) + alloc(64) + free(64)
    caught("growing TMEM allocation", body, outputs(), block=128, seeds=range(2))


# pairs ----------------------------------------------------------------------------------------
PAIR = ROUND.replace("cta_group::1", "cta_group::2")


def test_pair_allocates_together():
    silent(PAIR, outputs(256), counted, block=128, grid=2, cluster=2)
    refused("needs a pair", PAIR, outputs(), block=128)
    rank = "mov.u32 %r30, %cluster_ctarank; setp.eq.u32 %p3, %r30, 1; @%p3 bra OUT;"
    alone = PAIR.replace(WARP0, WARP0 + rank, 1) + "OUT:"
    refused(
        "deadlock.*(?s:.*)warp of the peer CTA", alone, outputs(256), block=128, grid=2, cluster=2
    )
    uneven = PAIR.replace("[%r42], 32;", "[%r42], %r31;").replace(
        WARP0,
        WARP0 + "mov.u32 %r30, %cluster_ctarank; add.u32 %r31, %r30, 1; shl.b32 %r31, %r31, 5;",
        1,
    )
    refused("same number", uneven, outputs(256), block=128, grid=2, cluster=2)


# loads and stores -----------------------------------------------------------------------------
def test_store_not_waited_for():
    """Another load of the same warp sees old data on some seeds; every seed names the wait."""
    outs = caught("unwaited tcgen05.st", ROUND.replace(WAIT_ST, ""), outputs(), block=128)
    assert any((y != np.arange(128)).any() for (y,) in outs)


def test_load_not_waited_for():
    caught("wait::ld", ROUND.replace(WAIT_LD, ""), outputs(), block=128, seeds=range(3))


def test_uninitialised_columns():
    caught(
        "uninitialised read", ROUND.replace(ST + WAIT_ST, ""), outputs(), block=128, seeds=range(3)
    )


@pytest.mark.parametrize(("shape", "num", "registers"), [
    ("32x32b", 4, 4), ("16x64b", 4, 4), ("16x128b", 2, 4), ("16x256b", 1, 4), ("32x32b", 128, 128),
])  # fmt: skip
def test_shapes_go_there_and_back(shape, num, registers):
    """What a shape stores, the same shape loads; NumPy tells which lane it lies in."""
    columns = {"32x32b": num, "16x64b": 2 * num, "16x128b": 4 * num, "16x256b": 8 * num}[shape]
    regs = ", ".join(f"%s{i}" for i in range(registers))
    back = ", ".join(f"%u{i}" for i in range(registers))
    fill = "".join(f"mad.lo.u32 %s{i}, %t, {registers}, {i};" for i in range(registers))
    show = "".join(f"st.global.b32 [%d1 + {4 * i}], %u{i};" for i in range(registers))
    size = max(32, 1 << (columns - 1).bit_length())
    body = (
        HEAD
        + f".reg .b32 %s<{registers}>, %u<{registers}>;"
        + alloc(size)
        + fill
        + f"""
    tcgen05.st.sync.aligned.{shape}.x{num}.b32 [%r41], {{{regs}}}; {WAIT_ST}
    tcgen05.ld.sync.aligned.{shape}.x{num}.b32 {{{back}}}, [%r41]; {WAIT_LD}
    mad.wide.u32 %d1, %t, {4 * registers}, %a0; {show}"""
        + free(size)
    )
    silent(body, outputs(128 * registers), counted, block=128, seeds=range(2))


def test_16x64b_cells():
    """16x64b.x1 fills two columns of a warp's first 16 lanes, and no other cell."""
    body = (
        HEAD
        + alloc(32)
        + f"""mov.u32 %r51, 7; tcgen05.st.sync.aligned.32x32b.x2.b32 [%r41], {{%r51, %r51}};
    {WAIT_ST} tcgen05.st.sync.aligned.16x64b.x1.b32 [%r41], {{%t}}; {WAIT_ST}
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r50, %r51}}, [%r41]; {WAIT_LD}
    mad.wide.u32 %d1, %t, 8, %a0; st.global.v2.b32 [%d1], {{%r50, %r51}};"""
        + free(32)
    )

    def judge(y):
        y = y.reshape(4, 32, 2)
        assert (y[:, 16:] == 7).all()
        for warp in range(4):
            assert sorted(y[warp, :16].reshape(-1)) == list(range(32 * warp, 32 * warp + 32))

    silent(body, outputs(256), judge, block=128, seeds=range(2))


def test_pack_and_reduce():
    body = (
        HEAD
        + alloc(32)
        + f"""and.b32 %r10, %t, 0xffff; add.u32 %r11, %r10, 3;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r41], {{%r10, %r11}}; {WAIT_ST}
    tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {{%r50}}, [%r41]; {WAIT_LD} {PUT}"""
        + free(32)
    )

    def judge(y):
        t = np.arange(128)
        assert (y == (t | (t + 3) << 16)).all()

    silent(body, outputs(), judge, block=128, seeds=range(2))
