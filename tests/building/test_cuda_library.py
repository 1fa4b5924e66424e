"""CUDA libraries: what their C runtime checks and launches, played by the emulator."""

import re
import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from blockscale.base.manifest import read_manifest
from blockscale.building.export_cuda import write_cuda_library
from blockscale.emulator import run_module
from blockscale.emulator.errors import EmulationError
from blockscale.emulator.host.kernels import EmulatedDriver
from blockscale.emulator.host.memory import Memory
from blockscale.emulator.host.results import Refusal, Result
from blockscale.emulator.host.tensors import Arguments
from blockscale.runtime import library as runtime_library
from blockscale.runtime.library import load, loaded_function, open_library
from tests.kit import tiny_cuda
from tests.kit.tiny_cuda import WIDTH, library_file

NAN = float("nan")


def tensors(rows=4):
    """Return x, codes, bias, residual, out, residual_out."""
    generator = torch.Generator().manual_seed(rows)
    x, residual = torch.randint(-99, 99, (2, rows, WIDTH), generator=generator).float()
    codes = torch.randint(0, 256, (rows, WIDTH), generator=generator, dtype=torch.uint8)
    bias = torch.arange(rows, dtype=torch.float32)
    return x, codes, bias, residual, torch.full_like(x, NAN), torch.full_like(x, NAN)


def mix(*arguments, **options):
    return run_module(library_file(), "mix", *arguments, **options)


@pytest.mark.parametrize("target", tiny_cuda.ARCHS)
def test_every_argument_arrives(target):
    x, codes, bias, residual, out, updated = tensors()
    scale = torch.tensor([2.0])
    run = mix(x, codes, scale, bias, 0.5, 7, residual, out, updated, target=target)
    assert torch.equal(out, x * 2 + codes + bias[:, None])
    assert torch.equal(updated, residual * 0.5 + 7)
    [launch] = run.launches
    assert (launch.kernel, launch.grid, launch.block) == ("mix_kernel", (4, 1, 1), (64, 1, 1))
    assert (launch.dynamic_smem, launch.programmatic) == (7 * 1024, False)
    assert run.target == target


def test_defaults():
    """None: constants on the device, one of them as long as x has rows, numbers, and in place."""
    for rows in (4, 200, 3):  # the constant grows, and stays
        x, codes, _, residual, out, _ = tensors(rows)
        want = residual * torch.tensor(0.1) + 3
        mix(x, codes, None, None, None, None, residual, out, None)
        assert torch.equal(out, x + codes)
        torch.testing.assert_close(residual, want, rtol=1e-6, atol=1e-5)


def test_an_alias_may_be_given():
    x, codes, _, residual, out, _ = tensors()
    want = residual * 2 + 3
    mix(x, codes, None, None, 2, True + 2, residual, out, residual)
    assert torch.equal(residual, want)


def test_leading_dimensions_are_one():
    x, codes, _, residual, out, _ = tensors(12)
    want = x + codes
    cut = (3, 4, WIDTH)
    mix(x.view(cut), codes, None, None, 1, 0, residual.view(2, 2, 3, WIDTH), out.view(cut), None)
    assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_bytes_by_another_name(dtype):
    x, codes, _, residual, out, _ = tensors()
    mix(x, codes.view(dtype), None, None, 1, 0, residual, out, None)
    assert torch.equal(out, x + codes)


@pytest.mark.parametrize("kibibytes", [20, 48, 100, 60, 227])
def test_dynamic_shared_memory(kibibytes):
    x, codes, _, residual, out, _ = tensors(1)
    run = mix(x, codes, None, None, 1, kibibytes, residual, out, None)
    assert run.launches[0].dynamic_smem == kibibytes * 1024
    assert torch.equal(out, x + codes)


@pytest.mark.parametrize("flags", [None, 0, 1])
def test_clusters_and_programmatic_launch(flags):
    y = torch.full((6,), -1, dtype=torch.int32)
    given = () if flags is None else (flags,)
    [launch] = run_module(library_file(), "pair", y, *given).launches
    assert torch.equal(y, torch.arange(6, dtype=torch.int32) % 2)
    assert (launch.cluster, launch.programmatic) == ((2, 1, 1), bool(flags))


