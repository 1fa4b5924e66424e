"""docs/cpp.md: its program is compiled with its command, and gives what Python gets."""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tvm_ffi

import blockscale as bs
from tests.kit.paths import ROOT
from tests.reference import core as ref

PAGE = ROOT / "docs" / "cpp.md"
if not PAGE.is_file():
    pytest.skip("no checkout around the tests, so no docs/", allow_module_level=True)
NAME = "linear_nvfp4_n384_k384_f32"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("cpp") / "kernels.so"
    return bs.build([NAME], path).path


def arguments():
    """Return the inputs that the program makes up."""
    x = (np.arange(3 * 384, dtype=np.float32) % 13 - 6).reshape(3, 384)
    packed = (np.arange(384 * 192) * 29 % 251).astype(np.uint8).reshape(384, 192)
    scale = (0x30 + np.arange(384 * 24) % 16).astype(np.uint8).reshape(384, 24)
    return x, packed, scale, np.array([0.25], np.float32), np.arange(384, dtype=np.float32)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")
def test_the_program_gives_what_python_gets(library, tmp_path):
    """Bit for bit, and the reference's numbers; 5 s: g++ compiles tvm_ffi's headers."""
    [program], [command] = blocks("cpp"), blocks("sh")
    (tmp_path / "call.cc").write_text(program)
    shutil.copy(library, tmp_path / "kernels.so")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environ = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    environ |= {"OMP_NUM_THREADS": "2"}
    script = f"set -e\n{command.replace('g++ ', 'g++ -Wall -Werror ', 1)}"
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    y = np.array(done.stdout.split(), np.float32).reshape(3, 384)
    x, packed, scale, global_scale, bias = arguments()
    assert np.array_equal(y, bs.load(library)[NAME](x, packed, scale, global_scale, bias))
    weight = ref.weight(ref.unpack(packed), scale, "nvfp4") * 0.25
    true = x.astype(np.float64) @ weight.T + bias
    error = np.linalg.norm(y - true, axis=1) / np.linalg.norm(true, axis=1)
    assert error.max() < 1e-6  # float32 sums of 384 terms


def test_the_signature_on_the_page(library):
    """The page shows what `inspect` prints: inputs, then outputs."""
    from blockscale.cli.common import signature

    params = bs.load(library).manifest["functions"][NAME]["params"]
    assert signature(params) in " ".join(blocks("text")[0].split())


def test_a_default_is_pythons_alone(library):
    """On a CPU, the code itself wants the value, in the words that the page has."""
    call = tvm_ffi.load_module(str(library))[NAME]
    x, packed, scale, _, bias = arguments()
    y = np.empty_like(x)
    tensors = [tvm_ffi.from_dlpack(each) for each in (x, packed, scale, bias, y)]
    with pytest.raises(TypeError, match="Mismatched type on argument #3"):
        call(*tensors[:3], None, *tensors[3:])
    assert "`Mismatched type on argument #3 ...`" in PAGE.read_text()
