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
    return (kit.words(320),)


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


@pytest.mark.parametrize("op", ["red.shared.or.b32", "red.shared.max.u32"])
def test_an_atomic_that_changes_nothing_is_a_write(op):
    """Of one lane, whose cell is its own, and of many on one cell."""
    for lanes in ("@%p2 ", "@%p1 "):
        body = BEGIN + "setp.eq.u32 %p2, %x, 32;" + ZERO + SYNC + f"{lanes}{op} [%r1], 0;" + READ
        caught("race", body, words, block=64, module=MODULE)


def test_an_atomic_reads_what_nobody_has_written():
    body = BEGIN + "atom.shared.add.u32 %r2, [%r1], 1; st.global.u32 [%o], %r2;"
    caught("uninitialised read", body, words, block=64, module=MODULE)


TOLD = {  # store, load, what publishes, what takes over
    "release": ("st.release.cta.shared.u32", "ld.acquire.cta.shared.u32", "", ""),
    "fences": ("st.relaxed.cta.shared.u32", "ld.relaxed.cta.shared.u32",
               "fence.acq_rel.cta;", "fence.acq_rel.cta;"),
    "one way": ("st.relaxed.cta.shared.u32", "ld.acquire.cta.shared.u32", "fence.release.cta;", ""),
    "volatile": ("st.volatile.shared.u32", "ld.volatile.shared.u32",
                 "membar.cta;", "fence.acquire.cta;"),
    "nothing": ("st.relaxed.cta.shared.u32", "ld.acquire.cta.shared.u32", "", ""),
    "wrong way": ("st.relaxed.cta.shared.u32", "ld.acquire.cta.shared.u32",
                  "fence.acquire.cta;", ""),
    "not taken": ("st.release.cta.shared.u32", "ld.relaxed.cta.shared.u32", "",
                  "fence.release.cta;"),
    "proxy": ("st.relaxed.cta.shared.u32", "ld.acquire.cta.shared.u32", FENCE, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("flags", [1, 8])
def test_flags(name, flags):
    """Warp 0 sets one flag for each other warp; a relaxed one orders nothing without fences."""
    store, load, before, after = TOLD[name]
    body = BEGIN + f"""
    shl.b32 %r2, %x, 2; add.u32 %r3, %r1, %r2; setp.lt.u32 %p2, %x, {flags};
    @%p2 st.shared.u32 [%r3], 0; {SYNC}
    @%p1 bra C;
    @%p0 st.shared.u32 [%r1+256], 77; bar.warp.sync -1; {before}
    @%p2 {store} [%r3], 1; bra E;
C:  shr.u32 %r4, %x, 5; sub.u32 %r4, %r4, 1; shl.b32 %r4, %r4, 2; add.u32 %r4, %r1, %r4;
L:  {load} %r5, [%r4]; setp.eq.u32 %p4, %r5, 0; @%p4 bra L; {after}
    ld.shared.u32 %r7, [%r1+256]; st.global.u32 [%o], %r7;
E:"""  # fmt: skip
    options = {"block": 32 + 32 * flags, "module": MODULE}
    if name in ("release", "fences", "one way", "volatile"):
        silent(body, words, anything, seeds=range(3), **options)
    else:
        caught("race", body, words, seeds=range(3), **options)


@pytest.mark.parametrize(
    ("arrive", "wait", "right"),
    [
        ("mbarrier.arrive.release.cta", "acquire", True),
        ("fence.acq_rel.cta; @%p1 mbarrier.arrive.relaxed.cta", "acquire", True),
        ("mbarrier.arrive.relaxed.cta", "acquire", False),
        ("mbarrier.arrive.release.cta", "relaxed", False),
    ],
)
def test_relaxed_mbarriers(arrive, wait, right):
    body = (
        BEGIN
        + f"""
    @%p0 mbarrier.init.shared::cta.b64 [%r1], 32; {SYNC}
    @%p1 st.shared.u32 [%r1+64], 5; bar.warp.sync -1;
    @%p1 {arrive}.shared::cta.b64 _, [%r1];
L:  mbarrier.try_wait.parity.{wait}.cta.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra L;
    ld.shared.u32 %r2, [%r1+64]; st.global.u32 [%o], %r2;"""
    )
    if right:
        silent(body, words, anything, block=64, module=MODULE)
    else:
        caught("race", body, words, block=64, module=MODULE)


@pytest.mark.parametrize("init", [True, False], ids=["mbarriers", "data"])
def test_relaxed_arrivals_at_the_barrier_of_the_cluster(init):
    """They do for mbarriers behind fence.mbarrier_init, not for data."""
    peer = "xor.b32 %r3, %r3, 1; mapa.shared::cluster.u32 %r6, %r1, %r3;"
    meet = "barrier.cluster.arrive{how}.aligned; barrier.cluster.wait.aligned;"
    body = BEGIN + "mov.u32 %r3, %cluster_ctarank;" + peer
    if init:
        body += "@%p0 mbarrier.init.shared::cta.b64 [%r1], 1; fence.mbarrier_init.release.cluster;"
        body += meet + "@%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];"
    else:
        body += "@%p0 st.shared.u32 [%r1], %x;" + meet
        body += "ld.shared::cluster.u32 %r2, [%r6]; st.global.u32 [%o], %r2;"
    body += meet.format(how="")
    options = {"grid": 2, "cluster": 2, "module": MODULE}
    silent(body.format(how=""), words, anything, **options)
    if init:
        silent(body.format(how=".relaxed"), words, anything, **options)
        bare = body.replace("fence.mbarrier_init.release.cluster;", "").format(how=".relaxed")
        caught("mbarrier used before init", bare, words, **options)
    else:
        caught("race", body.format(how=".relaxed"), words, **options)


def test_warps_that_end_before_their_cluster_meets_again():
    """What they read of the other CTA was read before they met it, relaxed."""
    peer = "mov.u32 %r3, %cluster_ctarank; xor.b32 %r4, %r3, 1;"
    peer += "mapa.shared::cluster.u32 %r6, %r1, %r4;"
    meet = "barrier.cluster.arrive{how}.aligned; barrier.cluster.wait.aligned;"
    body = BEGIN + peer + "@%p0 st.shared.u32 [%r1], %x;" + meet.format(how="")
    body += "ld.shared::cluster.u32 %r2, [%r6]; st.global.u32 [%o], %r2;"
    end = "setp.eq.u32 %p2, %r3, 1; and.pred %p2, %p2, %p1; @%p2 bra E;"
    body += "A" + end + meet.format(how=".relaxed") + "E:"
    options = {"grid": 2, "cluster": 2, "block": 64, "module": MODULE}
    silent(body.replace("A", meet.format(how=".relaxed")), words, anything, **options)
    caught("race|has ended|exit", body.replace("A", ""), words, **options)