@pytest.mark.parametrize(
    ("tag", "field"),
    [
        ("tirx.use_cooperative_launch", "cooperative"),
        ("tirx.use_programtic_dependent_launch", "programmatic"),
    ],
)
def test_launch_tags(tag, field, tmp_path):
    """A tag is no argument, wherever it stands."""
    code = tiny_cuda.code("pair", "sm_100a")
    kernels = (replace(code.kernels[0], launch=(tag, *code.kernels[0].launch)),)
    contents = tiny_cuda.manifest("pair", archs=("sm_100a",))
    path = write_cuda_library([replace(code, kernels=kernels)], contents, tmp_path / "l.so")
    y = torch.empty(4, dtype=torch.int32)
    [launch] = run_module(path, "pair", y).launches
    assert (launch.cooperative, launch.programmatic) == tuple(
        name == field for name in ("cooperative", "programmatic")
    )
    assert (launch.grid, launch.cluster) == ((4, 1, 1), (2, 1, 1))


def test_an_empty_grid_is_not_launched():
    x, codes, _, residual, out, _ = tensors(0)
    assert mix(x, codes, None, None, 1, 1, residual, out, None).launches == []
    assert run_module(library_file(), "pair", torch.empty(0, dtype=torch.int32)).launches == []


def test_the_driver_refuses():
    """The error names the function, the kernel, its sizes and CUDA's name for the reason."""
    x, codes, _, residual, out, _ = tensors()
    with pytest.raises(EmulationError) as caught:
        mix(x, codes, None, None, 1, 300, residual, out, None)
    assert re.search(
        r"^mix: allowing what is needed for kernel mix_kernel on device 0, emulated B200, failed: "
        r"CUDA_ERROR_INVALID_VALUE \(1: .*\); grid \(4, 1, 1\), block \(64, 1, 1\), 307200 bytes",
        str(caught.value.__cause__),
    )
    y = torch.empty(5, dtype=torch.int32)
    with pytest.raises(EmulationError) as caught:
        run_module(library_file(), "pair", y)
    assert "launching kernel pair_kernel" in str(caught.value.__cause__)


def bad(**changes):
    """Return the arguments of mix, with some replaced."""
    x, codes, bias, residual, out, updated = tensors()
    given = {"x": x, "codes": codes, "scale": None, "bias": bias, "a": 1.0, "k": 1}
    given |= {"residual": residual, "out": out, "residual_out": updated}
    assert not changes.keys() - given.keys()
    return (given | {k: v(given) if callable(v) else v for k, v in changes.items()}).values()


