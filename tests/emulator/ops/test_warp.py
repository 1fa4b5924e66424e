"""shfl, vote, match, redux, elect, activemask: against loops over the lanes."""

from __future__ import annotations

import numpy as np
import pytest

from blockscale import emulator
from tests.emulator import kit
from tests.emulator.kit import SEEDS

WIDTHS = [32, 16, 8, 4, 2, 1]


def shuffled(mode, values, b, packed):
    """Return (value, predicate) per lane as the pseudocode of PTX ISA 9.7.9.6 says."""
    out, flags = [], []
    for lane in range(32):
        bound, segment = packed & 31, packed >> 8 & 31
        most, least = (lane & segment) | (bound & ~segment), lane & segment
        j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": least | (b & ~segment)}[
            mode
        ]
        ok = j >= most if mode == "up" else j <= most
        out.append(values[j if ok else lane])
        flags.append(ok)
    return out, flags


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("fixed", [True, False])
def test_shfl(mode, width, fixed):
    """Every mode, every width as CUDA packs it (0x1f or 0, segment mask above), every distance."""
    packed = (32 - width) << 8 | (0 if mode == "up" else 31)
    rng = np.random.default_rng(width)
    x = rng.integers(0, 1 << 32, 64, dtype=np.uint32)
    for b in (0, 1, 3, 8, 17, 31):
        by, bound = (str(b), str(packed)) if fixed else ("%r1", "%r2")
        body = f"""
            mad.wide.u32 %d0, %t, 4, %a0; ld.global.b32 %r0, [%d0];
            mov.u32 %r1, {b}; mov.u32 %r2, {packed};
            shfl.sync.{mode}.b32 %r3|%p0, %r0, {by}, {bound}, 0xffffffff;
            selp.b32 %r4, 1, 0, %p0; mov.b64 %d1, {{%r3, %r4}};
            st.global.b64 [%o8], %d1;
        """
        got = (
            kit.values(body, x, block=64, count=64, dtype=np.uint64).view(np.uint32).reshape(64, 2)
        )
        for w in range(2):
            want, flags = shuffled(mode, x[w * 32 : w * 32 + 32], b, packed)
            assert (got[w * 32 : w * 32 + 32, 0] == want).all()
            assert (got[w * 32 : w * 32 + 32, 1] == flags).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_shfl_takes_another_lane_in_every_lane(seed):
    x = np.random.default_rng(seed).permutation(32).astype(np.uint32)
    body = """
        mad.wide.u32 %d0, %x, 4, %a0; ld.global.b32 %r0, [%d0];
        shfl.sync.idx.b32 %r1, %x, %r0, 31, -1; st.global.b32 [%o], %r1;
    """
    got = kit.values(body, x, block=32, grid=2, count=64, seed=seed)
    assert (got == np.tile(x, 2)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lane_that_takes_no_part_gives_poison(seed):
    """What shfl reads from a lane outside the mask is not its value: PTX calls it unpredictable."""
    body = """
        mov.u32 %r1, 0; setp.ge.u32 %p0, %x, 16; @%p0 bra END;
        shfl.sync.down.b32 %r1, %x, 8, 31, 0xffff;
    END:
        st.global.b32 [%o], %r1;
    """
    got = kit.values(body, seed=seed)
    assert (got[:8] == np.arange(8, 16)).all()
    assert (got[8:16] == kit.POISON).all()
    assert (got[16:] == 0).all()


@pytest.mark.parametrize("tile", [32, 16, 8, 4])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("apart", [True, False])
def test_groups_of_one_warp_vote_apart(tile, seed, apart):
    """Each tile gives its own mask, together or in divergent code, as cooperative groups do."""
    rng = np.random.default_rng(seed)
    p = rng.integers(0, 2, (64 // tile, tile)).astype(np.uint32)
    p[0] = 1
    p[-1] = 0
    split = "shr.u32 %r9, %r8, 1; and.b32 %r9, %r9, 1; setp.ne.u32 %p9, %r9, 0; @%p9 bra OTHER;"
    one = """
        vote.sync.ballot.b32 %r2, %p0, %r1; vote.sync.any.pred %p1, %p0, %r1;
        vote.sync.all.pred %p2, %p0, %r1; vote.sync.uni.pred %p3, !%p0, %r1;
        redux.sync.add.u32 %r4, %r0, %r1; match.any.sync.b32 %r5, %r0, %r1;
        match.all.sync.b32 %r6|%p4, %r0, %r1; elect.sync %r7|%p5, %r1;
    """
    ask = f"{split}{one} bra.uni DONE; OTHER: {one} DONE:" if apart else one
    full = (1 << tile) - 1
    body = f"""
        mad.wide.u32 %d0, %t, 4, %a0; ld.global.b32 %r0, [%d0]; setp.ne.u32 %p0, %r0, 0;
        and.b32 %r1, %x, 31; div.u32 %r8, %r1, {tile}; mul.lo.u32 %r3, %r8, {tile};
        mov.u32 %r1, {full}; shl.b32 %r1, %r1, %r3;
        {ask}
        @%p1 or.b32 %r2, %r2, 0; selp.b32 %r10, 1, 0, %p1; selp.b32 %r11, 2, 0, %p2;
        selp.b32 %r12, 4, 0, %p3; selp.b32 %r13, 8, 0, %p4; selp.b32 %r14, 16, 0, %p5;
        or.b32 %r10, %r10, %r11; or.b32 %r10, %r10, %r12; or.b32 %r10, %r10, %r13;
        or.b32 %r10, %r10, %r14;
        mad.wide.u32 %d1, %t, 24, %a1;
        st.global.v2.b32 [%d1], {{%r2, %r4}}; st.global.v2.b32 [%d1+8], {{%r5, %r6}};
        st.global.v2.b32 [%d1+16], {{%r7, %r10}};
    """
    out = np.zeros((64, 6), np.uint32)
    kit.run(body, p, out, block=64, seed=seed)
    for t in range(64):
        group, lane = p[t // tile], t % 32
        base = lane // tile * tile
        ones = sum(1 << (base + i) for i in range(tile) if group[i])
        same = sum(1 << (base + i) for i in range(tile) if group[i] == p.reshape(-1)[t])
        every = len(set(group.tolist())) == 1
        flags = (
            int(group.any()) | 2 * int(group.all()) | 4 * every | 8 * every | 16 * (lane == base)
        )
        want = [ones, group.sum(), same, full << base if every else 0, base, flags]
        assert out[t].tolist() == want, t


@pytest.mark.parametrize("kind", ["u32", "s32", "b32"])
@pytest.mark.parametrize("seed", SEEDS)
def test_redux_of_integers(kind, seed):
    x = np.random.default_rng(seed).integers(0, 1 << 32, 64, dtype=np.uint32)
    ops = ["and", "or", "xor"] if kind == "b32" else ["add", "min", "max"]
    dtype = np.int32 if kind == "s32" else np.uint32
    for op in ops:
        body = f"""
            mad.wide.u32 %d0, %t, 4, %a0; ld.global.b32 %r0, [%d0];
            redux.sync.{op}.{kind} %r1, %r0, 0xffffffff; st.global.b32 [%o], %r1;
        """
        got = kit.values(body, x, block=64, count=64, seed=seed)
        f = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
             "or": np.bitwise_or, "xor": np.bitwise_xor}[op]  # fmt: skip
        want = f.reduce(x.view(dtype).reshape(2, 32), axis=1, dtype=dtype).view(np.uint32)
        assert (got == np.repeat(want, 32)).all()


SPECIAL = np.array([np.nan, -0.0, 0.0, 1.5, -2.5, np.inf, -np.inf, 1e-40], np.float32)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("nan", [False, True])
def test_redux_of_floats(op, absolute, nan):
    """NaN loses without .NaN and wins with it; -0 is below +0; |x| first with .abs."""
    rows = [
        [0.0, -0.0],
        [np.nan, np.nan],
        [np.nan, 1.5],
        [-2.5, 1.5],
        [np.inf, -np.inf],
        [1e-40, 0.0],
    ]
    x = np.array([np.resize(r, 32) for r in rows], np.float32)
    name = f"redux.sync.{op}{'.abs' if absolute else ''}{'.NaN' if nan else ''}.f32"
    body = f"""
        mad.wide.u32 %d0, %t, 4, %a0; ld.global.b32 %r0, [%d0];
        {name} %r1, %r0, 0xffffffff; st.global.b32 [%o], %r1;
    """
    got = kit.values(body, x, block=192, count=192).reshape(6, 32)
    for i, row in enumerate(rows):
        numbers = [abs(v) if absolute else v for v in row]
        real = [v for v in numbers if not np.isnan(v)]
        if not real or (nan and len(real) < len(numbers)):
            want = 0x7FFFFFFF
        else:
            pick = {"min": min, "max": max}[op]
            want = pick(real, key=lambda v: (v, -np.signbit(v).astype(int)))
            want = int(np.float32(want).view(np.uint32))
        assert (got[i] == want).all(), (row, hex(got[i][0]), hex(want))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_match_any(seed, kind):
    x = np.random.default_rng(seed).integers(0, 4, 32).astype(np.uint64)
    x[5] |= np.uint64(1 << 40)
    size = int(kind[1:]) // 8
    reg = "%r0" if size == 4 else "%d3"
    body = f"""
        mad.wide.u32 %d0, %x, 8, %a0; ld.global.b64 %d3, [%d0]; cvt.u32.u64 %r0, %d3;
        match.any.sync.{kind} %r1, {reg}, 0xffffffff; st.global.b32 [%o], %r1;
    """
    y = x & np.uint64(0xFFFFFFFF) if size == 4 else x
    want = [sum(1 << j for j in range(32) if y[j] == y[i]) for i in range(32)]
    assert (kit.values(body, x, seed=seed) == want).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_activemask_and_lane_masks(seed):
    body = """
        and.b32 %r0, %x, 3; setp.eq.u32 %p0, %r0, 1; mov.u32 %r1, 0;
        @%p0 bra ONE;
        activemask.b32 %r1; bra.uni END;
    ONE:
        activemask.b32 %r1;
    END:
        bar.warp.sync -1;
        mov.u32 %r2, %lanemask_lt; mov.u32 %r3, %lanemask_ge; mov.u32 %r4, %lanemask_eq;
        xor.b32 %r2, %r2, %r3; mov.u32 %r5, %lanemask_le; mov.u32 %r6, %lanemask_gt;
        xor.b32 %r5, %r5, %r6; and.b32 %r2, %r2, %r5; sub.u32 %r1, %r1, %r4; and.b32 %r1, %r1, %r2;
        st.global.b32 [%o], %r1;
    """
    got = kit.values(body, block=64, count=64, seed=seed)
    for t in range(64):
        mask = sum(1 << i for i in range(32) if (i % 4 == 1) == (t % 4 == 1))
        assert got[t] == mask - (1 << t % 32)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_warp_that_is_not_full(seed):
    """40 threads: the second warp has eight lanes; a full mask names lanes that do not exist."""
    body = """
        vote.sync.ballot.b32 %r0, 1, 0xffffffff; redux.sync.add.u32 %r1, 1, 0xffffffff;
        mov.pred %p0, 1; vote.sync.all.pred %p1, %p0, 0xffffffff; selp.b32 %r2, 100, 0, %p1;
        popc.b32 %r0, %r0; add.u32 %r0, %r0, %r1; add.u32 %r0, %r0, %r2; st.global.b32 [%o], %r0;
    """
    body = body.replace(
        "vote.sync.ballot.b32 %r0, 1,", "mov.pred %p0, 1; vote.sync.ballot.b32 %r0, %p0,"
    )
    got = kit.values(body, block=40, count=40, seed=seed)
    assert (got == np.where(np.arange(40) < 32, 164, 116)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_come_one_by_one_to_a_shfl(seed):
    """shfl.sync waits for the lanes of its mask, which come out of loops of different lengths."""
    body = """
        mov.u32 %r0, 0; mov.u32 %r1, %x;
    LOOP:
        setp.eq.u32 %p0, %r1, 0; @%p0 bra OUT;
        add.u32 %r0, %r0, %r1; sub.u32 %r1, %r1, 1; bra.uni LOOP;
    OUT:
        shfl.sync.bfly.b32 %r2, %r0, 1, 31, 0xffffffff; st.global.b32 [%o], %r2;
    """
    i = np.arange(32) ^ 1
    assert (kit.values(body, seed=seed) == i * (i + 1) // 2).all()


@pytest.mark.parametrize(
    ("body", "sentence", "lane"),
    [
        ("shfl.sync.idx.b32 %r0, %x, 0, 31, 0xff;", "not in the member mask 0x000000ff", 8),
        ("redux.sync.add.u32 %r0, %x, 1;", "not in the member mask 0x00000001", 1),
        ("mov.u32 %r1, 0xfffffff0; bar.warp.sync %r1;", "not in the member mask 0xfffffff0", 0),
        ("shfl.sync.b32 %r0, %x, 0, 31, -1;", r"one of \.up, \.down, \.bfly, \.idx", None),
        ("redux.sync.add.f32 %r0, %x, -1;", "f32 has .min and .max only", None),
        ("match.sync.b32 %r0, %x, -1;", r"one of \.any, \.all", None),
    ],
)
def test_bad_masks(body, sentence, lane):
    with pytest.raises(emulator.EmulationError, match=sentence) as error:
        kit.run(body, np.zeros(1, np.uint32))
    assert error.value.place.line
    assert error.value.place.lane == lane


def test_lanes_that_never_come():
    """Half a warp waits for the other half, which has no such instruction: a deadlock, named."""
    body = """
        setp.lt.u32 %p0, %x, 16; @%p0 bra HALF; bra.uni WAIT;
    HALF:
        shfl.sync.idx.b32 %r0, %x, 0, 31, 0xffffffff; bra.uni END;
    WAIT:
        bar.sync 1;
    END:
    """
    with pytest.raises(emulator.Deadlock, match="member mask") as error:
        kit.run(body, np.zeros(1, np.uint32))
    assert "shfl.sync" in str(error.value)
    assert "bar.sync" in str(error.value)
