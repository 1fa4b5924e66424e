"""What users met: grids that wait for each other, targets, pointers in structs, names."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from blockscale import emulator
from tests.emulator import kit

BARRIER = """
.version 8.6
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 count, .param .u64 y) {
    .reg .pred %p<3>; .reg .b32 %r<6>; .reg .b64 %d<4>;
    ld.param.u64 %d0, [count]; ld.param.u64 %d1, [y];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %nctaid.x; mov.u32 %r2, %ctaid.x;
    setp.ne.u32 %p0, %r0, 0; @%p0 bra MEET;
    atom.global.add.u32 %r3, [%d0], 1;
SPIN:
    ld.volatile.global.u32 %r3, [%d0]; setp.lt.u32 %p1, %r3, %r1; @%p1 bra SPIN;
MEET:
    bar.sync 0; mad.lo.u32 %r4, %r2, 128, %r0; mul.wide.u32 %d2, %r4, 4; add.s64 %d1, %d1, %d2;
    ld.volatile.global.u32 %r3, [%d0]; st.global.u32 [%d1], %r3; ret;
}"""


def test_a_grid_of_148_ctas_may_wait_for_itself():
    """All CTAs that 148 SMs hold are resident, and those that poll do not starve the others."""
    count, y = np.zeros(1, np.uint32), np.zeros(148 * 128, np.uint32)
    emulator.launch(BARRIER, grid=148, block=128, args=[count, y])
    assert (y == 148).all()


def test_a_huge_grid_costs_what_runs_of_it():
    body = "mov.u32 %r0, %ctaid.x; st.global.u32 [%a0], %r0;"
    ptx = kit.ptx(body, [np.zeros(4, np.uint32)])
    with pytest.raises(emulator.InstructionLimit, match="gave up after max_instructions = 20000"):
        emulator.launch(
            ptx, grid=2**31 - 1, block=32, args=[np.zeros(4, np.uint32)], max_instructions=20000
        )


@pytest.mark.parametrize(
    ("target", "body", "needs"),
    [
        ("sm_120a", "tcgen05.wait::ld.sync.aligned;", "sm_100a"),
        ("sm_100", "tcgen05.wait::ld.sync.aligned;", "sm_100a"),
        ("sm_90a", "tcgen05.wait::st.sync.aligned;", "sm_100a"),
        ("sm_100a", "wgmma.commit_group.sync.aligned;", "sm_90a"),
        ("sm_90", "wgmma.commit_group.sync.aligned;", "sm_90a"),
        ("sm_80", "griddepcontrol.wait;", "sm_90"),
        ("sm_86", "cp.async.bulk.commit_group;", "sm_90"),
        ("sm_89", "mul.rn.bf16x2 %r0, %r0, %r0;", "sm_90"),
        ("sm_89", "barrier.cluster.arrive;", "sm_90"),
    ],
)
def test_instructions_belong_to_their_targets(target, body, needs):
    ptx = kit.ptx(body, [], target=target)
    with pytest.raises(
        emulator.PtxError, match=rf"does not exist on .target {target} .*compile for .*{needs}"
    ):
        emulator.launch(ptx, block=32)
    for family in ("sm_103a", "sm_100f"):
        emulator.launch(kit.ptx("tcgen05.wait::ld.sync.aligned;", [], target=family), block=32)


def test_a_struct_may_hold_the_address_of_an_array_of_this_process():
    x = np.arange(8, dtype=np.uint32)
    ptx = """
    .version 8.6
    .target sm_100a
    .address_size 64
    .visible .entry k(.param .align 8 .b8 s[16], .param .u64 x) {
        .reg .b32 %r<2>; .reg .b64 %d<2>;
        ld.param.u64 %d0, [s+8]; ld.global.u32 %r0, [%d0+4]; add.u32 %r0, %r0, 41;
        st.global.u32 [%d0+8], %r0; ret; }"""
    emulator.launch(ptx, block=1, args=[struct.pack("QQ", 0, x.ctypes.data), x])
    assert x[2] == 42


def test_an_int_for_a_float_parameter_is_a_number():
    y = np.zeros(1, np.float32)
    ptx = """
    .version 8.6
    .target sm_100a
    .address_size 64
    .visible .entry k(.param .f32 v, .param .u64 y) {
        .reg .f32 %f; .reg .b64 %d;
        ld.param.f32 %f, [v]; ld.param.u64 %d, [y]; st.global.f32 [%d], %f; ret; }"""
    emulator.launch(ptx, block=1, args=[3, y])
    assert y[0] == 3.0


WAIT = """
    .shared .align 8 .b64 bar;
    mov.u32 %r1, bar; mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; setp.lt.u32 %p1, %r0, 32;
    @%p0 mbarrier.init.shared::cta.b64 [%r1], 1;
    BARRIER
    @%p0 mbarrier.arrive.shared::cta.b64 _, [%r1];
L:  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], PARITY; @!%p2 bra L;"""


def test_a_wait_that_no_barrier_orders_after_the_init_is_named_on_every_seed():
    right = WAIT.replace("PARITY", "0")
    for seed in range(10):
        assert not kit.run(right.replace("BARRIER", "bar.sync 0;"), block=64, seed=seed).hazards
        report = kit.run(right.replace("BARRIER", ""), block=64, seed=seed)
        assert "mbarrier used before init" in {h.kind for h in report.hazards}, seed


def test_a_deadlock_names_the_parity_and_what_the_mbarrier_waits_for():
    body = WAIT.replace("BARRIER", "bar.sync 0;").replace("PARITY", "1")
    body = body.replace("L:", "bar.sync 0;\nL:")
    with pytest.raises(
        emulator.Deadlock,
        match=r"the end of a phase of parity 1\) \(phase 1: waits for 1 of 1 arrivals",
    ):
        kit.run(body, block=64)
