"""mbarrier: every form of init, arrive, expect, test and try; phases, states, counts, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from blockscale import emulator
from tests.emulator import kit
from tests.emulator.kit import SEEDS

MODULE = ".shared .align 8 .b64 mb[4]; .shared .align 4 .b32 sh[256];"
INIT = """
    setp.eq.u32 %p31, %x, 0; mov.u32 %r60, mb;
    @%p31 mbarrier.init.shared::cta.b64 [%r60], {count};
    bar.sync 0;
"""
WAIT = """
    {label}:
        mbarrier.{wait} %p30, [%r60], {token}{more};
        @!%p30 bra {label};
"""
WAITS = [
    ("try_wait.parity.shared::cta.b64", "0", ""),
    ("try_wait.parity.acquire.cta.shared::cta.b64", "0", ", 1000"),
    ("test_wait.parity.shared.b64", "0", ""),
    ("try_wait.shared.b64", "%d9", ""),
    ("test_wait.acquire.cluster.shared::cta.b64", "%d9", ""),
    ("try_wait.relaxed.cta.shared::cta.b64", "%d9", ", %r59"),
]
CLUSTER_WAIT = "try_wait.parity.acquire.cluster.shared::cta.b64"


@pytest.mark.parametrize(("wait", "token", "more"), WAITS)
@pytest.mark.parametrize("seed", SEEDS)
def test_all_arrive_and_wait(wait, token, more, seed):
    body = f"""
        {INIT.format(count=96)} mov.u32 %r59, 20;
        mov.u64 %d0, sh; mad.wide.u32 %d1, %x, 4, %d0; st.shared.b32 [%d1], %t;
        mbarrier.arrive.shared::cta.b64 %d9, [%r60];
        {WAIT.format(label="W", wait=wait, token=token, more=more)}
        {"fence.acq_rel.cta;" if "relaxed" in wait else ""}
        sub.u32 %r0, 95, %x; mad.wide.u32 %d1, %r0, 4, %d0; ld.shared.b32 %r1, [%d1];
        st.global.b32 [%o], %r1;
    """
    got = kit.values(body, block=96, count=96, seed=seed, module=MODULE, limit=500_000)
    assert (got == 95 - np.arange(96)).all()


ARRIVES = [
    ("mbarrier.arrive.shared.b64 _, [%r60];", 32),
    ("mbarrier.arrive.release.cta.shared::cta.b64 %d8, [%r60], 3;", 96),
    ("mbarrier.arrive.relaxed.cluster.shared::cta.b64 _, [%r60], %r58;", 64),
    ("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r60], 2;", 64),
    ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r60], 16; "
     "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r60], 16;", 32),
    ("mbarrier.complete_tx.shared::cta.relaxed.b64 [%r60], 4;", None),
    ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r60], 8; mbarrier.arrive.b64 %d8, [%d7]; "
     "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r60], 8;", 32),
    ("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r60], 16; "
     "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r60], 16;", 32),
]  # fmt: skip


@pytest.mark.parametrize(("arrive", "count"), [a for a in ARRIVES if a[1]])
@pytest.mark.parametrize("seed", SEEDS)
def test_arrivals(arrive, count, seed):
    """One phase of `count` arrivals by 32 lanes; a test after it is true for parity 0 only."""
    body = f"""
        {INIT.format(count=count)} mov.u32 %r58, 2; cvt.u64.u32 %d7, %r60; cvta.shared.u64 %d7, %d7;
        {arrive}
        {WAIT.format(label="W", wait="try_wait.parity.shared::cta.b64", token="0", more="")}
        mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r60], 1;
        mbarrier.test_wait.parity.b64 %p2, [%d7], 0;
        selp.b32 %r0, 1, 0, %p1; selp.b32 %r1, 2, 0, %p2; or.b32 %r0, %r0, %r1;
        st.global.b32 [%o], %r0;
    """
    got = kit.values(body, seed=seed, module=MODULE)
    assert (got == 2).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_phases_go_round(seed):
    """A ring of two buffers, full and empty barriers, parity flips every second round."""
    body = """
        setp.ne.u32 %p0, %x, 0; mov.u32 %r60, mb; mov.u32 %r61, sh; and.b32 %r10, %x, 31;
        @%p0 bra READY;
        mbarrier.init.shared.b64 [%r60], 32; mbarrier.init.shared.b64 [%r60+8], 32;
        mbarrier.init.shared.b64 [%r60+16], 32; mbarrier.init.shared.b64 [%r60+24], 32;
    READY:
        bar.sync 0;
        mov.u32 %r0, 0; mov.u32 %r9, 0;
        setp.ge.u32 %p1, %x, 32; @%p1 bra CONSUME;
    PRODUCE:
        and.b32 %r1, %r0, 1; shr.u32 %r2, %r0, 1; and.b32 %r2, %r2, 1;
        mad.lo.u32 %r3, %r1, 8, %r60; xor.b32 %r4, %r2, 1;
    PW: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3+16], %r4; @!%p2 bra PW;
        mad.lo.u32 %r5, %r1, 128, %r61; mad.lo.u32 %r5, %r10, 4, %r5;
        mad.lo.u32 %r6, %r0, 100, %r10;
        st.shared.b32 [%r5], %r6; mbarrier.arrive.shared::cta.b64 _, [%r3];
        add.u32 %r0, %r0, 1; setp.lt.u32 %p3, %r0, 9; @%p3 bra PRODUCE;
        bra.uni END;
    CONSUME:
        and.b32 %r1, %r0, 1; shr.u32 %r2, %r0, 1; and.b32 %r2, %r2, 1; mad.lo.u32 %r3, %r1, 8, %r60;
    CW: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], %r2; @!%p2 bra CW;
        xor.b32 %r7, %r10, 5; mad.lo.u32 %r5, %r1, 128, %r61; mad.lo.u32 %r5, %r7, 4, %r5;
        ld.shared.b32 %r6, [%r5]; add.u32 %r9, %r9, %r6;
        mbarrier.arrive.shared::cta.b64 _, [%r3+16];
        add.u32 %r0, %r0, 1; setp.lt.u32 %p3, %r0, 9; @%p3 bra CONSUME;
    END:
        st.global.b32 [%o], %r9;
    """
    got = kit.values(body, block=64, count=64, seed=seed, module=MODULE)
    lane = np.arange(32)
    assert (got[32:] == 9 * (lane ^ 5) + 3600).all()
    assert (got[:32] == 0).all()


def test_states_and_pending_counts():
    """arrive gives the phase's state; it is done when the phase is over; pending counts fall."""
    body = f"""
        {INIT.format(count=5)}
        mbarrier.arrive.noComplete.shared::cta.b64 %d1, [%r60], 2;
        mbarrier.pending_count.b64 %r1, %d1;
        mbarrier.arrive.shared::cta.b64 %d2, [%r60]; mbarrier.pending_count.b64 %r2, %d2;
        mbarrier.test_wait.shared::cta.b64 %p1, [%r60], %d1;
        mbarrier.arrive.shared::cta.b64 %d3, [%r60], 2;
        mbarrier.test_wait.shared::cta.b64 %p2, [%r60], %d1;
        mbarrier.test_wait.shared::cta.b64 %p3, [%r60], %d3;
        mbarrier.arrive.shared::cta.b64 %d4, [%r60]; mbarrier.pending_count.b64 %r3, %d4;
        mbarrier.test_wait.shared::cta.b64 %p4, [%r60], %d4;
        selp.b32 %r4, 1, 0, %p1; selp.b32 %r5, 2, 0, %p2; selp.b32 %r6, 4, 0, %p3;
        selp.b32 %r7, 8, 0, %p4;
        or.b32 %r4, %r4, %r5; or.b32 %r4, %r4, %r6; or.b32 %r4, %r4, %r7;
        st.global.v4.b32 [%a0], {{%r1, %r2, %r3, %r4}};
    """
    out = kit.words(4)
    kit.run(body, out, block=1, module=MODULE)
    assert out.tolist() == [5, 3, 5, 6]


