"""Vector clocks and shadows: conflicts, proxies, growth; against happens-before itself."""

from __future__ import annotations

import numpy as np
import pytest

from blockscale import emulator
from blockscale.emulator.machine.clocks import NEVER, Access, Clocks, Shadow, union
from tests.emulator import kit

WARPS = 4
A, B, C = 0, 1, 2  # agents


class World:
    """One cluster of four warps and a shadow of eight cells."""

    def __init__(self, cells=8):
        self.clocks = Clocks(1, WARPS, 1)
        self.shadow = Shadow(cells)

    def _args(self, agent):
        know = self.clocks.know[0, agent]
        return know, int(know[agent])

    def write(self, agent, cells, line=1):
        know, clock = self._args(agent)
        return self.shadow.write(np.atleast_1d(cells), Access(agent, know), clock, line)

    def read(self, agent, cells, line=1):
        know, clock = self._args(agent)
        return self.shadow.read(np.atleast_1d(cells), Access(agent, know), clock, line)

    def copy(self, agent, cells, line=1, write=False):
        """A bulk copy that `agent` issues: it sees what is fenced; return (conflict, its agent)."""
        know, fenced = self.clocks.both(0, agent)
        own, clock = self.clocks.claim(0, know)
        act = self.shadow.write if write else self.shadow.read
        cells = np.atleast_1d(cells)
        found = act(cells, Access(own, know, fenced=fenced, generic=WARPS), clock, line)
        return found, own

    def signal(self, source, target):
        """What `source` did is known to `target`: release, then acquire."""
        vector = self.clocks.both(0, source)
        self.clocks.release(0, source)
        self.clocks.join(0, target, vector)


# kinds of conflict ----------------------------------------------------------------------------
def test_each_kind_of_conflict_names_cell_agent_and_line():
    world = World()
    assert world.write(A, [2, 3], line=10) is None
    assert world.read(B, [1, 3], line=11) == ("write-read", 1, A, 10)
    assert world.write(B, 2, line=12) == ("write-write", 0, A, 10)
    world = World()
    assert world.read(A, 5, line=20) is None
    assert world.read(B, 5, line=21) is None  # two reads never conflict
    assert world.write(A, 5, line=22)[:3] == ("read-write", 0, B)


def test_an_agent_does_not_race_with_itself():
    world = World()
    for act in (world.write, world.read, world.write, world.write, world.read):
        assert act(A, [0, 1]) is None


def test_order_is_by_release_and_join():
    world = World()
    world.write(A, 0)
    world.signal(A, B)
    assert world.read(B, 0) is None
    assert world.write(B, 0) is None
    world.write(A, 1)  # after the release: not covered
    assert world.read(B, 1)[0] == "write-read"


def test_order_is_transitive():
    world = World()
    world.write(A, 0)
    world.signal(A, B)
    world.signal(B, C)
    assert world.write(C, 0) is None


def test_every_reader_must_be_waited_for():
    world = World()
    world.write(A, 0)
    world.signal(A, B)
    world.signal(A, C)
    assert world.read(B, 0, line=5) is None
    assert world.read(C, 0, line=6) is None
    world.signal(B, A)
    assert world.write(A, 0)[:3] == ("read-write", 0, C)
    world.signal(C, A)
    assert world.write(A, 0) is None


def test_look_names_what_is_not_ordered_before():
    world = World()
    know = world.clocks.know[0, C]
    assert world.shadow.look(np.arange(8), know) is None
    world.read(A, 4)
    assert world.shadow.look(np.arange(8), know)[:3] == ("read-write", 4, A)
    world.write(B, 6, line=3)
    assert world.shadow.look(np.arange(8), know) == ("write-write", 6, B, 3)
    world.signal(A, C)
    world.signal(B, C)
    assert world.shadow.look(np.arange(8), know) is None
    assert world.shadow.look(np.arange(0), know) is None


# proxies --------------------------------------------------------------------------------------
@pytest.mark.parametrize("writer", [0, 2, 3])
def test_a_copy_sees_fenced_writes_only(writer):
    """Ordered without a fence.proxy.async: "proxy"; not ordered: a race (PTX ISA 9.7.13)."""
    world = World()
    world.write(writer, 0, line=7)
    assert world.copy(B, 0)[0] == ("write-read", 0, writer, 7)
    world.signal(writer, B)
    assert world.copy(B, 0)[0] == ("proxy", 0, writer, 7)
    world.clocks.fence(0, B)
    assert world.copy(B, 0)[0] is None


def test_the_writers_fence_is_given_on_with_its_release():
    world = World()
    world.write(A, 0)
    world.clocks.fence(0, A)
    world.signal(A, B)
    assert world.copy(B, 0)[0] is None
    world.write(A, 1)  # after the fence
    world.signal(A, B)
    assert world.copy(B, 1)[0][0] == "proxy"


