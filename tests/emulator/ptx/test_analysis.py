"""Registers of tcgen05.ld and accumulators of wgmma that some path reads before the wait."""

from __future__ import annotations

import pytest

from blockscale.emulator.launching.link import link
from blockscale.emulator.ptx.analysis import early_reads, registers, sources
from blockscale.emulator.ptx.parser import parse

LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r0];"
WAIT = "tcgen05.wait::ld.sync.aligned;"
USE = "add.u32 %r3, %r1, 1;"
WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2}, %d0, %d1, 1, 1, 1, 0, 0;"
WAIT_GROUP = "wgmma.wait_group.sync.aligned 0;"


def program(body):
    target = "sm_90a" if "wgmma" in body else "sm_100a"
    head = f".version 8.6\n.target {target}\n.address_size 64\n.entry k() {{\n"
    regs = ".reg .pred %p<4>; .reg .b32 %r<8>; .reg .f32 %f<8>; .reg .b64 %d<4>;\n"
    return link(parse(f"{head}{regs}{body}\nret;\n}}"), None)


def reads(body):
    """Return (register, line of the read, line of the load); lines count the body's from 1."""
    found = early_reads(program(body).units)
    return sorted((r.register, r.instr.line - 5, r.load_line - 5) for r in found)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{LOAD}\n{WAIT}\n{USE}", []),
        (f"{LOAD}\n{USE}\n{WAIT}", [("%r1", 2, 1)]),
        (f"{LOAD}\nst.global.b32 [%d0], %r2;\n{WAIT}", [("%r2", 2, 1)]),
        (f"{LOAD}\nst.global.v2.b32 [%d0], {{%r3, %r2}};\n{WAIT}", [("%r2", 2, 1)]),
        (f"{LOAD}\nld.global.b32 %r4, [%d0];\n{WAIT}", []),
        (f"{LOAD}\nmov.b64 %d0, {{%r1, %r3}};", [("%r1", 2, 1)]),
        (f"{LOAD}\nmov.b32 %r4, %r5;", []),
        # each instruction once, the first register that it reads too early
        (f"{LOAD}\nadd.u32 %r3, %r1, %r2;", [("%r1", 2, 1)]),
        # two loads, one wait
        (f"{LOAD}\n{LOAD.replace('%r1, %r2', '%r4, %r5')}\n{WAIT}\n{USE}", []),
        (f"{LOAD}\n{WAIT}\n{LOAD}\n{USE}", [("%r1", 4, 3)]),
    ],
)
def test_straight_lines(body, expected):
    assert reads(body) == expected


def test_a_branch_around_the_wait():
    """One path suffices."""
    body = f"{LOAD}\n@%p1 bra L;\n{WAIT}\nL:\n{USE}"
    assert reads(body) == [("%r1", 5, 1)]
    body = f"{LOAD}\n@%p1 bra L;\n{WAIT}\nbra M;\nL: {WAIT}\nM:\n{USE}"
    assert reads(body) == []


def test_a_loop_reads_what_its_last_turn_loaded():
    body = f"L:\n{USE}\n{LOAD}\n@%p1 bra L;"
    assert reads(body) == [("%r1", 2, 3)]
    assert reads(f"L:\n{USE}\n{LOAD}\n{WAIT}\n@%p1 bra L;") == []
    # the wait of the loop's entry does not help the second turn
    assert reads(f"{LOAD}\n{WAIT}\nL:\n{USE}\n{LOAD}\n@%p1 bra L;\n{WAIT}") == [("%r1", 4, 5)]


def test_a_table_of_branches():
    body = f"{LOAD}\nbrx.idx %r4, T;\nT: .branchtargets A, B;\nA: {WAIT}\nB:\n{USE}"
    assert reads(body) == [("%r1", 6, 1)]


def test_a_guard_that_is_loaded_too_late_counts_as_a_read():
    body = f"{LOAD}\nsetp.eq.u32 %p1, %r1, 0;\n{WAIT}"
    assert reads(body) == [("%r1", 2, 1)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{WGMMA}\n{WAIT_GROUP}\nadd.f32 %f3, %f1, %f2;", []),
        (f"{WGMMA}\nadd.f32 %f3, %f2, %f3;\n{WAIT_GROUP}", [("%f2", 2, 1)]),
        (f"{WGMMA}\n{WGMMA}\n{WAIT_GROUP}", []),  # in order with each other
        (f"L:\n{WGMMA}\n@%p1 bra L;\n{WAIT_GROUP}\nadd.f32 %f3, %f1, %f2;", []),
    ],
)
def test_accumulators_of_wgmma(body, expected):
    assert reads(body) == expected


def test_programs_without_such_loads_are_not_searched():
    assert reads("add.u32 %r3, %r1, 1;") == []


def test_sources_of_instructions():
    """Stores read their first operand, calls of results do not; addresses and guards are read."""
    body = """
        @%p1 st.global.v2.b32 [%d0+4], {%r1, %r2};
        add.u32 %r3, %r4, %r5;
        ld.global.b32 %r3, [%d1];
        setp.ne.and.b32 %p2|%p3, %r1, %r2, !%p0;"""
    first = program(body).units[0].instrs
    assert [sorted(sources(i)) for i in first] == [
        ["%d0", "%p1", "%r1", "%r2"],
        ["%r4", "%r5"],
        ["%d1"],
        ["%p0", "%r1", "%r2"],
    ]
    assert list(registers(first[3].operands[0])) == ["%p2", "%p3"]
