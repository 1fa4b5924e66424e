"""Bulk copies, st.async and launch control in clusters, through real PTX."""

from __future__ import annotations

import numpy as np
import pytest

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
    wait_text,
)
from tests.emulator.ops.test_async_copy import SHOW, STAGE, data

pytestmark = pytest.mark.usefixtures("seeds")

# clusters -------------------------------------------------------------------------------------
MEET = CLUSTER_SYNC
RANK = "mov.u32 %r30, %cluster_ctarank; xor.b32 %r31, %r30, 1;"


def clusters():
    return data(256), kit.words(256)


MULTICAST = (
    STAGE
    + RANK
    + init("%r9")
    + f"""{MEET} {LEADER}
    mad.wide.u32 %d1, %t, 16, %a1;
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 512;
    setp.eq.and.u32 %p1, %r30, 0, %p0; mov.b16 %b0, 3;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r0], [%a0], 512, [%r9], %b0;"""
    + wait("%r9")
    + SHOW
    + MEET
)


def test_bulk_multicast():
    def both(x, y):
        assert (y.reshape(2, 128) == x[:128]).all()

    silent(MULTICAST, clusters, both, grid=2, cluster=2)
    refused("CTA mask 0x6", MULTICAST.replace("%b0, 3;", "%b0, 6;"), clusters, grid=2, cluster=2)


REMOTE = (
    STAGE
    + RANK
    + init("%r9")
    + f"""mad.wide.u32 %d0, %t, 16, %a0; mad.wide.u32 %d1, %t, 16, %a1; {LEADER}
    ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d0];
    st.shared.v4.b32 [%r2], {{%r10, %r11, %r12, %r13}}; {FENCE}
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 512;
    {MEET}
    add.u32 %r20, %r0, 512; mapa.shared::cluster.u32 %r21, %r20, %r31;
    mapa.shared::cluster.u32 %r22, %r9, %r31;
    @%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
        [%r21], [%r0], 512, [%r22];"""
    + wait("%r9")
    + "add.u32 %r2, %r2, 512;"
    + SHOW
    + MEET
)


def test_bulk_between_ctas():
    def swapped(x, y):
        assert (y.reshape(2, 128) == x.reshape(2, 128)[::-1]).all()

    silent(REMOTE, clusters, swapped, grid=2, cluster=2)
    caught("missing proxy fence", REMOTE.replace(FENCE, ""), clusters, grid=2, cluster=2)
    elsewhere = REMOTE.replace("512, [%r22]", "512, [%r9]")
    caught("mbarrier in another CTA", elsewhere, clusters, grid=2, cluster=2, seeds=range(3))
    source = REMOTE.replace("[%r21], [%r0]", "[%r21], [%r21]")
    refused("the source .* CTA rank", source, clusters, grid=2, cluster=2)


def test_bulk_reductions_into_one_cta():
    """Both CTAs of a cluster add into rank 0 at once: no race, and the sum of both."""
    body = (
        STAGE
        + RANK
        + init("%r9", 1)
        + f"""mad.wide.u32 %d0, %t, 16, %a0; mad.wide.u32 %d1, %t, 16, %a1; {LEADER}
        ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d0]; mov.u32 %r14, 0;
        st.shared.v4.b32 [%r2], {{%r10, %r11, %r12, %r13}};
        st.shared.v4.b32 [%r2 + 512], {{%r14, %r14, %r14, %r14}}; {FENCE}
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 1024;
        {MEET}
        add.u32 %r20, %r0, 512; mapa.shared::cluster.u32 %r21, %r20, 0;
        mapa.shared::cluster.u32 %r22, %r9, 0;
        @%p0 cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32
            [%r21], [%r0], 512, [%r22];
        setp.ne.u32 %p2, %r30, 0; @%p2 bra OUT;"""
        + wait("%r9")
        + "add.u32 %r2, %r2, 512;"
        + SHOW
        + "OUT:"
        + MEET
    )

    def total(x, y):
        assert (y[:128] == x[:128] + x[128:]).all()

    silent(body, clusters, total, grid=2, cluster=2)
    lost = body.replace(wait_text(body), "", 1)
    caught("unwaited bulk copy", lost, clusters, grid=2, cluster=2)


AFTER = (
    STAGE
    + RANK
    + init("%r9")
    + f"""{MEET} {LEADER}
    mapa.shared::cluster.u32 %r21, %r0, %r31; mapa.shared::cluster.u32 %r22, %r9, %r31;
    setp.eq.u32 %p1, %r30, 1; @%p1 bra OUT;
    mov.u32 %r20, 400;
    AGAIN: sub.u32 %r20, %r20, 1; setp.ne.u32 %p1, %r20, 0; @%p1 bra AGAIN;
    mov.b16 %b0, 3;
    USE
    OUT:"""
)


