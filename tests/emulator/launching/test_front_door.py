"""Launches that a driver refuses, and kernels that do not end."""

from __future__ import annotations

import io
import sys
import time

import numpy as np
import pytest

from blockscale import emulator
from blockscale.emulator.launching import ticker
from blockscale.emulator.machine import diagnose, state
from tests.emulator import kit


# launches -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("directives", "launch", "sentence"),
    [
        ("", {"block": 1025}, r"kernel: block \(1025, 1, 1\) has 1025 threads; at most 1024"),
        ("", {"block": 0}, r"block \(0, 1, 1\), .*each dimension is at least 1"),
        ("", {"grid": (1, 0)}, r"grid \(1, 0, 1\), .*each dimension is at least 1"),
        ("", {"cluster": (0, 1, 1)}, "each dimension is at least 1"),
        (
            "",
            {"grid": (1, 1, 1, 2)},
            r"\(1, 1, 1, 2\) has 4 dimensions; a launch has at most three",
        ),
        (".reqntid 64", {"block": 32}, r"is not the kernel's .reqntid \(64, 1, 1\); launch with"),
        (".maxntid 16, 2", {"block": 64}, r"64 threads, more than its .maxntid \(16, 2, 1\)"),
        ("", {"grid": 3, "cluster": 2}, r"grid \(3, 1, 1\) is not a multiple of the cluster"),
        (".reqnctapercluster 2", {"grid": 3}, r"not a multiple of the cluster \(2, 1, 1\)"),
        (".reqnctapercluster 2", {"grid": 4, "cluster": 4}, r"not the kernel's .reqnctapercluster"),
        ("", {"grid": 32, "cluster": 32}, r"more than 16 CTAs"),
        (
            "",
            {"smem": 1 << 20},
            r"1048576 bytes of shared memory \(1048576 dynamic\) are more than",
        ),
        ("", {"smem": -1}, "-1 bytes of shared memory"),
        ("", {"smem": 1.0}, r"dynamic_smem is 1.0; pass an integer"),
        ("", {"grid": 1.5}, r"grid is 1.5; pass an integer"),
        ("", {"block": (32, 1.0)}, r"block is 1.0; pass an integer"),
        ("", {"cluster": "2"}, r"cluster is '2'; pass an integer"),
        ("", {"seed": None}, r"seed is None; pass an integer"),
        ("", {"grid": (1, 65536)}, r"a grid has at most \(2147483647, 65535, 65535\) CTAs"),
        ("", {"grid": 2**31}, "a grid has at most"),
        ("", {"block": (1, 1, 65)}, "a block 64 threads along z"),
    ],
)
def test_launches_that_a_driver_refuses(directives, launch, sentence):
    with pytest.raises(emulator.EmulationError, match=sentence):
        kit.run("", kit.words(32), directives=directives, **launch)


def test_a_kernels_own_cluster_is_used():
    report = kit.run("", kit.words(32), directives=".reqnctapercluster 2, 1, 1", grid=4)
    assert report.cluster == (2, 1, 1)


# loops that do not end ------------------------------------------------------------------------
def test_max_instructions_stops_an_endless_loop_which_is_no_deadlock():
    with pytest.raises(
        emulator.InstructionLimit,
        match=r"gave up after max_instructions = 10000 warp-instr.*: an endless loop; raise it",
    ) as caught:
        kit.run("L: add.u32 %r1, %r1, 1; bra L;", kit.words(32), limit=10_000)
    assert "deadlock" not in str(caught.value)
    assert "warp 0: line" in str(caught.value)
    assert caught.value.report.warp_instructions >= 10_000


