"""Gangs: fragments and tokens, splits and merges, the tempers of the engine."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from blockscale.emulator.machine.engine import TEMPERS, Engine, Op
from blockscale.emulator.machine.gangs import Gang, Machine
from blockscale.emulator.machine.grid import LANES, Cluster, Cta
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.report import Report
from tests.emulator import kit


# fragments and tokens -------------------------------------------------------------------------
def machine_of(warps):
    zero = np.zeros(warps, np.int64)
    names = ("cluster", "rank", "slot", "slot0")
    table = dict.fromkeys(names, zero) | {
        "agent": np.arange(warps),
        "number": np.arange(warps),
    }
    return SimpleNamespace(warp_table=table, gangs=[], progress=0)


def gang_of(warps=1, machine=None):
    gang = Gang(machine or machine_of(warps), np.arange(warps))
    counts = {"p": 2, "1": 1, "2": 2, "4": 3, "8": 2}
    gang.make_registers(counts, 64, np.random.default_rng(0))
    gang.fragments.append(Fragment(0, np.ones(gang.n, bool), None, full=True))
    return gang


def lanes_of(gang, *which):
    mask = np.zeros(gang.n, bool)
    mask[list(which)] = True
    return mask


def below(gang, count):
    return gang.index < count


def at(gang, unit):
    (fragment,) = [f for f in gang.fragments if f.at == unit]
    return fragment


def go(gang, fragment, unit):
    fragment.at = unit
    gang.arrive(fragment)


def test_nested_divergence_comes_together_inside_out():
    gang = gang_of()
    gang.part(gang.fragments[0], below(gang, 16), 10, 20, 30)
    gang.part(at(gang, 10), below(gang, 8), 11, 12, 15)
    assert sorted(f.at for f in gang.fragments) == [11, 12, 20]
    go(gang, at(gang, 11), 15)
    assert sorted(f.at for f in gang.fragments) == [12, 20]
    go(gang, at(gang, 12), 15)
    assert (at(gang, 15).mask == below(gang, 16)).all()
    assert not at(gang, 15).full
    go(gang, at(gang, 15), 30)
    assert [f.at for f in gang.fragments] == [20]
    go(gang, at(gang, 20), 30)
    assert len(gang.fragments) == 1
    assert at(gang, 30).full
    assert at(gang, 30).token is None


def test_a_branch_straight_to_the_meeting_point_waits_there():
    """A loop's exit: lanes come one by one, always to the same token."""
    gang = gang_of()
    for left in (24, 16, 8):
        gang.part(at(gang, 0), ~below(gang, left) & at(gang, 0).mask, 9, 0, 9)
        assert len(gang.fragments) == 1
        assert (at(gang, 0).mask == below(gang, left)).all()
        assert at(gang, 0).token.parent is None
    go(gang, at(gang, 0), 9)
    assert at(gang, 9).full


def test_lanes_that_leave_are_not_waited_for():
    gang = gang_of()
    gang.part(gang.fragments[0], below(gang, 16), 10, 20, 30)
    go(gang, at(gang, 20), 30)
    gang.part(at(gang, 10), below(gang, 4), 11, 12, 15)
    go(gang, at(gang, 12), 15)
    gang.leave(at(gang, 11), below(gang, 2))  # some lanes of a fragment
    assert (at(gang, 11).mask == lanes_of(gang, 2, 3)).all()
    gang.leave(at(gang, 11), lanes_of(gang, 2, 3))  # the last: the inner token is complete
    assert [f.at for f in gang.fragments] == [15]
    gang.leave(at(gang, 15), at(gang, 15).mask)
    assert (at(gang, 30).mask == ~below(gang, 16)).all()
    assert (gang.live == ~below(gang, 16)).all()


def test_the_last_lanes_of_an_inner_branch_release_the_outer_token():
    gang = gang_of()
    gang.part(gang.fragments[0], below(gang, 16), 10, 20, 30)
    go(gang, at(gang, 20), 30)
    gang.part(at(gang, 10), below(gang, 8), 11, 12, 15)
    gang.leave(at(gang, 12), at(gang, 12).mask)
    gang.leave(at(gang, 11), at(gang, 11).mask)
    assert [f.at for f in gang.fragments] == [30]
    assert (at(gang, 30).mask == ~below(gang, 16)).all()


