"""emulator.run_module: the host code of a GPU library runs against the stand-in for the driver.

The library is host_library.c with the kernels of host_kernels.ptx, made here with gcc alone.
Data are small whole numbers, so that every result is exact.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm_ffi

from blockscale.emulator.errors import Deadlock, EmulationError
from blockscale.emulator.host import run_module
from blockscale.emulator.host.devices import guess
from blockscale.emulator.host.memory import Memory
from blockscale.emulator.host.tensors import Arguments
from blockscale.emulator.launching import front_door
from blockscale.emulator.report import Report
from tests.emulator.host import fatbins, gpu_library
from tests.emulator.host.gpu_library import (
    expect_scaled_add,
    kernels,
    link,
    link_again,
    vectors,
    whole,
)

MULTIPROCESSORS, CAPABILITY_MAJOR = 16, 75


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return gpu_library.build(tmp_path_factory.mktemp("library"))


def test_a_launch_with_every_kind_of_parameter(library):
    """Parameters of 1, 4 and 8 bytes land where the PTX has them; TVM's convention is untouched."""
    x, y, out = vectors()
    run = run_module(library, "scaled_add", x, y, out, 2.0, 64)
    assert torch.equal(out, expect_scaled_add(x, y, 2.0))
    [launch], [report] = run.launches, run.reports
    assert (launch.kernel, launch.grid, launch.block) == ("scaled_add", (5, 1, 1), (64, 1, 1))
    assert (run.target, type(report)) == ("sm_100a", Report)
    run.check()


def test_numpy_and_dlpack_arguments(library):
    x, y = np.arange(130, dtype="f4"), np.arange(130, dtype="f4")[::-1].copy()
    y.flags.writeable = False
    out = torch.full((130,), torch.nan)
    run_module(library, "scaled_add", x, y, tvm_ffi.from_dlpack(out), -1.0, 32)
    assert torch.equal(out, expect_scaled_add(x, y, -1.0))


@pytest.mark.parametrize(
    ("value", "dtype", "strides"),
    [
        (torch.zeros(3, dtype=torch.bfloat16), "bfloat16", (1,)),
        (torch.zeros(3, dtype=torch.float8_e4m3fn), "float8_e4m3fn", (1,)),
        (torch.zeros(2, 3).T, "float32", (1, 3)),
        (torch.zeros(2, requires_grad=True), "float32", (1,)),
        (torch.zeros(()), "float32", ()),
        (torch.zeros(0, 4), "float32", (4, 1)),
        (np.zeros((3, 4), "i2")[::-1, ::2], "int16", (-4, 2)),
        (np.zeros(3, ml_dtypes.bfloat16), "bfloat16", (1,)),
        (np.zeros(3, ml_dtypes.float8_e8m0fnu), "float8_e8m0fnu", (1,)),
    ],
)
def test_tensors_claim_to_be_on_a_gpu(value, dtype, strides):
    """Whatever the dtype and the strides, in a list or not."""
    memory = Memory()
    with Arguments([value, [value, 3], "text"], memory) as arguments:
        first, (second, three), text = arguments.values
        for tensor in (first, second):
            assert (str(tensor.device), str(tensor.dtype)) == ("cuda:0", dtype)
            assert (tuple(tensor.shape), tuple(tensor.strides)) == (tuple(value.shape), strides)
        assert (three, text) == (3, "text")
        if tensor.numel():
            [region] = memory.regions
            assert region.label == "argument 0, argument 1[0]"
    assert not memory.regions


@pytest.mark.parametrize("array", [torch.zeros(500), np.zeros(500, "f4")])
def test_a_view_keeps_its_alignment(array):
    """As if the whole storage had come from cudaMalloc."""
    memory = Memory()
    with Arguments([array[130:200], array[199:210]], memory):
        [region] = memory.regions
        assert (region.address % 256, region.data.size) == (130 * 4 % 256, 80 * 4)