@pytest.mark.parametrize(
    "use",
    [
        "@%p0 mbarrier.arrive.shared::cluster.b64 _, [%r22];",
        "@%p0 st.shared::cluster.u32 [%r21], %r20;",
        "@%p0 ld.shared::cluster.u32 %r20, [%r21];",
        "@%p0 st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r21], %r20, [%r22];",
        """@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [%r0], [%a0], 512, [%r9], %b0;""",
        """@%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
            [%r21], [%r0], 512, [%r22];""",
    ],
)
def test_a_cta_that_has_ended_has_no_shared_memory(use):
    options = {"grid": 2, "cluster": 2}
    refused("rank 1 .* has ended", AFTER.replace("USE", use), clusters, **options)


def test_a_cta_is_there_until_a_cluster_barrier():
    use = "@%p0 mbarrier.arrive.shared::cluster.b64 _, [%r22];"
    silent(AFTER.replace("USE", use) + MEET, clusters, lambda x, y: None, grid=2, cluster=2)


# st.async and kin -----------------------------------------------------------------------------
@pytest.mark.parametrize(("vector", "size"), [("", 4), (".v2", 8), (".v4", 16)])
def test_st_async(vector, size):
    """Each lane sends a vector to the other CTA; the receiver waits for all bytes."""
    items = ["%r10", "%r11", "%r12", "%r13"][: size // 4]
    value = items[0] if size == 4 else "{" + ", ".join(items) + "}"
    body = (
        STAGE
        + RANK
        + init("%r9")
        + f"""{LEADER} mad.lo.u32 %r10, %t, 4, 1; add.u32 %r11, %r10, 1; add.u32 %r12, %r10, 2;
        add.u32 %r13, %r10, 3;
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], {32 * size};
        {MEET}
        mad.lo.u32 %r20, %x, {size}, %r0; mapa.shared::cluster.u32 %r21, %r20, %r31;
        mapa.shared::cluster.u32 %r22, %r9, %r31;
        st.async.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32
            [%r21], {value}, [%r22];"""
        + wait("%r9")
        + "ld.shared.b32 %r25, [%r20]; st.global.b32 [%o], %r25;"
        + MEET
    )

    def judge(y):
        t = np.arange(64).reshape(2, 32)[::-1].reshape(-1)
        assert (y == 4 * t + 1).all()

    make = lambda: (kit.words(64),)  # noqa: E731
    body = body.replace("add.u64 %d0, %a0, %d9;", "").replace("add.u64 %d1, %a1, %d9;", "")
    silent(body, make, judge, grid=2, cluster=2, seeds=range(8))
    caught("unwaited bulk copy", body.replace(wait_text(body), ""), make, grid=2, cluster=2)
    odd = body.replace(f"{size}, %r0;", f"{size}, %r0; add.u32 %r20, %r20, 2;")
    refused("misaligned", odd, make, grid=2, cluster=2)


# launch control -------------------------------------------------------------------------------
def test_try_cancel():
    """What runs takes over what waits; everything is done once."""
    body = STAGE.replace("add.u64 %d1, %a1, %d9;", "") + init("%r9")
    body += f"""mov.u32 %r50, %ctaid.x; mov.u32 %r51, 0;
    AGAIN: {LEADER} mad.wide.u32 %d6, %r50, 4, %a0;
    @%p0 atom.global.add.u32 %r52, [%d6], 1;
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 16;
    @%p0 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128
        [%r0], [%r9];
    {wait("%r9", "%r51")} xor.b32 %r51, %r51, 1;
    ld.shared.b128 %q0, [%r0]; {FENCE} {SYNC}
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p8, %q0;
    @!%p8 bra OUT;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r50, %q0;
    bra AGAIN; OUT:"""  # fmt: skip

    def judge(y):
        assert (y == 1).all()

    make = lambda: (np.zeros(152, np.uint32),)  # noqa: E731 - 148 are resident
    silent(body, make, judge, block=64, grid=152, seeds=range(2))
    odd = body.replace("[%r0], [%r9];", "[%r0 + 8], [%r9];")
    refused("misaligned", odd, make, block=64, grid=152)
    early = body.replace(body[body.index("W") : body.index("xor.b32 %r51")], "", 1)
    caught(
        "unwaited bulk copy|tx|arrival|nobody has written",
        early,
        make,
        block=64,
        grid=4,
        seeds=range(4),
    )
