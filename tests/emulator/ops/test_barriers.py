"""bar, barrier and barrier.cluster: who waits for whom, votes, leavers, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from blockscale import emulator
from tests.emulator import kit
from tests.emulator.kit import SEEDS

SHARED = ".shared .align 4 .b32 sh[1024];"
SYNCS = [
    "bar.sync 0;", "bar.cta.sync 3;", "barrier.sync 1;", "barrier.cta.sync.aligned 15;",
    "bar.sync 2, {n};", "barrier.sync %r9, %r8;",
]  # fmt: skip


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("block", [32, 40, 96, 100])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_sync_orders_shared_memory(sync, block, seed):
    """Write, wait, read another warp's word; blocks whose size is no multiple of 32, too."""
    whole = -(-block // 32) * 32
    body = f"""
        mov.u32 %r8, {whole}; mov.u32 %r9, 5;
        mov.u64 %d0, sh; mad.wide.u32 %d1, %x, 4, %d0; st.shared.b32 [%d1], %t;
        {sync.format(n=whole)}
        add.u32 %r0, %x, 33; rem.u32 %r0, %r0, {block}; mad.wide.u32 %d1, %r0, 4, %d0;
        ld.shared.b32 %r1, [%d1]; st.global.b32 [%o], %r1;
    """
    got = kit.values(body, block=block, grid=2, count=2 * block, seed=seed, module=SHARED)
    x = np.arange(block)
    want = np.concatenate([(x + 33) % block, (x + 33) % block + block])
    assert (got == want).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_barrier_it_is_a_race(seed):
    body = """
        mov.u64 %d0, sh; mad.wide.u32 %d1, %x, 4, %d0; st.shared.b32 [%d1], %t;
        xor.b32 %r0, %x, 32; mad.wide.u32 %d1, %r0, 4, %d0;
        ld.shared.b32 %r1, [%d1]; st.global.b32 [%o], %r1;
    """
    report = kit.run(body, kit.words(64), block=64, seed=seed, module=SHARED)
    assert any(h.kind == "race" and h.line and h.warp is not None for h in report.errors)


@pytest.mark.parametrize("name", ["bar.red", "barrier.cta.red", "bar.cta.red"])
@pytest.mark.parametrize("block", [64, 70])
@pytest.mark.parametrize("seed", SEEDS)
def test_votes_of_the_block(name, block, seed):
    """.popc, .and and .or over the threads that exist, with a negated predicate, too."""
    aligned = ".aligned" if name.startswith("barrier") else ""
    body = f"""
        mad.wide.u32 %d0, %x, 4, %a0; ld.global.u32 %r0, [%d0]; setp.ne.u32 %p0, %r0, 0;
        {name}.popc{aligned}.u32 %r1, 1, %p0;
        {name}.and{aligned}.pred %p1, 2, !%p0; {name}.or{aligned}.pred %p2, 1, %p0;
        selp.b32 %r2, 1000, 0, %p1; selp.b32 %r3, 10000, 0, %p2;
        add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3; st.global.b32 [%o], %r1;
    """
    for p in (0.0, 0.5, 1.0):
        x = (np.random.default_rng(seed).random(block) < p).astype(np.uint32)
        got = kit.values(body, x, block=block, count=block, seed=seed)
        assert (got == x.sum() + 1000 * (not x.any()) + 10000 * bool(x.any())).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_producers_arrive_and_consumers_wait(seed):
    """Warp 0 fills a buffer ten times; warps 1 and 2 read it: two named barriers of 96 threads."""
    body = """
        mov.u32 %r0, 0; mov.u32 %r5, 0; mov.u64 %d0, sh; and.b32 %r7, %x, 31;
        mad.wide.u32 %d1, %r7, 4, %d0;
        setp.ge.u32 %p0, %x, 32; @%p0 bra CONSUME;
    PRODUCE:
        bar.sync 2, 96;
        add.u32 %r1, %r0, %x; st.shared.b32 [%d1], %r1;
        bar.arrive 1, 96;
        add.u32 %r0, %r0, 1; setp.lt.u32 %p1, %r0, 10; @%p1 bra PRODUCE;
        bra.uni END;
    CONSUME:
        bar.arrive 2, 96;
        bar.sync 1, 96;
        ld.shared.b32 %r2, [%d1]; add.u32 %r5, %r5, %r2;
        add.u32 %r0, %r0, 1; setp.lt.u32 %p1, %r0, 10; @%p1 bra CONSUME;
    END:
        st.global.b32 [%o], %r5;
    """
    got = kit.values(body, block=96, count=96, seed=seed, module=SHARED)
    lane = np.arange(96) % 32
    assert (got == np.where(np.arange(96) < 32, 0, 10 * lane + 45)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_do_not_wait_for_those_who_left(seed):
    """Warp 1 and half of warp 2 leave; bar.sync 0 counts the threads that are left."""
    body = """
        setp.ge.u32 %p0, %x, 32; setp.lt.u32 %p1, %x, 80; and.pred %p0, %p0, %p1; @%p0 exit;
        mov.u64 %d0, sh; mad.wide.u32 %d1, %x, 4, %d0; st.shared.b32 [%d1], %x;
        bar.sync 0;
        sub.u32 %r0, 95, %x; mad.wide.u32 %d1, %r0, 4, %d0; setp.lt.u32 %p2, %r0, 16;
        setp.ge.u32 %p3, %r0, 80; or.pred %p2, %p2, %p3; mov.u32 %r1, 1;
        @%p2 ld.shared.b32 %r1, [%d1]; st.global.b32 [%o], %r1;
    """
    got = kit.values(body, block=96, count=96, seed=seed, module=SHARED)
    x = np.arange(96)
    gone = (x >= 32) & (x < 80)
    partner = np.where((95 - x < 16) | (95 - x >= 80), 95 - x, 1)
    assert (got == np.where(gone, kit.POISON, partner)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_barrier_in_divergent_code(seed):
    """barrier.sync without .aligned: the halves of a warp come from different places."""
    body = """
        mov.u64 %d0, sh; mad.wide.u32 %d1, %x, 4, %d0; st.shared.b32 [%d1], %x;
        and.b32 %r0, %x, 1; setp.eq.u32 %p0, %r0, 0; @%p0 bra EVEN;
        barrier.sync 4; mov.u32 %r2, 100; bra.uni READ;
    EVEN:
        barrier.sync 4; mov.u32 %r2, 200;
    READ:
        xor.b32 %r1, %x, 33; mad.wide.u32 %d1, %r1, 4, %d0; ld.shared.b32 %r3, [%d1];
        add.u32 %r2, %r2, %r3; st.global.b32 [%o], %r2;
    """
    got = kit.values(body, block=64, count=64, seed=seed, module=SHARED)
    x = np.arange(64)
    assert (got == (x ^ 33) + np.where(x % 2, 100, 200)).all()


ARRIVES = ["arrive", "arrive.aligned", "arrive.release", "arrive.release.aligned"]


@pytest.mark.parametrize("arrive", ARRIVES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_barrier_of_a_cluster(arrive, seed):
    """Every CTA writes into its neighbour's memory and reads what its neighbour was given."""
    wait = "wait.acquire.aligned" if "aligned" in arrive else "wait"
    body = f"""
        mov.u32 %r0, %cluster_ctarank; xor.b32 %r0, %r0, 1; mov.u32 %r1, sh;
        mapa.shared::cluster.u32 %r2, %r1, %r0; mad.lo.u32 %r2, %x, 4, %r2;
        st.shared::cluster.b32 [%r2], %t;
        barrier.cluster.{arrive}; barrier.cluster.{wait};
        mov.u64 %d0, sh; mad.wide.u32 %d1, %x, 4, %d0; ld.shared.b32 %r3, [%d1];
        cvta.shared.u64 %d2, %d0; mapa.u64 %d3, %d2, %r0; mad.wide.u32 %d3, %x, 4, %d3;
        ld.u32 %r4, [%d3]; sub.u32 %r4, %r4, %t; setp.ne.u32 %p0, %r4, 0; @%p0 trap;
        getctarank.u64 %r5, %d3; setp.ne.u32 %p1, %r5, %r0; @%p1 trap;
        getctarank.shared::cluster.u32 %r6, %r2; setp.ne.u32 %p1, %r6, %r0; @%p1 trap;
        isspacep.shared::cta %p2, %d3; @%p2 trap; isspacep.shared::cluster %p3, %d3; @!%p3 trap;
        barrier.cluster.arrive.relaxed; barrier.cluster.wait;
        st.global.b32 [%o], %r3;
    """
    got = kit.values(body, block=40, grid=4, cluster=2, count=160, seed=seed, module=SHARED)
    t = np.arange(160)
    assert (got == np.where(t // 40 % 2, t - 40, t + 40)).all()


BAD = [
    ("mov.u32 %r0, 16; bar.sync %r0;", "barriers 0 to 15", 0, 32),
    ("bar.sync 1, 40;", "multiple of 32", 0, 64),
    ("bar.sync 1, 0;", "multiple of 32", 0, 64),
    ("bar.arrive 1;", r"threads\) are missing", None, 32),
    ("shr.u32 %r0, %x, 4; barrier.sync %r0;", "one warp name different barriers", 0, 32),
    ("setp.lt.u32 %p0, %x, 32; @%p0 bar.arrive 1, 96; @!%p0 bar.arrive 1, 64;",
     "numbers must agree", None, 64),
    ("bar.arrive 1, 64; bar.arrive 1, 64;", "arrives twice", 0, 32),
    ("bar.arrive 1, 32; bar.foo 1;", r"no modifier \.foo", None, 32),
    ("barrier.cluster.wait;", "without barrier.cluster.arrive", 0, 32),
    ("barrier.cluster.arrive; barrier.cluster.arrive;", "again without barrier.cluster.w", 0, 32),
]  # fmt: skip


@pytest.mark.parametrize(("body", "sentence", "lane", "block"), BAD)
def test_bad_barriers(body, sentence, lane, block):
    with pytest.raises(emulator.EmulationError, match=sentence) as error:
        kit.run(body, np.zeros(64, np.uint32), block=block)
    place = error.value.place
    assert place.line
    assert place.kernel == "kernel"
    assert lane is None or (place.warp, place.lane) == (0, lane)


def test_too_many_come():
    body = "setp.lt.u32 %p0, %x, 64; @%p0 bar.arrive 1, 32;"
    with pytest.raises(emulator.EmulationError, match="64 threads have arrived at a barrier of 32"):
        kit.run(body, np.zeros(64, np.uint32), block=64)