def test_state_lives_from_call_to_call(library):
    """The library loads its code once, as on a GPU, also when it is named in another way."""
    loads = [
        run_module(lib, "scaled_add", *vectors(), 2.0, 64).result
        for lib in (
            library,
            str(library),
            library.parent / ".." / library.parent.name / "library.so",
        )
    ]
    assert loads == [1, 1, 1]


def test_views_and_overlapping_tensors(library):
    """A view keeps its place; in place works; what lies outside the view is not touched."""
    storage = torch.full((1000,), 7.0)
    x, y = storage[3:103], storage[53:153]  # overlap, misaligned to 16 bytes
    x.copy_(whole(100))
    y[50:].copy_(whole(50))
    want = expect_scaled_add(x.clone(), y.clone(), 2.0)
    out = storage[400:500]
    run_module(library, "scaled_add", x, y, out, 2.0, 64)
    assert torch.equal(out, want)
    assert (storage[153:400] == 7).all()
    assert (storage[500:] == 7).all()
    want = expect_scaled_add(x.clone(), x.clone(), 1.0)
    run_module(library, "scaled_add", x, x, x, 1.0, 64)
    assert torch.equal(x, want)


def test_tensors_do_not_reach_each_other(library):
    """One element beyond the end is an error, though torch's allocations may touch."""
    x, y, out = (t[:299] for t in vectors())
    code = fatbins.ptx_container(
        kernels("sm_100a").replace("setp.ge.u32", "setp.gt.u32"), "sm_100a"
    )
    broken = link(library.parent / "beyond", code)
    with pytest.raises(EmulationError, match="scaled_add"):
        run_module(broken, "scaled_add", x, y, out, 2.0, 64)


def test_tensor_map_and_cluster(library):
    """The host encodes a map and launches clusters of two with cuLaunchKernelEx."""
    x = whole(24, 128)
    out = torch.full_like(x, torch.nan)
    run = run_module(library, "tma_double", x, out, 32, 0)
    rank = torch.arange(128) // 32 % 2
    assert torch.equal(out, 2 * x + rank)
    [launch] = run.launches
    assert (launch.grid, launch.cluster, launch.programmatic) == ((4, 3, 1), (2, 1, 1), True)
    run.check()


def test_programmatic_launch_of_a_kernel_that_does_not_wait(library):
    code = kernels("sm_100a").replace("    griddepcontrol.wait;\n", "")
    hasty = link(library.parent / "hasty", fatbins.ptx_container(code, "sm_100a"))
    x = whole(8, 64)
    for lib, count in ((library, 0), (hasty, 1)):
        [report] = run_module(lib, "tma_double", x, torch.empty_like(x), 32, 0).reports
        found = [h for h in report.hazards if h.kind == "programmatic launch"]
        assert [h.severity for h in found] == ["warning"] * count


def test_cluster_must_divide_the_grid(library):
    x = whole(8, 96)
    with pytest.raises(EmulationError, match=r"grid \(3, 1, 1\) is not a multiple of cluster \(2"):
        run_module(library, "tma_double", x, torch.empty_like(x), 32, 0)


@pytest.mark.parametrize("ignore", [0, 1])
def test_a_wrong_tensor_map_is_named(library, ignore):
    """The rule reaches Python, whether or not the host code looks at the error code."""
    x = whole(8, 128)
    with pytest.raises(EmulationError, match=r"cuTensorMapEncodeTiled: .*box_dim") as caught:
        run_module(library, "tma_double", x, torch.empty_like(x), 257, ignore)
    cause = caught.value.__cause__
    if not ignore:
        assert "tma_double: the tensor map of x: CUDA_ERROR_INVALID_VALUE" in str(cause)


def test_launches_memsets_and_copies_run_in_stream_order(library):
    x = whole(200)
    out = torch.full_like(x, torch.nan)
    run = run_module(library, "chain", x, out)
    want = expect_scaled_add(x, expect_scaled_add(x, torch.ones(200), 1.0), 2.0)
    assert torch.equal(out, want)
    assert [launch.block[0] for launch in run.launches] == [64, 128]
    assert [report.kernel for report in run.reports] == ["scaled_add"] * 2


