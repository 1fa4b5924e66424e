"""Divergence: lanes that part, meet and wait for each other; tables, calls, early ends."""

from __future__ import annotations

import numpy as np
import pytest

from blockscale import emulator
from tests.emulator import kit
from tests.emulator.kit import SEEDS

TURNS = [(0, 1), (1, 0), (31, 0), (0, 33), (40, 3)]


@pytest.mark.parametrize(("waits", "sets"), TURNS)
@pytest.mark.parametrize("kind", [("volatile", "volatile"), ("acquire.gpu", "release.gpu")])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_lane_polls_for_another_lane(waits, sets, kind, seed):
    """PTX ISA 3.1: threads are scheduled independently, also those of one warp."""
    body = f"""
        setp.eq.u32 %p1, %x, {waits}; @%p1 bra LOOP;
        setp.ne.u32 %p3, %x, {sets}; @%p3 bra END;
        st.{kind[1]}.global.u32 [%a0], 1; bra.uni END;
    LOOP:
        ld.{kind[0]}.global.u32 %r1, [%a0]; setp.eq.u32 %p2, %r1, 0; @%p2 bra LOOP;
        st.global.u32 [%o], 7;
    END:
    """
    flag = np.zeros(1, np.uint32)
    out = kit.values(body, flag, block=64, count=64, seed=seed, limit=100_000)
    assert out[waits] == 7
    assert flag[0] == 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("place", ["global", "shared"])
