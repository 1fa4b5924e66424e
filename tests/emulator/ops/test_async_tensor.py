"""TMA tensor copies through real PTX: every rank, clusters, pairs, maps in memory, hazards."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from blockscale import emulator
from tests.emulator import kit
from tests.emulator.kit.async_ptx import (
    CLUSTER_SYNC,
    FENCE,
    LEADER,
    SYNC,
    caught,
    init,
    refused,
    silent,
    wait,
)

pytestmark = pytest.mark.usefixtures("seeds")

RNG = np.random.default_rng(11)
HEAD = """
    .shared .align 1024 .b8 buf[4096];
    .shared .align 8 .b64 bar;
    mov.u32 %r0, buf;
    mov.u32 %r9, bar;
    shl.b32 %r1, %x, 2;
    add.u32 %r2, %r0, %r1;
    mov.u32 %r5, 0;
"""
SHOW = "ld.shared.b32 %r10, [%r2]; st.global.b32 [%o], %r10;"


def tensor(x, box, **options):
    """Return a map of an int32 array."""
    return emulator.TensorMap(
        x, dtype="INT32", global_dim=x.shape[::-1], global_strides_bytes=x.strides[-2::-1],
        box_dim=box, **options,
    )  # fmt: skip


def load(rank, coords, *, form="shared::cta", mods="", tail="", guard="@%p0", bar="%r9", size=256):
    """Thread 0 announces 256 bytes and loads a box."""
    at = ", ".join(coords)
    return f"""{LEADER} @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], {size};
    {guard} cp.async.bulk.tensor.{rank}d.{form}.global.mbarrier::complete_tx::bytes{mods}
        [%r0], [%a0, {{{at}}}], [{bar}]{tail};"""


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_load_of_every_rank(rank):
    """Coordinates -1 innermost: what lies outside is zero."""
    shape = (2, 3, 2, 3, 12)[-rank:]
    box = (8, 2, 2, 2, 1)[:rank]
    if rank == 1:
        box = (64,)
        shape = (100,)
    size = 4 * int(np.prod(box))
    x = RNG.integers(1, 99, shape).astype(np.int32)
    coords = ["-1", "1", "0", "1", "1"][:rank]
    body = HEAD + init("%r9") + load(rank, coords, size=size) + wait("%r9") + SHOW
    padded = np.pad(x, [(0, 8)] * (rank - 1) + [(1, 64)])
    start = [int(c) for c in coords[::-1]]
    start[-1] += 1
    want = padded[tuple(slice(s, s + n) for s, n in zip(start, box[::-1], strict=True))].reshape(-1)

    def judge(_, y):
        assert (y[: want.size] == want).all()

    threads = size // 4
    silent(body, lambda: (tensor(x, box), kit.words(threads)), judge, block=threads, seeds=range(4))


X = RNG.integers(1, 1000, (16, 16)).astype(np.int32)
BOX = (16, 4)
PLAIN = HEAD + init("%r9") + load(2, ["0", "4"]) + wait("%r9") + SHOW


def args(count=64):
    return tensor(X, BOX), kit.words(count)


def loaded(_, y):
    assert (y.reshape(-1, 4, 16) == X[4:8]).all()


check = functools.partial(silent, block=64)


def test_load_and_its_report():
    report = check(PLAIN, args, loaded)
    assert report.engines["tma.load"] == {"operations": 1, "bytes": 256}
    policy = PLAIN.replace("complete_tx::bytes\n", "complete_tx::bytes.L2::cache_hint\n")
    policy = policy.replace("[%a0, {0, 4}], [%r9];", "[%a0, {0, 4}], [%r9], %d5;").replace(
        LEADER, "mov.u64 %d5, 0;" + LEADER
    )
    check(policy, args, loaded, seeds=range(2))


def test_load_read_too_early():
    outs = caught("race|unwaited bulk copy", PLAIN.replace(wait_of(PLAIN), ""), args, block=64)
    assert any((y.reshape(4, 16) != X[4:8]).any() for _, y in outs)


def wait_of(body):
    """Return the first wait loop."""
    start = body.index("W", body.index("[%a0"))
    return body[start : body.index(";", body.index("bra W", start)) + 1]


@pytest.mark.parametrize(
    ("pattern", "old", "new"),
    [
        ("128", "[%r0], [%a0", "[%r0 + 64], [%a0"),
        ("out of bounds", "[%r0], [%a0", "[%r0 + 3968], [%a0"),
        ("coordinates", "{0, 4}", "{0, 4, 0}"),
        ("(?i)rank|dimension", ".2d.shared::cta.global", ".1d.shared::cta.global"),
        ("no mbarrier object", "[%r9];\nW", "[%r0 + 512];\nW"),
        (
            "im2col|tile::scatter4",
            ".mbarrier::complete_tx",
            ".tile::scatter4.mbarrier::complete_tx",
        ),
        ("tx|deadlock", "_, [%r9], 256", "_, [%r9], 240"),
        ("deadlock", "_, [%r9], 256", "_, [%r9], 272"),
        ("64 bytes", "[%a0, {", "[%a0 + 32, {"),
    ],
)
def test_rules(pattern, old, new):
    body = PLAIN.replace(wait_of(PLAIN), "\n" + wait_of(PLAIN))
    body = body.replace("[%r9];\n\nW", "[%r9];\nW")
    assert old in body
    new = new.replace("{0, 4, 0}", "{0, 4, 0}")
    if ".1d" in new:
        body = body.replace("{0, 4}", "{0}")
    refused(pattern, body.replace(old, new, 1), args, block=64)


def test_map_of_memory_that_is_not_there():
    far = emulator.TensorMap.at(
        0x7000_0000_0000, dtype="INT32", global_dim=(16, 16), global_strides_bytes=(64,),
        box_dim=BOX,
    )  # fmt: skip
    refused("no allocation", PLAIN, lambda: (far, kit.words(64)), block=64)


def test_prefetches_obey_the_rules():
    """A prefetch does nothing; its rules hold."""
    good = f"""{LEADER} @%p0 prefetch.tensormap [%a0];
    @%p0 cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%a0, {{0, 4}}];"""
    check(good + PLAIN, args, loaded, seeds=range(2))
    refused("64 bytes", f"{LEADER} prefetch.tensormap [%a0 + 16];", args)
    wrong = "cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%a0, {0}];"
    refused("(?i)rank|dimension", wrong, args)
    odd = "cp.async.bulk.prefetch.L2.global [%a1], 24;"
    refused("not a multiple of 16", odd, args)


# stores ---------------------------------------------------------------------------------------
STORE = (
    HEAD
    + f"""st.shared.b32 [%r2], %x; {FENCE} {SYNC} {LEADER}
    @%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%a0, {{4, 12}}], [%r0];
    @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;"""
)


def store_args():
    x = np.full((16, 16), -1, np.int32)
    return tensor(x, BOX), x


def stored(_, x):
    want = np.full((16, 16), -1)
    want[12:, 4:] = np.arange(64).reshape(4, 16)[:, :12]
    assert (x == want).all()


def test_store_is_clipped():
    report = check(STORE, store_args, stored)
    assert report.engines["tma.store"]["operations"] == 1


@pytest.mark.parametrize(
    ("pattern", "old", "new"),
    [
        ("missing proxy fence", FENCE, ""),
        ("race|unwaited bulk", FENCE + " " + SYNC, FENCE),
        ("unwaited bulk copy", "wait_group 0;", "wait_group 1; st.shared.b32 [%r2], 0;"),
        ("unwaited bulk copy", "@%p0 cp.async.bulk.wait_group 0;", "st.shared.b32 [%r2], 0;"),
    ],
)
def test_broken_store(pattern, old, new):
    caught(pattern, STORE.replace(old, new, 1), store_args, block=64)


def test_reduction():
    add = STORE.replace(
        "cp.async.bulk.tensor.2d.global.shared::cta.",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.",
    )

    def sums(_, x):
        want = np.full((16, 16), -1)
        want[12:, 4:] += np.arange(64).reshape(4, 16)[:, :12]
        assert (x == want).all()

    report = check(add, store_args, sums, seeds=range(4))
    assert report.engines["tma.reduce"]["operations"] == 1


def test_gather_and_scatter():
    """Rows 5, 2, 9, 99 in (the last one is outside), out to rows 1, 99, 0, 3."""
    maps = lambda: (tensor(X, (16, 1)), kit.words(64))  # noqa: E731
    rows = ["0", "5", "2", "9", "99"]
    gather = (
        HEAD
        + init("%r9")
        + load(2, rows, mods="").replace(".mbarrier::", ".tile::gather4.mbarrier::", 1)
    )
    gather += wait("%r9") + SHOW

    def picked(_, y):
        want = X[[5, 2, 9, 0]].copy()
        want[3] = 0
        assert (y.reshape(4, 16) == want).all()

    check(gather, maps, picked, seeds=range(4))
    scatter = STORE.replace(".bulk_group [", ".tile::scatter4.bulk_group [").replace(
        "{4, 12}", "{0, 1, 99, 0, 3}"
    )

    def make():
        x = np.full((16, 16), -1, np.int32)
        return tensor(x, (16, 1)), x

    def put(_, x):
        want = np.full((16, 16), -1)
        want[[1, 0, 3]] = np.arange(64).reshape(4, 16)[[0, 2, 3]]
        assert (x == want).all()

    check(scatter, make, put, seeds=range(4))


# clusters -------------------------------------------------------------------------------------
RANK = "mov.u32 %r30, %cluster_ctarank; setp.eq.u32 %p2, %r30, 0; xor.b32 %r31, %r30, 1;"
BOTH = functools.partial(silent, block=64, grid=2, cluster=2)
TWO = functools.partial(caught, block=64, grid=2, cluster=2)
NO = functools.partial(refused, block=64, grid=2, cluster=2)


def many():
    return args(128)


def multicast(group="", bar="%r9", expect=256, mask=3):
    """Rank 0 loads for both CTAs."""
    start = load(
        2, ["0", "4"], form="shared::cluster", mods=f".multicast::cluster{group}", tail=", %b0",
        guard="@%p3", bar=bar, size=expect,
    )  # fmt: skip
    return (
        HEAD + RANK + f"mov.b16 %b0, {mask};" + init("%r9") + CLUSTER_SYNC + LEADER
        + "and.pred %p3, %p0, %p2;" + "mapa.shared::cluster.u32 %r33, %r9, 0;"
        + "mapa.shared::cluster.u32 %r34, %r9, 1;" + start
    )  # fmt: skip


def test_multicast():
    BOTH(multicast() + wait("%r9") + SHOW + CLUSTER_SYNC, many, loaded)
    NO("CTA mask 0x5", multicast(mask=5) + wait("%r9") + SHOW, many)
    NO("CTA mask 0x0", multicast(mask=0) + wait("%r9") + SHOW, many)
    TWO("race|unwaited bulk copy", multicast() + SHOW + wait("%r9") + CLUSTER_SYNC, many)


def test_multicast_for_a_pair():
    """With cta_group::2 both halves complete at one mbarrier, by the parity of its rank."""
    body = multicast(".cta_group::2", "%r33", expect=512)
    body = body.replace("@%p0 mbarrier.arrive.expect_tx", "@%p3 mbarrier.arrive.expect_tx")
    follow = (
        "@%p2 bra WAIT; bra MEET; WAIT:"
        + wait("%r9")
        + "MEET:"
        + CLUSTER_SYNC
        + SHOW
        + CLUSTER_SYNC
    )
    BOTH(body + follow, many, loaded, seeds=range(10))
    other = body.replace("[%r33]", "[%r34]").replace(
        "@%p3 mbarrier", "setp.eq.u32 %p5, %r30, 1; and.pred %p4, %p0, %p5; @%p4 mbarrier"
    )
    odd = (
        "@!%p2 bra WAIT; bra MEET; WAIT:"
        + wait("%r9")
        + "MEET:"
        + CLUSTER_SYNC
        + SHOW
        + CLUSTER_SYNC
    )
    BOTH(other + odd, many, loaded, seeds=range(10))


def peer(group, expect=256):
    """Each CTA loads its own box; the mbarrier is rank 0's."""
    start = load(2, ["0", "4"], form="shared::cluster", mods=group, bar="%r33", size=expect)
    start = start.replace("@%p0 mbarrier", "and.pred %p3, %p0, %p2; @%p3 mbarrier")
    return (
        HEAD + RANK + init("%r9") + CLUSTER_SYNC + "mapa.shared::cluster.u32 %r33, %r9, 0;" + start
    )