def test_copies_need_no_fence_between_each_other():
    world = World()
    found, agent = world.copy(A, 0, write=True)
    assert found is None
    assert world.read(A, 0)[:3] == ("write-read", 0, agent)  # nobody waited for it
    world.clocks.join(0, A, world.clocks.both(0, agent))  # its mbarrier
    assert world.read(A, 0) is None
    assert world.copy(A, 0, write=True)[0] is None


# clocks ---------------------------------------------------------------------------------------
def test_agents_of_copies_are_reused_when_waited_for_and_grow_otherwise():
    world = World()
    clocks = world.clocks
    first = world.copy(A, 0)[1]
    assert world.copy(A, 1)[1] == first + 1  # the first is in flight
    clocks.join(0, A, clocks.both(0, first))
    assert world.copy(A, 2)[1] == first
    room = clocks.agents
    know = clocks.both(0, B)[0]
    claimed = [clocks.claim(0, know)[0] for _ in range(40)]
    assert len(set(claimed)) == 40
    assert clocks.agents > room
    assert clocks.know[0, claimed[-1], claimed[-1]] == 1
    # vectors made before the growth still join, and a shadow reads them
    clocks.join(0, C, (know, know))
    far = claimed[-1]
    world.shadow.write(np.array([3]), Access(far, clocks.know[0, far]), 1, 9)
    assert world.shadow.read(np.array([3]), Access(C, know), 1, 1) == ("write-read", 0, far, 9)
    clocks.reset(0)
    assert clocks.claim(0, clocks.both(0, A)[0])[0] == first


def test_laws_of_vectors():
    """Join is a least upper bound; release and fence touch their own agent only."""
    rng = np.random.default_rng(2)
    clocks = Clocks(2, WARPS, 1)
    clocks.know[...] = rng.integers(0, 9, clocks.know.shape)
    clocks.fenced[...] = np.minimum(clocks.know, rng.integers(0, 9, clocks.know.shape))
    a, b = clocks.both(0, A), clocks.both(0, B)
    other = clocks.know[1].copy()
    clocks.join(0, A, b)
    for i, array in enumerate((clocks.know, clocks.fenced)):
        assert (array[0, A] == np.maximum(a[i], b[i])).all()
        assert (array[0, B] == b[i]).all()
    joined = clocks.both(0, A)
    clocks.join(0, A, b)
    assert (clocks.both(0, A)[0] == joined[0]).all()
    assert (union(a, b)[0] == joined[0]).all()
    assert (union(b, a)[1] == joined[1]).all()
    several = clocks.both(0, np.array([A, B, C]))
    assert (several[0] == clocks.know[0, [A, B, C]].max(0)).all()
    clocks.release(0, A)
    assert clocks.know[0, A, A] == joined[0][A] + 1
    clocks.fence(0, B)
    assert (clocks.fenced[0, B] == b[0]).all()
    assert clocks.know[0, B, B] == b[0][B] + 1
    assert (clocks.know[1] == other).all()


def test_union_of_vectors_of_different_lengths():
    short = (np.array([3, 1], np.int32), np.array([0, 1], np.int32))
    long = (np.array([1, 2, 5], np.int32), np.array([1, 0, 4], np.int32))
    for pair in ((short, long), (long, short)):
        know, fenced = union(*pair)
        assert list(know) == [3, 2, 5]
        assert list(fenced) == [1, 1, 4]
    copy = union(None, short)
    copy[0][0] = 9
    assert short[0][0] == 3


# shadows --------------------------------------------------------------------------------------
def test_rows_of_readers_are_made_when_needed():
    world = World()
    assert world.shadow.reads.agents == []
    rows = world.shadow.reads.row(np.array([3, 1, 3]))
    assert rows[0] == rows[2] != rows[1]
    assert sorted(world.shadow.reads.agents) == [1, 3]
    for agent in range(40):
        world.shadow.reads.row(agent)
    assert sorted(world.shadow.reads.agents) == list(range(40))
    assert world.shadow.reads.row(3) == rows[0]


def test_reset_forgets():
    world = World()
    world.write(A, [0, 5])
    world.read(B, [1, 6])
    world.shadow.mark(np.array([2, 7]), 3)
    world.shadow.reset(slice(0, 4))
    assert world.write(C, [0, 1]) is None
    assert list(world.shadow.dirty) == [True, True, False, False, False, True, False, False]
    assert world.write(C, 5)[0] == "write-write"
    assert world.write(C, 6)[0] == "read-write"
    assert list(world.shadow.swizzle[[2, 7]]) == [0, 3]
    assert world.shadow.w_agent[3] == NEVER