def test_a_spin_lock_inside_a_warp(seed, place):
    """Each thread takes the lock with atom.cas and counts without an atomic operation."""
    body = f"""
        setp.ne.u32 %p4, %x, 0; mov.u64 %d0, {"sh" if place == "shared" else "%a0"};
        @!%p4 st.{place}.u32 [%d0], 0;
        bar.sync 0;
    AGAIN:
        atom.acquire.gpu.{place}.cas.b32 %r1, [%d0], 0, 1;
        setp.ne.u32 %p0, %r1, 0; @%p0 bra AGAIN;
        ld.volatile.global.u32 %r2, [%a0+4]; add.u32 %r2, %r2, 1;
        st.volatile.global.u32 [%a0+4], %r2;
        st.global.b32 [%o], %r2;
        atom.release.gpu.{place}.exch.b32 %r3, [%d0], 0;
    """
    state, n = np.zeros(2, np.uint32), 36 if (seed, place) == (0, "global") else 12
    out = kit.values(body, state, block=n, count=n, seed=seed, module=".shared .b32 sh;",
                     limit=100_000)  # fmt: skip
    assert state.tolist() == [0, n]
    assert (np.sort(out) == np.arange(1, n + 1)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chain_through_shared_memory(seed):
    """Lane i waits for lane i - 1: thirty-two turns inside one warp, all divergent."""
    body = """
        mov.u64 %d0, sh; setp.eq.u32 %p0, %x, 0; @%p0 st.volatile.shared.u32 [sh], 0;
        bar.warp.sync -1;
    LOOP:
        ld.volatile.shared.u32 %r0, [sh]; setp.ne.u32 %p1, %r0, %x; @%p1 bra LOOP;
        add.u32 %r1, %r0, 1; st.volatile.shared.u32 [sh], %r1;
        bar.warp.sync -1;
        ld.volatile.shared.u32 %r2, [sh]; st.global.b32 [%o], %r2;
    """
    out = kit.values(body, module=".shared .b32 sh;", seed=seed, limit=100_000)
    assert (out == 32).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_loops_of_different_lengths(seed):
    """Collatz: trip counts differ between lanes and between warps; nested ifs inside the loop."""
    body = """
        add.u32 %r0, %t, 1; mov.u32 %r1, 0;
    LOOP:
        setp.eq.u32 %p0, %r0, 1; @%p0 bra DONE;
        and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra EVEN;
        mad.lo.u32 %r0, %r0, 3, 1;
        and.b32 %r3, %r0, 2; setp.eq.u32 %p2, %r3, 0; @%p2 bra NEXT;
        add.u32 %r1, %r1, 1000; bra.uni NEXT;
    EVEN:
        shr.u32 %r0, %r0, 1;
    NEXT:
        add.u32 %r1, %r1, 1; bra.uni LOOP;
    DONE:
        st.global.b32 [%o], %r1;
    """
    want = []
    for n in range(1, 193):
        steps = 0
        while n != 1:
            if n % 2:
                n = 3 * n + 1
                steps += 1000 * (n >> 1 & 1)
            else:
                n //= 2
            steps += 1
        want.append(steps)
    assert (kit.values(body, block=96, grid=2, count=192, seed=seed) == want).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_early_returns(seed):
    """Lanes leave at three places; the others still meet at a barrier and shuffle."""
    body = """
        rem.u32 %r0, %x, 5; setp.eq.u32 %p0, %r0, 1;
        st.global.b32 [%o], 1;
        @%p0 exit;
        setp.eq.u32 %p1, %r0, 2; @%p1 bra LEAVE;
        st.global.b32 [%o], 3; bra.uni GO;
    LEAVE:
        st.global.b32 [%o], 2; ret;
    GO:
        bar.sync 0; activemask.b32 %r1; popc.b32 %r1, %r1; add.u32 %r1, %r1, 100;
        st.global.b32 [%o], %r1;
    """
    out = kit.values(body, block=70, count=70, seed=seed)
    left = np.arange(70) % 5
    alive = [sum(1 for t in range(w, min(w + 32, 70)) if t % 5 not in (1, 2)) for w in (0, 32, 64)]
    stay = 100 + np.repeat(alive, 32)[:70]
    assert (out == np.where(left == 1, 1, np.where(left == 2, 2, stay))).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("by", [1, 32])
def test_branch_tables(seed, by):
    """brx.idx by lane and by warp, with two entries of one label (PTX ISA 9.7.12.3)."""
    body = f"""
        div.u32 %r0, %x, {by}; and.b32 %r0, %r0, 3; mov.u32 %r1, 0;
    table: .branchtargets A, B, C, A;
        brx.idx %r0, table;
    A:  add.u32 %r1, %r1, 1; bra.uni END;
    B:  add.u32 %r1, %r1, 10;
    C:  add.u32 %r1, %r1, 100;
    END:
        st.global.b32 [%o], %r1;
    """
    out = kit.values(body, block=128, count=128, seed=seed)
    assert (out == np.array([1, 110, 100, 1])[np.arange(128) // by % 4]).all()


CALLS = """
.func (.param .b32 result) square(.param .b32 x, .param .align 8 .b8 pair[16])
{
    .reg .b32 %r<8>; .reg .pred %p<2>;
    ld.param.b32 %r1, [x]; ld.param.b32 %r2, [pair+8];
    setp.lt.u32 %p1, %r1, 10; @%p1 bra SMALL;
    mul.lo.u32 %r3, %r1, %r1; add.u32 %r3, %r3, %r2; st.param.b32 [result], %r3; ret;
SMALL:
    st.param.b32 [result], %r2; ret;
}
.func (.reg .b32 %out) twice(.reg .b32 %in)
{
    add.u32 %out, %in, %in; ret;
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_with_parameters_in_memory_and_in_registers(seed):
    body = """
        setp.lt.u32 %p3, %x, 40; @!%p3 bra REST;
        {
            .param .b32 first; .param .align 8 .b8 second[16]; .param .b32 answer;
            st.param.b32 [first], %x; mov.b64 %d0, 5; st.param.v2.b64 [second], {%d0, %d0};
            call.uni (answer), square, (first, second);
            ld.param.b32 %r5, [answer];
        }
        call (%r6), twice, (%r5);
        st.global.b32 [%o], %r6; ret;
    REST:
        st.global.b32 [%o], 9;
    """
    out = kit.values(body, block=64, count=64, module=CALLS, seed=seed)
    t = np.arange(64)
    assert (out == np.where(t < 10, 10, np.where(t < 40, 2 * (t * t + 5), 9))).all()


def test_guards_on_everything():
    """Predicated instructions of every kind leave the other lanes' registers alone."""
    body = """
        and.b32 %r0, %x, 1; setp.ne.u32 %p0, %r0, 0; mov.u32 %r1, 5; mov.u64 %d1, 6;
        @%p0 ld.global.u32 %r1, [%a0]; @!%p0 atom.global.add.u32 %r1, [%a0+4], 0;
        @%p0 mov.u64 %d1, 9; @!%p0 setp.eq.u32 %p1, %r0, 0; @%p0 setp.eq.u32 %p1, %r0, 0;
        @%p1 add.u32 %r1, %r1, 1000; cvt.u32.u64 %r2, %d1; add.u32 %r1, %r1, %r2;
        st.global.b32 [%o], %r1;
    """
    out = kit.values(body, np.array([100, 200], np.uint32))
    assert (out == np.where(np.arange(32) % 2, 109, 1206)).all()


def test_a_livelock_ends_with_every_warp_named():
    body = "L: ld.volatile.global.u32 %r0, [%a0]; setp.eq.u32 %p0, %r0, 0; @%p0 bra L;"
    with pytest.raises(emulator.InstructionLimit, match="endless loop") as error:
        kit.run(body, np.zeros(1, np.uint32), block=70, limit=300_000)
    for warp in range(3):
        assert f"warp {warp}" in str(error.value)


def test_a_deadlock_names_barrier_line_and_warp():
    body = """
        setp.lt.u32 %p0, %x, 32; @%p0 bra ONE;
        bar.sync 2, 96; bra.uni END;
    ONE:
        bar.sync 3, 96;
    END:
    """
    with pytest.raises(emulator.Deadlock) as error:
        kit.run(body, np.zeros(1, np.uint32), block=96)
    text = str(error.value)
    assert "warp 0: line" in text and "barrier 3" in text  # noqa: PT018
    assert "warp 1: line" in text and "warp 2: line" in text and "barrier 2" in text  # noqa: PT018
