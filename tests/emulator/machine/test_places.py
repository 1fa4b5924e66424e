"""Special registers, and what a launch takes: arrays, tensors, views, structs, scalars."""

from __future__ import annotations

import numpy as np
import pytest

from blockscale import emulator
from tests.emulator import kit
from tests.emulator.kit import SEEDS

GRID, BLOCK, CLUSTER = (4, 2, 3), (5, 3, 4), (2, 1, 3)


def special(name, seed=0, grid=GRID, block=BLOCK, cluster=CLUSTER, wide=False):
    """Return a special register of every thread, [grid z, y, x, threads of a block]."""
    threads, ctas = int(np.prod(block)), int(np.prod(grid))
    reg = "%d20" if wide else "%r20"
    body = f"""
        mov.u32 %r0, %ctaid.z; mov.u32 %r1, %nctaid.y; mul.lo.u32 %r0, %r0, %r1;
        mov.u32 %r1, %ctaid.y;
        add.u32 %r0, %r0, %r1; mov.u32 %r1, %nctaid.x; mul.lo.u32 %r0, %r0, %r1;
        mov.u32 %r1, %ctaid.x;
        add.u32 %r0, %r0, %r1; mad.lo.u32 %r0, %r0, {threads}, %x; mad.wide.u32 %d0, %r0, 8, %a0;
        mov.u32 %r21, 0; mov.u32 %r20, 0;
        mov.{"u64" if wide else "u32"} {reg}, {name};
        {"" if wide else "mov.b64 %d20, {%r20, %r21};"} st.global.b64 [%d0], %d20;
    """
    out = np.zeros(ctas * threads, np.uint64)
    kit.run(body, out, grid=grid, block=block, cluster=cluster, seed=seed)
    return out.reshape(grid[2], grid[1], grid[0], threads)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_coordinates(seed, axis):
    """PTX ISA 10: x is the fastest, in blocks, clusters and grids."""
    z, y, x, t = np.meshgrid(*(np.arange(n) for n in (3, 2, 4, 60)), indexing="ij")
    cta = (x, y, z)[axis]
    letter = "xyz"[axis]
    tid = (t % 5, t // 5 % 3, t // 15)[axis]
    size = CLUSTER[axis]
    assert (special(f"%tid.{letter}", seed) == tid).all()
    assert (special(f"%ctaid.{letter}", seed) == cta).all()
    assert (special(f"%cluster_ctaid.{letter}", seed) == cta % size).all()
    assert (special(f"%clusterid.{letter}", seed) == cta // size).all()
    assert (special(f"%ntid.{letter}", seed) == BLOCK[axis]).all()
    assert (special(f"%nctaid.{letter}", seed) == GRID[axis]).all()
    assert (special(f"%cluster_nctaid.{letter}", seed) == size).all()
    assert (special(f"%nclusterid.{letter}", seed) == GRID[axis] // size).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_places_without_axes(seed):
    z, _, x, t = np.meshgrid(*(np.arange(n) for n in (3, 2, 4, 60)), indexing="ij")
    assert (special("%laneid", seed) == t % 32).all()
    assert (special("%warpid", seed) == t // 32).all()
    assert (special("%cluster_ctarank", seed) == x % 2 + 2 * z).all()
    assert (special("%cluster_nctarank", seed) == 6).all()
    assert (special("WARP_SZ", seed) == 32).all()
    assert (special("%nwarpid", seed) >= 2).all()
    assert (special("%smid", seed) < special("%nsmid", seed)).all()
    assert (special("%lanemask_lt", seed) == (1 << t % 32) - 1).all()


def test_clocks_run_forward():
    body = """
        mov.u64 %d0, %clock64; mov.u32 %r0, %clock; mov.u64 %d2, %globaltimer; nanosleep.u32 20;
        mov.u64 %d1, %clock64; mov.u32 %r1, %clock; mov.u64 %d3, %globaltimer; griddepcontrol.wait;
        griddepcontrol.launch_dependents;
        setp.gt.u64 %p0, %d1, %d0; setp.gt.u32 %p1, %r1, %r0; setp.ge.u64 %p2, %d3, %d2;
        and.pred %p0, %p0, %p1; and.pred %p0, %p0, %p2; selp.b32 %r2, 1, 0, %p0;
        st.global.b32 [%o], %r2;
    """
    assert (kit.values(body) == 1).all()


def test_sizes_of_shared_memory():
    body = """
        mov.u32 %r0, %dynamic_smem_size; mov.u32 %r1, %total_smem_size;
        mov.u32 %r2, dynamic; mov.u32 %r3, still; sub.u32 %r2, %r2, %r3; sub.u32 %r1, %r1, %r0;
        st.global.v4.b32 [%a0], {%r0, %r1, %r2, %r3};
    """
    module = ".extern .shared .align 16 .b8 dynamic[]; .shared .align 8 .b8 still[40];"
    out = kit.words(4)
    kit.run(body, out, block=1, module=module, smem=512)
    assert out.tolist()[0] == 512
    assert out[1] >= 40
    assert out.tolist()[2:] == [48, 1024]


# arguments ------------------------------------------------------------------------------------
ADD = """
    mad.wide.u32 %d0, %t, 4, %a{i}; ld.global.b32 %r{i}, [%d0];
    add.u32 %r{i}, %r{i}, {n}; st.global.b32 [%d0], %r{i};
"""


def test_arrays_change_in_place():
    whole = np.arange(96, dtype=np.uint32)
    part = whole[32:64]
    kit.run(ADD.format(i=0, n=1000), part)
    want = np.arange(96)
    want[32:64] += 1000
    assert (whole == want).all()


def test_views_of_one_array_are_one_memory():
    """Two overlapping views: what is stored through one is seen through the other."""
    whole = np.arange(96, dtype=np.uint32)
    body = ADD.format(i=0, n=1000) + "bar.sync 0;" + ADD.format(i=1, n=10)
    kit.run(body, whole[8:72], whole[40:])
    want = np.arange(96)
    want[8:40] += 1000
    want[40:72] += 10
    assert (whole == want).all()


def test_the_same_array_twice():
    x = np.arange(32, dtype=np.uint32)
    kit.run(ADD.format(i=0, n=1000) + ADD.format(i=1, n=10), x, x)
    assert (x == np.arange(32) + 1010).all()


def test_arrays_that_are_not_contiguous_get_their_elements_back():
    whole = np.arange(128, dtype=np.uint32).reshape(32, 4)
    kit.run(ADD.format(i=0, n=1000), whole[:, 1])
    want = np.arange(128).reshape(32, 4)
    want[:, 1] += 1000
    assert (whole == want).all()


def test_read_only_arrays_may_be_read_and_not_written():
    x = np.arange(32, dtype=np.uint32)
    x.flags.writeable = False
    body = "mad.wide.u32 %d0, %t, 4, %a0; ld.global.b32 %r0, [%d0]; st.global.b32 [%o], %r0;"
    assert (kit.values(body, x) == x).all()
    with pytest.raises(emulator.EmulationError, match="argument 0, a read-only array"):
        kit.run(ADD.format(i=0, n=1), x)
    assert (x == np.arange(32)).all()


def test_torch_tensors_change_in_place():
    torch = pytest.importorskip("torch")
    x = torch.arange(64, dtype=torch.int32)
    y = torch.arange(32, dtype=torch.bfloat16)
    kit_text = kit.ptx(ADD.format(i=0, n=1000), [np.zeros(1), np.zeros(1)])
    emulator.launch(kit_text, block=32, args=[x[16:48], y])
    want = np.arange(64)
    want[16:48] += 1000
    assert (x.numpy() == want).all()
    with pytest.raises(emulator.EmulationError, match="not contiguous"):
        emulator.launch(kit_text, block=32, args=[x[::2], y])


def test_empty_arrays_and_null_pointers():
    body = "setp.ne.u64 %p0, %a1, 0; @%p0 trap; setp.eq.u64 %p1, %a0, 0; @%p1 trap;"
    text = kit.ptx(body, [np.zeros(1), np.zeros(1)])
    emulator.launch(text, block=32, args=[np.zeros(0, np.float32), None])


PARAMS = [
    ".param .u8 a", ".param .u16 b", ".param .f32 c", ".param .align 8 .b8 s[24]", ".param .f64 d",
    ".param .s64 e", ".param .u64 out",
]  # fmt: skip


def test_parameters_of_every_kind():
    """Natural alignment, a struct by value with pointers in it, vector loads, an address of one."""
    body = """
        ld.param.u8 %r0, [a]; ld.param.u16 %r1, [b]; ld.param.f32 %r2, [c]; ld.param.f64 %d0, [d];
        ld.param.s64 %d1, [e]; ld.param.u64 %d2, [out];
        ld.param.v2.b32 {%r3, %r4}, [s+16]; ld.param.u64 %d3, [s+8]; ld.global.u32 %r5, [%d3+4];
        mov.b64 %d4, s; cvta.param.u64 %d4, %d4; ld.u8 %r6, [%d4+1]; ld.param.s8 %r7, [s+2];
        st.global.v4.b32 [%d2], {%r0, %r1, %r2, %r3};
        st.global.v4.b32 [%d2+16], {%r4, %r5, %r6, %r7};
        st.global.b64 [%d2+32], %d0; st.global.b64 [%d2+40], %d1;
    """
    out, inner = kit.words(12), np.array([5, 6], np.uint32)
    data = bytes([1, 2, 0xFE]) + bytes(13) + np.array([7, 8], np.uint32).tobytes()
    text = kit.ptx(body, [], params=PARAMS)
    args = [200, np.uint16(60000), 1.5, emulator.Struct(data, {8: inner}), 2.25, np.int32(-3), out]
    emulator.launch(text, block=1, args=args)
    assert out[:2].tolist() == [200, 60000]
    assert out[2:3].view(np.float32)[0] == 1.5
    assert out[3:8].tolist() == [7, 8, 6, 2, 0xFFFFFFFE]
    assert out[8:10].view(np.float64)[0] == 2.25
    assert out[10:].view(np.int64)[0] == -3


ONE = [".param .u32 n"]
WRONG = [
    ([], r"has 1 parameters and got 0 arguments"),
    ([1, 2], r"has 1 parameters and got 2 arguments"),
    ([1 << 32], "does not fit the parameter's 32 bits"),
    ([-(1 << 31) - 1], "does not fit"),
    ([b"abc"], "has 3 bytes and the parameter has 4"),
    ([np.float64(1)], "has 8 bytes and the parameter has 4"),
    ([np.zeros(4)], "has 8 bytes and the parameter has 4"),
]


@pytest.mark.parametrize(("args", "sentence"), WRONG)
def test_wrong_arguments(args, sentence):
    with pytest.raises(emulator.EmulationError, match=sentence):
        emulator.launch(kit.ptx("", [], params=ONE), block=1, args=args)


@pytest.mark.parametrize("value", [[1, 2], "text", {}, object(), np.array([None])])
def test_what_is_no_argument(value):
    with pytest.raises(emulator.EmulationError, match="pass an array"):
        emulator.launch(kit.ptx("", [], params=[".param .u64 p"]), block=1, args=[value])


LAUNCHES = [
    ({"block": 64}, ".reqntid 32", "is not the kernel's .reqntid"),
    ({"block": (8, 4)}, ".reqntid 32", "is not the kernel's .reqntid"),
    ({"block": 64}, ".maxntid 32", r"more than its \.maxntid"),
    ({"block": 2048}, "", "at most 1024"),
    ({"block": 32, "grid": 0}, "", "each dimension is at least 1"),
    ({"block": 32, "grid": 3, "cluster": 2}, "", "not a multiple of the cluster"),
    ({"block": 32, "grid": 32, "cluster": 32}, "", "more than 16 CTAs"),
    ({"block": 32, "dynamic_smem": 240_000}, "", "are more than the"),
    ({"block": 32, "entry": "other"}, "", "no kernel named 'other'"),
]


@pytest.mark.parametrize(("how", "directives", "sentence"), LAUNCHES)
def test_launches_that_the_driver_refuses(how, directives, sentence):
    with pytest.raises(emulator.EmulationError, match=sentence):
        emulator.launch(kit.ptx("", [], directives=directives), **how)


# places of errors -----------------------------------------------------------------------------
FAULTS = [
    ("ld.global.b32 %r0, [%a0+4096];", "past the end of argument 0"),
    ("add.u64 %d0, %a0, -8; st.global.b32 [%d0], 0;", "before the start of argument 0"),
    ("ld.global.b64 %d0, [%a0+4];", "misaligned"),
    ("mov.u64 %d0, 0; ld.b32 %r0, [%d0];", "in no allocation"),
    ("ld.shared.b32 %r0, [sh+64];", "out of bounds"),
    ("mov.u32 %r1, 16; ld.shared.b32 %r0, [%r1];", "first 1024 bytes belong"),
    ("ld.shared.b32 %r0, [sh+2];", "misaligned"),
    (".local .b32 own[4]; ld.local.b32 %r0, [own+64];", "out of bounds: a thread has"),
    (".local .align 8 .b32 own[4]; ld.local.b64 %d0, [own+4];", "misaligned"),
    ("mov.u64 %d0, 512; ld.param.b32 %r0, [%d0];", "bytes of parameters"),
    ("ld.param.b64 %d0, [p0+4];", "out of bounds|misaligned"),
    ("mapa.shared::cluster.u32 %r1, sh, 3; ld.shared::cluster.b32 %r0, [%r1];", "CTA rank 3"),
    ("trap;", "executed trap"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "sentence"), FAULTS)
@pytest.mark.parametrize("lane", [5, 31])
def test_faults_say_where_they_are(fault, sentence, lane):
    """The faulty lane is lane 5 or 31 of warp 1: kernel, line, warp and lane are in the error."""
    declared, _, rest = fault.rpartition("; ") if ".local" in fault else ("", "", fault)
    body = f"""
        {declared}{";" if declared else ""}
        setp.ne.u32 %p0, %x, {32 + lane}; @%p0 ret;
    {rest}
    """
    text = kit.ptx(body, [np.zeros(4, np.uint32)], module=".shared .align 8 .b32 sh[8];")
    line = next(i for i, row in enumerate(text.split("\n"), 1) if row.strip() == rest)
    with pytest.raises(emulator.IllegalOperation, match=sentence) as error:
        emulator.launch(text, block=64, args=[np.zeros(4, np.uint32)])
    place = error.value.place
    assert (place.kernel, place.line, place.warp) == ("kernel", line, 1)
    assert place.lane == lane or "trap" in rest
    assert place.cta == (0, 0, 0)
    assert str(error.value).startswith(f"kernel kernel, line {line}, CTA (0, 0, 0), warp 1")


def test_the_read_only_spaces_refuse_stores():
    with pytest.raises(emulator.EmulationError, match="read-only"):
        kit.run("st.param.b32 [p0], 0;", np.zeros(1, np.uint32))


SYNTAX = [
    ("frobnicate.b32 %r0, %r1;", "frobnicate.b32 is not modelled"),
    ("add.s32.foo %r0, %r1, %r2;", "add.s32.foo"),
    ("add.s32 %r0, %r1;", "1 source operands do not fit"),
    ("add.s32 %r0, %nothing, %r1;", "%nothing"),
    ("ld.global.b32 %r0, [%a0]", "where PTX wants"),
    ("ld.global.x32 %r0, [%a0];", r"\.x32"),
    ("ld.global.v2.b32 %r0, [%a0];", "wants 2 registers and has 1"),
    ("st.global.v2.b32 [%a0], {%r0};", "wants 2 values and has 1"),
    ("bra NOWHERE;", "NOWHERE"),
    ("mov.u32 %r0, nobody;", "nobody is not a variable"),
    ("ld.global.b32 %d0, [%b0];", "is no address"),
    ("mov.u32 %r0, %sparkle;", "%sparkle"),
]


@pytest.mark.parametrize(("statement", "sentence"), SYNTAX)
def test_bad_text_names_its_line(statement, sentence):
    text = kit.ptx(f"\n{statement}\n", [np.zeros(4, np.uint32)])
    line = text.split("\n").index(statement) + 1
    with pytest.raises(emulator.PtxError, match=sentence) as error:
        emulator.launch(text, block=32, args=[np.zeros(4, np.uint32)])
    assert line <= error.value.place.line <= line + 3