class Terminal(io.StringIO):
    """What stderr is when somebody looks."""

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "progress", "shown"),
    [(Terminal, None, True), (Terminal, False, False), (io.StringIO, None, False)]
    + [(io.StringIO, True, True)],
)
def test_a_long_launch_says_how_far_it_is(stream, progress, shown, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    for name in ("PATIENCE", "TERMINAL", "FILE"):
        monkeypatch.setattr(ticker, name, 0.0)
    out = kit.words(32)
    text = kit.ptx("st.global.u32 [%o], %t;", [out])
    emulator.launch(text, block=32, args=[out], progress=progress)
    said = sys.stderr.getvalue()
    assert ("kernel: 0 s, " in said) == shown
    assert "0 of 1 clusters have left" in said or not shown
    assert not shown or said.endswith("\n" if stream is io.StringIO else " \r")


def test_a_short_launch_says_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    kit.run("", kit.words(32))
    assert not sys.stderr.getvalue()


@pytest.mark.parametrize(
    "poll", ["ld.volatile.global.u32 %r1, [%a0]", "atom.cas.b32 %r1, [%a0], 1, 2"]
)
def test_a_polling_loop_is_called_a_livelock(poll, monkeypatch):
    monkeypatch.setattr(diagnose, "STALE", diagnose.STALE // 8)
    began = time.perf_counter()
    with pytest.raises(emulator.Deadlock, match="only poll, and nothing changes") as caught:
        kit.run(f"L: {poll}; setp.eq.u32 %p1, %r1, 0; @%p1 bra L;", np.zeros(1, np.uint32))
    assert time.perf_counter() - began < 15
    assert "warp 0: line" in str(caught.value)


def test_long_work_is_no_livelock(monkeypatch):
    """A loop that reads nothing, and one that reads on, may take their time."""
    monkeypatch.setattr(state, "LOOK", 200)
    monkeypatch.setattr(diagnose, "STALE", 1000)
    count = """
        mov.u32 %r1, 0;
    L:  add.u32 %r1, %r1, 1;  setp.lt.u32 %p1, %r1, 2000;  @%p1 bra L;
        st.global.u32 [%o], %r1;"""
    assert (kit.values(count) == 2000).all()
    data = np.arange(2000, dtype=np.uint32)
    read = """
        mov.u32 %r1, 0;  mov.u32 %r2, 0;  mov.b64 %d1, %a0;
    L:  ld.global.u32 %r3, [%d1];  add.u32 %r2, %r2, %r3;
        add.u64 %d1, %d1, 4;  add.u32 %r1, %r1, 1;  setp.lt.u32 %p1, %r1, 2000;  @%p1 bra L;
        st.global.u32 [%o], %r2;"""
    assert (kit.values(read, data) == data.sum()).all()


@pytest.mark.parametrize("seed", range(6))
def test_a_flag_that_another_warp_sets_ends_the_polling(seed):
    body = """
        setp.ge.u32 %p1, %x, 32;
        @%p1 bra WAIT;
        mov.u32 %r2, 7;
        st.global.u32 [%a1], %r2;
        st.release.gpu.global.u32 [%a0], %r2;
        bra.uni DONE;
    WAIT:
        ld.acquire.gpu.global.u32 %r1, [%a0];
        setp.eq.u32 %p2, %r1, 0;
        @%p2 bra WAIT;
        ld.global.u32 %r2, [%a1];
    DONE:
        st.global.u32 [%o], %r2;"""
    flag, data, out = np.zeros(1, np.uint32), np.zeros(1, np.uint32), kit.words(64)
    kit.run(body, flag, data, out, block=64, seed=seed)
    assert (out == 7).all()


def test_what_is_wrong_with_an_instruction_is_said_with_its_line():
    """Errors that a handler raises when it is built have their place too."""
    body = ".shared .align 16 .b8 b[64]; mov.u32 %r2, b; cp.async.cg.shared.global [%r2], [%a0], 8;"
    with pytest.raises(emulator.EmulationError, match=r"kernel kernel, line \d+, cp\.async\.cg"):
        kit.run(body, kit.words(32))


def test_a_deadlock_names_every_warp():
    body = "setp.lt.u32 %p1, %x, 32; @%p1 bra A; bar.sync 1, 64; A: bar.sync 2, 96;"
    with pytest.raises(emulator.Deadlock) as caught:
        kit.run(body, kit.words(64), block=64)
    text = str(caught.value)
    assert "no warp can go on and nothing asynchronous is pending" in text
    assert text.count("CTA (0, 0, 0) warp") == 2
    assert "barrier 1" in text
    assert "barrier 2" in text