BIG = torch.zeros(9 * WIDTH + 2)
BAD_CALLS = {
    "missing": ({"x": None}, TypeError, r"x is None; pass a CUDA tensor of float32\[rows, 64\]"),
    "number": ({"x": 3}, TypeError, "x is an int; pass a CUDA tensor"),
    "text": ({"x": "x"}, TypeError, "x is a string; pass a CUDA tensor"),
    "dtype": (
        {"x": lambda g: g["x"].half()},
        TypeError,
        r"x has dtype float16, expected float32\[rows, 64\]; pass a tensor",
    ),
    "bytes": ({"codes": lambda g: g["codes"].view(torch.int8)}, TypeError, "codes has dtype int8,"),
    "float8": (
        {"codes": lambda g: g["codes"].view(torch.float8_e5m2)},
        TypeError,
        r"codes has dtype DLPack dtype \(12, 8, 1\)",
    ),
    "scalar": ({"a": "1"}, TypeError, "a is a string; pass a float"),
    "scalar tensor": ({"a": torch.ones(1)}, TypeError, "a is a tensor; pass a float"),
    "integer": ({"k": 1.5}, TypeError, "k is a float; pass an int"),
    "large": ({"k": 2**31}, ValueError, "k is 2147483648, which is no int32; pass a smaller"),
    "stride": ({"x": torch.zeros(4, 128)[:, ::2]}, ValueError, "x is not contiguous.*copy$"),
    "output": ({"out": torch.zeros(4, 128)[:, :64]}, ValueError, "out is not.*a contiguous output"),
    "rank": ({"x": torch.zeros(64)}, ValueError, "x has 1 dimensions, but .* has 2; reshape it"),
    "ranks": ({"scale": torch.ones(1, 1)}, ValueError, r"scale has 2 dimen.*float32\[1\] has 1"),
    "misaligned": (
        {"x": BIG[1 : 4 * WIDTH + 1].view(4, WIDTH)},
        ValueError,
        r"x lies at address 0x\w+, which is not a multiple of 16 bytes.* pass a copy of x",
    ),
    "overlap": ({"out": lambda g: g["x"]}, ValueError, "out overlaps x in memory.*own for out"),
    "partly": (
        {"residual": BIG[: 4 * WIDTH].view(4, WIDTH), "residual_out": BIG[64:320].view(4, WIDTH)},
        ValueError,
        "residual_out overlaps residual in memory",
    ),
    "outputs": ({"residual_out": lambda g: g["out"]}, ValueError, "out overlaps residual_out"),
    "alias": ({"residual": lambda g: g["out"]}, ValueError, "out overlaps residual in"),
    "empty": ({"x": torch.zeros(4, 0)}, ValueError, "x has no elements, but the output has"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls(case):
    changes, error, sentence = BAD_CALLS[case]
    with pytest.raises(error, match=f"(?s)^mix: {sentence}") as caught:
        mix(*bad(**changes))
    assert not isinstance(caught.value, EmulationError)


def test_wrong_number_of_arguments():
    with pytest.raises(TypeError, match=r"^mix: got 2 arguments for 9 parameters, and launch fl"):
        mix(1, 2)
    with pytest.raises(TypeError, match=r"^mix: the launch flags are a float; pass an int"):
        mix(*bad(), 1.0)


def test_alignment_of_the_manifest():
    """16 bytes unless the tensor is short or a vector of any length; or what the builder said."""
    params = read_manifest(library_file())["functions"]["mix"]["params"]
    found = {p["name"]: p.get("align") for p in params}
    assert found == {
        **dict.fromkeys(("x", "codes", "residual", "out", "residual_out"), 16),
        "scale": 4,
        "bias": 4,
        "a": None,
        "k": None,
    }
    x, codes, _, residual, out, _ = tensors()
    mix(x, codes, BIG[1:2], BIG[3:7], 1, 0, residual, out, None)
    assert torch.equal(out, codes.float())


def test_no_thread_local_storage():
    """Of the kind that needs no symbol of the loader, glibc has enough for some 200 libraries."""
    thread_local = 7  # PT_TLS
    elf = library_file().read_bytes()
    (start,), (size, count) = struct.unpack_from("<Q", elf, 32), struct.unpack_from("<HH", elf, 54)
    kinds = [struct.unpack_from("<I", elf, start + i * size)[0] for i in range(count)]
    assert 1 in kinds  # PT_LOAD: these are program headers
    assert thread_local not in kinds


def test_not_on_a_gpu():
    """Loaded for real, and not by the emulator: the tensors are where they are."""
    function = open_library(library_file()).functions["mix"]._compiled
    with pytest.raises(ValueError, match=r"^mix: x is not on a CUDA device.* pass x.cuda\(\)"):
        function(*bad())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_no_driver():
    """A library loads without a driver, and says so when it is called."""
    library = open_library(library_file())
    assert (library.kind, [*library]) == ("cuda", ["mix", "pair"])
    with (
        Arguments([*bad()], Memory()) as arguments,
        pytest.raises(RuntimeError, match=r"^mix: needs the NVIDIA driver, but this machine has n"),
    ):
        library["mix"](*arguments.values)


def test_libraries_of_both_kinds_are_told_apart():
    load(library_file())
    assert loaded_function("mix") is None
    assert loaded_function("mix", "cuda").kind == "cuda"
    assert repr(load(library_file())).endswith("cuda sm_90a+sm_100a, 2 of 2 tuned: mix, pair>")


@pytest.mark.parametrize(("gpu", "chosen"), [((9, 0), 1), ((10, 0), 0), ((8, 0), 0), (None, 0)])
def test_of_libraries_that_of_the_gpu_is_used(monkeypatch, gpu, chosen):
    """Each architecture may have a file; where none is the GPU's, the last one says what it has."""

    def made(arch):
        manifest = {"target": {"archs": [arch]}}
        return SimpleNamespace(kind="cuda", functions={"mix": arch}, manifest=manifest)

    libraries = [made("sm_100a"), made("sm_90a"), made("sm_90a")]
    monkeypatch.setattr(runtime_library, "_in_use", libraries)
    monkeypatch.setattr(runtime_library.host, "capability", lambda: gpu)
    assert loaded_function("mix", "cuda") == libraries[chosen].functions["mix"]


def test_a_forked_process(monkeypatch):
    """The driver's own word for it, not initialized, says neither why nor what to do."""

    def refuse(*_):
        raise Refusal(Result.CUDA_ERROR_NOT_INITIALIZED, "forked")

    x, codes, _, residual, out, _ = tensors()
    monkeypatch.setattr(EmulatedDriver, "_launch", refuse)
    with pytest.raises(EmulationError) as caught:
        mix(x, codes, None, None, 1, 1, residual, out, None)
    assert re.search(
        r"mix: launching kernel mix_kernel .*: CUDA_ERROR_NOT_INITIALIZED \(3: a process that was "
        r"forked cannot use CUDA as its parent did; start it with multiprocessing's 'spawn'\)",
        str(caught.value.__cause__),
    )
