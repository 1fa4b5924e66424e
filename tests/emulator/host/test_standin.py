"""The stand-in for the driver: who meets it, its prototypes, and host code that TVM prints.

The TVM library is made on the road of our exports: host code in C, a shim of ours, PTX.
"""

import re
import subprocess
import sys

import pytest
import torch

from blockscale.emulator.host import run_module, standin
from tests.emulator.host import gpu_library
from tests.emulator.host.gpu_library import vectors
from tests.emulator.kit import tools


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return gpu_library.build(tmp_path_factory.mktemp("library"))


def test_outside_of_run_module_there_is_no_device(library):
    """The stand-in answers only during a call."""
    run_module(library, "attribute", 1)
    assert standin._loaded(standin.OWN_SONAME).cuInit(0) == 100  # CUDA_ERROR_NO_DEVICE


LOOK_FOR_DRIVER = """
try:
    ctypes.CDLL("libcuda.so.1").blockscale_standin_answer
    print("stand-in")
except (OSError, AttributeError):
    print("not the stand-in")
"""
FROM_FILE = """
import ctypes, numpy, tvm_ffi
from blockscale.emulator.host import run_module
x = numpy.ones(4, "float32")
run_module("{library}", "scaled_add", x, x, x, 1.0, 32)
assert (x == 5.5).all()
"""
FROM_MODULE = """
module = tvm_ffi.load_module("{library}")
x = numpy.ones(4, "float32")
run_module(module, "scaled_add", x, x, x, 1.0, 32, target="sm_100a")
assert (x == 5.5).all()
"""


def test_who_meets_the_standin(library):
    """A file's copy alone does; a module that is loaded already needs the driver's own soname."""
    parts = (FROM_FILE, LOOK_FOR_DRIVER, FROM_MODULE, LOOK_FOR_DRIVER)
    program = "".join(parts).format(library=library)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["not the stand-in", "stand-in"]


STANDIN = standin.SOURCE


def prototypes_of_the_standin() -> dict[str, str]:
    """Return each function's parameters as letters."""
    text = STANDIN.read_text()
    found = {m[1]: m[2] for m in re.finditer(r"^F\d\((cu\w+)((?:, [PIUHBZ])*)\)", text, re.M)}
    found |= dict(re.findall(r"^F0\((cu\w+)()\)", text, re.M))
    for name, parameters in re.findall(r"^EXPORT int (cu\w+)\(([^)]*)\)", text, re.M):
        found[name] = "".join(word.split()[0] for word in parameters.split(","))
    return {name: re.sub("[, ]", "", letters) for name, letters in found.items()}


def test_prototypes_are_those_of_cuda_h():
    """Every function of the stand-in takes what cuda.h says: as many, and as wide."""
    text = (tools.include() / "cuda.h").read_text()
    renamed = dict(re.findall(r"#define (cu\w+)\s+(?:__CUDA_API_PT\w+\()?(cu\w+_v\d)\b", text))
    wide = {"size_t": "Z", "cuuint64_t": "Z", "CUdeviceptr": "P", "cuuint32_t": "U"}
    wide |= {"unsigned int": "U", "unsigned char": "B", "unsigned short": "H", "int": "I"}
    handles = {
        f"CU{k}" for k in ["context", "library", "kernel", "function", "module", "stream", "event"]
    }
    checked = 0
    for name, letters in prototypes_of_the_standin().items():
        plain = next((k for k, v in renamed.items() if v == name), name)
        match = re.search(rf"^CUresult CUDAAPI {plain}\(([^;]*?)\);", text, re.M)
        assert match, name
        want = ""
        for parameter in "".join(match[1].split("\n")).split(","):
            kind = re.sub(r"\b(const|struct)\b|\w+$", "", parameter.strip()).strip()
            if "*" in parameter or kind in handles:
                want += "P"
            elif parameter.strip() != "void":
                want += wide.get(kind, "I")  # CUdevice and enumerations
        if name == "cuGetProcAddress":  # the first version has no last parameter
            want = want[:-1]
        assert letters == want, name
        checked += 1
    assert checked > 80


@pytest.fixture(scope="module")
def tvm_library(tmp_path_factory):
    """Return what the export of a kernel by TVM looks like: host code in C, our shim, PTX."""
    tools.nvcc()
    from tests.emulator.host import tvm_export

    return tvm_export.export(tmp_path_factory.mktemp("tvm"), "sm_100a")


@pytest.mark.parametrize("size", [1, 128, 300])
def test_host_code_of_tvm(tvm_library, size):
    x, y, out = vectors(size)
    run = run_module(tvm_library, "axpy", x, y, out)
    assert torch.equal(out, x + 2 * y)
    assert run.launches[0].grid == (-(-size // 128), 1, 1)
    assert run.launches[0].block == (128, 1, 1)


def test_argument_checks_of_tvm(tvm_library):
    x, y, out = vectors()
    with pytest.raises(
        TypeError, match=r"Mismatched X.dtype on argument #0(?s:.*)expected float32"
    ):
        run_module(tvm_library, "axpy", x.double(), y, out)
    with pytest.raises(ValueError, match=r"Mismatched Y.shape\[0\] on argument #1"):
        run_module(tvm_library, "axpy", x, y[1:], out)
    with pytest.raises(TypeError, match="Expected 3 arguments"):
        run_module(tvm_library, "axpy", x, y)