@pytest.mark.parametrize(("shared", "asked"), [(49152, 0), (49152, 1), (232448, 1)])
def test_dynamic_shared_memory(library, shared, asked):
    x = whole(64)
    want = x.flip(0)
    run = run_module(link_again(library, f"{shared}-{asked}"), "reverse", x, shared, asked)
    assert torch.equal(x, want)
    assert run.launches[0].dynamic_smem == shared


@pytest.mark.parametrize(
    ("shared", "asked", "sentence"),
    [
        (50000, 0, "50000 bytes of dynamic shared memory, and 49152 are allowed; set CU_FUNC"),
        (240000, 1, "240000 bytes of dynamic shared memory are more than the 232448 that sm_100a"),
    ],
)
def test_too_much_shared_memory(library, shared, asked, sentence):
    with pytest.raises(EmulationError, match=sentence):
        run_module(link_again(library, f"x{shared}"), "reverse", torch.zeros(64), shared, asked)


def test_block_larger_than_compiled_for(library):
    with pytest.raises(EmulationError, match=r"512 threads, .* at most 256 \(.maxntid\); launch f"):
        run_module(library, "scaled_add", *vectors(), 2.0, 512)


def test_an_empty_grid_is_refused(library):
    with pytest.raises(EmulationError, match=r"grid is \(0, 1, 1\).* skip the launch of an empty"):
        run_module(library, "scaled_add", *vectors(0), 2.0, 64)


def test_the_functions_own_checks_pass_through(library):
    x, y, out = vectors()
    with pytest.raises(ValueError, match=r"^scaled_add: x, y and out differ in size") as caught:
        run_module(library, "scaled_add", x, y, out[1:], 2.0, 64)
    assert not isinstance(caught.value, EmulationError)
    with pytest.raises(TypeError, match=r"^expected float32"):
        run_module(library, "scaled_add", x.double(), y, out, 2.0, 64)
    run_module(library, "scaled_add", x, y, out, 2.0, 64)  # and nothing is left behind


def test_an_error_in_a_kernel_is_the_emulators_own(library):
    """It is raised as it is, with its place and its launch; later calls work."""
    code = kernels("sm_100a").replace("    mov.u32 %r2, %ctaid.x;\n", "    trap;\n", 1)
    broken = link(library.parent / "trap", fatbins.ptx_container(code, "sm_100a"))
    x, y, out = vectors()
    with pytest.raises(EmulationError, match="scaled_add") as caught:
        run_module(broken, "scaled_add", x, y, out, 2.0, 64)
    assert caught.value.place is not None
    assert "launch 1 of this call" in caught.value.__notes__[0]
    assert "CUDA_ERROR_LAUNCH_FAILED" in str(caught.value.__cause__)
    assert run_module(broken, "attribute", CAPABILITY_MAJOR).result == 10
    run_module(library, "scaled_add", x, y, out, 2.0, 64)
    assert torch.equal(out, expect_scaled_add(x, y, 2.0))


def test_options_reach_the_machine(library, monkeypatch):
    """Launch i of a call gets seed + i; without a limit of the caller the machine has its own."""
    got, real = [], front_door.run

    def run(*args, seed, max_instructions=None, **rest):
        got.append((seed, max_instructions))
        limit = {} if max_instructions is None else {"max_instructions": max_instructions}
        return real(*args, seed=seed, **limit, **rest)

    monkeypatch.setattr(front_door, "run", run)
    x = whole(64)
    run_module(library, "chain", x, torch.empty_like(x), seed=7, max_instructions=123456)
    run_module(library, "chain", x, torch.empty_like(x))
    assert got == [(7, 123456), (8, 123456), (0, None), (1, None)]


def test_a_deadlock_is_the_callers_exception(library):
    """All threads wait for a copy that nobody asked for."""
    ptx = kernels("sm_100a").replace("@%p1 bra WAIT;", "bra WAIT;")
    endless = link(library.parent / "endless", fatbins.ptx_container(ptx, "sm_100a"))
    x = whole(8, 64)
    with pytest.raises(Deadlock, match="tma_double"):
        run_module(endless, "tma_double", x, torch.empty_like(x), 32, 0)


