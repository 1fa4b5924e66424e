"""Several devices at once: peers' stores are seen, races between devices are found, by every seed.

The kernel is the smallest message: device 0 stores data and a flag into device 1's memory, device 1
waits for the flag and reads.  What makes it a race is changed one instruction at a time.
"""

import numpy as np
import pytest

from blockscale import emulator

MESSAGE = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry message(.param .u32 sends, .param .u64 data, .param .u64 flag, .param .u64 out) {{
    .reg .pred %p; .reg .b32 %t, %s, %v; .reg .b64 %d, %f, %o, %i;
    mov.u32 %t, %tid.x;            mul.wide.u32 %i, %t, 4;
    ld.param.u32 %s, [sends];      ld.param.u64 %d, [data];
    ld.param.u64 %f, [flag];       ld.param.u64 %o, [out];
    add.s64 %d, %d, %i;            add.s64 %o, %o, %i;
    setp.eq.u32 %p, %s, 0;
    @%p bra WAIT;
    add.u32 %v, %t, 100;
    st.global.u32 [%d], %v;
    {barrier}
    setp.ne.u32 %p, %t, 0;
    @%p ret;
    {fence}
    mov.u32 %v, 7;
    {tell}.u32 [%f], %v;
    ret;
WAIT:
    {look}.u32 %v, [%f];
    setp.ne.u32 %p, %v, 7;
    @%p bra WAIT;
    {after}
    ld.global.u32 %v, [%d];
    st.global.u32 [%o], %v;
    ret;
}}"""
RIGHT = {
    "barrier": "bar.sync 0;",
    "fence": "",
    "tell": "st.release.sys.global",
    "look": "ld.acquire.sys.global",
    "after": "",
}


def message(seed, **changes):
    """Return what device 1 has read, and the kinds of hazards."""
    ptx = MESSAGE.format(**RIGHT | changes)
    world = emulator.World(2, seed)
    data, flag, out = np.zeros(64, np.uint32), np.zeros(2, np.uint32), np.zeros(64, np.uint32)
    places = world.add(1, data, "data"), world.add(1, flag, "flag"), world.add(1, out, "out")
    for device in (0, 1):
        world.launch(device, ptx, block=64, args=[1 - device, *places])
    reports = world.run()
    hazards = [hazard for own in reports for report in own for hazard in report.errors]
    return out, hazards


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fence": "fence.acq_rel.sys;", "tell": "st.relaxed.sys.global"},
        {"look": "ld.relaxed.sys.global", "after": "fence.acq_rel.sys;"},
        {"fence": "fence.sc.sys;", "tell": "st.volatile.global"},
        {"fence": "fence.release.sys; fence.acq_rel.gpu;", "tell": "st.relaxed.sys.global"},
        {"fence": "membar.sys; membar.cta;", "tell": "st.relaxed.sys.global"},
        {"look": "ld.relaxed.sys.global", "after": "fence.acquire.sys;"},
    ],
    ids=[
        "release",
        "fence and relaxed",
        "relaxed and fence",
        "volatile",
        "two fences",
        "two membars",
        "fences of one side",
    ],
)
def test_what_is_ordered_is_seen(seed, changes):
    out, hazards = message(seed, **changes)
    assert (out == np.arange(64) + 100).all()
    assert not hazards


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "changes",
    [
        {"tell": "st.release.gpu.global"},
        {"look": "ld.acquire.gpu.global"},
        {"tell": "st.relaxed.sys.global"},
        {"look": "ld.relaxed.sys.global"},
        {"fence": "fence.acq_rel.gpu;", "tell": "st.relaxed.sys.global"},
        {"look": "ld.relaxed.sys.global", "after": "fence.acq_rel.gpu;"},
        {"barrier": ""},
        {"fence": "fence.acquire.sys;", "tell": "st.relaxed.sys.global"},
        {"look": "ld.relaxed.sys.global", "after": "fence.release.sys;"},
        {"fence": "fence.proxy.tensormap::generic.release.sys;", "tell": "st.relaxed.sys.global"},
    ],
    ids=lambda changes: " ".join(changes.values()) or "no barrier",
)
def test_races_between_devices_are_found(seed, changes):
    _, hazards = message(seed, **changes)
    assert {hazard.kind for hazard in hazards} == {"race between devices"}
    assert "device 1 reads global memory that device 0 writes" in hazards[0].message


def test_launches_of_a_device_are_in_order():
    """What a launch wrote, the next one of the same device may read and overwrite."""
    ptx = MESSAGE.format(**RIGHT | {"tell": "st.relaxed.gpu.global", "barrier": ""})
    world = emulator.World(1)
    data, flag, out = np.zeros(64, np.uint32), np.zeros(2, np.uint32), np.zeros(64, np.uint32)
    places = [world.add(0, array, "a") for array in (data, flag, out)]
    for sends in (1, 0, 1, 0):  # warp 0 reads what warp 1 wrote
        block, first = (64, 0) if sends else (32, 128)
        world.launch(0, ptx, block=block, args=[sends, places[0] + first, *places[1:]])
    (reports,) = world.run()
    assert len(reports) == 4
    assert not [hazard for report in reports for hazard in report.errors]
    assert (out[:32] == np.arange(32, 64) + 100).all()


def test_who_waits_for_ever_is_given_up():
    ptx = MESSAGE.format(**RIGHT)
    world = emulator.World(2, seed=3)
    places = [world.add(1, np.zeros(64, np.uint32), name) for name in ("data", "flag", "out")]
    world.launch(1, ptx, block=64, args=[0, *places])
    with pytest.raises((emulator.Deadlock, emulator.InstructionLimit)) as caught:
        world.run(max_instructions=30_000)
    assert "device 1" in caught.value.__notes__[0]
