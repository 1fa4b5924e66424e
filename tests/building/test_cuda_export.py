"""CUDA libraries: which of their code a device runs, and what goes into them."""

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tvm.script import tirx as T
from tvm_ffi import libinfo

from blockscale.base import shapes
from blockscale.base.errors import LibraryError, LinkError
from blockscale.base.files import HOST_C
from blockscale.base.manifest import REPLAY
from blockscale.building import export_cuda
from blockscale.building.export_cuda import CFLAGS, RUNTIME_SOURCES, write_cuda_library
from blockscale.emulator import run_module
from blockscale.lower.code import FunctionCode, KernelCode
from blockscale.specs.spec import Param
from tests.kit import tiny_cuda
from tests.kit.tiny_cuda import library_file, manifest

INCLUDE = [f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]


# Which code runs where ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    path = tmp_path_factory.mktemp("native") / "choice.so"
    source = Path(__file__).with_name("native_cuda.c")
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-Bsymbolic"]
    command = ["gcc", *flags, f"-I{HOST_C}", *INCLUDE, str(source), "-o", str(path)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(path))
    library.choose.restype = ctypes.c_char_p
    return library


def parsed(arch):
    major, minor, suffix = re.fullmatch(r"\w+_(\d+)(\d)([af]?)", arch).groups()
    return int(major), int(minor), ord(suffix or "\0"), int(arch.startswith("compute"))


def choose(native, archs, device):
    names = (ctypes.c_char_p * len(archs))(*(arch.encode() for arch in archs))
    numbers = [number for arch in archs for number in parsed(arch)]
    found = native.choose(len(archs), names, (ctypes.c_int * len(numbers))(*numbers), *device)
    return found.decode()


@pytest.mark.parametrize(
    ("archs", "device", "chosen"),
    [
        (["sm_90a", "sm_100a"], (9, 0), "sm_90a"),
        (["sm_90a", "sm_100a"], (10, 0), "sm_100a"),
        (["sm_100a", "sm_100f"], (10, 3), "sm_100f"),
        (["sm_100f", "sm_103a"], (10, 3), "sm_103a"),
        (["sm_100f", "sm_103f"], (10, 3), "sm_103f"),
        (["sm_80", "sm_86"], (8, 9), "sm_86"),
        (["sm_80", "sm_86"], (8, 0), "sm_80"),
        (["sm_90", "sm_90a"], (9, 0), "sm_90a"),
        (["compute_90", "sm_100a"], (10, 0), "sm_100a"),
        (["compute_90", "sm_100a"], (12, 0), "compute_90"),
        (["compute_80", "compute_90"], (12, 0), "compute_90"),
        (["compute_100f", "sm_90a"], (10, 3), "compute_100f"),
        (["compute_120", "sm_120"], (12, 1), "sm_120"),
    ],
)
def test_the_best_code_is_chosen(native, archs, device, chosen):
    assert choose(native, archs, device) == chosen
    assert choose(native, archs[::-1], device) == chosen


@pytest.mark.parametrize(
    ("arch", "device"),
    [
        ("sm_90a", (10, 0)),
        ("sm_100a", (10, 3)),
        ("sm_100f", (12, 0)),
        ("sm_103f", (10, 0)),
        ("sm_86", (8, 0)),
        ("sm_80", (9, 0)),
        ("compute_90a", (10, 0)),
        ("compute_100", (9, 0)),
        ("compute_100f", (11, 0)),
    ],
)
def test_code_that_does_not_run(native, arch, device):
    assert native.fit(*parsed(arch), *device) == -1


def test_no_code_for_the_device(native):
    assert choose(native, ["sm_90a", "compute_100a"], (8, 9)) == (
        "RuntimeError: f: device 1 (Test GPU) has compute capability 8.9, but the library holds "
        "code for sm_90a, compute_100a (PTX); build it with target sm_89 as well"
    )
    assert choose(native, ["sm_90a"], (10, 3)).endswith("build it with target sm_103a as well")


def test_no_code_for_the_device_in_a_library(tmp_path):
    only = write_cuda_library(
        [tiny_cuda.code("pair", "sm_90a")], manifest("pair", archs=("sm_90a",)), tmp_path / "l.so"
    )
    y = torch.empty(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"^pair: device 0 \(emulated B200\) has compute"):
        run_module(only, "pair", y, target="sm_100a")


# Writing libraries ----------------------------------------------------------------------------