def test_a_kernel_may_not_write_to_a_read_only_array(library):
    x, y, out = (t.numpy() for t in vectors())
    out.flags.writeable = False
    with pytest.raises(EmulationError, match="wrote to argument 2, a read-only array"):
        run_module(library, "scaled_add", x, y, out, 2.0, 64)
    assert np.isnan(out).all()


def test_device_of_the_target(library, tmp_path):
    assert run_module(library, "attribute", CAPABILITY_MAJOR).result == 10
    assert run_module(library, "attribute", MULTIPROCESSORS).result == 148
    assert run_module(library, "attribute", MULTIPROCESSORS, multiprocessors=4).result == 4
    with pytest.raises(EmulationError, match="cuDeviceGetAttribute: attribute 999 is not modelled"):
        run_module(library, "attribute", 999)
    with pytest.raises(EmulationError, match="no device that the emulator can play; choose one of"):
        run_module(library, "attribute", 1, target="sm_70")
    with pytest.raises(EmulationError, match="holds ptx sm_100a, of which no PTX runs on sm_90a"):
        run_module(library, "attribute", 1, target="sm_90a")


@pytest.mark.parametrize(
    ("inside", "played"),
    [
        (["sm_90a", "sm_100a"], "sm_100a"),
        (["sm_90", "sm_120a"], "sm_120a"),
        (["sm_90a"], "sm_90a"),
        (["sm_80"], "sm_100a"),
        (["sm_100f"], "sm_100a"),
        ([], "sm_100a"),
    ],
)
def test_default_target(inside, played):
    """A device for which there is PTX of its own comes first."""
    assert guess(inside) == played


def test_several_architectures_in_one_file(tmp_path):
    """Each target gets its own PTX and its own copy of the library."""
    texts = {
        "sm_90a": kernels("sm_90a"),
        "sm_100a": kernels("sm_100a").replace("0f40000000", "0f40400000"),  # 3 instead of 2
    }
    images = [fatbins.image(arch, text.encode() + b"\0") for arch, text in texts.items()]
    library = link(tmp_path, fatbins.container(*images))
    x = whole(8, 64)
    for target, factor in (("sm_90a", 2), (None, 3), ("sm_90", 2)):
        out = torch.full_like(x, torch.nan)
        run = run_module(library, "tma_double", x, out, 32, 0, target=target)
        assert torch.equal(out, factor * x + torch.arange(64) // 32), target
        assert run.target == ("sm_90a" if factor == 2 else "sm_100a")


def test_plain_ptx_as_code(tmp_path):
    library = link(tmp_path, kernels("sm_90a").encode())
    x, y, out = vectors()
    run_module(library, "scaled_add", x, y, out, 2.0, 64, target="sm_90a")
    assert torch.equal(out, expect_scaled_add(x, y, 2.0))


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            fatbins.container(fatbins.image("sm_100a", b"\x7fELF", fatbins.CUBIN)),
            "only machine code",
        ),
        (b"\x7fELF" + bytes(44) + b"\x02\x64\x00\x06", r"holds only machine code \(sm_100\)"),
        (b"int main() {}", "neither a fat binary nor a cubin nor PTX"),
    ],
)
def test_code_without_ptx(tmp_path, code, sentence):
    with pytest.raises(EmulationError, match=sentence):
        run_module(link(tmp_path, code), "scaled_add", *vectors(), 2.0, 64)


def test_bad_arguments_of_run_module(library, tmp_path):
    with pytest.raises(AttributeError, match="has no function 'nope'"):
        run_module(library, "nope")
    with pytest.raises(FileNotFoundError):
        run_module(tmp_path / "nothing.so", "f")
    with pytest.raises(TypeError, match="lib is a int; pass the path of an exported library"):
        run_module(3, "f")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(EmulationError, match="the dynamic loader refused it"):
        run_module(tmp_path / "text.so", "f")
    with pytest.raises(ValueError, match="argument 0 is on meta; the emulator runs on tensors of"):
        run_module(library, "scaled_add", torch.empty(3, device="meta"))