def test_fragments_with_different_tokens_join():
    """Lanes that meet at a member mask (bar.warp) before their tokens let the tokens go."""
    gang = gang_of()
    gang.part(gang.fragments[0], below(gang, 16), 10, 20, 30)
    gang.part(at(gang, 10), below(gang, 8), 11, 12, 15)
    go(gang, at(gang, 12), 15)  # waits at the inner token
    one, other = at(gang, 11), at(gang, 20)
    one.at = other.at = 22
    gang.join(one, other)
    assert (one.mask == (below(gang, 8) | ~below(gang, 16))).all()
    assert one.token.unit == 30  # the token of both
    # nobody is on the way to 15 any more: who waits there goes on alone
    assert (at(gang, 15).mask == (below(gang, 16) & ~below(gang, 8))).all()
    go(gang, at(gang, 15), 30)
    assert gang.fragments == [one]
    go(gang, one, 30)
    assert at(gang, 30).full


def test_lanes_that_are_polled_for_are_let_go():
    """The winner of a spin lock leaves the loop first, and must not wait for the others there."""
    gang = gang_of()
    gang.part(gang.fragments[0], below(gang, 4), 0, 9, 9)
    assert [f.at for f in gang.fragments] == [0]
    gang.release(at(gang, 0))
    assert (at(gang, 9).mask == ~below(gang, 4)).all()
    gang.leave(at(gang, 9), at(gang, 9).mask)
    go(gang, at(gang, 0), 9)
    assert (at(gang, 9).mask == below(gang, 4)).all()
    assert at(gang, 9).token is None


def test_fragments_of_sibling_tokens_join():
    gang = gang_of()
    gang.part(gang.fragments[0], below(gang, 16), 10, 20, 30)
    gang.part(at(gang, 10), below(gang, 8), 11, 12, 15)
    gang.part(at(gang, 20), below(gang, 24), 21, 22, 25)
    one, other = at(gang, 11), at(gang, 21)
    one.at = other.at = 27
    gang.join(one, other)
    assert one.token.unit == 30
    go(gang, at(gang, 12), 15)
    go(gang, at(gang, 22), 25)
    assert sorted(f.at for f in gang.fragments) == [15, 25, 27]
    for unit in (15, 25, 27):
        go(gang, at(gang, unit), 30)
    assert at(gang, 30).full
    assert at(gang, 30).token is None


def test_select_and_merge_keep_the_state_of_every_lane():
    """Registers, predicates, local memory, carries: parted warps and joined ones have their own."""
    machine = machine_of(4)
    gang = gang_of(4, machine)
    rng = np.random.default_rng(5)
    names = ("p2", "r1", "r2", "r4", "r8", "local", "cc", "live")
    for name in names:
        array = getattr(gang, name)
        array[...] = rng.integers(0, 2 if array.dtype == bool else 250, array.shape)
    before = {name: getattr(gang, name).copy() for name in names}
    parts = [gang.select(np.array(which)) for which in ([2], [0, 3], [1])]
    assert [list(p.warps) for p in parts] == [[2], [0, 3], [1]]
    for part in parts:
        lanes = (part.warps[:, None] * LANES + np.arange(LANES)).reshape(-1)
        assert (part.u4[1] == before["r4"][1, lanes]).all()
        assert (part.p[0] == before["p2"][0, lanes]).all()
        assert (part.local == before["local"][lanes]).all()
        part.u4[1][:] += 1  # rows are views of the part's own registers
        assert (part.r4[1] == before["r4"][1, lanes] + 1).all()
    assert (gang.r4 == before["r4"]).all()
    machine.gangs = list(parts)
    Machine.merge(machine, parts)
    (merged,) = machine.gangs
    assert list(merged.warps) == [0, 1, 2, 3]
    before["r4"][1] += 1
    for name in names:
        assert (getattr(merged, name) == before[name]).all(), name
    assert (merged.f8[1].view(np.uint64) == before["r8"][1]).all()


def test_a_split_takes_its_part_of_the_tokens():
    gang = gang_of(2)
    gang.part(gang.fragments[0], below(gang, 40), 10, 20, 30)
    at(gang, 10).reason = "mbarrier 0x400"
    go(gang, at(gang, 20), 30)  # only lanes of warp 1
    first, second = gang.select(np.array([0])), gang.select(np.array([1]))
    assert at(first, 10).full
    assert at(first, 10).reason == "mbarrier 0x400"
    go(first, at(first, 10), 30)
    assert at(first, 30).full
    assert (at(second, 10).mask == (second.index < 8)).all()
    assert len(second.fragments) == 1
    go(second, at(second, 10), 30)
    assert at(second, 30).full


# kernels --------------------------------------------------------------------------------------
NESTED = """
    and.b32 %r1, %x, 1;  setp.eq.u32 %p1, %r1, 0;
    and.b32 %r2, %x, 2;  setp.eq.u32 %p2, %r2, 0;
    mov.u32 %r9, 0;
    @%p1 bra A;
    activemask.b32 %r10;
    bra.uni JOIN;
A:  @%p2 bra B;
    activemask.b32 %r10;
    bra.uni C;
B:  activemask.b32 %r10;
C:  activemask.b32 %r11;
    popc.b32 %r11, %r11;
    mov.u32 %r9, %r11;
JOIN:
    activemask.b32 %r12;
    setp.ne.u32 %p3, %r12, 0xffffffff;
    @%p3 trap;
    popc.b32 %r10, %r10;
    mad.lo.u32 %r10, %r9, 100, %r10;
    st.global.u32 [%o], %r10;
"""