@pytest.mark.parametrize("seed", SEEDS)
def test_arrive_drop_lowers_the_next_phase(seed):
    """Lane 0 drops out of 32: the first phase wants 32 arrivals, the next ones 31."""
    body = f"""
        {INIT.format(count=32)} mov.u32 %r0, 0;
        setp.eq.u32 %p1, %x, 0; @%p1 mbarrier.arrive_drop.shared::cta.b64 _, [%r60];
        @%p1 bra END;
    ROUND:
        mbarrier.arrive.shared::cta.b64 %d9, [%r60];
        {WAIT.format(label="W", wait="try_wait.shared::cta.b64", token="%d9", more="")}
        add.u32 %r0, %r0, 1; setp.lt.u32 %p2, %r0, 3; @%p2 bra ROUND;
    END:
        st.global.b32 [%o], %r0;
    """
    got = kit.values(body, seed=seed, module=MODULE)
    assert got.tolist() == [0] + [3] * 31


@pytest.mark.parametrize("seed", SEEDS)
def test_remote_arrivals(seed):
    """Each CTA of four arrives at the barrier of the next one, which waits for its data."""
    body = f"""
        {INIT.format(count=40)}
        fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait;
        mov.u32 %r0, %cluster_ctarank; add.u32 %r0, %r0, 1; and.b32 %r0, %r0, 3;
        mov.u32 %r1, sh; mapa.shared::cluster.u32 %r2, %r1, %r0; mad.lo.u32 %r2, %x, 4, %r2;
        mapa.shared::cluster.u32 %r3, %r60, %r0; st.shared::cluster.b32 [%r2], %t;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];
        {WAIT.format(label="W", wait=CLUSTER_WAIT, token="0", more="")}
        sub.u32 %r4, 39, %x; mad.lo.u32 %r1, %r4, 4, %r1; ld.shared.b32 %r5, [%r1];
        st.global.b32 [%o], %r5;
        barrier.cluster.arrive; barrier.cluster.wait;
    """
    got = kit.values(body, block=40, grid=4, cluster=4, count=160, seed=seed, module=MODULE)
    t = np.arange(160)
    assert (got == (t // 40 - 1) % 4 * 40 + 39 - t % 40).all()


def test_inval_and_init_again():
    body = f"""
        {INIT.format(count=1)} mbarrier.arrive.shared::cta.b64 _, [%r60];
        mbarrier.inval.shared::cta.b64 [%r60]; mbarrier.init.shared::cta.b64 [%r60], 2;
        mbarrier.arrive.shared::cta.b64 %d0, [%r60]; mbarrier.pending_count.b64 %r0, %d0;
        st.global.b32 [%o], %r0;
    """
    assert kit.values(body, block=1, count=1, module=MODULE)[0] == 2


ONE = INIT.format(count=4)
BAD = [
    ("mov.u32 %r60, mb; mbarrier.init.shared.b64 [%r60], 0;", "count 0: 1 to"),
    ("mov.u32 %r60, mb; mbarrier.init.shared.b64 [%r60+4], 1;", "misaligned"),
    ("mov.u32 %r60, mb; mbarrier.arrive.shared.b64 _, [%r60];", "no mbarrier object is"),
    (ONE + "mbarrier.arrive.shared.b64 _, [%r60], 5;", "arrival count underflow"),
    (ONE + "mbarrier.arrive.shared::cta.b64 _, [%r60], 0;", "with count 0"),
    (ONE + "mbarrier.arrive.shared.b64 _, [%r60]; mbarrier.init.shared.b64 [%r60], 1;", "in use"),
    (ONE + "mbarrier.arrive.shared.b64 _, [%r60]; mbarrier.inval.shared.b64 [%r60];", "in use"),
    (ONE + "mbarrier.arrive.noComplete.shared::cta.b64 %d0, [%r60], 4;", "promises that it does"),
    (ONE + "mbarrier.arrive.noComplete.shared::cta.b64 %d0, [%r60];", "count is missing"),
    (ONE + "mov.u32 %r0, 1048575; mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r60], %r0;"
     "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r60], %r0;", "tx-count overflow"),
    (ONE + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r60], 2097152;", "expects 2097152"),
    (ONE + "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r60], 1048576;", "underflow"),
    (ONE + "mbarrier.arrive.shared::foo.b64 _, [%r60];", r"no modifier \.shared::foo"),
    (ONE + "mbarrier.try_wait.parity.shared.b64 %p0, [%r60];", "has 2 operands"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "sentence"), BAD)
def test_bad_mbarriers(body, sentence):
    with pytest.raises(emulator.EmulationError, match=sentence) as error:
        kit.run(body, np.zeros(1, np.uint32), block=1, module=MODULE)
    place = error.value.place
    assert place.kernel == "kernel"
    assert place.line
    if isinstance(error.value, emulator.IllegalOperation):
        assert (place.warp, place.lane) == (0, 0)


def test_a_wait_at_another_cta_is_refused():
    body = f"""
        {ONE} barrier.cluster.arrive; barrier.cluster.wait;
        mov.u32 %r0, %cluster_ctarank; xor.b32 %r0, %r0, 1; mapa.shared::cluster.u32 %r1, %r60, %r0;
        mbarrier.test_wait.parity.shared::cta.b64 %p0, [%r1], 0;
    """
    with pytest.raises(emulator.IllegalOperation, match=r"reaches \.shared::cta of rank"):
        kit.run(body, np.zeros(1, np.uint32), grid=2, cluster=2, module=MODULE)


@pytest.mark.parametrize("wait", ["try_wait", "test_wait"])
def test_a_wait_that_never_ends_says_what_is_missing(wait):
    body = ONE + WAIT.format(label="W", wait=f"{wait}.parity.shared.b64", token="0", more="")
    with pytest.raises(emulator.Deadlock, match="waits for 4 of 4 arrivals") as error:
        kit.run(body, np.zeros(1, np.uint32), module=MODULE)
    assert "warp 0: line" in str(error.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loop_of_tests_waits_for_what_it_tests(seed):
    """One warp copies when the other has long begun to test; no test is made in vain for long."""
    body = f"""
        {INIT.format(count=32)} setp.ge.u32 %p29, %x, 32; @!%p29 bra READ;
        mov.u32 %r10, 0;
        LONG: add.u32 %r10, %r10, 1; setp.lt.u32 %p28, %r10, 2000; @%p28 bra LONG;
        mov.u32 %r0, sh; shl.b32 %r1, %x, 2; add.u32 %r0, %r0, %r1; cvt.u64.u32 %d0, %r1;
        add.u64 %d0, %d0, %a0; cp.async.ca.shared.global [%r0], [%d0], 4;
        cp.async.mbarrier.arrive.noinc.shared.b64 [%r60]; cp.async.wait_all; bra END;
        READ: {WAIT.format(label="W", wait="test_wait.parity.shared.b64", token="0", more="")}
        mov.u32 %r0, sh; shl.b32 %r1, %x, 2; add.u32 %r0, %r0, %r1;
        ld.shared.b32 %r2, [%r0 + 128]; cvt.u64.u32 %d1, %r1; add.u64 %d1, %d1, %a1;
        st.global.b32 [%d1], %r2;
        END:
    """
    x, y = np.arange(64, dtype=np.uint32), np.zeros(32, np.uint32)
    report = kit.run(body, x, y, block=64, seed=seed, module=MODULE)
    assert (y == x[32:]).all()
    [tests] = [n for name, n in report.instructions.items() if "test_wait" in name]
    assert 1 <= tests < 20


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loop_of_tests_may_end_for_another_reason(seed):
    """It gives up after some tests in vain, and makes the arrivals itself."""
    body = f"""
        {INIT.format(count=32)} mov.u32 %r10, 0;
        AGAIN: add.u32 %r10, %r10, 1;
        mbarrier.test_wait.parity.shared.b64 %p28, [%r60], 0;
        setp.lt.u32 %p27, %r10, 100; @%p28 bra DONE; @%p27 bra AGAIN;
        mbarrier.arrive.shared.b64 _, [%r60]; bra AGAIN;
        DONE: st.global.b32 [%o], %r10;
    """
    assert (kit.values(body, seed=seed, module=MODULE) == 101).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_tests_of_two_barriers_in_turn_end_with_either(seed):
    body = f"""
        {INIT.format(count=32)} @%p31 mbarrier.init.shared::cta.b64 [%r60 + 8], 32; bar.sync 0;
        setp.ge.u32 %p29, %x, 32; @!%p29 bra READ;
        mbarrier.arrive.shared.b64 _, [%r60 + 8]; bra END;
        READ:
        mbarrier.test_wait.parity.shared.b64 %p28, [%r60], 0;
        mbarrier.test_wait.parity.shared.b64 %p27, [%r60 + 8], 0;
        or.pred %p28, %p28, %p27; @!%p28 bra READ;
        mad.wide.u32 %d1, %x, 4, %a0; st.global.b32 [%d1], %x;
        END:
    """
    y = np.zeros(32, np.uint32)
    kit.run(body, y, block=64, seed=seed, module=MODULE)
    assert (y == np.arange(32)).all()