def test_mbarrier_of_the_peer():
    """Only with cta_group::2 may it be in the other CTA of the pair."""
    follow = (
        "@%p2 bra WAIT; bra MEET; WAIT:"
        + wait("%r9")
        + "MEET:"
        + CLUSTER_SYNC
        + SHOW
        + CLUSTER_SYNC
    )
    BOTH(peer(".cta_group::2", 512) + follow, many, loaded)
    NO(
        r"the mbarrier 0x[0-9a-f]+ is in CTA rank 0 and the destination in rank 1",
        peer("", 512) + follow,
        many,
    )
    far = (
        peer(".cta_group::2", 512)
        .replace("[%r0]", "[%r35]")
        .replace(LEADER, "mapa.shared::cluster.u32 %r35, %r0, %r31;" + LEADER)
    )
    BOTH(far + follow, many, loaded, seeds=range(4))  # the destination may be the peer's, too
    NO(
        "executing CTA's own",
        far.replace("shared::cluster.global", "shared::cta.global") + follow,
        many,
    )


# tensor maps in memory ------------------------------------------------------------------------
def test_replaced_map():
    """A map in shared memory gets another address, goes to global memory and is used there."""
    body = (
        """.shared .align 128 .b8 desc[128]; mov.u32 %r40, desc; mad.lo.u32 %r41, %x, 4, %r40;
        cvt.u64.u32 %d8, %x; shl.b64 %d8, %d8, 2; add.u64 %d9, %a0, %d8; setp.lt.u32 %p6, %x, 32;
        @%p6 ld.global.b32 %r42, [%d9]; @%p6 st.shared.b32 [%r41], %r42; bar.sync 0;"""
        + HEAD
        + init("%r9")
        + LEADER
        + """@%p0 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r40], %a1;
        bar.sync 0; @!%p6 bra GO;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
            [%a0], [%r40], 128;
        fence.proxy.tensormap::generic.acquire.gpu [%a0], 128;
        GO: bar.sync 0;"""
        + load(2, ["0", "4"])
        + wait("%r9")
        + SHOW
    )

    def make():
        blank = np.frombuffer(tensor(X, BOX).encode(0x1234560), np.uint8).copy()
        return blank, X.copy(), kit.words(64)

    def judge(_, x, y):
        assert (y.reshape(4, 16) == x[4:8]).all()

    check(body, make, judge, seeds=range(6))
    TWO_ = functools.partial(caught, block=64)
    TWO_(
        "race",
        body.replace("bar.sync 0; @!%p6", "@!%p6").replace(
            "@%p0 tensormap", "setp.eq.u32 %p0, %x, 32; @%p0 tensormap"
        ),
        make,
        seeds=range(5),
    )
