"""Control flow: where lanes that part meet again, against the definition of post-dominators."""

from __future__ import annotations

import numpy as np
import pytest

from blockscale import emulator
from blockscale.emulator.launching.link import link
from blockscale.emulator.ptx.parser import parse
from blockscale.emulator.ptx.program import Unit, find_meeting_points, successors
from blockscale.emulator.ptx.syntax import Instr, Reg
from tests.emulator import kit

GUARD = (Reg("p"), False)


def graph(*rows):
    """Return units of (tail, targets..., "guarded"?) rows; the next unit is the next row."""
    units = []
    for i, (tail, *targets) in enumerate(rows):
        guarded = bool(targets) and targets[-1] == "@"
        instr = Instr(tail, (), GUARD if guarded else None, i) if tail != "next" else None
        goals = [t for t in targets if t != "@"]
        units.append(Unit(i, [], tail, instr, goals, i + 1))
    find_meeting_points(units)
    return units


def reference(units):
    """Return the immediate post-dominators by definition: all paths to the end go through them."""
    end = -1

    def reaches(start, without):
        todo, seen = [start], set()
        while todo:
            node = todo.pop()
            if node == without or node in seen:
                continue
            if node == end:
                return True
            seen.add(node)
            todo += successors(units[node])
        return False

    result = {}
    for unit in units:
        if unit.tail in ("bra", "brx"):
            n = unit.index
            mine = [m.index for m in units if m.index != n and not reaches(n, m.index)]
            mine = mine if reaches(n, None) else []
            nearest = [m for m in mine if all(m == o or not reaches(m, o) for o in mine)]
            result[n] = nearest[0] if nearest else None
    return result


GRAPHS = {
    "if": ([("bra", 2, "@"), ("next",), ("exit",)], {0: 2}),
    "if else": ([("bra", 3, "@"), ("next",), ("bra", 4), ("next",), ("exit",)], {0: 4, 2: 4}),
    "loop": ([("next",), ("bra", 1, "@"), ("exit",)], {1: 2}),
    "while": ([("bra", 3, "@"), ("next",), ("bra", 0), ("exit",)], {0: 3, 2: 0}),
    "nested": (
        [("bra", 4, "@"), ("bra", 3, "@"), ("next",), ("next",), ("exit",)],
        {0: 4, 1: 3},
    ),
    "loop with break": (
        [("next",), ("bra", 4, "@"), ("bra", 0, "@"), ("next",), ("exit",)],
        {1: 4, 2: 4},
    ),
    "early exit": ([("bra", 2, "@"), ("exit",), ("exit",)], {0: None}),
    "guarded exit": ([("bra", 2, "@"), ("exit", "@"), ("exit",)], {0: None}),
    "infinite loop": ([("bra", 2, "@"), ("bra", 1), ("exit",)], {0: 2, 1: None}),
    "never ends": (
        [
            ("bra", 0),
        ],
        {0: None},
    ),
    "table": (
        [("brx", 1, 3, 3), ("next",), ("bra", 4), ("next",), ("exit",)],
        {0: 4, 2: 4},
    ),
    "unreachable": ([("bra", 2), ("bra", 0, "@"), ("exit",)], {0: 2, 1: 2}),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_lanes_meet_at_the_immediate_post_dominator(name):
    rows, meets = GRAPHS[name]
    units = graph(*rows)
    assert {u.index: u.meet for u in units if u.tail in ("bra", "brx")} == meets
    assert reference(units) == meets


def test_meeting_points_of_random_graphs():
    """200 graphs of 2 to 12 units against the definition."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        count = int(rng.integers(2, 13))
        rows = []
        for _ in range(count - 1):
            targets = [int(t) for t in rng.integers(0, count, 2)]
            rows.append(
                [
                    ("next",),
                    ("bra", targets[0], "@"),
                    ("bra", targets[0]),
                    ("brx", *targets),
                    ("exit", "@"),
                    ("exit",),
                ][int(rng.choice(6, p=[0.3, 0.3, 0.15, 0.1, 0.1, 0.05]))]
            )
        units = graph(*rows, ("exit",))
        assert {u.index: u.meet for u in units if u.meet is not None} == {
            n: m for n, m in reference(units).items() if m is not None
        }


def test_simple_branches_do_not_part_warps():
    """Short forward regions are simple; those with loops or barriers and long ones are not."""

    def simple(*rows, size=1):
        units = graph(*rows)
        for unit in units:
            unit.instrs = [Instr("add.u32", (), None, 1)] * size
        find_meeting_points(units)
        return units[0].simple

    diamond = [("bra", 3, "@"), ("next",), ("bra", 4), ("next",), ("exit",)]
    assert simple(*diamond)
    assert simple(("bra", 2, "@"), ("next",), ("exit",), size=64)
    assert not simple(("bra", 2, "@"), ("next",), ("exit",), size=65)
    assert not simple(("bra", 2, "@"), ("stop",), ("exit",))
    assert not simple(("bra", 3, "@"), ("bra", 1, "@"), ("next",), ("exit",))
    assert not simple(("bra", 0, "@"), ("exit",))
    assert not simple(("bra", 2, "@"), ("exit",), ("exit",))


def test_link_checks_what_is_never_run():
    text = kit.ptx("ret; @%r1 bra L; L:", [kit.words(1)])
    with pytest.raises(emulator.PtxError, match="the guard %r1 is not a predicate"):
        link(parse(text), None)
