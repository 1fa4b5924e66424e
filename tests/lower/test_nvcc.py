"""The short forms of CUDA's headers in lower/native/nvcc: PTX is that of CUDA's own."""

import subprocess

import pytest

from blockscale.base import formats
from blockscale.base.errors import CompileError
from blockscale.building.builder import build
from blockscale.lower import nvcc

SM80, SM90, SM120 = "sm_80", "sm_90a", "sm_120a"


def sources_of(name: str, arch: str, tmp_path, monkeypatch) -> list[str]:
    """Return the CUDA sources of a function."""
    found, own = [], nvcc.compile_cuda_source

    def keep(source: str, *told: str, **options: bool) -> nvcc.Compiled:
        found.append(source)
        return own(source, *told, **options)

    with monkeypatch.context() as patch:
        patch.setattr(nvcc, "compile_cuda_source", keep)
        build([name], tmp_path / "x.so", level=arch, logs_dirs=[])
    return found


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("add_rmsnorm_nvfp4_h512_both_y_bf16", SM90),
        ("add_rmsnorm_mxfp4_h256_128x4_y_f16", SM80),
        ("silu_and_mul_nvfp4_128x4_bf16", SM120),
        ("quantize_mxfp4_f32", SM80),
        ("dequantize_nvfp4_128x4_f16", SM90),
        ("edgellm_down_h64_i64_silu_f16", SM90),
        ("moe_route_e8_k2_softmax_bf16", SM90),
    ],
)
def test_ptx_is_that_of_cudas_headers(name, arch, tmp_path, monkeypatch):
    """Conversions, comparisons, minima, shuffles, libdevice's functions and 64-bit atomics."""
    (tmp_path / "formats.h").write_text(formats.header())
    text, out = tmp_path / "kernel.cu", tmp_path / "kernel.ptx"
    virtual = arch.replace("sm", "compute")
    end = ["-ptx", "-gencode", f"arch={virtual},code={virtual}", str(text), "-o", str(out)]
    assert nvcc.INCLUDES[0].name == "nvcc"
    for source in sources_of(name, arch, tmp_path, monkeypatch):
        text.write_text(source)
        texts = []
        for includes in (nvcc.INCLUDES, nvcc.INCLUDES[1:]):
            folders = [f"-I{path}" for path in (*includes, tmp_path)]
            command = [str(nvcc.nvcc()), *nvcc.FLAGS, *folders, *end]
            subprocess.run(command, check=True, capture_output=True)
            texts.append(out.read_text())
        assert texts[0] == texts[1]


def test_a_function_that_is_not_there_is_an_error_of_the_compiler():
    source = 'extern "C" __global__ void k(float *x) { *x = cbrtf(*x); }'
    with pytest.raises(CompileError, match='"cbrtf" is undefined'):
        nvcc.compile_cuda_source(source, SM90)