def test_lanes_that_parted_run_together_again():
    """activemask in nested branches: 16, 8 + 8 joined to 16, and all 32 at the end."""
    want = np.where(np.arange(128) % 2, 16, 1600 + 8)
    for seed in range(5):
        assert (kit.values(NESTED, seed=seed, block=128, count=128) == want).all()


LOOPS = """
    .shared .align 4 .b8 tile[512];
    mov.u32 %r0, %x;  mov.u32 %r1, 0;  mov.u32 %r5, tile;
    mad.lo.u32 %r5, %x, 4, %r5;
LOOP:
    add.u32 %r1, %r1, %r0;
    and.b32 %r2, %r0, 3;
    setp.eq.u32 %p1, %r2, 3;
    @%p1 bra BREAK;
    shr.u32 %r0, %r0, 1;
    setp.ne.u32 %p2, %r0, 0;
    @%p2 bra LOOP;
BREAK:
    st.shared.u32 [%r5], %r1;
    bar.sync 0;
    xor.b32 %r6, %x, 37;
    mov.u32 %r5, tile;
    mad.lo.u32 %r5, %r6, 4, %r5;
    ld.shared.u32 %r7, [%r5];
    shfl.sync.bfly.b32 %r8, %r7, 5, 31, 0xffffffff;
    setp.gt.u32 %p3, %x, 99;
    @%p3 ret;
    bar.warp.sync 0xffffffff;
    add.u32 %r8, %r8, %r1;
    st.global.u32 [%o], %r8;
"""


def loops(x):
    total, value = 0, x
    while True:
        total += value
        if value & 3 == 3:
            return total
        value >>= 1
        if not value:
            return total


def test_every_way_to_gang_the_warps_gives_the_same():
    """Loops with breaks, early exits, barriers and shuffles: 12 seeds, one result."""
    body = LOOPS.replace("bar.warp.sync 0xffffffff;", "")
    want = np.array([loops((x ^ 5) ^ 37) + loops(x) for x in range(128)], np.uint32)
    want[100:] = kit.POISON
    counts = set()
    for seed in range(12):
        out = kit.words(128)
        report = kit.run(body, out, block=128, seed=seed)
        assert not report.hazards
        assert (out == want).all()
        counts.add(report.instructions["st.shared.u32"])
    assert counts == {4}


def test_instructions_are_counted_once_per_warp_however_they_part():
    """Branches and exits too: a split retries a branch, but does not count it again."""
    body = """
        setp.lt.u32 %p1, %x, 64;
        @%p1 bra A;
        bar.sync 1, 64;
        bra.uni B;
    A:  bar.sync 2, 64;
    B:  st.global.u32 [%o], %x;"""
    for seed in range(6):
        report = kit.run(body, kit.words(128), block=128, seed=seed)
        ran = report.instructions
        assert [ran[i] for i in ("bra", "bra.uni", "bar.sync", "ret", "st.global.u32")] == [
            4, 2, 4, 4, 4,
        ]  # fmt: skip


# engine ---------------------------------------------------------------------------------------
def make_engine(temper):
    for seed in range(100):
        rng = np.random.default_rng(seed)
        machine = SimpleNamespace(seed=seed, rng=rng, report=Report(), progress=0)
        engine = Engine(machine)
        if engine.temper == temper:
            return engine
    raise AssertionError(temper)


@pytest.mark.parametrize("temper", TEMPERS)
def test_tempers_keep_the_order_of_each_stream(temper):
    engine, happened = make_engine(temper), []
    cta = Cta(0, 0, (0, 0, 0), Cluster(0, 0, (0, 0, 0)))
    ops = []
    for i in range(30):
        op = Op("bulk", cta, i, lambda op: happened.append((op.line % 3, op.line)))
        ops.append(engine.issue(i % 3, op, float(i)))
        assert op.done == (temper == "eager") or temper == "random"
        engine.maybe()
    if temper == "lazy":
        assert not happened
        assert engine.busy(cta.cluster)
        engine.finish(ops[7], 1)  # and what comes before it in its stream
        assert happened == [(1, 1), (1, 4), (1, 7)]
    while engine.pending:
        engine.run_one()
    assert len(happened) == 30
    assert not engine.busy(cta.cluster)
    for stream in range(3):
        assert [line for s, line in happened if s == stream] == list(range(stream, 30, 3))