def test_a_write_removes_the_mark_of_a_tensor_load():
    world = World()
    assert world.shadow.swizzle is None
    world.write(A, 1)
    world.shadow.mark(np.array([1, 2]), 4)
    world.write(A, 1)
    assert list(world.shadow.swizzle[:4]) == [0, 0, 4, 0]


def test_agents_in_one_call_are_told_apart():
    """A gang's access: one row of knowledge per warp, cells with their agents."""
    world = World()
    world.write(A, [0, 1])
    world.signal(A, B)
    agents = np.array([B, B, C, C])
    rows = np.array([0, 0, 1, 1])
    know = world.clocks.know[0, [B, C]]
    found = world.shadow.read(np.array([0, 2, 3, 1]), Access(agents, know, rows), 1, 8)
    assert found == ("write-read", 3, A, 1)
    found = world.shadow.check_write(np.array([3, 0, 2, 1]), Access(agents, know, rows))
    assert found == ("write-write", 3, A, 1)
    found = world.shadow.check_write(np.array([0, 3]), Access(agents[1:3], know, rows[1:3]))
    assert found is None
    found = world.shadow.check_write(np.array([2, 3]), Access(agents[:2], know, rows[:2]))
    assert found[:3] == ("read-write", 1, C)


@pytest.mark.parametrize("seed", range(40))
def test_against_happens_before_itself(seed):
    """Random accesses and signals: the first conflict is that of the graph of all events."""
    rng = np.random.default_rng(seed)
    world, conflicts = World(3), 0
    past = [set() for _ in range(WARPS)]  # agent -> events that happened before
    accesses = []  # (event, agent, cell, write)
    for event in range(150):
        agent, other, cell = (int(rng.integers(n)) for n in (WARPS, WARPS, 3))
        if rng.random() < 0.6:
            world.signal(agent, other)
            past[other] |= past[agent]
            continue
        write = rng.random() < 0.4
        clash = [
            e
            for e, who, where, wrote in accesses
            if where == cell and who != agent and (write or wrote) and e not in past[agent]
        ]
        found = world.write(agent, cell) if write else world.read(agent, cell)
        assert (found is not None) == bool(clash)
        if clash:
            conflicts += 1
            break
        accesses.append((event, agent, cell, write))
        past[agent].add(event)


# through kernels ------------------------------------------------------------------------------
RACE = """
    .shared .align 4 .b8 tile[256];
    mov.u32 %r0, tile;  mad.lo.u32 %r1, %x, 4, %r0;
    {store}
    {between}
    xor.b32 %r2, %x, 32;  mad.lo.u32 %r2, %r2, 4, %r0;
    ld.shared.u32 %r3, [%r2];
    st.global.u32 [%o], %r3;
"""
STORE = "st.shared.u32 [%r1], %x;"


@pytest.mark.parametrize("seed", kit.SEEDS)
def test_a_race_is_found_however_the_warps_run(seed):
    out = kit.words(64)
    report = kit.run(RACE.format(store=STORE, between=""), out, block=64, seed=seed)
    (found,) = {h.kind for h in report.errors}
    assert found == "race"
    text = str(report.errors[0])
    assert "no barrier or mbarrier orders the two (PTX ISA 8.9); synchronise the warps" in text
    body = RACE.format(store=STORE, between="bar.sync 0;")
    assert (kit.values(body, block=64, count=64, seed=seed) == np.arange(64) ^ 32).all()


@pytest.mark.parametrize("seed", kit.SEEDS)
def test_warps_may_store_the_same_value(seed):
    """Compilers let every warp store replicated values; different values are a race."""
    store = (
        ".shared .b32 same; st.shared.u32 [%r1], %x; mov.u32 %r4, {0}; st.shared.u32 [same], %r4;"
    )
    body = RACE.format(store=store.format("9"), between="bar.sync 0;")
    got = kit.values(body, block=64, count=64, seed=seed)
    assert (got[:32] == np.arange(32, 64)).all()
    body = RACE.format(store=store.format("%x"), between="bar.sync 0;")
    report = kit.run(body, kit.words(64), block=64, seed=seed)
    assert "race" in {h.kind for h in report.errors}


def test_uninitialised_shared_memory_is_poison_and_a_warning():
    out = kit.words(64, 0)
    report = kit.run(RACE.format(store="", between=""), out, block=64)
    assert [h.kind for h in report.hazards] == ["uninitialised read"]
    assert not report.errors
    assert (out == kit.POISON).all()


def test_errors_name_the_hazards_before_them():
    body = RACE.format(store=STORE, between="") + "trap;"
    with pytest.raises(emulator.IllegalOperation, match=r"condition of its own.*before it: race"):
        kit.run(body, kit.words(64), block=64, seed=0)
