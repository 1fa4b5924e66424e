"""cp.async, 1-D bulk copies, st.async, red.async, st.bulk: numbers, hazards, rules."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import kit
from tests.emulator.kit import async_ptx
from tests.emulator.kit.async_ptx import (
    FENCE,
    LEADER,
    SYNC,
    bulk,
    caught,
    init,
    refused,
    silent,
    wait,
)

pytestmark = pytest.mark.usefixtures("seeds")

LANES = 32
RNG = np.random.default_rng(7)
STAGE = """
    .shared .align 16 .b8 buf[1024];
    .shared .align 8 .b64 bar;
    mov.u32 %r0, buf;
    mov.u32 %r9, bar;
    shl.b32 %r1, %x, 4;
    add.u32 %r2, %r0, %r1;
    cvt.u64.u32 %d9, %r1;
    add.u64 %d0, %a0, %d9;
    add.u64 %d1, %a1, %d9;
"""
SHOW = """
    ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r2];
    st.global.v4.b32 [%d1], {%r10, %r11, %r12, %r13};
"""


def data(count=LANES * 4):
    return RNG.integers(0, 2**31, count).astype(np.uint32)


X = data()


def pair():
    return X.copy(), kit.words(X.size)


def same(x, y):
    assert (y == X).all()


# cp.async -------------------------------------------------------------------------------------
ASYNC = STAGE + "cp.async.cg.shared.global [%r2], [%d0], 16;\n"
GROUP = "cp.async.commit_group; cp.async.wait_group 0;"


@pytest.mark.parametrize("tail", [GROUP, "cp.async.wait_all;"])
def test_cp_async(tail):
    report = silent(ASYNC + tail + SHOW, pair, same)
    assert report.engines["cp.async"] == {"operations": 1, "bytes": 512}


def test_cp_async_by_mbarrier():
    """.noinc uses up an arrival, the other form does not."""
    for noinc, count in ((".noinc", 32), ("", 33)):
        rest = "" if noinc else f"{LEADER} @%p0 mbarrier.arrive.shared.b64 _, [%r9];"
        rest = rest.replace("33", "1")
        body = STAGE + init("%r9", count if noinc else 1)
        body += f"""cp.async.cg.shared.global [%r2], [%d0], 16;
        cp.async.mbarrier.arrive{noinc}.shared.b64 [%r9]; bar.warp.sync 0xffffffff; {rest}"""
        silent(body + wait("%r9") + SHOW, pair, same)


def test_cp_async_source_size_and_ignored_source():
    """Bytes beyond the source size are zeros; of an ignored source nothing is read."""
    sizes = STAGE + "and.b32 %r5, %x, 15; cp.async.ca.shared.global [%r2], [%d0], 16, %r5;"

    def judge(x, y):
        want = X.view(np.uint8).reshape(LANES, 16).copy()
        for lane in range(LANES):
            want[lane, lane % 16 :] = 0
        assert (y.view(np.uint8).reshape(LANES, 16) == want).all()

    silent(sizes + GROUP + SHOW, pair, judge, seeds=range(5))
    wild = (
        STAGE
        + """and.b32 %r5, %x, 1; setp.eq.u32 %p1, %r5, 1; @%p1 add.u64 %d0, %d0, 1000000;
        cp.async.ca.shared.global [%r2], [%d0], 16, %p1;"""
    )

    def ignored(x, y):
        want = X.reshape(LANES, 4).copy()
        want[1::2] = 0
        assert (y.reshape(LANES, 4) == want).all()

    silent(wild + GROUP + SHOW, pair, ignored, seeds=range(5))


def test_cp_async_groups_in_order():
    """wait_group 1 lets the younger group run on."""
    body = (
        STAGE
        + """
        add.u32 %r3, %r2, 512; add.u64 %d2, %a0, 512; add.u64 %d2, %d2, %d9;
        cp.async.cg.shared.global [%r2], [%d0], 16; cp.async.commit_group;
        cp.async.cg.shared.global [%r3], [%d2], 16; cp.async.commit_group;
        cp.async.wait_group 1;"""
    )
    x = data(256)
    make = lambda: (x.copy(), kit.words(128))  # noqa: E731

    def older(_, y):
        assert (y == x[:128]).all()

    silent(body + SHOW, make, older, seeds=range(10))
    caught("unwaited cp.async", body + SHOW.replace("[%r2]", "[%r3]"), make)


def test_cp_async_read_too_early():
    """Reported on every seed, and some seeds see stale data."""
    outs = caught("unwaited cp.async", ASYNC + SHOW, pair, seeds=range(12))
    assert any((y != X).any() for _, y in outs)
    caught("unwaited cp.async", ASYNC + "cp.async.wait_group 0;" + SHOW, pair)  # never committed


def test_cp_async_buffer_overwritten_too_early():
    again = ASYNC + "st.shared.b32 [%r2], %x;" + GROUP + SHOW
    caught("unwaited cp.async", again, pair)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("misaligned", "add.u64 %d0, %d0, 4; cp.async.cg.shared.global [%r2], [%d0], 16;"),
        ("misaligned", "add.u32 %r2, %r2, 8; cp.async.cg.shared.global [%r2], [%d0], 16;"),
        ("source size 17", "mov.u32 %r5, 17; cp.async.ca.shared.global [%r2], [%d0], 16, %r5;"),
        (r"\.cg 16", "cp.async.cg.shared.global [%r2], [%d0], 8;"),
        ("no allocation", "add.u64 %d0, %d0, 4096; cp.async.ca.shared.global [%r2], [%d0], 4;"),
        ("out of bounds", "add.u32 %r2, %r2, 4096; cp.async.ca.shared.global [%r2], [%d0], 4;"),
    ],
)
def test_cp_async_rules(pattern, text):
    refused(pattern, STAGE + text + GROUP, pair)


# bulk copies ----------------------------------------------------------------------------------
LOAD = STAGE + init("%r9") + bulk("%r0", "%a0", 512, "%r9")


@pytest.mark.parametrize("form", ["shared::cta", "shared::cluster"])
def test_bulk_load(form):
    body = STAGE + init("%r9") + bulk("%r0", "%a0", 512, "%r9", form=form) + wait("%r9") + SHOW
    report = silent(body, pair, same)
    assert report.engines["bulk"] == {"operations": 1, "bytes": 512}


INIT_AGAIN = f"{SYNC} @%p0 mbarrier.init.shared::cta.b64 [%r8], 1;" * 2
OVER = {  # what writes over the mbarrier at %r8, if anything does
    "st": "@%p0 st.shared.b64 [%r8], %d0;",
    "red": "@%p0 red.shared.add.u32 [%r8 + 4], 1;",
    "st.bulk": "@%p0 st.bulk.weak.shared::cta [%r8], 16, 0;",
    "cp.async": "@%p0 cp.async.ca.shared.global [%r8], [%d0], 8; cp.async.wait_all;",
    "bulk": bulk("%r8", "%a0", 16, "%r9") + wait("%r9"),
}


@pytest.mark.parametrize("over", OVER.values(), ids=OVER)
def test_writes_over_an_mbarrier(over):
    """An error while the object is there; after mbarrier.inval it is memory like any other."""
    body = STAGE + "add.u32 %r8, %r0, 512;" + init("%r8") + init("%r9") + "END" + over + INIT_AGAIN
    body += "mov.u32 %r10, 0; mov.u32 %r11, 0; mov.u32 %r12, 0; mov.u32 %r13, 0;"
    body += "st.global.v4.b32 [%d1], {%r10, %r11, %r12, %r13};"
    inval = f"@%p0 mbarrier.inval.shared::cta.b64 [%r8]; {FENCE} {SYNC}"
    caught("mbarrier overwritten", body.replace("END", ""), pair, seeds=range(3))
    silent(body.replace("END", inval), pair, lambda x, y: None, seeds=range(3))


def test_bulk_load_read_too_early():
    outs = caught("unwaited bulk copy", LOAD + SHOW, pair, seeds=range(12))
    assert any((y != X).any() for _, y in outs)
    caught("unwaited bulk copy", LOAD + SHOW + wait("%r9"), pair)


@pytest.mark.parametrize("start", ["bulk", "cp.async"])
def test_what_an_early_read_finds(start):
    """The new data, the old data, or poison: over the seeds all three."""
    begin = bulk("%r0", "%a0", 512, "%r9")
    if start == "cp.async":
        begin = "cp.async.cg.shared.global [%r2], [%d0], 16;"
    old = "mov.u32 %r15, 7; st.shared.v4.b32 [%r2], {%r15, %r15, %r15, %r15};"
    body = STAGE + old + FENCE + init("%r9") + begin + SHOW
    body += wait("%r9") if start == "bulk" else "cp.async.wait_all;"
    found = set()
    for _, y in caught(f"unwaited {start.split('.')[0]}", body, pair, seeds=range(40)):
        assert (y == y[0]).all() or (y == X).all()
        found.add("new" if (y == X).all() else int(y[0]))
    assert found == {"new", 7, kit.POISON}


def test_bulk_load_into_a_buffer_in_use():
    """Reads before the copy want a barrier that its issuer took part in."""
    load = bulk("%r0", "%a0", 512, "%r9")
    body = STAGE + "st.shared.v4.b32 [%r2], {%x, %x, %x, %x};" + init("%r9") + "{fence}{sync}"
    body += (
        "xor.b32 %r19, %r2, 512; ld.shared.b32 %r20, [%r19 + 4]; {sync2}"
        + load
        + wait("%r9")
        + SHOW
    )
    parts = {"{fence}": FENCE, "{sync}": SYNC, "{sync2}": SYNC}

    def text(**changed):
        result = body
        for name, value in {**parts, **{"{" + k + "}": v for k, v in changed.items()}}.items():
            result = result.replace(name, value)
        return result

    make = lambda: (data(256)[:256], kit.words(256))  # noqa: E731

    def first(x, y):
        assert (y[:128] == x[:128]).all()

    silent(text(), make, first, block=64, allowed=async_ptx.QUIET)
    caught("race|unwaited bulk copy", text(sync2=""), make, block=64)
    caught("missing proxy fence", text(fence=""), make, block=64)


STORE = (
    STAGE
    + f"""ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d0];
    st.shared.v4.b32 [%r2], {{%r10, %r11, %r12, %r13}}; {FENCE} bar.warp.sync 0xffffffff; {LEADER}
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%a1], [%r0], 512;"""
)
DONE = "@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group{read} 0;"


def test_bulk_store():
    silent(STORE + DONE.format(read=".read"), pair, same)  # the end of the grid waits for the rest
    caught("unwaited bulk copy", STORE, pair)  # its source is shared memory of a CTA that has ended
    caught("missing proxy fence", STORE.replace(FENCE, ""), pair)


TO_ASYNC = "fence.proxy.async::generic."
OFFER = TO_ASYNC + "release.sync_restrict::shared::cta.cluster;"
TAKE = TO_ASYNC + "acquire.sync_restrict::shared::cluster.cluster;"


def test_proxy_fence_of_another_space():
    """Which fences cover what the generic proxy wrote to shared memory."""
    store = STORE + DONE.format(read=".read")
    for fence in ("fence.proxy.async;", "fence.proxy.async.shared::cluster;", OFFER + TAKE):
        silent(store.replace(FENCE, fence), pair, same, seeds=range(3))
    for fence in ("fence.proxy.async.global;", "fence.proxy.alias;", OFFER, TAKE, TAKE + OFFER):
        caught("missing proxy fence", store.replace(FENCE, fence), pair, seeds=range(3))


@pytest.mark.parametrize(
    "fence",
    ["proxy.asynchronous", "proxy.async.shared", "proxy.async::generic.acquire", "foo.bar", "sc"],
)
def test_fences_that_do_not_exist(fence):
    refused("is no fence", f"fence.{fence};", pair)


def test_bulk_store_source_overwritten():
    """.read is enough to overwrite the source, and says nothing of the target."""
    over = "bar.warp.sync 0xffffffff; st.shared.b32 [%r2], 0;"
    for read in ("", ".read"):
        silent(STORE + DONE.format(read=read) + over, pair, same, seeds=range(10))
    caught("unwaited bulk copy", STORE + over, pair)
    caught("unwaited bulk copy", STORE + "@%p0 cp.async.bulk.commit_group;" + over, pair)
    back = """ld.global.b32 %r20, [%a1]; st.global.b32 [%a1 + 512], %r20;"""
    make = lambda: (X.copy(), kit.words(X.size + 4))  # noqa: E731
    seen = {".read": set(), "": set()}
    for read, values in seen.items():
        for seed in range(12):
            args = make()
            kit.run(STORE + DONE.format(read=read) + "@%p0 bra L; ret; L:" + back, *args, seed=seed)
            values.add(int(args[1][128]))
    assert seen[""] == {int(X[0])}
    assert kit.POISON in seen[".read"]


def test_bulk_store_mask_and_reductions():
    masked = STORE.replace(
        ".bulk_group [%a1], [%r0], 512;", ".bulk_group.cp_mask [%a1], [%r0], 512, %b0;"
    )
    masked = "mov.b16 %b0, 0x00f3;" + masked
    bits = np.array([0xF3 >> i & 1 for i in range(16)] * LANES, bool)

    def judge(x, y):
        assert (y.view(np.uint8) == np.where(bits, X.view(np.uint8), 0xFF)).all()

    silent(masked + DONE.format(read=""), pair, judge, seeds=range(3))
    add = STORE.replace(
        "cp.async.bulk.global.shared::cta.bulk_group",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32",
    )
    before = data()

    def sums(x, y):
        assert (y == before + X).all()

    silent(add + DONE.format(read=""), lambda: (X.copy(), before.copy()), sums, seeds=range(5))


@pytest.mark.parametrize(
    ("pattern", "old", "new"),
    [
        ("size 24 is not a multiple of 16", ", 512, [%r9]", ", 24, [%r9]"),
        ("destination address .* not a multiple of 16", "[%r0], [%a0]", "[%r0 + 8], [%a0]"),
        ("source address .* not a multiple of 16", "[%r0], [%a0]", "[%r0], [%a0 + 8]"),
        ("no allocation", "[%r0], [%a0]", "[%r0], [%a0 + 256]"),
        ("out of bounds", "[%r0], [%a0]", "[%r0 + 1008], [%a0]"),
        ("no mbarrier object is", "512, [%r9]", "512, [%r0]"),
        ("tx-count underflow|deadlock", "_, [%r9], 512", "_, [%r9], 496"),
        ("512 bytes that expect_tx announced|deadlock", "_, [%r9], 512", "_, [%r9], 1024"),
        (
            "underflow: 1 arrivals",
            "@%p0 cp.async",
            "@%p0 mbarrier.arrive.shared.b64 _, [%r9]; @%p0 cp.async",
        ),
        ("deadlock", "[%r9], 1;", "[%r9], 2;"),
    ],
)
def test_bulk_rules(pattern, old, new):
    body = LOAD + wait("%r9") + SHOW
    assert old in body
    refused(pattern, body.replace(old, new), pair)


def test_st_bulk():
    body = """.shared .align 16 .b8 buf[1024]; mov.u32 %r0, buf; shl.b32 %r1, %x, 2;
    add.u32 %r2, %r0, %r1; st.shared.b32 [%r2], %x; bar.sync 0; setp.eq.u32 %p0, %x, 0;
    @%p0 st.bulk.weak.shared::cta [%r0 + 96], 64, 0; bar.sync 0;
    ld.shared.b32 %r3, [%r2]; st.global.b32 [%o], %r3;"""
    make = lambda: (kit.words(64),)  # noqa: E731

    def judge(y):
        want = np.arange(64)
        want[24:40] = 0
        assert (y == want).all()

    silent(body, make, judge, seeds=range(5), block=64)
    refused("multiple of 8", body.replace("64, 0", "60, 0"), make, block=64)
    caught("race", body.replace("bar.sync 0; setp", "setp"), make, block=64)
