"""Order through memory: accesses that synchronise, what they race with, what they publish."""

from __future__ import annotations

import pytest

from tests.emulator import kit
from tests.emulator.kit.async_ptx import FENCE, LEADER, SYNC, caught, silent

pytestmark = pytest.mark.usefixtures("seeds")

MODULE = ".shared .align 1024 .b8 sm[4096];"
BEGIN = f"mov.u32 %r1, sm; setp.ge.u32 %p1, %x, 32; {LEADER}"  # %p1: not warp 0
ZERO = "@%p0 st.shared.u32 [%r1], 0;"
READ = "ld.shared.u32 %r2, [%r1]; st.global.u32 [%o], %r2;"
STRONG = [
    "red.shared.add.u32 [%r1], 1;",
    "atom.acq_rel.cta.shared.add.u32 %r9, [%r1], 1;",
    "st.volatile.shared.u32 [%r1], 1;",
    "st.relaxed.cta.shared.u32 [%r1], 1;",
    "st.release.cta.shared.u32 [%r1], 1;",
]


def words():
    return (kit.words(256),)


def anything(_):
    pass


@pytest.mark.parametrize("access", STRONG)
def test_weak_accesses_race_with_strong_ones(access):
    strong = f"@%p1 {access}"
    order = BEGIN + ZERO + "A" + strong + "B" + READ
    ordered = order.replace("A", SYNC).replace("B", SYNC)
    silent(ordered, words, anything, block=96, module=MODULE)
    caught("race", order.replace("A", SYNC).replace("B", ""), words, block=96, module=MODULE)
    caught("race", order.replace("A", "").replace("B", SYNC), words, block=96, module=MODULE)


def test_strong_reads_race_with_weak_writes():
    look = "@%p1 ld.relaxed.cta.shared.u32 %r3, [%r1];"
    body = BEGIN + ZERO + SYNC + look + "A" + "@%p0 st.shared.u32 [%r1], 5;" + SYNC + READ
    silent(body.replace("A", SYNC), words, anything, block=64, module=MODULE)
    caught("race.*(overwrites|reads)", body.replace("A", ""), words, block=64, module=MODULE)
    body = body.replace("st.shared.u32 [%r1], 5", "st.relaxed.cta.shared.u32 [%r1], 5")
    silent(body.replace("A", ""), words, anything, block=64, module=MODULE)


@pytest.mark.parametrize("access", STRONG)
def test_strong_writes_and_the_async_proxy(access):
    """A bulk store reads what they wrote: behind a fence.proxy.async and a barrier."""
    body = BEGIN + "add.u32 %r9, %r1, 512; @%p0 st.bulk.weak.shared::cta [%r1], 128, 0;" + SYNC
    body += f"@%p1 {access} {FENCE}" + SYNC
    body += """@%p0 cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r1], 128;
    @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;"""
    silent(body, words, anything, block=64, module=MODULE)
    caught("missing proxy fence", body.replace(FENCE, ""), words, block=64, module=MODULE)
    late = body.replace(f"{FENCE}{SYNC}", FENCE)
    caught("race|unwaited bulk", late, words, block=64, module=MODULE)


def test_an_atomic_reads_what_nobody_has_written():
    body = BEGIN + "atom.shared.add.u32 %r2, [%r1], 1; st.global.u32 [%o], %r2;"
    caught("uninitialised read", body, words, block=64, module=MODULE)