def test_what_the_library_exports_and_needs():
    def lines(*command):
        done = subprocess.run([*command, str(library_file())], capture_output=True, text=True)
        return done.stdout.splitlines()

    defined = [line.split()[-1] for line in lines("nm", "-D", "--defined-only")]
    replay = [f"__tvm_ffi_{name}" for name in sorted(REPLAY)]
    assert defined == [*replay, "__tvm_ffi_mix", "__tvm_ffi_pair"]
    dynamic = lines("readelf", "--dynamic", "--wide")
    needed = {line.split("[")[1].rstrip("]") for line in dynamic if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libtvm_ffi.so", "libdl.so.2", "libpthread.so.0"}


@pytest.mark.parametrize("source", RUNTIME_SOURCES)
def test_the_runtime_compiles_without_warnings(source, tmp_path):
    flags = [*CFLAGS, "-Werror", "-Wshadow", *INCLUDE]
    subprocess.run(["gcc", *flags, "-c", HOST_C / source, "-o", tmp_path / "x.o"], check=True)


def test_the_driver_is_as_the_runtime_says(tmp_path):
    """Sizes, offsets and numbers, and that every function exists, by the toolkit's own header."""
    nvcc = shutil.which("nvcc")
    roots = [Path(nvcc).resolve().parents[1]] if nvcc else []
    roots += sorted(Path("/usr/local").glob("cuda*"))
    headers = next((r / "include" for r in roots if (r / "include" / "cuda.h").is_file()), None)
    if headers is None:
        pytest.skip("the CUDA toolkit's cuda.h is not installed")
    source = Path(__file__).with_name("native_driver.c")
    include = [f"-I{headers}", f"-I{HOST_C}", *INCLUDE]
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    subprocess.run(["gcc", *flags, *include, str(source)], check=True)


def changed(**changes):
    made = tiny_cuda.code("pair", "sm_90a")
    return FunctionCode(**{**made.__dict__, **changes})


def kernel(**changes):
    made = tiny_cuda.code("pair", "sm_90a").kernels[0]
    return changed(kernels=(KernelCode(**{**made.__dict__, **changes}),))


BAD_CODE = {
    "twice": ([changed(), changed()], "pair for sm_90a is there twice"),
    "architecture": ([changed(arch="hopper")], "no architecture is spelled so"),
    "symbol": ([changed(host_c="int x;")], "does not define __tvm_ffi_pair__sm_90a; give the fu"),
    "look-up": ([kernel(name="other")], r"the host code calls \['pair_kernel'\], which the runt"),
    "half": ([kernel(params=("float16",))], "takes a float16 by value, which the runtime cannot"),
    "many": ([kernel(params=("int32",) * 257)], "has 257 parameters; 256 is the limit"),
    "launch": ([kernel(launch=("vthread.x",))], "has launch parameter 'vthread.x', which is none"),
    "function": ([], r"functions differ from the code's in \['pair'\]; list what is passed"),
    "archs": ([changed(), tiny_cuda.code("pair", "sm_100a")], r"archs differ .* \['sm_100a'\]"),
}


@pytest.mark.parametrize("case", BAD_CODE)
def test_code_that_does_not_fit(case, tmp_path):
    codes, sentence = BAD_CODE[case]
    with pytest.raises(ValueError, match=f"^write_cuda_library: .*{sentence}"):
        write_cuda_library(codes, manifest("pair", archs=("sm_90a",)), tmp_path / "l.so")
    assert not [*tmp_path.iterdir()]


def change_param(contents, name, **changes):
    for param in contents["functions"]["mix"]["params"]:
        if param["name"] == name:
            param.update(changes)


BAD_MANIFESTS = {
    "cpu": (lambda m: m["target"].update(kind="cpu"), ValueError, "is for target 'cpu'; pass one"),
    "archs": (lambda m: m["target"].pop("archs"), LibraryError, "has no target.archs"),
    "no archs": (lambda m: m["target"].update(archs=[]), LibraryError, "at least one architecture"),
    "align": (lambda m: change_param(m, "x", align=3), LibraryError, "align is 3, expected one of"),
    "alias": (
        lambda m: change_param(m, "out", alias="scale"),
        LibraryError,
        r"alias is 'scale', expected null, or an input of the same dtype and shape: \['x', 'res",
    ),
    "alias of an input": (
        lambda m: change_param(m, "x", alias="residual"),
        LibraryError,
        "there is none",
    ),
    "scalar": (
        lambda m: change_param(m, "a", dtype="float16"),
        LibraryError,
        "shape is None, expected a list: numbers by value are inputs of dtype float32, int32",
    ),
    "scalar output": (lambda m: change_param(m, "out", shape=None), LibraryError, "shape is None"),
    "default": (
        lambda m: change_param(m, "codes", default=1.0),
        ValueError,
        "codes is uint8 with default 1.0; the runtime has defaults of float32 and int32, and zero",
    ),
    "rank": (lambda m: change_param(m, "x", shape=["rows"] * 9), ValueError, "x has 9 dimensions"),
}


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_manifests_that_do_not_fit(case, tmp_path):
    change, error, sentence = BAD_MANIFESTS[case]
    contents = manifest()
    change(contents)
    codes = [tiny_cuda.code(name, arch) for name in ("mix", "pair") for arch in tiny_cuda.ARCHS]
    with pytest.raises(error, match=sentence):
        write_cuda_library(codes, contents, tmp_path / "l.so")


def test_host_code_that_does_not_compile(tmp_path):
    broken = changed(host_c="__tvm_ffi_pair__sm_90a( is no C")
    with pytest.raises(LinkError, match=r"'gcc' ended with status 1"):
        write_cuda_library([broken], manifest("pair", archs=("sm_90a",)), tmp_path / "l.so")


def test_what_libraries_share_is_compiled_once(monkeypatch, tmp_path):
    """The runtime and host code.  They are, byte for byte, those that compile it themselves."""
    compiled = []
    run = export_cuda.run
    monkeypatch.setattr(export_cuda, "run", lambda words: compiled.append(words) or run(words))
    code, contents = tiny_cuda.code("pair", "sm_90a"), manifest("pair", archs=("sm_90a",))
    other_code = replace(code, host_c=code.host_c.replace("int32_t", "/* other */ int32_t", 1))
    other_image = replace(code, image=code.image + b"\0")

    def made(code, kept):
        compiled.clear()
        path = write_cuda_library([code], contents, tmp_path / "l.so", runtime=kept)
        return len(compiled), path.read_bytes()

    kept, own, codes = tmp_path / "kept", len(RUNTIME_SOURCES), (code, other_image, other_code)
    alone = [made(each, None) for each in codes]
    assert [count for count, _ in alone] == [2 + own] * 3
    assert [made(each, kept)[0] for each in codes] == [2 + own, 1, 2]
    assert [made(each, kept) for each in codes] == [(1, library) for _, library in alone]


# With TVM's host code and nvcc ---------------------------------------------------------------


@T.prim_func(s_tir=True)
def axpy(x: T.handle, scale: T.handle, a: T.float32, y: T.handle, out: T.handle):
    """out = scale * x + a * y."""
    n = T.int64()
    X = T.match_buffer(x, (n, 64), "float32")
    S = T.match_buffer(scale, (1,), "float32")
    Y = T.match_buffer(y, (n, 64), "float32")
    O = T.match_buffer(out, (n, 64), "float32")  # noqa: E741
    for b in T.thread_binding(n, thread="blockIdx.x"):
        for t in T.thread_binding(64, thread="threadIdx.x"):
            with T.sblock("axpy"):
                i, j = T.axis.remap("SS", [b, t])
                O[i, j] = S[0] * X[i, j] + a * Y[i, j]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_what_tvm_makes(tmp_path):
    """TVM's host code and kernel: results, and the sizes that TVM's own checks compare."""
    from blockscale.lower.cuda import compile_cuda

    def param(name, shape=("rows", 64), **more):
        return {"name": name, "dtype": "float32", "shape": shape and [*shape], **more}

    params = [
        param("x"),
        param("scale", (1,), default=1.0),
        param("a", None, default=2.0),
        param("y"),
        param("out", output=True, alias="y"),
    ]
    contents = manifest("pair")
    contents["functions"] = {"axpy": {"base": "axpy", "params": params}}
    codes = [compile_cuda(axpy, "axpy", arch, ptx=True) for arch in tiny_cuda.ARCHS]
    path = write_cuda_library(codes, contents, tmp_path / "axpy.so")
    x, y = torch.randn(2, 3, 5, 64)
    for target in tiny_cuda.ARCHS:
        out = torch.empty(15, 64)
        run_module(path, "axpy", x, None, 0.5, y, out, target=target)
        assert torch.equal(out, (x + 0.5 * y).view(15, 64))
    want = 4 * x + 2 * y
    run_module(path, "axpy", x, torch.tensor([4.0]), None, y, None)
    assert torch.equal(y, want)
    with pytest.raises(ValueError, match=r"Mismatched O.shape\[0\] on argument #4"):
        run_module(path, "axpy", x, None, 0.5, y, torch.empty(14, 64))


def test_what_sizes_must_be_multiples_of():
    """So that every division in the shapes is exact; the library checks it."""
    texts = ("2 * cols", "cols * 3", "cols", "rows", "cols // 32", "ceil_to(cols // 2, 4)", 7)
    dims = [shapes.parse(text) for text in (*texts, "rows * cols // 16")]
    exact = shapes.divisors(dims)
    assert exact == {"cols": 32}
    assert [dim.multiple(exact) for dim in dims] == [64, 96, 32, 1, 1, 1, 1, 1]


def test_numbers_that_are_never_negative():
    """The library knows of eps and limit, which manifests do not say."""
    for name in ("eps", "limit"):
        assert "BS_NOT_NEGATIVE" in export_cuda._flags(Param(name, "float32", None, default=1.0))
    assert "NEGATIVE" not in export_cuda._flags(Param("alpha", "float32", None, default=1.0))
    assert "NEGATIVE" not in export_cuda._flags(Param("limit", "float32", (1,), default=1.0))
